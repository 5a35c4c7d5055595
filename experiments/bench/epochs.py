"""How long do all samples take over epochs, by a forecast from 200 and from 400 of them?

    python -m experiments.bench.epochs [--preset smoke|cpu] [--folder F] [--only NETWORK ...]

Networks that know the digits 0-4 are fine-tuned on all digits 5-9 (896) and on all ten digits
(1,797), by cross-entropy, in batches of 32 with momentum 0.9, at a constant rate and with a cosine,
over 2 to 40 epochs: for real, a few times with other batches, and as forecast with
``total_samples`` from some of the samples, within a quarter of the training's operations and, the
longest from 200, by default. Beside them stand the subset's own forecast and a tenth of the training continued by a power law. No constant
was chosen on any of it. What is kept in the folder is not made again; a forecast never sees a real
curve.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.bench.accuracy_tasks import Job
from experiments.bench.pays import TENTH, Guess, Real, foresee, make_all, power_law
from experiments.bench.pays_tasks import HEAD, NETWORKS, images, trained_before
from experiments.store import Pieces
from jaxttp import from_nnx, predict_training_time, training_time
from jaxttp._core.traced import network_of
from jaxttp.dynamics import batch_indices
from jaxttp.losses import encode_targets
from jaxttp.models import fresh_head
from jaxttp.ntk import ClassSketched
from jaxttp.training import TrainingStep

MOMENTUM, BATCH = 0.9, 32
SHARE = 0.3
"""Rate over 1 - momentum, of the largest stable rate of gradient descent on 150 samples."""
RELATIVE, ABSOLUTE = (0.1, 0.01), (0.5, 0.25, 0.1, 0.05)
"""Goals: shares of the loss's drop, and of the loss before training."""
WITHIN, SLACK = 0.15, 2
"""A reading is right that is off by no more of itself, or by so many steps."""
END = 0.1
"""A final loss is right that is off by no more of the drop."""
LONG, FEW = 40, 200
"""Epochs and samples of the forecasts that are made by default as well."""
AT_ONCE = 300
"""Samples of which the loss is evaluated at once."""
READINGS = 90
"""Steps, evenly spaced in their logarithm, at which it is, after the first 60."""


@dataclasses.dataclass(frozen=True)
class EpochsSettings:
    """What to measure.

    Attributes:
        networks: of `pays_tasks.NETWORKS`, pre-trained.
        classes: of the digits, the last ones.
        per_class: samples of each; all when None.
        cosine: epochs of trainings with a cosine.
        constant: those of a training at a constant rate.
        samples: at hand.
        runs: real trainings; one less of those over 1,200 steps.
    """

    networks: tuple[str, ...] = ("digits ResNet", "ResNet20, 16 px")
    classes: tuple[int, ...] = (5, 10)
    per_class: int | None = None
    cosine: tuple[int, ...] = (2, 10, 40)
    constant: int = 40
    samples: tuple[int, ...] = (200, 400)
    runs: int = 3


PRESETS = {
    "smoke": EpochsSettings(
        ("digits ResNet",), (5,), per_class=24, cosine=(2,), constant=2, samples=(64,), runs=1
    ),
    "cpu": EpochsSettings(),
}


class Training(NamedTuple):
    """One of them: the network, the classes, the schedule and how many epochs."""

    network: str
    classes: int
    cosine: bool
    epochs: int
    per_class: int | None

    def __str__(self) -> str:
        schedule = "cosine" if self.cosine else "constant rate"
        return f"{self.network}; {self.classes} classes; {schedule}; {self.epochs} epochs"

    @property
    def job(self) -> Job:
        """Network and all samples."""
        return _job(self.network, self.classes, self.per_class)

    @property
    def steps(self) -> int:
        """T."""
        return max(1, self.epochs * len(self.job.y) // BATCH)

    def optimizer(self) -> optax.GradientTransformation:
        """SGD."""
        return sgd(_rate(self.network, self.classes, self.per_class), self.cosine, self.steps)


@functools.cache
def _job(name: str, classes: int, per_class: int | None) -> Job:
    data = images("digits", tuple(range(10 - classes, 10)), per_class, NETWORKS[name].pixels)
    network = trained_before(name, "digits", 30)
    return Job(from_nnx(fresh_head(network, classes, key=HEAD)), data.x, data.y)


@functools.cache
def _rate(name: str, classes: int, per_class: int | None) -> float:
    job = _job(name, classes, per_class)
    some = np.random.default_rng(0).permutation(len(job.y))[:150]
    return rate_by(Job(job.model, job.x[some], job.y[some]))


def rate_by(some: Job) -> float:
    """A share of the largest stable rate of gradient descent on some samples, for momentum."""
    found = predict_training_time(
        *some.model, some.x, some.y, learning_rate=1e-6, steps=1, relinearize=0,
        kernel=ClassSketched(jax.random.key(0)),
    )  # fmt: skip
    return SHARE * float(found.max_learning_rate) * (1 - MOMENTUM)


def sgd(rate: Any, cosine: bool, steps: int) -> optax.GradientTransformation:
    """With momentum, at a constant rate or with a cosine."""
    return optax.sgd(optax.cosine_decay_schedule(rate, steps) if cosine else rate, MOMENTUM)


def trainings(settings: EpochsSettings) -> Iterator[Training]:
    """All of them."""
    for name in settings.networks:
        for classes in settings.classes:
            ways = [(False, settings.constant), *((True, each) for each in settings.cosine)]
            for cosine, epochs in ways:
                yield Training(name, classes, cosine, epochs, settings.per_class)


def run_for_real(training: Any, seed: int) -> Real:
    """The training itself (job, steps, optimiser); losses between some are interpolated."""
    job, steps = training.job, training.steps
    network = network_of(job.model.apply_fn).run
    outputs = jax.eval_shape(network, job.model.params, job.x)
    targets, loss = encode_targets("cross_entropy", job.y, outputs)
    step, batches = TrainingStep(job.model.apply_fn, loss, training.optimizer()), batch_indices(
        jax.random.key(seed), len(job.y), BATCH, steps
    )  # fmt: skip
    value = jax.jit(lambda w, x, y: loss.value(network(w, x), y))

    def whole(weights: Any) -> float:
        parts = [slice(i, i + AT_ONCE) for i in range(0, len(job.y), AT_ONCE)]
        each = [float(value(weights, job.x[part], targets[part])) for part in parts]
        return float(np.average(each, weights=[len(job.y[part]) for part in parts]))

    early = np.arange(min(steps, 60))
    later = np.geomspace(60, max(steps, 61), READINGS).round().astype(int)
    read = {int(t) for t in (*early, *later, steps) if t <= steps}
    weights, state = job.model.params, training.optimizer().init(job.model.params)
    found, seconds = {}, 0.0
    for t in range(steps + 1):
        if t in read:
            found[t] = whole(weights)
        if t < steps:
            begun, rows = time.perf_counter(), np.asarray(batches[t])
            weights, state, *_ = step(weights, state, job.x[rows], targets[rows])
            jax.block_until_ready(weights)
            seconds += (time.perf_counter() - begun) if t else 0.0  # the first compiles
    curve = np.interp(np.arange(steps + 1), list(found), list(found.values()))
    return Real(curve, seconds, 0.0)


def forecasts(training: Training, count: int) -> dict[str, dict[str, Any]]:
    """Forecast -> what to ask `predict_training_time` for."""
    whole = {"total_samples": len(training.job.y)}
    found: dict[str, dict[str, Any]] = {"a quarter": whole | {"budget": 0.25}}
    found["the subset alone"] = {"budget": 0.25}
    if training.epochs >= LONG and count <= FEW:  # minutes each, which is its default
        found["default"] = whole
    return {f"{name}, from {count}": asked for name, asked in found.items()}


def descent(training: Any) -> dict[str, Any]:
    """A training, which has an optimiser and steps, in the words of `predict_training_time`."""
    return {
        "optimizer": training.optimizer(), "steps": training.steps, "loss": "cross_entropy",
        "batch_size": BATCH, "key": jax.random.key(11),
    }  # fmt: skip


def foreseen(training: Training, count: int, asked: dict[str, Any]) -> Guess:
    """A forecast from so many samples."""
    job = training.job
    rows = np.random.default_rng(10).permutation(len(job.y))[:count]
    return foresee(Job(job.model, job.x[rows], job.y[rows]), descent(training), asked)


def pieces(settings: EpochsSettings) -> Pieces:
    """All real trainings and their forecasts."""
    made: dict[str, Callable[[], Any]] = {}
    for training in trainings(settings):
        for seed in range(_runs(settings, training)):
            made[f"{training}; real {seed}"] = functools.partial(run_for_real, training, 50 + seed)
        for count in settings.samples:
            for name, asked in forecasts(training, count).items():
                made[f"{training}; {name}"] = functools.partial(foreseen, training, count, asked)
    return made


def _runs(settings: EpochsSettings, training: Training) -> int:
    return max(1, settings.runs - (training.steps > 1200))


class Row(NamedTuple):
    """A forecast, or a real run, beside the other real runs."""

    training: Training
    what: str
    share: float
    times: list[float]
    true: list[float]
    off: list[float]
    end: float


def gather(settings: EpochsSettings, found: dict[str, Any]) -> list[Row]:
    """Every forecast beside the real runs, and each of those beside the others."""
    rows = []
    for training in trainings(settings):
        runs = [found[f"{training}; real {i}"] for i in range(_runs(settings, training))]
        losses = [run.loss for run in runs]
        for i, run in enumerate(runs):
            if len(runs) > 1:
                others = losses[:i] + losses[i + 1 :]
                rows.append(_row(training, "another real run", 1.0, run.loss, others))
        guess = power_law(runs[0], training.steps)
        rows.append(_row(training, TENTH, guess.share, guess.loss, losses[1:] or losses))
        for count in settings.samples:
            for name in forecasts(training, count):
                guess = found[f"{training}; {name}"]
                rows.append(_row(training, name, guess.share, guess.loss, losses))
    return rows


def _row(
    training: Training, what: str, share: float, loss: np.ndarray, real: list[np.ndarray]
) -> Row:
    times, each = goals_of(loss), np.array([goals_of(curve) for curve in real])
    true = np.where(np.all(np.isfinite(each), axis=0), np.median(each, axis=0), np.inf)
    off = off_by(times, true)
    end, start = float(np.mean([curve[-1] for curve in real])), float(real[0][0])
    drop = start - min(float(curve.min()) for curve in real)
    return Row(
        training, what, share, times.tolist(), true.tolist(), off,
        abs(float(loss[-1]) - end) / max(drop, 1e-12),
    )  # fmt: skip


def off_by(times: np.ndarray, true: np.ndarray) -> list[float]:
    """By how much of themselves times are off, for every goal that is reached for real."""
    kept = np.isfinite(true)
    gap = np.abs(times - np.where(kept, true, 0.0))
    return [
        0.0 if gap[k] <= SLACK else min(float(gap[k] / true[k]), np.inf)
        for k in np.flatnonzero(kept)
    ]


def goals_of(loss: np.ndarray) -> np.ndarray:
    """Steps to every goal; infinite for never."""
    goals = [(goal, "relative") for goal in RELATIVE]
    goals += [(goal * float(loss[0]), "absolute") for goal in ABSOLUTE]
    found = np.array([float(training_time(loss, goal, rule=rule)) for goal, rule in goals])
    return np.where(found < 0, np.inf, found)


def table(rows: list[Row]) -> list[str]:
    """Every forecast in a line, and what each kind of them comes to."""
    lines = [
        "| training | forecast | of the training by count | 10, 1 % of the drop; "
        "0.5, 0.25, 0.1, 0.05 of the first loss | real | within 15 % | end off by, of the drop |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        right = sum(off <= WITHIN for off in row.off)
        cells = [str(row.training), row.what, f"{row.share:.2g}", words(row.times)]
        cells += [words(row.true), f"{right} of {len(row.off)}", f"{100 * row.end:.0f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| forecast | times within 15 % | ends within 10 % of the drop | by count |"]
    lines.append("|---|---|---|---|")
    for what in dict.fromkeys(row.what for row in rows):
        own = [row for row in rows if row.what == what]
        off = np.array([each for row in own for each in row.off])
        cells = [what, f"{np.sum(off <= WITHIN)} of {len(off)}"]
        cells += [f"{sum(row.end <= END for row in own)} of {len(own)}"]
        cells.append(f"{np.median([row.share for row in own]):.2g}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def words(times: Iterable[float]) -> str:
    """Times in a cell of a table."""
    return ", ".join("-" if not np.isfinite(time) else f"{time:.0f}" for time in times)


def main(arguments: list[str] | None = None) -> None:
    """Make what the folder does not have yet, and print the table."""
    print("\n".join(table(gather(*make_all(__doc__, PRESETS, pieces, arguments)))))


if __name__ == "__main__":
    from experiments.bench import epochs  # what is kept names its classes by their module

    epochs.main()
