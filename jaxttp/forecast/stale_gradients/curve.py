"""The training's curve read off a path of held gradients, and what a forecast of it says.

`jaxttp.forecast.stale_gradients.forecast` derives what the noise of few batches costs.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxttp._core.results import RESULT, wrapped
from jaxttp.forecast.stale_gradients.path import HeldPath, smoothed
from jaxttp.losses.rule import Rule


@dataclasses.dataclass(frozen=True)
class _Correction:
    """Numbers of the correction, chosen on the tuning tasks of experiments/bench/lora_tasks.py.

    Attributes:
        cost: the loss that noise costs on the held path, over the memory of a batch just learnt.
        onset: knots after which it has built up, as the square of their number.
        doubt: how far that correction is known, as a share of it.
        lag: of what a path at a share of the rates may be behind: taken off, and its doubt.
        coarse: what holds have to keep of what their gradients promise; a parabola's whole way
            down is that.
        heart: the loss that learning a sample by heart costs others, over the gain on the sample.
    """

    cost: float = 1.05
    onset: float = 9.0
    doubt: float = 1 / 2
    lag: float = 1 / 2
    coarse: float = 1 / 2
    heart: float = 0.35


_BY = _Correction()


@dataclasses.dataclass(frozen=True, eq=False)
class HeldForecast:
    """A training foreseen from few gradients.

    Attributes:
        loss: of the watched sequences (T + 1,), interpolated between the points.
        uncertainty: how far it may be off (T + 1,).
        at: the steps of the points (E,).
        held: the loss along the path of held gradients there (E,), before the correction.
        memory: of a batch just learnt, there (E,).
        knots: steps at which a gradient was taken (K,).
        gradients: of one sample, that the forecast took; a way forward counts for a third.
        training_gradients: of one sample, that the training takes.
        diverged: whether the held path rose above its start, on the watched samples and on the
            training's: its steps are too long to be held, even at a share of the rates.
        rate_share: the share of the training's rates that was followed: 1, or 1/2, 1/4 ... where a
            path at higher ones left.
        kept: how far a batch's loss really fell while its gradient was held, over what the
            gradient promised: 1 where the loss is straight over a hold, 1/2 where a hold comes to
            the lowest point of a parabola, less beyond it.
    """

    loss: Float[np.ndarray, " t"]
    uncertainty: Float[np.ndarray, " t"]
    at: np.ndarray
    held: np.ndarray
    memory: np.ndarray
    knots: np.ndarray
    gradients: float
    training_gradients: float
    diverged: bool
    rate_share: float = 1.0
    kept: float = 1.0

    plot, _repr_html_, __repr__ = RESULT

    def __str__(self) -> str:
        steps, count = len(self.loss) - 1, len(self.knots)
        times = self.read((0.1, 0.4))
        lines = [
            f"HeldForecast of {steps:,} steps from {count:,} gradients, "
            f"{100 * self.share:.2g} % of the training's cost",
            f"  loss {self.loss[0]:.4g} to {self.loss[-1]:.4g}"
            + (f" ± {self.uncertainty[-1]:.2g}" if self.is_bounded else ""),
        ]
        way = "drop" if self.loss[-1] <= self.loss[0] else "rise"
        never = "never" if self.is_bounded else "not reached, see trust"
        lines += [
            f"  within {100 * threshold:g} % of the {way}: " + (f"step {t}" if t >= 0 else never)
            for threshold, t in times.items()
        ]
        if self.trust is not None:
            lines.append(wrapped(f"  trust: {self.trust}", 4))
        return "\n".join(lines)

    @property
    def share(self) -> float:
        """What the forecast costs, as a share of the training."""
        return self.gradients / self.training_gradients

    @property
    def is_bounded(self) -> bool:
        """Whether `uncertainty` is all that is in doubt.

        Not where the path was left, or gradients were held for too long: then `trust` doubts the
        loss without saying by how much, and no range is printed.
        """
        return not self.diverged and self.kept >= _BY.coarse

    @property
    def trust(self) -> str | None:
        """In words, how far to trust it; None where the correction is small."""
        if self.diverged:
            return (
                "held gradients left the path: this training's steps are too long to be held "
                f"between {len(self.knots)} gradients, even at {self.rate_share:g} of the rates; "
                "give a larger share, or a lower rate"
            )
        drop = abs(self.loss[0] - self.loss[-1])
        off = float(np.max(self.uncertainty)) / max(drop, 1e-12)
        if self.rate_share < 1:
            return (
                f"these rates are too high for a gradient to be held for {self.stride:.2g} steps; "
                f"followed at {self.rate_share:g} of them, known to ± {100 * off:.2g} % of "
                "the loss's drop; that the training itself bears them is not known"
            )
        if self.kept < _BY.coarse:
            return (
                f"a gradient held for {self.stride:.2g} steps gave {100 * self.kept:.2g} % of what "
                "it promised: too long for these rates; the loss is likely to fall faster, and "
                "lower; give a larger share, or a lower rate"
            )
        if off < 0.05:
            return None
        return f"known to ± {100 * off:.2g} % of the loss's drop, by the noise of few batches"

    @property
    def stride(self) -> float:
        """Steps for which a gradient is held, on average."""
        return float(self.at[-1]) / len(self.knots)

    def level(self, threshold: float) -> float:
        """The loss at which a share of the foreseen drop is left."""
        return float(self.loss[-1] + threshold * (self.loss[0] - self.loss[-1]))

    def between(self, level: float, off: float = 0.0) -> tuple[int, int]:
        """When a loss is reached at the earliest and at the latest, by the uncertainty.

        Args:
            level: the loss to get below.
            off: by how much that may be off itself, as a share of a drop whose end is uncertain.

        Returns:
            Two steps, the first at which the forecast less its uncertainty is below the level and
            `off`, and that at which the forecast and its uncertainty are below the level less
            `off`; -1 for not within the horizon, or where the path was left.
        """
        if self.diverged:
            return -1, -1
        ends = (self.loss + sign * (self.uncertainty + off) < level for sign in (-1, 1))
        earliest, latest = (int(np.argmax(below)) if np.any(below) else -1 for below in ends)
        return earliest, latest

    def read(self, thresholds: float | Sequence[float], *, rule: str = "relative") -> dict:
        """Training times, as `jaxttp.TrainingRun.read` gives those of a real training.

        Args:
            thresholds: the epsilons.
            rule: see `jaxttp.training_time`.

        Returns:
            Steps for every threshold, -1 where the forecast never gets there, or left its path.
        """
        wanted = Rule.of(thresholds, rule, "loss", 1, None, steps=len(self.loss) - 1)
        loss = jnp.asarray(self.loss)
        return wanted.read(loss, loss, reached=not self.diverged)


def corrected(
    path: HeldPath, spent: float, training: float, steps: int, fresh: int | None = None
) -> HeldForecast:
    """The training's curve from the held path's, less what the noise of held gradients costs.

    Where only a share of the optimiser's steps was taken, the path is behind the training: its
    loss at step t is that of a step before, t' of as many whole steps, if a loss falls as steps
    add up, and that of t if it is all noise and valley floors. Half of the way is taken off.

    Args:
        path: as it was followed.
        spent: gradients of one sample that it took.
        training: that the training takes.
        steps: T.
        fresh: batches until the first one comes again; None for those of the training.

    Returns:
        A `HeldForecast`.
    """
    last, every = len(path.knots) - 1, np.arange(steps + 1)
    others = np.interp(np.arange(last + 1), path.points, path.loss)
    gaps = others[path.measured + 1] - others[path.measured] - path.fall
    memory = np.zeros(len(path.points))
    if len(gaps):
        memory = smoothed(path.measured + 0.5, gaps, path.points.astype(float))
    built = 1 - np.exp(-((path.points / _BY.onset) ** 2))
    off = _BY.cost * (1 - last / steps) * built * np.maximum(memory, 0.0)
    if fresh is not None:
        off += _BY.heart * by_heart(path.before, others[:-1], fresh, path.points)
    at, losses = path.knots[path.points], path.loss
    diverged = path.left or not (np.all(np.isfinite(losses)) and np.all(np.isfinite(memory)))
    if diverged:  # nothing is corrected: the path is not the training's
        off = np.zeros_like(off)
    shown = evened(np.where(np.isfinite(losses), losses, losses[0]) - off)
    curve, doubt = _between(at, shown, every), _BY.doubt * _between(at, off, every)
    done = np.concatenate([[0.0], np.cumsum(path.scale * np.diff(path.knots))])
    behind = np.interp(np.interp(every, path.knots, done), every, curve) - curve
    behind = np.minimum.accumulate(np.maximum(behind, 0.0)[::-1])[::-1]  # a loss has no bend there
    lag = _BY.lag * behind * (not diverged)
    share = float(np.min(path.scale, initial=1.0))
    promised = float(np.sum(path.promised))
    kept = float(np.sum(path.fall)) / promised if promised < 0 and not diverged else 1.0
    return HeldForecast(
        curve - lag, doubt + lag, at, losses, memory, path.knots[:-1], spent, training, diverged,
        share, kept,
    )  # fmt: skip


def by_heart(before: np.ndarray, others: np.ndarray, fresh: int, points: np.ndarray) -> np.ndarray:
    """How much further batches that come again have fallen since their first time than others have.

    For least squares others rise above the optimum of all sequences by as much as the sample's own
    fall below it, half of the gap between them (Mallows' C_p); along a path it is less.
    Every batch is held against itself, since batches differ by more than what is looked for.

    Args:
        before: every batch's loss before it is learnt (K,), the same batches over and over.
        others: what the watched loss is at these knots (K,).
        fresh: batches until the first one comes again.
        points: knots of the curve (E,).

    Returns:
        (E,), nothing before a batch comes again.

    Example:
        >>> before = np.array([2.0, 1.0, 1.4, 0.4])
        >>> by_heart(before, np.array([1.5, 1.5, 1.2, 1.2]), 2, np.array([0, 3])).round(2).tolist()
        [0.0, 0.3]
    """
    again = np.arange(fresh, len(before))
    if not len(again):
        return np.zeros(len(points))
    first = again % fresh
    further = (others[again] - others[first]) - (before[again] - before[first])
    now = smoothed(again, further, points.astype(float))
    return np.where(points > fresh, np.maximum(now, 0.0), 0.0)


def _between(at: np.ndarray, values: np.ndarray, every: np.ndarray) -> np.ndarray:
    """A curve through points, level where they end before it does."""
    if len(at) == 1:
        return np.full(len(every), values[0])
    from scipy.interpolate import PchipInterpolator  # here: a fifth of the time of all imports

    return PchipInterpolator(at, values)(np.minimum(every, at[-1]))


def evened(loss: np.ndarray) -> np.ndarray:
    """The curve's points with a half of themselves and a quarter of either neighbour.

    The first three, where the curve bends, and the last one stay.

    Args:
        loss: at the points (E,).

    Returns:
        (E,).

    Example:
        >>> evened(np.array([8.0, 4.0, 2.0, 1.0, 3.0, 1.0])).tolist()
        [8.0, 4.0, 2.0, 1.75, 2.0, 1.0]
    """
    found = loss.copy()
    found[3:-1] = 0.25 * loss[2:-2] + 0.5 * loss[3:-1] + 0.25 * loss[4:]
    return found
