"""The order of re-linearization: the error of the loss curve against the number of kernels.

    python -m experiments.bench.dynamics [--preset smoke|cpu] [--plot FILE] [--store FILE]

Gradient descent and momentum 0.9 at an effective eta lambda_max / N of 0.3, lambda_max the largest
eigenvalue of Theta, on the main job (a fine-tuned ResNet, digits 5-9) and on a tanh MLP (digits
0-4) from random weights. "error" is the mean distance of the forecast's loss curve from the real
one as a fraction of the drop, by the number of rebuilt kernels; "order" is the slope of its
logarithm from the fourth number on: 2 for a method of second order.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

from experiments.bench.accuracy_tasks import Job
from experiments.bench.harness import Row, parser, publish, store_of
from jaxttp import empirical_ntk, from_nnx, predict_training_time, train
from jaxttp.data import load_dataset, select
from jaxttp.models import MLP
from jaxttp.pipeline import Settings, build_task
from jaxttp.plots import save, tidy

MODULE = "experiments.bench.dynamics"
COLUMNS = ("task", "momentum", "rebuilds", "error", "order")
TASKS = ("digits 5-9, ResNet", "digits 0-4, tanh MLP")


@dataclasses.dataclass(frozen=True)
class OrderSettings:
    """What to measure."""

    tasks: tuple[str, ...] = TASKS
    rebuilds: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24)
    per_class: int = 30
    steps: int = 150


PRESETS = {"smoke": OrderSettings(TASKS[1:], (1, 2), 4, 12), "cpu": OrderSettings()}


def make(name: str, per_class: int) -> Job:
    """A task by its name."""
    if name == TASKS[0]:
        task = build_task(Settings(samples_per_class=per_class, seed=11))
        return Job(task.model, task.x, task.y)
    digits, key = load_dataset("digits"), jax.random.key(11)
    data = select(digits, classes=range(5), per_class=per_class, key=key)
    network = MLP((64, 64, 64, 5), rngs=nnx.Rngs(params=11), activation="tanh")
    return Job(from_nnx(network), data.x, data.y)


def rows(settings: OrderSettings) -> Iterator[Row]:
    """Every task, momentum and number of kernels, the order with the last of them."""
    for name in settings.tasks:
        job = make(name, settings.per_class)
        kernel = np.asarray(empirical_ntk(*job.model, job.x), np.float64)
        size = kernel.shape[0] * kernel.shape[1]
        rate = 0.3 * len(job.x) / float(np.linalg.eigvalsh(kernel.reshape(size, size))[-1])
        for momentum in (0.0, 0.9):
            common: dict[str, Any] = {
                "loss": "cross_entropy", "steps": settings.steps,
                "optimizer": optax.sgd(rate * (1 - momentum), momentum or None),
            }  # fmt: skip
            real = np.asarray(train(*job.model, job.x, job.y, **common).loss)
            errors = []
            for rebuilds in settings.rebuilds:
                found = predict_training_time(
                    *job.model, job.x, job.y, relinearize=rebuilds, **common
                )
                away = np.mean(np.abs(np.asarray(found.loss) - real))
                errors.append(float(away / abs(real[0] - real[-1])))
                row = {"task": name, "momentum": momentum, "rebuilds": rebuilds}
                yield row | {"error": errors[-1], "order": _order(settings.rebuilds, errors)}


def _order(rebuilds: tuple[int, ...], errors: list[float]) -> float | None:
    """The slope over the larger numbers of kernels, once all are there."""
    if len(errors) < len(rebuilds) or len(errors) < 5:
        return None
    kernels = np.log(np.array(rebuilds[3:]) + 1.0)
    return -float(np.polyfit(kernels, np.log(errors[3:]), 1)[0])


def plot(rows: list[Row]) -> Figure:
    """The errors, a line for each task and momentum."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for task, momentum in dict.fromkeys((row["task"], row["momentum"]) for row in rows):
        own = [row for row in rows if (row["task"], row["momentum"]) == (task, momentum)]
        kernels, errors = (np.array([row[key] for row in own]) for key in ("rebuilds", "error"))
        axes.loglog(kernels + 1, 100 * errors, "o-", label=f"{task}, momentum {momentum:g}")
    axes.set(xlabel="kernels", ylabel="mean error of the loss curve, % of the loss decrease")
    axes.legend(frameon=False, fontsize=9)
    tidy(axes)
    numbers = sorted({row["rebuilds"] + 1 for row in rows})
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.xaxis.minorticks_off()
    return figure


def main(arguments: list[str] | None = None) -> list[Row]:
    """Print the table and draw it."""
    command = parser(MODULE, __doc__, PRESETS)
    command.add_argument("--plot", type=Path, help="draw the errors into this file")
    options = command.parse_args(arguments)
    found = publish(rows(PRESETS[options.preset]), COLUMNS, store_of(MODULE, options))
    if options.plot is not None:
        save(plot(found), options.plot)
    return found


if __name__ == "__main__":
    main()
