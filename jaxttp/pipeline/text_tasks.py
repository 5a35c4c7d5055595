"""A language model with adapters, and a text cut into what trains and what is watched."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import check_integer
from jaxttp._core.types import Model, count, take
from jaxttp.adapters import as_rows, from_nnx
from jaxttp.data import load_corpus, load_tokenizer
from jaxttp.dynamics.batches import batch_indices
from jaxttp.forecast.stale_gradients import FORWARD, POINTS, affordable, watcher
from jaxttp.losses import encode_targets
from jaxttp.models import adapter_targets, load_transformer, lora
from jaxttp.models.language import Decoder, Encoder
from jaxttp.models.language.tokens import read_tokens
from jaxttp.pipeline.settings import LoraSettings, Settings, check_training, check_unused
from jaxttp.pipeline.tasks import is_language_folder
from jaxttp.training import TrainingStep


@dataclasses.dataclass(frozen=True)
class TextDefaults:
    """Numbers of forecasts on text, of the runs of `experiments.bench.lora`.

    Attributes:
        share: of the training's gradients that a forecast may take, where it is not said.
        length: tokens of a sequence where it is not said, or as many as the network takes.
        watched: sequences that are watched at most.
        held_out: fraction of the text that they are at most.
        looking: fraction of a forecast's budget that may go into looking at them.
        looks: at them during a real training run, beside the start.
        measured: weights of the largest network whose forecasts were compared with real runs.
        again: times that a run may see a text before a warning: overfitting is not forecast.
    """

    share: float = 0.2
    length: int = 128
    watched: int = 96
    held_out: float = 0.1
    looking: float = 0.25
    looks: int = 60
    measured: int = 250_000
    again: float = 1.5


TEXT = TextDefaults()
_UNUSED = (
    "data", "samples_per_class", "loss", "relinearize", "sketch_dim", "head_scale", "classes",
    "hidden", "weights", "image_size", "max_length", "trainable", "rank", "split", "folder",
    "target_error", "metric", "label", "fill", "drop_missing", "one_hot", "drop",
    "mesh",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class TextTask:
    """What is fine-tuned, on what.

    Attributes:
        model: the network, its adapters as its parameters.
        x: sequences that train (N, T).
        y: what follows their tokens.
        x_watched: sequences of the same text that no batch is of (M, T).
        y_watched: what follows them.
        tokens: of the whole text.
        weights: of the network, without the adapters.
        description: all of it in words.
    """

    model: Model
    x: np.ndarray
    y: np.ndarray
    x_watched: np.ndarray
    y_watched: np.ndarray
    tokens: int
    weights: int
    description: str

    def __str__(self) -> str:
        return self.description

    __repr__ = __str__


def check_text_settings(settings: Settings, *, given: bool = False) -> None:
    """Refuse what a fine-tuning on text has no use for, or is out of range.

    Args:
        settings: how to train.
        given: whether the network is an object at hand, and `model` no folder's name.

    Raises:
        ValueError: settings of other tasks, no folder, no batches.

    Example:
        >>> check_text_settings(Settings(model="gone"))
        Traceback (most recent call last):
        ...
        ValueError: model='gone' is no folder on this machine; a text needs a language model, a ...
    """
    check_unused(settings, _UNUSED, "a text with a language model has no such thing")
    if given:
        check_unused(settings, ("model",), "the network is given as an object")
    elif not is_language_folder(settings.model):
        raise ValueError(
            f"model={settings.model!r} is no folder on this machine; a text needs a language "
            "model, a Hugging Face folder as save_pretrained writes it."
        )
    if settings.batch_size is None:
        raise ValueError("batch_size is needed with a text: sequences a step, such as 16.")
    check_training(settings)
    if settings.total_samples is not None:
        check_integer("total_samples", settings.total_samples, at_least=1)
    budget_share(settings)


def budget_share(settings: Settings) -> float:
    """The share of the training's gradients that a forecast may take.

    Args:
        settings: of which the budget counts.

    Returns:
        A share in (0, 1).

    Raises:
        ValueError: it is none.

    Example:
        >>> budget_share(Settings()), budget_share(Settings(budget=0.1))
        (0.2, 0.1)
    """
    share = TEXT.share if settings.budget == "auto" else settings.budget
    if not isinstance(share, int | float) or not 0 < share < 1:
        raise ValueError(f"budget={share!r} must be between 0 and 1 with a text, or auto.")
    return float(share)


def build_text_task(
    settings: Settings, *, text: str, adapters: LoraSettings, sequence_length: int | None = None
) -> TextTask:
    """The network with its adapters, and the sequences.

    A tenth of them, at most 96, is drawn to be watched; fewer where looking at them would take
    more than a quarter of what the forecast may cost.

    Args:
        settings: model, batches, steps, budget and seed count.
        text: a file, or a folder of .txt, .md and .py.
        adapters: which.
        sequence_length: T; 128, or as many as the network takes, when None.

    Returns:
        A `TextTask`.

    Raises:
        ValueError: as `check_text_settings`; no tokenizer, an encoder, ids that the network does
            not have, a text too short for a batch, modules that are not there.
        ImportError: the extra `text` is not installed.
    """
    check_text_settings(settings)
    folder = str(settings.model)
    try:
        tokenizer = load_tokenizer(folder)
        loaded = load_transformer(folder, head="language_model")
    except FileNotFoundError as problem:
        raise ValueError(f"model: {problem}") from problem
    network = check_decoder(loaded, f"model={folder!r}")
    most = network.shape.length
    length = min(TEXT.length, most) if sequence_length is None else sequence_length
    check_integer("sequence_length", length, at_least=1, at_most=most,
                  remedy=f"The network has {most} positions.")  # fmt: skip
    corpus = load_corpus(text, tokenizer, length=length)
    ids = np.concatenate([corpus.x, corpus.y[:, -1:]], axis=1)
    name = Path(folder).resolve().name, Path(text).name
    return split_task(settings, network, ids, adapters=adapters, tokens=corpus.tokens, name=name)


def check_decoder(network: object, given: str) -> Decoder:
    """The network, or a refusal of what does not foresee the next token.

    Args:
        network: of a folder, or a user's.
        given: how the user said it.

    Raises:
        TypeError: no decoder with the head of a language model.
        ValueError: an encoder.
    """
    if isinstance(network, Encoder):
        raise ValueError(
            f"{given} is an encoder ({network.shape.family}), which sees what it would "
            "have to foresee; next-token loss needs a decoder, such as GPT-2 or Llama."
        )
    if not isinstance(network, Decoder) or network.kind != "language_model":
        raise TypeError(
            f"{given} must be a jaxttp.models.Decoder with head='language_model'; got "
            f"{type(network).__name__}. Others: jaxttp.forecast.held_forecast takes any function."
        )
    return network


def split_task(
    settings: Settings, network: Decoder, ids: np.ndarray, *, adapters: LoraSettings, tokens: int,
    name: tuple[str, str],
) -> TextTask:  # fmt: skip
    """The network with its adapters, and of the sequences those that are watched.

    Args:
        settings: batches, steps, budget and seed count.
        network: without adapters.
        ids: tokens of the sequences, one more than the network sees (N, T + 1).
        adapters: which.
        tokens: of the whole text.
        name: of the network, and of the text.

    Returns:
        A `TextTask`.

    Raises:
        ValueError: as `build_text_task`.
    """
    share, shape = budget_share(settings), network.shape
    batch_size, steps = settings.batch_size or 1, settings.steps
    x, y = ids[:, :-1], ids[:, 1:]
    for part in (x, y):
        read_tokens(part, vocabulary=shape.vocabulary, length=shape.length, segments=0)
    count, length = x.shape
    payable = int(TEXT.looking * share * steps * batch_size / (FORWARD * POINTS))
    watched = max(1, min(TEXT.watched, int(TEXT.held_out * count), payable))
    if count - watched < batch_size:
        raise ValueError(
            f"text: {name[1]} makes {count} sequences of {length} tokens, of which {watched} are "
            f"held out; batch_size={batch_size} needs {batch_size + watched}. Give a longer text, "
            "shorter sequences or smaller batches."
        )
    beside = FORWARD * POINTS * watched / batch_size
    affordable(share, steps, beside, batch_size, name="budget")
    split_key, adapter_key = jax.random.split(jax.random.key(settings.seed))
    base = from_nnx(network)
    weights = sum(leaf.size for leaf in jax.tree.leaves(base.params))
    try:
        model = lora(
            base, rank=adapters.rank, alpha=adapters.alpha, rslora=adapters.rslora,
            key=adapter_key, targets=adapter_targets(network, adapters.modules),
        )  # fmt: skip
    except ValueError as problem:
        raise ValueError(f"lora: {problem}") from problem
    order = np.asarray(jax.random.permutation(split_key, np.arange(count, dtype=np.int32)))
    rest, held = np.sort(order[watched:]), np.sort(order[:watched])
    trained = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    words = (
        f"{name[0]} ({shape.family}, {weights:,} weights), "
        f"{adapters.words()} ({trained:,} weights), on {name[1]}: {tokens:,} tokens "
        f"in {count:,} sequences of {length}, {watched} of them held out and watched"
    )
    return TextTask(model, x[rest], y[rest], x[held], y[held], tokens, weights, words)


class WatchedRun(NamedTuple):
    """What really happened.

    Attributes:
        loss: of what is watched (T + 1,), lines between the points.
        at: the points (P,), steps.
        seconds: of the steps alone: no compilation, no looking.
    """

    loss: np.ndarray
    at: np.ndarray
    seconds: float

    @property
    def finite(self) -> bool:
        """Whether every loss is finite."""
        return bool(np.all(np.isfinite(self.loss)))


def train_watched(
    model: Model, x: Any, y: Any, x_watched: Any, y_watched: Any, *,
    optimizer: optax.GradientTransformation, steps: int, batch_size: int, key: Array,
    progress: Callable[[int, int], None] | None = None,
) -> WatchedRun:  # fmt: skip
    """Train by cross-entropy for real, and look at other samples some sixty times.

    Args:
        model: network and weights.
        x: samples (N, ...).
        y: their labels.
        x_watched: samples that are looked at (M, ...).
        y_watched: their labels.
        optimizer: any optax transformation of gradients alone.
        steps: T.
        batch_size: B.
        key: draws the batches.
        progress: called with (steps done, steps in all).

    Returns:
        A `WatchedRun`.
    """
    params, (rows, outputs) = model.params, as_rows(*model, x)
    targets, loss = encode_targets("cross_entropy", y, outputs)
    seen = as_rows(*model, x_watched)[1]
    watched, loss_watched = encode_targets("cross_entropy", y_watched, seen)
    look = watcher(rows, loss_watched, x_watched, watched, batch_size)
    indices = np.asarray(batch_indices(key, count(x), batch_size, steps))
    at = np.unique(np.round(np.linspace(0, steps, min(TEXT.looks, steps) + 1)).astype(int))
    state, found, seconds = optimizer.init(params), [], 0.0
    step = TrainingStep(rows, loss, optimizer)
    step = step.compile(params, state, take(x, indices[0]), targets[indices[0]])
    for t in range(steps + 1):
        if t in at:
            found.append(look(params))
        if t == steps:
            break
        batch = take(x, indices[t]), targets[indices[t]]
        begun = time.perf_counter()
        params, state, *_ = jax.block_until_ready(step(params, state, *batch))
        seconds += time.perf_counter() - begun
        if progress is not None:
            progress(t + 1, steps)
    return WatchedRun(np.interp(np.arange(steps + 1), at, found), at, seconds)
