"""Training on more samples than are at hand, or than one wants to pay for."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxttp._core.checks import check_integer
from jaxttp._core.types import Params
from jaxttp.forecast.methods.base import Dynamics, Linearizer, Path, check_centre
from jaxttp.forecast.methods.relinearized import Relinearized
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.scaling import TimeScale, time_scale
from jaxttp.forecast.stability import Rates
from jaxttp.forecast.training_setup import Descent
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule

FAR = 2.0
"""From so many times the subset's steps on it is said by how many."""


class Growth(NamedTuple):
    """What a scaled path's `trust` reads: the subset's own path, and how the whole follows it."""

    subset: Path
    scale: TimeScale
    few: int


@dataclasses.dataclass(frozen=True)
class Scaled(Dynamics):
    """The path of N samples from M of them, which are followed whole and in two halves.

    How much later the whole comes to a loss than its halves do says how much later all N come to
    it, see `jaxttp.forecast.scaling`; with mini-batches by full ones, so that no draw is taken for
    growth. Loss, error and outputs are those of the M samples, at the
    step at which they have the loss of the N.

    Attributes:
        samples: N, at least M.
        centre: the dynamics by which all three are followed.
        seed: of the draw of the halves.

    Raises:
        ValueError: a number of samples below 2, a centre that is an SDE or scaled itself.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxttp.forecast import Descent, Problem, Recursion, forecast_training
        >>> x = jax.random.normal(jax.random.key(0), (40, 30))
        >>> problem = Problem.of(lambda w, x: x @ w, jnp.zeros((30, 2)), x,
        ...                      (x[:, 0] > 0).astype(int))
        >>> descent = Descent.of(learning_rate=0.5, steps=40, batch_size=10, key=jax.random.key(1))
        >>> few, many = (forecast_training(problem, descent, dynamics=way).loss[-1]
        ...              for way in (Recursion(), Scaled(400, Recursion())))
        >>> bool(few < many)
        True
    """

    samples: int
    centre: Dynamics = dataclasses.field(default_factory=Relinearized)
    seed: int = 0
    name = "scaled"
    is_centre = False

    def __post_init__(self) -> None:
        check_integer("samples", self.samples, at_least=2)
        check_centre(self.centre)

    @property
    def kernels(self) -> bool:  # type: ignore[override]
        """See `Dynamics`: as its centre."""
        return self.centre.kernels

    @property
    def by_products(self) -> bool:  # type: ignore[override]
        """See `Dynamics`: as its centre."""
        return self.centre.by_products

    def check(self, descent: Descent, weights: Params, loss: Loss) -> None:
        """See `Dynamics`: what the centre can follow."""
        self.centre.check(descent, weights, loss)

    def check_samples(self, count: int, descent: Descent) -> None:
        """Refuse fewer samples than are at hand, and halves that are smaller than a batch."""
        remedy = f"{count} are at hand."
        check_integer("total_samples", self.samples, at_least=count, remedy=remedy)
        if count // 2 < max(2, descent.batch_size or 1):
            raise ValueError(
                f"total_samples is read off halves of the {count} samples at hand, which must have "
                f"two samples and fill a batch (batch_size={descent.batch_size}); give more "
                "samples, or leave total_samples out."
            )

    def trained_samples(self, problem: Problem) -> int:
        """See `Dynamics`."""
        return self.samples

    def follow(self, lines: Linearizer, descent: Descent) -> Path:
        """See `Dynamics`."""
        problem = lines.problem
        count = problem.f0.shape[0]
        self.check_samples(count, descent)
        if problem.x_test is not None:
            raise ValueError(
                "x_test: test curves of a larger data set are not forecast; leave x_test or "
                "total_samples out."
            )
        order = np.asarray(jax.random.permutation(jax.random.key(self.seed), count))
        parts = [np.arange(count), order[: count // 2], order[count // 2 : 2 * (count // 2)]]
        subset, (whole, *halves) = self.centre.follow_with(lines, descent, parts)
        unseen = [half.unseen for half in halves if half.unseen is not None]
        scale = time_scale(
            np.asarray(whole.loss),
            np.stack([half.loss for half in halves]),
            self.samples / count,
            descent.spent_rates(),
            np.asarray(subset.loss),
            np.stack(unseen) if len(unseen) == len(halves) else None,
        )
        loss = scale.of(np.asarray(subset.loss))
        off = scale.off(loss)
        if subset.uncertainty is not None:
            off = np.hypot(off, scale.of(np.asarray(subset.uncertainty)))
        diverged = subset.diverged or any(int(half.diverged_at) >= 0 for half in halves)
        unsure_from = subset.unsure_from
        if unsure_from is not None:
            unsure_from = int(np.searchsorted(scale.at, unsure_from))
        return dataclasses.replace(
            subset,
            outputs=jnp.asarray(scale.of(np.asarray(subset.outputs))),
            loss=jnp.asarray(loss),
            error=jnp.asarray(scale.of(np.asarray(subset.error))),
            uncertainty=jnp.asarray(off, subset.loss.dtype),
            diverged=diverged,
            witness=Growth(subset, scale, count),
            unsure_from=unsure_from,
        )

    def rates(self, lines: Linearizer, descent: Descent) -> tuple[float, Rates | None]:
        """See `Dynamics`: those of the samples at hand."""
        return self.centre.rates(lines, descent)

    def is_stable(self, path: Path, rates: Rates | None, descent: Descent) -> bool:
        """See `Dynamics`: that of the samples at hand, and representable halves."""
        return not path.diverged and self.centre.is_stable(path.witness.subset, rates, descent)

    def trust(self, path: Path, rule: Rule) -> str | None:
        """See `Dynamics`: that of the samples at hand, and how far the whole is from them."""
        subset, scale, few = path.witness
        said = self.centre.trust(subset, rule)
        said = said and f"of the {few:,} samples at hand alone: {said}"
        if scale.slower < FAR:
            return said
        words = (
            f"to the lowest losses {self.samples:,} samples take {scale.slower:.2g} times the "
            f"steps of the {few:,} at hand, by how much sooner their halves do; more samples at "
            "hand would be surer"
        )
        return words if said is None else f"{said}; {words}"

    def doubted_from(self, path: Path) -> int | None:
        """See `Dynamics`: that of the samples at hand, at the step that all are then at."""
        subset, scale, _ = path.witness
        step = self.centre.doubted_from(subset) if self.centre.trust(subset, Rule()) else None
        return None if step is None else int(np.searchsorted(scale.at, step))

    def plain_values(self) -> dict[str, Any]:
        """See `Dynamics`."""
        return {**self.centre.plain_values(), "total_samples": self.samples}
