"""How true are the dynamics? Momentum, schedules, AdamW, re-linearisation and noise, measured.

    python -m experiments.bench.dynamics [--preset smoke|tuning|seen|main|cpu] [--store DIR]
                                         [--report FILE] [--plot FILE]

Every curve, real or predicted, is kept in the store by its name, so a run that was cut off goes on
where it stopped. Rates are given as eta lambda_max / N, lambda_max the largest eigenvalue of Theta.
Errors are in steps against the real training time of the same task, optimiser and rate. The
placement of re-linearisation and its controller's constants were chosen with the preset "tuning";
the tasks of "seen" were looked at while the method was built. The report, "cpu", contains neither.
"main" repeats what has no constant to tune on the main job, digits 5-9.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.bench.dynamics_tables import Row, plot_order, reading, spread, table
from experiments.store import Store
from jaxttp import empirical_ntk
from jaxttp.adapters import from_nnx
from jaxttp.data import load_dataset, select
from jaxttp.dynamics import (
    diagonal_noise,
    diffusion,
    recursion,
    relinearized_recursion,
    weight_space,
)
from jaxttp.losses import encode_targets
from jaxttp.models import MLP
from jaxttp.pipeline import Settings, Task, build_task
from jaxttp.training import train


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """What to measure."""

    tasks: tuple[str, ...] = ("digits 5-9 d", "digits even", "digits 3-7")
    rates: tuple[float, ...] = (0.3, 1.0, 3.0)
    momenta: tuple[float, ...] = (0.0, 0.9)
    rebuilds: tuple[int | str, ...] = (2, 3, 4, "auto")
    optimizers: tuple[str, ...] = ("cosine", "adamw")
    optimizer_rates: tuple[float, ...] = (0.3, 1.0)
    noise_batches: tuple[int, ...] = (4, 16)
    noise_seeds: int = 20
    noise_task: str = "digits 5-9 d"
    order_tasks: tuple[str, ...] = ("digits 5-9 d", "digits 0-4 tanh")
    order_rebuilds: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24)
    samples_per_class: int = 30
    steps: int = 150


PRESETS = {
    "smoke": BenchSettings(
        tasks=("wine",), rates=(1.0,), momenta=(0.9,), rebuilds=(2, "auto"), optimizer_rates=(1.0,),
        noise_batches=(4,), noise_seeds=2, noise_task="wine", order_tasks=("wine",),
        order_rebuilds=(1, 2, 4), samples_per_class=4, steps=12,
    ),
    "tuning": BenchSettings(
        tasks=("wine", "breast cancer", "digits 0-4 mlp"), optimizers=(), noise_batches=(),
        order_tasks=(),
    ),
    "seen": BenchSettings(
        tasks=("digits 5-9 a", "digits 5-9 b", "digits 5-9 c", "digits odd"), noise_batches=(),
        order_tasks=(),
    ),
    "main": BenchSettings(
        tasks=("digits 5-9 a", "digits 5-9 b", "digits 5-9 c", "digits 5-9 d"), rebuilds=(),
        noise_batches=(), order_tasks=(),
    ),
    "cpu": BenchSettings(),
}  # fmt: skip


def make_task(name: str, samples_per_class: int) -> Task:
    """A task by its name in the tables."""
    base = Settings(samples_per_class=samples_per_class)
    if name in ("digits 0-4 mlp", "digits 0-4 tanh"):
        data = select(
            load_dataset("digits"), classes=range(5), per_class=samples_per_class,
            key=jax.random.key(11),
        )  # fmt: skip
        activation = "tanh" if name.endswith("tanh") else "relu"
        network = MLP((64, 64, 64, 5), rngs=nnx.Rngs(params=11), activation=activation)
        return Task(from_nnx(network), data.x, data.y, "cross_entropy", name)
    changes: dict[str, dict[str, Any]] = {
        "digits 5-9 a": {"seed": 0},
        "digits 5-9 b": {"seed": 1},
        "digits 5-9 c": {"seed": 10},
        "digits 5-9 d": {"seed": 11},
        "digits odd": {"seed": 2, "classes": (1, 3, 5, 7, 9)},
        "digits even": {"seed": 12, "classes": (0, 2, 4, 6, 8)},
        "digits 3-7": {"seed": 13, "classes": (3, 4, 5, 6, 7)},
        "wine": {"seed": 4, "data": "wine"},
        "breast cancer": {"seed": 5, "data": "breast_cancer"},
    }
    return build_task(dataclasses.replace(base, **changes[name]))


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

    def rate(self, relative: float) -> float:
        """Eta from eta lambda_max / N."""
        return relative / self.largest

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


def momentum_rows(bench: Bench) -> list[Row]:
    """Gradient descent and momentum: plain, effective rate, re-linearised.

    With momentum m the rates are taken twice: as eta lambda_max / N, and as the effective ones
    eta / (1 - m) lambda_max / N, which are slower.
    """
    rows = []
    settings = bench.settings
    for momentum in settings.momenta:
        sets = {f"momentum {momentum:g}, η": settings.rates}
        if momentum:
            reduced = tuple(float(f"{rate * (1 - momentum):.3g}") for rate in settings.rates)
            sets[f"momentum {momentum:g}, effective η"] = reduced
        for rate in sorted({rate for rates in sets.values() for rate in rates}):
            eta = bench.rate(rate)
            optimizer = optax.sgd(eta, momentum or None)
            case = f"sgd {rate:g} {momentum:g}"
            real = bench.real(case, optimizer)
            found: dict[str, tuple[Any, dict[str, Any]]] = {
                "recursion": (bench.plain(case, optimizer), {})
            }
            if momentum:
                plain = bench.plain(f"{case} effective", optax.sgd(eta / (1 - momentum)))
                found["effective rate"] = (plain, {})
            for rebuilds in settings.rebuilds:
                out = bench.relinearized(case, optimizer, f"K{rebuilds}", rebuilds=rebuilds)
                estimate = max(out["uncertainty"]) / abs(real[0] - real[-1])
                more = {"estimate": estimate} | {k: out[k] for k in ("kernels", "rejected")}
                found[f"{rebuilds} rebuilds"] = (out["loss"], more)
            for group, rates in sets.items():
                if rate in rates:
                    large = "≤ 1" if rates.index(rate) < 2 else "= 3"
                    slow, both = "effective" in group, momentum == 0
                    overall = ("η",) * (both or not slow) + ("effective η",) * (both or slow)
                    for method, (curve, more) in found.items():
                        rows.append(reading(
                            f"{group} λmax/N {large}", method, bench.name, case, curve, real,
                            overall=overall, **more,
                        ))  # fmt: skip
    return rows


def order_rows(settings: BenchSettings, store: Store) -> list[Row]:
    """The error of the loss curve against the number of kernels."""
    rows = []
    for name in settings.order_tasks:
        bench = Bench(name, settings, store)
        for momentum in (0.0, 0.9):
            optimizer = optax.sgd(bench.rate(0.3) * (1 - momentum), momentum or None)
            case = f"order {momentum:g}"
            real = bench.real(case, optimizer)
            for rebuilds in settings.order_rebuilds:
                out = bench.relinearized(case, optimizer, f"order 2 K{rebuilds}", rebuilds=rebuilds)
                entry = reading("order", "order 2", name, case, out["loss"], real)
                rows.append(entry | {"rebuilds": rebuilds, "momentum": momentum})
    return rows


def optimizer_rows(bench: Bench) -> list[Row]:
    """Warm-up and cosine by the recursion, AdamW by the weight-space simulation."""
    rows = []
    steps = bench.settings.steps
    if "cosine" in bench.settings.optimizers:
        for rate in bench.settings.optimizer_rates:
            eta = bench.rate(rate)
            schedule = optax.warmup_cosine_decay_schedule(0.0, eta, max(1, steps // 10), steps)
            case = f"cosine {rate:g}"
            real = bench.real(case, optax.sgd(schedule))
            add = functools.partial(
                reading, "warm-up + cosine", task=bench.name, case=case, real=real
            )
            rows.append(add("recursion", curve=bench.plain(case, optax.sgd(schedule))))
            ignored = bench.plain(f"{case} ignored", optax.sgd(eta))
            rows.append(add("schedule ignored", curve=ignored))
    if "adamw" in bench.settings.optimizers:
        optimizer = optax.adamw(1e-4)
        real = bench.real("adamw", optimizer)

        def make() -> Row:
            path = weight_space(
                bench.apply_fn, bench.params, bench.x, bench.task.y, loss=bench.task.loss,
                optimizer=optimizer, steps=steps,
            )  # fmt: skip
            return {"loss": bench.curve(path.train), "mismatch": float(path.mismatch)}

        out = bench.get("adamw/weight space", make)
        rows.append(
            reading("AdamW(1e-4)", "weight space", bench.name, "adamw", out["loss"], real,
                    mismatch=out["mismatch"])
        )  # fmt: skip
    return rows


def noise_rows(settings: BenchSettings, store: Store) -> list[Row]:
    """The spread between runs of small batches, real and forecast (shuffled epochs)."""
    if not settings.noise_batches:
        return []
    bench = Bench(settings.noise_task, settings, store)
    eta, kernel = bench.rate(3.0), bench.first()
    common = {"steps": settings.steps, "protocol": "epochs"}
    rows = []
    for batch in settings.noise_batches:
        curves = [
            bench.real(
                f"batch {batch} seed {seed}", optax.sgd(eta), batch_size=batch,
                key=jax.random.key(100 + seed),
            )
            for seed in range(settings.noise_seeds)
        ]  # fmt: skip
        real = np.stack(curves)

        def exact(batch: int = batch) -> Row:
            def one(key: Any) -> Any:
                return recursion(
                    kernel, bench.f0, bench.targets, loss=bench.loss,
                    optimizer=optax.sgd(eta), batch_size=batch, key=key, **common,
                ).train  # fmt: skip

            each = jax.jit(lambda k: jax.lax.map(lambda q: losses(one(q)), k))
            losses = jax.vmap(lambda f: bench.loss.value(f, bench.targets))
            return {"loss": np.asarray(each(jax.random.split(jax.random.key(1), 32))).tolist()}

        forecasts = {"exact mini-batch recursion": bench.get(f"batch {batch} recursion", exact)}
        for noise in ("full", "diagonal", "constant"):

            def sde(noise: str = noise, batch: int = batch) -> Row:
                given = None
                if noise != "full":
                    given = diagonal_noise(
                        bench.apply_fn, bench.params, bench.x, bench.task.y, loss=bench.loss
                    )
                path = diffusion(
                    kernel, bench.f0, bench.targets, loss=bench.loss, learning_rate=eta,
                    batch_size=batch, key=jax.random.key(2), noise=noise, paths=32,
                    noise_kernel=given, save="curves", **common,
                )  # fmt: skip
                return {"loss": np.asarray(path.loss, np.float64).tolist()}

            forecasts[f"SDE, {noise}"] = bench.get(f"batch {batch} sde {noise}", sde)
        for method, out in {"real": {"loss": real}, **forecasts}.items():
            rows.append(spread(batch, method, np.asarray(out["loss"]), float(real[0, 0])))
    return rows


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--store", type=Path, default=Path("experiments/results/dynamics"))
    parser.add_argument("--report", type=Path, help="write the tables to this file as well")
    parser.add_argument("--plot", type=Path, help="draw error against kernels to this file")
    arguments = parser.parse_args()
    settings = PRESETS[arguments.preset]
    store = Store(arguments.store / arguments.preset, settings=settings)
    rows: list[Row] = []
    for name in settings.tasks:
        bench = Bench(name, settings, store)
        rows += momentum_rows(bench) + optimizer_rows(bench)
    orders = order_rows(settings, store)
    text = table(rows, noise_rows(settings, store), orders)
    print(text)
    if arguments.report is not None:
        arguments.report.write_text(text + "\n")
    if arguments.plot is not None and orders:
        plot_order(orders, arguments.plot)


if __name__ == "__main__":
    main()
