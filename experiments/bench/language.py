"""Forecasts of fine-tuning a small language model, against the real training.

    python -m experiments.bench.language [--preset smoke|cpu] [--seed 0]

A Llama of bytes (width 64, two blocks) is pre-trained here for a minute or two to continue the
library's own docstrings, code and licence. Then it learns which of the three a window of 48 bytes
is from: by prompt (the logits of three letters at the last byte, no new weights) or with a fresh
head; all weights, low-rank adapters on queries and values as PEFT places them, or the head alone.
Rates are shares of the largest stable one; the columns are those of
``experiments.bench.adapters``.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.bench.accuracy_tasks import Job
from experiments.bench.adapters import THRESHOLDS, Row
from experiments.bench.texts import as_bytes, docs_and_code
from jaxttp import Model, from_nnx, predict_training_time, train, training_time
from jaxttp.models import Architecture, Decoder, freeze, head_only, lora, map_outputs
from jaxttp.models.language.architecture import read_rotary

ROOT = Path(__file__).parents[2]
BYTES, LETTERS = 128, "abc"


@dataclasses.dataclass(frozen=True)
class LanguageSettings:
    """What to measure."""

    width: int = 64
    window: int = 48
    pretraining: int = 1500
    per_class: int = 20
    steps: int = 150
    shares: tuple[float, ...] = (0.1,)
    rank: int = 4
    relinearize: tuple[int | str, ...] = (0, "auto")
    seed: int = 0


PRESETS = {
    "smoke": LanguageSettings(
        width=8, window=8, pretraining=3, per_class=2, steps=6, rank=2, relinearize=(0,)
    ),
    "cpu": LanguageSettings(),
}


def texts() -> list[np.ndarray]:
    """Docstrings, code without them, and the licence, as bytes below 128."""
    docs, code = docs_and_code(sorted((ROOT / "jaxttp").rglob("*.py")))
    whole = ["\n".join(docs), "\n".join(code), (ROOT / "LICENSE").read_text()]
    return [as_bytes(text) for text in whole]


def windows(corpus: np.ndarray, count: int, length: int, draw: np.random.Generator) -> np.ndarray:
    """Random windows of a text."""
    starts = draw.integers(0, len(corpus) - length, count)
    return corpus[starts[:, None] + np.arange(length)]


def pretrained(settings: LanguageSettings, draw: np.random.Generator) -> tuple[Decoder, float]:
    """A network that continues all three, and its last loss a byte."""
    shape = Architecture(
        "llama", BYTES, width=settings.width, depth=2, heads=4, hidden=2 * settings.width,
        length=settings.window, kv_heads=2, activation="silu",
        rotary=read_rotary({}, settings.width // 4, settings.window), rms_norm=True, gated=True,
        biases=(), outputs=len(LETTERS),
    )  # fmt: skip
    network = Decoder(shape, head="language_model", rngs=nnx.Rngs(settings.seed))
    graph, params = nnx.split(network)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, settings.pretraining))

    def loss(params: Any, ids: Any) -> Any:
        logits = nnx.merge(graph, params)(ids)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    @jax.jit
    def step(params: Any, state: Any, ids: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, ids)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    corpora, state, value = texts(), optimizer.init(params), jnp.nan
    for _ in range(settings.pretraining):
        ids = [windows(corpus, 8, settings.window, draw) for corpus in corpora]
        params, state, value = step(params, state, np.concatenate(ids))
    return nnx.merge(graph, params), float(value)


def cases(network: Decoder, settings: LanguageSettings) -> Iterator[tuple[str, Model]]:
    """Models of which parts of the weights are the parameters, with their names."""
    key, rank = jax.random.key(settings.seed), settings.rank
    letters = jnp.array([ord(letter) for letter in LETTERS])
    prompted = map_outputs(from_nnx(network), lambda f: f[:, -1, letters])
    headed = Decoder(network.shape, head="classification", rngs=nnx.Rngs(settings.seed))
    for part in ("embed", "blocks", "norm"):
        setattr(headed, part, getattr(network, part))
    base = from_nnx(headed)
    adapters: dict[str, Any] = {"rank": rank, "key": key, "targets": ["q_proj", "v_proj"]}
    yield "prompt, all weights", prompted
    yield f"prompt, LoRA of rank {rank} on q, v", lora(prompted, **adapters)
    yield f"prompt, LoRA of rank {rank} on all kernels", lora(prompted, rank=rank, key=key)
    yield "fresh head alone", freeze(base, head_only)
    yield f"fresh head, LoRA of rank {rank} on q, v", lora(base, **adapters, also=head_only)
    yield "fresh head, all weights", base


def compare(settings: LanguageSettings) -> Iterator[Row]:
    """Pre-train, then forecast and train every case at every rate."""
    draw = np.random.default_rng(settings.seed)
    network, last = pretrained(settings, draw)
    print(f"pre-trained to {last / np.log(2):.2f} bits a byte\n")
    print("| trained | parameters | η/η_max | rebuilds | forecast | real | error | relative |")
    print("|---|---|---|---|---|---|---|---|")
    parts = [windows(one, settings.per_class, settings.window, draw) for one in texts()]
    labels = np.repeat(np.arange(len(parts)), settings.per_class)
    options: dict[str, Any] = {"loss": "cross_entropy", "steps": settings.steps}
    for name, model in cases(network, settings):
        data = Job(model, np.concatenate(parts), labels)
        size = sum(leaf.size for leaf in jax.tree.leaves(model.params))
        first = predict_training_time(
            *model, data.x, data.y, learning_rate=1e-3, relinearize=0, **options
        )
        for share in settings.shares:
            rate = share * first.max_learning_rate
            run = train(*model, data.x, data.y, optimizer=optax.sgd(rate), **options)
            real = {e: int(training_time(run.loss, e)) for e in THRESHOLDS}
            for rebuilds in settings.relinearize:
                found = predict_training_time(
                    *model, data.x, data.y, learning_rate=rate, relinearize=rebuilds,
                    thresholds=THRESHOLDS, **options,
                )  # fmt: skip
                yield Row(name, size, share, rebuilds, found.steps, real, settings.steps)
                ends = f"{found.loss[-1]:.3f}, real {run.loss[-1]:.3f} from {run.loss[0]:.3f}"
                print(f"<!-- end loss: forecast {ends} -->")


def main(arguments: list[str] | None = None) -> list[Row]:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="of weights and windows")
    given = parser.parse_args(arguments)
    settings = dataclasses.replace(PRESETS[given.preset], seed=given.seed)
    rows = []
    for row in compare(settings):
        rows.append(row)
        print(row, flush=True)
    return rows


if __name__ == "__main__":
    main()
