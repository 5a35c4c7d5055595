"""The scripts need PyTorch, which the suite does without."""

collect_ignore = ["make_goldens.py", "make_transformer_goldens.py"]
