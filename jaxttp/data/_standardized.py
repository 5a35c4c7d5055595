"""Columns of one size."""

import numpy as np
from numpy.typing import ArrayLike


def standardized(values: ArrayLike) -> np.ndarray:
    """Mean 0 and deviation 1 in every column (N, D), in float64; constant columns become 0."""
    x = np.asarray(values, np.float64)
    constant = x.max(axis=0) == x.min(axis=0)  # whose deviation may be rounding
    spread = np.where(constant, 1.0, x.std(axis=0))
    return np.where(constant, 0.0, x - x.mean(axis=0)) / spread
