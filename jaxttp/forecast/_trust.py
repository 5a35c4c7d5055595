"""How far a forecast can be trusted, in words.

The constants are chosen on `experiments.bench.trust_tasks.FITTING`; how often warnings are right
is measured by `experiments.bench.trust`.
"""

from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jaxttp.dynamics.relinearize import RelinearizedTrajectory
from jaxttp.forecast._witness import Witness
from jaxttp.forecast.bands import steps_uncertainty
from jaxttp.losses.rule import Rule

DOUBTED = 1.5
"""A forecast is doubted where the network's speed of learning is by more than that another one."""
OF_LOSS = 1.5
"""A loss that is r times as large counts as a speed that is r to the power of this."""
OFF = ((5.0, "two thirds"), (2.0, "half"), (DOUBTED, "a third"))
"""Such factors, and by how much of the real ones times were off then, see `trust_in_speeds`."""
UNSURE = 0.18
"""A re-linearised time is, where its estimated error exceeds this share of it.

The estimate is on the safe side: this is the largest share at which four of five times that are off
by more than 13 % are doubted on the tasks that it was chosen on.
"""
SHIFTED = 0.13
"""One kernel's time is doubted where rebuilt ones move it by more than this share of theirs."""
SLACK = 2
"""Errors of so many steps are of no account."""
RISE = 2.0
"""A loss that comes to this multiple of its start is not believed."""
ROSE = 2.0
"""A loss that ends this many times above its least is said to have risen."""
SHARE = 0.05
"""And that by at least this share of its drop."""


def trust_in_speeds(witness: Witness, loss: Float[Array | np.ndarray, " t"]) -> str | None:
    """What `ask_network` and the predicted curve say of a forecast with one kernel.

    In 182 runs of `experiments.bench.trust` the largest error of three times, as a share of the
    real one, was in 8 of 10 runs at most 0.10 where speed or loss are by less than 1.2 times
    others, 0.18 up to 1.5, 0.32 up to 2, 0.43 up to 5 and 0.59 beyond.

    Args:
            witness: with 1 where the linearisation holds.
            loss: the predicted curve.

    Returns:
            A sentence, or None where there is no doubt.
    """
    rising = trust_in_loss(loss, "the real network may not survive that; try a lower rate")
    if rising is not None:
        return rising
    if witness.step < 0:
        return None
    change, far = _times(witness.speed), _times(witness.loss) ** OF_LOSS
    if max(change, far) <= DOUBTED:
        return None
    by_loss = far > change
    told = witness.loss if by_loss else witness.speed
    alone = f" of {witness.samples} samples alone" if witness.share < 1 else ""
    where = f"on the way to the weights predicted for step {witness.step}{alone}"
    if not np.isfinite(told):
        return (
            f"{where} the network is not finite: one linearization does not hold that far; try a "
            "lower rate, or relinearize='auto'"
        )
    off = next(words for least, words in OFF if max(change, far) >= least)
    times = _times(told)
    much = "over 100" if times > 100 else f"{times:.2g}"
    if by_loss:
        size = "times" if told > 1 else "times below"
        found = f"the network's loss is {much} {size} what this one linearization has it"
    else:
        how = "fast" if told > 1 else "slowly"
        found = f"the network learns {much} times as {how} as this one linearization has it"
    return (
        f"{where} {found}: times can be off by {off} of themselves; relinearize='auto' follows "
        "such changes"
    )


def _times(ratio: float) -> float:
    """How many times larger or smaller."""
    return max(ratio, 1 / ratio) if ratio > 0 else np.inf


def trust_in_loss(loss: Float[Array | np.ndarray, " t"], remedy: str) -> str | None:
    """What a predicted loss curve says of itself: that it rises.

    Args:
        loss: L_0, ..., L_T.
        remedy: what to do where it rises on the way.

    Returns:
        A sentence, or None where it falls.
    """
    curve = np.asarray(loss)
    top, least = float(curve.max() / curve[0]) if curve[0] > 0 else 1.0, int(curve.argmin())
    if top > RISE:
        return f"the loss rises on the way, to {top:.2g} times its start: {remedy}"
    if curve[-1] > ROSE * curve[least] and curve[-1] - curve[least] > SHARE * (
        curve[0] - curve[least]
    ):
        return (
            f"the loss rises again from step {least} on, which a real training seldom does: more "
            "kernels (relinearize) or a shorter horizon would be surer"
        )
    return None


def trust_in_path(path: RelinearizedTrajectory, rule: Rule) -> str | None:
    """What a re-linearised path says of itself.

    Args:
        path: of `relinearized_recursion`.
        rule: how times are read; those of the loss have an error by the path's own estimate.

    Returns:
        A sentence, or None where there is no doubt.
    """
    if path.held_from >= 0:
        return (
            f"at the edge of stability by step {path.edge_at}: a real training oscillates there; "
            f"this is a mean path with the kernel of step {path.held_from} held"
        )
    rising = trust_in_loss(
        path.loss,
        "at the edge of stability re-linearised networks leave the range from which the real one "
        "often recovers; see relinearize=0",
    )
    if rising is not None:
        return rising
    worst, time, doubt = None, 0, 0
    for threshold in rule.thresholds if rule.metric == "loss" else ():
        step = int(rule.time(path.loss, threshold))
        off = steps_uncertainty(path.loss, path.loss_uncertainty, threshold, rule.time)
        share = off / max(step, 1) if step >= 0 and off > SLACK else 0.0
        if share > (UNSURE if worst is None else doubt / max(time, 1)):
            worst, time, doubt = threshold, step, off
    if worst is None:
        return None
    never = doubt >= len(path.loss) - 1
    known = "may as well never come" if never else f"is known to ± {doubt} only"
    line = f"step {time} ({rule.words(worst)}) {known}, by what the last kernels changed"
    if path.edge_at >= 0:
        return (
            f"crosses the edge of stability by step {path.edge_at}: a real training oscillates "
            f"there, and this is the mean path; {line}"
        )
    return f"{line}; a smaller tolerance builds more kernels"


def trust_in_one_kernel(
    curves: tuple[Any, Any], rebuilt: tuple[Any, Any], path: RelinearizedTrajectory, rule: Rule
) -> str | None:
    """What re-linearised kernels say of the times that one kernel has.

    Args:
        curves: loss and error (T + 1,) by one kernel.
        rebuilt: the same by re-linearised ones.
        path: of those.
        rule: how times are read.

    Returns:
        A sentence where rebuilt kernels move a time by more than `SHIFTED` of itself, or where they
        cannot be followed either; else None.
    """
    own = trust_in_loss(curves[0], "the real network may not survive that; try a lower rate")
    if own is not None:
        return own
    if int(path.diverged_at) >= 0 or path.held_from >= 0:
        why = trust_in_path(path, rule) or f"they diverge at step {int(path.diverged_at)}"
        return f"kernels rebuilt along the path do not confirm it: {why}"
    ours, theirs = rule.read(*curves), rule.read(*rebuilt)
    shifts = {  # never is as far from any step as can be
        e: float("inf") if (ours[e] < 0) != (theirs[e] < 0) else abs(ours[e] - theirs[e])
        for e in rule.thresholds
    }
    moved = [e for e, shift in shifts.items() if shift > max(SLACK, SHIFTED * theirs[e])]
    if not moved:
        return None
    worst = max(moved, key=lambda e: shifts[e] / max(theirs[e], 1))
    came, time = (f"at step {t}" if t >= 0 else "never" for t in (theirs[worst], ours[worst]))
    return (
        f"kernels rebuilt along the path come to {rule.words(worst)} {came}, this one "
        f"linearization {time}: take theirs (relinearize='auto')"
    )
