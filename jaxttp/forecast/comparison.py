"""Which of several starting points trains fastest, and why: checkpoints, networks, what is trained.

Why: the kernel decides. A residual g along eigenvector v_k falls at a rate proportional to
lambda_k, and the largest eigenvalue bounds the learning rate, so what counts is where g lies:

    speed = (g^T Theta g) / (lambda_max |g|^2),      between 0 and 1,

the share of the fastest possible descent that the labels get.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_finite, check_integer, check_known
from jaxttp._core.compile import full_precision
from jaxttp._core.types import count
from jaxttp.adapters.inputs import check_samples
from jaxttp.dynamics._network import compile_network
from jaxttp.dynamics.batches import check_batches
from jaxttp.forecast._options import Keywords, check_tokens, choose_kernel, refuse_mesh
from jaxttp.forecast.candidates import Candidate, check_candidates, problem_of
from jaxttp.forecast.compared import Comparison, Explanation
from jaxttp.forecast.hyperparameters import Hyperparameters
from jaxttp.forecast.leaders import follow_leaders, with_trust
from jaxttp.forecast.paths.base import Linearizer
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.sweeps import sweep_kernel
from jaxttp.forecast.swept import RISK, Sweep
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule, Values, targets_of
from jaxttp.ntk.estimators import KernelEstimator
from jaxttp.ntk.kernels import Kernel
from jaxttp.ntk.spectrum import eigendecomposition, label_alignment
from jaxttp.training import time_step

RATE_SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
"""Learning rates tried for every starting point, as shares of its largest stable one."""
GOALS = (0.1, 0.5)
"""Goals when none are given, as shares of the largest initial loss."""
LEADING = 10
"""Eigenvectors that count as leading."""


def compare(  # noqa: PLR0913
    candidates: Mapping[str, Candidate],
    x: Any,
    y: Any,
    *,
    learning_rate: float | None = None,
    momentum: float = 0.0,
    batch_size: int | None = None,
    loss: str | Loss = "cross_entropy",
    steps: int = 150,
    thresholds: Sequence[float] | None = None,
    target_loss: Values = None,
    target_error: Values = None,
    rule: str | Rule = "absolute",
    metric: str = "loss",
    smooth: int = 1,
    window: int | None = None,
    key: Array | None = None,
    protocol: str | None = None,
    relinearize: int | str = "auto",
    time_steps: bool = True,
    sketch_dim: int | None = None,
    kernel: KernelEstimator | None = None,
    max_bytes: int | None = None,
) -> Comparison:
    """Forecast several starting points on the same data, rank them, and say why.

    Args:
        candidates: starting points by name.
        x: training samples (N, ...), an array or a pytree of arrays with N rows each; a candidate
            may have them in a form of its own.
        y: integer labels (N,) or targets (N, C).
        learning_rate: eta of all of them; when None each gets the best of nine rates below its own
            largest stable one.
        momentum: heavy-ball, in [0, 1).
        batch_size: samples a step; all of them when None.
        loss: a name or a `Loss`.
        steps: the horizon T.
        thresholds: the goals; for the rule "absolute" losses (or errors), by default a tenth and a
            half of the largest initial one.
        target_loss: losses on the training samples to get below, one or several, each above 0.
            Where there are targets they rank before the thresholds, the first one before all.
        target_error: the same of errors, each in (0, 1].
        rule: the definition of training time, see `training_time`. "relative" measures each by its
            own final loss. Or a `Rule`, which takes the place of thresholds, metric, smooth and
            window.
        metric: which curve it is read off, "loss" or "error".
        smooth: steps over which that curve is averaged first, see `smooth_curve`.
        window: steps of the rule "plateau".
        key: a `jax.random.key`, needed with `batch_size` and with `sketch_dim`.
        protocol: how batches are drawn, with `batch_size`: "epochs" when None, see
            `jaxttp.dynamics.batch_indices`.
        relinearize: as in `predict_training_time`: what each is ranked by is forecast along
            rebuilt kernels, at the few rates that lead on its first one. 0 for first kernels alone,
            whose times can be several times the real ones.
        time_steps: also measure the seconds of a training step of each on this device.
        sketch_dim: width of a random projection of the Jacobian that stands for every exact
            kernel, see `sketch_jacobian`.
        kernel: how kernels come about, such as ``jaxttp.ntk.Sketched(4096, key)``, in place of the
            keywords that name it.
        max_bytes: bound on an exact kernel's working memory.

    Returns:
        A `Comparison`. As in `sweep` what is thrown about at the edge of stability counts as twice
        as late; candidates whose every leading forecast had to hold a kernel on its way, since the
        network denied those that were rebuilt, are last, whatever their times.

    Raises:
        ValueError: no candidates, numbers out of range, options that would do nothing, and whatever
            `predict_training_time` refuses of models and data.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.random.normal(jax.random.key(0), (20, 3))
        >>> y = (x[:, 0] > 0).astype(int)
        >>> f = lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"]
        >>> w = {"a": jnp.eye(3), "b": jnp.eye(3)[:, :2]}
        >>> found = compare({"all": Candidate(f, w), "head": Candidate(f, w, lambda p: p == "b")},
        ...                 x, y, steps=40, time_steps=False, relinearize=0)
        >>> sorted(found.names), found.steps.shape
        (['all', 'head'], (2, 2))

    Source:
        TTP Sections 1 and 6 propose it (pre-trained models, hyper-parameters) for single forecasts;
        its Proposition 2 gives the alignment.
    """
    _check(candidates, steps, time_steps)
    Keywords(relinearize=relinearize).check()
    own_goals = thresholds is None and rule == "absolute"
    Rule.of(GOALS if own_goals else thresholds, rule, metric, smooth, window, steps=steps)
    targets = targets_of(target_loss, target_error)
    x = check_samples("x", x)
    check_batches(batch_size, key, protocol, count(x))
    check_known(learning_rate=learning_rate, momentum=momentum, key=key)
    rate = 1.0 if learning_rate is None else learning_rate
    setting = Hyperparameters(rate, momentum, batch_size, loss=loss, steps=steps)
    estimator = choose_kernel(sketch_dim, key, None, max_bytes, kernel)
    refuse_mesh(estimator, "compare", "sweep for each candidate")
    check_finite("x", x)
    problems = {name: problem_of(name, one, x, y, loss) for name, one in candidates.items()}
    if own_goals:
        thresholds = _own_goals([_start(problem, metric) for problem in problems.values()], metric)
    reading = Rule.of(thresholds, rule, metric, smooth, window, steps=steps)
    drawn: dict[str, Any] = {"key": key, "protocol": protocol}
    found = {}
    for name, problem in problems.items():
        check_tokens(problem, estimator)
        lines = Linearizer(problem, estimator)
        choices = _choices(lines, setting, given=learning_rate is not None)
        swept = sweep_kernel(
            lines.first, problem.f0, problem.targets, choices, rule=reading, targets=targets,
            **drawn,
        )  # fmt: skip
        seconds = _step_seconds(problem, loss, swept.settings[0]) if time_steps else np.nan
        follow = {"relinearize": relinearize, **drawn}
        swept = follow_leaders(swept, lines, problem.targets, reading, **follow)
        best = _best(swept)
        told = with_trust(swept, lines, problem.targets, only=(best,))
        found[name] = (told, best, seconds, _explain(lines.first, problem))
    order = sorted(found, key=lambda name: _rank(found[name][0], found[name][1]))
    parts = [found[name] for name in order]
    each = lambda what: [getattr(swept, what)[i] for swept, i, _, _ in parts]  # noqa: E731
    return Comparison(
        names=tuple(order),
        thresholds=reading.thresholds,
        rule=reading.kind,
        steps=np.stack(each("steps")),
        step_seconds=np.array([seconds for _, _, seconds, _ in parts]),
        settings=tuple(dataclasses.replace(one, loss=loss) for one in each("settings")),
        final_loss=np.array(each("final_loss")),
        final_error=np.array(each("final_error")),
        loss=np.stack(each("loss")),
        explanations=tuple(why for _, _, _, why in parts),
        metric=reading.metric,
        trust=tuple(swept.trust.get(i) for swept, i, _, _ in parts),
        targets=targets,
        target_steps=np.stack(each("target_steps")),
        error=_errors([(swept, i) for swept, i, _, _ in parts]),
        trainings=sum(swept.trainings or 0.0 for swept, _, _, _ in parts),
    )


def _errors(chosen: Sequence[tuple[Sweep, int]]) -> np.ndarray | None:
    """Error curves of the settings chosen (K, T + 1), where sweeps have them."""
    curves = [swept.error[i] for swept, i in chosen if swept.error is not None]
    return np.stack(curves) if curves else None


def _check(candidates: Any, steps: Any, time_steps: Any) -> None:
    check_integer("steps", steps, at_least=1)
    check_choice("time_steps", time_steps, (True, False))
    check_candidates(candidates)


def _own_goals(starts: Sequence[float], metric: str) -> tuple[float, ...]:
    """Shares of the largest initial loss, or error."""
    worst = max(starts)
    if not worst > 0:
        raise ValueError(
            f"candidates begin with {metric} 0, of which there is no tenth to get to: give "
            "thresholds or a target."
        )
    return tuple(share * worst for share in GOALS)


def _start(problem: Problem, metric: str) -> float:
    """The loss, or the error, before training."""
    value = problem.loss.value if metric == "loss" else problem.loss.error
    return float(value(problem.f0, problem.targets))


def _choices(lines: Linearizer, setting: Hyperparameters, *, given: bool) -> list[Hyperparameters]:
    """The settings a starting point may train by: the one given, or nine shares of its limit."""
    rates = [setting.learning_rate]
    if not given:
        limit = lines.momentum_limit(setting.momentum)
        if limit >= float(np.finfo(np.float32).max):  # nothing moves, at whatever rate
            limit = 1.0
        rates = [share * limit for share in RATE_SHARES]
    exact = lines.problem.loss
    return [dataclasses.replace(setting, learning_rate=float(rate), loss=exact) for rate in rates]


def _step_seconds(problem: Problem, loss: str | Loss, setting: Hyperparameters) -> float:
    """Seconds of a training step on this device."""
    optimizer = optax.sgd(setting.learning_rate, setting.momentum or None)
    return time_step(
        problem.network, problem.weights, problem.x, problem.labels, loss=loss, optimizer=optimizer,
        batch_size=setting.batch_size,
    ).seconds  # fmt: skip


def _rank(swept: Sweep, i: int) -> tuple[Any, ...]:
    """Smaller is better: targets as given, then the hardest goals reached, then the final loss.

    As in a sweep what is thrown about at the edge of stability counts later than it is said to be,
    and what may not train at all is last; behind it what follows a kernel that was held, since the
    network denied those that were rebuilt: a mean path that knows nothing of what a high rate does
    to a network from random weights.
    """
    never = float("inf")
    good, factor = swept.stable[i], RISK if i in swept.rough else 1.0
    timed = lambda steps: [factor * t if good and t >= 0 else never for t in steps]  # noqa: E731
    times = timed(swept.steps[i])
    hardest_first = [t for _, t in sorted(zip(swept.thresholds, times, strict=True))]
    return (
        i in swept.held,
        i in swept.unsure,
        *timed(swept.target_steps[i]),
        *hardest_first,
        float(swept.final_loss[i]) if good else never,
    )


def _best(swept: Sweep) -> int:
    """The setting of the smallest rank; of those along rebuilt kernels, where one is stable."""
    followed = [i for i in swept.relinearized if swept.stable[i]]
    return min(followed or range(len(swept.settings)), key=lambda i: _rank(swept, i))


@full_precision
def _explain(kernel: Kernel, problem: Problem) -> Explanation:
    f0, gradient = problem.f0, problem.loss.gradient(problem.f0, problem.targets)
    system, times = eigendecomposition(kernel), 1
    if kernel.ndim == 4:
        shares = label_alignment(system, gradient)
    else:  # K ⊗ I_C has every eigenvalue of K for each output
        times = gradient.shape[1]
        shares = jax.vmap(label_alignment, (None, 1), 1)(system, gradient).reshape(-1)
    values = np.repeat(np.asarray(system.values, np.float64), times)
    shares = np.asarray(shares, np.float64)
    total, largest, rank = float(shares.sum()), float(values[0]), times * int(system.rank)
    if not (total > 0 and largest > 0):  # nothing is left to learn, or nothing moves
        return Explanation(0.0, 0.0, float("nan"), rank, largest / f0.shape[0], 0.0, 0.0)
    _, pull, _ = compile_network(problem.network)
    slope = jax.tree.leaves(pull(problem.weights, problem.x, gradient / f0.shape[0]))
    # Equal ones count together; zeros do not, whose order is rounding.
    last = values[min(LEADING, rank) - 1] * (1 - 1e-5)
    return Explanation(
        speed=float(shares @ values) / (largest * total),
        alignment=float(shares[values >= last].sum()) / total,
        condition_number=largest / float(values[rank - 1]),
        rank=rank,
        largest=largest / f0.shape[0],
        sgd=sum(float(jnp.vdot(leaf, leaf)) for leaf in slope),
        adam=sum(float(jnp.sum(jnp.abs(leaf))) for leaf in slope),
    )
