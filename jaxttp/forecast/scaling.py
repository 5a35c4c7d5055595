"""How training time grows with the number of samples, read off a subset and its halves.

The more samples, the less of each is memorised in a number of steps: a loss that M samples come to
after t steps N > M of them come to later. A residual falls at the rate of what samples have in
common, whatever their number, and of its own sample's part, one in N of the mean loss: so the time
at a fixed loss is

    1/t(N) = a + b/N,

of which the times of M samples and of their halves are two equations. With rho = t(M) / t(M/2),

    t(N) = t(M) / ((2 - rho) + (rho - 1) M/N).

It is t(M) where nothing is memorised (rho = 1: the first epochs) and as many epochs where all is
(rho = 2), whatever the loss and the batches. The same of the loss at a fixed time does not hold:
losses of memorised samples fall by orders of magnitude.

Times are counted in learning rate spent, so that a schedule stays that of the whole. With
mini-batches rho is read off full batches, which no draw makes jump, at the same loss. The law and
its constants were found on other tasks than those reported (`experiments/bench/scaling.py`).
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxttp.forecast.curves import at_places

GRID = 24
"""Times, evenly spaced in their logarithm, at which whole and halves are compared."""
SMOOTH = 0.1
"""Losses are averaged over this share of a time before and after it: batches make them jump."""
UNSURE = 0.5
"""What the law adds to the logarithm of a time is off by about this share of it."""
DRAWN = 0.7
"""So is the logarithm of a time by this share of what the two halves differ by, root mean square,
where the whole is much larger."""


class TimeScale(NamedTuple):
    """Where along a subset's path the whole is; by `time_scale`.

    Attributes:
        at: step of the subset's path at which its loss is that of the whole (T + 1,), no larger
            than the step itself.
        slower: by how many times the whole is later than the subset, at its last step.
        unsure: the expected error of a time as a share of it (T + 1,).
    """

    at: Float[np.ndarray, " t"]
    slower: float
    unsure: Float[np.ndarray, " t"]

    def of(self, curve: Float[np.ndarray, "t ..."]) -> Float[np.ndarray, "t ..."]:
        """A curve of the subset (T + 1, ...) as that of the whole."""
        return at_places(curve, self.at)

    def off(self, loss: Float[np.ndarray, " t"]) -> Float[np.ndarray, " t"]:
        """By how much the loss of the whole (T + 1,) may be off, since its times are."""
        ts, factor = np.arange(len(loss)), np.exp(self.unsure)
        near = (np.interp(at, ts, loss) for at in (ts / factor, np.minimum(ts * factor, ts[-1])))
        return np.max([np.abs(each - loss) for each in near], axis=0)


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
        >>> memorised = lambda n: np.exp(-t / n)  # by epochs
        >>> found = time_scale(memorised(20), np.stack([memorised(10)] * 2), 2.0)
        >>> round(found.slower, 2), round(float(found.of(memorised(20))[80] * np.e**2), 2)
        (2.0, 1.0)
    """
    steps = len(whole) - 1
    spent = np.concatenate([[0.0], np.cumsum(np.ones(steps) if rates is None else rates)])
    horizon = spent[-1]
    if not horizon > 0 or ratio <= 1:
        return _same(steps)
    curve = _falling(whole if path is None else path)
    levels = np.interp(np.geomspace(1, steps, GRID), np.arange(steps + 1), curve)
    first = np.unique(levels, return_index=True)[1]
    levels = levels[np.sort(first)]  # once where the loss rests
    here, full = _when(curve, levels, spent), _when(_falling(whole), levels, spent)
    each = np.stack([_when(_falling(half), levels, spent) for half in halves])
    both = _when_both(halves, levels, spent)
    good = np.isfinite(both) & np.isfinite(full) & (full > 0) & (both > 0)
    if not np.any(good):
        return _same(steps)
    from scipy.optimize import isotonic_regression  # here, since it loads slowly

    found = isotonic_regression(np.log(full[good] / both[good])).x
    growth = np.interp(np.arange(len(here)), np.flatnonzero(good), np.maximum(found, 0.0))
    rho = np.minimum(np.exp(growth), 2.0)
    kept = (2 - rho) + (rho - 1) / ratio
    later = -np.log(kept)
    if unseen is not None:
        bound = _when_both(unseen, levels, spent)
        known = np.isfinite(bound) & np.isfinite(full) & (full > 0)
        least = np.log(np.maximum(bound[known], full[known]) / full[known])
        later[known] = np.minimum(later[known], least)
    there = np.maximum.accumulate(here * np.exp(later))
    apart = np.diff(np.log(each[:, np.all((each > 0) & np.isfinite(each), axis=0)]), axis=0)
    drawn = DRAWN * float(np.sqrt(np.mean(apart**2))) if apart.size else 0.0
    drawn *= np.sqrt(1 - 1 / ratio)  # whoever has all samples draws none
    at = _follow(spent, there, here)
    off = np.interp(spent, there, np.hypot(drawn, UNSURE * later))
    return TimeScale(np.interp(at, spent, np.arange(steps + 1)), float(np.exp(later[-1])), off)


def _same(steps: int) -> TimeScale:
    return TimeScale(np.arange(steps + 1.0), 1.0, np.zeros(steps + 1))


def _follow(spent: np.ndarray, there: np.ndarray, here: np.ndarray) -> np.ndarray:
    """Where on the subset's path the whole is when so much rate is spent; never ahead."""
    keep = np.concatenate([[True], np.diff(there) > 0])
    at = np.interp(spent, np.append(0.0, there[keep]), np.append(0.0, here[keep]))
    beyond = spent > there[-1]  # the subset's loss rests: so does that of the whole
    return np.minimum(np.where(beyond, here[-1], at), spent)


def _falling(loss: np.ndarray) -> np.ndarray:
    """The logarithm of a loss, averaged around every step, and its lowest value so far."""
    values = np.log(np.maximum(np.asarray(loss, np.float64), np.finfo(np.float32).tiny))
    sums, ts = np.append(0.0, np.cumsum(values)), np.arange(len(values))
    wide = np.minimum(np.ceil(SMOOTH * ts).astype(int), len(values) - 1 - ts)
    return np.minimum.accumulate((sums[ts + wide + 1] - sums[ts - wide]) / (2 * wide + 1))


def _when(curve: np.ndarray, levels: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """The rate spent when a falling curve comes to its levels; infinite for never."""
    first = np.concatenate([[True], np.diff(curve) < 0])  # the first step of a rest
    found = np.interp(-levels, -curve[first], spent[first])
    return np.where(levels < curve[-1], np.inf, found)


def _when_both(losses: np.ndarray, levels: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """The same of the mean of two losses' logarithms."""
    return _when(np.mean([_falling(loss) for loss in losses], axis=0), levels, spent)
