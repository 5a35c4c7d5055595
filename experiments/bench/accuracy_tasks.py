"""The tasks that forecasts are measured on, and those that constants are tuned on.

A task is a network before training with its samples, by name, seed and scale of the head's initial
outputs. Networks of one name share their compiled functions: only the weights differ.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array
from sklearn import datasets

from jaxttp import Model, from_nnx
from jaxttp.data import Dataset, load_dataset, select
from jaxttp.models import MLP, fresh_head, load_pretrained


class Job(NamedTuple):
    """A network before training and its samples; the loss is the cross-entropy."""

    model: Model
    x: np.ndarray
    y: np.ndarray


def patches(size: int = 8) -> Dataset:
    """Patches of scikit-learn's two photographs, gray, in [0, 1]: which photograph is it from?"""
    rows, labels = [], []
    for label, image in enumerate(datasets.load_sample_images().images):
        gray = image.mean(axis=2) / 255.0
        high, wide = (side // size for side in gray.shape)
        cut = gray[: high * size, : wide * size].reshape(high, size, wide, size)
        tiles = cut.swapaxes(1, 2).reshape(-1, size, size, 1)
        rows.append(tiles)
        labels += [label] * len(tiles)
    x = np.concatenate(rows).astype(np.float32)
    words = "Gray patches of the photographs china.jpg and flower.jpg."
    return Dataset(x, np.array(labels, np.int32), "patches", words, 2, ("china", "flower"))


def table(name: str, mean: float = 0.0) -> Dataset:
    """A small table of scikit-learn, features of that mean and standard deviation 1."""
    if name == "iris":
        x, y = datasets.load_iris(return_X_y=True)
    elif name == "moons":
        x, y = datasets.make_moons(200, noise=0.1, random_state=0)
    else:
        x, y = datasets.make_classification(
            200, 20, n_informative=8, n_classes=4, n_clusters_per_class=1, random_state=0
        )
    x = (x - x.mean(axis=0)) / x.std(axis=0) + mean
    words = f"{name} of scikit-learn, features of mean {mean:g} and standard deviation 1."
    classes = len(np.unique(y))
    return Dataset(
        x.astype(np.float32),
        y.astype(np.int32),
        name,
        words,
        classes,
        tuple(map(str, range(classes))),
    )


class Recipe(NamedTuple):
    """Where the samples come from, how many of a class, and the network."""

    data: Callable[[], Dataset]
    per_class: int
    classes: tuple[int, ...] | None = None
    network: str = "mlp"


digits = functools.partial(load_dataset, "digits")

REPORTED: dict[str, Recipe] = {
    "digits even, ResNet": Recipe(digits, 15, (0, 2, 4, 6, 8), "resnet"),
    "digits 5-9, MLP": Recipe(digits, 30, (5, 6, 7, 8, 9)),
    "wine, MLP": Recipe(functools.partial(load_dataset, "wine"), 40),
    "patches, ResNet": Recipe(patches, 40, None, "resnet"),
    "breast cancer, MLP": Recipe(functools.partial(load_dataset, "breast_cancer"), 60),
    "iris, tanh MLP": Recipe(functools.partial(table, "iris"), 40, None, "tanh"),
    "digits 3-7, ResNet": Recipe(digits, 15, (3, 4, 5, 6, 7), "resnet"),
    "patches, MLP": Recipe(patches, 60),
    "digits all, tanh MLP": Recipe(digits, 12, None, "tanh"),
}
"""What tables are made of."""

TUNING: dict[str, Recipe] = {
    "digits 0-4, MLP": Recipe(digits, 30, (0, 1, 2, 3, 4)),
    "moons, MLP": Recipe(functools.partial(table, "moons"), 60),
    "clusters, tanh MLP": Recipe(functools.partial(table, "clusters"), 30, None, "tanh"),
    "shifted clusters, MLP": Recipe(functools.partial(table, "clusters", 2.0), 30),
    "digits odd, ResNet": Recipe(digits, 15, (1, 3, 5, 7, 9), "resnet"),
}
"""What constants are chosen on; none of it is reported."""


@functools.cache
def _data(name: str) -> Dataset:
    return (REPORTED | TUNING)[name].data()


@functools.cache
def _apply(name: str) -> Any:
    return make(name, 0, 1.0, apply_fn=False).model.apply_fn


def samples(name: str, seed: int) -> tuple[Dataset, Array]:
    """The samples that this seed draws, and a key for the weights."""
    recipe = (REPORTED | TUNING)[name]
    key, weights_key = jax.random.split(jax.random.key(1000 + seed))
    return select(_data(name), classes=recipe.classes, per_class=recipe.per_class, key=key), (
        weights_key
    )


def make(name: str, seed: int, head_scale: float, *, apply_fn: Any = None) -> Job:
    """The task of that name; `seed` draws samples and weights."""
    recipe = (REPORTED | TUNING)[name]
    data, weights_key = samples(name, seed)
    outputs = data.num_classes
    assert outputs is not None
    if recipe.network == "resnet":
        network: Any = fresh_head(load_pretrained(), outputs, key=weights_key, scale=head_scale)
    else:
        sizes = (int(np.prod(data.x.shape[1:])), 64, 64, outputs)
        activation = "tanh" if recipe.network == "tanh" else "relu"
        network = MLP(
            sizes, rngs=nnx.Rngs(params=weights_key), activation=activation, head_scale=head_scale
        )
    model = from_nnx(network)
    if apply_fn is None:  # the same function for every seed, so that it is compiled once
        model = Model(_apply(name), model.params)
    return Job(model, data.x, data.y)
