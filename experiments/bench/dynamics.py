"""How true are the dynamics? Momentum, schedules, AdamW, re-linearisation and noise, measured.

    python -m experiments.bench.dynamics [--preset smoke|tuning|cpu] [--store DIR] [--report FILE]

Every curve, real or predicted, is kept in the store by its name, so a run that was cut off goes on
where it stopped. Rates are given as eta lambda_max / N, lambda_max the largest eigenvalue of Theta.
Errors are in steps against the real training time of the same task, optimiser and rate. The
placement of re-linearisation and its controller's constants were chosen with the preset "tuning",
whose tasks the report does not contain.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxttp import empirical_ntk, training_time
from jaxttp.adapters import from_nnx
from jaxttp.data import load_dataset, select
from jaxttp.dynamics import recursion
from jaxttp.dynamics.relinearize import relinearized_recursion
from jaxttp.losses import encode_targets
from jaxttp.models import MLP
from jaxttp.pipeline import Settings, Task, build_task
from jaxttp.training import train

THRESHOLDS = (0.01, 0.1, 0.4)
ODD = (1, 3, 5, 7, 9)


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """What to measure."""

    tasks: tuple[str, ...] = ("digits 5-9 a", "digits 5-9 b", "digits odd", "diabetes")
    rates: tuple[float, ...] = (0.3, 1.0, 3.0)
    momenta: tuple[float, ...] = (0.0, 0.9)
    rebuilds: tuple[int | str, ...] = (1, 2, 3, 4, 6, "auto")
    optimizers: tuple[str, ...] = ("cosine", "adamw")
    optimizer_rates: tuple[float, ...] = (0.3, 1.0)
    noise_batches: tuple[int, ...] = (4, 16)
    noise_seeds: int = 10
    noise_task: str = "digits 5-9 a"
    samples_per_class: int = 30
    steps: int = 150


PRESETS = {
    "smoke": BenchSettings(
        tasks=("wine",), rates=(1.0,), momenta=(0.9,), rebuilds=(2, "auto"), optimizer_rates=(1.0,),
        noise_batches=(4,), noise_seeds=2, noise_task="wine", samples_per_class=4, steps=12,
    ),
    "tuning": BenchSettings(
        tasks=("wine", "breast cancer", "digits 0-4 mlp"), optimizers=(), noise_batches=()
    ),
    "cpu": BenchSettings(),
}  # fmt: skip


def make_task(name: str, samples_per_class: int) -> Task:
    """A task by its name in the tables."""
    base = Settings(samples_per_class=samples_per_class)
    if name == "digits 0-4 mlp":
        data = select(
            load_dataset("digits"), classes=range(5), per_class=samples_per_class,
            key=jax.random.key(11),
        )  # fmt: skip
        network = MLP((64, 64, 64, 5), rngs=nnx.Rngs(params=11))
        return Task(from_nnx(network), data.x, data.y, "cross_entropy", name)
    changes: dict[str, dict[str, Any]] = {
        "digits 5-9 a": {"seed": 0},
        "digits 5-9 b": {"seed": 1},
        "digits odd": {"seed": 2, "classes": ODD},
        "diabetes": {"seed": 3, "data": "diabetes"},
        "wine": {"seed": 4, "data": "wine"},
        "breast cancer": {"seed": 5, "data": "breast_cancer"},
    }
    task = build_task(dataclasses.replace(base, **changes[name]))
    if len(task.x) > 5 * samples_per_class:  # a regression comes whole
        some = np.random.default_rng(0).permutation(len(task.x))[: 5 * samples_per_class]
        task = dataclasses.replace(task, x=task.x[some], y=task.y[some])
    return task


class Store:
    """Curves and numbers by name, one JSON file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What is kept under `name`, made now if it is not there yet."""
        path = self.folder / (name.replace("/", "_").replace(" ", "-") + ".json")
        if not path.exists():
            begun = time.perf_counter()
            value = make()
            print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)
            path.write_text(json.dumps(value))
        return json.loads(path.read_text())


class Bench:
    """One task with its kernel function; what is compiled serves all its runs."""

    def __init__(self, name: str, settings: BenchSettings, store: Store) -> None:
        self.name, self.settings, self.store = name, settings, store
        self.task = make_task(name, settings.samples_per_class)
        self.apply_fn, self.params = self.task.model
        self.x = jnp.asarray(self.task.x)
        build = jax.jit(lambda w: empirical_ntk(self.apply_fn, w, self.x))
        self.first = functools.cache(lambda: build(self.params))
        self.kernel_fn = lambda w: self.first() if w is self.params else build(w)
        f0 = jax.jit(self.apply_fn)(self.params, self.x)
        self.f0 = f0
        self.targets, self.loss = encode_targets(self.task.loss, self.task.y, f0)
        value = jax.jit(jax.vmap(lambda f: self.loss.value(f, self.targets)))
        self.curve = lambda path: np.asarray(value(path), np.float64).tolist()
        self.largest = store.get(f"{name}/largest", self._largest)["value"]

    def _largest(self) -> dict[str, float]:
        kernel = np.asarray(self.first(), np.float64)
        size = kernel.shape[0] * kernel.shape[1]
        return {"value": float(np.linalg.eigvalsh(kernel.reshape(size, size))[-1] / len(self.x))}

    def rate(self, relative: float, momentum: float = 0.0) -> float:
        """Eta from eta lambda_max / N; with momentum the EFFECTIVE rate is the relative one."""
        return relative / self.largest * (1 - momentum)

    def get(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A curve of this task from the store."""
        return self.store.get(f"{self.name}/{name}", make)

    def real(self, name: str, optimizer: Any, **options: Any) -> np.ndarray:
        """The real loss curve."""

        def make() -> dict[str, Any]:
            run = train(
                self.apply_fn, self.params, self.x, self.task.y, loss=self.task.loss,
                optimizer=optimizer, steps=self.settings.steps, **options,
            )  # fmt: skip
            return {"loss": np.asarray(run.loss, np.float64).tolist(), "seconds": run.seconds}

        return np.asarray(self.get(f"{name}/real", make)["loss"])

    def plain(self, name: str, optimizer: Any) -> np.ndarray:
        """The forecast without re-linearisation."""

        def make() -> dict[str, Any]:
            tangent = jax.jvp(lambda w: self.apply_fn(w, self.x), (self.params,), (self.params,))[1]
            path = recursion(
                self.first(), self.f0, self.task.y, loss=self.task.loss, optimizer=optimizer,
                steps=self.settings.steps, initial_tangent=tangent,
            )  # fmt: skip
            return {"loss": self.curve(path.train)}

        return np.asarray(self.get(f"{name}/plain", make)["loss"])

    def relinearized(self, name: str, optimizer: Any, label: str, **options: Any) -> dict[str, Any]:
        """A re-linearised forecast: curve, estimate, ends, kernels."""

        def make() -> dict[str, Any]:
            path = relinearized_recursion(
                self.apply_fn, self.params, self.x, self.task.y, loss=self.task.loss,
                optimizer=optimizer, steps=self.settings.steps, kernel_fn=self.kernel_fn, **options,
            )  # fmt: skip
            return {
                "loss": np.asarray(path.loss, np.float64).tolist(),
                "provisional": self.curve(path.provisional),
                "uncertainty": np.asarray(path.loss_uncertainty, np.float64).tolist(),
                "ends": path.ends,
                "local": np.asarray(path.local_errors, np.float64).tolist(),
                "kernels": path.kernels,
                "rejected": path.rejected,
                "seconds": path.kernel_seconds,
            }

        return self.get(f"{name}/relinearized {label}", make)


def times(curve: Any) -> np.ndarray:
    """Training times at the three thresholds."""
    return np.array([int(training_time(np.asarray(curve), e)) for e in THRESHOLDS])


def curve_error(curve: Any, real: Any) -> float:
    """Largest error of a loss curve, as a share of the real drop."""
    real = np.asarray(real)
    return float(np.max(np.abs(np.asarray(curve) - real)) / abs(real[0] - real[-1]))
