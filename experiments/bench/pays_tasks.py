"""What `pays` trains: networks that know the classes 0-4 and are fine-tuned on the classes 5-9.

None of it is among the tasks that constants were chosen on, though the digits are.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from experiments.bench.accuracy_tasks import Job
from experiments.bench.trust_tasks import Samples, enlarged, pretrained
from jaxttp import from_nnx, predict_training_time
from jaxttp.data import load_dataset, select
from jaxttp.losses import cross_entropy
from jaxttp.models import MLP, calibrate_batch_norm, fresh_head, load_pretrained, make_model
from jaxttp.ntk import ClassSketched

CLASSES = 5


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
        share: rate over 1 - momentum, of the largest stable rate of gradient descent.
        momentum: of SGD.
        batch_size: samples a step; all when None.
        cosine: whether the rate falls to nothing over the horizon.
        adam: the rate of AdamW, in place of SGD.
    """

    share: float = 0.3
    momentum: float = 0.0
    batch_size: int | None = None
    cosine: bool = False
    adam: float | None = None

    def optimizer(self, limit: float, steps: int) -> optax.GradientTransformation:
        """In optax's terms."""
        if self.adam is not None:
            return optax.adamw(self.adam)
        rate: Any = self.rate(limit)
        if self.cosine:
            rate = optax.cosine_decay_schedule(rate, steps)
        return optax.sgd(rate, self.momentum or None)

    def rate(self, limit: float) -> float:
        """The rate of SGD, at its highest."""
        return self.share * limit * (1 - self.momentum)


WAYS = {
    "gradient descent": Way(),
    "momentum, cosine, batches of 32": Way(momentum=0.9, batch_size=32, cosine=True),
    "AdamW, batches of 32": Way(batch_size=32, adam=3e-4),
}


@functools.cache
def images(name: str, classes: tuple[int, ...], per_class: int | None, pixels: int) -> Samples:
    """Some of a data set, drawn once for all; digits in three colours where they are enlarged."""
    data = select(load_dataset(name), classes=classes, per_class=per_class, key=jax.random.key(17))
    x = enlarged(np.asarray(data.x, np.float32), pixels)
    return Samples(x, np.asarray(data.y, np.int32))


@functools.cache
def make(name: str, data_set: str, per_class: int) -> Job:
    """The network of that name before fine-tuning, and its samples."""
    data = images(data_set, (5, 6, 7, 8, 9), per_class, NETWORKS[name].pixels)
    if NETWORKS[name].model == "mlp":
        sizes = (data.x[0].size, 64, 64, CLASSES)
        return Job(from_nnx(MLP(sizes, rngs=nnx.Rngs(params=HEAD))), data.x, data.y)
    network = trained_before(name, data_set, per_class)
    return Job(from_nnx(fresh_head(network, CLASSES, key=HEAD)), data.x, data.y)


HEAD = jax.random.key(3)
"""Draws the output layer of whatever is fine-tuned."""


def trained_before(name: str, data_set: str, per_class: int) -> Any:
    """The network of that name as it is pre-trained, which does not know the classes 5-9."""
    chosen = NETWORKS[name]
    if chosen.model == "digits-resnet":
        return load_pretrained()
    size = chosen.pixels
    build: Callable[[], Any] = lambda: make_model(  # noqa: E731
        chosen.model, CLASSES, image_size=size, rngs=nnx.Rngs(0)
    )
    network = nnx.jit(build)()
    if not chosen.model.startswith("vit"):
        seen = images(data_set, (5, 6, 7, 8, 9), per_class, size)
        network = calibrate_batch_norm(network, seen.x)
    if chosen.steps:
        before = images(data_set, (0, 1, 2, 3, 4), 150, size)
        network = pretrained(network, before, steps=chosen.steps, rate=chosen.rate)
    return network


@functools.cache
def limit(name: str, data_set: str, per_class: int) -> float:
    """Gradient descent's largest stable rate, by a class sketch of the kernel of all outputs.

    That of their contrasts is another sketch, and real runs are kept that had these rates.
    """
    job = make(name, data_set, per_class)
    found = predict_training_time(
        *job.model, job.x, job.y, learning_rate=1e-6, steps=1, relinearize=0,
        kernel=ClassSketched(jax.random.key(0)),
        loss=dataclasses.replace(cross_entropy, shift_invariant=False),
    )  # fmt: skip
    return float(found.max_learning_rate)
