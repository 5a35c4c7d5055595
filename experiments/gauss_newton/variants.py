"""Curves of many variants of one training: the XGN paper's figures 5-8 and 12-15.

A case says what differs: the optimisers one after the other, the bottleneck, the scale of the
first weights, weight decay, the pseudo-inverse. Every optimiser's rate is searched for from one
grid, for every case anew: the largest progress of the first seed in a first epoch (with the full
batch: in the whole run) that stays stable to the end for all seeds.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments import cuts
from experiments.gauss_newton.search import RATES, best_first, first_stable
from experiments.gauss_newton.training import Phase, Record, Samples, Training, load, train
from experiments.store import Pieces, listed, runner
from jaxttp.models import RevMLP
from jaxttp.plots import tidy

RISE, OVERSHOOT, FLOOR = 3.0, 100.0, 1e-16
COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
NAMES = {"gn": "Gauss-Newton", "ggn": "generalised GN", "adam": "Adam", "sgd": "SGD"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A curve.

    Attributes:
        label: in the legend.
        phases: (optimiser, epochs) one after the other; steps in place of epochs with the full
            batch.
        rate: a fixed learning rate; None for the search.
        bottleneck: m; None for no bottleneck, 0 for that of the settings.
        scale: of the first weights, see `RevMLP`.
        pseudoinverse: see `gauss_newton_direction`.
        rtol: of the pseudo-inverse.
        weight_decay: see `Training`.
    """

    label: str
    phases: tuple[tuple[str, int], ...] = cuts.phases()
    rate: float | None = None
    bottleneck: int | None = 0
    scale: float | str = 1e-3
    pseudoinverse: str = "truncate"
    rtol: float = 0.01
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the cases share.

    Attributes:
        cases: the curves.
        data: a data set, see `load`.
        samples: training samples; None for all.
        blocks: L.
        bottleneck: m.
        batch_size: None for the full batch.
        loss: see `Training`.
        float64: whether everything is in double precision.
        seeds: of weights and batches.
        rates: the grid.
    """

    cases: tuple[Case, ...] = cuts.each()
    data: str = "digits"
    samples: int | None = cuts.few(32, None, otherwise="batch_size")
    blocks: int = 3
    bottleneck: int = 512
    batch_size: int | None = cuts.few(4, 128)
    loss: str = "cross_entropy"
    float64: bool = True
    seeds: tuple[int, ...] = cuts.one((0, 1, 2))
    rates: tuple[float, ...] = cuts.first(RATES)


@dataclasses.dataclass(frozen=True)
class Curve:
    """What one case did.

    Attributes:
        label: of the case.
        rates: optimiser -> learning rate.
        time: of the evaluations, in epochs, or steps with the full batch (E,).
        train_loss: (E, S), a column for each seed; NaN after divergence.
        test_loss: likewise.
        test_accuracy: likewise; R² for a regression.
        train_accuracy: likewise.
    """

    label: str
    rates: dict[str, float]
    time: np.ndarray
    train_loss: np.ndarray
    test_loss: np.ndarray
    test_accuracy: np.ndarray
    train_accuracy: np.ndarray


def build(settings: Settings, case: Case, data: Samples, seed: int) -> RevMLP:
    """The network before training."""
    bottleneck = settings.bottleneck if case.bottleneck == 0 else case.bottleneck
    return RevMLP(
        int(np.prod(data.x.shape[1:])), data.outputs, rngs=nnx.Rngs(seed), blocks=settings.blocks,
        bottleneck=bottleneck, readout="orthonormal", scale=case.scale,
        param_dtype=jnp.float64 if settings.float64 else jnp.float32,
    )  # fmt: skip


def steps_an_epoch(settings: Settings, data: Samples) -> int:
    """1 with the full batch."""
    return 1 if settings.batch_size is None else len(data.x) // settings.batch_size


def training_of(settings: Settings, case: Case, phases: Sequence[Phase], **more: Any) -> Training:
    """How a case trains in these phases."""
    full = settings.batch_size is None
    return Training(
        tuple(phases), settings.loss, settings.batch_size, pseudoinverse=case.pseudoinverse,
        rtol=case.rtol, weight_decay=case.weight_decay,
        limit=OVERSHOOT if full else Training.limit, **more,
    )  # fmt: skip


def search_rate(settings: Settings, case: Case, optimizer: str, data: Samples, steps: int) -> float:
    """The rate of one optimiser for one case: best on the first seed, stable on all."""
    epoch = steps_an_epoch(settings, data)

    def once(rate: float, steps: int, seed: int) -> Record:
        phase = Phase(optimizer, rate, steps)
        return train(
            build(settings, case, data, seed), data, training_of(settings, case, [phase]),
            key=jax.random.key(seed),
        )  # fmt: skip

    full = settings.batch_size is None
    probe, first = steps if full else epoch, settings.seeds[0]
    order = best_first(settings.rates, lambda rate: once(rate, probe, first))
    rise = float("inf") if full else RISE
    whole = lambda rate: [functools.partial(once, rate, steps, s) for s in settings.seeds]  # noqa: E731
    return first_stable(order, whole, rise=rise)[0]


def pieces(settings: Settings) -> Pieces:
    """Search for the rates and train every seed of every case."""

    def one(case: Case) -> Curve:
        with jax.enable_x64(settings.float64):
            data = load(settings.data, key=jax.random.key(0), samples=settings.samples)
            epoch = steps_an_epoch(settings, data)
            longest: dict[str, int] = {}
            for optimizer, epochs in case.phases:
                longest[optimizer] = max(longest.get(optimizer, 0), epochs * epoch)
            rates = {
                optimizer: case.rate or search_rate(settings, case, optimizer, data, steps)
                for optimizer, steps in longest.items()
            }
            phases = [Phase(name, rates[name], epochs * epoch) for name, epochs in case.phases]
            records = [
                train(
                    build(settings, case, data, seed), data, training_of(settings, case, phases),
                    key=jax.random.key(seed),
                )
                for seed in settings.seeds
            ]  # fmt: skip
        table = {
            name: np.stack([getattr(record, name) for record in records], axis=1)
            for name in ("train_loss", "test_loss", "test_accuracy", "train_accuracy")
        }
        return Curve(case.label, rates, records[0].steps / epoch, **table)

    return {case.label: functools.partial(one, case) for case in settings.cases}


run = runner(pieces, listed)
"""A `Curve` for each case."""


def plot(
    result: list[Curve],
    *,
    panels: Sequence[str] = ("train_loss", "test_loss", "test_accuracy"),
    time: str = "epoch",
    score: str = "accuracy (%)",
    mark: float | None = None,
) -> Figure:
    """A panel for each quantity: means over the seeds, bands from the least to the greatest.

    Args:
        result: of `run`.
        panels: fields of `Curve`.
        time: label of the horizontal axis.
        score: how an accuracy is called; R² is not drawn in per cent.
        mark: a time to mark.

    Returns:
        A figure.
    """
    figure = Figure(figsize=(4.7 * len(panels), 3.9), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        part, kind = name.split("_")
        for curve, color in zip(result, COLORS, strict=False):
            values = getattr(curve, name)
            if kind == "loss":
                values = np.maximum(values, FLOOR)
                middle = np.exp(np.mean(np.log(values), axis=1))
            else:
                values = 100 * values if "%" in score else values
                middle = values.mean(axis=1)
            rates = ", ".join(f"{rate:g}" for rate in curve.rates.values())
            axes.plot(curve.time, middle, color=color, lw=1.8, label=f"{curve.label} ({rates})")
            axes.fill_between(
                curve.time, values.min(axis=1), values.max(axis=1), color=color, alpha=0.18, lw=0
            )
        words = {"train": "training", "test": "test"}[part]
        axes.set(xlabel=time, ylabel=f"{words} {'loss' if kind == 'loss' else score}")
        axes.set_yscale("log" if kind == "loss" else "linear")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if kind != "loss" and "R²" in score:
            axes.set_ylim(-1, 1.05)  # a model that is worse than the mean is far below
        if mark is not None:
            axes.axvline(mark, color="0.5", ls="--", lw=1)
        tidy(axes)
        if name == panels[0]:
            axes.legend(frameon=False, fontsize=8, title="(learning rate)", title_fontsize=7)
    return figure


def measure(result: list[Curve], *, score: str = "accuracy") -> list[str]:
    """A line for each case: where it ended, means over the seeds."""
    lines = []
    for curve in result:
        best = np.nanmin(curve.test_loss, axis=0).mean()
        rates = ", ".join(f"{NAMES[name]} {rate:g}" for name, rate in curve.rates.items())
        lines.append(
            f"{curve.label} (rate: {rates}): training loss {curve.train_loss[-1].mean():.3g}, test "
            f"loss {curve.test_loss[-1].mean():.3g} (least {best:.3g}), test {score} "
            f"{curve.test_accuracy[-1].mean():.3f}, at time {curve.time[-1]:g}"
        )
    return lines
