"""Curves of many variants of one training: the XGN paper's figures 1, 2, 5-8 and 12-15.

A case says what differs: the optimizers one after the other, the bottleneck, the scale of the
first weights, weight decay, the pseudo-inverse. Every optimizer's rate is searched for from one
grid, for every case anew: the largest progress of the first seed in a first epoch (with the full
batch: in the whole run) that stays stable to the end for all seeds. The paper's own search with
the full batch is for the largest rate that does not diverge (search="largest"). A run of the full
batch diverges that exceeds a hundred times its first loss or ends above it: Adam's first steps may
overshoot and recover. With mini-batches a run is stable whose loss never doubles its first value
nor grows to three times its least (the paper gives no numbers).
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments import cuts
from experiments.gauss_newton.search import RATES, best_first, first_stable, largest_first
from experiments.gauss_newton.training import Phase, Record, Samples, Training, load, train
from experiments.store import Pieces, listed, runner
from jaxttp.models import RevMLP
from jaxttp.plots import tidy

RISE, OVERSHOOT, FLOOR, TARGET = 3.0, 100.0, 1e-16, 1e-3
COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (6, 1)), (0, (3, 1, 1, 1)), "-")
NAMES = {"gn": "Gauss-Newton", "ggn": "generalized GN", "adam": "Adam", "sgd": "SGD"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A curve.

    Attributes:
        label: in the legend.
        phases: (optimizer, epochs) one after the other; steps in place of epochs with the full
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
        data: data sets, see `load`; a row of panels each.
        samples: training samples; None for all.
        blocks: L, for every data set.
        bottleneck: m.
        batch_size: None for the full batch.
        loss: see `Training`.
        float64: whether everything is in double precision.
        seeds: of weights and batches.
        rates: the grid.
        search: of a rate, "best" or "largest".
    """

    cases: tuple[Case, ...] = cuts.each()
    data: tuple[str, ...] = ("digits",)
    samples: int | None = cuts.few(32, None, otherwise="batch_size")
    blocks: tuple[int, ...] = (3,)
    bottleneck: int = 512
    batch_size: int | None = cuts.few(4, 128)
    loss: str = "cross_entropy"
    float64: bool = True
    seeds: tuple[int, ...] = cuts.one((0, 1, 2))
    rates: tuple[float, ...] = cuts.first(RATES)
    search: str = "best"


@dataclasses.dataclass(frozen=True)
class Curve:
    """What one case did.

    Attributes:
        label: of the case.
        data: the data set.
        rates: optimizer -> learning rate.
        time: of the evaluations, in epochs, or steps with the full batch (E,).
        train_loss: (E, S), a column for each seed; NaN after divergence.
        test_loss: likewise.
        test_accuracy: likewise; R² for a regression.
        train_accuracy: likewise.
    """

    label: str
    data: str
    rates: dict[str, float]
    time: np.ndarray
    train_loss: np.ndarray
    test_loss: np.ndarray
    test_accuracy: np.ndarray
    train_accuracy: np.ndarray


def build(
    settings: Settings, case: Case, data: Samples, seed: int, blocks: int | None = None
) -> RevMLP:
    """The network before training; its blocks are the first of the settings when None."""
    bottleneck = settings.bottleneck if case.bottleneck == 0 else case.bottleneck
    return RevMLP(
        int(np.prod(data.x.shape[1:])), data.outputs, rngs=nnx.Rngs(seed),
        blocks=blocks or settings.blocks[0],
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


def search_rate(
    settings: Settings,
    case: Case,
    optimizer: str,
    data: Samples,
    steps: int,
    blocks: int | None = None,
) -> float:
    """The rate of one optimizer for one case, stable on all seeds."""
    full = settings.batch_size is None

    def once(rate: float, steps: int, seed: int) -> Record:
        training = training_of(settings, case, [Phase(optimizer, rate, steps)])
        model = build(settings, case, data, seed, blocks)
        return train(model, data, training, key=jax.random.key(seed))

    if settings.search == "largest":
        order = largest_first(settings.rates)
    else:
        probe = steps if full else steps_an_epoch(settings, data)
        order = best_first(settings.rates, lambda rate: once(rate, probe, settings.seeds[0]))
    rise = float("inf") if full else RISE
    whole = lambda rate: [functools.partial(once, rate, steps, s) for s in settings.seeds]  # noqa: E731
    return first_stable(order, whole, rise=rise)[0]


def pieces(settings: Settings) -> Pieces:
    """Search for the rates and train every seed of every case."""

    def one(case: Case, name: str, blocks: int) -> Curve:
        with jax.enable_x64(settings.float64):
            data = load(name, key=jax.random.key(0), samples=settings.samples)
            epoch = steps_an_epoch(settings, data)
            longest: dict[str, int] = {}
            for optimizer, epochs in case.phases:
                longest[optimizer] = max(longest.get(optimizer, 0), epochs * epoch)
            rates = {
                optimizer: case.rate or search_rate(settings, case, optimizer, data, steps, blocks)
                for optimizer, steps in longest.items()
            }
            phases = [Phase(key, rates[key], epochs * epoch) for key, epochs in case.phases]
            training = training_of(settings, case, phases)
            records = [
                train(build(settings, case, data, seed, blocks), data, training,
                      key=jax.random.key(seed))
                for seed in settings.seeds
            ]  # fmt: skip
        table = {
            key: np.stack([getattr(record, key) for record in records], axis=1)
            for key in ("train_loss", "test_loss", "test_accuracy", "train_accuracy")
        }
        return Curve(case.label, name, rates, records[0].steps / epoch, **table)

    return {
        f"{name}/{case.label}": functools.partial(one, case, name, blocks)
        for name, blocks in zip(settings.data, settings.blocks, strict=True)
        for case in settings.cases
    }


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
    """A panel for each quantity and data set: means over the seeds, bands from least to greatest.

    Args:
        result: of `run`.
        panels: fields of `Curve`.
        time: label of the horizontal axis.
        score: how an accuracy is called; R² is not drawn in per cent.
        mark: a time to mark.

    Returns:
        A figure.
    """
    data = list(dict.fromkeys(curve.data for curve in result))
    figure = Figure(figsize=(4.7 * len(panels), 3.9 * len(data)), layout="constrained")
    grid = figure.subplots(len(data), len(panels), squeeze=False)
    for axes, (row, name) in zip(grid.flat, itertools.product(data, panels), strict=True):
        part, kind = name.split("_")
        own = [curve for curve in result if curve.data == row]
        for curve, color, dash in zip(own, COLORS, DASHES, strict=False):
            values = getattr(curve, name)
            if kind == "loss":
                values = np.maximum(values, FLOOR)
                middle = np.exp(np.mean(np.log(values), axis=1))
            else:
                values = 100 * values if "%" in score else values
                middle = values.mean(axis=1)
            rates = ", ".join(f"{rate:g}" for rate in curve.rates.values())
            label = curve.label if curve.label.endswith(f" {rates}") else f"{curve.label} ({rates})"
            axes.plot(curve.time, middle, color=color, ls=dash, lw=1.8, label=label)
            axes.fill_between(
                curve.time, values.min(axis=1), values.max(axis=1), color=color, alpha=0.18, lw=0
            )
        words = {"train": "training", "test": "test"}[part]
        axes.set(xlabel=time, ylabel=f"{words} {'loss' if kind == 'loss' else score}")
        axes.set_yscale("log" if kind == "loss" else "linear")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len({curve.time[-1] for curve in own}) > 1:  # of few steps and of many
            axes.set_xscale("symlog", linthresh=10)
        if len(data) > 1:
            axes.set_title(row, fontsize=10)
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
        below = curve.train_loss <= TARGET
        first = [f"{curve.time[seed.argmax()]:g}" if seed.any() else "never" for seed in below.T]
        loss = curve.train_loss.mean(axis=1)
        lines.append(
            f"{curve.data}, {curve.label} (rate: {rates}): training loss {TARGET:g} at time "
            f"{', '.join(first)}; {loss[1]:.3g} at time {curve.time[1]:g}; at the end "
            f"{loss[-1]:.3g}, test loss {curve.test_loss[-1].mean():.3g} (least {best:.3g}), test "
            f"{score} {curve.test_accuracy[-1].mean():.3f}, at time {curve.time[-1]:g}"
        )
        lead = result[0].train_loss.mean(axis=1)
        if np.array_equal(curve.time, result[0].time) and loss[-1] < lead[-1]:
            since = curve.time[np.flatnonzero(loss >= lead)[-1] + 1]
            lines[-1] += f"; below the loss of {result[0].label} from time {since:g} on"
    return lines
