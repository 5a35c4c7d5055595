"""The paper's searches for a learning rate, on one grid for all optimizers."""

from collections.abc import Callable, Sequence

import numpy as np

from experiments.gauss_newton.training import Record

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


def largest_first(rates: Sequence[float]) -> list[float]:
    """The order in which to try rates where the largest that works is wanted.

    Example:
        >>> largest_first([0.1, 1.0])
        [1.0, 0.1]
    """
    return sorted(rates, reverse=True)


def best_first(rates: Sequence[float], once: Callable[[float], Record]) -> list[float]:
    """The order in which to try rates: by the training loss at the end of a probe.

    Rates at which the probe diverges are left out.

    Args:
        rates: the grid.
        once: trains at a rate, for one epoch say.

    Returns:
        The rates, the one with the largest progress first.
    """
    found = [(once(rate), rate) for rate in rates]
    progress = [(record.train_loss[-1], rate) for record, rate in found if record.diverged < 0]
    return [rate for _, rate in sorted(progress)]


def is_stable(record: Record, *, rise: float = float("inf")) -> bool:
    """Whether a run neither diverged nor lost what it had gained, and ended below its start.

    Args:
        record: of the run.
        rise: largest ratio allowed between the training loss at an evaluation and its least before.
    """
    if record.diverged >= 0 or not record.train_loss[-1] < record.train_loss[0]:
        return False
    return bool(np.all(record.train_loss <= rise * np.minimum.accumulate(record.train_loss)))


def first_stable(
    rates: Sequence[float],
    runs: Callable[[float], Sequence[Callable[[], Record]]],
    *,
    rise: float = float("inf"),
) -> tuple[float, list[Record]]:
    """The first of these rates at which every run (of several seeds, say) is stable.

    Args:
        rates: in the order of preference.
        runs: the runs to make at a rate; those after one that is not stable are not made.
        rise: see `is_stable`.

    Returns:
        The rate, and the records of its runs.

    Raises:
        ValueError: no rate is stable.
    """
    for rate in rates:
        records: list[Record] = []
        for run in runs(rate):
            records.append(run())
            if not is_stable(records[-1], rise=rise):
                break
        else:
            return rate, records
    raise ValueError(f"training is unstable at every rate of {list(rates)}; give smaller ones.")
