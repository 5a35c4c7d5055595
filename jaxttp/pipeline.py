"""The parts composed, from names to one frozen result: what CLI, experiments and notebooks call."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jaxttp._checks import check_choice, check_integer, check_number
from jaxttp._types import Model
from jaxttp.adapters import from_nnx
from jaxttp.data import dataset_names, load_dataset, select
from jaxttp.forecast import Prediction, predict_training_time, training_time
from jaxttp.models import MLP, fresh_head, load_pretrained
from jaxttp.training import StepTime, TrainingRun, time_step, train

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to forecast, by names and numbers.

    Attributes:
        data: a data set of `jaxttp.data.dataset_names`. "digits" fine-tunes the shipped ResNet,
            pre-trained on the digits 0-4, on the digits 5-9; the others train a small MLP from
            random weights.
        samples_per_class: images of each class; None for all. Regression takes all samples.
        loss: "cross_entropy", "squared_error" or "binary_cross_entropy"; None chooses cross-entropy
            for classes and squared error for regression.
        learning_rate: of gradient descent.
        momentum: heavy-ball, in [0, 1).
        batch_size: samples a step; None for all of them.
        steps: the horizon T.
        thresholds: shares of the loss's drop that define training times.
        relinearize: kernels built after the first, or "auto".
        sketch_dim: width of a random projection of the Jacobian; None for the exact kernel.
        head_scale: size of the fresh head's initial outputs.
        seed: draws the samples, the fresh weights and the batches.
        classes: the digits to fine-tune on, 5-9 when None (data="digits" only).
    """

    data: str = "digits"
    samples_per_class: int | None = 30
    loss: str | None = None
    learning_rate: float = 0.005
    momentum: float = 0.0
    batch_size: int | None = None
    steps: int = 150
    thresholds: tuple[float, ...] = (0.01, 0.1, 0.4)
    relinearize: int | str = 0
    sketch_dim: int | None = None
    head_scale: float = 1.0
    seed: int = 0
    classes: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Task:
    """A network before training, its data, and its loss."""

    model: Model
    x: np.ndarray
    y: np.ndarray
    loss: str
    description: str


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A forecast in steps and in seconds, and what really happened where that was asked for.

    Attributes:
        settings: what was asked for.
        task: the network and data.
        prediction: in steps.
        step_time: the measured time of one training step on this device.
        run: the real training, or None.
    """

    settings: Settings
    task: Task
    prediction: Prediction
    step_time: StepTime
    run: TrainingRun | None = None

    @property
    def seconds(self) -> dict[float, float]:
        """Predicted seconds for every threshold that is reached."""
        steps = self.prediction.steps
        return {e: t * self.step_time.seconds for e, t in steps.items() if t >= 0}

    @property
    def real_steps(self) -> dict[float, int] | None:
        """Real training times in steps, by the same rule; None without a real run.

        All are -1 where the real run diverged, which a forecast need not foresee.
        """
        if self.run is None:
            return None
        rule, loss = self.prediction.rule, self.run.loss
        if not np.all(np.isfinite(loss)):
            return dict.fromkeys(self.prediction.steps, -1)
        return {e: int(training_time(loss, e, rule=rule)) for e in self.prediction.steps}

    @property
    def real_seconds(self) -> dict[float, float] | None:
        """Seconds the real run took to get there (no compilation, no evaluation)."""
        real = self.real_steps
        if real is None or self.run is None:
            return None
        each = self.run.seconds / self.prediction.horizon
        return {e: t * each for e, t in real.items() if t >= 0}

    def to_json(self) -> dict[str, Any]:
        """Plain values; thresholds become strings, seconds have an entry "horizon" too.

        Losses of a real run that diverged are None where they are not finite.
        """
        prediction = self.prediction
        cost = dataclasses.asdict(prediction.cost)
        out: dict[str, Any] = {
            "steps": _keys(prediction.steps),
            "horizon": prediction.horizon,
            "loss": _floats(prediction.loss),
            "error": _floats(prediction.error),
            "hyperparameters": {**prediction.hyperparameters, **dataclasses.asdict(self.settings)},
            "max_learning_rate": prediction.max_learning_rate,
            "stable": prediction.stable,
            "rule": prediction.rule,
            "dynamics": prediction.dynamics,
            "seconds": _keys(self.seconds)
            | {"horizon": prediction.horizon * self.step_time.seconds},
            "step_seconds": self.step_time.seconds,
            "cost": cost,
            "task": self.task.description,
            "versions": {"jax": jax.__version__, "device": jax.devices()[0].device_kind},
            "verified": None,
        }
        out["hyperparameters"]["loss"] = self.task.loss
        if self.run is not None:
            out["verified"] = {
                "steps": _keys(self.real_steps or {}),
                "loss": _floats(self.run.loss),
                "error": _floats(self.run.error),
                "seconds": _keys(self.real_seconds or {}) | {"horizon": self.run.seconds},
            }
        return out


def _keys(values: Mapping[float, Any]) -> dict[str, Any]:
    return {repr(threshold): value for threshold, value in values.items()}


def _floats(values: Any) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in np.asarray(values)]


def build_task(settings: Settings) -> Task:
    """The network before training and its samples, from their names.

    Args:
        settings: data, samples a class, loss, scale of the head, seed.

    Returns:
        A `Task`.

    Raises:
        ValueError: unknown data, too few samples in a class, a loss that does not fit the data.

    Example:
        >>> task = build_task(Settings(samples_per_class=2))
        >>> task.x.shape, task.y.max().item()
        ((10, 8, 8, 1), 4)
    """
    check_choice("data", settings.data, dataset_names())
    check_integer("seed", settings.seed, at_least=0, at_most=2**32 - 1)
    check_number("head_scale", settings.head_scale, at_least=0.0)
    samples_key, weights_key = jax.random.split(jax.random.key(settings.seed))
    dataset = load_dataset(settings.data)
    if dataset.num_classes is None:
        loss = settings.loss or "squared_error"
        if loss != "squared_error":
            raise ValueError(f"loss={loss!r} needs classes, and {settings.data} is a regression.")
        outputs = dataset.y.shape[1]
    else:
        loss = settings.loss or "cross_entropy"
        if settings.classes is not None and settings.data != "digits":
            raise ValueError(f"classes can be chosen for digits only; got data={settings.data!r}.")
        classes = (settings.classes or (5, 6, 7, 8, 9)) if settings.data == "digits" else None
        per_class = settings.samples_per_class
        if per_class is not None:
            counts = np.bincount(dataset.y)
            rarest = int(min(counts if classes is None else counts[list(classes)]))
            remedy = f"The rarest class of {settings.data} has {rarest}."
            check_integer("samples_per_class", per_class, at_least=1, at_most=rarest, remedy=remedy)
        dataset = select(dataset, classes=classes, per_class=per_class, key=samples_key)
        outputs = dataset.num_classes
    assert outputs is not None
    if loss == "binary_cross_entropy":
        if outputs != 2:
            raise ValueError(f"loss={loss!r} needs two classes; {settings.data} has {outputs}.")
        outputs = 1
    if settings.data == "digits":
        network = fresh_head(load_pretrained(), outputs, key=weights_key, scale=settings.head_scale)
        digits = "5-9" if settings.classes is None else ", ".join(map(str, settings.classes))
        words = f"ResNet pre-trained on digits 0-4, all weights fine-tuned on digits {digits}"
    else:
        sizes = (int(np.prod(dataset.x.shape[1:])), 64, 64, outputs)
        network = MLP(sizes, rngs=nnx.Rngs(params=weights_key), head_scale=settings.head_scale)
        words = f"MLP {'-'.join(map(str, sizes))} from random weights on {settings.data}"
    description = f"{words}, {len(dataset.x)} samples, {loss}"
    return Task(from_nnx(network), dataset.x, dataset.y, loss, description)


def forecast(
    settings: Settings, *, verify: bool = False, progress: Progress | None = None
) -> Forecast:
    """Forecast the training of a named task in steps and seconds; with `verify`, train it too.

    Args:
        settings: what to forecast.
        verify: also run the real training, after the forecast.
        progress: called with (stage, done, total).

    Returns:
        A `Forecast`.

    Raises:
        ValueError: whatever `build_task` and `predict_training_time` refuse.

    Example:
        >>> small = Settings(data="wine", samples_per_class=8, steps=20, learning_rate=0.1)
        >>> result = forecast(small)
        >>> result.prediction.loss.shape, result.run is None
        ((21,), True)
    """
    task = build_task(settings)
    keys = jax.random.split(jax.random.key(settings.seed), 2)
    batch_size = settings.batch_size
    prediction = predict_training_time(
        *task.model,
        task.x,
        task.y,
        loss=task.loss,
        learning_rate=settings.learning_rate,
        momentum=settings.momentum,
        steps=settings.steps,
        thresholds=settings.thresholds,
        relinearize=settings.relinearize,
        sketch_dim=settings.sketch_dim,
        key=keys[0],
        batch_size=batch_size,
        progress=progress,
    )
    optimizer = optax.sgd(settings.learning_rate, settings.momentum or None)
    if progress is not None:
        progress("timing a step", 0, 1)
    step_time = time_step(
        *task.model, task.x, task.y, loss=task.loss, optimizer=optimizer, batch_size=batch_size
    )
    run = None
    if verify and prediction.stable:
        report = None if progress is None else lambda i, n: progress("real training", i, n)
        run = train(
            *task.model,
            task.x,
            task.y,
            loss=task.loss,
            optimizer=optimizer,
            batch_size=batch_size,
            steps=settings.steps,
            key=keys[1],  # another draw of batches than the forecast's: nobody knows those ahead
            progress=report,
        )
    return Forecast(settings, task, prediction, step_time, run)
