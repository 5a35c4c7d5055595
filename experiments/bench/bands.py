"""Do the bands hold? Real runs of mini-batches against the 90 % bands of their forecast.

    python -m experiments.bench.bands [--preset smoke|cpu] [--minutes M] [--store FILE]

For every task, batch size and rate: one forecast (SDE around a re-linearised mean path) and many
real trainings under the same batch protocol, each with batches of its own. Covered is the share of
(run, threshold) pairs whose training time lies in its band, and of (run, step) pairs whose loss
does. The constants of the bands were chosen on the tuning tasks of `accuracy_tasks`.
"""

import argparse
import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import cuts
from experiments.bench.accuracy_tasks import Job, make
from experiments.bench.stored import go_on
from jaxttp import empirical_ntk, predict_training_time, training_time
from jaxttp.dynamics import batch_indices
from jaxttp.losses import encode_targets

THRESHOLDS = (0.01, 0.1, 0.4)


@dataclasses.dataclass(frozen=True)
class BandSettings:
    """What to measure; networks small enough to train a whole batch of runs in one program."""

    tasks: tuple[str, ...] = (
        "digits 5-9, MLP",
        "wine, MLP",
        "breast cancer, MLP",
        "iris, tanh MLP",
        "patches, MLP",
    )
    rates: tuple[float, ...] = cuts.first((1.0, 3.0, 0.3))
    batches: tuple[int, ...] = (16, 64)
    seeds: int = cuts.one(20)
    seed: int = 5
    rebuilds: int = 4
    level: float = 0.9
    steps: int = cuts.one(150)
    paths: int = cuts.one(32)


PRESETS = {
    "smoke": BandSettings(tasks=("wine, MLP",), rates=(1.0,), batches=(16,), seeds=3, steps=15),
    "cpu": BandSettings(),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Band:
    """What a forecast says.

    Attributes:
        loss: lower and upper end at every step (2, T + 1).
        steps: of the training times, (E, 2).
    """

    loss: np.ndarray
    steps: np.ndarray


@dataclasses.dataclass(frozen=True)
class Runs:
    """Real runs, and the bands that are to hold them.

    Attributes:
        curves: loss of every real run (R, T + 1).
        times: training times of every run (R, E).
        bands: (forecast, level) -> band.
    """

    curves: np.ndarray
    times: np.ndarray
    bands: dict[tuple[str, float], Band]

    def covered(self, label: str, level: float) -> tuple[np.ndarray, float]:
        """Shares of training times, for every threshold (E,), and of losses, in their bands."""
        band = self.bands[label, level]
        inside = (self.times >= band.steps[:, 0]) & (self.times <= band.steps[:, 1])
        low, high = band.loss[:, 1:]
        held = (self.curves[:, 1:] >= low) & (self.curves[:, 1:] <= high)
        return inside.mean(axis=0), float(held.mean())


def simulate(
    job: Job,
    rate: float,
    batch: int,
    settings: BandSettings,
    levels: tuple[float, ...] = (0.9,),
) -> Runs:
    """Train many times for real, and forecast the bands of every level."""
    x, steps = jnp.asarray(job.x), settings.steps
    apply_fn, params = job.model
    f0 = jax.jit(apply_fn)(params, x)
    targets, loss = encode_targets("cross_entropy", job.y, f0)
    kernel = np.asarray(empirical_ntk(apply_fn, params, x), np.float64).reshape(f0.size, f0.size)
    eta = rate * len(x) / float(np.linalg.eigvalsh(kernel)[-1])

    @functools.cache  # without rebuilds both forecasts are one
    def band(rebuilds: int, level: float) -> Band:
        found = predict_training_time(
            apply_fn, params, x, job.y, learning_rate=eta, batch_size=batch, dynamics="sde",
            relinearize=rebuilds, level=level, key=jax.random.key(1), steps=steps,
            thresholds=THRESHOLDS, paths=settings.paths,
        )  # fmt: skip
        assert found.steps_band is not None
        ends = np.array([found.steps_band[e] for e in THRESHOLDS])
        return Band(np.asarray(found.loss_band, np.float64), ends)

    forecasts = (("re-linearised", settings.rebuilds), ("one kernel", 0))
    bands = {
        (label, level): band(rebuilds, level)
        for (label, rebuilds), level in itertools.product(forecasts, levels)
    }

    @functools.partial(jax.jit, static_argnames="batch")
    def train(keys: Any, eta: Any, batch: int) -> Any:
        value = lambda w: loss.value(apply_fn(w, x), targets)  # noqa: E731

        def step(w: Any, rows: Any) -> Any:
            objective = lambda w: loss.value(apply_fn(w, x[rows]), targets[rows])  # noqa: E731
            w = jax.tree.map(lambda a, g: a - eta * g, w, jax.grad(objective)(w))
            return w, value(w)

        def one(key: Any) -> Any:
            rows = batch_indices(key, len(x), batch, steps)
            return jnp.concatenate([value(params)[None], jax.lax.scan(step, params, rows)[1]])

        return jax.lax.map(one, keys)

    keys = jax.random.split(jax.random.key(77), settings.seeds)
    curves = np.asarray(train(keys, jnp.float32(eta), batch), np.float64)
    times = np.array([[int(training_time(curve, e)) for e in THRESHOLDS] for curve in curves])
    return Runs(curves, times, bands)


def measure(name: str, rate: float, batch: int, settings: BandSettings) -> dict[str, Any]:
    """Shares covered by the bands, and their widths."""
    job = make(name, settings.seed, 1.0)
    runs = simulate(job, rate, batch, settings, (settings.level,))
    out: dict[str, Any] = {
        "name": f"{name}/{rate:g}/{batch}",
        "task": name,
        "rate": rate,
        "batch": batch,
        "real": runs.times.tolist(),
    }
    for (label, level), band in runs.bands.items():
        steps, losses = runs.covered(label, level)
        width = (band.steps[:, 1] - band.steps[:, 0]).tolist()
        out[label] = {"steps": steps.tolist(), "loss": losses, "width": width}
    return out


def table(rows: list[dict[str, Any]]) -> str:
    """Shares covered, by batch size and forecast."""
    lines = [
        "| batch | forecast | settings | real runs | times covered at 1 / 10 / 40 % | all | loss "
        "curves covered | mean width, steps |",
        "|" + "---|" * 8,
    ]
    batches = sorted({row["batch"] for row in rows})
    for batch, label in itertools.product([*batches, "all"], ("re-linearised", "one kernel")):
        some = [row for row in rows if batch in ("all", row["batch"])]
        shares = np.mean([row[label]["steps"] for row in some], axis=0)
        width = np.mean([row[label]["width"] for row in some], axis=0)
        cells = (
            batch, label, len(some), sum(len(row["real"]) for row in some),
            " / ".join(f"{100 * share:.0f}" for share in shares) + " %",
            f"{100 * shares.mean():.0f} %",
            f"{100 * np.mean([row[label]['loss'] for row in some]):.0f} %",
            " / ".join(f"{w:.1f}" for w in width),
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def run_all(settings: BandSettings, store: Path, minutes: float) -> list[dict[str, Any]]:
    """Measure what the store does not have yet, until the time is over; returns all its rows."""
    several = itertools.product(settings.rates, settings.batches, settings.tasks)
    jobs = (
        (f"{name}/{rate:g}/{batch}", functools.partial(measure, name, rate, batch, settings))
        for rate, batch, name in several
    )
    return go_on(store, jobs, minutes)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing after that")
    parser.add_argument("--store", type=Path, help="a file of JSON lines (default: by preset)")
    arguments = parser.parse_args()
    store = arguments.store or Path(f"bands-{arguments.preset}.jsonl")
    print(table(run_all(PRESETS[arguments.preset], store, arguments.minutes)))


if __name__ == "__main__":
    main()
