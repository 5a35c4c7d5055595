"""What was measured of checkpoints, judged and in tables."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.stats import weightedtau

from experiments.bench.advice import steps_to

WORST = 10.0
"""Times the best at which what takes longer, or never gets there, counts in means."""


def truth(row: dict[str, Any]) -> dict[str, np.ndarray]:
    """Of every checkpoint: real steps to the goal (inf for never), test accuracy and loss (K,).

    Steps are those of the rate that is at the goal first. What is first can be at the edge of
    stability and thrown back later, so that accuracy and loss on the test samples are those of the
    rate with the lowest training loss at the end.
    """
    out: dict[str, list[float]] = {"steps": [], "accuracy": [], "loss": [], "rate": []}
    for runs in row["real"].values():
        times = [steps_to(run["loss"], row["goal"]) for run in runs]
        last = [run["loss"][-1] if np.isfinite(run["loss"][-1]) else np.inf for run in runs]
        first, lowest = int(np.argmin(times)), runs[int(np.argmin(last))]
        out["steps"].append(times[first])
        out["rate"].append(row["rates"][first])
        out["accuracy"].append(lowest["test_accuracy"])
        out["loss"].append(lowest["test_loss"])
    return {name: np.array(values) for name, values in out.items()}


def methods(row: dict[str, Any]) -> dict[str, tuple[np.ndarray, float]]:
    """A score of every checkpoint, the larger the better, and what all cost in real trainings."""
    names = list(row["real"])
    followed, first = row["forecasts"]["followed"], row["forecasts"]["first"]

    def place(order: list[str]) -> np.ndarray:
        return -np.array([order.index(name) for name in names], float)

    def of(values: Mapping[str, float]) -> np.ndarray:
        found = np.array([values[name] for name in names], float)
        return np.where(np.isfinite(found), found, -1e30)

    curves = np.array([[run["loss"] for run in runs] for runs in row["real"].values()])
    curves = np.where(np.isfinite(curves), curves, 1e30)
    _, rates, length = curves.shape
    steps, middle = length - 1, (rates - 1) // 2
    tenth = max(1, steps // 10)
    out = {
        "jaxttp.race_starts": (place(row["race"]["order"]), row["race"]["trainings"]),
        "jaxttp.compare": (place(followed["order"]), followed["trainings"]),
        "its forecast of the last loss": (
            of({name: -loss for name, loss in followed["final_loss"].items()}),
            followed["trainings"],
        ),
        "its first kernels alone": (place(first["order"]), first["trainings"]),
        "the kernel's `speed`": (of(first["speed"]), first["trainings"]),
    }
    out["a tenth of a training each, at the middle rate"] = (
        -curves[:, middle, tenth], len(names) * tenth / steps
    )  # fmt: skip
    out["a tenth of a training each, at every rate"] = (
        -curves[:, :, tenth].min(axis=1), len(names) * rates * tenth / steps
    )  # fmt: skip
    return out


def judged(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Every method against the truth of a target.

    Weighted Kendall tau is +1 where the higher score always has the fewer real steps (those that
    never get there tie as the last), or the higher test accuracy, or the lower test loss; the
    weights are `scipy.stats.weightedtau`'s, hyperbolic, so that the first places count most. Where
    scores tie for the first place the means over them are the choice.
    """
    real = truth(row)
    steps = np.where(np.isfinite(real["steps"]), real["steps"], 1e30)
    excess = np.minimum(real["steps"] / real["steps"].min(), WORST)
    lost = real["accuracy"].max() - real["accuracy"]
    names = list(row["real"])
    known = {**methods(row), "any of them, in the mean": (np.zeros(len(names)), 0.0)}
    return {
        method: {
            "tau_steps": _tau(score, -steps),
            "tau_accuracy": _tau(score, real["accuracy"]),
            "tau_loss": _tau(score, -real["loss"]),
            "chosen": int(np.argmax(score)),
            "excess": float(np.mean(excess[score == score.max()])) - 1,
            "lost": float(np.mean(lost[score == score.max()])),
            "cost": cost,
        }
        for method, (score, cost) in known.items()
    }


def _tau(score: np.ndarray, real: np.ndarray) -> float:
    if np.ptp(score) == 0 or np.ptp(real) == 0:
        return 0.0
    found: Any = weightedtau(score, real)
    return float(found.statistic)


def tables(rows: list[dict[str, Any]]) -> str:
    """The checkpoints, the targets, every method over all of them, and tau target by target."""
    rows = [row for row in rows if np.isfinite(truth(row)["steps"]).any()]
    if not rows:
        return "No checkpoint gets to the goal of any target."
    parts = (_real_table(rows), _target_table(rows), _method_table(rows), _tau_table(rows))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _head(*cells: str) -> list[str]:
    return [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]


def _steps(value: float) -> str:
    return f"{value:.0f}" if np.isfinite(value) and value >= 0 else "never"


def _real_table(rows: list[dict[str, Any]]) -> list[str]:
    """Real steps and test accuracies, and the forecast of the steps."""
    lines = _head("real steps (forecast), test accuracy", *(row["target"] for row in rows))
    known = [truth(row) for row in rows]
    for i, name in enumerate(rows[0]["real"]):
        cells = [
            f"{_steps(real['steps'][i])} ({_steps(row['forecasts']['followed']['steps'][name])}), "
            f"{real['accuracy'][i]:.1%}"
            for row, real in zip(rows, known, strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _target_table(rows: list[dict[str, Any]]) -> list[str]:
    """What `compare` chose, and how far its forecasts are from training at its rates."""
    lines = _head(
        "target", "goal", "best", "steps", "chosen by compare", "steps", "at its own rate",
        "forecast", "`trust` doubts", "cost", "forecasts off at their own rates, median",
    )  # fmt: skip
    for row in rows:
        names, steps = list(row["real"]), truth(row)["steps"]
        followed = row["forecasts"]["followed"]
        best, chosen = int(np.argmin(steps)), names.index(followed["order"][0])
        pairs = [(followed["steps"][name], row["at_advised"][name]) for name in names]
        off = [abs(a - b) / max(b, 1) for a, b in pairs if a >= 0 and b >= 0]
        missed = sum((a >= 0) != (b >= 0) for a, b in pairs)
        words = f"{np.median(off):.0%}" if off else "-"
        words += f"; {missed} of {len(pairs)} reached by one alone" if missed else ""
        lines.append(
            f"| {row['target']} | {row['goal']:.2g} | {names[best]} | {_steps(steps[best])} | "
            f"{names[chosen]} | {_steps(steps[chosen])} | "
            f"{_steps(row['at_advised'][names[chosen]])} | "
            f"{_steps(followed['steps'][names[chosen]])} | "
            f"{sum(why is not None for why in followed['trust'].values())} of {len(names)} | "
            f"{followed['trainings']:.3g} | {words} |"
        )
    return lines


def _method_table(rows: list[dict[str, Any]]) -> list[str]:
    """Means over targets."""
    lines = _head(
        f"mean of {len(rows)} targets", "tau: fewer steps", "tau: test accuracy",
        "tau: lower test loss", "steps over the best", "accuracy lost, points", "cost, trainings",
    )  # fmt: skip
    found = [judged(row) for row in rows]
    for method in found[0]:
        mean = {
            key: float(np.mean([one[method][key] for one in found]))
            for key in ("tau_steps", "tau_accuracy", "tau_loss", "excess", "lost", "cost")
        }
        lines.append(
            f"| {method} | {mean['tau_steps']:.2f} | {mean['tau_accuracy']:.2f} | "
            f"{mean['tau_loss']:.2f} | {100 * mean['excess']:.0f} % | {100 * mean['lost']:.1f} | "
            f"{mean['cost']:.2g} |"
        )
    return lines


def _tau_table(rows: list[dict[str, Any]]) -> list[str]:
    """Tau to the real steps, and the regret, target by target."""
    lines = _head("tau: fewer steps; steps over the best", *(row["target"] for row in rows))
    found = [judged(row) for row in rows]
    for method in found[0]:
        cells = [f"{one[method]['tau_steps']:.2f}; {one[method]['excess']:.0%}" for one in found]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines
