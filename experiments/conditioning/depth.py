"""Deep linear networks at initialization, by depth and width, beside both bounds of Lemma 2.

With whitened inputs of full rank Sigma = I, whatever the data: only d, k and the weights matter.
"""

import dataclasses
import functools

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Pieces, runner
from jaxttp.conditioning import ConditionSweep, sweep
from jaxttp.plots import OTHER, PREDICTED, REAL, plot_draws, tidy

CLAIM = {
    "gnc-2a": "At a fixed width kappa grows quadratically with depth, wider is better, and the "
    "convex bound is tight. (GNC Figure 2 a)",
    "gnc-2b": "Width proportional to depth slows the growth; with a large enough factor kappa "
    "falls with depth. (GNC Figure 2 b)",
    "gnc-3": "The maximum bound is vacuous where the convex one is useful. (GNC Figure 3)",
}

COLORS = (PREDICTED, REAL, OTHER, "#CC79A7")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes.

    Attributes:
        inputs: d; Sigma = I.
        outputs: k.
        depths: numbers of weight matrices L.
        widths: m, of Figure 2 a.
        factors: m / L, of Figure 2 b.
        bound_width: m, of Figure 3.
        bound_depths: L, of Figure 3.
        seeds: draws, of Figure 2.
        bound_seeds: draws, of Figure 3.
        seed: of all draws.
    """

    inputs: int = 196
    outputs: int = 10
    depths: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8)
    widths: tuple[int, ...] = (250, 500, 1000)
    factors: tuple[int, ...] = (100, 150, 300)
    bound_width: int = 500
    bound_depths: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8)
    seeds: int = cuts.one(3)
    bound_seeds: int = cuts.one(20)
    seed: int = 0


PRESETS = {
    "smoke": Settings(
        inputs=16, outputs=3, depths=(2, 4), widths=(20,), factors=(10,), bound_width=20,
        bound_depths=(2, 4), bound_seeds=4,
    ),
    "cpu": Settings(),
    "paper": Settings(
        inputs=784, depths=(2, 3, 4, 5, 6, 7, 8, 9, 10), widths=(800, 1500, 3000),
        factors=(400, 800, 1500), bound_width=1500, bound_depths=(2, 3, 4, 5, 6, 7, 8, 9, 10),
    ),
}  # fmt: skip

Result = dict[str, ConditionSweep]


def pieces(settings: Settings) -> Pieces:
    """One sweep over depth for each curve."""
    key = jax.random.key(settings.seed)
    common = {"inputs": settings.inputs, "outputs": settings.outputs, "key": key}
    out: Pieces = {}
    for width in settings.widths:
        out[f"m = {width}"] = functools.partial(
            sweep, "depth", settings.depths, width=width, seeds=settings.seeds, **common
        )
    for factor in settings.factors:
        out[f"m = {factor} L"] = functools.partial(
            sweep, "depth", settings.depths, width=lambda depth, factor=factor: factor * depth,
            seeds=settings.seeds, **common,
        )  # fmt: skip
    out["bounds"] = functools.partial(
        sweep, "depth", settings.bound_depths, width=settings.bound_width,
        seeds=settings.bound_seeds, **common,
    )  # fmt: skip
    return out


run = runner(pieces, lambda settings, found: found)
"""Name of the curve -> `ConditionSweep`."""


def plot(result: Result) -> dict[str, Figure]:
    """The three pictures."""
    fixed = {name: one for name, one in result.items() if name != "bounds" and "L" not in name}
    scaled = {name: one for name, one in result.items() if "L" in name}
    first = Figure(figsize=(6.8, 4.6), layout="constrained")
    axes = first.subplots()
    for (name, one), color in zip(fixed.items(), COLORS, strict=False):
        plot_draws(axes, one.values, one.condition, label=f"κ, {name}", color=color)
        plot_draws(axes, one.values, one.bound, label=f"bound, {name}", color=color, style="--")
    axes.set(xlabel="depth L (weight matrices)", ylabel="condition number", ylim=(0, None))
    axes.legend(frameon=False, fontsize=9, ncols=2)
    tidy(axes)
    second = Figure(figsize=(10.5, 3.6), layout="constrained")
    panels = second.subplots(1, len(scaled), squeeze=False)[0]
    for panel, (name, one), color in zip(panels, scaled.items(), COLORS, strict=False):
        plot_draws(panel, one.values, one.condition, label="κ", color=color)
        plot_draws(panel, one.values, one.bound, label="convex bound", color=color, style="--")
        panel.set(title=name, xlabel="depth L", ylabel="condition number")
        panel.legend(frameon=False, fontsize=9)
        tidy(panel)
    third = result["bounds"].plot()
    return {"gnc-2a": first, "gnc-2b": second, "gnc-3": third}


def exponent(one: ConditionSweep) -> float:
    """The power p of kappa - 1 ~ L^p, by least squares on the logarithms of the means."""
    return float(np.polyfit(np.log(one.values), np.log(one.condition.mean(axis=1) - 1), 1)[0])


def measure(result: Result) -> dict[str, list[str]]:
    """Means and standard deviations, growth with depth, tightness."""
    lines: dict[str, list[str]] = {"gnc-2a": [], "gnc-2b": []}
    for name, one in result.items():
        if name == "bounds":
            continue
        ends = [
            f"L = {depth}: {row.mean():.3g} ± {row.std():.2g}, bound {bound.mean():.3g} "
            f"({np.mean(bound / row):.2g} times)"
            for depth, row, bound in zip(one.values, one.condition, one.bound, strict=True)
        ]
        line = f"{name}: {'; '.join(ends)}; κ - 1 ~ L^{exponent(one):.2f}"
        lines["gnc-2b" if "L" in name else "gnc-2a"].append(line)
    bounds = result["bounds"]
    assert bounds.maximum is not None
    lines["gnc-3"] = [
        f"L = {depth}: κ {k.mean():.3g}, convex/κ {np.mean(c / k):.3g}, maximum/κ "
        f"{np.median(m / k):.3g}; violations {int(np.sum(k > c * (1 + 1e-6)))}"
        for depth, k, c, m in zip(
            bounds.values, bounds.condition, bounds.bound, bounds.maximum, strict=True
        )
    ]
    return lines
