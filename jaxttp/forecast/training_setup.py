"""How a network is trained: optimizer, batches, horizon; settings, and grids of them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import (
    check_choice,
    check_instance,
    check_integer,
    check_known,
    check_number,
    check_optimizer,
    check_several,
    check_used,
)
from jaxttp._core.types import Params
from jaxttp.dynamics.batches import check_batches
from jaxttp.dynamics.optimizers import HeavyBall, LinearFilter, linear_filter
from jaxttp.dynamics.stability import step_maps, step_rates
from jaxttp.losses import Loss, get_loss


@dataclasses.dataclass(frozen=True, eq=False)
class Descent:
    """One way to train; made by `Descent.of`.

    Attributes:
        optimizer: the optax transformation; a `HeavyBall` where rate and momentum are given.
        steps: the horizon T.
        batch_size: samples a step; None for all of them.
        protocol: how batches are drawn, see `batch_indices`.
        key: a `jax.random.key` for them, or None.
        learning_rate: the rate of gradient descent; None where an optimizer was given as such.
        momentum: heavy-ball, with `learning_rate`.
    """

    optimizer: optax.GradientTransformation | HeavyBall
    steps: int
    batch_size: int | None = None
    protocol: str = "epochs"
    key: Array | None = None
    learning_rate: float | None = None
    momentum: float = 0.0

    @classmethod
    def of(
        cls,
        *,
        learning_rate: float | None = None,
        momentum: float = 0.0,
        optimizer: optax.GradientTransformation | None = None,
        steps: int = 150,
        batch_size: int | None = None,
        protocol: str | None = None,
        key: Array | None = None,
    ) -> "Descent":
        """Gradient descent by its numbers, or any optax transformation.

        Args:
            learning_rate: eta > 0. Give either this or `optimizer`.
            momentum: heavy-ball, in [0, 1), with `learning_rate`.
            optimizer: an optax transformation.
            steps: the horizon T.
            batch_size: samples a step; all of them when None.
            protocol: with `batch_size`, see `batch_indices`; "epochs" when None.
            key: a `jax.random.key`, needed with `batch_size`.

        Raises:
            ValueError: neither or both of learning_rate and optimizer, numbers out of range, a
                batch size without a key, a protocol without a batch size.
            TypeError: an optimizer that is none.

        Example:
            >>> import optax
            >>> Descent.of(learning_rate=0.1, momentum=0.9).is_plain
            True
            >>> Descent.of(optimizer=optax.adam(1e-3), steps=40).is_plain
            False
        """
        if (learning_rate is None) == (optimizer is None):
            got = "neither" if learning_rate is None else "both"
            raise ValueError(
                f"give exactly one of learning_rate and optimizer; got {got}. "
                "learning_rate=0.1 is optimizer=optax.sgd(0.1)."
            )
        check_known(learning_rate=learning_rate, momentum=momentum, key=key)
        check_number("momentum", momentum, at_least=0.0, below=1.0)
        if optimizer is not None:
            if momentum:
                raise ValueError(
                    f"momentum={momentum} goes with learning_rate; put it into the optimizer: "
                    "optax.sgd(rate, momentum)."
                )
            check_optimizer(optimizer)
            rate, transformation = None, optimizer
        else:
            if callable(learning_rate):
                raise ValueError(
                    "learning_rate must be a number; a schedule goes into the optimizer: "
                    "optimizer=optax.sgd(schedule, momentum)."
                )
            rate = float(check_number("learning_rate", learning_rate, above=0.0))
            transformation = HeavyBall(rate, float(momentum) or None)
        steps = check_integer("steps", steps, at_least=1)
        if batch_size is not None and key is None:
            raise ValueError(
                f"batch_size={batch_size} needs key: batches are drawn at random; pass "
                "key=jax.random.key(0)."
            )
        protocol = check_batches(batch_size, key, protocol)
        return cls(transformation, steps, batch_size, protocol, key, rate, float(momentum))

    @property
    def is_plain(self) -> bool:
        """Whether it is gradient descent (with momentum) at one rate, given by numbers."""
        return self.learning_rate is not None

    @property
    def batches(self) -> dict[str, Any]:
        """The arguments of the dynamics that describe batches."""
        return {"batch_size": self.batch_size, "key": self.key, "protocol": self.protocol}

    @property
    def stepper(self) -> optax.GradientTransformation | HeavyBall:
        """The optimizer, with a velocity whatever the momentum: all share a compiled function."""
        optimizer = self.optimizer
        return optimizer.with_velocity() if isinstance(optimizer, HeavyBall) else optimizer

    @property
    def full(self) -> "Descent":
        """The same with all samples in every step."""
        return dataclasses.replace(self, batch_size=None, protocol="epochs")

    def check(self, n: int | None) -> None:
        """Refuse batches that are larger than the data."""
        protocol = None if self.batch_size is None else self.protocol
        check_batches(self.batch_size, self.key, protocol, n)

    def response(self, weights: Params | None = None) -> LinearFilter:
        """The optimizer's linear response over the whole horizon, see `linear_filter`.

        Args:
            weights: what it trains; masks that look at names need them.

        Raises:
            ValueError: it is not one linear filter for all weights.
        """
        optimizer: Any = self.optimizer
        return linear_filter(optimizer, weights, steps=self.steps)

    @property
    def decays(self) -> bool:
        """Whether a linear `optimizer` decays the weights."""
        return not self.is_plain and bool(self.response().weight_decay)

    def plain_values(self) -> dict[str, Any]:
        """Plain values, as a result keeps them."""
        names = ("learning_rate", "momentum", "batch_size", "steps")
        values = {name: getattr(self, name) for name in names}
        return values | {"optimizer": None if self.is_plain else "optax"}

    def spent_rates(self) -> np.ndarray | None:
        """The learning rates (T,) of a schedule; None for a constant rate, or without any."""
        if self.is_plain:
            return None
        optimizer: Any = self.optimizer
        rates = step_rates(step_maps(optimizer, self.steps))
        return rates if np.all(np.isfinite(rates)) and np.any(rates > 0) else None


SCHEDULES: Mapping[str, Callable[[int], optax.Schedule]] = {
    "constant": lambda steps: optax.constant_schedule(1.0),
    "linear": lambda steps: optax.linear_schedule(1.0, 0.0, steps),
    "cosine": lambda steps: optax.cosine_decay_schedule(1.0, steps),
    "warmup_cosine": lambda steps: optax.warmup_cosine_decay_schedule(
        0.0, 1.0, max(1, steps // 10), max(2, steps)
    ),
}
"""Named schedules of a horizon T, as factors of the learning rate; the warm-up takes T/10."""
DESCENT = ("sgd", "nesterov")
"""Gradient descent, with heavy-ball momentum and Nesterov's."""
ALGORITHMS = (*DESCENT, "adam", "adamw")
"""Algorithms that have a name."""
ADAMW_DECAY = 0.01
"""Weight decay of AdamW where none is given, PyTorch's."""


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """A training setup: an optimizer with its rate, a schedule and batches.

    Attributes:
        learning_rate: eta > 0, the schedule's largest value.
        momentum: in [0, 1), of "sgd" (heavy-ball) and "nesterov".
        batch_size: samples a step; None for all of them.
        schedule: "constant", "linear", "cosine" (both to zero at the horizon), "warmup_cosine", or
            an optax schedule (step -> factor of the learning rate).
        loss: a name or a `Loss`.
        steps: the horizon T.
        algorithm: "sgd", "nesterov", "adam", "adamw", or a function from a learning rate to an
            optax transformation, as ``optax.lion`` or ``functools.partial(optax.adamw, b2=0.95)``.
        weight_decay: 0 or more. With "sgd" and "nesterov" it is added to the gradient before the
            momentum, as PyTorch does; None for none, and for 0.01 with "adamw".

    Raises:
        ValueError: a number out of range, an unknown name, momentum or decay that the algorithm
            does not have.
        TypeError: a schedule or an algorithm that is neither a name nor a function.

    Example:
        >>> Hyperparameters(0.1, momentum=0.9, schedule="linear", steps=2).rates().tolist()
        [0.1, 0.05]
        >>> print(Hyperparameters(0.001, algorithm="adamw", weight_decay=0.1))
        adamw, rate 0.001, decay 0.1

    Source:
        AdamW: Loshchilov and Hutter 2019.
    """

    learning_rate: float
    momentum: float = 0.0
    batch_size: int | None = None
    schedule: Any = "constant"
    loss: str | Loss = "cross_entropy"
    steps: int = 150
    algorithm: Any = "sgd"
    weight_decay: float | None = None

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
        self._check_algorithm()

    def _check_algorithm(self) -> None:
        named = isinstance(self.algorithm, str)
        if named:
            check_choice("algorithm", self.algorithm, ALGORITHMS)
        elif not callable(self.algorithm) or isinstance(self.algorithm, type):
            raise TypeError(
                f"algorithm must be a name ({', '.join(ALGORITHMS)}) or a function from a learning "
                "rate to an optax transformation, such as optax.lion; got a "
                f"{type(self.algorithm).__name__}."
            )
        where = "" if named else ": put it into the function, as functools.partial does"
        hint = f"it is of {' and '.join(map(repr, DESCENT))}{where}"
        check_used("momentum", self.momentum or None, self.algorithm in DESCENT, hint)
        hint = f"it is of {' and '.join(map(repr, (*DESCENT, 'adamw')))}{where}"
        is_decaying = self.algorithm in (*DESCENT, "adamw")
        check_used("weight_decay", self.weight_decay, is_decaying, hint)
        if self.weight_decay is not None:
            check_number("weight_decay", self.weight_decay, at_least=0.0)

    def rates(self) -> np.ndarray:
        """The learning rate of every step, (steps,), float64."""
        return self.learning_rate * _factors(self.schedule, self.steps)

    @property
    def decay(self) -> float:
        """The weight decay; 0 where there is none, or it is a function's own."""
        if self.weight_decay is None:
            return ADAMW_DECAY if self.algorithm == "adamw" else 0.0
        return float(self.weight_decay)

    @property
    def is_heavy_ball(self) -> bool:
        """Whether it is gradient descent, with momentum or without, and nothing else."""
        plain = self.algorithm == "sgd" or (self.algorithm == "nesterov" and not self.momentum)
        return plain and not self.decay

    def optimizer(self) -> optax.GradientTransformation:
        """The optax transformation of this setting."""
        rates = jnp.asarray(self.rates())
        rate = self.learning_rate if self.schedule == "constant" else lambda t: rates[t]
        if not isinstance(self.algorithm, str):
            return self.algorithm(rate)
        decay = self.decay if self.decay or self.algorithm == "adamw" else None
        return _named(self.algorithm, rate, self.momentum or None, decay)

    def stepper(self) -> tuple[optax.GradientTransformation, dict[str, float]]:
        """One transformation for all settings of an algorithm, and this setting's coefficients.

        Both the coefficients and the ``rate``, which a schedule changes at every step, are in the
        state's `hyperparams`, so that all settings share a compiled function.
        """
        coefficients = {"momentum": self.momentum} if self.algorithm in DESCENT else {}
        if self.decay or self.algorithm == "adamw":
            coefficients["weight_decay"] = self.decay
        if isinstance(self.algorithm, str):
            return _injected(self.algorithm, tuple(coefficients)), coefficients
        return optax.inject_hyperparams(lambda rate: self.algorithm(rate))(rate=1.0), coefficients

    def __str__(self) -> str:
        parts = [] if self.algorithm == "sgd" else [algorithm_name(self.algorithm)]
        parts.append(f"rate {self.learning_rate:.4g}")
        if self.momentum:
            parts.append(f"momentum {self.momentum:g}")
        if self.weight_decay is not None:
            parts.append(f"decay {self.weight_decay:g}")
        if self.batch_size is not None:
            parts.append(f"batch {self.batch_size}")
        if self.schedule != "constant":
            parts.append(schedule_name(self.schedule))
        return ", ".join(parts)


def _named(
    algorithm: str, rate: Any, momentum: Any = None, weight_decay: Any = None
) -> optax.GradientTransformation:
    """The transformation of a name."""
    if algorithm == "adamw":
        return optax.adamw(rate, weight_decay=weight_decay)
    if algorithm == "adam":
        return optax.adam(rate)
    descent = optax.sgd(rate, momentum, nesterov=algorithm == "nesterov")
    if weight_decay is None:
        return descent
    return optax.chain(optax.add_decayed_weights(weight_decay), descent)


@functools.lru_cache(maxsize=16)
def _injected(algorithm: str, names: tuple[str, ...]) -> optax.GradientTransformation:
    """A transformation whose rate and coefficients are in its state."""
    make = functools.partial(_named, algorithm)
    return optax.inject_hyperparams(make)(rate=1.0, **dict.fromkeys(names, 0.5))


def check_settings(settings: Any, loss: str | Loss | None = None) -> tuple[Hyperparameters, ...]:
    """Settings as a tuple, at least one.

    Args:
        settings: a list of `Hyperparameters`.
        loss: in place of the default one of theirs; None leaves them as they are.

    Raises:
        ValueError: none; another loss than `loss` that is not the default.
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
    for setting in settings:
        if not isinstance(setting, Hyperparameters):
            raise TypeError(f"settings must hold Hyperparameters (see grid); got {setting!r}.")
    if loss is None:
        return settings
    losses = {get_loss(setting.loss).name for setting in settings}
    losses -= {get_loss(loss).name, "cross_entropy"}
    if losses:
        raise ValueError(
            f"loss={get_loss(loss).name!r}, but settings have loss={losses.pop()!r}: name losses "
            "in one place, loss= or grid(loss=)."
        )
    return tuple(dataclasses.replace(setting, loss=loss) for setting in settings)


@functools.lru_cache(maxsize=64)
def _named_factors(schedule: str, steps: int) -> np.ndarray:
    """`_factors` of a schedule's name."""
    return np.ones(steps) if schedule == "constant" else _factors(SCHEDULES[schedule](steps), steps)


def _factors(schedule: Any, steps: int) -> np.ndarray:
    """The factor of every step, (steps,), float64 (optax computes schedules in float32)."""
    if isinstance(schedule, str):
        return _named_factors(schedule, steps)
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        factors = np.asarray(jax.vmap(schedule)(jnp.arange(steps)), np.float64)
    if factors.shape != (steps,) or not np.all(np.isfinite(factors)) or np.any(factors < 0):
        raise ValueError(
            f"schedule={schedule!r} must give one finite factor >= 0 a step; got shape "
            f"{factors.shape[1:]}, values from {factors.min()} to {factors.max()}."
        )
    if not np.any(factors > 0):
        raise ValueError(
            f"schedule={schedule!r} has no rate above 0 in {steps} step(s), by which nothing would "
            "train; give more steps or another schedule."
        )
    return factors


def check_descent(name: str, setting: Any, hint: str = "predict_training_time does.") -> None:
    """Refuse anything but a setting of heavy-ball descent.

    Args:
        name: of the argument.
        setting: its value.
        hint: which function takes other algorithms.

    Raises:
        TypeError: no `Hyperparameters`.
        ValueError: another algorithm, or weight decay.

    Example:
        >>> check_descent("setting", Hyperparameters(0.1, weight_decay=0.1))
        Traceback (most recent call last):
        ...
        ValueError: setting must be gradient descent, with momentum or without; this knows no other
        algorithm and no weight decay, but got rate 0.1, decay 0.1. predict_training_time does.
    """
    check_instance(name, setting, Hyperparameters, "jaxttp.grid")
    if not setting.is_heavy_ball:
        raise ValueError(
            f"{name} must be gradient descent, with momentum or without; this knows no other "
            f"algorithm and no weight decay, but got {setting}. {hint}"
        )


def algorithm_name(algorithm: Any) -> str:
    """How an algorithm prints."""
    if isinstance(algorithm, str):
        return algorithm
    function = algorithm.func if isinstance(algorithm, functools.partial) else algorithm
    name = getattr(function, "__name__", type(function).__name__)
    if not isinstance(algorithm, functools.partial):
        return name
    parts = [*map(str, algorithm.args), *(f"{k}={v}" for k, v in algorithm.keywords.items())]
    return f"{name}({', '.join(parts)})"


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
        >>> [str(setting) for setting in grid(learning_rate=(0.1, 0.2), momentum=(0.0, 0.9))][:2]
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
