"""How long will LoRA take? Forecasts of next-token fine-tuning, against the real training.

    python -m experiments.bench.lora [--preset smoke|cpu] [--minutes M] [--tuning]

Every task of `lora_tasks` is trained for real once (`lora_real.jsonl` has the curves, for texts
that its rows name; with others installed all is trained anew), and foreseen by

    held      `jaxttp.forecast.held`: held gradients, less what their noise costs
    path      the same path without that correction
    frozen    the network linearised once at the adapters' start, trained by the same optimiser;
              costs more than the training, and is a baseline on the first few tasks alone
    subset    the same of the first 64 training sequences alone: what their kernel foresees
    states    linearised at the last block's states in the change s A B of the kernels; A B, the
              last norm, the unembedding and the loss are exact; dearer than the training, too
    tenth     a power law c + a (t + b)^-p through the first tenth of the real curve
    fifth     the same through its first fifth

"curve" is the largest distance of the curves over the horizon, "mean" the mean distance, "end" the
distance at the end, all in per cent of the real drop; times are those to 10 % of the drop. Tasks
whose training diverges would be left out; none does.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from scipy.optimize import curve_fit
from scipy.stats import kendalltau

from experiments.bench import lora_tasks
from experiments.bench.lora_tasks import BATCH, EVERY, RANKED, REPORTED, TUNING, Task
from experiments.bench.stored import Row, go_on, load
from jaxttp import Model, from_nnx, training_time
from jaxttp.forecast.held import held_forecast
from jaxttp.models import Decoder
from jaxttp.models.low_rank import merge_lora

REAL = Path(__file__).with_name("lora_real.jsonl")
WAYS = ("held", "path", "frozen", "subset", "states", "tenth", "fifth")
LINEARIZED, SUBSET = 5, 64
"""So many of the reported tasks are trained linearised, too, on all sequences and on so many."""


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

    def share(self, task: Task) -> float:
        """What a forecast may cost."""
        if self.few:
            return 0.8
        return 0.2 if task.steps < 3000 else 0.1


PRESETS = {
    "smoke": LoraSettings(pretraining=2, folder="build/lora-smoke", few=True),
    "cpu": LoraSettings(),
}


def linearized(model: Model) -> Model:
    """The network linearised at its parameters."""
    apply_fn, start = model

    def apply(params: Any, x: Any) -> Any:
        moved = jax.tree.map(lambda a, b: a - b, params, start)
        outputs, change = jax.jvp(lambda w: apply_fn(w, x), (start,), (moved,))
        return outputs + change

    return Model(apply, start)


class LastStates(Decoder):
    """A decoder up to the states of its last block (N, T, D)."""

    def __call__(self, ids: Any, mask: Any = None) -> Any:
        """States of tokens (N, T)."""
        return self.activations(ids, mask)[f"blocks.{self.shape.depth - 1}"]


class FromStates(Decoder):
    """What a decoder makes of the states of its last block."""

    def __call__(self, ids: Any, mask: Any = None) -> Any:
        """Logits (N, T, V) of states (N, T, D)."""
        h = self.norm(ids)
        return self.embed.attend(h) if self.shape.tied else self.head(h)


def linearized_at_states(network: Decoder, adapted: Model, scale: float) -> Model:
    """The adapted network whose last states are linear in the change of its kernels.

    Args:
        network: without adapters.
        adapted: of `jaxttp.models.lora`, B = 0.
        scale: α/r.
    """

    def part(kind: type[Decoder]) -> Model:
        copy = nnx.clone(network)
        object.__setattr__(copy, "__class__", kind)
        return from_nnx(copy)

    states, head = part(LastStates), part(FromStates).apply_fn

    def apply(adapters: Any, x: Any) -> Any:
        merged = merge_lora(states.params, adapters, scale=scale)
        change = jax.tree.map(lambda a, b: a - b, merged, states.params)
        h, moved = jax.jvp(lambda w: states.apply_fn(w, x), (states.params,), (change,))
        return head(states.params, h + moved)

    return Model(apply, adapted.params)


def held_row(
    task: Task, job: lora_tasks.Job, share: float, total_samples: int | None = None
) -> Row:
    """A forecast by held gradients, at the points of the real curve."""
    found = held_forecast(
        *job.model, job.x, job.y, x_watched=job.x_watched, y_watched=job.y_watched,
        optimizer=task.made_optimizer(), steps=task.steps, batch_size=BATCH, key=job.key,
        share=share, total_samples=total_samples,
    )  # fmt: skip
    at = np.arange(task.steps + 1)
    path = np.interp(at, found.at, found.held)
    return {
        "loss": [round(float(value), 5) for value in found.loss[::EVERY]],
        "path": [round(float(value), 5) for value in path[::EVERY]],
        "off": [round(float(value), 5) for value in found.uncertainty[::EVERY]],
        "share": found.share, "diverged": found.diverged, "trust": found.trust,
        "rate_share": found.rate_share,
    }  # fmt: skip


def measure(tasks: tuple[Task, ...], settings: LoraSettings, minutes: float) -> list[Row]:
    """Rows of real runs, linearised runs and forecasts; what is stored is not made again."""
    folder = Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)

    @functools.lru_cache(maxsize=1)
    def made(task: Task) -> lora_tasks.Job:
        return lora_tasks.make(task, settings.pretraining, folder)

    def frozen(task: Task) -> Row:
        job = made(task)
        found = lora_tasks.real_run(task, job._replace(model=linearized(job.model)))
        return {**found, "name": f"frozen {task.name}"}

    def subset(task: Task) -> Row:
        job = made(task)
        few = dataclasses.replace(task, samples=min(SUBSET, task.samples))
        model = linearized(job.model)
        job = job._replace(model=model, x=job.x[:SUBSET], y=job.y[:SUBSET])
        found = lora_tasks.real_run(few, job)
        return {**found, "name": f"subset {task.name}"}

    def states(task: Task) -> Row:
        job = made(task)
        network = lora_tasks.pretrain(task.base, settings.pretraining, folder)
        model = linearized_at_states(network, job.model, task.ratio)
        return {**lora_tasks.real_run(task, job._replace(model=model)),
                "name": f"states {task.name}"}  # fmt: skip

    def held(task: Task) -> Row:
        return {"name": f"held {task.name}", **held_row(task, made(task), settings.share(task))}

    def jobs(prefix: str, make: Callable[[Task], Row], some: Iterable[Task]) -> list[Any]:
        return [(f"{prefix}{task.name}", functools.partial(make, task)) for task in some]

    short = list(itertools.islice((task for task in tasks if task.steps < 3000), LINEARIZED))
    real = jobs("", lambda task: lora_tasks.real_run(task, made(task)), tasks)
    kept = not settings.few and all(row["texts"] == lora_tasks.checksum() for row in load(REAL))
    real += jobs("frozen ", frozen, short) + jobs("subset ", subset, short)
    real += jobs("states ", states, short)
    rows = go_on(REAL if kept else folder / "real.jsonl", real, minutes)
    return rows + go_on(folder / "held.jsonl", jobs("held ", held, tasks), minutes)


def power_law(loss: np.ndarray, share: float) -> np.ndarray:
    """The whole curve from a power law through its first share."""
    count = max(4, round(share * (len(loss) - 1)) + 1)
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
    """The real curve and those foreseen, by the name of the way."""
    real = np.array(rows[task.name]["loss"])
    held = rows[f"held {task.name}"]
    found = {"real": real, "held": np.array(held["loss"]), "path": np.array(held["path"])}
    for way in ("frozen", "subset", "states"):
        if f"{way} {task.name}" in rows:
            found[way] = np.array(rows[f"{way} {task.name}"]["loss"])
    return found | {"tenth": power_law(real, 0.1), "fifth": power_law(real, 0.2)}


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
    lines = ["| task | real drop | curve | mean | end | time, forecast / real | share | trust |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    judged: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    whole = [task for task in tasks if f"held {task.name}" in rows and task.name in rows]
    for task in whole:
        found, held = curves(rows, task), rows[f"held {task.name}"]
        for way in WAYS:
            if way in found and np.all(np.isfinite(found[way])):
                judged[way].append(judge(found[way], found["real"], task.steps))
        one = judge(found["held"], found["real"], task.steps)
        real = found["real"]
        said = "yes" if held["trust"] is None else "±"
        if held["diverged"] or held["rate_share"] < 1:
            share = f"at {held['rate_share']:g} of the rates"
            said = "left its path" if held["diverged"] else share
        lines.append(
            f"| {task.name} | {real[0]:.2f} - {real[-1]:.2f} | {one['curve']:.1f} % | "
            f"{one['mean']:.1f} % | {one['end']:+.1f} % | {one['time']} / {one['real']} | "
            f"{held['share']:.3f} | {said} |"
        )
    lines += ["", "| way | runs | curve, median | mean, median | curve within 10 % | "
              "time within 15 % | both |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    for way, each in judged.items():
        if each:
            near = [one["curve"] <= 10 for one in each]
            soon = [one["relative"] <= 15 for one in each]
            both = sum(a and b for a, b in zip(near, soon, strict=True))
            lines.append(
                f"| {way} | {len(each)} | {np.median([one['curve'] for one in each]):.1f} % | "
                f"{np.median([one['mean'] for one in each]):.1f} % | {sum(near)} | {sum(soon)} | "
                f"{both} |"
            )
    return "\n".join(lines)


def ranges(rows: dict[str, Row], tasks: tuple[Task, ...]) -> str:
    """How often the range of steps that a forecast's doubt leaves holds the real time to a loss."""
    held = total = endless = 0
    for task in tasks:
        row = rows.get(f"held {task.name}")
        if row is None or row["diverged"]:
            continue
        at = np.arange(task.steps + 1)
        real, loss, off = (
            np.interp(at, np.arange(len(curve)) * EVERY, curve)
            for curve in (rows[task.name]["loss"], row["loss"], row["off"])
        )
        for threshold in (0.4, 0.1):
            level = real[-1] + threshold * (real[0] - real[-1])
            low, high = (np.flatnonzero(loss + sign * off < level) for sign in (-1, 1))
            time = np.flatnonzero(real < level)[0]
            total += 1
            held += bool(len(low)) and low[0] <= time and (not len(high) or time <= high[0])
            endless += threshold == 0.1 and not len(high)
    return f"ranges hold {held} of {total} real times to 40 and 10 %; {endless} have no end at 10 %"


def ranking(rows: dict[str, Row]) -> str:
    """Kendall's tau of the settings of one fine-tuning by their loss at the end, and the worst."""
    whole = [task for task in RANKED if f"held {task.name}" in rows]
    if len(whole) < len(RANKED):
        return ""
    lines = []
    found = [curves(rows, task) for task in whole]
    stands = np.array([not rows[f"held {task.name}"]["diverged"] for task in whole])
    real = np.array([one["real"][-1] for one in found])
    slow = set(np.argsort(-real)[: len(real) // 3])
    for way in ("held", "path", "tenth", "fifth"):
        said = np.array([one[way][-1] for one in found])
        hit = len(slow & set(np.argsort(-said)[: len(said) // 3])) / len(slow)
        line = f"{way}: tau of {len(whole)} settings {kendalltau(said, real).statistic:.2f}"
        if not np.all(stands):
            beside = kendalltau(said[stands], real[stands]).statistic
            line += f", of the {np.sum(stands)} whose held path did not leave {beside:.2f}"
        lines.append(f"{line}; of the worst third found {hit:.2f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure what the store lacks, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--tuning", action="store_true", help="the tasks of the constants")
    given = parser.parse_args(arguments)
    settings = PRESETS[given.preset]
    tasks = settings.tasks(given.tuning)
    rows = measure(tasks, settings, given.minutes)
    named = {row["name"]: row for row in rows}
    print(table(named, tasks))
    print(ranges(named, tasks))
    if not given.tuning:
        print(ranking(named))
    return rows


if __name__ == "__main__":
    main()
