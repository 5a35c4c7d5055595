"""Why the convex bound is tight where the maximum bound is not: bad layers get small weights."""

import dataclasses
import functools

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Pieces, runner
from jaxttp.conditioning import gaussian_weights, layer_spectra, linear_point
from jaxttp.plots import plot_draws, tidy

CLAIM = {
    "gnc-11": "κ²(W^{l-1:1}) grows exponentially with l while σ²min falls exponentially; "
    "W^{L:l+1} mirrors it. (GNC Figure 11)",
    "gnc-12": "Weighted by γ_l the terms of Lemma 2 balance themselves: large condition numbers "
    "count little. (GNC Figure 12)",
}

SHADES = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes.

    Attributes:
        inputs: d; Sigma = I.
        outputs: k.
        width: m.
        depths: L, a curve each.
        seeds: draws.
        seed: of all draws.
    """

    inputs: int = 196
    outputs: int = 10
    width: int = 300
    depths: tuple[int, ...] = (3, 5, 7, 9)
    seeds: int = cuts.one(3)
    seed: int = 0


PRESETS = {
    "smoke": Settings(inputs=12, outputs=3, width=20, depths=(4,), seeds=2),
    "cpu": Settings(),
    "paper": Settings(seeds=10),
}


@dataclasses.dataclass(frozen=True)
class Layers:
    """One depth; all (L, S), a draw a column.

    Attributes:
        inner_condition: kappa^2(W^{l-1:1}).
        inner_smallest: its smallest singular value squared.
        outer_condition: kappa^2(W^{L:l+1}).
        outer_smallest: its smallest singular value squared.
        terms: their product, the terms of Lemma 2.
        weights: gamma_l.
        condition: kappa, (S,).
    """

    inner_condition: np.ndarray
    inner_smallest: np.ndarray
    outer_condition: np.ndarray
    outer_smallest: np.ndarray
    terms: np.ndarray
    weights: np.ndarray
    condition: np.ndarray


def pieces(settings: Settings) -> Pieces:
    """Spectra of the partial products for each depth."""

    def one(depth: int) -> Layers:
        widths = (settings.inputs, *(settings.width,) * (depth - 1), settings.outputs)
        rows = []
        for seed in range(settings.seeds):
            key = jax.random.fold_in(jax.random.key(settings.seed), seed)
            weights = gaussian_weights(widths, key=key)
            spectra, point = layer_spectra(weights), linear_point(weights)
            rows.append((*spectra, point.terms, point.weights, point.condition.value))
        outer, outer_small, inner, inner_small, terms, fractions, kappa = (
            np.stack([np.asarray(part) for part in column], axis=-1)
            for column in zip(*rows, strict=True)
        )
        return Layers(inner, inner_small, outer, outer_small, terms, fractions, kappa)

    return {f"L = {depth}": functools.partial(one, depth) for depth in settings.depths}


run = runner(
    pieces, lambda settings, found: dict(zip(settings.depths, found.values(), strict=True))
)
"""Depth -> `Layers`."""


def plot(result: dict[int, Layers]) -> dict[str, Figure]:
    """The two pictures."""
    first = Figure(figsize=(9.6, 6.4), layout="constrained")
    panels = first.subplots(2, 2).ravel()
    second = Figure(figsize=(9.6, 3.8), layout="constrained")
    others = second.subplots(1, 2)
    for (depth, one), color in zip(result.items(), SHADES, strict=False):
        x, label = np.arange(1, depth + 1), f"L = {depth}"
        for axes, table in zip(
            panels,
            (one.inner_condition, one.outer_condition, one.inner_smallest, one.outer_smallest),
            strict=True,
        ):
            plot_draws(axes, x, table, label=label, color=color)
        plot_draws(others[0], x, one.terms, label=label, color=color)
        plot_draws(others[1], x, one.terms * one.weights, label=label, color=color)
    inner, outer = "(W^{l-1:1})", "(W^{L:l+1})"
    condition, smallest, product = (
        r"\kappa^2",
        r"\sigma^2_\min",
        rf"\kappa^2{outer}\,\kappa^2{inner}",
    )
    names = (condition + inner, condition + outer, smallest + inner, smallest + outer)
    product = rf"\kappa^2{outer}\,\kappa^2{inner}"
    more = (product, rf"\gamma_l\,{product}")
    for axes, name in zip((*panels, *others), (*names, *more), strict=True):
        axes.set_yscale("log")
        axes.set(ylabel=f"${name}$", xlabel="layer l")
        axes.legend(frameon=False, fontsize=8)
        tidy(axes)
    return {"gnc-11": first, "gnc-12": second}


def measure(result: dict[int, Layers]) -> dict[str, list[str]]:
    """Growth a layer, and the spread of the terms before and after weighting."""
    growth, spread = [], []
    for depth, one in result.items():
        inner = np.median(one.inner_condition[1:], axis=1)
        small = np.median(one.inner_smallest[1:], axis=1)
        steps = len(inner) - 1
        if steps > 0:
            growth.append(
                f"L = {depth}: from l = 2 to {depth} κ²(W^(l-1:1)) grows by "
                f"{(inner[-1] / inner[0]) ** (1 / steps):.3g} a layer, σ²min changes by "
                f"{(small[-1] / small[0]) ** (1 / steps):.3g} a layer"
            )
        terms = np.median(one.terms, axis=1)
        weighted = np.median(one.terms * one.weights, axis=1)
        spread.append(
            f"L = {depth}: terms from {terms.min():.3g} to {terms.max():.3g}, weighted from "
            f"{weighted.min():.3g} to {weighted.max():.3g}; κ {one.condition.mean():.3g}"
        )
    return {"gnc-11": growth, "gnc-12": spread}
