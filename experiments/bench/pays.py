"""What forecasts cost and how true they are, beside the trainings that they foresee.

    python -m experiments.bench.pays [--preset smoke|cpu] [--folder F] [--only NETWORK ...]

Networks that know the digits 0-4 are fine-tuned on 150 images of the digits 5-9, in every way of
`pays_tasks.WAYS` over 150 and 600 steps, for real and as forecast within several budgets, by the
paper's equation (1), with one kernel, and from a tenth of the training by a power law. Costs are
counted (operations) and timed (compilation apart). What is kept in the folder, real runs of
gradient descent over the longest horizon among it, is not made again; a forecast never sees a real
curve.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.optimize import least_squares

from experiments import cuts
from experiments.bench.accuracy_tasks import Job
from experiments.bench.pays_tasks import NETWORKS, WAYS, Way, limit, make
from experiments.bench.planning import reading_errors
from experiments.store import Pieces, Store
from jaxttp import predict_training_time, train
from jaxttp.ntk import ClassSketched

WITHIN = 0.13
"""A reading is right that is off by no more of itself, or by two steps."""
TENTH = "a tenth of the training, power law"
REAL = "real"


@dataclasses.dataclass(frozen=True)
class PaysSettings:
    """What to measure.

    Attributes:
        networks: of `pays_tasks.NETWORKS`.
        ways: of `pays_tasks.WAYS`.
        data_set: of `jaxttp.data`, images of ten classes.
        per_class: samples of each of the five classes.
        steps: horizons.
        budgets: shares of the training's operations.
        whole: whether to forecast with one exact kernel, a class sketch and equation (1) as well.
    """

    networks: tuple[str, ...] = ("MLP", "digits ResNet", "ResNet-18, 32 px", "ResNet20, 16 px")
    ways: tuple[str, ...] = tuple(WAYS)
    data_set: str = "digits"
    per_class: int = cuts.few(2, 30)
    steps: tuple[int, ...] = cuts.shortest((150, 600))
    budgets: tuple[float, ...] = cuts.first((0.01, 1 / 30, 0.1, 1 / 3))
    whole: bool = True


PRESETS = {
    "smoke": PaysSettings(
        networks=("MLP",), ways=("gradient descent",), per_class=3, steps=(12,), budgets=(0.5,)
    ),
    "cpu": PaysSettings(),
    "paper": PaysSettings(networks=("ResNet-18, 32 px", "ViT-S, 32 px"), data_set="cifar10"),
}


@dataclasses.dataclass(frozen=True)
class Real:
    """A training.

    Attributes:
        loss: (T + 1,).
        seconds: of its steps, without compilation.
        compile_seconds: to compile one.
    """

    loss: np.ndarray
    seconds: float
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Guess:
    """A forecast.

    Attributes:
        loss: (T + 1,).
        stable: whether it is said to come about.
        share: its operations, of the training's.
        seconds: without compilation.
        compile_seconds: what compilation took.
        says: what it says of itself.
    """

    loss: np.ndarray
    stable: bool
    share: float
    seconds: float
    compile_seconds: float
    says: str


@dataclasses.dataclass(frozen=True)
class Row:
    """A forecast beside its training.

    Attributes:
        network: its name.
        way: how it is trained.
        steps: T.
        forecast: which one.
        guess: what it foresees.
        real: what happened.
    """

    network: str
    way: str
    steps: int
    forecast: str
    guess: Guess
    real: Real

    @property
    def readings(self) -> list[float]:
        """By how much of themselves times are off, see `planning.reading_errors`."""
        return reading_errors(self.guess.loss, self.guess.stable, self.real.loss)

    @property
    def end(self) -> float:
        """By how much of the drop the final loss is off."""
        drop = self.real.loss[0] - self.real.loss.min()
        return float(abs(self.guess.loss[-1] - self.real.loss[-1]) / max(drop, 1e-12))


def forecasts(settings: PaysSettings, way: Way) -> dict[str, dict[str, Any]]:
    """Forecast -> what to ask `predict_training_time` for."""
    found: dict[str, dict[str, Any]] = {"default": {}}
    if way.adam is not None:  # simulated in weight space, on one kernel: there is nothing to plan
        return found
    for budget in settings.budgets:
        found[f"budget {_fraction(budget)}"] = {"budget": budget}
    if settings.whole:
        found["one kernel"] = {"relinearize": 0}
        found["one class sketch"] = {
            "relinearize": 0, "kernel": ClassSketched(jax.random.key(1))
        }  # fmt: skip
        if not way.cosine and way.batch_size is None:
            found["equation (1)"] = {"dynamics": "ode"}
    return found


def _fraction(share: float) -> str:
    return f"1/{round(1 / share)}" if share < 1 else f"{share:g}"


def descent(settings: PaysSettings, name: str, way: Way, steps: int) -> dict[str, Any]:
    """The training in the words of `predict_training_time`."""
    per_class = settings.per_class
    chosen: dict[str, Any] = {"steps": steps, "loss": "cross_entropy"}
    if way.batch_size is not None:
        chosen |= {
            "batch_size": min(way.batch_size, 5 * per_class), "key": jax.random.key(11)
        }  # fmt: skip
    if way.adam is None and not way.cosine:
        return chosen | {
            "learning_rate": way.rate(limit(name, settings.data_set, per_class)),
            "momentum": way.momentum,
        }
    known = 1.0 if way.adam is not None else limit(name, settings.data_set, per_class)
    return chosen | {"optimizer": way.optimizer(known, steps)}


def run_for_real(settings: PaysSettings, name: str, way: Way, steps: int) -> Real:
    """The training itself; its batches are others than those of the forecasts."""
    per_class = settings.per_class
    job = make(name, settings.data_set, per_class)
    given = descent(settings, name, way, steps)
    rate, momentum = given.pop("learning_rate", None), given.pop("momentum", None)
    if rate is not None:
        given["optimizer"] = dataclasses.replace(way, momentum=momentum).optimizer(
            limit(name, settings.data_set, per_class), steps
        )
    if "key" in given:
        given["key"] = jax.random.key(50)
    found = train(*job.model, job.x, job.y, **given)
    return Real(np.asarray(found.loss, np.float64), found.seconds, found.compile_seconds)


def foresee(job: Job, given: dict[str, Any], asked: dict[str, Any]) -> Guess:
    """A forecast, timed."""
    begun = time.perf_counter()
    found = predict_training_time(*job.model, job.x, job.y, **given, **asked)
    seconds, cost = time.perf_counter() - begun, found.cost
    says = [*found.notes, *([] if found.trust is None else [found.trust])]
    return Guess(
        np.asarray(found.loss, np.float64), found.stable,
        cost.operations / cost.training_operations, seconds - cost.compile_seconds,
        cost.compile_seconds, "; ".join(says),
    )  # fmt: skip


def power_law(real: Real, steps: int) -> Guess:
    """The loss of a tenth of the training, carried on as c + a (1 + t / b)^-p."""
    seen = max(4, steps // 10)
    loss = real.loss[: seen + 1]
    t, scale = np.arange(seen + 1), float(loss[0])

    def curve(free: np.ndarray, t: np.ndarray) -> np.ndarray:
        a, b, p, c = np.exp(free)
        return c + a * (1 + t / b) ** -p

    start = np.log([scale, max(1.0, seen / 4), 1.0, 0.01 * scale])
    found = least_squares(
        lambda free: np.log(curve(free, t)) - np.log(np.maximum(loss, 1e-30)),
        start, bounds=(start - 12, start + 12),
    )  # fmt: skip
    rest = curve(found.x, np.arange(seen + 1, steps + 1))
    share = seen / steps
    return Guess(np.append(loss, rest), True, share, share * real.seconds, 0.0, "")


def pieces(settings: PaysSettings) -> Pieces:
    """All real trainings and their forecasts; those of constant rate are one, the longest."""
    made: dict[str, Callable[[], Any]] = {}
    for name in settings.networks:
        for title in settings.ways:
            way = WAYS[title]
            for steps in _real_steps(settings, way):
                made[_key(name, title, steps, REAL)] = _real_piece(settings, name, way, steps)
            for steps in settings.steps:
                for asked, options in forecasts(settings, way).items():
                    made[_key(name, title, steps, asked)] = _piece(
                        settings, name, way, steps, options
                    )
    return made


def _key(name: str, way: str, steps: int, what: str) -> str:
    return f"{name}; {way}; {steps} steps; {what}"


def _real_steps(settings: PaysSettings, way: Way) -> tuple[int, ...]:
    return settings.steps if way.cosine else (max(settings.steps),)


def _real_piece(settings: PaysSettings, name: str, way: Way, steps: int) -> Callable[[], Real]:
    return lambda: run_for_real(settings, name, way, steps)


def _piece(
    settings: PaysSettings, name: str, way: Way, steps: int, options: dict[str, Any]
) -> Callable[[], Guess]:
    def make_it() -> Guess:
        job = make(name, settings.data_set, settings.per_class)
        return foresee(job, descent(settings, name, way, steps), options)

    return make_it


def gather(settings: PaysSettings, found: dict[str, Any]) -> list[Row]:
    """Every forecast beside its training, the power law's among them."""
    rows = []
    for name in settings.networks:
        for title in settings.ways:
            way = WAYS[title]
            for steps in settings.steps:
                longest = min(s for s in _real_steps(settings, way) if s >= steps)
                whole: Real = found[_key(name, title, longest, REAL)]
                share = steps / longest
                real = Real(whole.loss[: steps + 1], share * whole.seconds, whole.compile_seconds)
                guesses = {
                    asked: found[_key(name, title, steps, asked)]
                    for asked in forecasts(settings, way)
                }
                check_start(name, title, guesses["default"], real)
                guesses[TENTH] = power_law(real, steps)
                rows += [
                    Row(name, title, steps, asked, guess, real) for asked, guess in guesses.items()
                ]
    return rows


def check_start(name: str, way: str, guess: Guess, real: Real) -> None:
    """Refuse a training that was kept of another network: pre-training depends on rounding.

    Raises:
        ValueError: the first losses differ.
    """
    foreseen, true = float(guess.loss[0]), float(real.loss[0])
    if abs(foreseen - true) > 1e-3 * abs(true):
        raise ValueError(
            f"the training of {name} that was kept ({way}) began at a loss of {true:.4f}, the one "
            f"that is foreseen begins at {foreseen:.4f}: another machine pre-trained another "
            f"network. Take the lines of '{name}; ...; {REAL}' out of records.jsonl and run again."
        )


def table(rows: list[Row]) -> list[str]:
    """Every forecast in a line of a table."""
    lines = [
        "| network | training | T | forecast | of the training by count | by the clock, with "
        "compilation | readings within 13 % | largest error | end off by, of the drop |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        readings, real, guess = row.readings, row.real, row.guess
        both = guess.seconds + guess.compile_seconds
        lines.append(
            f"| {row.network} | {row.way} | {row.steps} | {row.forecast} | {guess.share:.2g} "
            f"| {guess.seconds / real.seconds:.2g}, "
            f"{both / (real.seconds + real.compile_seconds):.2g} "
            f"| {sum(r <= WITHIN for r in readings)} of {len(readings)} "
            f"| {100 * max(readings, default=0.0):.0f} % | {100 * row.end:.0f} % |"
        )
    return lines


def make_all(
    doc: str | None,
    presets: dict[str, Any],
    pieces: Callable[[Any], Pieces],
    arguments: list[str] | None,
) -> tuple[Any, dict[str, Any]]:
    """The settings that a command line asks for, and all their pieces; a folder keeps them.

    Args:
        doc: what the command does.
        presets: settings by name, with `networks`.
        pieces: of settings.
        arguments: of the command line; this process's when None.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--preset", choices=presets, default="cpu")
    parser.add_argument("--folder", type=Path, help="where to keep what is made")
    parser.add_argument("--only", nargs="+", choices=NETWORKS, help="these networks")
    options = parser.parse_args(arguments)
    settings = presets[options.preset]
    if options.only:
        settings = dataclasses.replace(settings, networks=tuple(options.only))
    store = Store(
        options.folder,
        settings=dataclasses.replace(settings, networks=()),
        report=lambda name, done, total: print(f"{done}/{total} {name}", flush=True),
    )
    return settings, store.all(pieces(settings))


def main(arguments: list[str] | None = None) -> None:
    """Make what the folder does not have yet, and print the table."""
    print("\n".join(table(gather(*make_all(__doc__, PRESETS, pieces, arguments)))))


if __name__ == "__main__":
    from experiments.bench import pays  # what is kept names its classes by their module

    pays.main()
