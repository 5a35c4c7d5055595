"""How long fine-tuning a language model on a text takes: tokens, steps, seconds, money."""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from jaxttp._core.checks import check_number, check_used
from jaxttp._core.process import versions
from jaxttp._core.results import RESULT, plain_number, plain_numbers, wrapped
from jaxttp._core.types import Progress
from jaxttp.forecast import HeldForecast, WallClock, held_forecast, wall_clock
from jaxttp.forecast.wall_clock import readable_time
from jaxttp.losses.rule import Curves, Rule, reach
from jaxttp.pipeline.settings import LoraSettings, Settings, make_optimizer
from jaxttp.pipeline.text_tasks import (
    TEXT,
    TextTask,
    WatchedRun,
    budget_share,
    build_text_task,
    check_decoder,
    check_text_settings,
    split_task,
    train_watched,
)


@dataclasses.dataclass(frozen=True)
class Goal:
    """When one goal is reached.

    Attributes:
        words: what it is.
        level: the loss to get below.
        step: foreseen, -1 for never.
        earliest: by the forecast's uncertainty, likewise; None where `FineTuning.trust` doubts it
            without saying by how much.
        latest: likewise.
        tokens: seen until then; None for never.
        seconds: likewise.
        cost: likewise, None without a price.
        real_step: of the real training, None without one.
    """

    words: str
    level: float
    step: int
    earliest: int | None
    latest: int | None
    tokens: int | None
    seconds: float | None
    cost: float | None
    real_step: int | None


@dataclasses.dataclass(frozen=True)
class FineTuning:
    """A fine-tuning on a text, foreseen, and what really happened where that was asked for.

    Attributes:
        settings: how to train.
        adapters: what trains.
        task: the network and the sequences.
        found: the loss of the sequences that are held out.
        clock: seconds and money.
        forecast_seconds: that the forecast took here, compilation included.
        price_per_hour: of the device; None where it is not known.
        run: the real training, or None.
    """

    settings: Settings
    adapters: LoraSettings
    task: TextTask
    found: HeldForecast
    clock: WallClock
    forecast_seconds: float
    price_per_hour: float | None = None
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
    def epoch(self) -> tuple[float, float | None]:
        """Seconds and money that seeing every sequence once takes."""
        seconds = self.sequences / self.batch_size * self.clock.step_seconds
        return seconds, self._money(seconds)

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Shares of the drop, then losses to get below."""
        thresholds, targets = self.settings.thresholds, self.settings.targets()
        found, run = self.found, self.run
        steps = found.read(thresholds)
        below = reach(Curves(found.loss), targets, reached=not found.diverged)
        real: dict[Any, int] = {}
        if run is not None:
            fell = run.finite and bool(run.loss[-1] < run.loss[0])
            real |= Rule(thresholds).read(run.loss, run.loss, reached=fell)
            real |= reach(Curves(run.loss), targets, reached=run.finite)
        rows = [
            self._goal(
                f"within {100 * e:g} % of its drop", found.level(e), t, real.get(e),
                off=(1 - e) * float(found.uncertainty[-1]),
            )
            for e, t in steps.items()
        ]  # fmt: skip
        rows += [self._goal(one.words(), one.value, t, real.get(one)) for one, t in below.items()]
        return tuple(rows)

    def _money(self, seconds: float | None) -> float | None:
        if seconds is None or self.price_per_hour is None:
            return None
        return seconds / 3600 * self.price_per_hour

    def _goal(
        self, words: str, level: float, step: int, real: int | None, off: float = 0.0
    ) -> Goal:  # fmt: skip
        there = step >= 0
        seconds = step * self.clock.step_seconds if there else None
        between = self.found.between(level, off) if self.is_bounded else (None, None)
        return Goal(
            words, level, step, *between,
            step * self.tokens_a_step if there else None, seconds, self._money(seconds), real,
        )  # fmt: skip

    @property
    def trust(self) -> tuple[str, ...]:
        """What keeps it from being certain, a sentence each."""
        return (() if self.found.trust is None else (self.found.trust,)) + self._limits

    @property
    def is_bounded(self) -> bool:
        """Whether the uncertainty of the loss is all that is in doubt, see `HeldForecast`."""
        return self.found.is_bounded and not self._limits

    @property
    def _limits(self) -> tuple[str, ...]:
        """What the forecast does not see, and so cannot say the size of."""
        said = []
        batch, knots = self.batch_size, len(self.found.knots)
        if self.epochs > TEXT.again:
            said.append(
                f"the training sees every sequence {self.epochs:.1f} times, the forecast's path "
                f"{knots * batch / len(self.task.x):.1f} times: learning them by heart, and a loss "
                "that rises again from it, is not foreseen"
            )
        if knots * batch > len(self.task.x) and self.settings.total_samples is not None:
            said.append(
                f"the sample has {len(self.task.x):,} sequences and the path draws "
                f"{knots * batch:,}: it learns by heart what the training sees once; what that "
                "costs is taken off by estimate, and a larger sample is surer"
            )
        if self.task.weights > TEXT.measured:
            said.append(
                "forecasts of this kind were held against real trainings of networks of up to "
                f"{TEXT.measured:,} weights alone; this one has {self.task.weights:,}"
            )
        return tuple(said)

    def tokens_and_loss(self, count: int = 5) -> list[tuple[int, float, float | None]]:
        """Tokens seen, the loss foreseen then, and its uncertainty if known, at even distances.

        Args:
            count: of them, the start and the end included.
        """
        at = np.round(np.linspace(0, self.settings.steps, count)).astype(int)
        found = self.found
        off = [float(found.uncertainty[t]) if self.is_bounded else None for t in at]
        return [(int(t) * self.tokens_a_step, float(found.loss[t]), u)
                for t, u in zip(at, off, strict=True)]  # fmt: skip

    def __str__(self) -> str:
        lines = [wrapped(str(self.task), 2), wrapped(self.scale_words(), 2)]
        for one in self.goals:
            never = "not reached" if self.is_bounded else "not reached, see trust"
            when = f"step {one.step}" if one.step >= 0 else never
            lines.append(f"  {one.words}: {when}")
        last = [self.cost_words(), *(f"trust: {line}" for line in self.trust)]
        lines += [wrapped(line, 2) for line in last]
        return "\n".join(lines)

    def scale_words(self) -> str:
        """How much of the text the training sees, and what all of it costs."""
        steps = self.settings.steps
        seconds, money = self.epoch
        price = "" if money is None else f" and {money:.2f}"
        of = "" if self.settings.total_samples is None else ", of which the text is a sample"
        return (
            f"{steps:,} steps see {steps * self.tokens_a_step:,} tokens, {self.epochs:.2g} times "
            f"the {self.sequences:,} sequences that train{of}; once takes {readable_time(seconds)}"
            f"{price}"
        )

    def cost_words(self) -> str:
        """What the forecast cost."""
        found = self.found
        return (
            f"the forecast cost {100 * found.share:.2g} % of the training's gradients "
            f"({len(found.knots)} of {self.settings.steps:,} steps), "
            f"{readable_time(self.forecast_seconds)} here with compilation"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        found, run = self.found, self.run
        return {
            "task": self.task.description,
            "hyperparameters": dataclasses.asdict(self.settings) | {"loss": "cross_entropy"},
            "lora": dataclasses.asdict(self.adapters),
            "horizon": self.settings.steps,
            "tokens_a_step": self.tokens_a_step,
            "tokens": self.task.tokens,
            "sequences": self.sequences,
            "epochs": self.epochs,
            "epoch_seconds": self.epoch[0],
            "epoch_cost": self.epoch[1],
            "loss": plain_numbers(found.loss),
            "loss_uncertainty": plain_numbers(found.uncertainty) if self.is_bounded else None,
            "goals": [dataclasses.asdict(one) for one in self.goals],
            "stable": not found.diverged,
            "trust": list(self.trust),
            "step_seconds": self.clock.step_seconds,
            "seconds": self.clock.total_seconds,
            "cost": self.clock.cost,
            "price_per_hour": self.price_per_hour,
            "forecast": {
                "share": found.share, "gradients": len(found.knots),
                "seconds": self.forecast_seconds,
            },
            "versions": versions(),
            "verified": None if run is None else {
                "at": run.at.tolist(), "loss": [plain_number(run.loss[t]) for t in run.at],
                "seconds": run.seconds,
            },
        }  # fmt: skip


def fine_tuning_task(
    settings: Settings,
    *,
    text: str,
    adapters: LoraSettings | None = None,
    sequence_length: int | None = None,
    price_per_hour: float | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> FineTuning:
    """Foresee the fine-tuning of a language model on a text by LoRA, with next-token loss.

    Args:
        settings: the model's folder, optimiser, rate, schedule, batches of sequences, steps,
            thresholds, target losses, seed; the budget is a share of the training's gradients
            (0.2 where it is left to the library), and `total_samples` the sequences of a corpus of
            which the text is a sample.
        text: a file of text, or a folder of .txt, .md and .py.
        adapters: which; the usual ones when None.
        sequence_length: T, tokens; 128, or as many as the network takes, when None.
        price_per_hour: of this device, in any currency.
        verify: also train for real, after the forecast.
        progress: called with (stage, done, total).

    Returns:
        A `FineTuning`.

    Raises:
        ValueError: as `build_text_task` and `held_forecast`; `total_samples` with `verify`, or
            fewer than the text has.
        ImportError: the extra `text` is not installed.

    Example:
        >>> fine_tuning_task(Settings(model="gone"), text="corpus.txt")
        Traceback (most recent call last):
        ...
        ValueError: model='gone' is no folder on this machine; a text needs a language model, a ...
    """
    tell, adapters = progress or (lambda *_: None), adapters or LoraSettings()
    _check(settings, price_per_hour, verify)
    tell("reading the text", 0, 1)
    task = build_text_task(
        settings, text=text, adapters=adapters, sequence_length=sequence_length
    )  # fmt: skip
    return _foreseen(settings, task, adapters, price_per_hour, verify, tell)


def fine_tuning_of(
    settings: Settings,
    network: Any,
    ids: Any,
    *,
    adapters: LoraSettings | None = None,
    names: tuple[str, str] = ("the network", "the text"),
    price_per_hour: float | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> FineTuning:
    """As `fine_tuning_task`, of a network and sequences that are at hand.

    Args:
        settings: as there, without a `model`.
        network: a decoder with the head "language_model", without adapters.
        ids: tokens of sequences, one more than the network sees at a time (N, T + 1).
        adapters: which; the usual ones when None.
        names: of the network and of the text, for the words.
        price_per_hour: of this device, in any currency.
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
    tell, adapters = progress or (lambda *_: None), adapters or LoraSettings()
    _check(settings, price_per_hour, verify, given=True)
    decoder = check_decoder(network, "network")
    known = np.asarray(ids)
    if known.ndim != 2 or known.shape[1] < 2:
        raise ValueError(f"ids must be tokens (N, T + 1), T of at least 1; got {known.shape}.")
    task = split_task(
        settings, decoder, known, adapters=adapters, tokens=known[:, 1:].size, name=names
    )
    return _foreseen(settings, task, adapters, price_per_hour, verify, tell)


def _check(
    settings: Settings, price_per_hour: float | None, verify: bool, *, given: bool = False
) -> None:
    """Refuse what is out of range before a network is read."""
    check_text_settings(settings, given=given)
    if price_per_hour is not None:
        check_number("price_per_hour", price_per_hour, at_least=0.0)
    remedy = "verify=True would train on the sample; leave one of the two out"
    check_used("total_samples", settings.total_samples, not verify, remedy)


def _foreseen(
    settings: Settings, task: TextTask, adapters: LoraSettings, price_per_hour: float | None,
    verify: bool, tell: Progress,
) -> FineTuning:  # fmt: skip
    """Forecast, time of a step, and the real training where that is asked for."""
    total = settings.total_samples
    if total is not None and total < len(task.x):
        raise ValueError(
            f"total_samples={total} is fewer than the {len(task.x)} sequences of "
            "the text that train; it counts those of a corpus of which the text is a sample."
        )
    keys = jax.random.split(jax.random.key(settings.seed), 2)
    optimizer, batch_size = make_optimizer(settings).transformation, settings.batch_size or 1
    common = {"optimizer": optimizer, "batch_size": batch_size}
    tell("following held gradients", 0, 1)
    begun = time.perf_counter()
    found = held_forecast(
        *task.model, task.x, task.y, x_watched=task.x_watched, y_watched=task.y_watched,
        steps=settings.steps, key=keys[0], share=budget_share(settings), total_samples=total,
        **common,
    )  # fmt: skip
    spent = time.perf_counter() - begun
    tell("timing a step", 0, 1)
    clock = wall_clock(
        *task.model, task.x, task.y, steps=found.read(settings.thresholds),
        horizon=settings.steps, price_per_hour=price_per_hour, **common,
    )  # fmt: skip
    run = None
    if verify:
        run = train_watched(
            task.model, task.x, task.y, task.x_watched, task.y_watched, steps=settings.steps,
            key=keys[1],  # another draw of batches than the forecast's
            progress=lambda i, n: tell("real training", i, n), **common,
        )  # fmt: skip
    return FineTuning(settings, adapters, task, found, clock, spent, price_per_hour, run)
