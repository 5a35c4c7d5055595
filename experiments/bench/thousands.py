"""From 500 patches of two photographs to 20,000: when does training on all of them come where?

    python -m experiments.bench.thousands [--preset smoke|cpu]

Which photograph a patch of 8 x 8 pixels is from is learnt by the network that the library ships,
which knows the digits 0-4: by cross-entropy, in batches of 32 with momentum 0.9, at a constant rate
and with a cosine. Trainings are real, forecasts are made with ``total_samples`` of some of the
patches, each in a process of its own whose highest resident memory is taken, imports included.
Patches overlap, so that there are so many; those that are left out are not trained on.
"""

import argparse
import dataclasses
import functools
import json
import resource
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import optax
from sklearn import datasets

from experiments.bench.accuracy_tasks import Job
from experiments.bench.epochs import (
    BATCH,
    WITHIN,
    descent,
    goals_of,
    off_by,
    rate_by,
    run_for_real,
    sgd,
    words,
)
from experiments.bench.pays import foresee
from experiments.bench.pays_tasks import HEAD
from jaxttp import from_nnx
from jaxttp.models import fresh_head, load_pretrained

SIDE, APART = 8, 5
"""Pixels of a patch, and between the corners of two."""


@dataclasses.dataclass(frozen=True)
class ThousandsSettings:
    """What to measure: samples, those at hand, trainings, and shares of their cost."""

    samples: int = 20_000
    few: int = 500
    epochs: tuple[int, ...] = (2, 6)
    budgets: tuple[float | None, ...] = (0.25, None)
    runs: int = 2


PRESETS = {
    "smoke": ThousandsSettings(300, 80, (1,), (None,), runs=1),
    "cpu": ThousandsSettings(),
}


@functools.cache
def patches(samples: int) -> Job:
    """The network and so many patches of both photographs, drawn at random, gray, in [0, 1]."""
    rows, labels = [], []
    for label, image in enumerate(datasets.load_sample_images().images):
        gray = np.asarray(image, np.float32).mean(axis=2) / 255.0
        every = np.lib.stride_tricks.sliding_window_view(gray, (SIDE, SIDE))[::APART, ::APART]
        rows.append(every.reshape(-1, SIDE, SIDE, 1))
        labels.append(np.full(len(rows[-1]), label, np.int32))
    chosen = np.random.default_rng(0).permutation(sum(map(len, rows)))[:samples]
    network = fresh_head(load_pretrained(), 2, key=HEAD)
    return Job(from_nnx(network), np.concatenate(rows)[chosen], np.concatenate(labels)[chosen])


@functools.cache
def _rate(samples: int) -> float:
    job = patches(samples)
    return rate_by(Job(job.model, job.x[:150], job.y[:150]))


class Long(NamedTuple):
    """A training on all patches."""

    samples: int
    cosine: bool
    epochs: int

    @property
    def job(self) -> Job:
        """Network and all samples."""
        return patches(self.samples)

    @property
    def steps(self) -> int:
        """T."""
        return max(1, self.epochs * len(self.job.y) // BATCH)

    def optimizer(self) -> optax.GradientTransformation:
        """SGD."""
        return sgd(_rate(self.samples), self.cosine, self.steps)


def foreseen(training: Long, few: int, budget: float | None) -> dict[str, Any]:
    """A forecast from some of the patches; what it took, in this process as well."""
    job = training.job
    asked: dict[str, Any] = {"total_samples": len(job.y)}
    if budget is not None:
        asked["budget"] = budget
    found = foresee(Job(job.model, job.x[:few], job.y[:few]), descent(training), asked)
    return {
        "times": goals_of(found.loss).tolist(), "end": float(found.loss[-1]),
        "share": found.share, "seconds": found.seconds + found.compile_seconds,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10, "says": found.says,
    }  # fmt: skip


def _apart(training: Long, few: int, budget: float | None) -> dict[str, Any]:
    """The same in a process of its own."""
    asked = json.dumps([*training, few, budget])
    found = subprocess.run(
        [sys.executable, "-m", "experiments.bench.thousands", "--forecast", asked],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(found.stdout.splitlines()[-1])


def table(settings: ThousandsSettings) -> list[str]:
    """Every forecast beside the real trainings."""
    lines = [
        "| training | forecast | by count | 10, 1 % of the drop; 0.5, 0.25, 0.1, 0.05 of the first "
        "loss | real | within 15 % | end | real | peak (MiB) | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    ways = [(False, epochs) for epochs in settings.epochs]
    ways += [(True, settings.epochs[-1])]
    for cosine, epochs in ways:
        training = Long(settings.samples, cosine, epochs)
        name = f"{epochs} epochs, {'cosine' if cosine else 'constant rate'}"
        real = [run_for_real(training, 50 + seed).loss for seed in range(settings.runs)]
        each = np.array([goals_of(loss) for loss in real])
        true = np.where(np.all(np.isfinite(each), axis=0), np.median(each, axis=0), np.inf)
        for budget in settings.budgets:
            got = _apart(training, settings.few, budget)
            right = [off <= WITHIN for off in off_by(np.array(got["times"], float), true)]
            what = "default" if budget is None else f"budget {budget:g}"
            cells = [name, what, f"{got['share']:.2g}", words(got["times"]), words(true)]
            cells += [f"{sum(right)} of {len(right)}", f"{got['end']:.3g}"]
            cells += [f"{np.mean([loss[-1] for loss in real]):.3g}", f"{got['peak']:.0f}"]
            cells.append(f"{got['seconds']:.0f}")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--forecast", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.forecast is not None:
        samples, cosine, epochs, few, budget = json.loads(options.forecast)
        print(json.dumps(foreseen(Long(samples, cosine, epochs), few, budget)))
        return
    print("\n".join(table(PRESETS[options.preset])))


if __name__ == "__main__":
    main()
