"""Which of 40 settings? `sweep`, `race` and training all of them, in seconds and in regret.

Twenty settings of gradient descent (ten rates up to twice the largest stable one, momentum 0 and
0.9) and twenty of AdamW (ten rates, two decays) share a grid. All are trained for real, which gives
the target (a tenth of the loss decrease of the best setting remains) and the steps of every
setting. The regret of a choice is its steps over those of the best setting, less 1.
"""

import dataclasses
import functools
import timeit
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from experiments import cuts
from experiments.bench.races import steps_to
from experiments.store import Pieces, runner
from experiments.training_time.comparison import COLORS
from experiments.training_time.price import Case, job, largest_rate
from jaxttp import grid, race, sweep, train
from jaxttp.plots import tidy

CLAIM = {
    "ours-choosing": "A race finds a rate for less than a sweep, unless one kernel suffices. (ours)"
}
REMAINING = 0.1
"""The fraction of the best setting's loss decrease that remains at the target."""
NEVER = 300.0
"""Per cent of further steps above which the picture shows "later or never"."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is chosen from.

    Attributes:
        cases: networks, data and horizons.
        descent: lowest and highest rate over the largest stable one, and how many.
        adamw: lowest and highest rate of AdamW, and how many.
        decays: weight decays of AdamW; none for gradient descent alone.
    """

    cases: tuple[Case, ...] = cuts.each()
    descent: tuple[float, float, int] = (0.01, 2.0, 10)
    adamw: tuple[float, float, int] = (1e-4, 3e-2, 10)
    decays: tuple[float, ...] = (0.01, 0.1)


PRESETS = {
    "smoke": Settings((Case("MLP 64", 8, 2, 12, 20),), (0.1, 1.0, 2), decays=()),
    "cpu": Settings((
        Case("MLP 64", 8, 10, 150, 300),
        Case("digits-resnet", 8, 5, 150, 300),
        Case("digits-resnet-32", 32, 2, 60, 60),
    )),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What one way of choosing took and found.

    Attributes:
        seconds: of the call, compilation included.
        trainings: FLOPs in training runs of one setting.
        setting: in words.
        steps: the real steps of that setting to the target; infinite for never.
    """

    seconds: float
    trainings: float
    setting: str
    steps: float


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        settings: how.
        found: by case, then by the way of choosing.
    """

    settings: Settings
    found: dict[str, dict[str, Chosen]]


def pieces(settings: Settings) -> Pieces:
    """A piece for every case."""
    return {str(case): functools.partial(_choose, case, settings) for case in settings.cases}


run = runner(pieces, Result)


def _choose(case: Case, settings: Settings) -> dict[str, Chosen]:
    model, x, y = job(case)
    rates = np.geomspace(*settings.descent) * largest_rate(model, x, y)
    descent = grid(learning_rate=rates, momentum=(0.0, 0.9), steps=case.steps)
    choices = descent
    if settings.decays:
        rates = np.geomspace(*settings.adamw)
        choices += grid(
            algorithm="adamw", weight_decay=settings.decays, learning_rate=rates, steps=case.steps
        )
    jax.clear_caches()
    runs = [
        train(
            *model, x, y, loss="cross_entropy", optimizer=one.optimizer(), steps=case.steps
        ) for one in choices
    ]  # fmt: skip
    curves = [np.asarray(one.loss) for one in runs]
    lowest = min(curve[-1] for curve in curves if np.isfinite(curve[-1]))
    target = float(lowest + REMAINING * (curves[0][0] - lowest))
    times = [steps_to(curve, target) for curve in curves]
    best = int(np.argmin(times))
    seconds = sum(one.seconds + one.compile_seconds for one in runs)
    found = {"train all": Chosen(seconds, len(choices), str(choices[best]), times[best])}
    asked = {"target_loss": target, "progress": False}
    ways: dict[str, Any] = {
        "race": race,
        "sweep": sweep,
        "sweep, one kernel": functools.partial(sweep, relinearize=0),
        "sweep of SGD, one kernel": functools.partial(sweep, relinearize=0),
    }
    for name, way in ways.items():
        some = descent if "SGD" in name else choices
        jax.clear_caches()
        start = timeit.default_timer()
        made = way(*model, x, y, some, **asked)
        seconds, order = timeit.default_timer() - start, made.ranking()
        words = str(some[order[0]]) if order else "none"
        steps = times[order[0]] if order else float("inf")
        found[name] = Chosen(seconds, made.trainings, words, steps)
    return found


def plot(result: Result) -> dict[str, Figure]:
    """Regret by seconds, for every case and way of choosing."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(result.found), squeeze=False)[0]
    for axes, case in zip(panels, result.settings.cases, strict=True):
        found = result.found[str(case)]
        best = found["train all"].steps
        for (name, one), color in zip(found.items(), COLORS, strict=False):
            regret = min(100 * (one.steps / best - 1), NEVER)
            axes.plot(one.seconds, regret, "o", color=color, label=name)
        axes.axhline(NEVER, color="0.6", lw=0.8, ls="--")
        axes.annotate("later or never", (0.99, NEVER), xycoords=("axes fraction", "data"),
                      ha="right", va="bottom", fontsize=8, color="0.4")  # fmt: skip
        axes.set_yscale("symlog", linthresh=10)
        axes.set(xscale="log", ylim=(-2, 600), xlabel="seconds, compilation included",
                 ylabel="more steps than the best setting, %",
                 title=f"{case.network}, {case.pixels} px, T = {case.steps}")  # fmt: skip
        tidy(axes)
        axes.xaxis.set_minor_formatter(NullFormatter())
    panels[-1].legend(frameon=False, fontsize=7)
    return {"ours-choosing": figure}


def measure(result: Result) -> dict[str, list[str]]:
    """A line for every case and way of choosing."""
    return {
        "ours-choosing": [
            f"{case}: {name} took {one.seconds:.3g} s and {one.trainings:.3g} trainings: "
            f"{one.setting}, {one.steps:g} steps to the target"
            for case, found in result.found.items()
            for name, one in found.items()
        ]
    }
