"""Which setting, or which start, is first, by real training in heats.

A forecast costs kernels. Where a training is short or a network small, these cost more than to
train the settings themselves for a few steps; and what was trained is never wrong about itself. So
this is no forecast, and says so: a race trains (`jaxttp.forecast.heats`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import check_known, check_number
from jaxttp._core.types import ApplyFn, Params, count
from jaxttp.adapters.inputs import check_samples
from jaxttp.dynamics.batches import check_batches
from jaxttp.forecast.candidates import Candidate, check_candidates, problem_of
from jaxttp.forecast.heats import Runner, Track, run_heats
from jaxttp.forecast.hyperparameters import Hyperparameters, check_settings
from jaxttp.forecast.price import STEP
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.raced import Race
from jaxttp.losses import get_loss
from jaxttp.losses.rule import Target


def race(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    settings: Sequence[Hyperparameters],
    *,
    target_loss: float | None = None,
    key: Array | None = None,
    protocol: str | None = None,
    trainable: Any = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Race:
    """Train settings for real, in heats, until the first is at a loss; `params` are not changed.

    What trains is `apply_fn`, in evaluation mode where an adapter made it: BatchNorm on its running
    averages, no dropout (`Race.notes`). The first of all ends it; for the best setting of each
    algorithm race them apart.

    This is what `sweep` is not: a training. It sees what one kernel cannot (high rates, curvature
    that grows, noise), and costs a few trainings for dozens of settings: less than the sweep where
    a network is small, more where a forecast costs a thirtieth of a training.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode.
        params: pytree of floating-point arrays, the weights before training.
        x: training samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        settings: what starts; `grid` makes combinations, of any algorithms. They share loss, batch
            size and horizon.
        target_loss: the loss on the training samples to get to, above 0; without it those that are
            left train to the horizon, and the lowest loss there wins.
        key: a `jax.random.key` for the batches, needed where there are some; all settings see the
            same ones.
        protocol: how batches are drawn, see `jaxttp.dynamics.batch_indices`.
        trainable: which parameters train, as in `empirical_ntk`; all of them when None.
        progress: called with (stage, settings done, settings in all).

    Returns:
        A `Race`. Weights and velocities of all that are in the race are held at a time. With
        batches the loss on all samples is looked at where a heat ends and, as long as the batches
        themselves are at no more than twice the goal, every N/(3 B) steps, so that to look costs as
        much as to train; times are multiples of that.

    Raises:
        ValueError: no settings, or of several losses, batch sizes or horizons; a target that is not
            above 0; batches without a key; whatever `predict_training_time` refuses of model and
            data.
        TypeError: settings that are none.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp.forecast import grid
        >>> x = jnp.stack([jnp.linspace(-1, 1, 20), jnp.ones(20)], axis=1)
        >>> y = (x[:, 0] > 0).astype(int)
        >>> settings = grid(learning_rate=(0.1, 1.0), momentum=(0.0, 0.9), steps=50)
        >>> found = race(lambda w, x: x @ w, jnp.zeros((2, 2)), x, y, settings, target_loss=0.3)
        >>> str(found.settings[found.best()]), int(found.times[found.best()])
        ('rate 1, momentum 0.9', 3)

    Source:
        Successive halving (Jamieson and Talwalkar 2016), with a goal that ends it; the numbers of
        the heats were chosen on tuning tasks (`experiments/bench/races.py`).
    """
    check_known(params=params, x=x, y=y, key=key, target_loss=target_loss)
    settings = _alike(settings)
    one, goal = settings[0], _goal(target_loss)
    x = check_samples("x", x)
    protocol = check_batches(one.batch_size, key, protocol, count(x))
    problem = Problem.of(apply_fn, params, x, y, loss=one.loss, trainable=trainable)
    track = Track.of(problem, one, key, protocol)
    runners = [Runner(setting, track) for setting in settings]
    run_heats(runners, one.steps, goal, progress)
    return _result(settings, goal, runners)


def race_starts(
    candidates: Mapping[str, Candidate],
    x: Any,
    y: Any,
    settings: Sequence[Hyperparameters] | Mapping[str, Sequence[Hyperparameters]],
    *,
    target_loss: float | None = None,
    key: Array | None = None,
    protocol: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Race:
    """`race` for starting points: checkpoints, networks, what is trained, each by every setting.

    Which start is best depends on the rate that suits it, and a rate that suits is found with a few
    steps: so every start begins with all settings, and what is slow is left out, start or rate.
    `compare` forecasts instead, and says why; of networks that train in seconds this is the better
    guide at a fraction of the cost.

    Args:
        candidates: starting points by name.
        x: training samples (N, ...), an array or a pytree of arrays with N rows each; a candidate
            may have them in a form of its own.
        y: integer labels (N,) or targets (N, C).
        settings: what every start is trained by; or by the name of a start, its own. They share
            loss, batch size and horizon.
        target_loss: as in `race`.
        key: as in `race`; all see the same batches.
        protocol: as in `race`.
        progress: as in `race`.

    Returns:
        A `Race` of all pairs, whose `starts` name the starting points and `order` ranks them.
        `trainings` count every pair's steps by a training of its own.

    Raises:
        ValueError: no candidates; names of settings that are not those of the candidates; whatever
            `race` refuses.
        TypeError: candidates or settings that are none.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp.forecast import grid
        >>> x = jnp.stack([jnp.linspace(-1, 1, 20), jnp.ones(20)], axis=1)
        >>> y = (x[:, 0] > 0).astype(int)
        >>> linear = lambda w, x: x @ w
        >>> ways = {"zero": jnp.zeros((2, 2)), "near": jnp.array([[-2.0, 2.0], [0.0, 0.0]])}
        >>> starts = {name: Candidate(linear, w) for name, w in ways.items()}
        >>> found = race_starts(starts, x, y, grid(learning_rate=(0.1, 1.0)), target_loss=0.15)
        >>> found.order, str(found.settings[found.best()])
        (('near', 'zero'), 'rate 1')

    Source:
        Successive halving, as `race`, with its numbers.
    """
    check_candidates(candidates)
    check_known(key=key, target_loss=target_loss)
    by_start = _by_start(candidates, settings)
    every = _alike([one for some in by_start.values() for one in some])
    one, goal = every[0], _goal(target_loss)
    x = check_samples("x", x)
    protocol = check_batches(one.batch_size, key, protocol, count(x))
    runners, starts = [], []
    for name, start in candidates.items():
        problem = problem_of(name, start, x, y, one.loss)
        track = Track.of(problem, one, key, protocol)
        runners += [Runner(setting, track) for setting in by_start[name]]
        starts += [name] * len(by_start[name])
    run_heats(runners, one.steps, goal, progress)
    return _result(every, goal, runners, tuple(starts))


def _by_start(
    candidates: Mapping[str, Candidate],
    settings: Sequence[Hyperparameters] | Mapping[str, Sequence[Hyperparameters]],
) -> dict[str, tuple[Hyperparameters, ...]]:
    """The settings of every start."""
    if not isinstance(settings, Mapping):
        return dict.fromkeys(candidates, check_settings(settings))
    if set(settings) != set(candidates):
        raise ValueError(
            f"settings must have those of every candidate, {', '.join(map(repr, candidates))}, and "
            f"of no other; got those of {', '.join(map(repr, settings)) or 'none'}."
        )
    return {name: check_settings(settings[name]) for name in candidates}


def _goal(target_loss: float | None) -> Target | None:
    if target_loss is None:
        return None
    check_number("target_loss", target_loss, above=0.0)
    return Target(float(target_loss))


def _alike(settings: Sequence[Hyperparameters]) -> tuple[Hyperparameters, ...]:
    """Settings of one race."""
    settings = check_settings(settings)
    for name in ("loss", "batch_size", "steps"):
        values = {get_loss(s.loss) if name == "loss" else getattr(s, name) for s in settings}
        if len(values) > 1:
            said = ", ".join(sorted(str(getattr(s, name)) for s in settings[:8]))
            raise ValueError(
                f"settings must share {name}, to be in one race; got {said}: race every group by "
                "itself, or ask `sweep`."
            )
    return settings


def _result(
    settings: tuple[Hyperparameters, ...],
    goal: Target | None,
    runners: Sequence[Runner],
    starts: tuple[str, ...] = (),
) -> Race:
    problems: list[Problem] = [runner.track.problem for runner in runners]
    for problem in {id(problem): problem for problem in problems}.values():
        # All settings see the same batches: what outlived a sample shows that its gradient is good.
        own = (runner for runner in runners if runner.track.problem is problem)
        problem.check_gradients(max(own, key=lambda one: (one.done, one.finite)).losses)
    n, one = len(problems[0].f0), settings[0]
    share = (one.batch_size or n) / n
    spent = sum(runner.done * share + runner.looks / STEP for runner in runners)
    ends = [(r.there if r.there is not None else one.steps + 1, r.losses[-1]) for r in runners]
    in_it = [i for i, r in enumerate(runners) if r.weights is not None and r.finite]
    first = min(in_it, key=lambda i: ends[i], default=None)
    notes = dict.fromkeys(note for problem in problems for note in problem.notes)
    return Race(
        settings, goal,
        np.array([-1 if runner.there is None else runner.there for runner in runners]),
        tuple(np.array(runner.losses) for runner in runners),
        tuple(np.array(runner.at) for runner in runners),
        float(spent / (one.steps * share)),
        None if first is None else problems[first].restore(runners[first].weights),
        np.array([runner.finite for runner in runners]), tuple(notes), starts,
    )  # fmt: skip
