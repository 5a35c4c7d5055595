"""The tasks that `warnings` is calibrated on, and those that its calibration is tested on.

Networks that were trained on something are fine-tuned on something else: convolutions with
BatchNorm, an MLP, tokens under attention, the shipped ResNet; and a few start at random weights.
None is among the tasks of `accuracy_tasks.REPORTED` or TUNING. A task is split by nothing but its
name: constants are chosen on FITTING alone. FINE_TUNED are for plans alone (`planning`): residual
networks with other images, as large as those that people fine-tune.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array
from sklearn import datasets

from experiments.bench import accuracy_tasks
from jaxttp import Model, from_nnx
from jaxttp._core.traced import network_of
from jaxttp.data import load_dataset
from jaxttp.losses import get_loss
from jaxttp.models import (
    MLP,
    Transformer,
    calibrate_batch_norm,
    fresh_head,
    load_pretrained,
    make_model,
)

PRETRAINING = {"steps": 200, "batch": 64, "rate": 3e-3}
WORDS = 6
"""Of the languages that tokens are drawn from."""
LENGTH = 8
"""Of their sentences."""


class Job(NamedTuple):
    """A network before training, its samples and the loss."""

    model: Model
    x: np.ndarray
    y: np.ndarray
    loss: str


class Samples(NamedTuple):
    """Data to choose from."""

    x: np.ndarray
    y: np.ndarray


class Recipe(NamedTuple):
    """A network as it is before training, what it is trained on, and how much of it."""

    network: Callable[[], nnx.Module]
    data: Callable[[], Samples]
    samples: int
    fresh: bool = True
    loss: str = "cross_entropy"


class ConvNet(nnx.Module):
    """3x3 convolutions with BatchNorm, the second of stride 2, global mean, linear head."""

    def __init__(self, outputs: int, widths: tuple[int, ...], rngs: nnx.Rngs):
        before = (1, *widths)
        self.convs = nnx.List(
            nnx.Conv(
                before[i], width, (3, 3), strides=2 if i == 1 else 1, use_bias=False, rngs=rngs
            )
            for i, width in enumerate(widths)
        )
        self.norms = nnx.List(nnx.BatchNorm(width, momentum=0.9, rngs=rngs) for width in widths)
        self.head = nnx.Linear(widths[-1], outputs, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Outputs (N, C) of images (N, 8, 8, 1)."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(x.mean(axis=(1, 2)))


class NormedMLP(nnx.Module):
    """Dense layers with BatchNorm."""

    def __init__(self, sizes: tuple[int, ...], rngs: nnx.Rngs):
        pairs = list(itertools.pairwise(sizes[:-1]))
        self.layers = nnx.List(nnx.Linear(a, b, rngs=rngs) for a, b in pairs)
        self.norms = nnx.List(nnx.BatchNorm(b, momentum=0.9, rngs=rngs) for _, b in pairs)
        self.head = nnx.Linear(sizes[-2], sizes[-1], rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Outputs (N, C)."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = nnx.relu(norm(layer(x)))
        return self.head(x)


class Reader(nnx.Module):
    """A causal transformer that is asked for the word after the last."""

    def __init__(self, width: int, depth: int, rngs: nnx.Rngs):
        self.body = Transformer(WORDS, WORDS, length=LENGTH, width=width, depth=depth, rngs=rngs)
        self.head = nnx.Linear(WORDS, WORDS, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Outputs (N, WORDS) of sentences (N, LENGTH, WORDS)."""
        return self.head(self.body(x)[:, -1])


def pretrained(network: nnx.Module, samples: Samples, loss: str = "cross_entropy") -> nnx.Module:
    """The network after some hundred steps of Adam in training mode, BatchNorm included."""
    network.train()
    graph, params, rest = nnx.split(network, nnx.Param, ...)
    optimizer = optax.adam(PRETRAINING["rate"])
    value = get_loss(loss).value
    x, y = jnp.asarray(samples.x), jnp.asarray(samples.y)
    targets = jax.nn.one_hot(y, int(y.max()) + 1) if loss == "cross_entropy" else y

    def forward(weights: Any, given: tuple[Any, Array]) -> tuple[Array, Any]:
        model = nnx.merge(graph, weights, given[0], copy=True)
        outputs = model(given[1])
        return outputs, nnx.state(model, nnx.Not(nnx.Param))

    @jax.jit
    def step(params: Any, rest: Any, state: Any, batch: Array) -> tuple:
        def objective(weights: Any) -> tuple:
            outputs, after = network_of(forward).run(weights, (rest, x[batch]))
            return value(outputs, targets[batch]), after

        gradient, rest = jax.grad(objective, has_aux=True)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), rest, state

    draws, state = np.random.default_rng(7), optimizer.init(params)
    for _ in range(int(PRETRAINING["steps"])):
        batch = draws.choice(len(x), int(PRETRAINING["batch"]), replace=False)
        params, rest, state = step(params, rest, state, jnp.asarray(batch))
    network = nnx.merge(graph, params, rest)
    network.eval()
    return network


@functools.cache
def digits(classes: tuple[int, ...], change: str = "") -> Samples:
    """Some of the digits, renumbered, as they are, "inverted", "turned" or "noisy"."""
    data = load_dataset("digits")
    kept = np.isin(data.y, classes)
    y = np.searchsorted(sorted(classes), data.y[kept])
    return Samples(changed(data.x[kept], change), y.astype(np.int32))


def changed(x: np.ndarray, change: str) -> np.ndarray:
    """Images "inverted", "turned" or "noisy", or as they are; float32."""
    if change == "inverted":
        x = 1.0 - x
    elif change == "turned":
        x = np.rot90(x, axes=(1, 2)).copy()
    elif change == "noisy":
        x = x + 0.3 * np.random.default_rng(1).standard_normal(x.shape)
    return x.astype(np.float32)


@functools.cache
def coloured(classes: tuple[int, ...], change: str = "") -> Samples:
    """The same enlarged to 16x16 pixels in three colours, for networks of photographs."""
    small = digits(classes, change)
    x = np.asarray(jax.image.resize(small.x, (len(small.x), 16, 16, 1), "bilinear"))
    return Samples(np.repeat(x, 3, axis=-1), small.y)


@functools.cache
def stripes(classes: int = 4) -> Samples:
    """Waves over 8x8 pixels, told apart by their direction."""
    rng, count = np.random.default_rng(2), 600
    y = rng.integers(0, classes, count)
    angle = np.pi * y / classes + 0.15 * rng.standard_normal(count)
    phase, wave = rng.uniform(0, 2 * np.pi, (2, count, 1, 1))
    rows, columns = np.meshgrid(np.arange(8), np.arange(8), indexing="ij")
    along = np.cos(angle)[:, None, None] * rows + np.sin(angle)[:, None, None] * columns
    x = 0.5 + 0.5 * np.sin((0.8 + 0.1 * wave) * along + phase)
    x = x + 0.2 * rng.standard_normal(x.shape)
    return Samples(x[..., None].astype(np.float32), y.astype(np.int32))


@functools.cache
def clusters(seed: int, features: int = 12, classes: int = 4) -> Samples:
    """Clusters in a space of features; another seed is another problem."""
    x, y = datasets.make_classification(
        600, features, n_informative=6, n_redundant=2, n_classes=classes, class_sep=1.2,
        random_state=seed,
    )  # fmt: skip
    return Samples(((x - x.mean(0)) / x.std(0)).astype(np.float32), y.astype(np.int32))


@functools.cache
def rings(classes: int = 3) -> Samples:
    """Shells of a normal distribution in four dimensions."""
    x, y = datasets.make_gaussian_quantiles(
        n_samples=600, n_features=4, n_classes=classes, random_state=3
    )
    return Samples(x.astype(np.float32), y.astype(np.int32))


@functools.cache
def sentences(seed: int) -> Samples:
    """Words that depend on the two before them; another seed is another language."""
    rng, count = np.random.default_rng(seed), 800
    table = rng.dirichlet(np.full(WORDS, 0.15), (WORDS, WORDS))
    words = rng.integers(0, WORDS, (count, LENGTH + 1))
    for t in range(2, LENGTH + 1):
        chances = table[words[:, t - 2], words[:, t - 1]].cumsum(axis=1)
        words[:, t] = np.minimum((rng.random((count, 1)) > chances).sum(axis=1), WORDS - 1)
    return Samples(np.eye(WORDS, dtype=np.float32)[words[:, :-1]], words[:, -1].astype(np.int32))


@functools.cache
def friedman(which: int) -> Samples:
    """Friedman's functions 1 and 3, features and target of mean 0 and deviation 1."""
    make = datasets.make_friedman1 if which == 1 else datasets.make_friedman3
    x, y = make(400, noise=0.1, random_state=which)
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    return Samples(x.astype(np.float32), y[:, None].astype(np.float32))


def _conv(outputs: int, widths: tuple[int, ...], samples: Callable[[], Samples]) -> Callable:
    return lambda: pretrained(ConvNet(outputs, widths, nnx.Rngs(1)), samples())


def _normed(sizes: tuple[int, ...], samples: Callable[[], Samples]) -> Callable:
    return lambda: pretrained(NormedMLP(sizes, nnx.Rngs(2)), samples())


def _reader(width: int, depth: int, seed: int) -> Callable:
    return lambda: pretrained(Reader(width, depth, nnx.Rngs(3)), sentences(seed))


def _residual(model: str, before: tuple[int, ...], rate: float) -> Callable:
    def network() -> nnx.Module:
        known = coloured(before)
        fresh = make_model(model, len(before), image_size=16, rngs=nnx.Rngs(1))
        fresh = calibrate_batch_norm(fresh, known.x[:150])
        return pretrained(fresh, known, steps=120, rate=rate)

    return network


LOW, HIGH = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)
part = functools.partial

FITTING: dict[str, Recipe] = {
    "CNN, digits 0-4 to 5-9": Recipe(
        _conv(5, (8, 16), part(digits, LOW)), part(digits, HIGH), 100
    ),
    "CNN, all digits to turned": Recipe(
        _conv(10, (8, 12, 16), part(digits, (*LOW, *HIGH))),
        part(digits, (*LOW, *HIGH), "turned"), 80, fresh=False,
    ),
    "normed MLP, clusters": Recipe(
        _normed((12, 32, 32, 4), part(clusters, 11)), part(clusters, 12), 120
    ),
    "words": Recipe(_reader(16, 1, 21), part(sentences, 22), 120, fresh=False),
    "shipped ResNet, digits 5-9": Recipe(load_pretrained, part(digits, HIGH), 60),
    "random MLP, rings": Recipe(
        lambda: MLP((4, 48, 48, 3), rngs=nnx.Rngs(params=4)), rings, 120
    ),
    "random tanh MLP, Friedman 1": Recipe(
        lambda: MLP((10, 48, 48, 1), rngs=nnx.Rngs(params=5), activation="tanh"),
        part(friedman, 1), 150, loss="squared_error",
    ),
}  # fmt: skip
"""What constants are chosen on."""

HELD_OUT: dict[str, Recipe] = {
    "CNN, digits 5-9 to 0-4": Recipe(
        _conv(5, (12, 12, 12), part(digits, HIGH)), part(digits, LOW), 80
    ),
    "CNN, stripes to digits 1, 3, 8": Recipe(
        _conv(4, (8, 16), stripes), part(digits, (1, 3, 8)), 90
    ),
    "CNN, digits to inverted": Recipe(
        _conv(5, (8, 8, 16), part(digits, LOW)), part(digits, LOW, "inverted"), 100, fresh=False
    ),
    "normed MLP, more clusters": Recipe(
        _normed((16, 48, 24, 3), part(clusters, 13, 16, 3)), part(clusters, 14, 16, 3), 150,
        fresh=False,
    ),
    "other words": Recipe(_reader(12, 2, 31), part(sentences, 32), 100),
    "shipped ResNet, noisy digits": Recipe(
        load_pretrained, part(digits, LOW, "noisy"), 60, fresh=False
    ),
    "random MLP, Friedman 3": Recipe(
        lambda: MLP((4, 64, 64, 1), rngs=nnx.Rngs(params=6)), part(friedman, 3), 120,
        loss="squared_error",
    ),
}  # fmt: skip
"""What they are tested on."""

FINE_TUNED: dict[str, Recipe] = {
    "shipped ResNet, inverted even digits": Recipe(
        load_pretrained, part(digits, (0, 2, 4, 6, 8), "inverted"), 150
    ),
    "shipped ResNet, turned digits 3-7": Recipe(
        load_pretrained, part(digits, (3, 4, 5, 6, 7), "turned"), 150
    ),
    "ResNet20, digits 5-9 to inverted 0-4": Recipe(
        _residual("resnet20", HIGH, 3e-3), part(coloured, LOW, "inverted"), 120
    ),
    "ResNet-18, odd digits to even": Recipe(
        _residual("resnet18", (1, 3, 5, 7, 9), 1e-3), part(coloured, (0, 2, 4, 6, 8)), 100
    ),
}
"""What plans' constants are measured on, too; digits, but none of the tasks that are reported."""
RECIPES = FITTING | HELD_OUT | FINE_TUNED


@functools.cache
def _start(name: str) -> tuple[nnx.Module, Any]:
    """The network before training, and one function for all its weights: it is compiled once."""
    recipe = RECIPES[name]
    network = recipe.network()
    return network, from_nnx(network).apply_fn


def make(name: str, seed: int) -> Job:
    """The task of that name; `seed` draws the samples and the weights of a fresh head."""
    recipe = RECIPES[name]
    network, apply_fn = _start(name)
    data, rng = recipe.data(), np.random.default_rng(100 + seed)
    some = np.sort(rng.choice(len(data.x), recipe.samples, replace=False))
    x, y = data.x[some], data.y[some]
    if recipe.fresh and recipe.loss == "cross_entropy":
        outputs = int(data.y.max()) + 1
        apply_fn = apply_fn if outputs == network.head.out_features else _headed(name, outputs)
        network = fresh_head(network, outputs, key=jax.random.key(200 + seed))
    return Job(Model(apply_fn, from_nnx(network).params), x, y, recipe.loss)


def any_task(name: str, seed: int, head_scale: float = 1.0) -> Job:
    """The task of that name, of `accuracy_tasks` or of this module."""
    if name in RECIPES:
        return make(name, seed)
    return Job(*accuracy_tasks.make(name, seed, head_scale), "cross_entropy")


@functools.cache
def _headed(name: str, outputs: int) -> Any:
    return from_nnx(fresh_head(_start(name)[0], outputs, key=jax.random.key(0))).apply_fn
