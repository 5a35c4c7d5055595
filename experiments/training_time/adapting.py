"""Ours: a part of the weights trained: low-rank adapters, the head, the last block.

On embedded data the network is the ResNet pre-trained on the digits 0-4, with a fresh head, on the
digits 5-9.
"""

import dataclasses

import numpy as np
from matplotlib.figure import Figure

from experiments import cuts
from experiments.bench.adapters import THRESHOLDS, AdapterSettings, Row, compare, digits_job
from experiments.store import Pieces, runner
from experiments.training_time.comparison import CIFAR10, COLORS, Source, load
from jaxttp.plots import MARKERS, tidy

CLAIM = {
    "ours-adapters": "Forecasts hold for LoRA and for a part of the weights as for all, and are "
    "exact where the head alone is trained. (ours)",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to train.

    Attributes:
        bench: as in `experiments.bench.adapters`.
        task: a name, or pipeline settings; when None the digits.
        samples: so many of the task; all when None.
    """

    bench: AdapterSettings = dataclasses.field(
        default_factory=lambda: AdapterSettings(samples_per_class=15, adapters=((4, 1.0), (4, 8.0)))
    )
    task: Source | None = None
    samples: int | None = cuts.few(32, None)


PRESETS = {
    "smoke": Settings(
        AdapterSettings(steps=8, shares=(0.02,), adapters=((2, 1.0),), parts=("head",)),
        task="wine, MLP", samples=12,
    ),
    "cpu": Settings(),
    "paper": Settings(AdapterSettings(), task=CIFAR10),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        settings: how.
        rows: what is trained, and its rate.
    """

    settings: Settings
    rows: list[Row]


def pieces(settings: Settings) -> Pieces:
    """Forecast and train every part at every rate."""
    bench = settings.bench

    def one(share: float) -> list[Row]:
        if settings.task is None:
            job = digits_job(bench)
        else:
            job = load(settings.task, bench.seed, settings.samples)
        return list(compare(dataclasses.replace(bench, shares=(share,)), job))

    return {f"rate {share:g}": (lambda share=share: one(share)) for share in bench.shares}


run = runner(
    pieces,
    lambda settings, found: Result(settings, [row for rows in found.values() for row in rows]),
)


def plot(result: Result) -> dict[str, Figure]:
    """A panel for each rate: forecasts as open marks, real times as full ones."""
    shares = list(dict.fromkeys(row.share for row in result.rows))
    figure = Figure(figsize=(5.6 * len(shares) + 1.2, 4.0), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(shares), sharey=True))
    for axes, share in zip(panels, shares, strict=True):
        rows = [row for row in result.rows if row.share == share]
        for i, row in enumerate(rows):
            for e, color, marker in zip(THRESHOLDS, COLORS, MARKERS, strict=False):
                y = len(rows) - 1 - i
                ends = (row.forecast[e], row.real[e])
                axes.plot(ends, (y, y), color=color, lw=1.5)
                axes.plot(ends[1], y, marker, color=color, ms=8,
                          label=f"{100 * e:g} %, real" if i == 0 else None)  # fmt: skip
                axes.plot(ends[0], y, marker, mfc="white", mec=color, ms=8, mew=1.6,
                          label=f"{100 * e:g} %, forecast" if i == 0 else None)  # fmt: skip
        names = [f"{row.case}\n{row.parameters:,} weights" for row in reversed(rows)]
        axes.set_yticks(range(len(rows)), names, fontsize=9)
        axes.set_ylim(-0.5, len(rows) - 0.5)
        axes.set(xlabel="training time, steps", title=f"{100 * share:g} % of the largest rate")
        tidy(axes)
    panels[-1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return {"ours-adapters": figure}


def measure(result: Result) -> dict[str, list[str]]:
    """Times, and the largest errors."""
    lines = []
    for row in result.rows:
        both = [[times[e] for e in THRESHOLDS] for times in (row.forecast, row.real)]
        lines.append(
            f"{row.case} ({row.parameters:,} weights), rate {row.share:g} of the largest: forecast "
            f"{both[0]}, real {both[1]}; off by {100 * row.error:.1f} % of T, "
            f"{100 * row.relative:.0f} % of the time at most"
        )
    return {"ours-adapters": lines}
