"""Ours: what a forecast costs and how true it is, beside the training that it foresees.

The measuring is `experiments.bench.pays`: networks that know the digits 0-4, fine-tuned on the
digits 5-9.
"""

import numpy as np
from matplotlib.figure import Figure

from experiments.bench.pays import PRESETS as PRESETS
from experiments.bench.pays import TENTH, WITHIN, Row, gather, pieces
from experiments.store import runner
from experiments.training_time.comparison import COLORS
from jaxttp.plots import tidy

CLAIM = {
    "ours-pays": "On networks of some size a forecast within a tenth of the training's operations "
    "is truer than one kernel, than equation (1), and than a tenth of the training carried on by "
    "a power law; on a small MLP no forecast pays. (ours)",
}
MARKS = {
    "budget": ("o", "budgets 1/100, 1/30, 1/10, 1/3"),
    "default": ("*", "the default"),
    "one kernel": ("s", "one kernel"),
    "one class sketch": ("^", "one class sketch"),
    "equation (1)": ("D", "equation (1) of the paper"),
    TENTH: ("X", TENTH),
}
LEAST = 0.003
"""Smaller errors are drawn here: a step or two is of no account."""

run = runner(pieces, gather)


def plot(result: list[Row]) -> dict[str, Figure]:
    """A panel for each network and training: error of times against cost, 150 steps hollow."""
    networks = list(dict.fromkeys(row.network for row in result))
    ways = list(dict.fromkeys(row.way for row in result))
    longest = max(row.steps for row in result)
    size = (3.6 * len(networks) + 0.6, 3.0 * len(ways) + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(ways), len(networks), sharex=True, sharey=True, squeeze=False)
    for line, way in zip(panels, ways, strict=True):
        for axes, network in zip(line, networks, strict=True):
            rows = [row for row in result if (row.network, row.way) == (network, way)]
            for steps in sorted({row.steps for row in rows}):
                _draw(axes, [row for row in rows if row.steps == steps], full=steps == longest)
            axes.axvline(1.0, color="0.4", lw=1.0, ls=":")
            axes.axhline(WITHIN, color="0.7", lw=1.0, ls="--")
            axes.set(xscale="log", yscale="log", ylim=(0.8 * LEAST, 1.5), title=network)
            tidy(axes)
        line[0].set_ylabel(f"{way}\nmean error of a time")
    for axes in panels[-1]:
        axes.set_xlabel("operations, of the training's")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return {"ours-pays": figure}


def _draw(axes: object, rows: list[Row], *, full: bool) -> None:
    """The forecasts of one training; budgets are joined by a line."""
    for color, (kind, (mark, label)) in zip(COLORS, MARKS.items(), strict=False):
        own = [row for row in rows if row.forecast.startswith(kind)]
        if not own:
            continue
        own.sort(key=lambda row: row.guess.share)
        cost = [row.guess.share for row in own]
        errors = [max(LEAST, float(np.mean(row.readings))) for row in own]
        axes.plot(  # pyright: ignore[reportAttributeAccessIssue]
            cost, errors, mark + ("-" if kind == "budget" else ""), color=color, lw=1.0,
            mfc=color if full else "white", ms=11 if mark == "*" else 7,
            label=label if full else None,
        )  # fmt: skip


def measure(result: list[Row]) -> dict[str, list[str]]:
    """Cost and errors of every kind of forecast, over all trainings but the MLP's, and all rows."""
    lines = []
    kinds = dict.fromkeys(row.forecast for row in result)
    for small in (False, True):
        for kind in kinds:
            own = [r for r in result if r.forecast == kind and (r.network == "MLP") == small]
            if not own:
                continue
            readings = np.array([reading for row in own for reading in row.readings])
            ends = np.array([row.end for row in own])
            shares = np.array([row.guess.share for row in own])
            lines.append(
                f"{'MLP' if small else 'all but the MLP'}, {kind}: {len(own)} trainings, by count "
                f"{np.median(shares):.2g} of the training (median; {shares.min():.2g} to "
                f"{shares.max():.2g}); {np.sum(readings <= WITHIN)} of {len(readings)} times "
                f"within 13 %, mean error {100 * readings.mean():.0f} %; end within 10 % of the "
                f"drop in {np.sum(ends <= 0.1)} of {len(ends)}"
            )
    return {"ours-pays": lines}
