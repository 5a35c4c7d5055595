"""When does the test loss rise again? Forecasts compared with real training runs.

    python -m experiments.bench.early_stopping [--preset smoke|cpu] [--seeds 1 2] [--minutes M]
                                               [--store FILE]

Small data, some with labels drawn at random, on which networks overfit; and larger or cleaner ones,
on which they do not. Forecasts are those of `predict_training_time` on its defaults with test
samples. With mini-batches the real runs draw others. "as good" is where the loss is nearly the
lowest, "then" whether it rises again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx
from sklearn import datasets

from experiments.bench.accuracy_tasks import digits
from experiments.bench.harness import Row, go_on, head, line, parser, store_of
from jaxttp import Model, early_stopping, from_nnx, predict_training_time, train
from jaxttp.data import select
from jaxttp.losses import encode_targets
from jaxttp.models import MLP, fresh_head, load_pretrained

MODULE = "experiments.bench.early_stopping"
MOMENTUM = 0.9
RUNS = 3
"""Real runs with mini-batches."""


class Task(NamedTuple):
    """A training with test samples; of x and y the first `count` are trained on."""

    model: Model
    x: np.ndarray
    y: np.ndarray
    count: int
    rate: float
    steps: int
    batch_size: int | None = None


def _drawn(
    x: np.ndarray, y: np.ndarray, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Samples in a random order, a fraction of the labels drawn at random from all classes."""
    rng = np.random.default_rng(seed)
    if fraction:
        y = np.where(rng.random(len(y)) < fraction, rng.integers(0, y.max() + 1, len(y)), y)
    order = rng.permutation(len(x))
    return x[order], y[order]


def _mlp(sizes: tuple[int, ...], seed: int, activation: str = "relu") -> Model:
    return from_nnx(MLP(sizes, rngs=nnx.Rngs(seed), activation=activation))


def _digits(seed: int, fraction: float) -> Task:
    data = digits()
    x, y = _drawn(data.x.reshape(len(data.x), -1), data.y, fraction, seed)
    return Task(_mlp((64, 64, 10), seed), x[:800], y[:800], 200, 0.05, 300)


def _cancer(seed: int) -> Task:
    x, y = datasets.load_breast_cancer(return_X_y=True)
    x = ((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32)
    return Task(_mlp((30, 64, 2), seed), *_drawn(x, y.astype(np.int32), 0.0, seed), 100, 0.05, 300)


def _clusters(seed: int, fraction: float, count: int, batch_size: int | None = None) -> Task:
    x, y = datasets.make_classification(
        count + 400, 20, n_informative=8, n_classes=4, n_clusters_per_class=1, flip_y=fraction,
        random_state=seed + 5,
    )  # fmt: skip
    x, y = (x / x.std(axis=0)).astype(np.float32), y.astype(np.int32)
    model = _mlp((20, 64, 4), seed, "tanh")
    return Task(model, *_drawn(x, y, 0.0, seed), count, 0.03, 200, batch_size)


def _resnet(seed: int, fraction: float) -> Task:
    key = jax.random.key(seed)
    data = select(digits(), classes=range(5, 10), per_class=None, key=key)
    x, y = _drawn(data.x, data.y, fraction, seed)
    model = from_nnx(fresh_head(load_pretrained(), 5, key=key))
    return Task(model, x[:420], y[:420], 120, 0.003, 200)


def _diabetes(seed: int) -> Task:
    x, y = datasets.load_diabetes(return_X_y=True)
    y = ((y - y.mean()) / y.std()).astype(np.float32)[:, None]
    x = (x / x.std(axis=0)).astype(np.float32)
    return Task(_mlp((10, 64, 1), seed), *_drawn(x, y, 0.0, seed), 150, 0.02, 300)


TASKS: dict[str, Callable[[int], Task]] = {
    "200 digits, 25 % random labels, MLP": lambda seed: _digits(seed, 0.25),
    "breast cancer, 100 samples, MLP": _cancer,
    "150 of clusters, 10 % random labels, tanh MLP": lambda seed: _clusters(seed, 0.1, 150),
    "the same, batches of 32": lambda seed: _clusters(seed, 0.1, 150, 32),
    "120 digits 5-9, 30 % random labels, ResNet": lambda seed: _resnet(seed, 0.3),
    "diabetes, 150 samples, MLP": _diabetes,
    "200 digits, MLP": lambda seed: _digits(seed, 0.0),
    "600 of clusters, tanh MLP": lambda seed: _clusters(seed, 0.0, 600),
    "600 of clusters, batches of 32": lambda seed: _clusters(seed, 0.0, 600, 32),
    "120 digits 5-9, ResNet": lambda seed: _resnet(seed, 0.0),
}
PRESETS = {"smoke": ("diabetes, 150 samples, MLP",), "cpu": tuple(TASKS)}


def measure(name: str, seed: int) -> Row:
    """One task: forecast first, then trained."""
    task = TASKS[name](seed)
    known, unseen = slice(None, task.count), slice(task.count, None)
    x_test, y_test = task.x[unseen], task.y[unseen]
    common: dict[str, Any] = {
        "loss": "squared_error" if task.y.ndim == 2 else "cross_entropy", "steps": task.steps,
        "batch_size": task.batch_size,
    }  # fmt: skip
    draws = 1 if task.batch_size is None else RUNS
    keys = [None, None] if draws == 1 else jax.random.split(jax.random.key(seed + 3), 1 + RUNS)
    found = predict_training_time(
        *task.model, task.x[known], task.y[known], x_test=x_test, y_test=y_test,
        learning_rate=task.rate, momentum=MOMENTUM, key=keys[0], **common,
    ).early_stopping()  # fmt: skip
    apply_fn = jax.jit(task.model.apply_fn)
    targets, loss = encode_targets(common["loss"], y_test, apply_fn(task.model.params, x_test))

    def real(key: Any) -> Any:
        curve: list[float] = []
        train(
            *task.model, task.x[known], task.y[known], optimizer=optax.sgd(task.rate, MOMENTUM),
            callback=lambda step, params, _: curve.append(
                float(loss.value(apply_fn(params, x_test), targets))
            ),
            key=key, **common,
        )  # fmt: skip
        return early_stopping(curve)

    several = [real(key) for key in keys[1:]]
    return {
        "name": f"{name}, seed {seed}",
        "forecast": [found.step, found.unsure, *found.near, bool(found.overfits)],
        "real": [[one.step, None, *one.near, bool(one.overfits)] for one in several],
    }


def table(rows: list[Row]) -> str:
    """Steps at which the test loss is lowest, and whether it rises again."""
    titles = (
        "task",
        "forecast: lowest at",
        "as good",
        "then",
        "real: lowest at",
        "as good",
        "then",
    )
    lines, right, near = [head(titles)], [], []
    for row in rows:
        step, unsure, low, high, rises = row["forecast"]
        real = np.median([one[0] for one in row["real"]])
        risen = np.mean([one[4] for one in row["real"]])
        right.append(rises == (risen >= 0.5))
        if risen == 1:
            near.append(abs(step - real) <= 0.2 * max(real, 1.0))
        said = ("does not rise", "overfits")
        lines.append(line((
            row["name"], f"{step}" if unsure is None else f"{step} ± {unsure}", f"{low}-{high}",
            said[rises], ", ".join(f"{one[0]}" for one in row["real"]),
            ", ".join(f"{one[2]}-{one[3]}" for one in row["real"]), said[int(risen >= 0.5)],
        )))  # fmt: skip
    return "\n".join([
        *lines, "",
        f"within 20 % of the real step where it overfits: {sum(near)} of {len(near)}; whether it "
        f"does: right {sum(right)} of {len(right)} times",
    ])  # fmt: skip


def main() -> None:
    """Measure the tasks and print their table."""
    command = parser(MODULE, __doc__, PRESETS)
    command.add_argument("--seeds", type=int, nargs="+", default=[0], help="of samples, weights")
    options = command.parse_args()
    jobs = (
        (f"{name}, seed {seed}", functools.partial(measure, name, seed))
        for seed in options.seeds
        for name in PRESETS[options.preset]
    )
    print(table(go_on(store_of(MODULE, options), jobs, options.minutes)))


if __name__ == "__main__":
    main()
