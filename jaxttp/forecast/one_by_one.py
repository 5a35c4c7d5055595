"""The settings of a sweep that are not heavy-ball descent: each is followed by itself.

Heavy-ball settings move together, as one matrix product a step. Nesterov's momentum and a decay of
the weights are recursions of their own on the same kernel; Adam, AdamW and others know no kernel,
and the linearised network is trained by them: at about the price of a training each, which a sweep
says. A race trains the network itself for less (`jaxttp.race`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array

from jaxttp.forecast._options import Keywords
from jaxttp.forecast.descent import Descent
from jaxttp.forecast.hyperparameters import Hyperparameters
from jaxttp.forecast.paths.base import Dynamics, Linearizer, Path
from jaxttp.forecast.paths.weight_space import WeightSpace
from jaxttp.forecast.price import Price
from jaxttp.losses import get_loss
from jaxttp.losses.rule import Rule


class Alone(NamedTuple):
    """A setting that was followed by itself.

    Attributes:
        path: of the linearised network.
        stable: the verdict.
        limit: the largest stable rate, infinite where none is known.
        simulated: whether no kernel could be rebuilt for it.
        trust: as of a prediction.
        cost: in trainings of it, the first kernel apart.
    """

    path: Path
    stable: bool
    limit: float
    simulated: bool
    trust: str | None
    cost: float


def descent_of(one: Hyperparameters, key: Array | None, protocol: str | None) -> Descent:
    """The training of a setting."""
    common: dict[str, Any] = {"steps": one.steps, "batch_size": one.batch_size}
    if one.batch_size is not None:
        common |= {"key": key, "protocol": protocol}
    if one.schedule == "constant" and one.is_heavy_ball:
        return Descent.of(learning_rate=one.learning_rate, momentum=one.momentum, **common)
    return Descent.of(optimizer=one.optimizer(), **common)


def lines_of(lines: Linearizer, one: Hyperparameters, y: Any) -> Linearizer:
    """Linearisations of the same problem with the loss of a setting, counted by themselves.

    Args:
        lines: of the problem.
        one: the setting.
        y: integer labels (N,) or targets (N, C).
    """
    problem = lines.problem
    if get_loss(one.loss).keyed(problem.f0, problem.targets) != problem.loss:
        problem = problem.with_loss(one.loss, y)
    return lines.contrasted(problem)


def cost_of(lines: Linearizer, descent: Descent, passes: float, products: int) -> float:
    """What was done, in trainings of a setting, by count.

    Args:
        lines: that were asked for kernels.
        descent: the training.
        passes: through the network, beside those of the lines.
        products: with a kernel.
    """
    price = Price.of(lines.problem, descent, lines.estimator)
    return price.forecast(lines.kernels, lines.passes + passes, products) / price.training


def follow_alone(
    settings: Sequence[Hyperparameters],
    lines: Linearizer,
    y: Any,
    rule: Rule,
    *,
    key: Array | None = None,
    protocol: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Alone]:
    """Follow settings one by one, along one linearisation.

    Args:
        settings: which.
        lines: of the problem.
        y: integer labels (N,) or targets (N, C).
        rule: by which times are read, for `Alone.trust`.
        key: of the batches.
        protocol: how they are drawn.
        progress: called with (stage, done, total).

    Raises:
        ValueError: an algorithm that cannot step these weights by gradients alone.
    """
    ways: list[tuple[Dynamics, Descent, Hyperparameters]] = []
    for one in settings:
        descent = descent_of(one, key, protocol)
        way = Keywords(relinearize=0).choose(descent, lines.problem.weights)
        way.check(descent, lines.problem.weights, get_loss(one.loss))
        ways.append((way, descent, one))
    found = []
    for done, (way, descent, one) in enumerate(ways):
        if progress is not None:
            progress("following other algorithms", done, len(ways))
        simulated = isinstance(way, WeightSpace)
        if not simulated:
            _ = lines.first  # one kernel for all
        beside = lines_of(lines, one, y)
        path = way.follow(beside, descent)
        limit, rates = (np.inf, None) if simulated else way.rates(beside, descent)
        found.append(Alone(
            path, way.is_stable(path, rates, descent), limit, simulated, way.trust(path, rule),
            cost_of(beside, descent, path.gradient_evaluations, path.products),
        ))  # fmt: skip
    return found
