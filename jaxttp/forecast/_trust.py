"""How far a forecast can be trusted, in words."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jaxttp.dynamics._walk import RISE
from jaxttp.dynamics.relinearize import RelinearizedTrajectory
from jaxttp.forecast._second_look import Look
from jaxttp.forecast.bands import steps_uncertainty
from jaxttp.forecast.crossing import training_time

SHIFT = 0.2
"""A training time that moves by more than this share of itself is doubted."""
UNSURE = 0.13
"""So is one of a re-linearised path whose estimated error exceeds this share of it."""
SLACK = 2
"""Moves of so many steps are of no account."""
ROSE = 2.0
"""A loss that ends this many times above its least is said to have risen."""
SHARE = 0.05
"""And that by at least this share of its drop."""


def trust_in_look(
    look: Look, thresholds: Sequence[float], *, metric: str = "loss", **definition: Any
) -> str | None:
    """What the network's answers along a forecast with one kernel say of it.

    Args:
        look: of `second_look`.
        thresholds: the epsilons.
        metric: the curve that training times are read off.
        **definition: rule, window and smooth of `training_time`.

    Returns:
        A sentence, or None where there is no doubt.
    """
    rising = trust_in_loss(look.loss[0], "the real network may not survive that; try a lower rate")
    if rising is not None:
        return rising
    if not look.finite:
        return (
            "one linearization does not hold: at the predicted weights the network is not finite, "
            "or trains apart; try a lower rate, or relinearize='auto'"
        )
    curves = look.loss if metric == "loss" else look.error
    times, moved = (
        {e: int(training_time(curve, e, **definition)) for e in thresholds} for curve in curves
    )
    rule = definition.get("rule", "relative")
    worst, far = None, SHIFT
    for threshold, time in times.items():
        share = _move(time, moved[threshold])
        if share > far:
            worst, far = threshold, share
    if worst is None:
        return None
    goal = f"{100 * worst:g} %" if rule == "relative" else f"{worst:g}"
    what = "" if metric == "loss" else " of the error"
    then = "nowhere" if moved[worst] < 0 else f"nearer to step {moved[worst]}"
    return (
        f"one linearization does not hold that far: asked at the predicted weights, the network "
        f"puts {goal}{what} {then} than to {times[worst]}; relinearize='auto' follows such changes"
    )


def _move(time: int, moved: int) -> float:
    """How far a time moved, as a share of where it came to."""
    if time < 0 or moved < 0:
        return 0.0 if time == moved else np.inf
    return abs(time - moved) / max(moved, 1) if abs(time - moved) > SLACK else 0.0


def trust_in_loss(loss: Float[Array, " t"], remedy: str) -> str | None:
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


def trust_in_path(
    path: RelinearizedTrajectory, thresholds: Sequence[float], **definition: Any
) -> str | None:
    """What a re-linearised path says of itself.

    Args:
        path: of `relinearized_recursion`.
        thresholds: the epsilons; none where times are not read off the loss.
        **definition: rule, window and smooth of `training_time`.

    Returns:
        A sentence, or None where there is no doubt.
    """
    if path.held_from >= 0 and path.edge_at >= 0:
        return (
            f"at the edge of stability by step {path.edge_at}: a real training oscillates there; "
            f"this is a mean path with the kernel of step {path.held_from} held"
        )
    if path.held_from >= 0:
        return (
            "the network denies its linearisations further on: the kernel of step "
            f"{path.held_from} was held"
        )
    rising = trust_in_loss(
        path.loss,
        "at the edge of stability re-linearised networks leave the range from which the real one "
        "often recovers; see relinearize=0",
    )
    if rising is not None:
        return rising
    worst, time, doubt = None, 0, 0
    for threshold in thresholds:
        step = int(training_time(path.loss, threshold, **definition))
        off = steps_uncertainty(path.loss, path.loss_uncertainty, threshold, **definition)
        share = off / max(step, 1) if step >= 0 and off > SLACK else 0.0
        if share > (UNSURE if worst is None else doubt / max(time, 1)):
            worst, time, doubt = threshold, step, off
    if worst is None:
        return None
    line = f"step {time} is known to ± {doubt} only, by what the last kernels changed"
    if path.edge_at >= 0:
        return (
            f"crosses the edge of stability by step {path.edge_at}: a real training oscillates "
            f"there, and this is the mean path; {line}"
        )
    return f"{line}; a smaller tolerance or a shorter horizon would be surer"
