"""How training goes: an optimiser, its batches, and how many steps."""

import dataclasses
from typing import Any

import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import check_integer, check_known, check_number, check_optimizer
from jaxttp._core.types import Params
from jaxttp.dynamics.batches import check_batches
from jaxttp.dynamics.filters import LinearFilter, linear_filter
from jaxttp.dynamics.optimizers import HeavyBall
from jaxttp.dynamics.rates import step_maps, step_rates


@dataclasses.dataclass(frozen=True, eq=False)
class Descent:
    """One way to train; made by `Descent.of`.

    Attributes:
        optimizer: the optax transformation; a `HeavyBall` where rate and momentum are given.
        steps: the horizon T.
        batch_size: samples a step; None for all of them.
        protocol: how batches are drawn, see `batch_indices`.
        key: a `jax.random.key` for them, or None.
        learning_rate: the rate of gradient descent; None where an optimiser was given as such.
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
            given = "neither" if learning_rate is None else "both"
            raise ValueError(
                f"give exactly one of learning_rate and optimizer; got {given}. "
                "learning_rate=0.1 is optimizer=optax.sgd(0.1)."
            )
        check_known(learning_rate=learning_rate, momentum=momentum, key=key)
        check_number("momentum", momentum, at_least=0.0, below=1.0)
        if optimizer is not None and momentum:
            raise ValueError(
                f"momentum={momentum} goes with learning_rate; put it into the optimizer: "
                "optax.sgd(rate, momentum)."
            )
        if learning_rate is not None:
            if callable(learning_rate):
                raise ValueError(
                    "learning_rate must be a number; a schedule goes into the optimizer: "
                    "optimizer=optax.sgd(schedule, momentum)."
                )
            check_number("learning_rate", learning_rate, above=0.0)
            rate = float(learning_rate)
            made = HeavyBall(rate, float(momentum) or None)
        else:
            check_optimizer(optimizer)
            assert optimizer is not None  # one of both is given
            rate, made = None, optimizer
        steps = check_integer("steps", steps, at_least=1)
        if batch_size is not None and key is None:
            raise ValueError(
                f"batch_size={batch_size} needs key: batches are drawn at random; pass "
                "key=jax.random.key(0)."
            )
        protocol = check_batches(batch_size, key, protocol)
        return cls(made, steps, batch_size, protocol, key, rate, float(momentum))

    @property
    def is_plain(self) -> bool:
        """Whether it is gradient descent (with momentum) at one rate, which needs no probe."""
        return self.learning_rate is not None

    @property
    def batches(self) -> dict[str, Any]:
        """What the dynamics want to know of the batches."""
        return {"batch_size": self.batch_size, "key": self.key, "protocol": self.protocol}

    @property
    def stepper(self) -> optax.GradientTransformation | HeavyBall:
        """The optimiser, with a velocity whatever the momentum: one program for all of them."""
        made = self.optimizer
        return made.with_velocity() if isinstance(made, HeavyBall) else made

    @property
    def full(self) -> "Descent":
        """The same with all samples in every step."""
        return dataclasses.replace(self, batch_size=None, protocol="epochs")

    def check(self, n: int | None) -> None:
        """Refuse batches that are larger than the data."""
        given = None if self.batch_size is None else self.protocol
        check_batches(self.batch_size, self.key, given, n)

    def response(self, weights: Params | None = None) -> LinearFilter:
        """How the optimiser answers over the whole horizon, see `linear_filter`.

        Args:
            weights: what it trains; only with them are masks seen that look at names.

        Raises:
            ValueError: it is not one linear filter for all weights.
        """
        given: Any = self.optimizer
        return linear_filter(given, weights, steps=self.steps)

    @property
    def decays(self) -> bool:
        """Whether a linear optimiser given as such decays the weights."""
        return not self.is_plain and bool(self.response().weight_decay)

    def plain_values(self) -> dict[str, Any]:
        """Itself, as a result keeps it."""
        return {
            "learning_rate": self.learning_rate,
            "momentum": self.momentum,
            "batch_size": self.batch_size,
            "optimizer": None if self.is_plain else "optax",
            "steps": self.steps,
        }

    def spent_rates(self) -> np.ndarray | None:
        """The learning rates (T,) of a schedule; None for a constant rate, or without any."""
        if self.is_plain:
            return None
        given: Any = self.optimizer
        found = step_rates(step_maps(given, self.steps))
        return found if np.all(np.isfinite(found)) and np.any(found > 0) else None
