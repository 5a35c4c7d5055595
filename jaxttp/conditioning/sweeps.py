"""The data of the paper's figures: condition numbers of networks with their bounds, and curves.

A point is the condition number of one network with its bounds. `sweep` draws weights of given sizes
and varies a parameter; data enter as a covariance or as samples.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.arrays import double
from jaxttp._core.checks import (
    check_choice,
    check_instance,
    check_integer,
    check_integers,
    check_key,
    check_known,
    check_number,
    check_several,
)
from jaxttp._core.results import RESULT
from jaxttp._core.xla_cpu.threads import after
from jaxttp.conditioning.bounds import extreme_singular_values, linear_bound, ratio
from jaxttp.conditioning.condition_number import ConditionNumber, condition_number
from jaxttp.conditioning.leaky_relu import leaky_relu_bound, leaky_relu_gram
from jaxttp.conditioning.linear import (
    batch_norm_scales,
    check_scales,
    check_weights,
    gauss_newton_linear_operator,
    partial_products,
)


class LinearPoint(NamedTuple):
    """The condition number of a deep linear network and its bounds.

    Attributes:
        condition: kappa(G^_O).
        convex: the convex bound.
        maximum: the maximum bound.
        terms: kappa^2(S_l) kappa^2(P_l), (L,).
        weights: gamma_l, (L,).
    """

    condition: ConditionNumber
    convex: Array
    maximum: Array
    terms: Array
    weights: Array

    plot, _repr_html_, __repr__ = RESULT


class LayerSpectra(NamedTuple):
    """Condition numbers and smallest singular values of the partial products, all (L,).

    Attributes:
        outer_condition: kappa^2(S_l), S_l = W_L ... W_{l+1}; 1 for l = L.
        outer_smallest: sigma_min^2(S_l).
        inner_condition: kappa^2(P_l), P_l = W_{l-1} ... W_1; 1 for l = 1.
        inner_smallest: sigma_min^2(P_l).
    """

    outer_condition: Array
    outer_smallest: Array
    inner_condition: Array
    inner_smallest: Array

    plot, _repr_html_, __repr__ = RESULT


class RankSensitivity(NamedTuple):
    """The condition number as a function of the assumed rank.

    Attributes:
        ranks: (R,).
        values: kappa for that number of non-zero eigenvalues, (R,).
        rank: the counted rank.
    """

    ranks: np.ndarray
    values: np.ndarray
    rank: int

    plot, _repr_html_, __repr__ = RESULT


def linear_point(
    weights: Any, covariance: ArrayLike | None = None, *, skip: Any = 0.0, scales: Any = None
) -> LinearPoint:
    """Kappa of a deep linear or residual network with its bounds.

    Args:
        weights: [W_1 (a1, d), ..., W_L (k, a)].
        covariance: Sigma (d, d); the identity when None.
        skip: beta of W_l + beta I.
        scales: fixed factors behind the hidden layers, as of a frozen batch norm.

    Returns:
        A `LinearPoint`.

    Raises:
        ValueError: as `gauss_newton_linear_operator`.

    Example:
        >>> point = linear_point([np.diag([1.0, 2.0]), np.diag([1.0, 3.0])])
        >>> float(point.condition.value), float(point.convex), float(point.maximum)
        (6.5, 6.5, 9.0)

    Source:
        GNC Figures 2, 3, 5, 7, 12, 19-22.
    """
    operator = gauss_newton_linear_operator(weights, covariance, skip=skip, scales=scales)
    bounds = linear_bound(weights, covariance, skip=skip, scales=scales)
    operator = jax.tree.map(lambda leaf: after(leaf, bounds.convex), operator)
    return LinearPoint(
        condition_number(operator), bounds.convex, bounds.maximum, bounds.terms, bounds.weights
    )


def layer_spectra(weights: Any, *, scales: Any = None) -> LayerSpectra:
    """Why the convex bound is tight where the maximum is not: bad layers get small weights.

    Args:
        weights: [W_1 (a1, d), ..., W_L (k, a)].
        scales: fixed factors behind the hidden layers.

    Returns:
        A `LayerSpectra`; +inf and 0 where a product is too narrow.

    Raises:
        ValueError: shapes that do not chain.

    Example:
        >>> layer_spectra([np.diag([1.0, 2.0]), np.diag([1.0, 3.0])]).outer_condition.tolist()
        [9.0, 1.0]

    Source:
        GNC Figure 11.
    """
    with double():
        chain = check_weights(weights)
        factors = check_scales(scales, chain)
        rows, done = [], []
        sizes = chain[-1].shape[0], chain[0].shape[1]
        for parts, count in zip(partial_products(chain, factors), sizes, strict=True):
            ends = []
            for part in parts:
                ends.append(extreme_singular_values(after(part, *done), count))
                done.append(ends[-1][0])
            rows.append(jnp.stack([ratio(high, low) ** 2 for high, low in ends]))
            rows.append(jnp.stack([low**2 for _, low in ends]))
        return LayerSpectra(*rows)


def rank_sensitivity(result: ConditionNumber, *, fraction: float = 1.0) -> RankSensitivity:
    """The condition number at every rank near the counted one.

    Args:
        result: of `condition_number`, with all eigenvalues (kind "dense").
        fraction: of all ranks, around the counted one; 1 for all.

    Returns:
        A `RankSensitivity`.

    Raises:
        ValueError: a result without eigenvalues, a fraction outside (0, 1].

    Example:
        >>> found = condition_number(np.diag([8.0, 2.0, 0.0]))
        >>> rank_sensitivity(found).values.tolist()
        [1.0, 4.0, inf]

    Source:
        GNC Appendix C, Figure 9.
    """
    check_instance("result", result, ConditionNumber, "condition_number")
    check_known(result=result, fraction=fraction)
    check_number("fraction", fraction, above=0.0)
    if fraction > 1:
        raise ValueError(f"fraction must be at most 1; got {fraction!r}.")
    if result.eigenvalues is None or result.rank is None:
        raise ValueError(
            f"a {result.kind!r} result has its extreme eigenvalues only; give the dense matrix, "
            "with condition_number(matrix, spectrum=True)."
        )
    eigenvalues = np.asarray(result.eigenvalues)
    if eigenvalues.ndim != 1:
        raise ValueError("result must be one condition number, not a batch.")
    size, rank = len(eigenvalues), int(result.rank)
    half = max(1, round(fraction * size))
    ranks = np.arange(max(1, rank - half), min(size, rank + half) + 1)
    largest, smallest = eigenvalues[0], eigenvalues[ranks - 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(smallest > 0, largest / smallest, np.inf if largest > 0 else np.nan)
    return RankSensitivity(ranks, values, rank)


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
    """W_l ~ N(0, gain / fan_in): Kaiming normal for gain 2, the paper's initialization.

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
            jax.random.normal(layer_key, (rows, columns), jnp.float64) * (gain / columns) ** 0.5
            for layer_key, columns, rows in zip(keys, widths[:-1], widths[1:], strict=True)
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
    """Kappa and its bound at Kaiming initialization, as one parameter varies.

    "depth", "width" and "skip" are those of a deep linear network (residual where skip is not 0);
    "alpha" is the negative slope of one hidden leaky-ReLU layer on the samples `data`.

    Args:
        parameter: "depth", "width", "skip" or "alpha".
        values: of the parameter: whole numbers, or numbers for "skip" and "alpha".
        inputs: d, where neither covariance nor data sets it.
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
    check_choice("parameter", parameter, ("depth", "width", "skip", "alpha"))
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
    inputs_data = data if data is not None else covariance
    if inputs_data is not None:
        inputs = jnp.shape(inputs_data)[0]
    if inputs is None:
        raise ValueError("inputs: give d, a covariance or data.")
    check_integer("inputs", inputs, at_least=1)
    rows = []
    for index, value in enumerate(values):
        setting = {"depth": depth, "width": width, "skip": skip, "alpha": alpha, parameter: value}
        layers = 2 if data is not None else check_integer("depth", setting["depth"], at_least=1)
        hidden = setting["width"](layers) if callable(setting["width"]) else setting["width"]
        beta = setting["skip"](layers) if callable(setting["skip"]) else setting["skip"]
        widths = (inputs, *(check_integer("width", hidden, at_least=1),) * (layers - 1), outputs)
        for seed in range(seeds):
            # A draw depends on the seed and the sizes alone, not on "skip" and "alpha".
            draw = index if parameter in ("depth", "width") else 0
            draw_key = jax.random.fold_in(jax.random.fold_in(key, seed), draw)
            weights = gaussian_weights(widths, key=draw_key)
            if data is not None:
                layer = (weights[1], weights[0], data, setting["alpha"])
                exact = condition_number(leaky_relu_gram(*layer)).value
                rows.append((float(exact), float(leaky_relu_bound(*layer)), np.nan))
                continue
            scales = batch_norm_scales(weights, covariance) if batch_norm else None
            point = linear_point(weights, covariance, skip=beta, scales=scales)
            # A lower bound on the condition number is not a point of its curve.
            exact = np.nan if point.condition.is_lower_bound else float(point.condition.value)
            rows.append((exact, float(point.convex), float(point.maximum)))
    exact, bound, maximum = np.array(rows).reshape(len(values), seeds, 3).transpose(2, 0, 1)
    return ConditionSweep(parameter, values, exact, bound, None if data is not None else maximum)
