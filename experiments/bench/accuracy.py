"""How accurate are forecasts? Predicted against real training times of many tasks.

    python -m experiments.bench.accuracy [--preset smoke|tuning|cpu] [--few] [--minutes M]
                                         [--store FILE] [--report]

Every run is a task (samples, network, fresh head, seed), a scale of the head's outputs, and a way
to train: gradient descent, momentum 0.9, or mini-batches of 16 to 64, with the EFFECTIVE rate eta /
(1 - m) given as eta lambda_max / N, lambda_max the largest eigenvalue of Theta. The real training
is compared with the forecast by one kernel, relinearized ones, and Algorithm 1 of the paper to the
letter; with ``--few`` by one kernel, the default and ``budget=inf``. Nothing is tuned on the 24
runs of "cpu": that is what the preset "tuning" is for. What is measured is kept line by line in
the store, so a run that was cut off goes on where it stopped; ``--report`` prints the tables of
what is there (`experiments.bench.accuracy_tables`).
"""

import collections
import dataclasses
import functools
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench.accuracy_tables import report
from experiments.bench.accuracy_tasks import REPORTED, TUNING, Job, make
from experiments.bench.harness import Row, go_on, load, parser, store_of
from jaxttp import empirical_ntk, predict_training_time, sketch_jacobian, train, training_time
from jaxttp._core.progress import stopwatch
from jaxttp.dynamics import diagonal_noise, diffusion, effective_learning_rate, gradient_flow
from jaxttp.losses import encode_targets

MODULE = "experiments.bench.accuracy"
THRESHOLDS = (0.01, 0.1, 0.4)
LOSS = "cross_entropy"


@dataclasses.dataclass(frozen=True)
class AccuracySettings:
    """What to measure: from every list of ways to train, each task takes every `stride`-th.

    `paper` is whether Algorithm 1 is run, too; `budgets` are fractions of the training's FLOPs.
    """

    tasks: tuple[str, ...] = tuple(REPORTED)
    rates: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    momentum_rates: tuple[float, ...] = (0.3, 1.0, 3.0)
    batches: tuple[int, ...] = (16, 32, 64)
    batch_rates: tuple[float, ...] = (0.3, 1.0, 3.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    head_scales: tuple[float, ...] = (1.0, 0.3)
    runs: int = 3
    resnet_runs: int = 2
    steps: int = 150
    rebuilds: tuple[int | str, ...] = (4, "auto")
    projections: int = 1000
    paths: int = 8
    paper: bool = True
    budgets: tuple[float, ...] = ()


PRESETS = {
    "smoke": AccuracySettings(
        tasks=("wine, MLP",), runs=2, steps=20, rebuilds=(1,), projections=50, paths=2
    ),
    "tuning": AccuracySettings(tasks=tuple(TUNING)),
    "cpu": AccuracySettings(),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: a task and how it is trained; `rate` is the effective eta lambda_max / N."""

    task: str
    seed: int
    head_scale: float
    momentum: float
    batch_size: int | None
    rate: float

    @property
    def name(self) -> str:
        """What it is kept under."""
        batch = self.batch_size or "all"
        return (
            f"{self.task}/seed {self.seed}/head {self.head_scale:g}/momentum {self.momentum:g}/"
            f"batch {batch}/rate {self.rate:g}"
        )


def plan(settings: AccuracySettings) -> list[Run]:
    """The runs of all tasks.

    The ways to train are one list, from which a task takes every few, beginning at another place
    than the task before it: gradient descent, mini-batches and momentum in turns.
    """
    descent = [(0.0, None, rate) for rate in settings.rates]
    fast = [(0.9, None, rate) for rate in settings.momentum_rates]
    noisy = [(0.0, b, r) for r, b in itertools.product(settings.batch_rates, settings.batches)]
    rounds = itertools.zip_longest
    plans = []
    for place, task in enumerate(settings.tasks):
        table = REPORTED | TUNING
        count = settings.resnet_runs if table[task].network == "resnet" else settings.runs
        kinds = [_turned(kind, place) for kind in (descent, noisy, fast)]
        ways = [way for group in rounds(*kinds) for way in group if way is not None][:count]
        plans.append([
            Run(
                task, settings.seeds[(place + i) % len(settings.seeds)],
                settings.head_scales[(place + i) % len(settings.head_scales)], *way,
            )
            for i, way in enumerate(ways)
        ])  # fmt: skip
    return [run for group in rounds(*plans) for run in group if run is not None]


def _turned(items: list, by: int) -> list:
    by %= len(items)
    return items[by:] + items[:by]


def measure(run: Run, settings: AccuracySettings) -> Row:
    """Train for real, forecast in every way; plain values."""
    job = make(run.task, run.seed, run.head_scale)
    kernel = np.asarray(empirical_ntk(*job.model, job.x), np.float64)
    size = kernel.shape[0] * kernel.shape[1]
    largest = float(np.linalg.eigvalsh(kernel.reshape(size, size))[-1]) / len(job.x)
    eta = run.rate * (1 - run.momentum) / largest
    real = train(
        *job.model, job.x, job.y, loss=LOSS, optimizer=optax.sgd(eta, run.momentum or None),
        steps=settings.steps, batch_size=run.batch_size, key=jax.random.key(run.seed + 50),
    )  # fmt: skip
    out = dataclasses.asdict(run) | {
        "name": run.name,
        "learning_rate": eta,
        "samples": len(job.x),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(job.model.params)),
        "horizon": settings.steps,
        "thresholds": THRESHOLDS,
    }
    if not np.all(np.isfinite(real.loss)):
        return out | {"diverged": True}
    out["real"] = _reading(real.loss) | {
        "seconds": real.seconds,
        "compile_seconds": real.compile_seconds,
    }
    found = {"one kernel": _predicted(job, run, settings, eta, 0)}
    for rebuilds in settings.rebuilds:
        if rebuilds == "auto":
            found["default"] = _predicted(job, run, settings, eta, rebuilds)
            found["budget=inf"] = _predicted(job, run, settings, eta, rebuilds, budget=math.inf)
        else:
            found[f"{rebuilds} rebuilt"] = _predicted(job, run, settings, eta, rebuilds)
    for budget in settings.budgets:
        found[f"budget={budget:g}"] = _predicted(job, run, settings, eta, "auto", budget=budget)
    if settings.paper:
        found["Algorithm 1"] = _algorithm_1(job, run, settings, eta)
    return out | {"forecasts": found}


def _predicted(
    job: Job, run: Run, settings: AccuracySettings, eta: float, rebuilds: int | str, **options: Any
) -> Row:
    key = None if run.batch_size is None else jax.random.key(run.seed + 90)  # batches of its own
    found = predict_training_time(
        *job.model, job.x, job.y, loss=LOSS, learning_rate=eta, momentum=run.momentum,
        batch_size=run.batch_size, steps=settings.steps, thresholds=THRESHOLDS, key=key,
        relinearize=rebuilds, **options,
    )  # fmt: skip
    return _reading(found.loss) | {
        "stable": found.stable, "warnings": found.warnings, "cost": dataclasses.asdict(found.cost)
    }  # fmt: skip


def _algorithm_1(job: Job, run: Run, settings: AccuracySettings, eta: float) -> Row:
    """The paper's: projected Jacobian, effective learning rate, ODE or diagonal-noise SDE."""
    x = jnp.asarray(job.x)
    with stopwatch() as watch:
        f0 = jax.jit(job.model.apply_fn)(job.model.params, x)
        targets, loss = encode_targets(LOSS, job.y, f0)
        features = sketch_jacobian(
            *job.model, x, key=jax.random.key(7), dim=settings.projections, kind="achlioptas"
        )
        kernel = jnp.einsum("ncd,med->ncme", features, features, precision="highest")
        if run.batch_size is None:
            path = gradient_flow(
                kernel, f0, targets, loss=loss, ts=jnp.arange(settings.steps + 1, dtype=f0.dtype),
                learning_rate=effective_learning_rate(eta, run.momentum),
            ).train  # fmt: skip
            curve = jax.vmap(lambda f: loss.value(f, targets))(path)
        else:
            draws = diffusion(
                kernel, f0, targets, loss=loss, learning_rate=eta, momentum=run.momentum,
                batch_size=run.batch_size, steps=settings.steps, key=jax.random.key(8),
                noise="diagonal", noise_kernel=diagonal_noise(*job.model, x, targets, loss=loss),
                paths=settings.paths, protocol="replacement", save="curves",
            )  # fmt: skip
            curve = jnp.median(draws.loss, axis=0)
        jax.block_until_ready(curve)
    kernels = 1 if run.batch_size is None else 2
    cost = {
        "kernels": kernels,
        "gradient_evaluations": kernels * f0.shape[1],
        "seconds": watch.run_seconds,
        "compile_seconds": watch.compile_seconds,
    }
    return _reading(curve) | {"stable": bool(np.all(np.isfinite(curve))), "cost": cost}


def _reading(loss: Any) -> Row:
    """A curve and its training times, -1 where it is not finite."""
    curve = np.asarray(loss, np.float64)
    known = bool(np.all(np.isfinite(curve)))
    times = [int(training_time(curve, e)) if known else -1 for e in THRESHOLDS]
    return {"steps": times, "loss": [float(f"{value:.6g}") for value in curve]}


def run_all(settings: AccuracySettings, store: Path, minutes: float) -> list[Row]:
    """Measure what the store does not have yet, until the time is over; returns all its rows."""
    done = collections.Counter(row["task"] for row in load(store))
    # One task after another, so that what is compiled serves all its runs; the emptiest first.
    runs = sorted(plan(settings), key=lambda run: (done[run.task], run.task))
    jobs = ((run.name, functools.partial(measure, run, settings)) for run in runs)
    return go_on(store, jobs, minutes)


def main() -> None:
    """Run from the command line."""
    command = parser(MODULE, __doc__, PRESETS)
    command.add_argument("--report", action="store_true", help="print the tables, measure nothing")
    command.add_argument("--few", action="store_true", help="one kernel and the default alone")
    command.add_argument("--steps", type=int, help="of every run, in place of the preset's")
    command.add_argument("--budgets", type=float, nargs="*", default=(), help="of more forecasts")
    options = command.parse_args()
    settings, budgets = PRESETS[options.preset], tuple(options.budgets)
    store = store_of(MODULE, options, options.steps, *budgets)
    if options.few:
        settings = dataclasses.replace(settings, rebuilds=("auto",), paper=False)
    settings = dataclasses.replace(settings, steps=options.steps or settings.steps, budgets=budgets)
    print(report(load(store) if options.report else run_all(settings, store, options.minutes)))


if __name__ == "__main__":
    main()
