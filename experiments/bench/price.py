"""What forecasts cost: the map of `ours-price` as tables, and the quick-starts of the guides.

    python -m experiments.bench.price

The map is read from the gallery's results, which `python -m experiments run ours-price --gallery`
measures. The quick-starts are measured here, the same way; two need the extras
`torch` and `keras`.
The last line of every table is that of the estimates: how many are within a factor of 1.7.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from flax import nnx

from experiments.bench.harness import head, line
from experiments.harness import GALLERY
from experiments.store import Store
from experiments.training_time import price
from experiments.training_time.price import PRESETS, Case, Found, job, measure_case
from jaxttp import from_equinox, from_keras, from_nnx, from_torch
from jaxttp.data import load_dataset
from jaxttp.models import MLP

FACTOR = 1.7
SHOWN = (5, 10, 12, 15, 17)
"""Cases of the map that README shows."""
COLUMNS = (
    "pixels", "C", "N", "optimizer", "batch", "T", "training, s (estimated)",
    "forecast, s (estimated; compile)", "FLOPs, forecast / training", "kernels",
    "error of times, steps", "warned",
)  # fmt: skip


def readme() -> tuple[Any, Any, Any]:
    """README's model."""
    x = jax.random.normal(jax.random.key(0), (60, 5))
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(5, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 2, rngs=rngs)
    return from_nnx(nnx.Sequential(*layers)), x, (x[:, 0] * x[:, 1] > 0).astype(int)


def table_of_ones_own() -> tuple[Any, Any, Any]:
    """The command's default on a table of three classes: 30 rows of each."""
    data = load_dataset("wine", per_class=30, key=jax.random.key(0))
    return from_nnx(MLP((13, 64, 64, 3), rngs=nnx.Rngs(params=0))), data.x, data.y


def equinox_mlp() -> tuple[Any, Any, Any]:
    """A tanh MLP on 400 digits."""
    _, *data = job(Case("MLP 64", 8, 10, 400))
    module = eqx.nn.MLP(64, 10, 128, 2, activation=jax.nn.tanh, key=jax.random.key(1))
    return from_equinox(module), *data


def convolutional() -> tuple[Any, Any, Any]:
    """A small network of Flax on 500 digits."""
    _, *data = job(Case("digits-resnet", 8, 10, 500))
    rngs = nnx.Rngs(0)
    module = nnx.Sequential(
        nnx.Conv(1, 16, (3, 3), rngs=rngs), nnx.relu,
        nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs), nnx.relu,
        lambda x: x.mean((1, 2)), nnx.Linear(32, 10, rngs=rngs),
    )  # fmt: skip
    return from_nnx(module), *data


def torch_cnn() -> tuple[Any, Any, Any]:
    """A small network of PyTorch on 300 digits."""
    import torch

    _, x, y = job(Case("digits-resnet", 8, 10, 300))
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2, padding=1), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10),
    )  # fmt: skip
    x = np.moveaxis(x, -1, 1)
    return from_torch(module, x), x, y


def efficientnet() -> tuple[Any, Any, Any]:
    """Keras's EfficientNetB0 with random weights on 64 digits of two classes."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    _, x, y = job(Case("digits-resnet", 32, 2, 64))
    network = keras.applications.EfficientNetB0
    keras.utils.set_random_seed(0)
    module = network(weights=None, input_shape=(32, 32, 3), classes=2, classifier_activation=None)
    return from_keras(module), np.repeat(x, 3, axis=-1), y


STARTS: tuple[tuple[Case, Any, Callable[[], tuple[Any, Any, Any]]], ...] = (
    (Case("README", 0, 2, 60, 150, None, "momentum"), optax.sgd(0.3, 0.9), readme),
    (Case("own table", 0, 3, 90, 150), optax.sgd(0.1), table_of_ones_own),
    (Case("NNX CNN", 8, 10, 500, 300, 64, "adamw"), optax.adamw(1e-3), convolutional),
    (Case("Equinox MLP", 8, 10, 400, 500), optax.sgd(0.1), equinox_mlp),
    (Case("torch CNN", 8, 10, 300, 300, None, "momentum"), optax.sgd(0.05, 0.9), torch_cnn),
    (Case("EfficientNet-B0", 32, 2, 64, 40), optax.sgd(0.01), efficientnet),
)  # fmt: skip


def cells(found: Found) -> list[str]:
    """A row of the table."""
    case, samples = found.case, str(found.case.samples)
    samples += "" if case.total is None else f" of {case.total}"
    estimate = f"{found.expected_run:.2g}" if found.expected_run else "-"  # 0 where there was none
    return [
        case.network, str(case.pixels or "-"), str(case.classes), samples, case.optimizer,
        str(case.batch_size or "all"), str(case.steps),
        f"{found.training:.3g} ({found.expected:.3g})",
        f"{found.run:.2g} ({estimate}; {found.compiling:.2g})",
        f"{found.operations:.2g}", str(found.kernels), errors(found),
        "yes" if found.warned else "no",
    ]  # fmt: skip


def errors(found: Found) -> str:
    """Of the times, in steps."""
    return " / ".join(map(str, found.errors)) or "-"


def table(rows: list[Found], name: str = "network") -> str:
    """All rows, and how many estimates are near."""
    trainings = [found.expected / found.training for found in rows]
    runs = [found.expected_run / found.run for found in rows if found.expected_run]
    counts = [
        f"{sum(1 / FACTOR <= r <= FACTOR for r in ratios)} of {len(ratios)}"
        for ratios in (trainings, runs)
    ]
    last = [f"estimates within {FACTOR}", *[""] * 6, *counts, *[""] * 4]
    return "\n".join([head((name, *COLUMNS)), *map(line, map(cells, rows)), line(last)])


def selection(rows: list[Found]) -> str:
    """The rows that README shows, with fewer columns."""
    columns = ("network", "C", "optimizer, batch", "steps", "training, s", "forecast, s (compile)",
               "error of times, steps")  # fmt: skip
    lines = [head(columns)]
    for found in (rows[i] for i in SHOWN):
        network, pixels, classes, _, optimizer, batch, steps, *_ = cells(found)
        times = f"{found.training:.3g}", f"{found.run:.2g} ({found.compiling:.2g})"
        names = f"{network}, {pixels} px", classes, f"{optimizer}, {batch}", steps
        lines.append(line((*names, *times, errors(found))))
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    settings, folder = PRESETS["cpu"], Path(GALLERY) / "results/ours-price/cpu"
    found = price.run(settings, Store(folder, settings=settings, read_only=True)).found
    print(f"{table(list(found.values()))}\n\n{selection(list(found.values()))}")
    made = [(case, optimizer, *make()) for case, optimizer, make in STARTS]
    rows = [measure_case(c, model, data, o, settings.longest) for c, o, model, *data in made]
    print(f"\n{table(rows, 'quick-start')}")


if __name__ == "__main__":
    main()
