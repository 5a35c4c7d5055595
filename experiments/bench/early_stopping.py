"""When does the test loss rise again? Forecasts, and real trainings beside them.

    python -m experiments.bench.early_stopping [--preset smoke|cpu] [--task NAME] [--seeds 0,1]

Small data, some with labels drawn by lot, on which networks overfit; and larger or cleaner ones, on
which they do not. Forecasts are those of `predict_training_time` on its defaults with test samples,
made before the training that they are compared with. With mini-batches the real runs draw others.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from sklearn import datasets

from experiments.bench.accuracy_tasks import digits
from jaxttp import Model, early_stopping, from_nnx, predict_training_time, train
from jaxttp.data import select
from jaxttp.losses import encode_targets
from jaxttp.losses.rule import EarlyStopping
from jaxttp.models import MLP, fresh_head, load_pretrained

MOMENTUM = 0.9
RUNS = 3
"""Real runs with mini-batches."""


class Task(NamedTuple):
    """A training with test samples."""

    model: Model
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    rate: float
    steps: int
    loss: str = "cross_entropy"
    batch_size: int | None = None


def _split(
    x: np.ndarray, y: np.ndarray, count: int, most: int, rng: np.random.Generator
) -> dict[str, Any]:
    order = rng.permutation(len(x))
    few, rest = order[:count], order[count : count + most]
    return {"train": (x[few], y[few]), "test": (x[rest], y[rest])}


def _by_lot(y: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Labels of which a share is drawn from all classes."""
    return np.where(rng.random(len(y)) < share, rng.integers(0, y.max() + 1, len(y)), y)


def _mlp(sizes: tuple[int, ...], seed: int, activation: str = "relu") -> Model:
    return from_nnx(MLP(sizes, rngs=nnx.Rngs(seed), activation=activation))


def _digits(seed: int, share: float) -> Task:
    rng, data = np.random.default_rng(seed), digits()
    parts = _split(data.x.reshape(len(data.x), -1), _by_lot(data.y, share, rng), 200, 600, rng)
    return Task(_mlp((64, 64, 10), seed), rate=0.05, steps=300, **parts)


def _cancer(seed: int) -> Task:
    x, y = datasets.load_breast_cancer(return_X_y=True)
    x = ((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32)
    parts = _split(x, y.astype(np.int32), 100, 469, np.random.default_rng(seed))
    return Task(_mlp((30, 64, 2), seed), rate=0.05, steps=300, **parts)


def _clusters(seed: int, share: float, count: int, batch_size: int | None = None) -> Task:
    x, y = datasets.make_classification(
        count + 400, 20, n_informative=8, n_classes=4, n_clusters_per_class=1, flip_y=share,
        random_state=seed + 5,
    )  # fmt: skip
    x = (x / x.std(axis=0)).astype(np.float32)
    parts = _split(x, y.astype(np.int32), count, 400, np.random.default_rng(seed))
    model = _mlp((20, 64, 4), seed, "tanh")
    return Task(model, rate=0.03, steps=200, batch_size=batch_size, **parts)


def _resnet(seed: int, share: float) -> Task:
    rng = np.random.default_rng(seed)
    data = select(digits(), classes=range(5, 10), per_class=None, key=jax.random.key(seed))
    parts = _split(data.x, _by_lot(data.y, share, rng), 120, 300, rng)
    model = from_nnx(fresh_head(load_pretrained(), 5, key=jax.random.key(seed)))
    return Task(model, rate=0.003, steps=200, **parts)


def _diabetes(seed: int) -> Task:
    x, y = datasets.load_diabetes(return_X_y=True)
    y = ((y - y.mean()) / y.std()).astype(np.float32)[:, None]
    parts = _split((x / x.std(axis=0)).astype(np.float32), y, 150, 292, np.random.default_rng(seed))
    model = _mlp((10, 64, 1), seed)
    return Task(model, rate=0.02, steps=300, loss="squared_error", **parts)


TASKS: dict[str, Callable[[int], Task]] = {
    "200 digits, a quarter by lot, MLP": lambda seed: _digits(seed, 0.25),
    "breast cancer, 100 samples, MLP": _cancer,
    "150 of clusters, a tenth by lot, tanh MLP": lambda seed: _clusters(seed, 0.1, 150),
    "the same, batches of 32": lambda seed: _clusters(seed, 0.1, 150, 32),
    "120 digits 5-9, 30 % by lot, ResNet": lambda seed: _resnet(seed, 0.3),
    "diabetes, 150 samples, MLP": _diabetes,
    "200 digits, MLP": lambda seed: _digits(seed, 0.0),
    "600 of clusters, tanh MLP": lambda seed: _clusters(seed, 0.0, 600),
    "the same, batches of 32 ": lambda seed: _clusters(seed, 0.0, 600, 32),
    "120 digits 5-9, ResNet": lambda seed: _resnet(seed, 0.0),
}
PRESETS = {"smoke": ("diabetes, 150 samples, MLP",), "cpu": tuple(TASKS)}


class Row(NamedTuple):
    """A forecast, and what really happened, once or several times."""

    name: str
    seed: int
    seconds: float
    forecast: EarlyStopping
    real: tuple[EarlyStopping, ...]

    @property
    def verdict(self) -> bool:
        """Whether overfitting was foreseen as it is in the middle of the real runs."""
        return self.forecast.overfits == (np.mean([one.overfits for one in self.real]) >= 0.5)

    @property
    def off(self) -> float:
        """The error of the step as a share of the real one (the median of several)."""
        real = float(np.median([one.step for one in self.real]))
        return abs(self.forecast.step - real) / max(real, 1.0)


def measure(name: str, seed: int) -> Row:
    """One task: forecast first, then trained."""
    task = TASKS[name](seed)
    key = None if task.batch_size is None else jax.random.key(seed + 3)
    common: dict[str, Any] = {
        "loss": task.loss, "steps": task.steps, "batch_size": task.batch_size,
    }  # fmt: skip
    begun = time.perf_counter()
    prediction = predict_training_time(
        *task.model, *task.train, x_test=task.test[0], y_test=task.test[1],
        learning_rate=task.rate, momentum=MOMENTUM, key=key, **common,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    apply_fn = jax.jit(task.model.apply_fn)
    before = apply_fn(task.model.params, task.test[0])
    targets, loss = encode_targets(task.loss, task.test[1], before)
    real = []
    for run in range(1 if key is None else RUNS):
        curve: list[float] = []

        def keep(_step: int, params: Any, _loss: float, curve: list[float] = curve) -> None:
            curve.append(float(loss.value(apply_fn(params, task.test[0]), targets)))

        train(
            *task.model, *task.train, optimizer=optax.sgd(task.rate, MOMENTUM), callback=keep,
            key=None if key is None else jax.random.key(seed + 50 + run), **common,
        )  # fmt: skip
        real.append(early_stopping(curve))
    return Row(name, seed, seconds, prediction.early_stopping(), tuple(real))


def table(rows: list[Row]) -> str:
    """Steps at which the test loss is lowest, and whether it rises again."""
    lines = [
        "| task | seed | forecast: lowest at | as good | then | real: lowest at | as good | then | "
        "seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one = row.forecast
        off = "" if one.unsure is None else f" ± {one.unsure}"
        cells = [row.name.strip(), f"{row.seed}", f"{one.step}{off}", *_rest([one])]
        cells += [", ".join(f"{real.step}" for real in row.real), *_rest(row.real)]
        lines.append(f"| {' | '.join(cells)} | {row.seconds:.0f} |")
    risen = [row for row in rows if all(real.overfits for real in row.real)]
    within = sum(row.off <= 0.2 for row in risen)
    right = sum(row.verdict for row in rows)
    lines += [
        "",
        f"within 20 % of the real step where it overfits: {within} of {len(risen)}; whether it "
        f"does: right {right} of {len(rows)} times",
    ]
    return "\n".join(lines)


def _rest(several: Any) -> list[str]:
    near = ", ".join(f"{one.near[0]}-{one.near[1]}" for one in several)
    words = {"overfits" if one.overfits else "does not rise" for one in several}
    return [near, " or ".join(sorted(words))]


def main(argv: list[str] | None = None) -> list[Row]:
    """Measure the tasks and print their table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--task", choices=TASKS, help="only this one")
    parser.add_argument("--seeds", default="0", help="of samples and weights, as 0,1")
    arguments = parser.parse_args(argv)
    names = PRESETS[arguments.preset] if arguments.task is None else (arguments.task,)
    rows = [measure(name, int(seed)) for seed in arguments.seeds.split(",") for name in names]
    print(table(rows))
    return rows


if __name__ == "__main__":
    main()
