"""What forecasts cost and how accurate they are, compared with the trainings that they forecast.

    python -m experiments.bench.pays [--preset smoke|cpu|paper] [--only NETWORK ...] [--minutes M]
                                     [--store FILE]

Networks that know the classes 0-4 are fine-tuned on 150 images of the classes 5-9, in every way of
`WAYS` over 150 and 600 steps, for real and as forecast by default, within several budgets, with one
kernel, with one class sketch, by the paper's equation (1), and from a tenth of the training by a
power law. "by count" are operations and "by the clock" seconds without and with compilation, as
fractions of the training's; readings are times to 1, 10, 40 % of the drop and to 0.5, 0.25, 0.1 of
the first loss. No constant was chosen on these tasks. A forecast never sees a real curve.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from scipy.optimize import least_squares

from experiments.bench.accuracy_tasks import Job
from experiments.bench.harness import Row, go_on, head, line, parser, store_of
from experiments.bench.planning import reading_errors
from experiments.bench.warning_tasks import Samples, enlarged, pretrained
from jaxttp import from_nnx, predict_training_time, train
from jaxttp.data import load_dataset, select
from jaxttp.models import MLP, calibrate_batch_norm, fresh_head, load_pretrained, make_model
from jaxttp.ntk import ClassSketched

MODULE = "experiments.bench.pays"
WITHIN = 0.13
"""A reading is right that is off by no more of itself, or by two steps."""
TENTH = "a tenth of the training, power law"
CLASSES = 5
HEAD = jax.random.key(3)
"""Draws the output layer of whatever is fine-tuned."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A network by its name in `jaxttp.models`, pre-trained here.

    Attributes:
        model: "digits-resnet" (shipped), "mlp" (random weights) or a name of `make_model`.
        pixels: to which images are scaled; the digits have 8.
        steps: of pre-training, in batches of 64.
        rate: of its Adam.
    """

    model: str
    pixels: int = 8
    steps: int = 0
    rate: float = 1e-3


NETWORKS = {
    "MLP": Network("mlp"),
    "digits ResNet": Network("digits-resnet"),
    "ResNet20, 16 px": Network("resnet20", 16, 200, 3e-3),
    "ResNet-18, 32 px": Network("resnet18", 32, 120),
    "ViT-S, 32 px": Network("vit_small", 32, 120, 3e-4),
}


@dataclasses.dataclass(frozen=True)
class Way:
    """How a network is fine-tuned.

    Attributes:
        momentum: of SGD, whose rate over 1 - momentum is 0.3 of the largest stable one.
        batch_size: samples a step; all when None.
        cosine: whether the rate falls to nothing over the horizon.
        adam: the rate of AdamW, in place of SGD.
    """

    momentum: float = 0.0
    batch_size: int | None = None
    cosine: bool = False
    adam: float | None = None

    def optimizer(self, limit: float, steps: int) -> optax.GradientTransformation:
        """In optax's terms."""
        if self.adam is not None:
            return optax.adamw(self.adam)
        rate: Any = 0.3 * limit * (1 - self.momentum)
        if self.cosine:
            rate = optax.cosine_decay_schedule(rate, steps)
        return optax.sgd(rate, self.momentum or None)


WAYS = {
    "gradient descent": Way(),
    "momentum, cosine, batches of 32": Way(momentum=0.9, batch_size=32, cosine=True),
    "AdamW, batches of 32": Way(batch_size=32, adam=3e-4),
}


@dataclasses.dataclass(frozen=True)
class PaysSettings:
    """What to measure: budgets are fractions of the training's operations."""

    networks: tuple[str, ...] = ("MLP", "digits ResNet", "ResNet-18, 32 px", "ResNet20, 16 px")
    ways: tuple[str, ...] = tuple(WAYS)
    data_set: str = "digits"
    per_class: int = 30
    steps: tuple[int, ...] = (150, 600)
    budgets: tuple[float, ...] = (0.01, 1 / 30, 0.1, 1 / 3)


PRESETS = {
    "smoke": PaysSettings(("MLP",), ("gradient descent",), per_class=3, steps=(12,), budgets=()),
    "cpu": PaysSettings(),
    "paper": PaysSettings(networks=("ResNet-18, 32 px", "ViT-S, 32 px"), data_set="cifar10"),
}


@functools.cache
def images(name: str, classes: tuple[int, ...], per_class: int, pixels: int) -> Samples:
    """Some of a data set, drawn once for all; digits in three colours where they are enlarged."""
    data = select(load_dataset(name), classes=classes, per_class=per_class, key=jax.random.key(17))
    x = enlarged(np.asarray(data.x, np.float32), pixels)
    return Samples(x, np.asarray(data.y, np.int32))


@functools.cache
def make(name: str, data_set: str, per_class: int) -> tuple[Job, float]:
    """The network of that name before fine-tuning, its samples, and the largest stable rate."""
    network = NETWORKS[name]
    data = images(data_set, (5, 6, 7, 8, 9), per_class, network.pixels)
    if network.model == "mlp":
        module: Any = MLP((data.x[0].size, 64, 64, CLASSES), rngs=nnx.Rngs(params=HEAD))
    else:
        module = fresh_head(_pretrained(network, data, data_set), CLASSES, key=HEAD)
    job = Job(from_nnx(module), data.x, data.y)
    found = predict_training_time(
        *job.model, job.x, job.y, learning_rate=1e-6, steps=1, relinearize=0,
        kernel=ClassSketched(jax.random.key(0)),
    )  # fmt: skip
    return job, float(found.max_learning_rate)


def _pretrained(network: Network, data: Samples, data_set: str) -> nnx.Module:
    """As it knows the classes 0-4, batch norm at the averages of the images to come."""
    if network.model == "digits-resnet":
        return load_pretrained()
    rngs, size = nnx.Rngs(0), network.pixels
    module = nnx.jit(lambda: make_model(network.model, CLASSES, image_size=size, rngs=rngs))()
    if not network.model.startswith("vit"):
        module = calibrate_batch_norm(module, data.x)
    before = images(data_set, (0, 1, 2, 3, 4), 150, size)
    return pretrained(module, before, steps=network.steps, rate=network.rate)


def options_of(settings: PaysSettings, way: Way) -> dict[str, dict[str, Any]]:
    """Forecast -> what to ask `predict_training_time` for."""
    found: dict[str, dict[str, Any]] = {"default": {}}
    if way.adam is not None:  # simulated in weight space, on one kernel: there is nothing to plan
        return found
    found |= {
        f"budget 1/{round(1 / fraction)}": {"budget": fraction} for fraction in settings.budgets
    }
    found["one kernel"] = {"relinearize": 0}
    found["one class sketch"] = {"relinearize": 0, "kernel": ClassSketched(jax.random.key(1))}
    if not way.cosine and way.batch_size is None:
        found["equation (1)"] = {"dynamics": "ode"}
    return found


def measure(settings: PaysSettings, name: str, title: str, steps: int) -> Row:
    """One training and all its forecasts, which have other batches; plain values."""
    job, limit = make(name, settings.data_set, settings.per_class)
    way = WAYS[title]
    common: dict[str, Any] = {"loss": "cross_entropy", "steps": steps}
    keys: list[Any] = [None, None]
    if way.batch_size is not None:
        common["batch_size"] = min(way.batch_size, len(job.x))
        keys = [jax.random.key(50), jax.random.key(11)]
    common["optimizer"] = way.optimizer(limit, steps)
    real = train(*job.model, job.x, job.y, key=keys[0], **common)
    loss = np.asarray(real.loss, np.float64)
    row: Row = {
        "name": f"{name}; {title}; {steps} steps", "network": name, "way": title, "steps": steps,
        "real": loss.tolist(), "seconds": real.seconds, "compile": real.compile_seconds,
    }  # fmt: skip
    row["forecasts"] = {}
    for kind, options in options_of(settings, way).items():
        begun = time.perf_counter()
        given = common | options
        if kind == "equation (1)":  # takes a rate, not an optimizer
            given = {key: value for key, value in given.items() if key != "optimizer"}
            given["learning_rate"] = 0.3 * limit
        found = predict_training_time(*job.model, job.x, job.y, key=keys[1], **given)
        seconds, cost = time.perf_counter() - begun, found.cost
        row["forecasts"][kind] = {
            "loss": np.asarray(found.loss, np.float64).tolist(), "stable": found.stable,
            "fraction": cost.operations / cost.training_operations, "warnings": found.warnings,
            "seconds": seconds - cost.compile_seconds, "compile": cost.compile_seconds,
        }  # fmt: skip
    row["forecasts"][TENTH] = {
        "loss": power_law(loss).tolist(), "stable": True, "fraction": 0.1, "warnings": None,
        "seconds": 0.1 * real.seconds, "compile": 0.0,
    }  # fmt: skip
    return row


def power_law(loss: np.ndarray, fraction: float = 0.1) -> np.ndarray:
    """The first fraction of a training, carried on as c + a (1 + t / b)^-p, (T + 1,)."""
    steps = len(loss) - 1
    seen = max(4, round(fraction * steps))
    t, scale = np.arange(steps + 1), float(loss[0])

    def curve(free: np.ndarray, t: np.ndarray) -> np.ndarray:
        a, b, p, c = np.exp(free)
        return c + a * (1 + t / b) ** -p

    start = np.log([scale, max(1.0, seen / 4), 1.0, 0.01 * scale])
    known = np.log(np.maximum(loss[: seen + 1], 1e-30))
    found = least_squares(
        lambda free: np.log(curve(free, t[: seen + 1])) - known, start,
        bounds=(start - 12, start + 12),
    )  # fmt: skip
    return np.append(loss[: seen + 1], curve(found.x, t[seen + 1 :]))


def lines(rows: list[Row]) -> Iterator[str]:
    """Every forecast in a line of a table."""
    yield head((
        "network", "training", "T", "forecast", "of the training by count",
        "by the clock, with compilation", "readings within 13 %", "largest error",
        "end off by, of the drop",
    ))  # fmt: skip
    for row in rows:
        real, seconds, more = np.array(row["real"]), row["seconds"], row["compile"]
        for kind, guess in row["forecasts"].items():
            loss = np.array(guess["loss"])
            readings = reading_errors(loss, guess["stable"], real)
            end = abs(loss[-1] - real[-1]) / max(real[0] - real.min(), 1e-12)
            both = (guess["seconds"] + guess["compile"]) / (seconds + more)
            yield line((
                row["network"], row["way"], row["steps"], kind, f"{guess['fraction']:.2g}",
                f"{guess['seconds'] / seconds:.2g}, {both:.2g}",
                f"{sum(r <= WITHIN for r in readings)} of {len(readings)}",
                f"{100 * max(readings, default=0.0):.0f} %", f"{100 * end:.0f} %",
            ))  # fmt: skip


def main() -> None:
    """Measure what the store does not have yet, and print the table."""
    command = parser(MODULE, __doc__, PRESETS)
    command.add_argument("--only", nargs="+", choices=NETWORKS, help="these networks")
    options = command.parse_args()
    settings = PRESETS[options.preset]
    jobs = (
        (
            f"{name}; {title}; {steps} steps",
            functools.partial(measure, settings, name, title, steps),
        )
        for name in options.only or settings.networks
        for title in settings.ways
        for steps in settings.steps
    )
    print("\n".join(lines(go_on(store_of(MODULE, options), jobs, options.minutes))))


if __name__ == "__main__":
    main()
