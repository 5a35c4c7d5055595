"""Figure 1 and Table 1: predicted against real training times under GD and SGD, and their errors.

On embedded data a "data set" is a task: digit splits, tables, image patches.
"""

import dataclasses
import functools

import numpy as np
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Pieces, runner
from experiments.training_time.comparison import (
    COLORS,
    PAPER_TASKS,
    RANDOM_WEIGHTS,
    Pair,
    Source,
    Way,
    compare,
    name_of,
)
from jaxttp.plots import MARKERS, tidy

TABLE = (0.01, 0.1, 0.4)
CLAIM = {
    "ttp-1a": "With GD the forecast is within 13 % of the real training time in 95 % of the cases. "
    "(TTP Figure 1 a)",
    "ttp-1b": "With SGD the forecast is within 20 % of the real training time. (TTP Figure 1 b)",
    "ttp-table-1": "Errors are a few steps, least at ε = 40 %, and larger at the high learning "
    "rate. (TTP Table 1)",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Tasks, and how they are trained.

    Attributes:
        tasks: names of the accuracy benchmark's tasks, or pipeline settings.
        seeds: of samples, weights and batches.
        low: effective learning rates at which the assumptions hold.
        high: and at which they do not.
        relative: whether rates are in units of N / lambda_max.
        batches: for SGD.
        batch_rates: learning rates for SGD.
        steps: T.
        paths: of the SDE.
    """

    tasks: tuple[Source, ...] = (
        "digits even, ResNet", "digits 3-7, ResNet", "digits 5-9, MLP", "wine, MLP",
        "breast cancer, MLP", "iris, tanh MLP", "patches, MLP",
    )  # fmt: skip
    seeds: tuple[int, ...] = cuts.one((0,))
    low: tuple[float, ...] = cuts.first((0.1, 0.3))
    high: tuple[float, ...] = cuts.first((2.0,))
    relative: bool = True
    batches: tuple[int, ...] = (16, 32)
    batch_rates: tuple[float, ...] = cuts.first((0.5,))
    steps: int = cuts.one(150)
    paths: int = cuts.one(8)


PRESETS = {
    "smoke": Settings(
        tasks=("wine, MLP",), seeds=(0,), low=(0.3,), batches=(32,), steps=10, paths=2
    ),
    "cpu": Settings(),
    "gpu": Settings(tasks=RANDOM_WEIGHTS),
    "paper": Settings(
        tasks=PAPER_TASKS, seeds=(0, 1, 2), low=(0.0001, 0.001), high=(0.005,), relative=False,
        batches=(16, 32, 64), batch_rates=(0.0001, 0.001, 0.005),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        settings: how.
        pairs: all runs.
    """

    settings: Settings
    pairs: list[Pair]


def pieces(settings: Settings) -> Pieces:
    """Forecast and train every task in every way."""
    ways = [Way(rate, relative=settings.relative) for rate in settings.low + settings.high]
    ways += [
        Way(rate, batch, relative=settings.relative)
        for batch in settings.batches
        for rate in settings.batch_rates
    ]
    return {
        f"{name_of(task)}/{seed}": functools.partial(
            compare, task, seed, ways, steps=settings.steps, paths=settings.paths
        )
        for task in settings.tasks
        for seed in settings.seeds
    }


run = runner(
    pieces,
    lambda settings, found: Result(settings, [pair for part in found.values() for pair in part]),
)


def _readings(pairs: list[Pair]) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and real times of all pairs, (runs, thresholds)."""
    times = [pair.times() for pair in pairs if pair.finite]
    return np.array([a for a, _ in times]), np.array([b for _, b in times])


def _by_kind(result: Result) -> dict[str, list[Pair]]:
    return {
        "ttp-1a": [pair for pair in result.pairs if pair.way.batch_size is None],
        "ttp-1b": [pair for pair in result.pairs if pair.way.batch_size is not None],
    }


def _slope(predicted: np.ndarray, real: np.ndarray) -> float:
    """Of the line through the origin."""
    return float(np.sum(predicted * real) / max(1e-9, np.sum(real * real)))


def _errors(result: Result, task: str, rates: tuple[float, ...]) -> np.ndarray:
    """Mean absolute error in steps at 1, 10 and 40 %, GD."""
    off = []
    for pair in _by_kind(result)["ttp-1a"]:
        if pair.task == task and pair.way.rate in rates and pair.finite:
            predicted, real = pair.times(TABLE)
            off.append(np.abs(predicted - real))
    return np.mean(off, axis=0) if off else np.full(len(TABLE), np.nan)


def plot(result: Result) -> dict[str, Figure]:
    """Both scatter plots, and the table as bars."""
    figures = {}
    tasks = [name_of(task) for task in result.settings.tasks]
    for (picture, pairs), fraction in zip(_by_kind(result).items(), (0.13, 0.2), strict=True):
        figure = Figure(figsize=(6, 5.6), layout="constrained")
        axes = figure.subplots()
        line = np.array([0.0, 1.05 * result.settings.steps])
        axes.plot(line, line, color="0.3", lw=1.2, label="perfect forecast")
        for sign in (1, -1):
            label = f"± {100 * fraction:.0f} %" if sign == 1 else None
            axes.plot(line, (1 + sign * fraction) * line, "--", color="0.5", lw=1, label=label)
        for task, color, marker in zip(tasks, COLORS, MARKERS, strict=False):
            some = [pair for pair in pairs if pair.task == task]
            predicted, real = _readings(some)
            if predicted.size:
                label = f"{task} (slope {_slope(predicted, real):.2f})"
                axes.plot(real.ravel(), predicted.ravel(), marker, color=color,
                          ms=5, mec="none", label=label)  # fmt: skip
        kind = "gradient descent" if picture == "ttp-1a" else "SGD"
        axes.set(xlabel="real training time, steps", ylabel="predicted training time, steps",
                 title=f"Training with {kind}, ε from 1 to 40 %")  # fmt: skip
        axes.set(xlim=(0, line[1]), ylim=(0, line[1]))
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        tidy(axes)
        figures[picture] = figure
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, len(TABLE), sharey=True)
    for i, (axes, epsilon) in enumerate(zip(panels, TABLE, strict=True)):
        for shift, rates, color, label in (
            (-0.2, result.settings.low, COLORS[0], "low"),
            (0.2, result.settings.high, COLORS[1], "high"),
        ):
            values = [_errors(result, task, rates)[i] for task in tasks]
            label = f"{label}: η = {', '.join(f'{rate:g}' for rate in rates)}"
            bars = axes.barh(np.arange(len(tasks)) + shift, values, 0.38, color=color, label=label)
            axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=2)
        axes.set(title=f"ε = {100 * epsilon:g} %", xlabel="mean error, steps")
        axes.margins(x=0.15)
        axes.set_yticks(np.arange(len(tasks)), tasks)
        tidy(axes)
    panels[0].invert_yaxis()
    panels[-1].legend(frameon=False, fontsize=9)
    figures["ttp-table-1"] = figure
    return figures


def measure(result: Result) -> dict[str, list[str]]:
    """Shares within the lines, slopes, and the table."""
    out = {}
    horizon = result.settings.steps
    tasks = [name_of(task) for task in result.settings.tasks]
    for picture, pairs in _by_kind(result).items():
        predicted, real = _readings(pairs)
        off = np.abs(predicted - real)
        # Two steps count as right however short the time is.
        fractions = [100 * np.mean(off <= np.maximum(s * real, 2)) for s in (0.13, 0.2)]
        whole = [100 * np.mean(off <= s * horizon) for s in (0.13, 0.2)]
        lines = [
            f"{len(predicted)} runs, {predicted.size} readings, {len(pairs) - len(predicted)} "
            "diverged",
            f"within 13 % of the real time {fractions[0]:.0f} %, within 20 % {fractions[1]:.0f} %",
            f"within 13 % of T {whole[0]:.0f} %, within 20 % of T {whole[1]:.0f} %",
            f"mean error {off.mean():.1f} steps, Pearson "
            f"{np.corrcoef(predicted.ravel(), real.ravel())[0, 1]:.3f}",
        ]
        slopes = []
        for task in tasks:
            some = _readings([pair for pair in pairs if pair.task == task])
            if some[0].size:
                slopes.append(f"{task} {_slope(*some):.2f}")
        out[picture] = [*lines, "slopes: " + ", ".join(slopes)]
    table = []
    settings = result.settings
    for task in tasks:
        low, high = (_errors(result, task, rates) for rates in (settings.low, settings.high))
        cells = "; ".join(f"{a:.1f} / {b:.1f}" for a, b in zip(low, high, strict=True))
        table.append(f"{task}: {cells}")
    out["ttp-table-1"] = ["mean error in steps, low / high rate, at 1 %; 10 %; 40 %", *table]
    for rates, word in ((settings.low, "low"), (settings.high, "high")):
        means = np.nanmean([_errors(result, task, rates) for task in tasks], axis=0)
        cells = ", ".join(f"{value:.1f}" for value in means)
        out["ttp-table-1"].append(f"all tasks, {word} rates: {cells}")
    return out
