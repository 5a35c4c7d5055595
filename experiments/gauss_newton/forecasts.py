"""Training times of Gauss-Newton and of gradient descent, forecast before training and real.

Gauss-Newton's forecast needs the first outputs alone, gradient descent's the kernel.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from experiments import cuts
from experiments.gauss_newton.training import Phase, Training, load
from experiments.gauss_newton.training import train as train_reversible
from experiments.gauss_newton.variants import Case, build
from experiments.gauss_newton.variants import Settings as Variants
from experiments.store import Pieces, listed, runner
from jaxttp import empirical_ntk, from_nnx, predict_training_time, train, training_time
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.gauss_newton import forecast_steps
from jaxttp.plots import PREDICTED, REAL, tidy

THRESHOLDS = (0.01, 0.1, 0.4)
CLAIM = {
    "ours-gn-forecast": "Full-rank Gauss-Newton is forecast from the first outputs alone, gradient "
    "descent from its kernel: both training times are known before training. (ours)"
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """A regression of one-hot labels by a reversible network, full batch.

    Attributes:
        variants: data, samples, network, precision and seeds; its cases are ignored.
        rates: of Gauss-Newton.
        steps: of Gauss-Newton.
        fractions: of the largest stable rate, for gradient descent.
        horizon: steps of gradient descent.
    """

    variants: Variants
    rates: tuple[float, ...] = cuts.first((0.1, 0.3, 0.6))
    steps: int = cuts.one(60)
    fractions: tuple[float, ...] = cuts.first((0.1, 0.3))
    horizon: int = cuts.one(150)


PRESETS = {
    "smoke": Settings(
        Variants((), data=("wine",), samples=40, blocks=(1,), bottleneck=64, batch_size=None,
                 loss="squared_error", seeds=(0,)),
        rates=(0.3,), steps=10, fractions=(0.3,), horizon=10,
    ),
    "cpu": Settings(
        Variants((), samples=100, blocks=(2,), bottleneck=256, batch_size=None,
                 loss="squared_error"),
    ),
    "paper": Settings(
        Variants((), data=("cifar10",), samples=1024, blocks=(6,), bottleneck=8000, batch_size=None,
                 loss="squared_error", float64=False),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pair:
    """A forecast and what happened.

    Attributes:
        optimizer: "gn" or "gd".
        rate: of Gauss-Newton, or the fraction of the largest stable one.
        forecast: loss (T + 1,).
        real: loss (T + 1,).
    """

    optimizer: str
    rate: float
    forecast: np.ndarray
    real: np.ndarray

    def times(self) -> list[tuple[int, int]]:
        """(forecast, real) for every threshold."""
        return [
            (int(training_time(self.forecast, e)), int(training_time(self.real, e)))
            for e in THRESHOLDS
        ]


def pieces(settings: Settings) -> Pieces:
    """Forecast, then train."""
    variants = settings.variants

    def one(optimizer: str, rate: float, seed: int) -> Pair:
        with jax.enable_x64(variants.float64):
            data = load(variants.data[0], key=jax.random.key(0), samples=variants.samples)
            case = Case(optimizer, ((optimizer, settings.steps),))
            model = build(variants, case, data, seed)
            targets = np.eye(data.outputs)[data.y]
            if optimizer == "gn":
                outputs = model(jnp.asarray(data.x))
                ahead = forecast_steps(
                    outputs, targets, loss="squared_error", learning_rate=rate,
                    steps=settings.steps,
                )  # fmt: skip
                record = train_reversible(
                    model, data,
                    Training((Phase("gn", rate, settings.steps),), pseudoinverse="exact"),
                    key=jax.random.key(seed),
                )  # fmt: skip
                real = np.append(record.batch_loss, record.train_loss[-1])
                return Pair(optimizer, rate, np.asarray(ahead.loss), real)
            apply_fn, params = from_nnx(model)
            x = np.asarray(model.embed(data.x))[:, : model.inputs]

            kernel = empirical_ntk(apply_fn, params, x)
            outputs = apply_fn(params, x)
            eta = rate * float(max_learning_rate(kernel, outputs, targets, loss="squared_error"))
            ahead = predict_training_time(
                apply_fn, params, x, targets, loss="squared_error", learning_rate=eta,
                steps=settings.horizon, relinearize=0,
            )  # fmt: skip
            real = train(
                apply_fn, params, x, targets, loss="squared_error", optimizer=optax.sgd(eta),
                steps=settings.horizon,
            )  # fmt: skip
            return Pair("gd", rate, np.asarray(ahead.loss), np.asarray(real.loss))

    return {
        f"{optimizer} {rate:g}/{seed}": functools.partial(one, optimizer, rate, seed)
        for optimizer, rates in (("gn", settings.rates), ("gd", settings.fractions))
        for rate in rates
        for seed in variants.seeds
    }


run = runner(pieces, listed)
"""A `Pair` for every rate and seed."""


def plot(result: list[Pair]) -> dict[str, Figure]:
    """Loss curves of the first seed, and all training times."""
    figure = Figure(figsize=(13, 3.9), layout="constrained")
    curves = figure.subplots(1, 3)
    words = {"gn": "Gauss-Newton, rate", "gd": "gradient descent, fraction of the stable rate"}
    for axes, optimizer in zip(curves, words, strict=False):
        shown: set[float] = set()
        for pair in result:
            if pair.optimizer != optimizer or pair.rate in shown:
                continue
            shown.add(pair.rate)
            first = len(shown) == 1
            axes.semilogy(pair.forecast, color=PREDICTED, label="forecast" if first else None)
            axes.semilogy(pair.real, "--", color=REAL, label="real" if first else None)
        rates = ", ".join(f"{rate:g}" for rate in sorted(shown))
        axes.set(xlabel="step", ylabel="training loss", title=f"{words[optimizer]} {rates}")
        axes.title.set_fontsize(9)
        axes.legend(frameon=False, fontsize=9)
        tidy(axes)
    axes = curves[2]
    for optimizer, marker in (("gn", "o"), ("gd", "s")):
        points = [time for pair in result if pair.optimizer == optimizer for time in pair.times()]
        ahead, real = np.array(points).T
        label = {"gn": "Gauss-Newton", "gd": "gradient descent"}[optimizer]
        axes.plot(real, ahead, marker, mfc="none", color=PREDICTED if marker == "o" else REAL,
                  label=label)  # fmt: skip
    last = max(max(time) for pair in result for time in pair.times())
    axes.plot([0, last], [0, last], color="0.5", lw=0.8)
    axes.set(xlabel="real training time, steps", ylabel="predicted training time, steps")
    axes.legend(frameon=False, fontsize=9)
    tidy(axes)
    return {"ours-gn-forecast": figure}


def measure(result: list[Pair]) -> dict[str, list[str]]:
    """Training times side by side, and the mean error."""
    lines = []
    for optimizer in ("gn", "gd"):
        pairs = [pair for pair in result if pair.optimizer == optimizer]
        for rate in dict.fromkeys(pair.rate for pair in pairs):
            times = np.array([pair.times() for pair in pairs if pair.rate == rate])
            error = np.abs(times[..., 0] - times[..., 1]).mean(0)
            name = "Gauss-Newton at" if optimizer == "gn" else "gradient descent at a fraction of"
            lines.append(
                f"{name} {rate:g}: forecast / real, first seed: "
                + ", ".join(f"{a} / {b}" for a, b in times[0])
                + "; mean error over the seeds at 1, 10, 40 %: "
                + ", ".join(f"{value:.1f}" for value in error)
                + " steps"
            )
        times = np.array([pair.times() for pair in pairs]).reshape(-1, 2)
        exact = int(np.sum(times[:, 0] == times[:, 1]))
        lines.append(f"{exact} of {len(times)} times exact, the longest {times[:, 1].max()} steps")
    return {"ours-gn-forecast": lines}
