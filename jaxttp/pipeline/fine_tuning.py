"""How long fine-tuning a language model on a text takes: tokens, steps, seconds."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import check_integer, check_used
from jaxttp._core.process import versions
from jaxttp._core.progress import readable_time
from jaxttp._core.results import RESULT, plain_numbers, wrapped
from jaxttp._core.types import Model, Progress, count, take
from jaxttp.adapters import as_rows, from_nnx
from jaxttp.data import load_corpus, load_tokenizer
from jaxttp.dynamics.batches import batch_indices
from jaxttp.forecast import StaleGradientForecast, stale_gradient_forecast
from jaxttp.forecast.stale_gradients import FORWARD, POINTS, affordable, watcher
from jaxttp.losses import encode_targets
from jaxttp.losses.rule import Curves, Rule, Target, reach, target_label
from jaxttp.models import adapter_targets, load_transformer, lora
from jaxttp.models.language import Decoder, Encoder
from jaxttp.models.language.tokens import read_tokens
from jaxttp.pipeline.settings import (
    LoraSettings,
    Settings,
    check_training,
    check_unused,
    hyperparameters,
)
from jaxttp.pipeline.tasks import is_language_folder
from jaxttp.training import StepTime, TrainingStep, time_step


@dataclasses.dataclass(frozen=True)
class TextDefaults:
    """Constants of forecasts on text, from the runs of `experiments.bench.lora`.

    Attributes:
        fraction: default budget, as a fraction of the training's gradients.
        length: default tokens of a sequence, where the network takes as many.
        watched: most held-out sequences.
        held_out: largest fraction of the text that is held out.
        looking: fraction of the budget for evaluating the held-out sequences.
        looks: evaluations during a real training run, besides the start.
        measured: weights of the largest network whose forecasts were compared with real runs.
        again: epochs from which on a warning is given: overfitting is not forecast.
    """

    fraction: float = 0.2
    length: int = 128
    watched: int = 96
    held_out: float = 0.1
    looking: float = 0.25
    looks: int = 60
    measured: int = 250_000
    again: float = 1.5


TEXT = TextDefaults()
_UNUSED = (
    "data", "samples_per_class", "loss", "relinearize", "sketch_dim", "classes",
    "hidden", "weights", "image_size", "max_length", "trainable", "rank", "split", "folder",
    "target_error", "metric", "label", "mesh",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class TextTask:
    """A network with adapters, and the sequences of a text.

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

    def __repr__(self) -> str:
        return self.description


def check_text_settings(settings: Settings, *, is_object: bool = False) -> None:
    """Refuse what a fine-tuning on text has no use for, or is out of range.

    Args:
        settings: how to train.
        is_object: whether the network is an object, and `model` no folder's name.

    Raises:
        ValueError: settings of other tasks, no folder, no batches.

    Example:
        >>> check_text_settings(Settings(model="gone"))
        Traceback (most recent call last):
        ...
        ValueError: model='gone' is no folder on this machine; a text needs a language model, a ...
    """
    check_unused(settings, _UNUSED, "a text with a language model has no such thing")
    if is_object:
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
    budget_fraction(settings)


def budget_fraction(settings: Settings) -> float:
    """The fraction of the training's gradients that a forecast may take.

    Args:
        settings: of which the budget counts.

    Returns:
        A fraction in (0, 1).

    Raises:
        ValueError: it is none.

    Example:
        >>> budget_fraction(Settings()), budget_fraction(Settings(budget=0.1))
        (0.2, 0.1)
    """
    fraction = TEXT.fraction if settings.budget == "auto" else settings.budget
    if not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise ValueError(f"budget={fraction!r} must be between 0 and 1 with a text, or auto.")
    return float(fraction)


def read_text(
    folder: str, text: str, sequence_length: int | None = None
) -> tuple[Decoder, np.ndarray, tuple[str, str]]:
    """A network, the sequences of a text as its tokens (N, T + 1), and the names of both.

    Args:
        folder: a Hugging Face folder.
        text: a file, or a folder of .txt, .md and .py.
        sequence_length: T; 128, or as many as the network takes, when None.

    Raises:
        ValueError: an encoder, a text too short for a sequence.
        FileNotFoundError: no tokenizer, or no weights.
        ImportError: the extra `text` is not installed.
    """
    tokenizer = load_tokenizer(folder)
    network = check_decoder(load_transformer(folder, head="language_model"), f"model={folder!r}")
    most = network.shape.length
    length = min(TEXT.length, most) if sequence_length is None else sequence_length
    hint = f"The network has {most} positions."
    check_integer("sequence_length", length, at_least=1, at_most=most, hint=hint)
    corpus = load_corpus(text, tokenizer, length=length)
    ids = np.concatenate([corpus.x, corpus.y[:, -1:]], axis=1)
    return network, ids, (Path(folder).resolve().name, Path(text).name)


def check_decoder(network: object, name: str) -> Decoder:
    """The network, or a refusal of one that does not predict the next token.

    Args:
        network: of a folder, or a user's.
        name: how messages call it.

    Raises:
        TypeError: no decoder with the head of a language model.
        ValueError: an encoder.
    """
    if isinstance(network, Encoder):
        raise ValueError(
            f"{name} is an encoder ({network.shape.family}), which sees what it would "
            "have to predict; next-token loss needs a decoder, such as GPT-2 or Llama."
        )
    if not isinstance(network, Decoder) or network.kind != "language_model":
        raise TypeError(
            f"{name} must be a jaxttp.models.Decoder with head='language_model'; got "
            f"{type(network).__name__}. For any function: "
            "jaxttp.forecast.stale_gradient_forecast."
        )
    return network


def split_task(
    settings: Settings, network: Decoder, ids: np.ndarray, *, adapters: LoraSettings,
    names: tuple[str, str],
) -> TextTask:  # fmt: skip
    """The network with its adapters, and the sequences, some of them held out.

    10 % of them, at most 96, are drawn to be held out; fewer where evaluating them would take more
    than 25 % of the budget.

    Args:
        settings: batches, steps, budget and seed count.
        network: without adapters.
        ids: tokens of the sequences, one more than the network sees (N, T + 1).
        adapters: which.
        names: of the network, and of the text.

    Returns:
        A `TextTask`.

    Raises:
        ValueError: ids that the network does not have, a text too short for a batch, modules that
            are not there.
    """
    fraction, shape = budget_fraction(settings), network.shape
    batch_size, steps = settings.batch_size or 1, settings.steps
    x, y = ids[:, :-1], ids[:, 1:]
    for part in (x, y):
        read_tokens(part, vocabulary=shape.vocabulary, length=shape.length, segments=0)
    count, length = x.shape
    payable = int(TEXT.looking * fraction * steps * batch_size / (FORWARD * POINTS))
    watched = max(1, min(TEXT.watched, int(TEXT.held_out * count), payable))
    if count - watched < batch_size:
        raise ValueError(
            f"text: {names[1]} makes {count} sequences of {length} tokens, of which {watched} are "
            f"held out; batch_size={batch_size} needs {batch_size + watched}. Give a longer text, "
            "shorter sequences or smaller batches."
        )
    evaluations = FORWARD * POINTS * watched / batch_size
    affordable(fraction, steps, evaluations, batch_size, name="budget")
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
    train, held = np.sort(order[watched:]), np.sort(order[:watched])
    trained = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    description = (
        f"{names[0]} ({shape.family}, {weights:,} weights), "
        f"{adapters} ({trained:,} weights), on {names[1]}: {y.size:,} tokens "
        f"in {count:,} sequences of {length}, {watched} of them held out and watched"
    )
    return TextTask(model, x[train], y[train], x[held], y[held], y.size, weights, description)


class WatchedRun(NamedTuple):
    """A real training run.

    Attributes:
        loss: of the held-out samples (T + 1,), interpolated linearly.
        at: the steps at which it was evaluated (P,).
        seconds: of the steps alone, without compilation and evaluations.
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
    """Train by cross-entropy, and evaluate other samples some sixty times.

    Args:
        model: network and weights.
        x: samples (N, ...).
        y: their labels.
        x_watched: samples that are evaluated (M, ...).
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
    outputs_watched = as_rows(*model, x_watched)[1]
    watched, loss_watched = encode_targets("cross_entropy", y_watched, outputs_watched)
    look = watcher(rows, loss_watched, x_watched, watched, batch_size)
    indices = np.asarray(batch_indices(key, count(x), batch_size, steps))
    at = np.unique(np.round(np.linspace(0, steps, min(TEXT.looks, steps) + 1)).astype(int))
    state, losses, seconds = optimizer.init(params), [], 0.0
    step = TrainingStep(rows, loss, optimizer)
    step = step.compile(params, state, take(x, indices[0]), targets[indices[0]])
    for t in range(steps + 1):
        if t in at:
            losses.append(look(params))
        if t == steps:
            break
        batch = take(x, indices[t]), targets[indices[t]]
        begun = time.perf_counter()
        params, state, *_ = jax.block_until_ready(step(params, state, *batch))
        seconds += time.perf_counter() - begun
        if progress is not None:
            progress(t + 1, steps)
    return WatchedRun(np.interp(np.arange(steps + 1), at, losses), at, seconds)


# --- the forecast --------------------------------------------------------------------------------


class ReachedTarget(NamedTuple):
    """When one threshold or target is reached.

    Attributes:
        words: what it is.
        step: predicted, -1 for never.
        earliest: by the forecast's uncertainty, likewise; None where `FineTuning.warnings` doubts
            it without saying by how much.
        latest: likewise.
        tokens: seen until then; None for never.
        seconds: likewise.
        real_step: of the real training, None without one.
    """

    words: str
    step: int
    earliest: int | None
    latest: int | None
    tokens: int | None
    seconds: float | None
    real_step: int | None

    def __str__(self) -> str:
        bounds = "" if self.earliest is None else f" ({self.earliest} to {self.latest})"
        when = "not reached" if self.earliest is not None else "not reached, see warnings"
        if self.step >= 0:
            seconds = readable_time(self.seconds or 0.0)
            when = f"step {self.step}{bounds}, {self.tokens:,} tokens, {seconds}"
        if self.real_step is not None:
            when += f"; real {self.real_step if self.real_step >= 0 else 'not reached'}"
        return f"{self.words}: {when}"


@dataclasses.dataclass(frozen=True)
class FineTuning:
    """The forecast of fine-tuning on a text, and what really happened where that was asked for.

    Attributes:
        settings: how to train.
        adapters: what trains.
        task: the network and the sequences.
        found: the loss of the sequences that are held out.
        step_time: the measured time of one training step on this device.
        forecast_seconds: that the forecast took here, compilation included.
        run: the real training, or None.
    """

    settings: Settings
    adapters: LoraSettings
    task: TextTask
    found: StaleGradientForecast
    step_time: StepTime
    forecast_seconds: float
    run: WatchedRun | None = None

    plot, _repr_html_, __repr__ = RESULT

    @property
    def batch_size(self) -> int:
        """B, sequences a step."""
        return self.settings.batch_size or 1

    @property
    def tokens_a_step(self) -> int:
        """B T."""
        return self.batch_size * self.task.x.shape[1]

    @property
    def sequences(self) -> int:
        """That the training draws from: those of the text, or of all that it is a sample of."""
        return self.settings.total_samples or len(self.task.x)

    @property
    def epochs(self) -> float:
        """How often the training sees every sequence."""
        return self.settings.steps * self.batch_size / self.sequences

    @property
    def epoch_seconds(self) -> float:
        """Seconds that seeing every sequence once takes."""
        return self.sequences / self.batch_size * self.step_time.seconds

    @property
    def targets(self) -> tuple[ReachedTarget, ...]:
        """Fractions of the loss decrease, then losses to get below."""
        thresholds, losses = self.settings.thresholds, self.settings.targets()
        forecast, run = self.found, self.run
        steps: dict[Any, int] = {**forecast.read(thresholds)}
        steps |= reach(Curves(forecast.loss), losses, reached=not forecast.diverged)
        real: dict[Any, int] = {}
        if run is not None:
            fell = run.finite and bool(run.loss[-1] < run.loss[0])
            real |= Rule(thresholds).read(run.loss, None, reached=fell)
            real |= reach(Curves(run.loss), losses, reached=run.finite)
        reached = []
        for key, step in steps.items():
            if isinstance(key, Target):
                label, level, off = key.words(), key.value, 0.0
            else:
                label, level = target_label(key, "relative"), forecast.level(key)
                off = (1 - key) * float(forecast.uncertainty[-1])
            ends = forecast.between(level, off) if self.is_bounded else (None, None)
            tokens = step * self.tokens_a_step if step >= 0 else None
            seconds = step * self.step_time.seconds if step >= 0 else None
            reached.append(ReachedTarget(label, step, *ends, tokens, seconds, real.get(key)))
        return tuple(reached)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reliability warnings, a sentence each."""
        return (() if self.found.warnings is None else (self.found.warnings,)) + self._limits

    @property
    def is_bounded(self) -> bool:
        """See `StaleGradientForecast.is_bounded`."""
        return self.found.is_bounded and not self._limits

    @property
    def _limits(self) -> tuple[str, ...]:
        """Effects that the forecast does not model."""
        warnings, samples = [], len(self.task.x)
        drawn = len(self.found.refresh_steps) * self.batch_size
        if self.epochs > TEXT.again:
            warnings.append(
                f"the training sees every sequence {self.epochs:.1f} times, the forecast's path "
                f"{drawn / samples:.1f} times: overfitting is not forecast"
            )
        if drawn > samples and self.settings.total_samples is not None:
            warnings.append(
                f"the sample has {samples:,} sequences and the path draws {drawn:,}: it overfits "
                "to what the training sees once; the correction is an estimate, and a larger "
                "sample is more accurate"
            )
        if self.task.weights > TEXT.measured:
            warnings.append(
                "forecasts of this kind were compared with real training runs of networks of up to "
                f"{TEXT.measured:,} weights alone; this one has {self.task.weights:,}"
            )
        return tuple(warnings)

    def __str__(self) -> str:
        forecast, steps = self.found, self.settings.steps
        of = "" if self.settings.total_samples is None else ", of which the text is a sample"
        total = f"{readable_time(steps * self.step_time.seconds)}, loss {forecast.loss[-1]:.4g}"
        if self.run is not None:
            total += f"; real {readable_time(self.run.seconds)}, loss {self.run.loss[-1]:.4g}"
        lines = [
            str(self.task),
            f"{steps:,} steps see {steps * self.tokens_a_step:,} tokens, {self.epochs:.2g} times "
            f"the {self.sequences:,} sequences that train{of}; once takes "
            f"{readable_time(self.epoch_seconds)}",
            *(f"  {target}" for target in self.targets),
            f"  all steps: {total}",
            f"the forecast cost {100 * forecast.fraction:.2g} % of the training's gradients "
            f"({len(forecast.refresh_steps)} of {steps:,} steps), "
            f"{readable_time(self.forecast_seconds)} here with compilation",
        ]
        lines += [f"warning: {line}" for line in self.warnings]
        return "\n".join(wrapped(line, 4) for line in lines)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        forecast, run, step_seconds = self.found, self.run, self.step_time.seconds
        real = None
        if run is not None:
            losses = plain_numbers(run.loss[run.at])
            real = {"at": run.at.tolist(), "loss": losses, "seconds": run.seconds}
        return {
            "task": self.task.description,
            "hyperparameters": dataclasses.asdict(self.settings) | {"loss": "cross_entropy"},
            "lora": dataclasses.asdict(self.adapters),
            "horizon": self.settings.steps,
            "tokens_a_step": self.tokens_a_step, "tokens": self.task.tokens,
            "sequences": self.sequences,
            "epochs": self.epochs, "epoch_seconds": self.epoch_seconds,
            "loss": plain_numbers(forecast.loss),
            "loss_uncertainty": plain_numbers(forecast.uncertainty) if self.is_bounded else None,
            "targets": [target._asdict() for target in self.targets],
            "stable": not forecast.diverged,
            "warnings": list(self.warnings),
            "step_seconds": step_seconds, "seconds": self.settings.steps * step_seconds,
            "forecast": {
                "fraction": forecast.fraction, "gradients": len(forecast.refresh_steps),
                "seconds": self.forecast_seconds,
            },
            "versions": versions(),
            "verified": real,
        }  # fmt: skip


def fine_tuning_task(
    settings: Settings,
    *,
    text: str,
    adapters: LoraSettings | None = None,
    sequence_length: int | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> FineTuning:
    """Forecast the fine-tuning of a language model on a text by LoRA, with next-token loss.

    Args:
        settings: the model's folder, optimizer, rate, schedule, batches of sequences, steps,
            thresholds, target losses, seed; the budget is a fraction of the training's gradients
            (0.2 where it is left to the library), and `total_samples` the sequences of a corpus of
            which the text is a sample.
        text: a file of text, or a folder of .txt, .md and .py.
        adapters: which; the usual ones when None.
        sequence_length: T, tokens; 128, or as many as the network takes, when None.
        verify: also train for real, after the forecast.
        progress: called with (stage, done, total).

    Returns:
        A `FineTuning`.

    Raises:
        ValueError: as `read_text`, `split_task` and `stale_gradient_forecast`; `total_samples` with
            `verify`, or fewer than the text has.
        ImportError: the extra `text` is not installed.

    Example:
        >>> fine_tuning_task(Settings(model="gone"), text="corpus.txt")
        Traceback (most recent call last):
        ...
        ValueError: model='gone' is no folder on this machine; a text needs a language model, a ...
    """
    check_text_settings(settings)
    if progress is not None:
        progress("reading the text", 0, 1)
    network, ids, names = read_text(str(settings.model), text, sequence_length)
    return _forecast(settings, network, ids, names, adapters, verify, progress)


def fine_tuning_of(
    settings: Settings,
    network: Any,
    ids: Any,
    *,
    adapters: LoraSettings | None = None,
    names: tuple[str, str] = ("the network", "the text"),
    verify: bool = False,
    progress: Progress | None = None,
) -> FineTuning:
    """As `fine_tuning_task`, with a network and sequences as objects.

    Args:
        settings: as there, without a `model`.
        network: a decoder with the head "language_model", without adapters.
        ids: tokens of sequences, one more than the network sees at a time (N, T + 1).
        adapters: which; the usual ones when None.
        names: of the network and of the text, for the words.
        verify: also train for real, after the forecast.
        progress: called with (stage, done, total).

    Returns:
        A `FineTuning`.

    Raises:
        TypeError: no such network.
        ValueError: as `fine_tuning_task`; ids that are no tokens of the network.

    Example:
        >>> fine_tuning_of(Settings(batch_size=4), None, [[1, 2, 3]])
        Traceback (most recent call last):
        ...
        TypeError: network must be a jaxttp.models.Decoder with head='language_model'; got ...
    """
    check_text_settings(settings, is_object=True)
    decoder, ids = check_decoder(network, "network"), np.asarray(ids)
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"ids must be tokens (N, T + 1), T of at least 1; got {ids.shape}.")
    return _forecast(settings, decoder, ids, names, adapters, verify, progress)


def _forecast(
    settings: Settings, network: Decoder, ids: np.ndarray, names: tuple[str, str],
    adapters: LoraSettings | None, verify: bool, progress: Progress | None,
) -> FineTuning:  # fmt: skip
    """Forecast, time of a step, and the real training where that is asked for."""
    tell, adapters = progress or (lambda *_: None), adapters or LoraSettings()
    total = settings.total_samples
    hint = "verify=True would train on the sample; leave one of the two out"
    check_used("total_samples", total, not verify, hint)
    task = split_task(settings, network, ids, adapters=adapters, names=names)
    if total is not None and total < len(task.x):
        raise ValueError(
            f"total_samples={total} is fewer than the {len(task.x)} sequences of "
            "the text that train; it counts those of a corpus of which the text is a sample."
        )
    keys = jax.random.split(jax.random.key(settings.seed), 2)
    setting = hyperparameters(settings)
    common: dict[str, Any] = {"optimizer": setting.optimizer(), "batch_size": setting.batch_size}
    watched = {"x_watched": task.x_watched, "y_watched": task.y_watched, "steps": settings.steps}
    tell("stale gradients", 0, 1)
    begun = time.perf_counter()
    forecast = stale_gradient_forecast(
        *task.model, task.x, task.y, key=keys[0], fraction=budget_fraction(settings),
        total_samples=total, **watched, **common,
    )  # fmt: skip
    spent = time.perf_counter() - begun
    tell("timing a step", 0, 1)
    step_time = time_step(*task.model, task.x, task.y, loss="cross_entropy", **common)
    run = None
    if verify:
        run = train_watched(
            task.model, task.x, task.y, key=keys[1],  # another draw of batches than the forecast's
            progress=lambda i, n: tell("real training", i, n), **watched, **common,
        )  # fmt: skip
    return FineTuning(settings, adapters, task, forecast, step_time, spent, run)
