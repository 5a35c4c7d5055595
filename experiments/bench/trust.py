"""Is `trust` to be trusted? Warnings of forecasts against how far off they really were.

    python -m experiments.bench.trust [--minutes M] [--store FILE] [--tasks PART] [--report]

Every run is a task of `trust_tasks` and a way to train: gradient descent, momentum or mini-batches,
with a constant rate or a schedule. A forecast is wrong where a time to 1, 10 or 40 % of the loss's
drop is off by more than 13 % of the real one, and by more than two steps; "checked" is one kernel
held against "auto". Mini-batches are those of the real training: other draws move times, too, which
is what bands are for. What is measured is kept line by line in the store, so a run that was cut off
goes on where it stopped.
"""

import argparse
import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench.trust_tasks import FITTING, HELD_OUT, make
from jaxttp import empirical_ntk, training_time
from jaxttp.dynamics.batches import batch_indices
from jaxttp.dynamics.relinearize import relinearized_recursion
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast import Hyperparameters
from jaxttp.forecast._along import Subset
from jaxttp.forecast._trust import (
    SLACK,
    trust_in_one_kernel,
    trust_in_path,
    trust_in_speeds,
)
from jaxttp.forecast._witness import ask_network
from jaxttp.forecast.leaders import heavy_ball_path
from jaxttp.losses import encode_targets
from jaxttp.losses.rule import Rule
from jaxttp.training import TrainingStep

STEPS = 120
THRESHOLDS = (0.01, 0.1, 0.4)
KINDS = ("one kernel", "checked", "1 rebuilt", "2 rebuilt", "auto")
WRONG = 0.13
"""A time that is off by more than this share of the real one is wrong."""


class Way(NamedTuple):
    """How to train; the peak rate is a share of the largest stable one with this momentum."""

    momentum: float
    batch_size: int | None
    schedule: str
    share: float


WAYS = (
    Way(0.0, None, "constant", 0.1), Way(0.9, None, "constant", 0.03),
    Way(0.0, 16, "constant", 0.1), Way(0.0, None, "constant", 0.3),
    Way(0.9, None, "cosine", 0.05), Way(0.0, 32, "constant", 0.2),
    Way(0.0, None, "constant", 0.8), Way(0.9, None, "linear", 0.2),
    Way(0.9, 32, "cosine", 0.03), Way(0.0, None, "cosine", 0.5),
    Way(0.9, None, "warmup_cosine", 0.1), Way(0.0, 32, "cosine", 0.3),
    Way(0.0, None, "warmup_cosine", 1.2), Way(0.9, None, "constant", 0.1),
    Way(0.9, 16, "constant", 0.01), Way(0.0, None, "linear", 0.15),
    Way(0.9, None, "cosine", 0.4), Way(0.9, 32, "warmup_cosine", 0.06),
)  # fmt: skip
"""Every task takes every second one, the next task the others."""
SLOW = (
    Way(0.0, None, "constant", 0.02), Way(0.9, None, "cosine", 0.004),
    Way(0.0, 32, "linear", 0.04), Way(0.9, 32, "constant", 0.002),
)  # fmt: skip
"""And every task takes these, at which linearisations mostly hold."""


class _State(NamedTuple):
    count: Any
    trace: Any
    rates: Any
    momentum: Any


class _HeavyBall:
    """Heavy-ball descent whose rates lie in its state, so that all ways share what is compiled."""

    def __init__(self) -> None:
        self.rates, self.momentum = jnp.full(STEPS, 0.1), jnp.asarray(0.9)
        self.optimizer = optax.GradientTransformation(self._init, self._update)

    def _init(self, params: Any) -> _State:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return _State(jnp.zeros((), jnp.int32), zeros, self.rates, self.momentum)

    def _update(self, gradient: Any, state: _State, params: Any = None) -> tuple[Any, _State]:
        trace = jax.tree.map(lambda g, t: g + state.momentum * t, gradient, state.trace)
        rate = state.rates[jnp.clip(state.count, 0, STEPS - 1)]
        return jax.tree.map(lambda t: -rate * t, trace), state._replace(
            count=state.count + 1, trace=trace
        )


BALL = _HeavyBall()


@dataclasses.dataclass(frozen=True)
class Run:
    """One training."""

    task: str
    way: Way
    seed: int

    @property
    def name(self) -> str:
        """What it is kept under."""
        return f"{self.task}/seed {self.seed}/{'/'.join(map(str, self.way))}"


def plan() -> list[Run]:
    """The runs of all tasks."""
    return [
        Run(task, way, i % 3)
        for half in (FITTING, HELD_OUT)
        for place, task in enumerate(half)
        for ways in (WAYS[place % 2 :: 2], SLOW)
        for i, way in enumerate(ways)
    ]


def measure(run: Run, *, rebuilt: bool = True) -> dict[str, Any]:
    """Train for real, forecast with one kernel and with as many as are asked for; plain values."""
    job, way = make(run.task, run.seed), run.way
    x, (apply_fn, params) = jnp.asarray(job.x), job.model
    f0 = jax.jit(apply_fn)(params, x)
    targets, loss = encode_targets(job.loss, job.y, f0)
    kernel = empirical_ntk(apply_fn, params, x)
    limit = float(max_learning_rate(kernel, f0, targets, loss=loss, momentum=way.momentum))
    setting = Hyperparameters(
        way.share * limit, way.momentum, way.batch_size, way.schedule, loss, STEPS
    )
    BALL.rates = jnp.asarray(setting.rates(), f0.dtype)
    BALL.momentum = jnp.asarray(way.momentum, f0.dtype)
    key = jax.random.key(run.seed + 50)
    indices, batches = None, {}
    if way.batch_size is not None:
        indices = batch_indices(key, len(x), way.batch_size, STEPS)
        batches = {"batch_size": way.batch_size, "key": key}
    out = {"name": run.name, "task": run.task, **way._asdict(), "learning_rate": limit * way.share}
    out["real"] = _real(run.task, apply_fn, params, x, targets, loss, indices)
    plain = heavy_ball_path(
        kernel, f0, targets, BALL.rates, BALL.momentum, batches.get("key"), loss=loss,
        batch_size=way.batch_size,
    )  # fmt: skip
    witness = ask_network(
        apply_fn, params, Subset(kernel, x, targets, f0), loss, functools.partial(_follow, loss),
        way.batch_size,
    )  # fmt: skip
    curve = jax.vmap(lambda f: loss.value(f, targets))(plain.train)
    lost = plain.diverged_at is None or int(plain.diverged_at) >= 0
    out["one kernel"] = {
        "curve": None if lost else curve.tolist(),
        "seen": witness._asdict(),
        "trust": None if lost else trust_in_speeds(witness, curve),
    }
    if not rebuilt:
        return out
    rule = Rule(THRESHOLDS)
    for name, rebuilds in (("1 rebuilt", 1), ("2 rebuilt", 2), ("auto", "auto")):
        path = relinearized_recursion(
            apply_fn, params, x, targets, loss=loss, optimizer=BALL.optimizer, steps=STEPS,
            kernel_fn=functools.partial(_kernel, apply_fn, x), rebuilds=rebuilds, **batches,
        )  # fmt: skip
        diverged = int(path.diverged_at) >= 0
        out[name] = {
            "curve": None if diverged else path.loss.tolist(),
            "trust": None if diverged else trust_in_path(path, rule),
            "kernels": path.kernels,
        }
    checked = trust_in_one_kernel((curve, None), (path.loss, None), path, rule)
    out["checked"] = out["one kernel"] | {"trust": None if lost else checked}
    return out


def _follow(loss: Any, part: Subset) -> Any:
    return heavy_ball_path(
        part.kernel, part.start, part.targets, BALL.rates, BALL.momentum, None, loss=loss,
        batch_size=None,
    )  # fmt: skip


def _kernel(apply_fn: Any, x: Any, params: Any) -> Any:
    return empirical_ntk(apply_fn, params, x)


@functools.lru_cache(maxsize=2)
def _stepper(task: str, apply_fn: Any, loss: Any) -> tuple[Any, Any]:
    return TrainingStep(apply_fn, loss, BALL.optimizer), jax.jit(apply_fn)


def _real(
    task: str, apply_fn: Any, params: Any, x: Any, targets: Any, loss: Any, indices: Any
) -> list[float]:
    """The loss on all samples at every step of a real training."""
    step, outputs = _stepper(task, apply_fn, loss)
    state, history = BALL.optimizer.init(params), [outputs(params, x)]
    for t in range(STEPS):
        batch = (x, targets) if indices is None else (x[indices[t]], targets[indices[t]])
        params, state, *_ = step(params, state, *batch)
        history.append(outputs(params, x))
    return jax.vmap(lambda f: loss.value(f, targets))(jnp.stack(history)).tolist()


def off(curve: Any, real: Any) -> float:
    """The largest error of the three times, as a share of the real one."""
    if not np.all(np.isfinite(real)):
        return np.inf
    pairs = [[int(training_time(c, e)) for c in (curve, real)] for e in THRESHOLDS]
    return max(abs(a - b) / max(b, 1) if abs(a - b) > SLACK else 0.0 for a, b in pairs)


def is_stable(curve: Any) -> bool:
    """Whether there is a forecast: it neither diverges nor ends above twice its start."""
    return curve is not None and bool(np.all(np.isfinite(curve))) and curve[-1] <= 2 * curve[0]


def report(rows: list[dict[str, Any]]) -> str:
    """The table."""
    lines = [
        "| forecast | tasks | runs | wrong | of them warned | right | of them warned |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        for words, tasks in (("fitting", FITTING), ("held out", HELD_OUT)):
            some = [r for r in rows if r["task"] in tasks and kind in r]
            some = [r for r in some if is_stable(r[kind]["curve"])]
            if not some:
                continue
            wrong = np.array([off(r[kind]["curve"], r["real"]) > WRONG for r in some], bool)
            warned = np.array([r[kind]["trust"] is not None for r in some], bool)
            cells = []
            for part in (wrong, ~wrong):
                share = f"{100 * warned[part].mean():.0f} %" if part.any() else "-"
                cells += [str(int(part.sum())), share]
            lines.append(f"| {kind} | {words} | {len(some)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no run after that")
    parser.add_argument("--store", type=Path, default=Path("trust.jsonl"))
    parser.add_argument("--tasks", default="", help="only those whose name holds this")
    parser.add_argument("--one-kernel", action="store_true", help="and no rebuilt ones")
    parser.add_argument("--report", action="store_true", help="print the table, measure nothing")
    arguments = parser.parse_args()
    store, begun, task = arguments.store, time.monotonic(), ""
    rows = [json.loads(line) for line in store.read_text().splitlines()] if store.exists() else []
    known = {row["name"] for row in rows}
    for run in [] if arguments.report else plan():
        if run.name in known or arguments.tasks not in run.task:
            continue
        if time.monotonic() - begun > 60 * arguments.minutes:
            print("the time is over; call again to go on", flush=True)
            break
        if run.task != task:
            jax.clear_caches()  # nothing is shared by tasks
            task = run.task
        one = time.perf_counter()
        rows.append(measure(run, rebuilt=not arguments.one_kernel))
        with store.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(f"{run.name}: {time.perf_counter() - one:.1f} s", flush=True)
    print(report(rows))


if __name__ == "__main__":
    main()
