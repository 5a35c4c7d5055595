"""Curves of condition numbers and bounds at initialisation, over a parameter and over draws.

The weights are drawn here by their sizes, the data enter as a covariance or as samples.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.arrays import double
from jaxttp._core.checks import (
    check_choice,
    check_integer,
    check_integers,
    check_key,
    check_known,
    check_number,
    check_several,
)
from jaxttp._core.results import RESULT
from jaxttp.conditioning.initialization import asymptotic_bound
from jaxttp.conditioning.linear import batch_norm_scales
from jaxttp.conditioning.points import leaky_point, linear_point

PARAMETERS = ("depth", "width", "skip", "alpha")


class ConditionSweep(NamedTuple):
    """Condition numbers and bounds over a parameter and over draws of the weights.

    Attributes:
        parameter: its name.
        values: (V,).
        condition: kappa, (V, S) float64.
        bound: the convex bound or eq (11), (V, S); never below `condition` but for rounding.
        maximum: the maximum bound, (V, S); None for leaky ReLU.
    """

    parameter: str
    values: tuple
    condition: np.ndarray
    bound: np.ndarray
    maximum: np.ndarray | None

    plot, _repr_html_, __repr__ = RESULT


def gaussian_weights(widths: Sequence[int], *, key: Array, gain: float = 2.0) -> list[Array]:
    """W_l ~ N(0, gain / fan_in): Kaiming normal for gain 2, the paper's initialisation.

    Args:
        widths: (d, a_1, ..., a_{L-1}, k).
        key: a `jax.random.key`.
        gain: variance times fan-in; without skips kappa does not depend on it.

    Returns:
        [W_1 (a_1, d), ..., W_L (k, a_{L-1})] in float64.

    Raises:
        ValueError: fewer than two widths, a width below 1, a gain that is not positive.

    Example:
        >>> [w.shape for w in gaussian_weights((4, 5, 3), key=jax.random.key(0))]
        [(5, 4), (3, 5)]
    """
    widths = check_integers("widths", widths)
    if len(widths) < 2:
        raise ValueError(f"widths must be (d, ..., k), two at least; got {widths!r}.")
    check_number("gain", gain, above=0.0)
    check_key(key, optional=False)
    keys = jax.random.split(key, len(widths) - 1)
    with double():
        return [
            jax.random.normal(one, (rows, columns), jnp.float64) * (gain / columns) ** 0.5
            for one, columns, rows in zip(keys, widths[:-1], widths[1:], strict=True)
        ]


def sweep(
    parameter: str,
    values: Sequence[Any],
    *,
    inputs: int | None = None,
    outputs: int = 10,
    depth: int = 3,
    width: int | Callable[[int], int] = 100,
    skip: float | Callable[[int], float] = 0.0,
    alpha: float = 0.01,
    covariance: ArrayLike | None = None,
    data: ArrayLike | None = None,
    batch_norm: bool = False,
    seeds: int = 3,
    key: Array,
) -> ConditionSweep:
    """Kappa and its bound at Kaiming initialisation, as one parameter varies.

    "depth", "width" and "skip" are those of a deep linear network (residual where skip is not 0);
    "alpha" is the negative slope of one hidden leaky-ReLU layer on the samples `data`.

    Args:
        parameter: "depth", "width", "skip" or "alpha".
        values: what it takes: whole numbers, or numbers for "skip" and "alpha".
        inputs: d, where neither covariance nor data says it.
        outputs: k.
        depth: number of weight matrices L.
        width: of the hidden layers, or a function of the depth (``lambda depth: 10 * depth``).
        skip: beta, or a function of the depth (``lambda depth: depth**-0.5``).
        alpha: negative slope, for sweeps of the width with `data`.
        covariance: Sigma (d, d); the identity when None.
        data: samples (d, n), a sample a column; with it the network is leaky ReLU, one hidden
            layer.
        batch_norm: with frozen batch norm behind every hidden layer.
        seeds: draws of the weights at every value.
        key: a `jax.random.key`.

    Returns:
        A `ConditionSweep`.

    Raises:
        ValueError: an unknown parameter, no values, a parameter that does not fit the network,
            sizes below 1.

    Example:
        >>> found = sweep("depth", (2, 4), inputs=6, outputs=3, width=8, seeds=2,
        ...               key=jax.random.key(0))
        >>> found.condition.shape, bool(np.all(found.condition <= found.bound * (1 + 1e-9)))
        ((2, 2), True)

    Source:
        GNC Figures 2, 3, 5, 6, 7, 19-23.
    """
    check_choice("parameter", parameter, PARAMETERS)
    values = check_several("values", values, "numbers")
    if len(values) == 0:
        raise ValueError("values must hold at least one value.")
    check_number("alpha", alpha)
    check_key(key, optional=False)
    check_known(alpha=alpha, skip=skip, key=key)
    check_integer("outputs", outputs, at_least=1)
    check_integer("seeds", seeds, at_least=1)
    if (parameter == "alpha") and data is None:
        raise ValueError("parameter='alpha' needs data (d, n), the samples.")
    if data is not None and parameter in ("depth", "skip"):
        raise ValueError(
            f"parameter={parameter!r} is one of linear networks; give covariance, not data."
        )
    given = data if data is not None else covariance
    if given is not None:
        inputs = jnp.shape(given)[0]
    if inputs is None:
        raise ValueError("inputs: give d, a covariance or data.")
    check_integer("inputs", inputs, at_least=1)
    rows = []
    for place, value in enumerate(values):
        chosen = {"depth": depth, "width": width, "skip": skip, "alpha": alpha, parameter: value}
        layers = 2 if data is not None else check_integer("depth", chosen["depth"], at_least=1)
        hidden = chosen["width"](layers) if callable(chosen["width"]) else chosen["width"]
        beta = chosen["skip"](layers) if callable(chosen["skip"]) else chosen["skip"]
        widths = (inputs, *(check_integer("width", hidden, at_least=1),) * (layers - 1), outputs)
        for seed in range(seeds):
            # A draw depends on its number and its sizes alone: "skip" and "alpha" change nothing.
            share = place if parameter in ("depth", "width") else 0
            one = jax.random.fold_in(jax.random.fold_in(key, seed), share)
            weights = gaussian_weights(widths, key=one)
            if data is not None:
                point = leaky_point(weights[1], weights[0], data, chosen["alpha"])
                rows.append((float(point.condition.value), float(point.bound), np.nan))
                continue
            scales = batch_norm_scales(weights, covariance) if batch_norm else None
            line = linear_point(weights, covariance, skip=beta, scales=scales)
            rows.append((float(line.condition.value), float(line.convex), float(line.maximum)))
    table = np.array(rows).reshape(len(values), seeds, 3)
    return ConditionSweep(
        parameter,
        tuple(values),
        table[..., 0],
        table[..., 1],
        None if data is not None else table[..., 2],
    )


def width_prediction(
    d: int, k: int, widths: Sequence[int], *, gain: float = 2.0
) -> Float[np.ndarray, " v"]:
    """Eq (22) at Kaiming initialisation for several hidden widths, before any weight is drawn.

    Args:
        d: inputs.
        k: outputs.
        widths: hidden widths m, larger than d and k.
        gain: variance times fan-in.

    Returns:
        (V,), an estimate at finite widths.

    Raises:
        ValueError: a width that is not larger than d and k.

    Example:
        >>> width_prediction(25, 25, (100, 10_000)).round(3).tolist()
        [9.0, 1.222]

    Source:
        GNC eq (22).
    """
    d, k = (check_integer(name, size, at_least=1) for name, size in (("d", d), ("k", k)))
    check_known(gain=gain)
    check_number("gain", gain, above=0.0)
    widths = check_integers("widths", widths)
    return np.array(
        [float(asymptotic_bound(d, k, m, var_w=gain / m, var_v=gain / d)) for m in widths]
    )
