"""The settings that lead a sweep, forecast again with rebuilt kernels.

One kernel ranks a thousand settings at once, but its times can be three times the real ones, and
it passes over rates at which the kernel soon outgrows them. So what a sweep would advise is
followed as `predict_training_time` follows it, best first, until what leads has been looked at.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp.forecast._options import Keywords, in_proportion
from jaxttp.forecast.descent import Descent
from jaxttp.forecast.hyperparameters import Hyperparameters
from jaxttp.forecast.paths.base import Linearizer, Path
from jaxttp.forecast.paths.relinearized import Relinearized
from jaxttp.forecast.swept import Sweep
from jaxttp.losses import get_loss
from jaxttp.rule import Rule

SURE, LEAST, MOST = 1, 2, 5
"""So many of the first are to be looked at, and so many settings in all, at least and at most."""
ARRAYS = ("steps", "target_steps", "stable", "final_loss", "final_error", "loss")
"""What a `Sweep` holds of every setting, and is replaced."""


def descent_of(one: Hyperparameters, key: Array | None, protocol: str | None) -> Descent:
    """The training of a setting."""
    common: dict[str, Any] = {"steps": one.steps, "batch_size": one.batch_size}
    if one.batch_size is not None:
        common |= {"key": key, "protocol": protocol}
    if one.schedule == "constant":
        return Descent.of(learning_rate=one.learning_rate, momentum=one.momentum, **common)
    rates = jnp.asarray(one.rates())
    schedule = lambda t: rates[t]  # noqa: E731
    return Descent.of(optimizer=optax.sgd(schedule, one.momentum or None), **common)


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

    Those first in what the sweep is ranked by (`Sweep.ranked_by`), by steps and by cost, are
    followed until those in front have been, two at least and five at most.
    Where rebuilding the kernels is out of proportion (see `predict_training_time`) nothing is done.

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
    keywords.check()
    report = progress or (lambda stage, done, total: None)
    while len(swept.relinearized) < MOST:
        waiting = _next(swept)
        if waiting is None:
            break
        report("rebuilding kernels of the leading settings", len(swept.relinearized), MOST)
        one = swept.settings[waiting]
        problem = lines.problem
        if get_loss(one.loss) != problem.loss:
            problem = problem.with_loss(one.loss, y)
        beside = Linearizer(problem, lines.estimator, first=lines.first)
        descent = descent_of(one, key, protocol)
        way = keywords.choose(descent, problem.weights)
        if relinearize == "auto":
            way, _ = in_proportion(way, problem, descent)
        if not isinstance(way, Relinearized):
            break
        path = way.follow(beside, descent)
        _, rates = way.rates(beside, descent)
        stable = way.is_stable(path, rates, descent)
        swept = _replaced(swept, waiting, path, rule, way.trust(path, rule), stable=stable)
    return swept


def _next(swept: Sweep) -> int | None:
    """The setting to follow next; None where what leads has been followed."""
    orders = (swept.ranking(), swept.cheapest())
    done = set(swept.relinearized)
    for order in orders:
        for i in order[:SURE]:
            if i not in done:
                return i
    if len(done) >= LEAST:
        return None
    return next((i for i in orders[0] if i not in done), None)


def _replaced(
    swept: Sweep, i: int, path: Path, rule: Rule, trust: str | None, *, stable: bool
) -> Sweep:
    """The sweep with setting i read off a path along rebuilt kernels."""
    loss, error = (np.asarray(curve, np.float64) for curve in (path.loss, path.error))
    kept = {name: getattr(swept, name).copy() for name in ARRAYS}
    kept["steps"][i] = _times(rule, path, stable)
    for k, target in enumerate(swept.targets):
        kept["target_steps"][i, k] = _times(target.rule(rule.smooth), path, stable)[0]
    kept["stable"][i], kept["final_loss"][i], kept["final_error"][i] = stable, loss[-1], error[-1]
    kept["loss"][i] = _to_length(loss, kept["loss"].shape[1])
    if swept.error is not None:
        kept["error"] = swept.error.copy()
        kept["error"][i] = _to_length(error, swept.error.shape[1])
    return dataclasses.replace(
        swept, **kept, trust={**swept.trust, i: trust}, relinearized=(*swept.relinearized, i)
    )


def _times(rule: Rule, path: Path, stable: bool) -> list[int]:
    """Steps to every threshold of a rule, -1 where the path is not stable."""
    if not stable:
        return [-1] * len(rule.thresholds)
    curve = rule.curve(path.loss, path.error)
    return [int(rule.time(curve, threshold)) for threshold in rule.thresholds]


def _to_length(curve: np.ndarray, length: int) -> np.ndarray:
    """A curve held at its end until it has this length."""
    return np.pad(curve, (0, length - len(curve)), mode="edge")
