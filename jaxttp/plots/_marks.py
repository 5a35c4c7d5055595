"""Marks on the curves of a forecast: times, targets, ends, and the legend that explains them."""

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from jaxttp.losses.rule import Target
from jaxttp.plots._style import GREY, OTHER, PREDICTED, REAL

MARKERS = ("o", "s", "D", "^", "v", "P", "X")


def when(step: int, stable: bool) -> str:
    """A time in words."""
    return f"step {step}" if step >= 0 else ("not reached" if stable else "diverges")


def mark_ends(axes: Axes, curves: Mapping[str, Any], *, unit: str = "") -> None:
    """The last values of curves, written beside them where they do not cover each other.

    Args:
        axes: where they are drawn, by step.
        curves: by colour (T + 1,); None for one that there is not.
        unit: behind every number.
    """
    ends = {color: np.asarray(c) for color, c in curves.items() if c is not None}
    ends = {color: (len(c) - 1, c[-1]) for color, c in ends.items() if np.isfinite(c[-1])}
    low, high = axes.get_ylim()
    apart, last = 0.055 * (high - low), -np.inf
    for color, (step, value) in sorted(ends.items(), key=lambda item: item[1][1]):
        last = max(last + apart, value)  # the height of a line of text
        axes.annotate(f"{value:.3g}{unit and ' ' + unit}", (step, last), xytext=(9, 0), color=color,
                      textcoords="offset points", va="center", annotation_clip=False)  # fmt: skip


def mark_targets(
    axes: Axes,
    result: Any,
    *,
    metric: str = "loss",
    run: Any = None,
    scale: float = 1.0,
) -> list[tuple[Any, str]]:
    """A line at every target of a metric, and a star where the forecast and the real run reach it.

    Args:
        axes: where the curves are drawn, by step.
        result: what has `targets` and the curves that they are of.
        metric: "loss" or "error".
        run: the real training, if there was one.
        scale: of the axis, such as 100 for percent.

    Returns:
        What the legend says of them: pairs of handles and words.
    """
    rows = []
    for target, step in result.targets.items():
        if target.metric != metric:
            continue
        axes.axhline(scale * target.value, color=GREY, lw=1.2, ls=":", zorder=1)
        words = f"{_target(target, scale)}: {when(step, result.stable)}"
        known = getattr(run, target.curve_name, None)
        if known is not None:
            real = run.reach([target])[target]
            words += f", real {when(real, run.finite).removeprefix('step ')}"
            _star(axes, scale * np.asarray(known), real, REAL)
        color = PREDICTED if target.on == "train" else OTHER
        handle = _star(axes, scale * np.asarray(getattr(result, target.curve_name)), step, color)
        rows.append((handle, words))
    return rows


def _target(target: Target, scale: float) -> str:
    """A target in words, in the units of the axis."""
    if scale == 1.0:
        return target.words()
    return target.words().rsplit(" ", 1)[0] + f" {scale * target.value:.4g} %"


def _star(axes: Axes, curve: np.ndarray, step: int, color: str) -> Any:
    """A star on a curve, on its ground where it is reached; what the legend shows of it."""
    style: dict[str, Any] = {"marker": "*", "color": color, "ls": "none", "zorder": 6}
    if step >= 0:
        axes.plot(step, curve[step], mec="white", mew=0.8, ms=17, clip_on=False, **style)
    return axes.plot([], [], ms=12, **style)[0]


def legend_with(axes: Axes, rows: list[tuple[Any, str]]) -> None:
    """The legend of what has a label, and these rows."""
    handles, labels = axes.get_legend_handles_labels()
    if handles or rows:
        axes.legend(
            [*handles, *(handle for handle, _ in rows)],
            [*labels, *(text for _, text in rows)],
            frameon=True,
            framealpha=0.7,
            fontsize="small",
            edgecolor="none",  # lines of targets lie behind it
        )


def mark_early_stopping(axes: Axes, prediction: Any) -> list[tuple[Any, str]]:
    """A triangle where the test loss is lowest, if it rises again from there.

    Args:
        axes: where the test loss is drawn, by step.
        prediction: with or without test samples.

    Returns:
        What the legend says of it: a pair of a handle and words, or nothing.
    """
    if prediction.test_loss is None or not prediction.stable:
        return []
    found = prediction.early_stopping()
    if not found.overfits:
        return []
    handle = axes.plot(found.step, found.value, "^", color=OTHER, mfc="white", mew=1.8, ms=9,
                       zorder=5, clip_on=False)[0]  # fmt: skip
    return [(handle, f"lowest test loss: step {found.step}")]


def mark_times(axes: Axes, curve: np.ndarray, steps: Any, color: str, *, filled: bool) -> None:
    """Marks on a curve at its training times, a shape for each."""
    for marker, step in zip(cycle(MARKERS), steps.values(), strict=False):
        if step >= 0:
            face = color if filled else "white"
            axes.plot(step, curve[step], marker, color=color, mfc=face, mew=1.8, ms=9, zorder=5,
                      clip_on=False)  # fmt: skip
