"""What training mode does to training times: batch statistics of BatchNorm, and dropout.

    python -m experiments.bench.training_mode [--preset smoke|cpu]

A forecast is of the network in evaluation mode: BatchNorm on its running averages, dropout off.
Here every task is trained twice from the same weights with the same batches: in evaluation mode,
and in training mode (statistics of the batch, averages that move along, masks drawn anew at every
step). Both losses are those of all training samples in evaluation mode, as a forecast states them.
A factor of two times is that of training mode over evaluation mode; the middle and the range of
eight in ten of them are printed, on the tasks of the first half and on those of the second, so that
a factor that is worth anything would show itself in both.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.bench.accuracy_tables import line
from experiments.bench.accuracy_tasks import samples
from jaxttp import empirical_ntk, from_nnx, train, training_time
from jaxttp.data import load_dataset
from jaxttp.dynamics import batch_indices
from jaxttp.losses import get_loss
from jaxttp.models import ResNet, calibrate_batch_norm, fresh_head

THRESHOLDS = (0.01, 0.1, 0.4)
RESNET = "ResNet, pre-trained in training mode, BatchNorm"


@dataclasses.dataclass(frozen=True)
class ModeSettings:
    """What to train: the tasks of MLPs and the digits for the ResNet, each in two halves."""

    halves: tuple[tuple[str, ...], tuple[str, ...]] = (
        ("digits 0-4, MLP", "wine, MLP", "moons, MLP"),
        ("digits 5-9, MLP", "breast cancer, MLP", "clusters, tanh MLP"),
    )
    resnets: tuple[tuple[int, ...], tuple[int, ...]] = ((1, 3, 5, 7, 9), (5, 6, 7, 8, 9))
    pretraining: int = 300
    dropouts: tuple[float, ...] = (0.1, 0.3, 0.5)
    rates: tuple[float, ...] = (0.3, 1.0)
    batches: tuple[int | None, ...] = (None, 32, 16)
    seeds: tuple[int, ...] = (0, 1)
    width: int = 64
    steps: int = 150


PRESETS = {
    "smoke": ModeSettings(
        (("wine, MLP",), ("moons, MLP",)), ((), ()), 0, (0.3,), (1.0,), (16,), (0,), 8, 12
    ),
    "cpu": ModeSettings(),
}


class Network(nnx.Module):
    """Two hidden layers, each with batch norm or dropout behind it."""

    def __init__(
        self, inputs: int, outputs: int, width: int, *, norm: bool, rate: float, rngs: nnx.Rngs
    ) -> None:
        sizes = (inputs, width, width)
        pairs = list(itertools.pairwise(sizes))
        self.layers = nnx.List(nnx.Linear(a, b, rngs=rngs) for a, b in pairs)
        self.norms = nnx.List(nnx.BatchNorm(b, rngs=rngs) for _, b in pairs if norm)
        self.dropouts = nnx.List(nnx.Dropout(rate, rngs=rngs) for _ in pairs if rate)
        self.out = nnx.Linear(width, outputs, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Outputs (N, C)."""
        x = x.reshape(len(x), -1)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            x = self.norms[i](x) if self.norms else x
            x = nnx.relu(x)
            x = self.dropouts[i](x) if self.dropouts else x
        return self.out(x)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Training times in both modes (3,), and end losses; times are -1 where a run diverged."""

    kind: str
    half: int
    still: tuple[int, ...]
    moving: tuple[int, ...]
    ends: tuple[float, float]


class Course(NamedTuple):
    """A network in training mode, in parts, and a step of it.

    Attributes:
        graph: of the module in training mode.
        still: of the module in evaluation mode.
        weights: what is trained.
        others: running averages and random streams.
        step: ``(weights, others, rows) -> (weights, others)``.
    """

    graph: Any
    still: Any
    weights: Any
    others: Any
    step: Callable[..., tuple[Any, Any]]


def set_out(module: nnx.Module, x: Any, y: Any, eta: float) -> Course:
    """Gradient descent in training mode; the module is not changed.

    Args:
        module: before training.
        x: samples (N, ...).
        y: labels (N,).
        eta: its rate.
    """
    module, x = nnx.clone(module), jnp.asarray(x)
    module.train()
    graph, weights, others = nnx.split(module, nnx.Param, ...)
    evaluation = nnx.clone(module)
    evaluation.eval()
    still, _, _ = nnx.split(evaluation, nnx.Param, ...)
    exact, targets = get_loss("cross_entropy"), _targets(y)

    @jax.jit
    def step(weights: Any, others: Any, rows: Any) -> tuple[Any, Any]:
        def loss(weights: Any) -> tuple[Any, Any]:
            model = nnx.merge(graph, weights, others, copy=True)
            value = exact.value(model(x[rows]), targets[rows])
            return value, nnx.split(model, nnx.Param, ...)[2]

        gradient, after = jax.grad(loss, has_aux=True)(weights)
        return jax.tree.map(lambda w, g: w - eta * g, weights, gradient), after

    return Course(graph, still, weights, others, step)


def _targets(y: Any) -> jax.Array:
    return jnp.asarray(np.eye(int(np.max(y)) + 1, dtype=np.float32)[np.asarray(y)])


def train_in_training_mode(
    module: nnx.Module, x: Any, y: Any, eta: float, batches: np.ndarray
) -> np.ndarray:
    """Losses (T + 1,) of all samples in evaluation mode, along a training in training mode.

    Args:
        module: before training; it is not changed.
        x: samples (N, ...).
        y: labels (N,).
        eta: rate of gradient descent.
        batches: rows of every step (T, B).
    """
    course, exact, targets = set_out(module, x, y, eta), get_loss("cross_entropy"), _targets(y)

    @jax.jit
    def loss_of(weights: Any, others: Any) -> Any:
        return exact.value(nnx.merge(course.still, weights, others, copy=True)(x), targets)

    weights, others = course.weights, course.others
    losses = [loss_of(weights, others)]
    for rows in batches:
        weights, others = course.step(weights, others, rows)
        losses.append(loss_of(weights, others))
    return np.asarray(losses)


def pretrained(classes: tuple[int, ...], settings: ModeSettings, seed: int) -> nnx.Module:
    """A ResNet with BatchNorm, trained in training mode on the digits that are not asked for."""
    known = tuple(digit for digit in range(10) if digit not in classes)
    data = load_dataset("digits", classes=known, per_class=100, key=jax.random.key(seed))
    module = ResNet(
        len(known), widths=(16, 32), strides=(1, 2), norm="batch", rngs=nnx.Rngs(seed)
    )  # fmt: skip
    course = set_out(calibrate_batch_norm(module, data.x), data.x, data.y, 0.1)
    weights, others = course.weights, course.others
    key = jax.random.key(seed + 1)
    for rows in np.asarray(batch_indices(key, len(data.x), 32, settings.pretraining)):
        weights, others = course.step(weights, others, rows)
    return nnx.merge(course.still, weights, others, copy=True)


def compare_modes(
    kind: str, half: int, module: nnx.Module, x: Any, y: Any, settings: ModeSettings, seed: int
) -> list[Pair]:
    """All rates and batch sizes of one network."""
    model = from_nnx(module)
    kernel = np.asarray(empirical_ntk(*model, x), np.float64)
    size = kernel.shape[0] * kernel.shape[1]
    largest = float(np.linalg.eigvalsh(kernel.reshape(size, size))[-1]) / len(x)
    out = []
    for share, batch in itertools.product(settings.rates, settings.batches):
        eta, key = share / largest, jax.random.key(seed + 50)
        real = train(
            *model, x, y, loss="cross_entropy", optimizer=optax.sgd(eta), steps=settings.steps,
            batch_size=batch, key=None if batch is None else key,
        )  # fmt: skip
        rows = np.broadcast_to(np.arange(len(x)), (settings.steps, len(x)))
        if batch is not None:
            rows = np.asarray(batch_indices(key, len(x), batch, settings.steps))
        curves = np.asarray(real.loss), train_in_training_mode(module, x, y, eta, rows)
        times = [_times(curve) for curve in curves]
        out.append(Pair(kind, half, times[0], times[1], (curves[0][-1], curves[1][-1])))
    return out


def _times(curve: np.ndarray) -> tuple[int, ...]:
    if not np.all(np.isfinite(curve)):
        return (-1,) * len(THRESHOLDS)
    return tuple(int(training_time(curve, e)) for e in THRESHOLDS)


def measure(settings: ModeSettings) -> list[Pair]:
    """Every network and task."""
    kinds: dict[str, Callable[..., nnx.Module]] = {
        "MLP, random, BatchNorm": lambda *sizes, rngs: Network(*sizes, norm=True, rate=0, rngs=rngs)
    }
    for rate in settings.dropouts:
        kinds[f"MLP, random, dropout {rate:g}"] = lambda *sizes, rngs, rate=rate: Network(
            *sizes, norm=False, rate=rate, rngs=rngs
        )
    out: list[Pair] = []
    for half, seed in itertools.product((0, 1), settings.seeds):
        for name in settings.halves[half]:
            data, key = samples(name, seed)
            assert data.num_classes is not None
            sizes = (int(np.prod(data.x.shape[1:])), data.num_classes, settings.width)
            for kind, build in kinds.items():
                module = build(*sizes, rngs=nnx.Rngs(params=key, dropout=seed))
                if "BatchNorm" in kind:
                    module = calibrate_batch_norm(module, data.x)
                out += compare_modes(kind, half, module, data.x, data.y, settings, seed)
        if classes := settings.resnets[half]:
            key = jax.random.key(seed + 7)
            data = load_dataset("digits", classes=classes, per_class=15, key=key)
            module = fresh_head(pretrained(classes, settings, seed), len(classes), key=key)
            out += compare_modes(RESNET, half, module, data.x, data.y, settings, seed)
        jax.clear_caches()
    return out


def table(pairs: list[Pair]) -> str:
    """Factors of times and of end losses, by kind."""
    lines = [
        "| network | trainings | time in training mode / in evaluation mode, at "
        + " / ".join(f"{100 * e:g} %" for e in THRESHOLDS)
        + ": median of one half, of the other | eight in ten of all | end loss: median factor "
        "(eight in ten) |",
        "|" + "---|" * 5,
    ]
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        some = [pair for pair in pairs if pair.kind == kind]
        good = [pair for pair in some if min(*pair.still, *pair.moving) >= 0]
        halves = [_factors([pair for pair in good if pair.half == half]) for half in (0, 1)]
        middles = [" / ".join(f"{v:.2f}" for v in np.median(f, axis=0)) for f in halves if len(f)]
        low, high = np.percentile(_factors(good), (10, 90))
        ends = np.array([pair.ends[1] / max(pair.ends[0], 1e-12) for pair in good])
        end = np.percentile(ends, (50, 10, 90))
        cells = [
            kind, f"{len(good)} of {len(some)}", ", ".join(middles), f"{low:.2f} to {high:.2f}",
            f"{end[0]:.2f} ({end[1]:.2f} to {end[2]:.2f})",
        ]  # fmt: skip
        lines.append(line(cells))
    return "\n".join(lines)


def _factors(pairs: list[Pair]) -> np.ndarray:
    """(runs, 3); a time of no step counts as one."""
    both = [np.maximum((pair.moving, pair.still), 1) for pair in pairs]
    return np.array([moving / still for moving, still in both]).reshape(-1, len(THRESHOLDS))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    print(table(measure(PRESETS[parser.parse_args().preset])))


if __name__ == "__main__":
    main()
