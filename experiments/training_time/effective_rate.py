"""Figures 2 and 12: where the ODE fails and the SDE does not, and equal effective learning rates.

On embedded data a "data set" is a task: digit splits, tables, image patches.
"""

import dataclasses
import functools

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Store
from experiments.training_time.comparison import (
    COLORS,
    MIT67,
    PAPER_TASKS,
    Source,
    Way,
    forecast,
    kernel_of,
    load,
    name_of,
    real_curves,
)
from jaxttp import training_time
from jaxttp.dynamics import diffusion
from jaxttp.plots import GREY, PREDICTED, REAL, tidy

CLAIM = {
    "ttp-2": "At a high learning rate the ODE does not describe SGD and the SDE does; runs with "
    "the same effective learning rate η/(1 − m) have similar loss curves. (TTP Figure 2)",
    "ttp-12": "The same on further data sets, for error curves. (TTP Figure 12)",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Tasks, rates and momenta.

    Attributes:
        task: of Figure 2.
        more: tasks of Figure 12.
        noisy_rate: learning rate of the left panel.
        batch_size: of the left panel.
        runs: real trainings with other batches, for the left panel.
        paths: of the SDE.
        rates: effective learning rates.
        momenta: m.
        relative: whether rates are in units of N / lambda_max.
        steps: T.
        seed: of everything.
    """

    task: Source = "patches, MLP"
    more: tuple[Source, ...] = ("digits 5-9, MLP", "breast cancer, MLP")
    noisy_rate: float = 4.0
    batch_size: int = cuts.few(4, 8)
    runs: int = cuts.one(4)
    paths: int = cuts.one(20)
    rates: tuple[float, ...] = cuts.first((0.3, 1.0, 3.0))
    momenta: tuple[float, ...] = (0.0, 0.5, 0.9)
    relative: bool = True
    steps: int = cuts.one(150)
    seed: int = 0


PRESETS = {
    "smoke": Settings(
        task="wine, MLP", more=("iris, tanh MLP",), runs=1, paths=2, rates=(0.5,),
        momenta=(0.0, 0.9), steps=10,
    ),
    "cpu": Settings(),
    "paper": Settings(
        task=MIT67, more=PAPER_TASKS, noisy_rate=0.005, batch_size=32, rates=(0.001, 0.005, 0.01),
        relative=False,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Noise:
    """The left panel: losses.

    Attributes:
        ode: (T + 1,).
        sde: of every path (P, T + 1).
        real: of every run (R, T + 1).
    """

    ode: np.ndarray
    sde: np.ndarray
    real: np.ndarray


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        settings: how.
        noise: the left panel.
        curves: task -> loss and error of every real run (rates, momenta, 2, T + 1).
    """

    settings: Settings
    noise: Noise
    curves: dict[str, np.ndarray]


def run(settings: Settings, store: Store | None = None) -> Result:
    """One forecast under noise, and real trainings with momentum.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where the curves are kept, a task each.

    Returns:
        A `Result`.
    """
    store = store or Store()
    steps = settings.steps

    def noise() -> Noise:
        job = load(settings.task, settings.seed)
        kernel = kernel_of(job)
        eta = settings.noisy_rate * (kernel.unit if settings.relative else 1.0)
        way = Way(eta, settings.batch_size)
        key = jax.random.key(settings.seed + 90)
        paths = diffusion(
            kernel.theta, kernel.f0, kernel.targets, loss="cross_entropy", learning_rate=eta,
            batch_size=settings.batch_size, steps=steps, key=key, paths=settings.paths,
            save="curves",
        )  # fmt: skip
        real = [
            real_curves(job, eta, way, steps=steps, seed=settings.seed + i)[0]
            for i in range(settings.runs)
        ]
        ode = forecast(kernel, eta, steps=steps)[0]
        return Noise(ode, np.asarray(paths.loss), np.stack(real))

    def momentum(task: Source) -> np.ndarray:
        job = load(task, settings.seed)
        unit = kernel_of(job).unit if settings.relative else 1.0
        return np.stack([
            [
                real_curves(job, unit * rate * (1 - m), Way(rate, None, m), steps=steps)
                for m in settings.momenta
            ]
            for rate in settings.rates
        ])  # fmt: skip

    pieces = {
        name_of(task): functools.partial(momentum, task)
        for task in dict.fromkeys((settings.task, *settings.more))
    }
    return Result(settings, store.get("noise", noise), store.all(pieces))


def plot(result: Result) -> dict[str, Figure]:
    """Losses under noise and by effective rate; error curves of the other tasks."""
    settings = result.settings
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    noise = result.noise
    t = np.arange(settings.steps + 1)
    for curves, color, label in (
        (noise.real, REAL, "real SGD"), (noise.sde, PREDICTED, "SDE of eq (1)")
    ):  # fmt: skip
        left.fill_between(t, curves.min(0), curves.max(0), color=color, alpha=0.2, lw=0)
        left.plot(t, np.median(curves, axis=0), color=color, lw=2, label=f"{label}, median")
    left.plot(t, noise.ode, "--", color=GREY, lw=2, label="ODE of eq (1)")
    unit = " N/λmax" if settings.relative else ""
    left.set(xlabel="step", ylabel="training loss", yscale="log",
             title=f"{name_of(settings.task)}: η = {settings.noisy_rate:g}{unit}, "
             f"batches of {settings.batch_size}")  # fmt: skip
    left.legend(frameon=False, fontsize=9)
    tidy(left)
    _families(right, result.curves[name_of(settings.task)][:, :, 0], settings)
    right.set(ylabel="training loss", title=f"{name_of(settings.task)}: full batches")
    right.legend(frameon=False, fontsize=8)
    more = Figure(figsize=(4.4 * len(settings.more), 4), layout="constrained")
    for axes, task in zip(np.atleast_1d(more.subplots(1, len(settings.more))), settings.more,
                          strict=True):  # fmt: skip
        _families(axes, 100 * result.curves[name_of(task)][:, :, 1], settings)
        axes.set(title=name_of(task), ylabel="misclassified training samples (%)")
        axes.legend(frameon=False, fontsize=8)
    return {"ttp-2": figure, "ttp-12": more}


def _families(axes: Axes, curves: np.ndarray, settings: Settings) -> None:
    """Curves (rates, momenta, T + 1): a color for each effective rate, a dash for each momentum."""
    dashes = ("-", "--", ":", "-.")
    for rate, color, family in zip(settings.rates, COLORS, curves, strict=False):
        for m, dash, curve in zip(settings.momenta, dashes, family, strict=False):
            axes.plot(curve, dash, color=color, lw=1.7, label=f"η/(1 − m) = {rate:g}, m = {m:g}")
    axes.set(xlabel="step")
    tidy(axes)


def measure(result: Result) -> dict[str, list[str]]:
    """Ends and times of the left panel; the distance of curves within and between families."""
    settings, noise = result.settings, result.noise
    median, sde = np.median(noise.real, axis=0), np.median(noise.sde, axis=0)
    drop = abs(median[0] - median[-1])
    lines = [
        f"loss at the end: real {median[-1]:.4g} ({noise.real[:, -1].min():.4g} to "
        f"{noise.real[:, -1].max():.4g}), SDE {sde[-1]:.4g} ({noise.sde[:, -1].min():.4g} to "
        f"{noise.sde[:, -1].max():.4g}), ODE {noise.ode[-1]:.4g}",
        f"mean distance from the real median, fraction of its drop: SDE "
        f"{100 * np.mean(np.abs(sde - median)) / drop:.1f} %, ODE "
        f"{100 * np.mean(np.abs(noise.ode - median)) / drop:.1f} %; times to 1, 10, 40 %: real "
        f"{_times(median)}, SDE {_times(sde)}, ODE {_times(noise.ode)}",
        f"spread (largest over smallest loss, median over the steps): real "
        f"{np.median(noise.real.max(0) / noise.real.min(0)):.2f}, SDE "
        f"{np.median(noise.sde.max(0) / noise.sde.min(0)):.2f}",
    ]
    out = {"ttp-2": lines, "ttp-12": []}
    for task, curves in result.curves.items():
        picture = "ttp-2" if task == name_of(settings.task) else "ttp-12"
        row = 0 if picture == "ttp-2" else 1
        some = curves[:, :, row]
        parts = []
        for rate, family in zip(settings.rates, some, strict=True):
            drop = max(abs(family[0, 0] - family[0, -1]), 1e-9)
            far = np.abs(family[1:] - family[0]).mean(axis=1) / drop
            parts.append(f"{rate:g}: " + ", ".join(f"{100 * v:.1f} %" for v in far))
        words = " / ".join(f"m = {m:g}" for m in settings.momenta[1:])
        lines = f"{task}, distance from m = 0 ({words}) at effective rate " + "; ".join(parts)
        if len(some) > 1:
            plain = some[:, 0]
            drop = max(abs(plain[0, 0] - plain[0, -1]), 1e-9)
            between = np.abs(np.diff(plain, axis=0)).mean(axis=1) / drop
            lines += "; between neighboring rates " + ", ".join(f"{100 * v:.0f} %" for v in between)
        out[picture].append(lines)
    return out


def _times(curve: np.ndarray) -> str:
    return ", ".join(str(int(training_time(curve, e))) for e in (0.01, 0.1, 0.4))
