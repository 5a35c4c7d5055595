"""CPU seconds of a Gauss-Newton step beside Adam's, by the number of samples."""

import dataclasses
import functools

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from experiments import cuts
from experiments.bench.gauss_newton import step_costs
from experiments.gauss_newton.variants import COLORS
from experiments.store import Store
from jaxttp.plots import tidy

CLAIM = {
    "ours-gn-cost": "An exact Gauss-Newton step costs a few steps of Adam; by a singular value "
    "decomposition, as in the published implementation, many. (ours)"
}
LABELS = {
    "adam": "Adam",
    "exact (cholesky)": "exact, Cholesky",
    "truncate (eigh)": "truncated, eigenvectors",
    "truncate (svd)": "truncated, SVD",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the networks; float32, Gaussian inputs.

    Attributes:
        samples: n, the batches.
        half: d/2.
        width: m.
        blocks: L.
        repeats: timed steps.
        seed: of weights and inputs, the same for all.
    """

    samples: tuple[int, ...] = cuts.few(32, (128, 256, 512, 1024))
    half: int = 392
    width: int = 2000
    blocks: int = 2
    repeats: int = cuts.one(5)
    seed: int = 0


PRESETS = {
    "smoke": Settings((8,), half=8, width=32, blocks=1, repeats=2),
    "cpu": Settings((64, 128, 256, 512), half=196, width=1024, repeats=3),
    "paper": Settings((1024,), half=1536, width=8000, blocks=6),
}


def run(settings: Settings, store: Store | None = None) -> dict[int, dict[str, float]]:
    """Time the steps.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where the seconds are kept.

    Returns:
        n -> way -> median CPU seconds of a step.
    """
    store = store or Store()
    pieces = {
        f"{n} samples": functools.partial(
            step_costs, n, settings.half, settings.width, settings.blocks, True, settings.repeats
        )
        for n in settings.samples
    }
    found = store.all(pieces)
    return {n: found[f"{n} samples"] for n in settings.samples}


def plot(result: dict[int, dict[str, float]]) -> dict[str, Figure]:
    """Seconds, and how many steps of Adam they are."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = np.array(list(result))
    adam = np.array([result[n]["adam"] for n in sizes])
    for (way, label), color in zip(LABELS.items(), COLORS, strict=False):
        seconds = np.array([result[n][way] for n in sizes])
        left.loglog(sizes, seconds, "o-", color=color, label=label)
        if way != "adam":
            right.loglog(sizes, seconds / adam, "o-", color=color)
    left.set(xlabel="samples n", ylabel="CPU seconds of a step")
    right.set(xlabel="samples n", ylabel="steps of Adam")
    left.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        axes.set_xticks(sizes, map(str, sizes), minor=False)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        tidy(axes)
    return {"ours-gn-cost": figure}


def measure(result: dict[int, dict[str, float]]) -> dict[str, list[str]]:
    """Seconds and ratios."""
    lines = []
    for n, found in result.items():
        parts = [
            f"{label} {found[way]:.3g} s ({found[way] / found['adam']:.2f} x Adam)"
            for way, label in LABELS.items()
        ]
        lines.append(f"n = {n}: " + ", ".join(parts))
    return {"ours-gn-cost": lines}
