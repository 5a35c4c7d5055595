"""Ours: the first real steps correct the forecast.

On embedded data a "data set" is a task: digit splits, tables, image patches.
"""

import dataclasses
import functools

import numpy as np
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Pieces, runner
from experiments.training_time.comparison import (
    CIFAR10,
    COLORS,
    MIT67,
    Source,
    kernel_of,
    load,
    name_of,
)
from jaxttp import train, training_time
from jaxttp.forecast import Hyperparameters, Online
from jaxttp.plots import GREY, REAL, tidy

THRESHOLDS = (0.01, 0.1, 0.4)
CLAIM = {
    "ours-online": "After a tenth of the steps the corrected forecast's mean error is at most half "
    "of the one made before training. (ours)",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Tasks, and when to ask.

    Attributes:
        tasks: names or pipeline settings; the first one's curves are shown.
        rate: in units of N / lambda_max.
        fractions: of the steps after which the forecast is corrected.
        shown: the one of them whose curves are shown.
        steps: T.
        seed: of samples and weights.
        samples: so many of each task; all when None.
    """

    tasks: tuple[Source, ...] = (
        "digits 5-9, MLP",
        "breast cancer, MLP",
        "digits all, tanh MLP",
        "iris, tanh MLP",
    )
    rate: float = 1.0
    fractions: tuple[float, ...] = cuts.first((0.05, 0.1, 0.2, 0.4))
    shown: float = 0.1
    steps: int = cuts.one(150)
    seed: int = 1
    samples: int | None = cuts.few(32, None)


PRESETS = {
    "smoke": Settings(
        tasks=("wine, MLP",), fractions=(0.25,), shown=0.25, steps=8, samples=10,
    ),
    "cpu": Settings(),
    "paper": Settings(tasks=(CIFAR10, MIT67)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Loop:
    """One training, and its forecasts on the way.

    Attributes:
        task: its name.
        real: loss (T + 1,).
        before: forecast before training (T + 1,).
        corrected: fraction of the steps -> forecast (T + 1,), observed up to there.
    """

    task: str
    real: np.ndarray
    before: np.ndarray
    corrected: dict[float, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        settings: how.
        loops: one for every task.
    """

    settings: Settings
    loops: list[Loop]


def pieces(settings: Settings) -> Pieces:
    """Train every task once, and correct its forecast on the way."""
    return {name_of(t): functools.partial(_measure, t, settings) for t in settings.tasks}


run = runner(pieces, lambda settings, found: Result(settings, list(found.values())))


def _measure(task: Source, settings: Settings) -> Loop:
    job = load(task, settings.seed, settings.samples)
    eta = settings.rate * kernel_of(job).unit
    setting = Hyperparameters(eta, steps=settings.steps)
    watch = Online(*job.model, job.x, job.y, setting)
    places = {max(1, round(fraction * settings.steps)): fraction for fraction in settings.fractions}
    corrected: dict[float, np.ndarray] = {}
    found = []

    def callback(step: int, params, loss: float) -> None:
        if step > max(places):
            return
        watch(step, params, loss)
        if step in places:
            found.append(watch.forecast())
            corrected[places[step]] = found[-1].loss

    real = train(
        *job.model, job.x, job.y, loss="cross_entropy", optimizer=setting.optimizer(),
        steps=settings.steps, callback=callback,
    )  # fmt: skip
    return Loop(name_of(task), np.asarray(real.loss), found[0].open_loop, corrected)


def _off(curve: np.ndarray, real: np.ndarray) -> float:
    """Mean error of the training times in steps."""
    times = [[int(training_time(c, e)) for e in THRESHOLDS] for c in (curve, real)]
    return float(np.mean(np.abs(np.subtract(*times))))


def _errors(result: Result, fraction: float) -> float:
    return float(np.mean([_off(one.corrected[fraction], one.real) for one in result.loops]))


def plot(result: Result) -> dict[str, Figure]:
    """Curves of the first task, and mean errors of all by the fraction of steps seen."""
    settings, first = result.settings, result.loops[0]
    figure = Figure(figsize=(11.5, 4.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.semilogy(first.real, color=REAL, lw=2.4, label="real training")
    left.semilogy(first.before, "--", color=GREY, lw=2, label="forecast before training")
    at = round(settings.shown * settings.steps)
    curve = first.corrected[settings.shown]
    left.semilogy(
        np.arange(at, len(curve)), curve[at:], color=COLORS[0], lw=1.8, label="corrected forecast"
    )
    left.axvline(at, color=GREY, lw=1, ls=":")
    left.set(xlabel="step", ylabel="training loss", title=f"{first.task}, η = {settings.rate:g}")
    before = float(np.mean([_off(one.before, one.real) for one in result.loops]))
    right.axhline(before, color=GREY, ls="--", lw=2, label="forecast before training")
    errors = [_errors(result, fraction) for fraction in settings.fractions]
    right.plot(settings.fractions, errors, "o-", color=COLORS[0], label="corrected forecast")
    right.set(xlabel="fraction of the steps seen", ylabel="mean error of training times, steps",
              title=f"{len(result.loops)} tasks")  # fmt: skip
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
        tidy(axes)
    return {"ours-online": figure}


def measure(result: Result) -> dict[str, list[str]]:
    """Errors by task, and over all."""
    settings, lines = result.settings, []
    for one in result.loops:
        errors = [
            f"{_off(one.corrected[fraction], one.real):.1f}" for fraction in settings.fractions
        ]
        before = f"{one.task}: mean error before training {_off(one.before, one.real):.1f} steps"
        lines.append(f"{before}; corrected {', '.join(errors)}")
    before = float(np.mean([_off(one.before, one.real) for one in result.loops]))
    fractions = ", ".join(f"{100 * s:g}" for s in settings.fractions)
    ratios = [
        f"{_errors(result, fraction) / max(before, 1e-9):.2f}" for fraction in settings.fractions
    ]
    lines.append(
        f"corrected after {fractions} % of the steps: {', '.join(ratios)} of {before:.1f} steps"
    )
    return {"ours-online": lines}
