"""How much later do N samples reach a loss than a subset of them? The law of `total_samples`.

    python -m experiments.bench.scaling [--preset smoke|tuning|fine-tuned|reported] [--task NAME]
                                        [--store FILE]

All samples of a task are trained on with mini-batches, and so are a quarter and a half of them and
the halves of those, whose loss on the other half is seen as well. What `jaxttp.forecast.Scaled`
makes of the subset's real curves is compared with the real curve of all samples. Errors are of the
logarithm of a time, where both times are finite; "within ±" counts those within one and two of the
law's own uncertainties. The law and its constants were chosen on "tuning" and "fine-tuned".
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn import datasets

from experiments.bench.accuracy_tasks import Job, digits, patches
from experiments.bench.harness import Row, go_on, head, line, parser, store_of
from jaxttp import Model, from_nnx, train
from jaxttp.data import Dataset, select
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast.methods.scaled import time_scale
from jaxttp.losses import cross_entropy
from jaxttp.losses.rule import training_time
from jaxttp.models import MLP, fresh_head, load_pretrained
from jaxttp.ntk import empirical_ntk

MODULE = "experiments.bench.scaling"
MOMENTUM = 0.9
FRACTION = 0.3
"""The learning rate as a fraction of the limit of 200 samples in full batches."""
SLACK = 1
"""Errors of so many steps are of no account."""


@dataclasses.dataclass(frozen=True)
class ScalingSettings:
    """What to measure."""

    tasks: tuple[str, ...]
    steps: int = 300
    batch_size: int = 32
    seeds: int = 3
    times: tuple[int, ...] = (2, 4)
    targets: tuple[float, ...] = (0.5, 0.35, 0.25, 0.15, 0.1, 0.06, 0.04)


PRESETS = {
    "smoke": ScalingSettings(
        ("clusters, random MLP",), steps=12, seeds=1, times=(2,), targets=(0.9,)
    ),
    "tuning": ScalingSettings(
        (
            "clusters, random MLP",
            "clusters, relabelled MLP",
            "breast cancer, MLP",
            "digits 0-4, MLP",
        )
    ),
    "fine-tuned": ScalingSettings(
        (
            "inverted even digits, ResNet",
            "odd or even, ResNet",
            "inverted digits, ResNet",
            "turned digits 3-7, ResNet",
            "patches, ResNet",
        ),
        steps=600,
        seeds=1,
    ),
    "reported": ScalingSettings(("digits 5-9, ResNet",)),
}


def clusters(count: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """So many points of so many classes, two clusters each, features of variance 1."""
    x, y = datasets.make_classification(
        count, 20, n_informative=10, n_classes=classes, n_clusters_per_class=2, random_state=seed
    )
    return (x / x.std(axis=0)).astype(np.float32), y.astype(np.int32)


def make(name: str) -> Job:
    """The task of that name, with all its samples."""
    key, rngs = jax.random.key(0), nnx.Rngs(0)
    if name == "clusters, random MLP":
        x, y = clusters(1200, 4, 5)
        return Job(from_nnx(MLP((20, 96, 4), rngs=rngs)), x, y)
    if name == "clusters, relabelled MLP":
        x, y = clusters(1600, 5, 0)
        model = from_nnx(MLP((20, 64, 64, 5), rngs=rngs))
        return Job(pretrained(model, x[:400], (y[:400] + 1) % 5), x[400:], y[400:])
    if name == "breast cancer, MLP":
        x, y = datasets.load_breast_cancer(return_X_y=True)
        x = (x - x.mean(axis=0)) / x.std(axis=0)
        return Job(from_nnx(MLP((30, 64, 2), rngs=rngs)), x.astype(np.float32), y.astype(np.int32))
    if name == "digits 0-4, MLP":
        before, data = (
            _flat(select(digits(), classes=classes, per_class=None, key=key))
            for classes in (range(5, 10), range(5))
        )
        model = from_nnx(MLP((64, 96, 96, 5), rngs=rngs))
        return Job(pretrained(model, *before), *data)
    if name not in IMAGES:
        raise ValueError(f"no task is called {name!r}.")
    images, labels = IMAGES[name]()
    network = fresh_head(load_pretrained(), int(labels.max()) + 1, key=key)
    return Job(from_nnx(network), images, labels)


def _some(data: Dataset, classes: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
    some = select(data, classes=classes, per_class=None, key=jax.random.key(0))
    return np.asarray(some.x), np.asarray(some.y)


def _changed(
    change: Callable[[np.ndarray], np.ndarray], classes: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    x, y = _some(digits(), classes)
    return np.ascontiguousarray(change(x)), y


def _odd() -> tuple[np.ndarray, np.ndarray]:
    x, y = _some(digits())
    return x, y % 2


def _patches() -> tuple[np.ndarray, np.ndarray]:
    data = patches()
    rows = np.random.default_rng(3).permutation(len(data.y))[:1200]
    return data.x[rows], data.y[rows]


IMAGES: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "digits 5-9, ResNet": lambda: _some(digits(), range(5, 10)),
    "inverted even digits, ResNet": lambda: _changed(lambda x: 1 - x, range(0, 10, 2)),
    "inverted digits, ResNet": lambda: _changed(lambda x: 1 - x),
    "turned digits 3-7, ResNet": lambda: _changed(lambda x: np.rot90(x, axes=(1, 2)), range(3, 8)),
    "odd or even, ResNet": _odd,
    "patches, ResNet": _patches,
}
"""What the network that the library ships, which knows the digits 0-4, is fine-tuned on."""


def _flat(data: Dataset) -> tuple[np.ndarray, np.ndarray]:
    return data.x.reshape(len(data.x), -1), data.y


def pretrained(model: Model, x: np.ndarray, y: np.ndarray) -> Model:
    """The model after 150 steps on other samples or labels."""
    found = train(
        *model, x, y, loss="cross_entropy", optimizer=optax.sgd(0.05, MOMENTUM), steps=150,
        batch_size=64, key=jax.random.key(9),
    )  # fmt: skip
    return Model(model.apply_fn, found.params)


def measure(name: str, settings: ScalingSettings) -> Row:
    """The law on the real curves of one task: (N/M, real, subset, law, uncertainty) by target."""
    job, few = make(name), slice(0, 200)
    kernel = empirical_ntk(*job.model, job.x[few])
    logits = job.model.apply_fn(job.model.params, job.x[few])
    eta = FRACTION * float(
        max_learning_rate(
            kernel, loss="cross_entropy", f0=logits, y=job.y[few], momentum=MOMENTUM
        )
    )  # fmt: skip
    classes = int(job.y.max()) + 1
    unseen_loss = jax.jit(
        lambda w, rows: cross_entropy.value(
            job.model.apply_fn(w, jnp.asarray(job.x)[rows]),
            jax.nn.one_hot(jnp.asarray(job.y)[rows], classes),
        )
    )

    def go(rows: np.ndarray, seed: int, others: np.ndarray | None = None) -> np.ndarray:
        """The loss (T + 1,), and that on others below it (2, T + 1)."""
        unseen: list[float] = []
        found = train(
            *job.model, job.x[rows], job.y[rows], loss="cross_entropy",
            optimizer=optax.sgd(eta, MOMENTUM), steps=settings.steps,
            batch_size=settings.batch_size, key=jax.random.key(seed),
            callback=None if others is None else lambda step, w, loss: unseen.append(
                float(unseen_loss(w, others))
            ),
        )  # fmt: skip
        loss = np.asarray(found.loss, np.float64)
        return loss if others is None else np.stack([loss, np.array(unseen)])

    def mean(
        rows: np.ndarray, seeds: Sequence[int], others: np.ndarray | None = None
    ) -> np.ndarray:
        return np.mean([go(rows, seed, others) for seed in seeds], axis=0)

    samples = len(job.x)
    truth = mean(np.arange(samples), range(settings.seeds))
    targets = [float(truth[0]) * target for target in settings.targets]
    readings, rng = [], np.random.default_rng(1)
    for ratio in settings.times:
        for draw in range(settings.seeds):
            rows = rng.permutation(samples)[: samples // ratio]
            whole = mean(rows, range(draw, draw + settings.seeds))
            parts = np.array_split(rows, 2)
            both = np.stack([
                mean(half, range(draw, draw + 2), others)
                for half, others in zip(parts, parts[::-1], strict=True)
            ])  # fmt: skip
            scale = time_scale(whole, both[:, 0], ratio, unseen=both[:, 1])
            for target in targets:
                real, subset, scaled = (_time(c, target) for c in (truth, whole, scale.of(whole)))
                at = min(scaled, settings.steps)
                unsure = float(np.interp(at, np.arange(settings.steps + 1), scale.unsure))
                readings.append((ratio, real, subset, scaled, unsure))
    return {"name": name, "samples": samples, "rate": eta, "readings": readings}


def _time(curve: np.ndarray, target: float) -> float:
    found = float(training_time(curve, target, rule="absolute"))
    return found if found >= 0 else np.inf


def table(rows: list[Row]) -> str:
    """Errors of the logarithm of a time, and what the law's uncertainty says of them."""
    lines = [head((
        "N/M", "readings", "of", "root mean square", "median", "within 15 %", "within ±, twice"
    ))]  # fmt: skip
    readings = np.array([reading for row in rows for reading in row["readings"]], float)
    for ratio in np.unique(readings[:, 0]):
        every = readings[readings[:, 0] == ratio, 1:]
        real, subset, scaled, unsure = every[np.all(np.isfinite(every), axis=1)].T
        for name, times in (("subset", subset), ("law", scaled)):
            off = np.abs(np.log(np.maximum(times, 1) / np.maximum(real, 1)))
            off[np.abs(times - real) <= SLACK] = 0.0
            held = ", ".join(f"{np.mean(off <= k * unsure):.0%}" for k in (1, 2))
            lines.append(line((
                f"{ratio:g}", len(off), name, f"{np.sqrt(np.mean(off**2)):.2f}",
                f"{np.median(off):.2f}", f"{np.mean(np.expm1(off) <= 0.15):.0%}",
                held if name == "law" else "",
            )))  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Measure a preset and print its table."""
    command = parser(MODULE, __doc__, PRESETS, preset="tuning")
    command.add_argument("--task", help="only this one")
    options = command.parse_args()
    settings = PRESETS[options.preset]
    tasks = settings.tasks if options.task is None else (options.task,)
    jobs = ((name, functools.partial(measure, name, settings)) for name in tasks)
    print(table(go_on(store_of(MODULE, options, options.task), jobs, options.minutes)))


if __name__ == "__main__":
    main()
