"""The script needs PyTorch, which the suite does without."""

collect_ignore = ["make_goldens.py"]
