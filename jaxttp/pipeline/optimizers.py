"""What trains: the optimiser that settings name, the same for forecast, training and timing."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import optax

from jaxttp.forecast.training_setup import (
    DESCENT,
    SCHEDULES,
    Hyperparameters,
    schedule_name,
)
from jaxttp.pipeline.settings import Settings, check_training


class OptimizerChoice(NamedTuple):
    """One optimiser, as the several doors want it.

    Attributes:
        transformation: for `jaxttp.train` and `jaxttp.training.time_step`.
        keywords: for `jaxttp.predict_training_time`: rate and momentum where it is gradient descent
            at a constant rate, which needs no probing, else ``optimizer=transformation``.
        linear: whether its outputs follow from kernels, so that they can be rebuilt.
    """

    transformation: optax.GradientTransformation
    keywords: dict[str, Any]
    linear: bool


def make_optimizer(settings: Settings) -> OptimizerChoice:
    """The optimiser that settings name.

    The rates of its schedule are those of `jaxttp.Hyperparameters.rates`, as in sweeps.

    Args:
        settings: whose optimiser, rate, momentum, weight decay, schedule and horizon count.

    Returns:
        An `OptimizerChoice`.

    Raises:
        ValueError: as `check_training`.

    Example:
        >>> make_optimizer(Settings(learning_rate=0.1)).keywords
        {'learning_rate': 0.1, 'momentum': 0.0}
        >>> sorted(make_optimizer(Settings(optimizer="adamw")).keywords)
        ['optimizer']

    Source:
        "sgd" as in PyTorch: the decay is added to the gradient, before the momentum. AdamW as in
        Loshchilov and Hutter 2019.
    """
    check_training(settings)
    one = hyperparameters(settings)
    made = one.optimizer()
    keywords: dict[str, Any] = {"optimizer": made}
    if one.schedule == "constant" and one.is_heavy_ball:
        keywords = {"learning_rate": one.learning_rate, "momentum": one.momentum}
    return OptimizerChoice(made, keywords, one.algorithm in DESCENT)


def hyperparameters(settings: Settings) -> Hyperparameters:
    """Algorithm, rate, momentum, schedule, batches and horizon of settings, as sweeps have them.

    Args:
        settings: which; their loss is left out, since it may depend on the data.

    Returns:
        A `Hyperparameters`.

    Raises:
        ValueError: numbers out of range, an unknown schedule.

    Example:
        >>> hyperparameters(Settings(learning_rate=0.1, warmup=2, steps=4)).rates().round(3)
        array([0.  , 0.05, 0.1 , 0.1 ])
    """
    schedule = warmed(settings.schedule, settings.warmup, settings.steps)
    return Hyperparameters(
        settings.learning_rate, settings.momentum, settings.batch_size, schedule,
        steps=settings.steps, algorithm="nesterov" if settings.nesterov else settings.optimizer,
        weight_decay=settings.weight_decay,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def warmed(name: str, warmup: int, steps: int) -> Any:
    """A schedule of `Hyperparameters` that begins after some steps of warm-up.

    Args:
        name: of `SCHEDULES`; "warmup_cosine" is "cosine" with a warm-up of its own.
        warmup: steps in which the rate rises linearly from 0; 0 leaves the schedule as it is.
        steps: the horizon, which the schedule's rest fills.

    Returns:
        The name, or a function from the step to the factor of the rate.

    Example:
        >>> [round(float(warmed("linear", 2, 6)(t)), 3) for t in range(6)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    """
    if not warmup:
        return name
    rest = name.removeprefix("warmup_")
    parts = [optax.linear_schedule(0.0, 1.0, warmup), SCHEDULES[rest](steps - warmup)]
    joined = optax.join_schedules(parts, [warmup])

    def schedule(step: Any) -> Any:
        return joined(step)

    schedule.__name__ = f"{rest}, warm-up {warmup}"
    return schedule


def training_words(settings: Settings) -> str:
    """Optimiser, rate, momentum, schedule and batches in words; what is not there is left out.

    Args:
        settings: which.

    Example:
        >>> training_words(Settings(schedule="cosine", warmup=20, momentum=0.9, batch_size=16))
        'learning rate 0.005, momentum 0.9, cosine, warm-up 20, batch 16'
    """
    parts: Sequence[str | None] = (
        None if settings.optimizer == "sgd" else settings.optimizer,
        f"learning rate {settings.learning_rate:g}",
        f"momentum {settings.momentum:g}" if settings.momentum else None,
        "Nesterov" if settings.nesterov else None,
        f"weight decay {settings.weight_decay:g}" if settings.weight_decay is not None else None,
        None if settings.schedule == "constant" and not settings.warmup
        else schedule_name(warmed(settings.schedule, settings.warmup, settings.steps)),
        f"batch {settings.batch_size}" if settings.batch_size else None,
    )  # fmt: skip
    return ", ".join(filter(None, parts))
