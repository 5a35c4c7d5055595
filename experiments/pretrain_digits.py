"""Train the shipped network on the digits 0-4, which leaves the digits 5-9 to fine-tune on.

    python -m experiments.pretrain_digits [--image-size 32]

trains for about twenty seconds on two cores (at 32 pixels for two minutes) and replaces the
checkpoint inside the package. Nothing here was tuned for what the network is used for afterwards.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxttp.data import Dataset, Preprocessing, Split, load_dataset, select, split
from jaxttp.models import ResNet, digits_resnet, save_params
from jaxttp.models.pretrained import checkpoint_path
from jaxttp.pipeline.tasks import SHIPPED_SIZES

CLASSES = (0, 1, 2, 3, 4)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that determines the weights.

    Attributes:
        seed: of the initial weights, of the split and of the order of the samples.
        held_out: fraction of the samples that is not trained on.
        epochs: passes over the training samples.
        batch_size: samples of a step; what is left over at the end of an epoch is skipped.
        learning_rate: AdamW's, the peak of a cosine schedule with a linear warm-up over 5 % of the
            steps.
        image_size: pixels a side, 8 or 32.
        weight_decay: AdamW's.
        label_smoothing: fraction of a target's mass spread over all classes; it keeps the outputs,
            and with them the features, from growing without bound once every sample is right.
    """

    seed: int = 0
    held_out: float = 0.2
    epochs: int = 40
    batch_size: int = 32
    learning_rate: float = 1e-3
    image_size: int = 8
    weight_decay: float = 1e-2
    label_smoothing: float = 0.1


class Result(NamedTuple):
    """A trained network and how good it is.

    Attributes:
        model: the network.
        losses: the training loss of every step.
        train_accuracy: fraction of the training samples that are classified right.
        held_out_accuracy: the same of the samples held out.
    """

    model: ResNet
    losses: np.ndarray
    train_accuracy: float
    held_out_accuracy: float


def load_split(settings: Settings) -> Split:
    """The digits 0-4 in a part to train on and a part held out."""
    size = settings.image_size
    resize = None if size == 8 else Preprocessing(size)
    data = select(load_dataset("digits", preprocessing=resize), classes=CLASSES)
    return split(data, held_out=settings.held_out, key=jax.random.key(settings.seed))


def run(settings: Settings) -> Result:
    """Train the network. The same settings give the same weights, whatever JAX's x64 mode.

    Args:
        settings: seed, schedule, optimiser.

    Returns:
        The network, its losses and accuracies.
    """
    parts = load_split(settings)
    with jax.enable_x64(False):
        model = digits_resnet(len(CLASSES), rngs=nnx.Rngs(settings.seed))
        losses = train(model, parts.train, settings)
        return Result(model, losses, accuracy(model, parts.train), accuracy(model, parts.held_out))


def train(model: ResNet, data: Dataset, settings: Settings) -> np.ndarray:
    """Train the network in place; returns the loss of every step."""
    graph, params = nnx.split(model)
    steps_per_epoch = len(data) // settings.batch_size
    steps = settings.epochs * steps_per_epoch
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, warmup_steps=max(1, steps // 20), decay_steps=steps
    )
    optimizer = optax.adamw(schedule, weight_decay=settings.weight_decay)

    def loss(params, x, y):
        outputs = nnx.merge(graph, params)(x)
        labels = jax.nn.one_hot(y, len(CLASSES), dtype=outputs.dtype)
        targets = optax.smooth_labels(labels, settings.label_smoothing)
        return jnp.mean(optax.softmax_cross_entropy(outputs, targets))

    @jax.jit
    def step(params, state, x, y):
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    generator = np.random.default_rng(settings.seed)
    for _ in range(settings.epochs):
        order = generator.permutation(len(data))[: steps_per_epoch * settings.batch_size]
        for rows in np.split(order, steps_per_epoch):
            params, state, value = step(params, state, data.x[rows], data.y[rows])
            losses.append(value)
    nnx.update(model, params)
    return np.asarray(losses)


def accuracy(model: nnx.Module, data: Dataset) -> float:
    """Share of the samples whose largest output is that of their label."""
    outputs = nnx.jit(lambda model, x: model(x))(model, data.x)
    return float(np.mean(np.argmax(np.asarray(outputs), axis=-1) == data.y))


def save(result: Result, settings: Settings, path: Path) -> None:
    """Write the checkpoint with what there is to know about it."""
    metadata = {
        "network": "jaxttp.models.digits_resnet(5)",
        "data": "scikit-learn's digits, classes 0-4, pixels scaled to [0, 1]",
        "made_by": "python -m experiments.pretrain_digits",
        **{name: str(value) for name, value in dataclasses.asdict(settings).items()},
        "train_accuracy": f"{result.train_accuracy:.4f}",
        "held_out_accuracy": f"{result.held_out_accuracy:.4f}",
    }
    save_params(path, nnx.state(result.model, nnx.Param), metadata)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: train, report, save."""
    parser = argparse.ArgumentParser(description="Train the shipped network on the digits 0-4.")
    parser.add_argument("--output", type=Path, help="the file (default: in the package)")
    parser.add_argument("--image-size", type=int, choices=SHIPPED_SIZES, default=8)
    options = parser.parse_args(arguments)
    settings = Settings(image_size=options.image_size)
    output = options.output or checkpoint_path(SHIPPED_SIZES[settings.image_size])
    start = time.perf_counter()
    result = run(settings)
    seconds = time.perf_counter() - start
    save(result, settings, output)
    print(
        f"{len(result.losses)} steps in {seconds:.0f} s; accuracy {result.train_accuracy:.4f} on "
        f"the training samples, {result.held_out_accuracy:.4f} on those held out; written to "
        f"{output} ({output.stat().st_size / 1000:.0f} kB)"
    )


if __name__ == "__main__":
    main()
