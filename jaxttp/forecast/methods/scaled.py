"""Training time for N samples, from M < N of them and their halves.

With more samples each one is memorized more slowly, so that the same loss takes more steps. A
residual falls at a common rate, whatever N, plus that of its own sample, which is 1/N of the mean
loss. The time at a fixed loss is therefore

    1/t(N) = a + b/N,

of which the times of M samples and of their halves are two equations. With rho = t(M) / t(M/2),

    t(N) = t(M) / ((2 - rho) + (rho - 1) M/N).

It is t(M) where nothing is memorized (rho = 1: the first epochs), and the same number of epochs
where all is (rho = 2). No such law holds for the loss at a fixed time: losses of memorized samples
fall by orders of magnitude.

Times are sums of learning rates, so that the schedule is that of the whole run. With mini-batches
rho is computed with full batches, which have no noise, at the same loss. The law and its constants
were fitted on separate tasks (`experiments/bench/scaling.py`).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxttp._core.checks import check_integer
from jaxttp._core.types import Params
from jaxttp.forecast.methods.base import Doubt, Dynamics, Linearizer, Path, check_centre
from jaxttp.forecast.methods.relinearized import Relinearized
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.stability import Rates
from jaxttp.forecast.training_setup import Descent
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule


@dataclasses.dataclass(frozen=True)
class Law:
    """Constants of the law, from the tuning tasks of `experiments/bench/scaling.py`.

    Attributes:
        grid: times, evenly spaced in their logarithm, at which whole and halves are compared.
        smooth: losses are averaged over this fraction of a time before and after it: batches make
            them jump.
        unsure: relative error of the law's addition to the logarithm of a time.
        drawn: error of the logarithm of a time by the draw of the samples, as a fraction of the
            root-mean-square difference of the halves.
        far: ratio of times to the subset's from which on there is a warning.
    """

    grid: int = 24
    smooth: float = 0.1
    unsure: float = 0.5
    drawn: float = 0.7
    far: float = 2.0


LAW = Law()


class TimeScale(NamedTuple):
    """Where along a subset's path the whole is; by `time_scale`.

    Attributes:
        at: step of the subset's path at which its loss is that of the whole (T + 1,), no larger
            than the step itself.
        slower: by how many times the whole is later than the subset, at its last step.
        unsure: the expected error of a time as a fraction of it (T + 1,).
    """

    at: Float[np.ndarray, " t"]
    slower: float
    unsure: Float[np.ndarray, " t"]

    def of(self, curve: Float[np.ndarray, "t ..."]) -> Float[np.ndarray, "t ..."]:
        """A curve of the subset (T + 1, ...) as that of the whole, linear between its steps."""
        last = len(curve) - 1
        steps = np.minimum(self.at, last)
        low = np.floor(steps).astype(int)
        weight = (steps - low).reshape(-1, *[1] * (curve.ndim - 1)).astype(curve.dtype)
        return (1 - weight) * curve[low] + weight * curve[np.minimum(low + 1, last)]

    def off(self, loss: Float[np.ndarray, " t"]) -> Float[np.ndarray, " t"]:
        """By how much the loss of the whole (T + 1,) may be off, since its times are."""
        ts, factor = np.arange(len(loss)), np.exp(self.unsure)
        early, late = ts / factor, np.minimum(ts * factor, ts[-1])
        return np.max([np.abs(np.interp(at, ts, loss) - loss) for at in (early, late)], axis=0)


def time_scale(
    whole: Float[np.ndarray, " t"],
    halves: Float[np.ndarray, "2 t"],
    ratio: float,
    rates: Float[np.ndarray, " s"] | None = None,
    path: Float[np.ndarray, " t"] | None = None,
    unseen: Float[np.ndarray, "2 t"] | None = None,
) -> TimeScale:
    """How much later N samples come to the losses of M.

    Args:
        whole: loss of the M samples (T + 1,), positive.
        halves: losses of disjoint halves of them under the same training (2, T + 1).
        ratio: N/M, at least 1.
        rates: learning rates (T,); constant when None.
        path: loss of the M samples that is to be scaled (T + 1,), such as by mini-batches where
            `whole` and `halves` are by full ones; `whole` when None.
        unseen: loss of each half on samples that it does not train on (2, T + 1), which N samples
            come to no later; None where that is not known.

    Returns:
        A `TimeScale`; of a path that does not fall, that of the subset itself.

    Example:
        >>> t = np.arange(101.0)
        >>> memorized = lambda n: np.exp(-t / n)  # by epochs
        >>> scale = time_scale(memorized(20), np.stack([memorized(10)] * 2), 2.0)
        >>> round(scale.slower, 2), round(float(scale.of(memorized(20))[80] * np.e**2), 2)
        (2.0, 1.0)
    """
    steps = len(whole) - 1
    same = TimeScale(np.arange(steps + 1.0), 1.0, np.zeros(steps + 1))
    spent = np.concatenate([[0.0], np.cumsum(np.ones(steps) if rates is None else rates)])
    if not spent[-1] > 0 or ratio <= 1:
        return same
    curve = _falling(whole if path is None else path)
    levels = np.interp(np.geomspace(1, steps, LAW.grid), np.arange(steps + 1), curve)
    first = np.unique(levels, return_index=True)[1]
    levels = levels[np.sort(first)]  # once where the loss is constant
    subset, full = _when(curve, levels, spent), _when(_falling(whole), levels, spent)
    half_times = np.stack([_when(_falling(half), levels, spent) for half in halves])
    both = _when_both(halves, levels, spent)
    good = np.isfinite(both) & np.isfinite(full) & (full > 0) & (both > 0)
    if not np.any(good):
        return same
    from scipy.optimize import isotonic_regression  # here, since it loads slowly

    fitted = isotonic_regression(np.log(full[good] / both[good])).x
    growth = np.interp(np.arange(len(subset)), np.flatnonzero(good), np.maximum(fitted, 0.0))
    rho = np.minimum(np.exp(growth), 2.0)
    later = -np.log((2 - rho) + (rho - 1) / ratio)
    if unseen is not None:
        bound = _when_both(unseen, levels, spent)
        finite = np.isfinite(bound) & np.isfinite(full) & (full > 0)
        least = np.log(np.maximum(bound[finite], full[finite]) / full[finite])
        later[finite] = np.minimum(later[finite], least)
    scaled = np.maximum.accumulate(subset * np.exp(later))
    usable = np.all((half_times > 0) & np.isfinite(half_times), axis=0)
    apart = np.diff(np.log(half_times[:, usable]), axis=0)
    drawn = LAW.drawn * float(np.sqrt(np.mean(apart**2))) if apart.size else 0.0
    drawn *= np.sqrt(1 - 1 / ratio)  # 0 with all samples
    # Where on the subset's path the whole is at every step; never ahead, and constant at the end.
    keep = np.concatenate([[True], np.diff(scaled) > 0])
    at = np.interp(spent, np.append(0.0, scaled[keep]), np.append(0.0, subset[keep]))
    at = np.minimum(np.where(spent > scaled[-1], subset[-1], at), spent)
    off = np.interp(spent, scaled, np.hypot(drawn, LAW.unsure * later))
    return TimeScale(np.interp(at, spent, np.arange(steps + 1)), float(np.exp(later[-1])), off)


def _falling(loss: np.ndarray) -> np.ndarray:
    """The logarithm of a loss, averaged around every step, and its lowest value so far."""
    values = np.log(np.maximum(np.asarray(loss, np.float64), np.finfo(np.float32).tiny))
    sums, ts = np.append(0.0, np.cumsum(values)), np.arange(len(values))
    wide = np.minimum(np.ceil(LAW.smooth * ts).astype(int), len(values) - 1 - ts)
    return np.minimum.accumulate((sums[ts + wide + 1] - sums[ts - wide]) / (2 * wide + 1))


def _when(curve: np.ndarray, levels: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """The rate spent when a falling curve comes to its levels; infinite for never."""
    first = np.concatenate([[True], np.diff(curve) < 0])  # the first step of a constant part
    times = np.interp(-levels, -curve[first], spent[first])
    return np.where(levels < curve[-1], np.inf, times)


def _when_both(losses: np.ndarray, levels: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """The same of the mean of two losses' logarithms."""
    return _when(np.mean([_falling(loss) for loss in losses], axis=0), levels, spent)


class Growth(NamedTuple):
    """What warnings of a scaled path read: the subset's path, and how the whole follows it."""

    subset: Path
    scale: TimeScale
    few: int


@dataclasses.dataclass(frozen=True)
class Scaled(Dynamics):
    """The path of N samples from M of them, which are followed together and in two halves.

    The ratio of times between the M samples and their halves gives that between N and M samples,
    see the module; it is computed with full batches, which have no noise. Loss, error and outputs
    are those of the M samples at the step at which they have the loss of the N.

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
        >>> few, many = (forecast_training(problem, descent, dynamics=dynamics).loss[-1]
        ...              for dynamics in (Recursion(), Scaled(400, Recursion())))
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
    def is_scaled(self) -> bool:  # type: ignore[override]
        """See `Dynamics`: as its centre."""
        return self.centre.is_scaled

    @property
    def by_products(self) -> bool:  # type: ignore[override]
        """See `Dynamics`: as its centre."""
        return self.centre.by_products

    def check(self, descent: Descent, weights: Params, loss: Loss) -> None:
        """See `Dynamics`: what the centre can follow."""
        self.centre.check(descent, weights, loss)

    def check_samples(self, count: int, descent: Descent) -> None:
        """Refuse fewer samples than are given, and halves that are smaller than a batch."""
        check_integer("total_samples", self.samples, at_least=count, hint=f"{count} are given.")
        if count // 2 < max(2, descent.batch_size or 1):
            raise ValueError(
                f"total_samples is read off halves of the {count} given samples, which must have "
                f"two samples and fill a batch (batch_size={descent.batch_size}); give more "
                "samples, or leave total_samples out."
            )

    def trained_samples(self, problem: Problem) -> int:
        """See `Dynamics`."""
        return self.samples

    def follow(self, linearizer: Linearizer, descent: Descent) -> Path:
        """See `Dynamics`."""
        problem = linearizer.problem
        count = problem.f0.shape[0]
        self.check_samples(count, descent)
        if problem.x_test is not None:
            raise ValueError(
                "x_test: test curves of a larger data set are not forecast; leave x_test or "
                "total_samples out."
            )
        order = np.asarray(jax.random.permutation(jax.random.key(self.seed), count))
        subset = self.centre.follow(linearizer, descent)
        # The whole and both halves by full batches, which no draw of batches makes jump.
        parts = [linearizer.take()] if descent.batch_size is not None else []
        for rows in (order[: count // 2], order[count // 2 : 2 * (count // 2)]):
            parts.append(linearizer.take(rows, np.setdiff1d(np.arange(count), rows)))
        paths = [self.centre.follow(part, descent.full) for part in parts]
        whole, *halves = paths if descent.batch_size is not None else (subset, *paths)
        sizes = [part.problem.f0.shape[0] / count for part in parts]
        linearizer.kernels += math.ceil(np.dot(sizes, [part.kernels for part in parts]))
        unseen = [half.test_loss for half in halves if half.test_loss is not None]
        scale = time_scale(
            np.asarray(whole.loss), np.stack([half.loss for half in halves]), self.samples / count,
            descent.spent_rates(), np.asarray(subset.loss),
            np.stack(unseen) if len(unseen) == len(halves) else None,
        )  # fmt: skip
        loss = scale.of(np.asarray(subset.loss))
        off = scale.off(loss)
        if subset.uncertainty is not None:
            off = np.hypot(off, scale.of(np.asarray(subset.uncertainty)))
        diverged = subset.diverged or any(half.diverged for half in halves)
        return dataclasses.replace(
            subset,
            outputs=jnp.asarray(scale.of(np.asarray(subset.outputs))),
            loss=jnp.asarray(loss),
            error=jnp.asarray(scale.of(np.asarray(subset.error))),
            uncertainty=jnp.asarray(off, subset.loss.dtype),
            diverged=diverged,
            auxiliary=Growth(subset, scale, count),
            gradient_evaluations=subset.gradient_evaluations
            + math.ceil(np.dot(sizes, [path.gradient_evaluations for path in paths])),
            products=subset.products + math.ceil(np.dot(sizes, [path.products for path in paths])),
        )

    def rates(self, linearizer: Linearizer, descent: Descent) -> tuple[float, Rates | None]:
        """See `Dynamics`: those of the given samples."""
        return self.centre.rates(linearizer, descent)

    def is_stable(self, path: Path, rates: Rates | None, descent: Descent) -> bool:
        """See `Dynamics`: that of the given samples, and representable halves."""
        return not path.diverged and self.centre.is_stable(path.auxiliary.subset, rates, descent)

    def doubt(self, path: Path, rule: Rule) -> Doubt | None:
        """See `Dynamics`: that of the given samples, and how far the whole is from them."""
        subset, scale, few = path.auxiliary
        doubt, warnings, since = self.centre.doubt(subset, rule), [], None
        if doubt is not None:
            warnings.append(f"of the {few:,} given samples alone: {doubt.words}")
            if doubt.since is not None:  # a step of the subset's path
                since = int(np.searchsorted(scale.at, doubt.since))
        if scale.slower >= LAW.far:
            warnings.append(
                f"to the lowest losses {self.samples:,} samples take {scale.slower:.2g} times the "
                f"steps of the {few:,} given samples, by how much sooner their halves do; "
                "with more samples the estimate would be better"
            )
        return Doubt("; ".join(warnings), since) if warnings else None

    def plain_values(self) -> dict[str, Any]:
        """See `Dynamics`."""
        return {**self.centre.plain_values(), "total_samples": self.samples}
