"""A deep linear network while it trains: loss, kappa and both bounds."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from experiments import cuts
from experiments.conditioning.inputs import load_inputs
from experiments.store import Pieces, listed, runner
from jaxttp.conditioning import LinearPoint, gaussian_weights, linear_point
from jaxttp.plots import OTHER, PREDICTED, REAL, plot_draws, tidy
from jaxttp.training import train

CLAIM = {
    "gnc-10": "κ stays within about 50 % of its value at initialization (6 to 12), and the bound "
    "stays tight. (GNC Figure 10, Appendix D)"
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Appendix D: SGD at a constant rate on whitened images.

    Attributes:
        data: images by name.
        side: of the images.
        samples: n.
        width: m of both hidden layers.
        epochs: of SGD.
        batch_size: a step.
        learning_rate: constant, for the mean over samples of half the squared error.
        points: checkpoints after the start, evenly spaced.
        seeds: of weights and batches.
        seed: of samples.
    """

    data: str = "digits"
    side: int = 8
    samples: int = cuts.few(32, 1000)
    width: int = 200
    epochs: int = cuts.one(500)
    batch_size: int = cuts.few(4, 250)
    learning_rate: float = 0.2
    points: int = cuts.points(20)
    seeds: int = cuts.one(3)
    seed: int = 0


PRESETS = {
    "smoke": Settings(side=4, samples=60, width=20, epochs=4, batch_size=30, points=1, seeds=2),
    "cpu": Settings(),
    "paper": Settings(data="cifar10", width=500, epochs=5000, batch_size=256, points=50),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One seed.

    Attributes:
        loss: at every step (T + 1,).
        epochs: of the checkpoints (P,).
        condition: kappa (P,).
        convex: the convex bound (P,).
        maximum: the maximum bound (P,).
    """

    loss: np.ndarray
    epochs: np.ndarray
    condition: np.ndarray
    convex: np.ndarray
    maximum: np.ndarray


def network(weights: list[Any], x: Any) -> Any:
    """f(x) = W_L ... W_1 x, a sample a row."""
    for w in weights:
        x = x @ w.T
    return x


def pieces(settings: Settings) -> Pieces:
    """Train every seed, and measure."""
    inputs = load_inputs(settings.data, settings.samples, side=settings.side, seed=settings.seed)
    sigma = inputs.covariance
    assert inputs.labels is not None
    labels = inputs.labels
    classes = int(labels.max()) + 1
    batches = settings.samples // settings.batch_size

    def one(seed: int) -> Run:
        sizes = (inputs.x.shape[1], settings.width, settings.width, classes)
        # PyTorch's default initialization has this variance; kappa does not depend on it.
        key = jax.random.key(seed)
        weights = gaussian_weights(sizes, key=key, gain=1 / 3)
        every = settings.epochs * batches // settings.points
        steps: list[int] = []
        points: list[LinearPoint] = []

        def measure(step: int, now: list[Any], _: float) -> None:
            if step % every == 0:
                steps.append(step)
                points.append(linear_point([np.asarray(w, np.float64) for w in now], sigma))

        run = train(
            network, [jnp.asarray(w, jnp.float32) for w in weights],
            inputs.x.astype(np.float32), labels, loss="squared_error",
            optimizer=optax.sgd(settings.learning_rate), steps=settings.epochs * batches,
            batch_size=settings.batch_size, key=key, callback=measure,
        )  # fmt: skip
        return Run(
            np.asarray(run.loss),
            np.array(steps) / batches,
            np.array([float(point.condition.value) for point in points]),
            np.array([float(point.convex) for point in points]),
            np.array([float(point.maximum) for point in points]),
        )

    return {f"seed {seed}": functools.partial(one, seed) for seed in range(settings.seeds)}


run = runner(pieces, listed)
"""A `Run` for each seed."""


def plot(result: list[Run]) -> dict[str, Figure]:
    """Loss, and condition number with its bounds."""
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    last = result[0].epochs[-1]
    for one in result:
        left.semilogy(np.linspace(0, last, len(one.loss)), one.loss, color=PREDICTED, lw=0.9)
    left.set(xlabel="epoch", ylabel="training loss")
    for name, label, color, style in (
        ("condition", "κ", PREDICTED, "-"),
        ("convex", "convex bound", REAL, "--"),
        ("maximum", "maximum bound", OTHER, ":"),
    ):
        table = np.stack([getattr(one, name) for one in result], axis=1)
        plot_draws(right, result[0].epochs, table, label=label, color=color, style=style)
    right.set_yscale("log")
    right.set(xlabel="epoch", ylabel="condition number")
    right.legend(frameon=False, fontsize=9)
    tidy(left)
    tidy(right)
    return {"gnc-10": figure}


def measure(result: list[Run]) -> dict[str, list[str]]:
    """How far kappa moves, and how tight the bound stays."""
    lines = []
    for seed, one in enumerate(result):
        ratio = one.convex / one.condition
        lines.append(
            f"seed {seed}: loss {one.loss[0]:.3g} to {one.loss[-1]:.3g}; κ {one.condition[0]:.3g} "
            f"at the start, {one.condition.min():.3g} to {one.condition.max():.3g} on the way "
            f"({one.condition[-1] / one.condition[0] - 1:+.0%} at the end); convex/κ "
            f"{ratio.min():.3g} to {ratio.max():.3g}, maximum/κ up to "
            f"{np.max(one.maximum / one.condition):.3g}"
        )
    return {"gnc-10": lines}
