"""Training RevMLPs by exact Gauss-Newton, Adam and SGD, as in the XGN paper."""
