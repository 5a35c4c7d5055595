"""How long will LoRA take on a corpus, from a sample of its sequences?

    python -m experiments.bench.lora_sample [--preset smoke|cpu] [--minutes M] [--tuning]

The corpus is 4,096 sequences of the texts of `lora_tasks`, cut side by side, and 96 more are
watched. The real training draws from all of them; forecasts know the first 1,024, 512 or 256 alone
(`total_samples` of `jaxttp.forecast.held_forecast`), which their path sees up to seven times over.
"plain" is the forecast of the sample's own training, with its draws, which knows nothing of a
corpus. Errors are `experiments.bench.lora`'s; "doubt" is how many points are within it.
"""

import argparse
import dataclasses
import functools
from pathlib import Path

import numpy as np

from experiments.bench import lora_tasks
from experiments.bench.lora import LoraSettings, held_row, judge
from experiments.bench.lora_tasks import SPLIT, TUNING, WATCHED, WINDOW, Job, Task, texts
from experiments.bench.stored import Row, go_on

SAMPLES = (4096, 1024, 512, 256)
"""Sequences that a forecast knows; the first is all of them."""
CHOSEN = (TUNING[0], TUNING[3], TUNING[4])
"""The rule was chosen on these."""
REPORTED = (
    Task("llama", "python", 8, 2, "all", "adamw", 1e-3, seed=1),
    Task("llama", "python", 4, 2, "qv", "adamw", 3e-3, seed=1),
    Task("gpt2", "python", 8, 2, "all", "adamw", 1e-3, seed=1),
    Task("gpt2", "python", 4, 4, "qv", "adamw", 3e-3, seed=1),
)
"""And tried on these."""


@dataclasses.dataclass(frozen=True)
class SampleSettings(LoraSettings):
    """What to measure."""

    folder: str = "experiments/results/lora"
    samples: tuple[int, ...] = SAMPLES

    def tasks(self, tuning: bool) -> tuple[Task, ...]:
        """Those that the rule was chosen on, or those that are reported."""
        found = CHOSEN if tuning else REPORTED
        return (dataclasses.replace(found[0], steps=80),) if self.few else found


PRESETS = {
    "smoke": SampleSettings(pretraining=2, folder="build/lora-smoke", few=True, samples=(64, 32)),
    "cpu": SampleSettings(),
}


def cut(task: Task, count: int, settings: LoraSettings) -> Job:
    """A task whose sequences lie side by side in the text, those that are watched among them."""
    corpus = texts()[task.text][: int(SPLIT * len(texts()[task.text]))]
    whole = (len(corpus) - 1) // WINDOW
    drawn = np.random.default_rng(task.seed + 2).permutation(whole)[: count + WATCHED]
    rows = WINDOW * drawn[:, None] + np.arange(WINDOW + 1)
    x, y = corpus[rows[:, :-1]], corpus[rows[:, 1:]]
    job = lora_tasks.make(task, settings.pretraining, Path(settings.folder))
    return Job(job.model, x[WATCHED:], y[WATCHED:], x[:WATCHED], y[:WATCHED], job.key)


def measure(tasks: tuple[Task, ...], settings: SampleSettings, minutes: float) -> list[Row]:
    """Rows of real runs and forecasts; what is stored is not made again."""
    folder, most = Path(settings.folder), settings.samples[0]
    folder.mkdir(parents=True, exist_ok=True)
    made = functools.lru_cache(maxsize=1)(lambda task: cut(task, most, settings))

    def real(task: Task) -> Row:
        run = lora_tasks.real_run(dataclasses.replace(task, samples=most), made(task))
        return run | {"name": f"real {task.name}"}

    def known(task: Task, count: int, plain: str) -> Row:
        job, total = made(task), None if plain or count == most else most
        job = job._replace(x=job.x[:count], y=job.y[:count])
        found = held_row(task, job, settings.share(task), total_samples=total)
        return {"name": f"{count} {plain}{task.name}", **found}

    jobs = [(f"real {task.name}", functools.partial(real, task)) for task in tasks]
    jobs += [
        (f"{count} {plain}{task.name}", functools.partial(known, task, count, plain))
        for task in tasks for count, plain in ways(settings.samples)
    ]  # fmt: skip
    return go_on(folder / "sample.jsonl", jobs, minutes)


def ways(samples: tuple[int, ...]) -> list[tuple[int, str]]:
    """Sequences known, and whether as a sample."""
    return [(count, "") for count in samples] + [(count, "plain ") for count in samples[1:]]


def table(rows: list[Row], tasks: tuple[Task, ...], samples: tuple[int, ...]) -> str:
    """One line a forecast, then one for every number of sequences."""
    named = {row["name"]: row for row in rows}
    lines = ["| task | sequences known | curve | mean | end | time, forecast / real | "
             "doubt |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    found: dict[tuple[int, str], list[dict[str, float]]] = {way: [] for way in ways(samples)}
    for task in tasks:
        for count, plain in found:
            held = named.get(f"{count} {plain}{task.name}")
            if held is None:
                continue
            loss, real, off = (np.array(one) for one in (
                held["loss"], named[f"real {task.name}"]["loss"], held["off"]))  # fmt: skip
            one = judge(loss, real, task.steps)
            one["known"] = float(np.mean(np.abs(loss - real)[1:] <= off[1:]))
            found[count, plain].append(one)
            lines.append(
                f"| {task.name} | {count:,} {plain}| {one['curve']:.1f} % | {one['mean']:.1f} % | "
                f"{one['end']:+.1f} % | {one['time']} / {one['real']} | "
                f"{100 * one['known']:.0f} % |"
            )
    lines += ["", "| sequences known | runs | curve, mean | mean | end, mean | doubt |",
              "|---|---|---|---|---|---|"]  # fmt: skip
    for (count, plain), each in found.items():
        if each:
            mean = {name: np.mean([one[name] for one in each]) for name in each[0]}
            lines.append(
                f"| {count:,} {plain}| {len(each)} | {mean['curve']:.1f} % | "
                f"{mean['mean']:.1f} % | {mean['end']:+.1f} % | {100 * mean['known']:.0f} % |"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure what the store lacks, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--tuning", action="store_true", help="the tasks of the constant")
    given = parser.parse_args(arguments)
    settings = PRESETS[given.preset]
    tasks = settings.tasks(given.tuning)
    rows = measure(tasks, settings, given.minutes)
    print(table(rows, tasks, settings.samples))
    return rows


if __name__ == "__main__":
    main()
