"""Checkpoints of one small network, and the tasks that one of them is to be chosen for.

Digits are split in two halves once and for all, the photographs down the middle: networks are
pre-trained on the first halves alone, and tasks draw their samples, for training and for testing,
from the second.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array
from sklearn import datasets

from experiments.bench.trust_tasks import Samples, changed, pretrained
from jaxttp import Model, from_nnx
from jaxttp.data import load_dataset
from jaxttp.models import fresh_head

WIDTHS = (8, 16, 16)
"""Of the convolutions of every checkpoint."""
SPLIT_SEED, HEAD_SEED, DRAW_SEED = 3, 5, 11
"""Of the halves, of every fresh head, and of the samples that a task draws."""
LOW, HIGH, ALL = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9), tuple(range(10))


class Network(nnx.Module):
    """3x3 convolutions with biases, the second of stride 2, the mean over 2x2 quarters, a head.

    Nothing normalizes, so that a checkpoint is its weights alone and all share one function.
    """

    def __init__(self, outputs: int, rngs: nnx.Rngs):
        pairs = list(zip((1, *WIDTHS), WIDTHS, strict=False))
        self.convs = nnx.List(
            nnx.Conv(a, b, (3, 3), strides=2 if i == 1 else 1, rngs=rngs)
            for i, (a, b) in enumerate(pairs)
        )
        self.head = nnx.Linear(4 * WIDTHS[-1], outputs, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Outputs (N, C) of images (N, 8, 8, 1)."""
        for conv in self.convs:
            x = nnx.relu(conv(x))
        quarters = x.reshape(len(x), 2, 2, 2, 2, -1).mean(axis=(2, 4))
        return self.head(quarters.reshape(len(x), -1))


class Checkpoint(NamedTuple):
    """What a network was pre-trained on, and for how many steps of Adam."""

    data: Callable[[], Samples]
    steps: int


class Target(NamedTuple):
    """Samples to train on, and others to test on."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @property
    def classes(self) -> int:
        """How many labels there are."""
        return int(max(self.y.max(), self.y_test.max())) + 1


@functools.cache
def half_of_digits(which: int, classes: tuple[int, ...], change: str = "") -> Samples:
    """Digits of one half, renumbered: as they are, "inverted", "turned", or by "parity"."""
    data = load_dataset("digits")
    order = np.random.default_rng(SPLIT_SEED).permutation(len(data.x))
    mine = np.sort(np.array_split(order, 2)[which])
    mine = mine[np.isin(data.y[mine], classes)]
    y = np.searchsorted(sorted(classes), data.y[mine])
    if change == "parity":
        y = data.y[mine] % 2
    return Samples(changed(data.x[mine], change), y.astype(np.int32))


@functools.cache
def half_of_photographs(which: int, size: int = 8) -> Samples:
    """Gray patches of that many pixels a side, as 8x8: which of two photographs are they from?"""
    rows, labels = [], []
    for label, image in enumerate(datasets.load_sample_images().images):
        gray = np.array_split(image.mean(axis=2) / 255.0, 2, axis=1)[which]
        high, wide = (side // size for side in gray.shape)
        cut = gray[: high * size, : wide * size].reshape(high, size, wide, size).swapaxes(1, 2)
        tiles = cut.reshape(-1, 8, size // 8, 8, size // 8).mean(axis=(2, 4))[..., None]
        rows.append(tiles)
        labels += [label] * len(tiles)
    return Samples(np.concatenate(rows).astype(np.float32), np.array(labels, np.int32))


def _digits(classes: tuple[int, ...], change: str = "") -> Callable[[], Samples]:
    return functools.partial(half_of_digits, 0, classes, change)


def _asked(classes: tuple[int, ...], change: str = "") -> Callable[[], Samples]:
    return functools.partial(half_of_digits, 1, classes, change)


_photographs = functools.partial(half_of_photographs, 0)

CHECKPOINTS: dict[str, Checkpoint] = {
    "untrained": Checkpoint(_digits(ALL), 0),
    "digits 0-4, 20 steps": Checkpoint(_digits(LOW), 20),
    "digits 0-4, 100 steps": Checkpoint(_digits(LOW), 100),
    "digits 0-4, 400 steps": Checkpoint(_digits(LOW), 400),
    "digits 5-9, 100 steps": Checkpoint(_digits(HIGH), 100),
    "digits 5-9, 400 steps": Checkpoint(_digits(HIGH), 400),
    "all digits, 20 steps": Checkpoint(_digits(ALL), 20),
    "all digits, 400 steps": Checkpoint(_digits(ALL), 400),
    "digits 0 and 1, 200 steps": Checkpoint(_digits((0, 1)), 200),
    "inverted digits 0-4, 200 steps": Checkpoint(_digits(LOW, "inverted"), 200),
    "patches, 20 steps": Checkpoint(_photographs, 20),
    "patches, 100 steps": Checkpoint(_photographs, 100),
    "patches, 400 steps": Checkpoint(_photographs, 400),
}

TARGETS: dict[str, Callable[[], Samples]] = {
    "digits 5-9": _asked(HIGH),
    "odd or even": _asked(ALL, "parity"),
    "turned digits 3-7": _asked((3, 4, 5, 6, 7), "turned"),
    "inverted digits 0, 2, 4, 6, 8": _asked((0, 2, 4, 6, 8), "inverted"),
    "coarse patches": functools.partial(half_of_photographs, 1, 16),
    "digits 1, 3, 5, 7, 9": _asked((1, 3, 5, 7, 9)),
    "turned digits 0, 1, 8, 9": _asked((0, 1, 8, 9), "turned"),
    "inverted digits 1, 2, 7": _asked((1, 2, 7), "inverted"),
    "fine patches": functools.partial(half_of_photographs, 1, 8),
}
"""The first five were known when `compare` learnt to put held paths last, the others were not."""


@functools.cache
def checkpoint(name: str, shorter: int = 1) -> nnx.Module:
    """The network of that name with the head that it was pre-trained with.

    Args:
        name: of `CHECKPOINTS`.
        shorter: pre-training has so many times fewer steps.
    """
    data, steps = CHECKPOINTS[name]
    samples = data()
    network = Network(int(samples.y.max()) + 1, nnx.Rngs(1))
    return pretrained(network, samples, steps=steps // shorter)


def draw(name: str, count: int, tested: int) -> Target:
    """So many samples of a task to train on, and at most so many others to test on."""
    data = TARGETS[name]()
    order = np.random.default_rng(DRAW_SEED).permutation(len(data.x))
    some, others = np.sort(order[:count]), np.sort(order[count : count + tested])
    return Target(data.x[some], data.y[some], data.x[others], data.y[others])


def headed(network: nnx.Module, classes: int) -> Model:
    """It with a fresh head, the same one for every checkpoint; one function for all of them."""
    params = from_nnx(fresh_head(network, classes, key=jax.random.key(HEAD_SEED))).params
    return Model(_function(classes), params)


@functools.cache
def _function(classes: int) -> Any:
    return from_nnx(Network(classes, nnx.Rngs(0))).apply_fn
