"""How long will LoRA take? Forecasts of next-token fine-tuning, against the real training.

    python -m experiments.bench.lora [--preset smoke|cpu] [--tuning] [--minutes M] [--store FILE]

Every task of `lora_tasks` is trained for real once (`lora_real.jsonl` has the curves, for texts
that its rows name; with others installed all is trained anew), and forecast by

    held      `jaxttp.forecast.stale_gradients`: stale gradients, less what their noise costs
    path      the same path without that correction
    tenth     a power law c + a (t + b)^-p through the first tenth of the real curve
    fifth     the same through its first fifth

"curve" is the largest distance of the curves over the horizon, "mean" the mean distance, "end" the
distance at the end, all in per cent of the real drop; times are those to 10 % of the drop. A power
law may use a tenth or a fifth of the real training, "held" costs "fraction" of its gradients.
"""

import dataclasses
import functools
from pathlib import Path

import numpy as np
from scipy.optimize import curve_fit
from scipy.stats import kendalltau

from experiments.bench import lora_tasks
from experiments.bench.harness import Row, go_on, head, line, load, parser, store_of
from experiments.bench.lora_tasks import BATCH, EVERY, RANKED, REPORTED, TUNING, Task
from jaxttp import training_time
from jaxttp.forecast.stale_gradients import stale_gradient_forecast

MODULE = "experiments.bench.lora"
REAL = Path(__file__).with_name("lora_real.jsonl")
WAYS = ("held", "path", "tenth", "fifth")


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """What to measure."""

    pretraining: int = 3000
    folder: str = "experiments/results/lora"
    few: bool = False

    def tasks(self, tuning: bool) -> tuple[Task, ...]:
        """Those that constants were chosen on, or those that are reported."""
        found = TUNING if tuning else REPORTED
        if not self.few:
            return found
        return (dataclasses.replace(found[0], steps=80, samples=64),)

    def fraction(self, task: Task) -> float:
        """What a forecast may cost."""
        if self.few:
            return 0.8
        return 0.2 if task.steps < 3000 else 0.1


PRESETS = {
    "smoke": LoraSettings(pretraining=2, folder="build/lora-smoke", few=True),
    "cpu": LoraSettings(),
}


def held(task: Task, job: lora_tasks.Job, fraction: float) -> Row:
    """A forecast by stale gradients, at the points of the real curve."""
    found = stale_gradient_forecast(
        *job.model, job.x, job.y, x_watched=job.x_watched, y_watched=job.y_watched,
        optimizer=task.made_optimizer(), steps=task.steps, batch_size=BATCH, key=job.key,
        fraction=fraction,
    )  # fmt: skip
    path = np.interp(np.arange(task.steps + 1), found.at, found.held)
    curves = {"loss": found.loss, "path": path, "off": found.uncertainty}
    return {
        "fraction": found.fraction, "diverged": found.diverged, "warnings": found.warnings,
        "rate_fraction": found.rate_fraction,
    } | {
        name: [round(float(value), 5) for value in curve[::EVERY]]
        for name, curve in curves.items()
    }  # fmt: skip


def measure(
    tasks: tuple[Task, ...], settings: LoraSettings, store: Path, minutes: float
) -> list[Row]:
    """Rows of real runs and forecasts; what is stored is not made again."""
    folder = Path(settings.folder)
    made = functools.lru_cache(maxsize=1)(
        lambda task: lora_tasks.make(task, settings.pretraining, folder)
    )
    kept = [] if settings.few else load(REAL)
    known = {row["name"]: row for row in kept if row["texts"] == lora_tasks.checksum()}

    def real(task: Task) -> Row:
        return known.get(task.name) or lora_tasks.real_run(task, made(task))

    def forecast(task: Task) -> Row:
        return {"name": f"held {task.name}"} | held(task, made(task), settings.fraction(task))

    jobs = [(task.name, functools.partial(real, task)) for task in tasks]
    jobs += [(f"held {task.name}", functools.partial(forecast, task)) for task in tasks]
    return go_on(store, jobs, minutes)


def power_law(loss: np.ndarray, fraction: float) -> np.ndarray:
    """The whole curve from a power law through its first fraction."""
    count = max(4, round(fraction * (len(loss) - 1)) + 1)
    at = np.arange(len(loss), dtype=float)

    def law(t: np.ndarray, c: float, a: float, b: float, p: float) -> np.ndarray:
        return c + a * (t + b) ** -p

    bounds = ([0.0, 0.0, 0.1, 0.05], [loss[0], 1e3, 1e3, 3.0])
    start = (0.5 * loss[0], 0.5 * loss[0], 1.0, 0.5)
    try:
        fitted, _ = curve_fit(law, at[:count], loss[:count], start, bounds=bounds, maxfev=20_000)
    except RuntimeError:
        return np.full_like(loss, np.nan)
    return law(at, *fitted)


def time_to(loss: np.ndarray, steps: int) -> int:
    """Steps until the loss is within 10 % of its drop."""
    whole = np.interp(np.arange(steps + 1), np.arange(len(loss)) * EVERY, loss)
    return int(training_time(whole, 0.1))


def curves(rows: dict[str, Row], task: Task) -> dict[str, np.ndarray]:
    """The real curve and those forecast, by the name of the way."""
    real, found = np.array(rows[task.name]["loss"]), rows[f"held {task.name}"]
    return {
        "real": real, "held": np.array(found["loss"]), "path": np.array(found["path"]),
        "tenth": power_law(real, 0.1), "fifth": power_law(real, 0.2),
    }  # fmt: skip


def judge(foreseen: np.ndarray, real: np.ndarray, steps: int) -> dict[str, float]:
    """Errors of a curve, in per cent of the drop, and of the time to 10 % of it."""
    drop = real[0] - real[-1]
    away = 100 * (foreseen - real) / drop
    times = time_to(foreseen, steps), time_to(real, steps)
    return {
        "curve": float(np.max(np.abs(away))), "mean": float(np.mean(np.abs(away))),
        "end": float(away[-1]), "time": times[0], "real": times[1],
        "relative": 100 * abs(times[0] - times[1]) / max(times[1], 1),
    }  # fmt: skip


def table(rows: dict[str, Row], tasks: tuple[Task, ...]) -> str:
    """One line a task, then one a way."""
    titles = (
        "task",
        "real drop",
        "curve",
        "mean",
        "end",
        "time, forecast / real",
        "fraction",
        "warnings",
    )
    lines, judged = [head(titles)], {way: [] for way in WAYS}
    for task in tasks:
        if f"held {task.name}" not in rows:
            continue
        found, row = curves(rows, task), rows[f"held {task.name}"]
        real = found["real"]
        for way in WAYS:
            if np.all(np.isfinite(found[way])):
                judged[way].append(judge(found[way], real, task.steps))
        one = judge(found["held"], real, task.steps)
        said = "left its path" if row["diverged"] else "yes" if row["warnings"] is None else "±"
        if row["rate_fraction"] < 1 and not row["diverged"]:
            said = f"at {row['rate_fraction']:g} of the rates"
        lines.append(line((
            task.name, f"{real[0]:.2f} - {real[-1]:.2f}", f"{one['curve']:.1f} %",
            f"{one['mean']:.1f} %", f"{one['end']:+.1f} %", f"{one['time']} / {one['real']}",
            f"{row['fraction']:.3f}", said,
        )))  # fmt: skip
    lines += ["", head(("way", "runs", "curve, median", "mean, median", "curve within 10 %",
                        "time within 15 %", "both"))]  # fmt: skip
    for way, each in judged.items():
        if each:
            near = np.array([one["curve"] <= 10 for one in each])
            soon = np.array([one["relative"] <= 15 for one in each])
            middle = [f"{np.median([one[key] for one in each]):.1f} %" for key in ("curve", "mean")]
            lines.append(
                line((way, len(each), *middle, near.sum(), soon.sum(), (near & soon).sum()))
            )
    return "\n".join(lines)


def ranking(rows: dict[str, Row]) -> str:
    """Kendall's tau of the settings of one fine-tuning by their loss at the end, by way."""
    if any(f"held {task.name}" not in rows for task in RANKED):
        return ""
    found = [curves(rows, task) for task in RANKED]
    real = [one["real"][-1] for one in found]
    taus = {way: kendalltau([one[way][-1] for one in found], real).statistic for way in WAYS}
    return f"tau of {len(RANKED)} settings: " + ", ".join(f"{w} {t:.2f}" for w, t in taus.items())


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure what the store lacks, and print the tables."""
    command = parser(MODULE, __doc__, PRESETS)
    command.add_argument("--tuning", action="store_true", help="the tasks of the constants")
    options = command.parse_args(arguments)
    settings = PRESETS[options.preset]
    tasks = settings.tasks(options.tuning)
    rows = measure(tasks, settings, store_of(MODULE, options), options.minutes)
    named = {row["name"]: row for row in rows}
    print(table(named, tasks))
    if not options.tuning:
        print(ranking(named))
    return rows


if __name__ == "__main__":
    main()
