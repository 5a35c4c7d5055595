"""Forecasts by the paper's equation (1) beside real training, of tasks by name.

A task is one of `experiments.bench.accuracy_tasks`, which stand for the paper's data sets here, or
a `jaxttp.pipeline.Settings`, which names the paper's own.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench.accuracy_tasks import Job, make
from jaxttp import empirical_ntk, train, training_time
from jaxttp.dynamics import diffusion, effective_learning_rate, gradient_flow
from jaxttp.losses import encode_targets, get_loss
from jaxttp.pipeline import Settings, build_task

Source = str | Settings
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
THRESHOLDS = (0.01, 0.05, 0.1, 0.2, 0.4)
WEIGHTS = "resnet18.safetensors"
"""A file with torchvision's ImageNet weights, which the presets `paper` need."""


def _paper(data: str, folder: str | None = None) -> Settings:
    return Settings(
        data=data, samples_per_class=30, classes=5, model="resnet18", weights=WEIGHTS, folder=folder
    )


CIFAR10 = _paper("cifar10")
MIT67 = _paper("mit67", "mit67")
PAPER_TASKS: tuple[Settings, ...] = (
    _paper("cars196"), _paper("minc2500", "minc-2500"), MIT67,
    _paper("fgvc_aircraft", "fgvc-aircraft-2013b"), _paper("caltech_birds2011"),
    _paper("cifar100"), CIFAR10,
)  # fmt: skip
"""ResNet-18, 5 random classes of 30 images, seven data sets."""
RANDOM_WEIGHTS: tuple[Settings, ...] = tuple(
    Settings(data="digits", samples_per_class=30, classes=classes, model="resnet18", image_size=224)
    for classes in ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))
)
"""The paper's sizes and costs where nothing can be fetched: ResNet-18 from random weights, 2 x 150
digits at 224 pixels. The presets `gpu`."""


def name_of(source: Source) -> str:
    """What a task is called in figures."""
    if isinstance(source, str):
        return source
    chosen = source.classes
    return (
        f"{source.data} {', '.join(map(str, chosen))}" if isinstance(chosen, tuple) else source.data
    )


def load(source: Source, seed: int = 0, samples: int | None = None) -> Job:
    """A network before training and its samples.

    Args:
        source: a task of the accuracy benchmark, or pipeline settings.
        seed: draws samples and fresh weights.
        samples: so many of them only, drawn at random.

    Returns:
        A `Job`.

    Raises:
        ValueError: data or weights that are not there; more samples than the task has.
    """
    if isinstance(source, str):
        job = make(source, seed, 1.0)
    else:
        task = build_task(dataclasses.replace(source, seed=seed))
        job = Job(task.model, task.x, task.y)
    if samples is None:
        return job
    if samples > len(job.x):
        raise ValueError(f"samples={samples}: {name_of(source)} has {len(job.x)}.")
    chosen = np.random.default_rng(seed).permutation(len(job.x))[:samples]
    return Job(job.model, job.x[chosen], job.y[chosen])


@dataclasses.dataclass(frozen=True)
class Way:
    """How a network is trained.

    Attributes:
        rate: effective learning rate eta / (1 - m), in units of N / lambda_max where `relative`.
        batch_size: samples a step, all when None.
        momentum: m.
        relative: whether the rate is in units of N / lambda_max.
    """

    rate: float
    batch_size: int | None = None
    momentum: float = 0.0
    relative: bool = True


@dataclasses.dataclass(frozen=True)
class Pair:
    """A forecast and the real training.

    Attributes:
        task: its name.
        seed: of samples, weights and batches.
        way: how it was trained.
        learning_rate: eta of the optimizer.
        forecast: loss and error by eq (1), (2, T + 1); with mini-batches the medians of all paths.
        real: loss and error, (2, T + 1).
    """

    task: str
    seed: int
    way: Way
    learning_rate: float
    forecast: np.ndarray
    real: np.ndarray

    def times(
        self, thresholds: Sequence[float] = THRESHOLDS, metric: str = "loss"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Predicted and real training times in steps, (K,) each."""
        row = ("loss", "error").index(metric)
        both = (self.forecast[row], self.real[row])
        first, second = (np.array([int(training_time(c, e)) for e in thresholds]) for c in both)
        return first, second

    @property
    def finite(self) -> bool:
        """Whether neither curve diverged."""
        return bool(np.all(np.isfinite(self.forecast)) and np.all(np.isfinite(self.real)))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What forecasts need of a job.

    Attributes:
        theta: (N, C, N, C).
        f0: outputs before training (N, C).
        targets: (N, C).
        unit: N / lambda_max, the learning rate that `Way.relative` counts in.
    """

    theta: jax.Array
    f0: jax.Array
    targets: jax.Array
    unit: float


def kernel_of(job: Job, loss: str = "cross_entropy") -> Kernel:
    """Theta, the first outputs and the rate's unit."""
    f0 = jax.jit(job.model.apply_fn)(job.model.params, jnp.asarray(job.x))
    targets, _ = encode_targets(loss, job.y, f0)
    theta = empirical_ntk(*job.model, job.x)
    matrix = np.asarray(theta, np.float64).reshape(f0.size, f0.size)
    return Kernel(theta, f0, targets, len(f0) / float(np.linalg.eigvalsh(matrix)[-1]))


@functools.partial(jax.jit, static_argnames=("loss", "steps"))
def _ode(theta, f0, targets, rate, *, loss: str, steps: int):
    ts = jnp.arange(steps + 1, dtype=f0.dtype)
    path = gradient_flow(theta, f0, targets, loss=loss, learning_rate=rate, ts=ts).train
    known = get_loss(loss)
    return jnp.stack(jax.vmap(lambda f: (known.value(f, targets), known.error(f, targets)))(path))


_STATIC = ("loss", "steps", "batch_size", "paths", "noise", "protocol")


@functools.partial(jax.jit, static_argnames=_STATIC)
def _sde(theta, f0, targets, rate, key, noise_kernel, **options):
    found = diffusion(
        theta, f0, targets, learning_rate=rate, key=key, save="curves", noise_kernel=noise_kernel,
        **options,
    )  # fmt: skip
    return jnp.stack([jnp.median(found.loss, axis=0), jnp.median(found.error, axis=0)])


def forecast(
    kernel: Kernel,
    rate: float,
    *,
    steps: int,
    loss: str = "cross_entropy",
    batch_size: int | None = None,
    paths: int = 8,
    seed: int = 0,
    noise: str = "full",
    noise_kernel: jax.Array | None = None,
    protocol: str = "epochs",
) -> np.ndarray:
    """Loss and error by eq (1): its ODE for full batches, medians of its SDE for mini-batches.

    Args:
        kernel: of the job.
        rate: effective learning rate.
        steps: T.
        loss: a name.
        batch_size: samples a step, all when None.
        paths: of the SDE.
        seed: of the paths.
        noise: see `jaxttp.dynamics.diffusion`.
        noise_kernel: likewise.
        protocol: how batches are drawn.

    Returns:
        (2, T + 1).
    """
    parts = (kernel.theta, kernel.f0, kernel.targets, rate)
    if batch_size is None:
        return np.asarray(_ode(*parts, loss=loss, steps=steps))
    key = jax.random.key(seed + 90)
    return np.asarray(
        _sde(
            *parts, key, noise_kernel, loss=loss, steps=steps, batch_size=batch_size, paths=paths,
            noise=noise, protocol=protocol,
        )
    )  # fmt: skip


def real_curves(
    job: Job,
    eta: float,
    way: Way,
    *,
    steps: int,
    seed: int = 0,
    loss: str = "cross_entropy",
    protocol: str = "epochs",
) -> np.ndarray:
    """Loss and error of the real training, (2, T + 1)."""
    found = train(
        *job.model, job.x, job.y, loss=loss, optimizer=optax.sgd(eta, way.momentum or None),
        steps=steps, batch_size=way.batch_size, key=jax.random.key(seed + 50),
        protocol=None if way.batch_size is None else protocol,
    )  # fmt: skip
    return np.stack([np.asarray(found.loss), np.asarray(found.error)])


def compare(
    source: Source,
    seed: int,
    ways: Iterable[Way],
    *,
    steps: int,
    loss: str = "cross_entropy",
    samples: int | None = None,
    paths: int = 8,
) -> list[Pair]:
    """Forecast every way to train from one kernel, and train for real.

    Args:
        source: the task.
        seed: of samples, weights and batches.
        ways: to train.
        steps: T.
        loss: a name.
        samples: so many only.
        paths: of the SDE.

    Returns:
        A `Pair` for every way.
    """
    job = load(source, seed, samples)
    kernel = kernel_of(job, loss)
    out = []
    for way in ways:
        rate = way.rate * (kernel.unit if way.relative else 1.0)
        eta = rate * (1.0 - way.momentum)
        effective = float(effective_learning_rate(eta, way.momentum))
        batch = None if way.batch_size is None else min(way.batch_size, len(job.x))
        way = dataclasses.replace(way, batch_size=batch)
        ahead = forecast(
            kernel, effective, steps=steps, loss=loss, batch_size=batch, paths=paths, seed=seed
        )
        real = real_curves(job, eta, way, steps=steps, seed=seed, loss=loss)
        out.append(Pair(name_of(source), seed, way, eta, ahead, real))
    return out
