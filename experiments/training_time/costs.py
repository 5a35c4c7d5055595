"""Figure 5: seconds of a forecast against seconds of the training, on the current device.

Where that is no CPU, forecasts on the CPU stand beside them, once.
"""

import dataclasses
import functools

import jax
import numpy as np
import optax
from matplotlib.figure import Figure

from experiments import cuts
from experiments.bench.accuracy_tasks import Job
from experiments.store import Pieces, runner
from experiments.training_time.comparison import (
    COLORS,
    PAPER_TASKS,
    RANDOM_WEIGHTS,
    Source,
    kernel_of,
    load,
    name_of,
)
from jaxttp import Model, predict_training_time, train
from jaxttp.plots import tidy

CLAIM = {
    "ttp-5": "A forecast is 30 to 40 times faster than training for T steps. (TTP Figure 5)",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Tasks and the horizon.

    Attributes:
        tasks: names or pipeline settings.
        rate: learning rate in units of N / lambda_max.
        steps: T.
        sketch_dim: width of the projected kernel.
        repeats: of every measurement; medians count.
        seed: of everything.
    """

    tasks: tuple[Source, ...] = ("digits even, ResNet", "digits 5-9, MLP")
    rate: float = 0.5
    steps: int = cuts.one(150)
    sketch_dim: int = cuts.few(9, 1000)
    repeats: int = cuts.one(2)
    seed: int = 0


PRESETS = {
    "smoke": Settings(tasks=("wine, MLP",), steps=10, sketch_dim=50, repeats=1),
    "cpu": Settings(),
    "gpu": Settings(tasks=RANDOM_WEIGHTS, sketch_dim=10_000, repeats=5),
    "paper": Settings(tasks=PAPER_TASKS, sketch_dim=10_000, repeats=5),
}


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Run and compile seconds.

    Attributes:
        device: where training ran.
        samples: N.
        values: of training and of both forecasts there, (3, 2).
        cpu: of both forecasts on the CPU (2, 2), where training ran elsewhere.
    """

    device: str
    samples: int
    values: np.ndarray
    cpu: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        settings: how.
        seconds: task -> times.
    """

    settings: Settings
    seconds: dict[str, Seconds]


def pieces(settings: Settings) -> Pieces:
    """Time training and forecasts."""
    return {name_of(task): functools.partial(_measure, task, settings) for task in settings.tasks}


run = runner(pieces, Result)


def _measure(task: Source, settings: Settings) -> Seconds:
    job = load(task, settings.seed)
    eta = settings.rate * kernel_of(job).unit
    values = []
    for i in range(settings.repeats):
        real = train(
            *job.model, job.x, job.y, loss="cross_entropy", optimizer=optax.sgd(eta),
            steps=settings.steps,
        )  # fmt: skip
        values.append([(real.seconds, real.compile_seconds), *_forecasts(job, eta, settings, i)])
    # What was compiled for the first repeat serves the others.
    run_seconds, compile_seconds = np.array(values)[..., 0], np.array(values)[..., 1]
    both = np.stack([np.median(run_seconds, axis=0), compile_seconds[0]], axis=1)
    device, cpu = jax.devices()[0], None
    if device.platform != "cpu":
        (host,) = jax.devices("cpu")[:1]
        with jax.default_device(host):
            moved = Job(Model(job.model.apply_fn, jax.device_put(job.model.params, host)), *job[1:])
            cpu = np.array(_forecasts(moved, eta, settings, 0))
    return Seconds(device.device_kind, len(job.x), both, cpu)


def _forecasts(job: Job, eta: float, settings: Settings, i: int) -> list[tuple[float, float]]:
    """Run and compile seconds of the exact and of the projected forecast."""
    out = []
    for options in ({}, {"sketch_dim": settings.sketch_dim, "key": jax.random.key(i)}):
        cost = predict_training_time(
            *job.model,
            job.x,
            job.y,
            learning_rate=eta,
            steps=settings.steps,
            relinearize=0,
            **options,
        ).cost
        out.append((cost.seconds, cost.compile_seconds))
    return out


def plot(result: Result) -> dict[str, Figure]:
    """Bars on a logarithmic axis."""
    figure = Figure(figsize=(8.5, 4.4), layout="constrained")
    axes = figure.subplots()
    settings = result.settings
    words = ("training", "forecast, exact Θ", f"forecast, {settings.sketch_dim} projections")
    at = np.arange(len(result.seconds))
    for i, (word, color) in enumerate(zip(words, COLORS, strict=False)):
        values = [found.values[i, 0] for found in result.seconds.values()]
        bars = axes.bar(at + 0.27 * (i - 1), values, 0.25, color=color, label=word)
        axes.bar_label(bars, fmt="%.2g", fontsize=9)
    missing = np.full((2, 2), np.nan)
    hosts = [missing if s.cpu is None else s.cpu for s in result.seconds.values()]
    if np.isfinite(hosts).any():
        for i, mark in enumerate("sd"):
            values = [host[i, 0] for host in hosts]
            axes.plot(at + 0.27 * i, values, mark, color="0.2", label=f"{words[1 + i]}, on the CPU")
    axes.set_xticks(at, [f"{task}\nN = {s.samples}" for task, s in result.seconds.items()])
    device = next(iter(result.seconds.values())).device
    axes.set(ylabel="seconds without compilation", yscale="log",
             title=f"T = {settings.steps} steps, full batch, {device}")  # fmt: skip
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=9)
    tidy(axes)
    return {"ttp-5": figure}


def measure(result: Result) -> dict[str, list[str]]:
    """Seconds and ratios."""
    lines = []
    for task, found in result.seconds.items():
        (real, real_more), (exact, exact_more), (sketch, sketch_more) = found.values
        lines.append(
            f"{task} ({found.device}): training {real:.2f} s (+ {real_more:.1f} s to compile), "
            f"exact {exact:.3f} s (+ {exact_more:.1f}), projected {sketch:.3f} s (+ "
            f"{sketch_more:.1f}); training / forecast {real / exact:.1f} and {real / sketch:.1f}, "
            f"with compilation {(real + real_more) / (exact + exact_more):.2f} and "
            f"{(real + real_more) / (sketch + sketch_more):.2f}"
        )
        if found.cpu is not None:
            (exact, exact_more), (sketch, sketch_more) = found.cpu
            lines[-1] += (
                f"; on the CPU exact {exact:.2f} s (+ {exact_more:.1f}), projected {sketch:.2f} s "
                f"(+ {sketch_more:.1f})"
            )
    return {"ttp-5": lines}
