"""Rotary positions: queries and keys turned by angles that grow with the position."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.checks import check_choice, check_number

KINDS = ("default", "linear", "llama3")


class Rotary(NamedTuple):
    """The angles of rotary positions.

    Attributes:
        frequencies: (d/2,) radians a position, of the pairs of a head of width d.
    """

    frequencies: tuple[float, ...]

    def tables(self, length: int, dtype: Any) -> tuple[Array, Array]:
        """Cosines and sines (T, d/2) of the first T positions, computed in float64."""
        angles = np.arange(length)[:, None] * np.asarray(self.frequencies)
        return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)


def read_rotary(config: Mapping[str, Any], width: int, length: int) -> Rotary:
    """The angles that a ``config.json`` of transformers asks for.

        ω_j = θ^(−2j/d),   j = 0 ... d/2 − 1

    "linear" divides all by a factor. "llama3" does so where a turn takes longer than the length of
    the pre-training, leaves those alone that turn more often, and interpolates between.

    Args:
        config: with ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` (from version 5).
        width: d, of a head.
        length: the longest sequence.

    Returns:
        The angles.

    Raises:
        ValueError: a kind that is not supported, numbers that are missing or out of range.

    Example:
        >>> read_rotary({"rope_theta": 100.0}, 4, 16).frequencies
        (1.0, 0.1)
    """
    if width % 2:
        raise ValueError(f"head_dim={width} must be even for rotary positions.")
    asked = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = asked.get("rope_theta", config.get("rope_theta", 10000.0))
    check_number("rope_theta", theta, above=0)
    kind = asked.get("rope_type", asked.get("type", "default"))
    check_choice("rope_type", kind, KINDS, remedy="Others change the angles with the length.")
    if asked.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor: heads that turn in part are not supported.")
    frequencies = theta ** -(np.arange(0, width, 2) / width)
    if kind == "linear":
        frequencies = frequencies / _number(asked, "factor")
    elif kind == "llama3":
        frequencies = _llama3(frequencies, asked, length)
    return Rotary(tuple(map(float, frequencies)))


def _llama3(frequencies: np.ndarray, asked: Mapping[str, Any], length: int) -> np.ndarray:
    factor, low, high = (
        _number(asked, name) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    turns = asked.get("original_max_position_embeddings", length) * frequencies / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - share) * frequencies / factor + share * frequencies


def _number(asked: Mapping[str, Any], name: str) -> float:
    if name not in asked:
        raise ValueError(f"rope_type={asked.get('rope_type', asked.get('type'))!r} needs {name}.")
    return check_number(name, asked[name], above=0)


def rotate(
    x: Float[Array, "n t *h d"], cosines: Float[Array, "n t e"], sines: Float[Array, "n t e"]
) -> Float[Array, "n t *h d"]:
    """Pairs (x_j, x_{j + d/2}) turned by the angles of their positions.

    Args:
        x: queries or keys (N, T, ..., d).
        cosines: (N, T, d/2).
        sines: (N, T, d/2).

    Returns:
        The same shape.

    Example:
        >>> x = jnp.array([[[[1.0, 0.0]]]])
        >>> rotate(x, jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1))).tolist()
        [[[[0.0, 1.0]]]]

    Source:
        Su et al. 2021, "RoFormer"; halves are paired as in GPT-NeoX and Llama.
    """
    first, second = jnp.split(x, 2, axis=-1)
    shape = (*cosines.shape[:2], *(1,) * (x.ndim - 3), cosines.shape[-1])
    cosines, sines = cosines.reshape(shape), sines.reshape(shape)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return jnp.concatenate(turned, axis=-1)
