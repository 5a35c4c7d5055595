"""Columns of one size."""

import numpy as np
from numpy.typing import ArrayLike


def moments(values: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of every column (N, D), in float64; a constant column's is 1."""
    x = np.asarray(values, np.float64)
    constant = x.max(axis=0) == x.min(axis=0)  # whose mean and deviation may be rounding
    return np.where(constant, x[0], x.mean(axis=0)), np.where(constant, 1.0, x.std(axis=0))


def standardized(values: ArrayLike) -> np.ndarray:
    """Mean 0 and deviation 1 in every column (N, D), in float64; constant columns become 0."""
    mean, deviation = moments(values)
    return (np.asarray(values, np.float64) - mean) / deviation
