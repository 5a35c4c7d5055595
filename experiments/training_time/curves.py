"""Figures 8 and 10: error curves under three models of the noise; wrong curves, right times.

On embedded data a "data set" is a task: digit splits, tables, image patches.
"""

import dataclasses
import functools

import numpy as np
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Store
from experiments.training_time.comparison import (
    CIFAR10,
    MIT67,
    THRESHOLDS,
    Pair,
    Source,
    Way,
    compare,
    forecast,
    kernel_of,
    load,
    name_of,
    real_curves,
)
from jaxttp import training_time
from jaxttp.dynamics import diagonal_noise
from jaxttp.plots import GREY, OTHER, PREDICTED, REAL, tidy

NOISES = {
    "exact": ("full", False),
    "diagonal, rescaled": ("diagonal", True),
    "diagonal, constant": ("constant", True),
    "exact at the start, constant": ("constant", False),
}
"""Model -> noise of `jaxttp.dynamics.diffusion`, and whether the paper's diagonal is its kernel."""
CLAIM = {
    "ttp-8": "The predicted error curve is close to the real one under GD and SGD; constant noise "
    "has the wrong asymptote (the error stays above zero), rescaled noise the right one. "
    "(TTP Figure 8)",
    "ttp-10": "Loss curves may differ near convergence while training times are right. "
    "(TTP Figure 10)",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Tasks and rates.

    Attributes:
        noise_task: of Figure 8: two classes.
        rate: learning rate of Figure 8.
        batch_size: of its SGD.
        steps: of Figure 8.
        tasks: of Figure 10.
        high_rate: its learning rate.
        relative: whether rates are in units of N / lambda_max.
        horizon: T of Figure 10.
        runs: real trainings with other batches.
        paths: of the SDE.
        seed: of everything.
    """

    noise_task: Source = "breast cancer, MLP"
    rate: float = 1.0
    batch_size: int = cuts.few(4, 8)
    steps: int = cuts.one(200)
    tasks: tuple[Source, ...] = ("digits even, ResNet", "digits 5-9, MLP")
    high_rate: float = 3.0
    relative: bool = True
    horizon: int = cuts.one(150)
    runs: int = cuts.one(4)
    paths: int = cuts.one(20)
    seed: int = 0


PRESETS = {
    "smoke": Settings(
        noise_task="wine, MLP", tasks=("wine, MLP",), steps=10, horizon=10, runs=1, paths=2
    ),
    "cpu": Settings(),
    "paper": Settings(
        noise_task=dataclasses.replace(CIFAR10, classes=2, samples_per_class=75), rate=0.001,
        batch_size=100, steps=150, tasks=(MIT67, CIFAR10), high_rate=0.005, relative=False,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Noises:
    """Figure 8; errors (T + 1,).

    Attributes:
        real: under gradient descent.
        ode: its forecast.
        real_sgd: of every run with mini-batches (R, T + 1).
        sde: model of the noise -> median over the paths; loss and error (2, T + 1).
    """

    real: np.ndarray
    ode: np.ndarray
    real_sgd: np.ndarray
    sde: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        settings: how.
        noises: Figure 8.
        pairs: Figure 10, one a task.
    """

    settings: Settings
    noises: Noises
    pairs: list[Pair]


def run(settings: Settings, store: Store | None = None) -> Result:
    """Forecasts under every noise, and forecasts of long trainings at a high rate.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where the curves are kept.

    Returns:
        A `Result`.
    """
    store = store or Store()

    def noises() -> Noises:
        job = load(settings.noise_task, settings.seed)
        kernel = kernel_of(job)
        eta = settings.rate * (kernel.unit if settings.relative else 1.0)
        steps, batch = settings.steps, settings.batch_size
        fixed = diagonal_noise(*job.model, job.x, kernel.targets, loss="cross_entropy")
        sde = {
            name: forecast(
                kernel, eta, steps=steps, batch_size=batch, paths=settings.paths, noise=noise,
                noise_kernel=fixed if diagonal else None, protocol="replacement",
            )
            for name, (noise, diagonal) in NOISES.items()
        }  # fmt: skip
        real_sgd = [
            real_curves(
                job,
                eta,
                Way(eta, batch),
                steps=steps,
                seed=settings.seed + i,
                protocol="replacement",
            )[1]
            for i in range(settings.runs)
        ]
        real = real_curves(job, eta, Way(eta), steps=steps)[1]
        return Noises(real, forecast(kernel, eta, steps=steps)[1], np.stack(real_sgd), sde)

    way = Way(settings.high_rate, relative=settings.relative)
    pieces = {
        name_of(task): functools.partial(
            compare, task, settings.seed, (way,), steps=settings.horizon
        )
        for task in settings.tasks
    }
    found = store.all(pieces)
    return Result(settings, store.get("noises", noises), [pair for (pair,) in found.values()])


def plot(result: Result) -> dict[str, Figure]:
    """Errors by noise; losses, errors and times of both tasks."""
    settings, noises = result.settings, result.noises
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    panels[0].plot(100 * noises.real, color=REAL, lw=2, label="real, full batch")
    panels[0].plot(100 * noises.ode, "--", color=PREDICTED, lw=2, label="ODE of eq (1)")
    panels[0].set(title=f"{name_of(settings.noise_task)}: gradient descent")
    t, names = np.arange(settings.steps + 1), list(NOISES)
    for axes, chosen in zip(panels[1:], (names[:2], names[2:]), strict=True):
        some = 100 * noises.real_sgd
        axes.fill_between(t, some.min(0), some.max(0), color=REAL, alpha=0.2, lw=0)
        axes.plot(np.median(some, axis=0), color=REAL, lw=2, label="real SGD, median")
        for name, color in zip(chosen, (PREDICTED, OTHER), strict=True):
            axes.plot(100 * noises.sde[name][1], "--", color=color, lw=1.8, label=name)
    panels[1].set(title=f"SGD, batches of {settings.batch_size}: noise follows the loss")
    panels[2].set(title=f"SGD, batches of {settings.batch_size}: constant noise")
    for axes in panels:
        axes.set(xlabel="step")
        axes.legend(frameon=False, fontsize=9)
        tidy(axes)
    panels[0].set(ylabel="misclassified training samples (%)")
    return {"ttp-8": figure, "ttp-10": _times_figure(result)}


def _times_figure(result: Result) -> Figure:
    figure = Figure(figsize=(9.5, 4.0 * len(result.pairs)), layout="constrained")
    rows = figure.subplots(len(result.pairs), 2, squeeze=False)
    for (left, right), pair in zip(rows, result.pairs, strict=True):
        for row, color, word in ((0, REAL, "loss"), (1, OTHER, "error")):
            left.plot(pair.real[row], color=color, lw=2, label=f"{word}, real")
            left.plot(pair.forecast[row], "--", color=color, lw=2, label=f"{word}, forecast")
        left.set(xlabel="step", ylabel="training loss, error rate", title=pair.task)
        left.legend(frameon=False, fontsize=9)
        for shift, values, color, label in zip(
            (-0.2, 0.2), pair.times(), (PREDICTED, GREY), ("forecast", "real"), strict=True
        ):
            at = np.arange(len(THRESHOLDS)) + shift
            bars = right.bar(at, values, 0.38, color=color, label=label)
            right.bar_label(bars, fontsize=8)
        right.set_xticks(np.arange(len(THRESHOLDS)), [f"{100 * e:g} %" for e in THRESHOLDS])
        right.set(xlabel="threshold ε", ylabel="training time, steps")
        right.legend(frameon=False, fontsize=9)
        tidy(left)
        tidy(right)
    return figure


def measure(result: Result) -> dict[str, list[str]]:
    """Errors at the end, distances of curves, and times."""
    noises, settings = result.noises, result.settings
    tail = max(1, settings.steps // 10)
    real, median = noises.real, np.median(noises.real_sgd, axis=0)
    lines = [
        f"GD: mean distance of the error curves {100 * np.abs(real - noises.ode).mean():.1f} "
        f"points, at the end real {100 * real[-1]:.1f} %, forecast {100 * noises.ode[-1]:.1f} %",
        f"SGD, real: {100 * median[-tail:].mean():.1f} % over the last {tail} steps",
    ]
    for noise, (loss, error) in noises.sde.items():
        lines.append(
            f"SGD, {noise}: {100 * error[-tail:].mean():.1f} % over the last {tail} steps, "
            f"mean distance {100 * np.abs(error - median).mean():.1f} points, loss "
            f"{loss[-tail:].mean():.3g}"
        )
    out = {"ttp-8": lines, "ttp-10": []}
    for pair in result.pairs:
        loss, error = np.abs(pair.forecast - pair.real)
        predicted, true = pair.times()
        off = [int(training_time(c, 0.1)) for c in (pair.forecast[1], pair.real[1])]
        out["ttp-10"].append(
            f"{pair.task}: loss at the end {pair.forecast[0, -1]:.3g} predicted, "
            f"{pair.real[0, -1]:.3g} real ({pair.forecast[0, -1] / pair.real[0, -1]:.2f} times); "
            f"mean distance {100 * loss.mean() / (pair.real[0, 0] - pair.real[0, -1]):.1f} % of "
            f"the drop (error rate {100 * error.mean():.1f} points); times, predicted / real: "
            + ", ".join(
                f"{100 * e:g} %: {a} / {b}"
                for e, a, b in zip(THRESHOLDS, predicted, true, strict=True)
            )
            + f"; of the error rate at 10 %: {off[0]} / {off[1]}"
        )
    return out
