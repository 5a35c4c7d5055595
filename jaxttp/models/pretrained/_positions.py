"""Learned positions of images of one size, for images of another."""

import math

import jax
import numpy as np


def resample_positions(positions: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Positions (1, 1 + g², D) on a grid of another side; the class token's stays as it is.

    Args:
        positions: (1, 1 + g², D), of a file.
        shape: the model's, (1, 1 + h², D).

    Returns:
        Positions of the model's shape, by bicubic interpolation with antialiasing; those of the
        file where that is no square grid of the same width (the caller lists the shapes then).
    """
    if positions.ndim != 3 or positions.shape == shape or positions.shape[::2] != shape[::2]:
        return positions
    old, new = (math.isqrt(max(tokens - 1, 0)) for tokens in (positions.shape[1], shape[1]))
    if old < 1 or old**2 != positions.shape[1] - 1:
        return positions
    width = shape[2]
    positions = positions.astype(np.promote_types(positions.dtype, np.float32), copy=False)
    token, grid = positions[:, :1], positions[0, 1:].reshape(old, old, width)
    grid = np.asarray(jax.image.resize(grid, (new, new, width), "cubic", antialias=True))
    return np.concatenate([token, grid.reshape(1, new * new, width)], axis=1)
