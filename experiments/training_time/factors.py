"""Figure 6: errors by learning rate, batch size and number of samples, with 95 % intervals.

On embedded data a "data set" is a task: digit splits, tables, image patches.
"""

import dataclasses
import functools

import numpy as np
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Store
from experiments.training_time.comparison import (
    COLORS,
    PAPER_TASKS,
    Pair,
    Source,
    Way,
    compare,
    name_of,
)
from jaxttp.plots import MARKERS, tidy

CLAIM = {
    "ttp-6": "Errors grow with the learning rate (GD), slightly with smaller batches and slightly "
    "with more samples (SGD). (TTP Figure 6)",
}
PANELS = ("rate", "batch", "samples")
WORDS = {
    "rate": "effective learning rate", "batch": "batch size", "samples": "samples"
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """Tasks, and what is varied.

    Attributes:
        tasks: names or pipeline settings.
        seeds: of samples, weights and batches.
        rates: of GD.
        batches: of SGD.
        samples: of SGD.
        rate: learning rate of SGD.
        batch_size: where the samples vary.
        relative: whether rates are in units of N / lambda_max.
        steps: T.
        paths: of the SDE.
    """

    tasks: tuple[Source, ...] = ("wine, MLP", "patches, MLP")
    seeds: tuple[int, ...] = cuts.one((0, 1))
    rates: tuple[float, ...] = cuts.first((0.1, 0.5, 2.0))
    batches: tuple[int, ...] = (8, 32)
    samples: tuple[int, ...] = cuts.few(32, (30, 120))
    rate: float = 0.5
    batch_size: int = cuts.few(4, 16)
    relative: bool = True
    steps: int = cuts.one(150)
    paths: int = cuts.one(8)


PRESETS = {
    "smoke": Settings(
        tasks=("wine, MLP",), seeds=(0,), rates=(0.5,), batches=(32,), samples=(120,), steps=10,
        paths=2,
    ),
    "cpu": Settings(),
    "paper": Settings(
        tasks=tuple(dataclasses.replace(task, samples_per_class=25) for task in PAPER_TASKS),
        seeds=(0, 1, 2, 3, 4), rates=(0.0001, 0.001, 0.005), batches=(16, 32, 64),
        samples=(10, 50, 125), rate=0.001, batch_size=10, relative=False,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        settings: how.
        pairs: (panel, value of what is varied) -> runs.
    """

    settings: Settings
    pairs: dict[tuple[str, float], list[Pair]]


def run(settings: Settings, store: Store | None = None) -> Result:
    """Forecast and train with one thing varied at a time.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where the pairs are kept.

    Returns:
        A `Result`.
    """
    store = store or Store()
    rate, relative = settings.rate, settings.relative
    ways = [Way(value, relative=relative) for value in settings.rates]
    ways += [Way(rate, batch, relative=relative) for batch in settings.batches]
    few = (Way(rate, settings.batch_size, relative=relative),)
    pieces = {}
    for task in settings.tasks:
        for seed in settings.seeds:
            one = functools.partial(compare, task, seed, steps=settings.steps, paths=settings.paths)
            pieces[f"{name_of(task)}/{seed}"] = functools.partial(one, ways=ways)
            for samples in settings.samples:
                pieces[f"{name_of(task)}/{seed}/{samples}"] = functools.partial(
                    one, ways=few, samples=samples
                )
    out: dict[tuple[str, float], list[Pair]] = {}
    for name, pairs in store.all(pieces).items():
        for i, pair in enumerate(pairs):
            if name.count("/") == 2:
                at = ("samples", int(name.split("/")[2]))
            elif i < len(settings.rates):
                at = ("rate", settings.rates[i])
            else:
                at = ("batch", settings.batches[i - len(settings.rates)])
            out.setdefault(at, []).append(pair)
    return Result(settings, out)


def _errors(pairs: list[Pair], task: str | None = None) -> np.ndarray:
    """Absolute errors in steps, all thresholds, of the runs that did not diverge."""
    off = []
    for pair in pairs:
        if pair.finite and task in (None, pair.task):
            predicted, real = pair.times()
            off.append(np.abs(predicted - real))
    return np.array(off, float).ravel()


def _interval(values: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Mean, and a 95 % interval of it by resampling."""
    if not len(values):
        return float("nan"), float("nan"), float("nan")
    draws = np.random.default_rng(seed).choice(values, (2000, len(values))).mean(axis=1)
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def plot(result: Result) -> dict[str, Figure]:
    """Three panels."""
    figure = Figure(figsize=(13, 4.1), layout="constrained")
    settings = result.settings
    for axes, panel in zip(figure.subplots(1, 3), PANELS, strict=True):
        values = [value for name, value in result.pairs if name == panel]
        values = sorted(set(values))
        for j, (task, color, marker) in enumerate(
            zip((*map(name_of, settings.tasks), None), COLORS, MARKERS, strict=False)
        ):
            cells = [_interval(_errors(result.pairs[panel, v], task)) for v in values]
            mean, low, high = np.array(cells).T
            at = np.arange(len(values)) + 0.08 * (j - len(settings.tasks) / 2)
            bars = np.abs(np.stack([mean - low, high - mean]))
            label = task or "all tasks"
            axes.errorbar(at, mean, bars, fmt=marker + "-", color=color, capsize=3, label=label,
                          lw=2 if task is None else 1)  # fmt: skip
        axes.set_xticks(np.arange(len(values)), [f"{value:g}" for value in values])
        unit = " (N/λmax)" if panel == "rate" and settings.relative else ""
        kind = "GD" if panel == "rate" else "SGD"
        axes.set(xlabel=WORDS[panel] + unit, ylabel="mean error, steps", title=kind)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=9)
        tidy(axes)
    return {"ttp-6": figure}


def measure(result: Result) -> dict[str, list[str]]:
    """Means and intervals."""
    lines = []
    for (panel, value), pairs in sorted(result.pairs.items()):
        mean, low, high = _interval(_errors(pairs))
        gone = sum(not pair.finite for pair in pairs)
        lines.append(
            f"{WORDS[panel]} {value:g}: {mean:.1f} steps ({low:.1f} to {high:.1f}), "
            f"{len(pairs)} runs, {gone} diverged"
        )
    return {"ttp-6": lines}
