"""What a practitioner chooses before training: one setting, and grids of them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxttp._checks import check_choice, check_integer, check_number, check_several
from jaxttp.losses import Loss, get_loss

SCHEDULES: Mapping[str, Callable[[int], optax.Schedule]] = {
    "constant": lambda steps: optax.constant_schedule(1.0),
    "linear": lambda steps: optax.linear_schedule(1.0, 0.0, steps),
    "cosine": lambda steps: optax.cosine_decay_schedule(1.0, steps),
    "warmup_cosine": lambda steps: optax.warmup_cosine_decay_schedule(
        0.0, 1.0, max(1, steps // 10), max(2, steps)
    ),
}
"""Named schedules of a horizon T, as factors of the learning rate; the warm-up takes T/10."""


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """One way to train: gradient descent with momentum, a schedule and batches.

    Attributes:
        learning_rate: eta > 0, the schedule's largest value.
        momentum: heavy-ball, in [0, 1).
        batch_size: samples a step; None for all of them.
        schedule: "constant", "linear", "cosine" (both to zero at the horizon), "warmup_cosine", or
            an optax schedule (step -> factor of the learning rate).
        loss: a name or a `Loss`.
        steps: the horizon T.

    Raises:
        ValueError: a number out of range, an unknown name.
        TypeError: a schedule that is neither a name nor a function.

    Example:
        >>> Hyperparameters(0.1, momentum=0.9, schedule="linear", steps=2).rates().tolist()
        [0.1, 0.05]
    """

    learning_rate: float
    momentum: float = 0.0
    batch_size: int | None = None
    schedule: Any = "constant"
    loss: str | Loss = "cross_entropy"
    steps: int = 150

    def __post_init__(self) -> None:
        check_number("learning_rate", self.learning_rate, above=0.0)
        check_number("momentum", self.momentum, at_least=0.0, below=1.0)
        if self.batch_size is not None:
            check_integer("batch_size", self.batch_size, at_least=1)
        if isinstance(self.schedule, str):
            check_choice("schedule", self.schedule, SCHEDULES)
        elif not callable(self.schedule):
            raise TypeError(
                f"schedule must be a name ({', '.join(SCHEDULES)}) or a function of the step; got "
                f"{self.schedule!r}."
            )
        get_loss(self.loss)
        check_integer("steps", self.steps, at_least=1)

    def rates(self) -> np.ndarray:
        """The learning rate of every step, (steps,), float64."""
        return self.learning_rate * _factors(self.schedule, self.steps)

    def optimizer(self) -> optax.GradientTransformation:
        """The optax transformation that trains so for real, for one start of training."""
        rates = jnp.asarray(self.rates())
        rate = self.learning_rate if self.schedule == "constant" else lambda t: rates[t]
        return optax.sgd(rate, self.momentum or None)

    def __str__(self) -> str:
        parts = [f"rate {self.learning_rate:.4g}"]
        if self.momentum:
            parts.append(f"momentum {self.momentum:g}")
        if self.batch_size is not None:
            parts.append(f"batch {self.batch_size}")
        if self.schedule != "constant":
            parts.append(schedule_name(self.schedule))
        return ", ".join(parts)


def check_settings(settings: Any) -> tuple[Hyperparameters, ...]:
    """Settings as a tuple, at least one.

    Raises:
        ValueError: none.
        TypeError: one that is not in a list, or something else.

    Example:
        >>> len(check_settings([Hyperparameters(0.1), Hyperparameters(0.2)]))
        2
    """
    if isinstance(settings, Hyperparameters):
        raise TypeError("settings must hold Hyperparameters (see grid); put the one into a list.")
    settings = check_several("settings", settings, "Hyperparameters (see grid)")
    if not settings:
        raise ValueError("settings must hold at least one Hyperparameters; got none.")
    for one in settings:
        if not isinstance(one, Hyperparameters):
            raise TypeError(f"settings must hold Hyperparameters (see grid); got {one!r}.")
    return settings


@functools.lru_cache(maxsize=256)
def _factors(schedule: Any, steps: int) -> np.ndarray:
    """The factor of every step, (steps,), float64 (optax computes schedules in float32)."""
    name = schedule
    if schedule == "constant":
        return np.ones(steps)
    if isinstance(schedule, str):
        schedule = SCHEDULES[schedule](steps)
    with jax.numpy_dtype_promotion("standard"):  # optax asks for it
        factors = np.asarray(jax.vmap(schedule)(jnp.arange(steps)), np.float64)
    if factors.shape != (steps,) or not np.all(np.isfinite(factors)) or np.any(factors < 0):
        raise ValueError(
            f"schedule={name!r} must give one finite factor >= 0 a step; got shape "
            f"{factors.shape[1:]}, values from {factors.min()} to {factors.max()}."
        )
    return factors


def schedule_name(schedule: Any) -> str:
    """How a schedule prints."""
    return schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "schedule")


def grid(**choices: Any) -> tuple[Hyperparameters, ...]:
    """Every combination of the given choices.

    Args:
        **choices: for any field of `Hyperparameters` one value or an iterable of values.

    Returns:
        The settings, the last named field varying fastest.

    Raises:
        TypeError: an unknown field, or no learning rate.
        ValueError: a field without a value, or with a bad one.

    Example:
        >>> [str(one) for one in grid(learning_rate=(0.1, 0.2), momentum=(0.0, 0.9))][:2]
        ['rate 0.1', 'rate 0.1, momentum 0.9']
    """
    fields = {field.name for field in dataclasses.fields(Hyperparameters)}
    unknown = sorted(set(choices) - fields)
    if unknown or "learning_rate" not in choices:
        problem = f"unknown: {', '.join(unknown)}" if unknown else "learning_rate is missing"
        raise TypeError(f"grid takes {', '.join(sorted(fields))}; {problem}.")
    lists = {name: _as_list(value) for name, value in choices.items()}
    empty = [name for name, values in lists.items() if not values]
    if empty:
        raise ValueError(f"{empty[0]} must have at least one value; got none.")
    return tuple(
        Hyperparameters(**dict(zip(lists, combination, strict=True)))
        for combination in itertools.product(*lists.values())
    )


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [value]
    return [item.item() if isinstance(item, np.generic) else item for item in value]
