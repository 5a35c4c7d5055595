"""The paper's searches for a learning rate, on one grid for all optimisers."""

from collections.abc import Callable, Sequence

from experiments.gauss_newton.training import Record

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


def largest_first(rates: Sequence[float]) -> list[float]:
    """The order in which to try rates with the full batch: the largest that works is wanted.

    Example:
        >>> largest_first([0.1, 1.0])
        [1.0, 0.1]
    """
    return sorted(rates, reverse=True)


def best_epoch_first(rates: Sequence[float], one_epoch: Callable[[float], Record]) -> list[float]:
    """The order in which to try rates with mini-batches: by the training loss after one epoch.

    Rates at which the first epoch diverges are left out.

    Args:
        rates: the grid.
        one_epoch: trains one epoch at a rate.

    Returns:
        The rates, the one with the largest progress first.
    """
    found = [(one_epoch(rate), rate) for rate in rates]
    progress = [(record.train_loss[-1], rate) for record, rate in found if record.diverged < 0]
    return [rate for _, rate in sorted(progress)]


def first_stable(
    rates: Sequence[float], runs: Callable[[float], Sequence[Callable[[], Record]]]
) -> tuple[float, list[Record]]:
    """The first of these rates at which no run (of several seeds, say) diverges.

    Args:
        rates: in the order of preference.
        runs: the runs to make at a rate; those after one that diverges are not made.

    Returns:
        The rate, and the records of its runs.

    Raises:
        ValueError: every rate diverges.
    """
    for rate in rates:
        records: list[Record] = []
        for run in runs(rate):
            records.append(run())
            if records[-1].diverged >= 0:
                break
        else:
            return rate, records
    raise ValueError(f"training diverged at every rate of {list(rates)}; give smaller ones.")
