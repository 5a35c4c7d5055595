"""Figure and table of a comparison of optimisers, from its plain results."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

TARGET = 1e-3  # the loss whose first step is reported
FLOOR = 1e-16  # what is below is drawn here: nobody compares roundings

# Okabe and Ito's colours, which stay apart under every form of colour blindness.
LOOKS = {
    "gn": ("Gauss-Newton", "#D55E00", "-"),
    "ggn": ("generalised GN", "#CC79A7", "-."),
    "adam": ("Adam", "#0072B2", "--"),
    "sgd": ("SGD", "#009E73", ":"),
}


def curves(run: dict[str, Any], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of "train_loss", "test_accuracy" and so on; NaN after divergence.

    With the full batch the training curves are known at every step.
    """
    steps, values = np.array(run["steps"]), np.array(run[name], float)
    part, kind = name.split("_")
    if part == "train" and run["full_batch"]:
        values = np.array([*run[f"batch_{kind}"], values[-1]], float)
        steps = np.arange(len(values))
    return steps, values


def _groups(results: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    full = results["settings"]["batch_size"] is None
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in results["runs"]:
        group = groups.setdefault((run["data"], run["optimizer"]), [])
        group.append(run | {"full_batch": full})
    return groups


def plot(results: dict[str, Any]) -> Figure:
    """A row for every data set: means over the seeds (of logarithms where the axis is logarithmic).

    The band reaches from the least to the greatest.

    Args:
        results: of `experiments.gauss_newton.optimizers.run`.

    Returns:
        A matplotlib figure: training loss and accuracy of full batches; training loss, test loss
        and test accuracy of mini-batches.
    """
    settings = results["settings"]
    full = settings["batch_size"] is None
    names = (
        ("train_loss", "train_accuracy") if full else ("train_loss", "test_loss", "test_accuracy")
    )
    data = list(settings["data"])
    size = (4.6 * len(names) + 0.6, 3.6 * len(data) + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(data), len(names), squeeze=False)
    groups = _groups(results)
    for (name, optimizer), runs in groups.items():
        for axes, what in zip(grid[data.index(name)], names, strict=True):
            _band(axes, runs, what, optimizer, settings)
    for row, name in zip(grid, data, strict=True):
        for axes, what in zip(row, names, strict=True):
            part, kind = what.split("_")
            words = {"train": "training", "test": "test"}[part]
            axes.set_ylabel(f"{words} {kind}" + (" (%)" if kind == "accuracy" else ""))
            axes.set_xlabel("step (linear up to 10, then logarithmic)" if full else "epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if kind == "loss":
                axes.set_yscale("log")
            if full:
                axes.set_xscale("symlog", linthresh=10, linscale=1.0)
                last = max(settings["steps"].values())
                ticks = [*(t for t in (0, 5, 10, 20, 50, 100, 200, 500) if t < 0.8 * last), last]
                axes.set_xticks(ticks, map(str, ticks), minor=False)
                axes.set_xlim(0, last)
                axes.minorticks_off()
            else:
                axes.set_xlim(0, max(settings["steps"].values()))
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            if len(data) > 1:
                axes.set_title(name, fontsize=10)
        row[0].legend(frameon=False, fontsize=9)
    batch = "full batch" if full else f"batches of {settings['batch_size']}"
    samples = f"{settings['samples']} samples, " if settings["samples"] else ""
    loss = {"squared_error": "squared error"}.get(settings["loss"], "cross-entropy")
    figure.suptitle(
        f"{', '.join(data)}: {samples}{batch}, {loss}; mean and "
        f"range of {len(settings['seeds'])} seeds",
        fontsize=11,
    )
    return figure


def _band(
    axes: Axes, runs: list[dict[str, Any]], name: str, optimizer: str, settings: dict[str, Any]
) -> None:
    label, color, style = LOOKS[optimizer]
    steps = curves(runs[0], name)[0]
    values = np.stack([curves(run, name)[1] for run in runs])
    middle = values.mean(axis=0)
    if name.endswith("accuracy"):
        values, middle = 100 * values, 100 * middle
    else:
        values = np.maximum(values, FLOOR)
        middle = np.exp(np.mean(np.log(values), axis=0))
    if settings["batch_size"] is not None:
        steps = steps * settings["steps"][optimizer] / steps[-1]  # epochs
    text = f"{label}, rate {runs[0]['learning_rate']:g}"
    axes.plot(steps, middle, color=color, ls=style, lw=2, label=text, zorder=3)
    axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, lw=0)


def table(results: dict[str, Any]) -> str:
    """Steps to a training loss of 1e-3, final figures and costs, as Markdown.

    Seconds are CPU seconds of a step, the median over all steps but the first (compilation).
    """
    lines = [
        f"| data | optimiser | rate | steps to loss {TARGET:g} | steps | final training loss | "
        "final test loss | training, test accuracy (%) | CPU s a step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, optimizer), runs in _groups(results).items():
        reached = []
        for run in runs:
            steps, loss = curves(run, "train_loss")
            below = np.flatnonzero(loss <= TARGET)
            reached.append(str(steps[below[0]]) if below.size else "never")
        seconds = np.nanmedian([np.array(run["cpu_seconds"][1:], float) for run in runs])
        accuracy = [
            100 * np.mean([run[f"{part}_accuracy"][-1] for run in runs])
            for part in ("train", "test")
        ]
        reached = reached[:1] if len(set(reached)) == 1 else reached
        cells = [
            name, LOOKS[optimizer][0], f"{runs[0]['learning_rate']:g}", ", ".join(reached),
            runs[0]["steps"][-1], _range([run["train_loss"][-1] for run in runs]),
            _range([run["test_loss"][-1] for run in runs]),
            f"{accuracy[0]:.1f}, {accuracy[1]:.1f}", f"{seconds:.3g}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _range(values: list[float]) -> str:
    low, high = (f"{value:.2g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
