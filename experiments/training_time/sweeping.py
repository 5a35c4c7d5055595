"""Ours: which learning rate and momentum, by one kernel and by a race, against training them all.

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
from jaxttp import train
from jaxttp.forecast import grid, race, sweep_kernel

STEPS = matplotlib.colormaps["viridis_r"].resampled(10)  # few colors, which the gallery can keep
CLAIM = {
    "ours-sweep": "One kernel foresees the steps of every learning rate and momentum to a loss "
    "that it names for all; a race to that loss (real training, in heats) picks a setting within "
    "10 % of the best for at most a tenth of what it costs to train them all. (ours)",
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
        threshold: epsilon, of the best one's drop in forecast, which makes the goal for all.
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
    """Steps to the goal, -1 for never, and losses at the end.

    Attributes:
        task: its name.
        goal: a loss.
        rates: in units of N / lambda_max (R,).
        forecast: steps (M, R), for every momentum and rate.
        real: likewise.
        forecast_loss: loss at the end (M, R).
        real_loss: likewise, infinite where it diverged.
        trained: steps that the race trained (M, R).
        chosen: by the race, a row and a column; None where none got to the goal.
        trainings: what the race cost, in trainings of one setting.
    """

    task: str
    goal: float
    rates: np.ndarray
    forecast: np.ndarray
    real: np.ndarray
    forecast_loss: np.ndarray
    real_loss: np.ndarray
    trained: np.ndarray
    chosen: tuple[int, int] | None
    trainings: float


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
    goal = swept.targets[0]
    real, ends = [], []
    for one in choices:
        curve = np.asarray(
            train(
                *job.model, job.x, job.y, loss="cross_entropy", optimizer=one.optimizer(),
                steps=settings.steps,
            ).loss
        )  # fmt: skip
        good = bool(np.all(np.isfinite(curve)))
        real.append(int(goal.time(curve)) if good else -1)
        ends.append(float(curve[-1]) if good else np.inf)
        jax.clear_caches() if len(real) % 16 == 0 else None
    raced = race(*job.model, job.x, job.y, choices, target_loss=goal.value)
    shape = (len(settings.momenta), len(rates))
    chosen = np.unravel_index(raced.best(), shape) if raced.ranking() else None
    return Grid(
        name_of(task), goal.value, rates, swept.times().reshape(shape), np.reshape(real, shape),
        swept.final_loss.reshape(shape), np.reshape(ends, shape), raced.trained.reshape(shape),
        None if chosen is None else (int(chosen[0]), int(chosen[1])), raced.trainings,
    )  # fmt: skip


def _best(steps: np.ndarray, losses: np.ndarray) -> tuple[int, int] | None:
    """The setting with the fewest steps, then the least loss."""
    never = np.iinfo(int).max
    order = np.lexsort((losses.ravel(), np.where(steps < 0, never, steps).ravel()))
    where = np.unravel_index(order[0], steps.shape)
    return None if steps[where] < 0 else (int(where[0]), int(where[1]))


def plot(result: Result) -> dict[str, Figure]:
    """Steps, forecast and real, and how far the race trained; stars are what is chosen."""
    settings = result.settings
    size = (13.5, 1.1 + 2.3 * len(result.grids))
    figure = Figure(figsize=size, layout="constrained")
    rows = figure.subplots(len(result.grids), 3, squeeze=False)
    for panels, one in zip(rows, result.grids, strict=True):
        most, goal = max(one.forecast.max(), one.real.max(), 1), f"loss {one.goal:g}"
        foreseen = _best(one.forecast, one.forecast_loss)
        _map(panels[0], one, one.forecast, foreseen, f"steps to {goal}, one kernel", settings, most)
        real = _best(one.real, one.real_loss)
        image = _map(panels[1], one, one.real, real, f"steps to {goal}, real", settings, most)
        figure.colorbar(image, ax=panels[1], label="steps to the loss")
        name = f"steps trained by the race, {one.trainings:.2g} of {one.real.size} trainings"
        most = max(one.trained.max(), 1)
        image = _map(panels[2], one, one.trained, one.chosen, name, settings, most)
        figure.colorbar(image, ax=panels[2], label="steps trained")
    return {"ours-sweep": figure}


def _map(
    axes: Axes, one: Grid, steps: np.ndarray, best: tuple[int, int] | None, name: str,
    settings: Settings, most: int,
):  # fmt: skip
    """Steps (M, R) in colours up to the most, hatched for never, with a star at the best."""
    axes.patch.set(hatch="///", facecolor="0.93", edgecolor="0.8")
    shown = np.ma.masked_less(steps, 0)
    image = axes.imshow(shown, aspect="auto", vmin=0, vmax=most, cmap=STEPS)
    axes.set_xticks(range(len(one.rates)), [f"{rate:.2g}" for rate in one.rates], fontsize=8)
    axes.set_yticks(range(len(settings.momenta)), [f"m = {m:g}" for m in settings.momenta])
    axes.set_xlabel("learning rate, N/λmax", fontsize=9)
    for (row, column), value in np.ndenumerate(steps):
        axes.text(column, row, f"{value}" if value >= 0 else "never", ha="center", va="center",
                  fontsize=8, color="white" if value > 0.55 * most else "black")  # fmt: skip
    if best is not None:
        axes.plot(best[1] + 0.33, best[0] - 0.3, "*", ms=11, mfc="white", mec="black")
    axes.set_title(f"{one.task}: {name}", fontsize=9)
    return image


def measure(result: Result) -> dict[str, list[str]]:
    """How far off steps are, and what the choices cost."""
    lines = []
    for one in result.grids:
        both = (one.forecast >= 0) & (one.real >= 0)
        off = np.abs(one.forecast - one.real)[both]
        share = off / np.maximum(one.real[both], 1)
        wrong = int(np.sum((one.forecast < 0) != (one.real < 0)))
        line = (
            f"{one.task}: {one.real.size} settings to loss {one.goal:g}, steps off by "
            f"{off.mean():.1f} on average, within 20 % or 2 steps in "
            f"{100 * np.mean((share <= 0.2) | (off <= 2)):.0f} %; of {int(np.sum(one.real < 0))} "
            f"that never get there {int(np.sum((one.real < 0) & (one.forecast < 0)))} are "
            f"foreseen, {wrong} judged wrongly"
        )
        for name, place in (
            ("the kernel picks", _best(one.forecast, one.forecast_loss)),
            ("the race", one.chosen),
            ("the best is", _best(one.real, one.real_loss)),
        ):
            if place is not None:
                momentum = f"m = {result.settings.momenta[place[0]]:g}"
                steps = f"really {one.real[place]} steps"
                line += f"; {name} {momentum}, rate {one.rates[place[1]]:.2g}, {steps}"
        lines.append(f"{line}; the race costs {one.trainings:.2g} trainings")
    return {"ours-sweep": lines}
