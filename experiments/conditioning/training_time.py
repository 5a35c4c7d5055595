"""Is a condition number a forecast? Kappa beside forecast and real training times.

Many networks are trained by gradient descent at the same relative rate, eta = 1 / lambda_max of
their kernel. Three numbers say beforehand how long it takes until the loss is down to a fraction of
its first value: the worst case for this kappa, the forecast from the kernel and the labels, and
kappa itself as a ranking.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from experiments import cuts
from experiments.conditioning.inputs import load_inputs
from experiments.store import Pieces, listed, runner
from jaxttp import from_nnx, predict_training_time, train
from jaxttp.conditioning import condition_number, curvature_matrix
from jaxttp.models import MLP
from jaxttp.plots import OTHER, PREDICTED, REAL, tidy

CLAIM = {
    "ours-kappa-time": "A larger κ at initialization means slower convergence of gradient descent. "
    "(GNC Section 2 and Appendix H.1)"
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Networks and training.

    Attributes:
        data: images by name.
        samples: n.
        widths: of the hidden layers.
        depths: numbers of weight matrices.
        activations: of the hidden layers.
        fraction: of the first loss, where training is over.
        steps: horizon of forecast and training.
        seeds: of the weights.
        seed: of the samples.
    """

    data: str = "digits"
    samples: int = cuts.few(32, 60)
    widths: tuple[int, ...] = (20, 60, 200)
    depths: tuple[int, ...] = (2, 4)
    activations: tuple[str, ...] = ("relu", "tanh")
    fraction: float = 0.1
    steps: int = cuts.one(600)
    seeds: int = cuts.one(1)
    seed: int = 0


PRESETS = {
    "smoke": Settings(
        samples=20, widths=(30,), depths=(2,), activations=("relu",), steps=60, seeds=1
    ),
    "cpu": Settings(),
    "paper": Settings(data="mnist", samples=500, widths=(50, 200, 800), steps=3000, seeds=3),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One network on one version of the data; times in steps, inf where it takes longer.

    Attributes:
        whitened: whether the images are.
        condition: kappa of its Gauss-Newton matrix, at rank n C.
        worst: steps until the slowest direction is down to the square root of the fraction.
        forecast: from the kernel.
        real: of gradient descent.
    """

    whitened: bool
    condition: float
    worst: float
    forecast: float
    real: float


def first_below(curve: np.ndarray, fraction: float) -> float:
    """First step at which the loss is below this fraction of the first, inf if there is none."""
    below = np.flatnonzero(np.asarray(curve) < fraction * curve[0])
    return float(below[0]) if below.size else math.inf


def pieces(settings: Settings) -> Pieces:
    """Measure every network."""

    def one(whitened: bool, width: int, depth: int, activation: str, seed: int) -> Row:
        inputs = load_inputs(settings.data, whiten=whitened, seed=settings.seed)
        rows = np.random.default_rng(settings.seed).permutation(len(inputs.x))[: settings.samples]
        assert inputs.labels is not None
        x, y = inputs.x[rows].astype(np.float32), inputs.labels[rows]
        x = x / np.sqrt(np.mean(np.sum(x**2, axis=1)) / x.shape[1])
        sizes = (x.shape[1], *(width,) * (depth - 1), 10)
        apply_fn, params = from_nnx(MLP(sizes, rngs=nnx.Rngs(seed), activation=activation))
        matrix = curvature_matrix(apply_fn, params, x, form="outputs")
        found = condition_number(matrix, rank=len(matrix))
        rate = 1 / float(found.largest)
        forecast = predict_training_time(
            apply_fn,
            params,
            x,
            y,
            loss="squared_error",
            learning_rate=rate,
            steps=settings.steps,
            relinearize=0,
        )
        real = train(
            apply_fn, params, x, y, loss="squared_error", optimizer=optax.sgd(rate),
            steps=settings.steps,
        )  # fmt: skip
        kappa = float(found.value)
        return Row(
            whitened, kappa, 0.5 * math.log(settings.fraction) / math.log1p(-1 / kappa),
            first_below(np.asarray(forecast.loss), settings.fraction),
            first_below(np.asarray(real.loss), settings.fraction),
        )  # fmt: skip

    cases = itertools.product(
        (True, False), settings.widths, settings.depths, settings.activations, range(settings.seeds)
    )
    return {
        f"{'white' if case[0] else 'plain'}, m = {case[1]}, L = {case[2]}, {case[3]}, {case[4]}":
        functools.partial(one, *case)
        for case in cases
    }  # fmt: skip


run = runner(pieces, listed)
"""A `Row` for each network and version of the data."""


def _columns(result: list[Row]) -> dict[str, np.ndarray]:
    names = [field.name for field in dataclasses.fields(Row)]
    return {name: np.array([getattr(row, name) for row in result]) for name in names}


def plot(result: list[Row]) -> dict[str, Figure]:
    """Real steps against kappa, and against what was forecast."""
    columns = _columns(result)
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    known = np.isfinite(columns["real"])
    for white, color, label in ((True, PREDICTED, "whitened"), (False, REAL, "centered only")):
        chosen = known & (columns["whitened"] == white)
        left.loglog(columns["condition"][chosen], columns["real"][chosen], "o", color=color,
                    alpha=0.7, label=f"{label}, real")  # fmt: skip
        right.loglog(columns["forecast"][chosen], columns["real"][chosen], "o", color=color,
                     alpha=0.7, label=label)  # fmt: skip
    order = np.argsort(columns["condition"])
    left.loglog(columns["condition"][order], columns["worst"][order], color=OTHER,
                label="worst case for this κ")  # fmt: skip
    if np.any(known):
        ends = [np.min(columns["real"][known]), np.max(columns["real"][known])]
        right.loglog(ends, ends, color="0.45", lw=0.9, label="equal")
    left.set(xlabel="condition number at initialization", ylabel="steps of gradient descent")
    right.set(xlabel="steps, forecast from the kernel", ylabel="steps of gradient descent")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
        tidy(axes)
    return {"ours-kappa-time": figure}


def measure(result: list[Row]) -> dict[str, list[str]]:
    """Rank correlations with the real time, and the errors of the forecast."""
    columns = _columns(result)
    known = np.isfinite(columns["real"]) & np.isfinite(columns["forecast"])
    condition, real = columns["condition"], columns["real"]
    lines = [
        f"{np.sum(known)} of {len(result)} networks reach the fraction, forecast and real; κ from "
        f"{condition.min():.3g} to {condition.max():.3g}, real times {real.min():g} to "
        f"{real.max():g}"
    ]
    if np.sum(known) < 3:
        return {"ours-kappa-time": lines}
    groups = {"all": known} | {
        name: known & (columns["whitened"] == white)
        for name, white in (("whitened", True), ("centered only", False))
    }
    for name, chosen in groups.items():
        if np.sum(chosen) < 3:
            continue
        real = columns["real"][chosen]
        kappa = spearmanr(columns["condition"][chosen], real)[0]
        forecast = spearmanr(columns["forecast"][chosen], real)[0]
        error = np.abs(columns["forecast"][chosen] / real - 1)
        lines.append(
            f"{name}: rank correlation of the real time with κ {kappa:.2f}, with the forecast "
            f"{forecast:.2f}; error of the forecast {np.median(error):.0%} (median); worst case / "
            f"real {np.median(columns['worst'][chosen] / real):.3g} (median)"
        )
    return {"ours-kappa-time": lines}
