"""Linear networks with a skip connection over every layer, by depth and weight of the skip.

With whitened inputs of full rank Sigma = I: two data sets differ by d and k alone, so that a small
and a large d stand for the paper's MNIST and CIFAR-10. With Sigma = I and skips the gain of the
initialization matters; it is Kaiming's, N(0, 2 / fan-in), unless a setting says otherwise.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments import cuts
from experiments.store import Store
from jaxttp.conditioning import ConditionSweep, sweep
from jaxttp.plots import OTHER, PREDICTED, REAL, plot_draws, tidy

CLAIM = {
    "gnc-5": "Skips (β = 1) improve the conditioning at every depth. (GNC Figure 5)",
    "gnc-20": "The larger β, the smaller κ: β = 1 beats 1/√L, which beats 1/L; the bound holds. "
    "(GNC Figure 20)",
    "gnc-21": "Skips improve the conditioning also for the larger inputs (whitened CIFAR-10). "
    "(GNC Figure 21)",
    "gnc-22": "As Figure 20 for the larger inputs (whitened CIFAR-10). (GNC Figure 22)",
}

SKIPS: dict[str, float | Callable[[int], float]] = {
    "0": 0.0,
    "1/L": lambda depth: 1 / depth,
    "1/√L": lambda depth: 1 / math.sqrt(depth),
    "1": 1.0,
}
COLORS = {"0": "0.45", "1/L": OTHER, "1/√L": REAL, "1": PREDICTED}


@dataclasses.dataclass(frozen=True)
class Size:
    """A data set, of which only the sizes matter.

    Attributes:
        inputs: d; Sigma = I.
        width: m.
        depths: L.
        seeds: draws.
    """

    inputs: int
    width: int
    depths: tuple[int, ...]
    seeds: int = cuts.one()


@dataclasses.dataclass(frozen=True)
class Settings:
    """Two sizes.

    Attributes:
        small: in the place of MNIST.
        large: in the place of CIFAR-10.
        outputs: k.
        seed: of all draws.
    """

    small: Size = Size(196, 500, (2, 3, 4, 5, 6, 8), 20)
    large: Size = Size(512, 700, (2, 3, 4, 6), 3)
    outputs: int = 10
    seed: int = 0


PRESETS = {
    "smoke": Settings(small=Size(12, 20, (2,), 2), large=Size(16, 20, (2,), 2), outputs=3),
    "cpu": Settings(),
    "paper": Settings(
        small=Size(784, 1500, (2, 3, 4, 5, 6, 7, 8, 9, 10), 20),
        large=Size(3072, 3100, (2, 3, 4, 5, 6, 7, 8, 9, 10), 3),
    ),
}  # fmt: skip

Result = dict[str, dict[str, ConditionSweep]]


def run(settings: Settings, store: Store | None = None) -> Result:
    """One sweep over depth for each size and skip.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where the sweeps are kept.

    Returns:
        "d = ..." -> skip -> `ConditionSweep`.
    """
    store = store or Store()
    pieces = {
        f"d = {size.inputs}/{name}": functools.partial(
            sweep, "depth", size.depths, inputs=size.inputs, outputs=settings.outputs,
            width=size.width, skip=skip, seeds=size.seeds, key=jax.random.key(settings.seed),
        )
        for size in (settings.small, settings.large)
        for name, skip in SKIPS.items()
    }  # fmt: skip
    out: Result = {}
    for name, found in store.all(pieces).items():
        size, skip = name.split("/", 1)
        out.setdefault(size, {})[skip] = found
    return out


def _draw(
    axes: Axes, curves: dict[str, ConditionSweep], names: tuple[str, ...], title: str
) -> None:
    for name in names:
        one = curves[name]
        label = "no skip" if name == "0" else f"β = {name}"
        plot_draws(axes, one.values, one.condition, label=f"κ, {label}", color=COLORS[name])
        middle = np.median(one.bound, axis=1)
        axes.plot(one.values, middle, "--", color=COLORS[name], label=f"bound, {label}")
    axes.set(title=title, xlabel="depth L (weight matrices)", ylabel="condition number")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8, ncols=2)
    tidy(axes)


def plot(result: Result) -> dict[str, Figure]:
    """The four pictures."""
    both = Figure(figsize=(10.5, 4.2), layout="constrained")
    for axes, (size, curves) in zip(both.subplots(1, 2), result.items(), strict=True):
        _draw(axes, curves, ("0", "1"), size)
    out = {"gnc-5": both}
    (small, few), (large, many) = result.items()
    for picture, size, curves, names in (
        ("gnc-20", small, few, ("1/L", "1/√L", "1")),
        ("gnc-21", large, many, ("0", "1")),
        ("gnc-22", large, many, ("1/L", "1/√L", "1")),
    ):
        out[picture] = Figure(figsize=(6.8, 4.6), layout="constrained")
        _draw(out[picture].subplots(), curves, names, size)
    return out


def _lines(curves: dict[str, ConditionSweep], names: tuple[str, ...]) -> list[str]:
    lines = []
    for name in names:
        one = curves[name]
        each = [
            f"L = {depth}: {row.mean():.3g} ± {row.std():.2g}"
            for depth, row in zip(one.values, one.condition, strict=True)
        ]
        ratio = np.mean(one.bound / one.condition)
        broken = int(np.sum(one.condition > one.bound * (1 + 1e-6)))
        lines.append(f"β = {name}: {'; '.join(each)}; bound/κ {ratio:.3g}, violations {broken}")
        gain = 1 - np.mean(one.condition, axis=1) / np.mean(curves["0"].condition, axis=1)
        deep = gain[np.array(one.values) >= 4]
        if name != "0" and deep.size:
            lines[-1] += f"; from L = 4 on κ falls by {deep.min():.0%} to {deep.max():.0%}"
    return lines


def measure(result: Result) -> dict[str, list[str]]:
    """Means and standard deviations by depth, and draws in which the skip made it worse."""
    (small, few), (large, many) = result.items()
    worse = {
        size: int(np.sum(curves["1"].condition > curves["0"].condition))
        for size, curves in result.items()
    }
    total = {size: curves["1"].condition.size for size, curves in result.items()}
    verdict = {s: f"{s}: the skip made κ larger in {worse[s]} of {total[s]} draws" for s in result}
    return {
        "gnc-5": [verdict[small], *_lines(few, ("0", "1")), verdict[large]],
        "gnc-20": _lines(few, ("1/L", "1/√L", "1")),
        "gnc-21": [verdict[large], *_lines(many, ("0", "1"))],
        "gnc-22": _lines(many, ("1/L", "1/√L", "1")),
    }
