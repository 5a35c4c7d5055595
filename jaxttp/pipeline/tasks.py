"""A task from its name: the network before training, its samples and its loss."""

import dataclasses

import jax
import numpy as np
from flax import nnx

from jaxttp._checks import check_choice, check_integer, check_number
from jaxttp._types import Model
from jaxttp.adapters import from_nnx
from jaxttp.data import dataset_names, load_dataset, select
from jaxttp.models import MLP, fresh_head, load_pretrained


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
