"""One goal for all settings of a sweep, where the user names none."""

import numpy as np

from jaxttp.forecast.swept import Sweep
from jaxttp.losses.rule import Rule, Target


def shared_goal(curves: np.ndarray, share: float, metric: str = "loss") -> Target | None:
    """A loss, or an error, that settings can be compared by, whatever each of them ends at.

    It is what the best of them ends at and a share of the way down to there, rounded up to two
    digits; None where nothing falls.

    Args:
        curves: of settings with the same start (S, T + 1).
        share: of the best one's drop, in (0, 1).
        metric: what they are.

    Example:
        >>> shared_goal(np.array([[2.0, 1.0, 0.5], [2.0, 0.3, 0.1]]), 0.1)
        Target(value=0.29, metric='loss', on='train')
    """
    if not len(curves):
        return None
    first, best = float(np.max(curves[:, 0])), float(np.min(curves[:, -1]))
    goal = best + share * (first - best)
    if not (np.isfinite(goal) and 0 < goal < first):
        return None
    unit = 10.0 ** (np.floor(np.log10(goal)) - 1)
    rounded = float(f"{np.ceil(goal / unit - 1e-9) * unit:.2g}")
    return Target(rounded, metric) if rounded < first else None


def with_shared_goal(swept: Sweep, rule: Rule, curves: np.ndarray | None = None) -> Sweep:
    """The sweep ranked by a goal for all (`shared_goal`), where none was given and one makes sense.

    Not where settings have several losses, whose values say nothing of each other, nor where the
    rule measures all by the same values already.

    Args:
        swept: with targets, if any, of the user's or of this function's choice.
        rule: by which it was read.
        curves: those whose ends count, (S, T + 1); of all stable settings when None.
    """
    losses = {one.loss for one in swept.settings}
    if (swept.targets and not swept.shared) or len(losses) > 1 or rule.kind != "relative":
        return swept
    ends = rule.curve(swept.loss, swept.error)[swept.stable] if curves is None else curves
    goal = shared_goal(ends, rule.thresholds[len(rule.thresholds) // 2], rule.metric)
    return swept if goal is None else swept.aimed(goal, rule.smooth)
