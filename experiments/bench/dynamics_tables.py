"""Readings of forecasts beside real training, as tables and a figure (for `experiments.bench`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jaxttp import training_time
from jaxttp.plots import save

THRESHOLDS = (0.01, 0.1, 0.4)

Row = dict[str, Any]


def times(curve: Any) -> np.ndarray:
    """Training times at the three thresholds."""
    return np.array([int(training_time(np.asarray(curve), e)) for e in THRESHOLDS])


def reading(
    group: str, method: str, task: str, case: str, curve: Any, real: Any, **more: Any
) -> Row:
    """One forecast beside its real run: three training times, and the loss curve.

    "good" says which times are within 13 % of the true one, or 2 steps; "curve" is the largest
    error of the loss curve as a share of the real drop.
    """
    curve, real = np.asarray(curve), np.asarray(real)
    true, found = times(real), times(curve)
    error = np.abs(found - true)
    return {
        "group": group, "method": method, "task": task, "case": case, "error": error,
        "good": error <= np.maximum(0.13 * true, 2),
        "curve": float(np.max(np.abs(curve - real)) / abs(real[0] - real[-1])), **more,
    }  # fmt: skip


def spread(batch: int, method: str, loss: np.ndarray, first: float) -> Row:
    """How far apart the loss curves (P, T + 1) of many runs are, as a share of the first loss."""
    each = np.stack([times(curve) for curve in loss])
    return {
        "batch": batch, "method": method, "runs": len(loss),
        "curve": float(np.sqrt(np.mean(np.var(loss, axis=0, ddof=1)[1:])) / abs(first)),
        "times": np.std(each, axis=0, ddof=1), "median": np.median(each, axis=0),
    }  # fmt: skip


def _by(rows: Sequence[Row], *names: str) -> dict[tuple, list[Row]]:
    groups: dict[tuple, list[Row]] = {}
    for entry in rows:
        groups.setdefault(tuple(entry[name] for name in names), []).append(entry)
    return dict(sorted(groups.items()))


def _markdown(header: str, lines: list[str]) -> list[str]:
    columns = header.count("|") - 1
    return ["", header, "|" + "---|" * columns, *lines]


def table(rows: Sequence[Row], spreads: Sequence[Row], orders: Sequence[Row]) -> str:
    """Everything as Markdown."""
    relinearized = [entry for entry in rows if "estimate" in entry]
    plain = [entry for entry in rows if "estimate" not in entry]
    every = [
        entry | {"group": f"re-linearised: momenta 0 and 0.9, {rates} λmax/N 0.3, 1, 3"}
        for entry in relinearized
        for rates in entry["overall"]
    ]
    lines = _markdown(
        "| case | forecast | runs | mean error of T at 1 / 10 / 40 %, steps | mean | within 13 % "
        "or 2 steps | curve error, mean | kernels |",
        [
            _line(group, method, members)
            for (group, method), members in _by(
                [*plain, *every, *relinearized], "group", "method"
            ).items()
        ],
    )
    ratios = []
    for (runs, method), members in _by(every, "group", "method").items():
        ratio = np.array([entry["curve"] / entry["estimate"] for entry in members])
        rejected = np.mean([entry["rejected"] for entry in members])
        ratios.append(
            f"| {runs} | {method} | {np.median(ratio):.2f} | {np.quantile(ratio, 0.9):.2f} | "
            f"{100 * np.mean(ratio <= 3):.0f} % | {rejected:.1f} |"
        )
    lines += _markdown(
        "| runs | rebuilds | median of real error / estimate | 90 % of runs below | runs with real "
        "error ≤ 3 x estimate | segments rejected a run |",
        ratios,
    )
    real = {entry["batch"]: entry["curve"] for entry in spreads if entry["method"] == "real"}
    noise = []
    for entry in spreads:
        each = " / ".join(f"{value:.1f}" for value in entry["times"])
        middle = " / ".join(f"{value:.0f}" for value in entry["median"])
        noise.append(
            f"| {entry['batch']} | {entry['method']} | {entry['runs']} | {entry['curve']:.4f} | "
            f"{entry['curve'] / real[entry['batch']]:.2f} | {each} | {middle} |"
        )
    lines += _markdown(
        "| B | | runs | spread of the loss curve / L_0 | forecast / real | spread of T at 1 / 10 / "
        "40 %, steps | median T |",
        noise,
    )
    falls = []
    for (task, momentum), members in _by(orders, "task", "momentum").items():
        curve = ", ".join(f"{entry['rebuilds']}: {100 * entry['curve']:.2g}" for entry in members)
        falls.append(f"| {task} | {momentum:g} | {curve} | {slope(members):.1f} |")
    lines += _markdown("| task | m | rebuilds: curve error, % | measured order |", falls)
    return "\n".join(lines[1:])


def _line(group: str, method: str, members: list[Row]) -> str:
    errors = np.stack([entry["error"] for entry in members])
    good = np.mean([entry["good"] for entry in members])
    curve = np.mean([entry["curve"] for entry in members])
    kernels = np.mean([entry.get("kernels", 1) for entry in members])
    each = " / ".join(f"{value:.1f}" for value in errors.mean(axis=0))
    return (
        f"| {group} | {method} | {len(members)} | {each} | {errors.mean():.1f} | "
        f"{100 * good:.0f} % | {100 * curve:.1f} % | {kernels:.1f} |"
    )


def slope(members: Sequence[Row]) -> float:
    """By which power of the number of rebuilds the error falls: a fit to 4 rebuilds and more."""
    fine = [entry for entry in members if entry["rebuilds"] >= 4]
    if len(fine) < 2:
        return float("nan")
    x = np.log([entry["rebuilds"] for entry in fine])
    return -float(np.polyfit(x, np.log([entry["curve"] for entry in fine]), 1)[0])


def plot_order(rows: Sequence[Row], path: Path) -> None:
    """Error of the loss curve against the number of rebuilds, one panel a task."""
    tasks = sorted({entry["task"] for entry in rows})
    figure = Figure(figsize=(4.2 * len(tasks), 3.6), layout="constrained")
    panels = np.atleast_1d(np.asarray(figure.subplots(1, len(tasks), sharey=True)))
    for axes, task in zip(panels, tasks, strict=True):
        mine = [entry for entry in rows if entry["task"] == task]
        counts = np.array(sorted({entry["rebuilds"] for entry in mine}))
        for (momentum,), members in _by(mine, "momentum").items():
            axes.loglog(
                [entry["rebuilds"] for entry in members], [entry["curve"] for entry in members],
                "o-", color="C0" if momentum == 0 else "C1", markersize=4,
                label=f"momentum {momentum:g}",
            )  # fmt: skip
        first = max(entry["curve"] for entry in mine)
        for power, style in ((1, ":"), (2, "--")):
            label = f"slope -{power}"
            line = 2 * first * (counts / counts[0]) ** -float(power)
            axes.loglog(counts, line, style, color="0.6", label=label)
        axes.set(title=task, xlabel="kernels rebuilt", xticks=counts, xticklabels=counts)
        axes.minorticks_off()
    panels[0].set_ylabel("largest error of the loss curve / drop")
    panels[-1].legend(fontsize=7)
    save(figure, path)
