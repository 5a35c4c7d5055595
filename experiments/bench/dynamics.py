"""How true are the dynamics? Momentum, schedules, AdamW, re-linearisation and noise, measured.

    python -m experiments.bench.dynamics [--preset smoke|tuning|cpu] [--store DIR] [--report FILE]

Every curve, real or predicted, is kept in the store by its name, so a run that was cut off goes on
where it stopped. Rates are given as eta lambda_max / N, lambda_max the largest eigenvalue of Theta.
Errors are in steps against the real training time of the same task, optimiser and rate. The
placement of re-linearisation and its controller's constants were chosen with the preset "tuning",
whose tasks the report does not contain.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxttp import empirical_ntk, training_time
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

THRESHOLDS = (0.01, 0.1, 0.4)
ODD = (1, 3, 5, 7, 9)


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """What to measure."""

    tasks: tuple[str, ...] = ("digits 5-9 a", "digits 5-9 b", "digits odd")
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
        "wine": {"seed": 4, "data": "wine"},
        "breast cancer": {"seed": 5, "data": "breast_cancer"},
    }
    return build_task(dataclasses.replace(base, **changes[name]))


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


Row = dict[str, Any]


def row(
    group: str, method: str, bench: Bench, case: str, curve: Any, real: Any, **more: Any
) -> Row:
    """One reading of three thresholds."""
    true, found = times(real), times(curve)
    error = np.abs(found - true)
    return {
        "group": group, "method": method, "task": bench.name, "case": case, "error": error,
        "good": error <= np.maximum(0.13 * true, 2), "curve": curve_error(curve, real), **more,
    }  # fmt: skip


def momentum_rows(bench: Bench) -> list[Row]:
    """Gradient descent and momentum: plain, effective rate, re-linearised."""
    rows = []
    for momentum, rate in itertools.product(bench.settings.momenta, bench.settings.rates):
        eta = bench.rate(rate, momentum)
        optimizer = optax.sgd(eta, momentum or None)
        case = f"sgd {rate:g} {momentum:g}" + (" eff" if momentum else "")
        real = bench.real(case, optimizer)
        group = f"momentum {momentum:g}, η̂ λmax/N " + ("≤ 1" if rate <= 1 else "= 3")
        add = functools.partial(row, group, bench=bench, case=case, real=real)
        rows.append(add("recursion", curve=bench.plain(case, optimizer)))
        if momentum:
            plain = bench.plain(f"{case} sgd-eff", optax.sgd(eta / (1 - momentum)))
            rows.append(add("effective rate", curve=plain))
        for rebuilds in bench.settings.rebuilds:
            out = bench.relinearized(case, optimizer, f"K{rebuilds}", rebuilds=rebuilds)
            drop = abs(real[0] - real[-1])
            estimate = max(out["uncertainty"]) / drop
            more = {"estimate": estimate, "kernels": out["kernels"], "rejected": out["rejected"]}
            rows.append(
                add(f"{rebuilds} rebuilds", curve=out["loss"], **more)
                | {"group": "re-linearised, all rates and momenta"}
            )
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
            add = functools.partial(row, "warm-up + cosine", bench=bench, case=case, real=real)
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
            row("AdamW(1e-4)", "weight space", bench, "adamw", out["loss"], real,
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
            loss = np.asarray(out["loss"])
            spread = np.std(loss, axis=0, ddof=1)[1:]
            each = np.stack([times(curve) for curve in loss])
            rows.append({
                "batch": batch, "method": method, "runs": len(loss),
                "curve": float(np.sqrt(np.mean(spread**2)) / abs(real[:, 0].mean())),
                "times": np.std(each, axis=0, ddof=1), "median": np.median(each, axis=0),
            })  # fmt: skip
    return rows


def run(settings: BenchSettings, store: Store) -> tuple[list[Row], list[Row]]:
    """All rows: readings of three thresholds, and spreads."""
    rows: list[Row] = []
    for name in settings.tasks:
        bench = Bench(name, settings, store)
        rows += momentum_rows(bench) + optimizer_rows(bench)
    return rows, noise_rows(settings, store)


def table(rows: list[Row], spreads: list[Row]) -> str:
    """Everything as Markdown."""
    lines = [
        "| case | forecast | runs | mean error of T at 1 / 10 / 40 %, steps | mean | within 13 % "
        "or 2 steps | curve error, mean | kernels |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Row]] = {}
    for entry in rows:
        groups.setdefault((entry["group"], entry["method"]), []).append(entry)
    for (group, method), members in sorted(groups.items()):
        errors = np.stack([entry["error"] for entry in members])
        good = np.mean([entry["good"] for entry in members])
        curve = np.mean([entry["curve"] for entry in members])
        kernels = np.mean([entry.get("kernels", 1) for entry in members])
        each = " / ".join(f"{value:.1f}" for value in errors.mean(axis=0))
        lines.append(
            f"| {group} | {method} | {len(members)} | {each} | {errors.mean():.1f} | "
            f"{100 * good:.0f} % | {100 * curve:.1f} % | {kernels:.1f} |"
        )
    lines += [
        "",
        "| rebuilds | median of real error / estimate | 90 % of runs below | runs with real error "
        "≤ 3 x estimate | segments rejected a run |",
        "|---|---|---|---|---|",
    ]
    for (_, method), members in sorted(groups.items()):
        if "estimate" in members[0]:
            ratio = np.array([entry["curve"] / entry["estimate"] for entry in members])
            rejected = np.mean([entry["rejected"] for entry in members])
            lines.append(
                f"| {method} | {np.median(ratio):.2f} | {np.quantile(ratio, 0.9):.2f} | "
                f"{100 * np.mean(ratio <= 3):.0f} % | {rejected:.1f} |"
            )
    if spreads:
        lines += [
            "",
            "| B | | runs | spread of the loss curve / L_0 | forecast / real | spread of T at 1 / "
            "10 / 40 %, steps | median T |",
            "|---|---|---|---|---|---|---|",
        ]
    real: dict[int, float] = {e["batch"]: e["curve"] for e in spreads if e["method"] == "real"}
    for entry in spreads:
        spread = " / ".join(f"{value:.1f}" for value in entry["times"])
        middle = " / ".join(f"{value:.0f}" for value in entry["median"])
        lines.append(
            f"| {entry['batch']} | {entry['method']} | {entry['runs']} | {entry['curve']:.4f} | "
            f"{entry['curve'] / real[entry['batch']]:.2f} | {spread} | {middle} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--store", type=Path, default=Path("experiments/results/dynamics"))
    parser.add_argument("--report", type=Path, help="write the tables to this file as well")
    arguments = parser.parse_args()
    store = Store(arguments.store / arguments.preset)
    text = table(*run(PRESETS[arguments.preset], store))
    print(text)
    if arguments.report is not None:
        arguments.report.write_text(text + "\n")


if __name__ == "__main__":
    main()
