"""Forecasts of training a part of the weights, against the real training.

    python -m experiments.bench.adapters [--preset smoke|cpu]

The shipped ResNet with a fresh head on unseen digits: low-rank adapters on its convolutions (the
head frozen), the head alone, the last block and the head, all weights. Rates are shares of the
largest stable one. For every case the training times at 1, 10 and 40 % of the loss's drop, forecast
and real; "error" is the largest of |forecast - real| over the horizon T, "relative" the largest of
|forecast - real| / real.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import optax

from experiments import cuts
from experiments.bench.accuracy_tasks import Job
from jaxttp import Model, from_nnx, predict_training_time, train, training_time
from jaxttp.data import load_dataset, select
from jaxttp.models import freeze, fresh_head, head_only, last_blocks, load_pretrained, lora

THRESHOLDS = (0.01, 0.1, 0.4)


@dataclasses.dataclass(frozen=True)
class AdapterSettings:
    """What to measure."""

    samples_per_class: int = cuts.few(2, 30)
    steps: int = cuts.one(150)
    shares: tuple[float, ...] = cuts.first((0.003, 0.02))
    adapters: tuple[tuple[int, float], ...] = ((1, 8.0), (4, 1.0), (4, 8.0), (8, 8.0))
    parts: tuple[str, ...] = ("head", "last block and head", "all weights")
    relinearize: tuple[int, ...] = (0,)
    seed: int = 0


PRESETS = {
    "smoke": AdapterSettings(samples_per_class=3, steps=10, shares=(0.01,), adapters=((2, 1.0),)),
    "cpu": AdapterSettings(),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One forecast beside the training that it is of."""

    case: str
    parameters: int
    share: float
    relinearize: int | str
    forecast: dict[float, int]
    real: dict[float, int]
    steps: int

    @property
    def error(self) -> float:
        """The largest error of a training time, as a share of the horizon."""
        return max(abs(self.forecast[e] - self.real[e]) for e in THRESHOLDS) / self.steps

    @property
    def relative(self) -> float:
        """The largest error of a training time, as a share of that time."""
        return max(abs(self.forecast[e] - self.real[e]) / self.real[e] for e in THRESHOLDS)

    def __str__(self) -> str:
        cells = [self.case, f"{self.parameters:,}", f"{self.share:g}", str(self.relinearize)]
        cells += [
            " / ".join(str(times[e]) for e in THRESHOLDS) for times in (self.forecast, self.real)
        ]
        cells += [f"{100 * self.error:.1f} %", f"{100 * self.relative:.0f} %"]
        return f"| {' | '.join(cells)} |"


def cases(base: Model, settings: AdapterSettings, key: Any) -> Iterator[tuple[str, Model]]:
    """Models of which parts of the weights are the parameters, with their names."""
    for rank, factor in settings.adapters:
        name = f"LoRA, rank {rank}, α/r = {factor:g}"
        yield name, lora(base, rank=rank, alpha=factor * rank, key=key)
    parts = {
        "head": lambda: freeze(base, head_only),
        "last block and head": lambda: freeze(base, last_blocks(base.params, 1)),
        "all weights": lambda: base,
    }
    for name in settings.parts:
        yield name, parts[name]()


def digits_job(settings: AdapterSettings) -> Job:
    """The shipped ResNet with a fresh head, and unseen digits."""
    key = jax.random.key(settings.seed)
    network = fresh_head(load_pretrained(), 5, key=jax.random.split(key, 2)[0])
    per_class = settings.samples_per_class
    data = select(load_dataset("digits"), classes=range(5, 10), per_class=per_class, key=key)
    return Job(from_nnx(network), data.x, data.y)


def compare(settings: AdapterSettings, data: Job) -> Iterator[Row]:
    """Forecast and train every case at every rate."""
    key = jax.random.split(jax.random.key(settings.seed), 2)[1]
    options = {"loss": "cross_entropy", "steps": settings.steps}
    for name, model in cases(data.model, settings, key):
        size = sum(leaf.size for leaf in jax.tree.leaves(model.params))
        limit = None
        for share in settings.shares:
            rate = share * limit if limit else 1e-3
            if limit is None:
                first = predict_training_time(
                    *model, data.x, data.y, learning_rate=rate, relinearize=0, **options
                )
                limit = first.max_learning_rate
                rate = share * limit
            run = train(*model, data.x, data.y, optimizer=optax.sgd(rate), **options)
            real = {e: int(training_time(run.loss, e)) for e in THRESHOLDS}
            for rebuilds in settings.relinearize:
                found = predict_training_time(
                    *model, data.x, data.y, learning_rate=rate, relinearize=rebuilds,
                    thresholds=THRESHOLDS, **options,
                )  # fmt: skip
                yield Row(name, size, share, rebuilds, found.steps, real, settings.steps)


def main(arguments: list[str] | None = None) -> list[Row]:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    settings = PRESETS[parser.parse_args(arguments).preset]
    print("| trained | parameters | η/η_max | rebuilds | forecast | real | error | relative |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for row in compare(settings, digits_job(settings)):
        rows.append(row)
        print(row, flush=True)
    return rows


if __name__ == "__main__":
    main()
