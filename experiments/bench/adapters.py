"""Forecasts of training a part of the weights, against the real training.

    python -m experiments.bench.adapters [--preset smoke|cpu] [--store FILE]

The shipped ResNet with a fresh head on unseen digits: low-rank adapters on its convolutions (the
head frozen), the head alone, the last block and the head, all weights. Rates are fractions of the
largest stable one ("rate"). For every case the training times at 1, 10 and 40 % of the loss's drop
by one kernel and real; "error" is the largest of |forecast - real| over the horizon T, "relative"
the largest of |forecast - real| / real.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import optax

from experiments.bench.harness import Row, parser, publish, store_of
from jaxttp import Model, from_nnx, predict_training_time, train, training_time
from jaxttp.data import load_dataset, select
from jaxttp.models import freeze, fresh_head, head_only, last_blocks, load_pretrained, lora

MODULE = "experiments.bench.adapters"
COLUMNS = ("trained", "parameters", "rate", "forecast", "real", "error", "relative")
THRESHOLDS = (0.01, 0.1, 0.4)


@dataclasses.dataclass(frozen=True)
class AdapterSettings:
    """What to measure; `adapters` are ranks and α/r."""

    samples_per_class: int = 30
    steps: int = 150
    fractions: tuple[float, ...] = (0.003, 0.02)
    adapters: tuple[tuple[int, float], ...] = ((1, 8.0), (4, 1.0), (4, 8.0), (8, 8.0))


PRESETS = {
    "smoke": AdapterSettings(
        samples_per_class=3, steps=10, fractions=(0.01,), adapters=((2, 1.0),)
    ),
    "cpu": AdapterSettings(),
}


def cases(base: Model, settings: AdapterSettings, key: Any) -> Iterator[tuple[str, Model]]:
    """Models of which parts of the weights are the parameters, with their names."""
    for rank, factor in settings.adapters:
        name = f"LoRA, rank {rank}, α/r = {factor:g}"
        yield name, lora(base, rank=rank, alpha=factor * rank, key=key)
    yield "head", freeze(base, head_only)
    yield "last block and head", freeze(base, last_blocks(base.params, 1))
    yield "all weights", base


def base_model() -> Model:
    """The shipped ResNet with a fresh head for five classes."""
    head_key, _ = jax.random.split(jax.random.key(0), 2)
    return from_nnx(fresh_head(load_pretrained(), 5, key=head_key))


def rows(settings: AdapterSettings) -> Iterator[Row]:
    """Forecast and train every case at every rate."""
    key = jax.random.key(0)
    _, adapter_key = jax.random.split(key, 2)
    base = base_model()
    per_class = settings.samples_per_class
    data = select(load_dataset("digits"), classes=range(5, 10), per_class=per_class, key=key)
    options = {"loss": "cross_entropy", "steps": settings.steps}
    for name, model in cases(base, settings, adapter_key):
        asked = {"relinearize": 0, "thresholds": THRESHOLDS, **options}
        first = predict_training_time(*model, data.x, data.y, learning_rate=1e-3, **asked)
        for fraction in settings.fractions:
            rate = fraction * first.max_learning_rate
            found = predict_training_time(*model, data.x, data.y, learning_rate=rate, **asked)
            run = train(*model, data.x, data.y, optimizer=optax.sgd(rate), **options)
            real = {e: int(training_time(run.loss, e)) for e in THRESHOLDS}
            off = {e: abs(found.steps[e] - real[e]) for e in THRESHOLDS}
            yield {
                "trained": name, "rate": fraction,
                "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params)),
                "forecast": [found.steps[e] for e in THRESHOLDS], "real": list(real.values()),
                "error": max(off.values()) / settings.steps,
                "relative": max(off[e] / real[e] for e in THRESHOLDS),
            }  # fmt: skip


def main(arguments: list[str] | None = None) -> list[Row]:
    """Print the table."""
    options = parser(MODULE, __doc__, PRESETS).parse_args(arguments)
    return publish(rows(PRESETS[options.preset]), COLUMNS, store_of(MODULE, options))


if __name__ == "__main__":
    main()
