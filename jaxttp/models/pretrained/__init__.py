"""Trained weights: the file format, and the checkpoint that ships with the library."""
