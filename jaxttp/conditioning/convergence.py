"""From a condition number to a training time, and condition numbers along training."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.arrays import double
from jaxttp._core.checks import check_array, check_number, is_concrete
from jaxttp._core.results import RESULT


def _check_condition(condition: Any) -> Array:
    """Kappa in float64; what is known and below 1 is an error."""
    kappa = check_array("condition", condition).astype(jnp.float64)
    if is_concrete(condition) and not bool(np.all(np.asarray(condition) >= 1.0)):  # NaN neither
        raise ValueError(f"condition must be at least 1; got {condition!r}.")
    return kappa


def contraction_rate(condition: ArrayLike) -> Float[Array, "..."]:
    """(kappa - 1) / (kappa + 1), by which a step of gradient descent shrinks the slowest error.

    At the best constant rate 2 / (lambda_max + lambda_min), on a quadratic.

    Args:
        condition: kappa >= 1, any shape.

    Returns:
        A factor in [0, 1]; 1 for an infinite condition number.

    Raises:
        ValueError: kappa below 1.

    Example:
        >>> float(contraction_rate(3.0))
        0.5

    Source:
        Standard; GNC Section 2.
    """
    with double():
        kappa = _check_condition(condition)
        return jnp.where(jnp.isinf(kappa), 1.0, (kappa - 1) / (kappa + 1))


def steps_to_accuracy(condition: ArrayLike, accuracy: Any) -> Float[Array, "..."]:
    """Steps of gradient descent after which the distance to the minimum is below eps of the first.

    ceil(log eps / log rate), the worst case over the starting points; the squared distance and
    the loss fall twice as fast. A start without a component along the slowest direction needs
    fewer: the forecast from the kernel (`jaxttp.predict_training_time`) knows the start.

    Args:
        condition: kappa >= 1, any shape.
        accuracy: eps in (0, 1).

    Returns:
        A whole number as float64; +inf for an infinite condition number.

    Raises:
        ValueError: kappa below 1, accuracy outside (0, 1).

    Example:
        >>> float(steps_to_accuracy(3.0, 0.01))     # 2^-7 < 0.01 < 2^-6
        7.0

    Source:
        Standard; GNC Section 2.
    """
    check_number("accuracy", accuracy, above=0.0, below=1.0)
    with double():
        kappa = _check_condition(condition)
        # log((kappa - 1) / (kappa + 1)) without cancellation for large kappa
        slow = jnp.log1p(-2.0 / (kappa + 1))
        steps = jnp.log(jnp.asarray(accuracy).astype(jnp.float64)) / slow
        steps = jnp.ceil(steps - 1e-9 * jnp.abs(steps))
        return jnp.where(jnp.isinf(kappa), jnp.inf, jnp.maximum(steps, 1.0))


class Record(NamedTuple):
    """One point of a `Tracker`.

    Attributes:
        step: when.
        loss: as given.
        values: what the measures returned, by name.
    """

    step: int
    loss: float
    values: dict[str, Any]

    plot, _repr_html_, __repr__ = RESULT


class Tracker:
    """A callback that measures condition numbers and bounds along training.

    Args:
        measures: name -> function of the parameters, such as a condition number or a bound.
        every: measure at steps that are multiples of this.

    Example:
        >>> import numpy as np
        >>> from jaxttp import conditioning
        >>> track = Tracker({"bound": lambda ws: float(conditioning.linear_bound(ws).convex)},
        ...                 every=10)
        >>> for step in range(20):
        ...     track(step, [np.eye(2), np.diag([1.0, 2.0])], loss=1.0 / (step + 1))
        >>> [record.step for record in track.records], track.column("bound").tolist()
        ([0, 10], [2.5, 2.5])

    Source:
        GNC Appendix D, Figure 10.
    """

    def __init__(self, measures: dict[str, Callable[[Any], Any]], *, every: int = 1):
        if not measures:
            raise ValueError("measures must name at least one function of the parameters.")
        check_number("every", every, at_least=1)
        self.measures = dict(measures)
        self.every = every
        self.records: list[Record] = []

    plot, _repr_html_, __repr__ = RESULT

    def __str__(self) -> str:
        last = f", the last at step {self.records[-1].step}" if self.records else ""
        return f"Tracker of {', '.join(self.measures)}: {len(self.records)} records{last}"

    def __call__(self, step: int, params: Any, loss: Any = float("nan")) -> None:
        """Measure now, if the step is due."""
        if step % self.every == 0:
            values = {name: measure(params) for name, measure in self.measures.items()}
            self.records.append(Record(int(step), float(loss), values))

    def column(self, name: str) -> Array:
        """One measure over time, or "loss" or "step", float64."""
        with double():
            if name in ("loss", "step"):
                return jnp.asarray([float(getattr(record, name)) for record in self.records])
            if name not in self.measures:
                raise ValueError(f"name={name!r} is not among {sorted(self.measures)}.")
            return jnp.asarray([float(record.values[name]) for record in self.records])
