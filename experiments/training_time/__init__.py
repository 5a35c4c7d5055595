"""The figures and tables of the training-time paper (TTP), one script each."""
