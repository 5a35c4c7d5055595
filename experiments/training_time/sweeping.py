"""Ours: one kernel, every learning rate and momentum, against real training of each.

On embedded data a "data set" is a task: digit splits, tables, image patches.
"""

import dataclasses
import functools

import jax
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Pieces, runner
from experiments.training_time.comparison import CIFAR10, Source, kernel_of, load, name_of
from jaxttp import train, training_time
from jaxttp.forecast import grid, sweep_kernel

STEPS = matplotlib.colormaps["viridis_r"].resampled(10)  # few colors, which the gallery can keep
RATIO = matplotlib.colormaps["RdBu_r"].resampled(9)
CLAIM = {
    "ours-sweep": "From one kernel the steps of every learning rate and momentum are foreseen; the "
    "setting that it picks takes within 20 % of the real optimum's steps. (ours)",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The grid.

    Attributes:
        tasks: names or pipeline settings, a row of panels each.
        rates: how many, evenly in the logarithm.
        low: the least of them, in units of N / lambda_max.
        high: the greatest.
        momenta: m.
        threshold: epsilon.
        steps: T.
        seed: of samples and weights.
        samples: so many of each task; all when None.
    """

    tasks: tuple[Source, ...] = ("breast cancer, MLP", "digits 5-9, MLP")
    rates: int = 9
    low: float = 0.05
    high: float = 5.0
    momenta: tuple[float, ...] = (0.0, 0.5, 0.9)
    threshold: float = 0.1
    steps: int = cuts.one(150)
    seed: int = 0
    samples: int | None = cuts.few(32, None)


PRESETS = {
    "smoke": Settings(tasks=("wine, MLP",), rates=2, momenta=(0.0,), steps=8, samples=12),
    "cpu": Settings(),
    "paper": Settings(tasks=(CIFAR10,)),
}


@dataclasses.dataclass(frozen=True)
class Grid:
    """Steps to the threshold, -1 where training diverges, and losses at the end.

    Attributes:
        task: its name.
        rates: in units of N / lambda_max (R,).
        forecast: steps (M, R), for every momentum and rate.
        real: likewise.
        forecast_loss: loss at the end (M, R).
        real_loss: likewise, infinite where it diverged.
    """

    task: str
    rates: np.ndarray
    forecast: np.ndarray
    real: np.ndarray
    forecast_loss: np.ndarray
    real_loss: np.ndarray


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        settings: how.
        grids: one for every task.
    """

    settings: Settings
    grids: list[Grid]


def pieces(settings: Settings) -> Pieces:
    """Sweep from one kernel, and train every setting."""
    return {name_of(t): functools.partial(_measure, t, settings) for t in settings.tasks}


run = runner(pieces, lambda settings, found: Result(settings, list(found.values())))


def _measure(task: Source, settings: Settings) -> Grid:
    job = load(task, settings.seed, settings.samples)
    kernel = kernel_of(job)
    rates = np.geomspace(settings.low, settings.high, settings.rates)
    choices = grid(
        momentum=settings.momenta, learning_rate=rates * kernel.unit, steps=settings.steps
    )
    swept = sweep_kernel(
        kernel.theta, kernel.f0, job.y, choices, thresholds=(settings.threshold,)
    )  # fmt: skip
    real, ends = [], []
    for one in choices:
        curve = np.asarray(
            train(
                *job.model, job.x, job.y, loss="cross_entropy", optimizer=one.optimizer(),
                steps=settings.steps,
            ).loss
        )  # fmt: skip
        good = bool(np.all(np.isfinite(curve))) and curve[-1] < curve[0]
        real.append(int(training_time(curve, settings.threshold)) if good else -1)
        ends.append(float(curve[-1]) if good else np.inf)
        jax.clear_caches() if len(real) % 16 == 0 else None
    shape = (len(settings.momenta), len(rates))
    return Grid(
        name_of(task), rates, swept.steps[:, 0].reshape(shape), np.reshape(real, shape),
        swept.final_loss.reshape(shape), np.reshape(ends, shape),
    )  # fmt: skip


def _best(steps: np.ndarray, losses: np.ndarray) -> tuple[int, int] | None:
    """The setting with the fewest steps, then the least loss."""
    never = np.iinfo(int).max
    order = np.lexsort((losses.ravel(), np.where(steps < 0, never, steps).ravel()))
    where = np.unravel_index(order[0], steps.shape)
    return None if steps[where] < 0 else (int(where[0]), int(where[1]))


def plot(result: Result) -> dict[str, Figure]:
    """Steps, forecast and real, and their ratio; stars are the fastest settings."""
    settings = result.settings
    size = (13.5, 1.1 + 2.3 * len(result.grids))
    figure = Figure(figsize=size, layout="constrained")
    rows = figure.subplots(len(result.grids), 3, squeeze=False)
    for panels, one in zip(rows, result.grids, strict=True):
        known = np.concatenate([one.forecast.ravel(), one.real.ravel()])
        limits = {"vmin": 0, "vmax": max(known.max(), 1), "cmap": STEPS}
        image = None
        for axes, steps, losses, name in (
            (panels[0], one.forecast, one.forecast_loss, "forecast from one kernel"),
            (panels[1], one.real, one.real_loss, "real training"),
        ):
            image = _map(axes, one, np.where(steps < 0, np.nan, steps), settings, **limits)
            for (row, column), value in np.ndenumerate(steps):
                words = f"{value}" if value >= 0 else "div."
                dark = value > 0.55 * limits["vmax"]
                axes.text(column, row, words, ha="center", va="center", fontsize=8,
                          color="white" if dark else "black")  # fmt: skip
            best = _best(steps, losses)
            if best is not None:
                axes.plot(best[1] + 0.33, best[0] - 0.3, "*", ms=11, mfc="white", mec="black")
            axes.set_title(f"{one.task}: {name}", fontsize=10)
        figure.colorbar(image, ax=panels[1], label=f"steps to {100 * settings.threshold:g} %")
        both = (one.forecast > 0) & (one.real > 0)
        ratio = np.where(both, one.forecast / np.where(both, one.real, 1), np.nan)
        image = _map(panels[2], one, ratio, settings, vmin=0.5, vmax=1.5, cmap=RATIO)
        for (row, column), value in np.ndenumerate(ratio):
            if np.isfinite(value):
                panels[2].text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8,
                               color="white" if abs(value - 1) > 0.35 else "black")  # fmt: skip
        panels[2].set_title("forecast / real", fontsize=10)
        figure.colorbar(image, ax=panels[2])
    return {"ours-sweep": figure}


def _map(axes: Axes, one: Grid, table: np.ndarray, settings: Settings, **limits):
    axes.patch.set(hatch="///", facecolor="0.93", edgecolor="0.8")
    image = axes.imshow(np.ma.masked_invalid(table), aspect="auto", **limits)
    axes.set_xticks(range(len(one.rates)), [f"{rate:.2g}" for rate in one.rates], fontsize=8)
    axes.set_yticks(range(len(settings.momenta)), [f"m = {m:g}" for m in settings.momenta])
    axes.set_xlabel("learning rate, N/λmax", fontsize=9)
    return image


def measure(result: Result) -> dict[str, list[str]]:
    """How far off steps are, and what the choice costs."""
    lines = []
    for one in result.grids:
        both = (one.forecast >= 0) & (one.real >= 0)
        off = np.abs(one.forecast - one.real)[both]
        share = off / np.maximum(one.real[both], 1)
        wrong = int(np.sum((one.forecast < 0) != (one.real < 0)))
        line = (
            f"{one.task}: {one.real.size} settings, steps off by {off.mean():.1f} on average, "
            f"within 20 % or 2 steps in {100 * np.mean((share <= 0.2) | (off <= 2)):.0f} %; of "
            f"{int(np.sum(one.real < 0))} that diverge {int(np.sum(one.forecast < 0))} are "
            f"foreseen, {wrong} judged wrongly"
        )
        best, true = _best(one.forecast, one.forecast_loss), _best(one.real, one.real_loss)
        if best is not None and true is not None:
            words = [
                f"m = {result.settings.momenta[i]:g}, rate {one.rates[j]:.2g}"
                for i, j in (best, true)
            ]
            line += (
                f"; picks {words[0]}, really {one.real[best]} steps; the best is {words[1]}, "
                f"{one.real[true]} steps"
            )
        lines.append(line)
    return {"ours-sweep": lines}
