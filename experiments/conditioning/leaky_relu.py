"""One hidden leaky-ReLU layer on whitened images: by width beside eq (11), by negative slope."""

import dataclasses
import functools

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments import cuts
from experiments.conditioning.inputs import load_inputs
from experiments.store import Store
from jaxttp.conditioning import ConditionSweep, sweep
from jaxttp.plots import OTHER, PREDICTED, REAL, plot_draws, tidy

CLAIM = {
    "gnc-6": "Unlike in the linear case κ grows with width; the bound (11) becomes tighter with "
    "width. (GNC Figure 6)",
    "gnc-23": "The smaller the slope α, the better the conditioning: ReLU improves on linear. "
    "(GNC Figure 23)",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Data and sizes.

    Attributes:
        data: images by name, whitened as a whole before samples are drawn.
        side: of the images.
        few: n < d.
        many: n > d.
        outputs: k.
        widths: m, of Figure 6 and (as curves) of Figure 23.
        curves: m, of Figure 23.
        alpha: of Figure 6.
        alphas: of Figure 23.
        seeds: draws.
        seed: of samples and draws.
    """

    data: str = "digits"
    side: int = 8
    few: int = cuts.few(8, 50)
    many: int = cuts.few(24, 120)
    outputs: int = 10
    widths: tuple[int, ...] = (60, 100, 200, 400, 800, 1600)
    curves: tuple[int, ...] = (200, 800)
    alpha: float = 0.01
    alphas: tuple[float, ...] = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
    seeds: int = cuts.one(3)
    seed: int = 0


PRESETS = {
    "smoke": Settings(side=4, few=10, many=30, outputs=3, widths=(20,), curves=(20,),
                      alphas=(0.0, 1.0), seeds=2),
    "cpu": Settings(),
    "paper": Settings(data="mnist", side=28, few=500, many=1500,
                      widths=(600, 1000, 2000, 3000, 4000), curves=(1000, 3000)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    """Sweeps.

    Attributes:
        rank: of the data, which d stands for where Sigma is singular.
        width: n -> over the width.
        slope: (n, m) -> over alpha.
    """

    rank: int
    width: dict[int, ConditionSweep]
    slope: dict[tuple[int, int], ConditionSweep]


def run(settings: Settings, store: Store | None = None) -> Result:
    """A sweep for each curve.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where the sweeps are kept.

    Returns:
        A `Result`.
    """
    store = store or Store()
    x = load_inputs(settings.data, side=settings.side, seed=settings.seed).x
    rank = int(np.linalg.matrix_rank(x))
    rows = np.random.default_rng(settings.seed).permutation(len(x))
    common = {
        "outputs": settings.outputs, "seeds": settings.seeds, "key": jax.random.key(settings.seed)
    }  # fmt: skip
    sizes = (settings.few, settings.many)
    pieces = {
        f"width, n = {n}": functools.partial(
            sweep, "width", settings.widths, alpha=settings.alpha, data=x[rows[:n]].T, **common
        )
        for n in sizes
    } | {
        f"slope, n = {n}, m = {width}": functools.partial(
            sweep, "alpha", settings.alphas, width=width, data=x[rows[:n]].T, **common
        )
        for n in sizes
        for width in settings.curves
    }
    found = store.all(pieces)
    return Result(
        rank,
        {n: found[f"width, n = {n}"] for n in sizes},
        {(n, m): found[f"slope, n = {n}, m = {m}"] for n in sizes for m in settings.curves},
    )


def plot(result: Result) -> dict[str, Figure]:
    """The two pictures."""
    few, many = result.width
    first = Figure(figsize=(6.8, 4.6), layout="constrained")
    axes = first.subplots()
    for (n, one), color in zip(result.width.items(), (PREDICTED, REAL), strict=True):
        plot_draws(axes, one.values, one.condition, label=f"κ, n = {n}", color=color)
        plot_draws(axes, one.values, one.bound, label=f"bound, n = {n}", color=color, style="--")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(title=f"rank of the data {result.rank}", xlabel="hidden width m",
             ylabel="condition number")  # fmt: skip
    axes.legend(frameon=False, fontsize=9)
    tidy(axes)
    second = Figure(figsize=(10.5, 4.2), layout="constrained")
    for panel, n in zip(second.subplots(1, 2), (few, many), strict=True):
        curves = [(m, one) for (size, m), one in result.slope.items() if size == n]
        for (m, one), color in zip(curves, (PREDICTED, REAL, OTHER), strict=False):
            plot_draws(panel, one.values, one.condition, label=f"κ, m = {m}", color=color)
        panel.set_yscale("log")
        relation = "<" if n < result.rank else ">"
        panel.set_title(f"n = {n} {relation} rank of the data {result.rank}")
        panel.set(xlabel="negative slope α (0 ReLU, 1 linear)", ylabel="condition number")
        panel.legend(frameon=False, fontsize=9)
        tidy(panel)
    return {"gnc-6": first, "gnc-23": second}


def measure(result: Result) -> dict[str, list[str]]:
    """Means along both sweeps, the looseness of the bound, violations."""
    rank = f"rank of the data {result.rank}"
    lines = {"gnc-6": [rank], "gnc-23": [rank]}
    for n, one in result.width.items():
        each = [
            f"m = {m}: κ {k.mean():.3g} ± {k.std():.2g}, bound/κ {np.median(b / k):.3g}"
            for m, k, b in zip(one.values, one.condition, one.bound, strict=True)
        ]
        broken = int(np.sum(one.condition > one.bound * (1 + 1e-6)))
        lines["gnc-6"].append(f"n = {n}: {'; '.join(each)}; violations {broken}")
    for (n, m), one in result.slope.items():
        each = [
            f"α = {a:g}: {k.mean():.3g}" for a, k in zip(one.values, one.condition, strict=True)
        ]
        lines["gnc-23"].append(f"n = {n}, m = {m}: {'; '.join(each)}")
    return lines
