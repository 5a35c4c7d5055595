"""The settings that lead a sweep: forecast again with rebuilt kernels, or the network is asked.

One kernel ranks a thousand settings at once, but its times can be three times the real ones, and
it passes over rates at which the kernel soon outgrows them. So what a sweep would advise is
followed as `predict_training_time` follows it, best first, until what leads has been looked at;
of the others that are shown the network is asked how fast it learns (`with_trust`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.compile import jit
from jaxttp.dynamics._kernels import check_problem
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.dynamics.recursion import recursion
from jaxttp.forecast._along import Subset
from jaxttp.forecast._curves import held_to
from jaxttp.forecast._options import Keywords, announce
from jaxttp.forecast._shared import with_shared_goal
from jaxttp.forecast._trust import trust_in_speeds
from jaxttp.forecast._witness import NOBODY, Witness, ask_network
from jaxttp.forecast.doubt import LEVEL, Doubt
from jaxttp.forecast.hyperparameters import Hyperparameters
from jaxttp.forecast.one_by_one import cost_of, descent_of, lines_of
from jaxttp.forecast.paths.base import Linearizer, Path
from jaxttp.forecast.paths.recursion import Linear
from jaxttp.forecast.paths.relinearized import Relinearized
from jaxttp.forecast.planner import plan_forecast, suited
from jaxttp.forecast.swept import FEW, SHOWN, Sweep
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule, Target
from jaxttp.ntk.kernels import Kernel

SURE, LEAST, MOST = 1, 2, 8
"""So many of the first are to be looked at, and so many settings in all, at least and at most."""
NEAREST = 4
"""And where fewer than two get to the goal so many with those that come nearest to it."""
BEYOND = 3.0
"""Rates up to so many times the first kernel's limit are tried, where lower ones lead."""
SHARP, FAST = 2.0, 0.5
"""Where the curvature comes to so many times the edge of stability, with a rate of more than this
share of its limit at the start, real trainings of the tuning tasks did not come back."""


class Rebuilt(NamedTuple):
    """A setting along rebuilt kernels, or on the one of a linear network."""

    way: Relinearized | Linear
    path: Path
    stable: bool


def follow_leaders(
    swept: Sweep,
    lines: Linearizer,
    y: Any,
    rule: Rule,
    *,
    relinearize: int | str = "auto",
    key: Array | None = None,
    protocol: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Sweep:
    """The same sweep, with its leading settings forecast again along rebuilt kernels.

    Those of algorithms that know no kernel (`Sweep.simulated`) stay as they are.
    Those first in what the sweep is ranked by (`Sweep.ranked_by`), by steps and by cost, are
    followed until those in front have been, and then the next higher rate of what leads for as long
    as it leads in turn, also beyond the first kernel's limit, which networks often survive, or the
    next lower one where what leads is thrown about at the edge of stability, and then those
    that have nothing against them but that limit (`Sweep.above_limit`): two at least and eight at
    most; of eight settings or fewer all that are stable, too. Where fewer than two get to the goal,
    those that come nearest to it are, four at most. A goal that the sweep chose is chosen again by
    the ends of those that were followed.
    Kernels are rebuilt as often as the default budget allows (see `predict_training_time`).

    Args:
        swept: of `sweep_kernel`, on this first kernel.
        lines: of the problem.
        y: integer labels (N,) or targets (N, C).
        rule: by which the sweep was read.
        relinearize: as in `predict_training_time`; 0 for nothing.
        key: of the batches, as in the sweep.
        protocol: likewise.
        progress: called with (stage, done, total).

    Returns:
        A `Sweep` whose `relinearized` names the settings that were followed. Their times, curves,
        verdicts and trust are those of rebuilt kernels.
    """
    keywords = Keywords(relinearize=relinearize)
    report = progress or (lambda stage, done, total: None)
    most = len(swept.settings) if len(swept.settings) <= FEW else MOST
    screened, followed = swept, {}
    one = swept.settings[0]
    products = sum(other.is_heavy_ball for other in swept.settings) * one.steps
    spent = (swept.trainings or 0.0) + cost_of(lines, descent_of(one, key, protocol), 0, products)
    while len(followed) < most:
        waiting = _next(swept)
        if waiting is None:
            break
        one = swept.settings[waiting]
        beside, descent = lines_of(lines, one, y), descent_of(one, key, protocol)
        way = keywords.choose(descent, beside.problem.weights)
        if relinearize == "auto":
            plan = plan_forecast(way, beside.problem, descent, lines.estimator)
            way = plan.dynamics
            if progress is None and not followed:
                announce(plan, *_long(most), forecasts=most, trainings=len(swept.settings))
        way = suited(way, beside.problem)
        if not isinstance(way, Relinearized | Linear):
            break
        report("rebuilding kernels of the leading settings", len(followed), most)
        path = way.follow(beside, descent)
        _, rates = way.rates(beside, descent)
        stable = way.is_stable(path, rates, descent)
        spent += cost_of(beside, descent, path.gradient_evaluations, path.products)
        followed[waiting] = Rebuilt(way, path, stable)
        swept = _read(screened, followed, rule)
    return dataclasses.replace(swept, trainings=spent)


def _long(most: int) -> tuple[str, str]:
    """What may take minutes, and what there is in its place."""
    which = f"forecasting up to {most} leading settings again" if most > 1 else "this forecast"
    return which, (
        "relinearize=0 stays with one kernel, which ranks them less truly; jaxttp.race trains them"
    )


def _read(screened: Sweep, followed: Mapping[int, Rebuilt], rule: Rule) -> Sweep:
    """The sweep with the settings that were followed in the place of the first kernel's."""
    swept = screened
    if swept.shared:
        curves = [np.asarray(rule.curve(one.path.loss, one.path.error), np.float64)[[0, -1]]
                  for one in followed.values() if one.stable]  # fmt: skip
        left = screened.stable.copy()
        left[list(followed)] = False
        rest = rule.curve(screened.loss, screened.error)[left]
        swept = with_shared_goal(swept, rule, np.stack(curves) if curves else rest)
    for i, one in followed.items():
        swept = _replaced(swept, i, one, rule)
    return swept


def _next(swept: Sweep) -> int | None:
    """The setting to follow next; None where what leads has been followed."""
    orders = (swept.ranking(), swept.cheapest())
    done = {*swept.relinearized, *swept.simulated}
    first = [i for order in orders for i in order[:SURE]]
    if len(orders[0]) < LEAST and len(swept.relinearized) < NEAREST:  # one kernel may be late
        first = [*swept.nearest(), *first]
    for i in first:
        if i not in done:
            return i
    leaders = [order[0] for order in orders if order]
    beside = [_beside(swept, i, higher=True) for i in leaders]
    beside += [_beside(swept, i, higher=False) for i in leaders if i in swept.rough]
    few = len(swept.settings) <= FEW
    waiting = [i for i in (*beside, *swept.above_limit) if i is not None and i not in done]
    if waiting:
        return waiting[0]
    if len(swept.relinearized) >= LEAST and not few:
        return None
    rest = (*orders[0], *(np.flatnonzero(swept.stable).tolist() if few else ()))
    return next((i for i in rest if i not in done), None)


def _beside(swept: Sweep, leader: int, *, higher: bool) -> int | None:
    """The setting with the next higher rate, or lower, that is like a leader otherwise."""
    one = swept.settings[leader]
    away = {
        i: other.learning_rate - one.learning_rate for i, other in enumerate(swept.settings)
        if other.learning_rate <= BEYOND * swept.limits[i]
        and dataclasses.replace(other, learning_rate=one.learning_rate) == one
    }  # fmt: skip
    side = [i for i, far in away.items() if (far > 0 if higher else far < 0)]
    return min(side, key=lambda i: abs(away[i]), default=None)


def _replaced(swept: Sweep, i: int, one: Rebuilt, rule: Rule) -> Sweep:
    """The sweep with setting i read off a path along rebuilt kernels."""
    path, stable = one.path, one.stable
    trust = one.way.trust(path, rule.about(swept.targets))
    loss, error = (np.asarray(curve, np.float64) for curve in (path.loss, path.error))
    doubt = Doubt.of(path, rule, stable=stable, level=LEVEL, targets=swept.targets)
    length = swept.loss.shape[1]
    found: dict[str, Any] = {
        "steps": list(doubt.steps.values()),
        "stable": stable,
        "final_loss": loss[-1],
        "final_error": error[-1],
        "loss": held_to(loss, length),
    }
    if swept.targets:
        found["target_steps"] = list(doubt.targets.values())
    if swept.error is not None:
        found["error"] = held_to(error, length)
    goal = swept.ranked_by
    time = doubt.targets[goal] if isinstance(goal, Target) else doubt.steps[goal]
    risky, rough, held = _risks(path, swept.share(i), time)
    off = {**(doubt.steps_uncertainty or {}), **doubt.targets_uncertainty}
    kept = {name: getattr(swept, name).copy() for name in found}
    for name, value in found.items():
        kept[name][i] = value
    return dataclasses.replace(
        swept, **kept, trust={**swept.trust, i: trust}, relinearized=(*swept.relinearized, i),
        uncertainty={**swept.uncertainty, i: off},
        unsure=swept.unsure | {i} if risky else swept.unsure,
        rough=swept.rough | {i} if rough else swept.rough,
        held=swept.held | {i} if held else swept.held,
    )  # fmt: skip


def _risks(path: Path, share: float, time: int) -> tuple[bool, bool, bool]:
    """Whether training may fail, and is thrown about before the goal; whether a kernel was held.

    Args:
        path: along rebuilt kernels.
        share: of the largest stable rate, at the start.
        time: the predicted one, -1 for never.
    """
    seen = path.witness
    if isinstance(seen, Witness):  # one kernel: a linear network stays as stable as it was
        return path.unsure_from is not None, False, False
    # It comes to the edge somewhere in the segment that ends there.
    edge = max((end for end in seen.ends if end < seen.edge_at), default=0)
    edge = edge if seen.edge_at >= 0 else -1
    rough = any(0 <= step < time for step in (edge, seen.held_from))
    risky = path.unsure_from is not None or (rough and seen.sharpest > SHARP and share > FAST)
    return risky, rough, seen.held_from >= 0


def with_trust(
    swept: Sweep,
    lines: Linearizer,
    y: Any,
    *,
    only: Sequence[int] | None = None,
) -> Sweep:
    """The same sweep, with `Sweep.trust` for the settings that it shows first.

    Those are the five cheapest to what the sweep is ranked by (`Sweep.ranked_by`) and the first to
    every other threshold and target, each for a pass through the network or two (`ask_network`);
    what is compiled serves all of a batch size. Those that were followed along rebuilt kernels have
    said it already.

    Args:
        swept: of `sweep_kernel`, on this first kernel.
        lines: of the problem.
        y: integer labels (N,) or targets (N, C).
        only: the settings to ask about, where those are known.

    Returns:
        A `Sweep`.
    """
    goals = (*swept.targets, *swept.thresholds)
    chosen = {i for goal in goals for i in swept.ranking(goal)[:1]}
    chosen |= set(swept.cheapest()[:SHOWN])
    chosen = chosen if only is None else set(only)
    problem = lines.problem
    trust = dict(swept.trust)
    for i in sorted(chosen - set(trust)):  # others were followed, which told it
        one = swept.settings[i]
        theta, start, targets, loss, _, _ = check_problem(lines.first, problem.f0, y, one.loss)
        follow = functools.partial(_follow, one, loss)
        whole = Subset(theta, problem.x, targets, start)
        witness = NOBODY
        if lines.asks:
            witness = ask_network(
                problem.network, problem.weights, whole, loss, follow, one.batch_size
            )
        trust[i] = trust_in_speeds(witness, jnp.asarray(swept.loss[i, : one.steps + 1]))
    return dataclasses.replace(swept, trust=trust)


def _follow(one: Hyperparameters, loss: Loss, part: Subset) -> Trajectory:
    """The training of some samples with full batches."""
    rates = jnp.asarray(one.rates(), part.start.dtype)
    momentum = jnp.asarray(one.momentum, part.start.dtype)
    return heavy_ball_path(
        part.kernel, part.start, part.targets, rates, momentum, None, loss=loss, batch_size=None
    )


@functools.partial(jit, static_argnames=("loss", "batch_size", "protocol"))
def heavy_ball_path(
    kernel: Kernel,
    start: Array,
    targets: Array,
    rates: Array,
    momentum: Array,
    key: Array | None,
    *,
    loss: Loss,
    batch_size: int | None,
    protocol: str = "epochs",
) -> Trajectory:
    """`recursion` for heavy-ball descent whose rates are arrays, so that settings share it."""
    optimizer = optax.chain(
        optax.trace(momentum),  # type: ignore
        optax.scale_by_schedule(lambda t: -rates[t]),
    )
    return recursion(
        kernel, start, targets, loss=loss, optimizer=optimizer, steps=len(rates),
        batch_size=batch_size, key=key, protocol=protocol,
    )  # fmt: skip
