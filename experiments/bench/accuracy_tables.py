"""Tables of the accuracy benchmark: rows in, Markdown out."""

from collections.abc import Iterable

import numpy as np

from experiments.bench.harness import Row, head, line

CONSTANT = "the median time of other tasks"
LEVELS = (0.5, 0.25, 0.1)
FEW = 2
"""Steps that count as right however short the training time is."""


def kind(row: Row) -> str:
    """Gradient descent, momentum or mini-batches."""
    if row["batch_size"] is not None:
        return "SGD"
    return "momentum 0.9" if row["momentum"] else "GD"


def errors(rows: Iterable[Row], method: str) -> tuple[np.ndarray, np.ndarray]:
    """Signed errors and real times (runs, 3).

    A forecast that calls itself unstable where the real training is not counts as the horizon.
    """
    off, real = [], []
    for row in rows:
        found = row["forecasts"][method]
        lost = (np.array(found["steps"]) < 0) | (not found["stable"])
        predicted = np.where(lost, row["horizon"], found["steps"])
        off.append(predicted - np.array(row["real"]["steps"]))
        real.append(row["real"]["steps"])
    return np.array(off).reshape(-1, 3), np.array(real).reshape(-1, 3)


def curve_error(row: Row, method: str) -> float:
    """Mean distance of the loss curves as a fraction of the real drop."""
    real, found = np.array(row["real"]["loss"]), np.array(row["forecasts"][method]["loss"])
    return float(np.mean(np.abs(real - found)) / abs(real[0] - real[-1]))


def pearson(off: np.ndarray, real: np.ndarray) -> float:
    """Correlation of predicted and real times over all readings."""
    if off.size < 3:
        return float("nan")
    return float(np.corrcoef((real + off).reshape(-1), real.reshape(-1))[0, 1])


def accuracy_table(rows: list[Row]) -> str:
    """By kind of training and method: how far off, in whose favour."""
    lines = [head((
        "training", "forecast", "runs", "mean error at 1 / 10 / 40 %, steps", "within 13 % of T",
        "within 13 % of the real time", "within 10 %", "within 15 %", "within 20 %", "Pearson",
        "too long / too short", "curve error",
    ))]  # fmt: skip
    for group, some in _groups(rows):
        for method in _methods(some):
            off, real = errors(some, method)
            horizon = np.array([row["horizon"] for row in some])[:, None]
            size = np.abs(off)
            fractions = [np.mean(size <= 0.13 * horizon)]
            fractions += [
                np.mean(size <= np.maximum(s * real, FEW)) for s in (0.13, 0.1, 0.15, 0.2)
            ]
            cells = [
                group, method, len(off),
                " / ".join(f"{m:.1f}" for m in size.mean(axis=0)) + f" ({size.mean():.1f})",
                *(f"{100 * fraction:.0f} %" for fraction in fractions),
                f"{pearson(off, real):.3f}",
                f"{100 * np.mean(off > FEW):.0f} / {100 * np.mean(off < -FEW):.0f} %",
                f"{100 * np.mean([curve_error(row, method) for row in some]):.1f} %",
            ]  # fmt: skip
            lines.append(line(cells))
    return "\n".join(lines)


def target_table(rows: list[Row]) -> str:
    """Times to absolute losses, end losses, and what a constant would do.

    The constant forecasts the median time of all runs of OTHER tasks, for every target its own.
    Losses are `LEVELS` of the initial one, which forecast and training share; a target counts where
    the real training reaches it, and a forecast that does not get there counts as the horizon.
    """
    levels = " / ".join(f"{level:g}" for level in LEVELS)
    lines = [head((
        "forecast", "times to 1 / 10 / 40 % of the loss decrease: mean error",
        f"times to {levels} of the initial loss: mean error (readings)", "within 15 %",
        "end loss over the real one: median factor", "largest",
    ))]  # fmt: skip
    for method in [*_methods(rows), CONSTANT]:
        off = _constant_errors(rows) if method == CONSTANT else errors(rows, method)[0]
        cells = [method, f"{np.abs(off).mean():.1f}" if len(off) else "-"]
        pairs = [pair for level in LEVELS for pair in _level_times(rows, method, level)]
        if not pairs:
            continue
        found, real = np.array(pairs, float).T
        size = np.abs(found - real)
        near = np.mean(size <= np.maximum(0.15 * real, FEW))
        cells += [f"{size.mean():.1f} ({len(size)})", f"{100 * near:.0f} %"]
        if method == CONSTANT:
            cells += ["", ""]
        else:
            factor = _end_factors(rows, method)
            cells += [f"{np.median(factor):.2f}", f"{factor.max():.1f}"]
        lines.append(line(cells))
    return "\n".join(lines)


def _constant_errors(rows: list[Row]) -> np.ndarray:
    """Errors (runs, 3) of the median real times of other tasks."""
    out = []
    for row in rows:
        others = [r["real"]["steps"] for r in rows if r["task"] != row["task"]]
        if others:
            out.append(np.median(others, axis=0) - np.array(row["real"]["steps"]))
    return np.array(out).reshape(-1, 3)


def _level_times(rows: list[Row], method: str, level: float) -> list[tuple[float, float]]:
    """Predicted and real steps to this fraction of the initial loss, if it is reached."""
    real = {row["name"]: _below(row["real"]["loss"], level) for row in rows}
    out = []
    for row in rows:
        if real[row["name"]] < 0:
            continue
        if method == CONSTANT:
            times = [real[r["name"]] for r in rows if r["task"] != row["task"]]
            reached = [t for t in times if t >= 0]
            if not reached:
                continue
            found = float(np.median(reached))
        else:
            one = row["forecasts"][method]
            found = _below(one["loss"], level) if one["stable"] else -1
            found = row["horizon"] if found < 0 else found
        out.append((found, real[row["name"]]))
    return out


def _below(curve: list[float], level: float) -> int:
    """The first step below a fraction of the initial loss, or -1."""
    reached = np.array(curve) < level * curve[0]
    return int(np.argmax(reached)) if reached.any() else -1


def network_table(rows: list[Row]) -> str:
    """Accuracy and cost together, by network: means of errors of times, medians of the rest."""
    lines = [head((
        "network", "runs", "forecast", "kernels", "seconds (compile)",
        "training: seconds (compile)", "FLOPs, forecast / training", "error of times, steps",
        "end loss, factor", "runs warned",
    ))]  # fmt: skip
    for network in ("ResNet", "MLP"):
        some = [row for row in rows if network in row["task"]]
        trainings = [row["real"] for row in some]
        for method in _methods(some):
            costs = [row["forecasts"][method]["cost"] for row in some]
            if "operations" not in costs[0]:  # Algorithm 1
                continue
            flops = [cost["operations"] / cost["training_operations"] for cost in costs]
            lines.append(line((
                network, len(some), method, f"{_median(costs, 'kernels'):g}",
                *(f"{_median(c, 'seconds'):.2f} ({_median(c, 'compile_seconds'):.2f})"
                  for c in (costs, trainings)),
                f"{np.median(flops):.2f}", f"{np.abs(errors(some, method)[0]).mean():.1f}",
                f"{np.median(_end_factors(some, method)):.2f}",
                sum(row["forecasts"][method]["warnings"] is not None for row in some),
            )))  # fmt: skip
    return "\n".join(lines)


def _median(records: list[Row], name: str) -> float:
    return float(np.median([record[name] for record in records]))


def _end_factors(rows: list[Row], method: str) -> np.ndarray:
    """The factors, at least 1, between predicted and real losses at the end."""
    ends = [(row["forecasts"][method]["loss"][-1], row["real"]["loss"][-1]) for row in rows]
    return np.exp(np.abs(np.log([max(a, 1e-12) / max(b, 1e-12) for a, b in ends])))


def task_table(rows: list[Row]) -> str:
    """Mean error of every task, in steps."""
    methods = _methods(rows)
    lines = [head(("task", "runs", *methods))]
    for task in dict.fromkeys(row["task"] for row in rows):
        some = [row for row in rows if row["task"] == task]
        cells = [f"{np.abs(errors(some, method)[0]).mean():.1f}" for method in methods]
        lines.append(line([task, len(some), *cells]))
    return "\n".join(lines)


def report(rows: list[Row]) -> str:
    """All tables."""
    gone = sum("diverged" in row for row in rows)
    rows = [row for row in rows if "diverged" not in row]
    if not rows:
        return "no runs yet"
    tasks = len({row["task"] for row in rows})
    rates = sorted({row["rate"] for row in rows})
    counts = ", ".join(f"{len(some)} {group}" for group, some in _groups(rows) if group != "all")
    words = (
        f"{len(rows)} runs of {tasks} tasks ({counts}), T = {rows[0]['horizon']}, effective "
        f"η λmax/N in {', '.join(f'{rate:g}' for rate in rates)}; {gone} more diverged for real."
    )
    tables = (accuracy_table, target_table, task_table, network_table)
    return "\n\n".join([words, *(make(rows) for make in tables)])


def _groups(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    names = [name for name in ("GD", "momentum 0.9", "SGD") if any(kind(r) == name for r in rows)]
    return [(name, [row for row in rows if kind(row) == name]) for name in names] + [("all", rows)]


def _methods(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["forecasts"]))
