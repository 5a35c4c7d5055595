"""Which starting point trains fastest, and why: checkpoints, networks, sets of trained weights.

A residual g along eigenvector v_k falls at a rate proportional to lambda_k, and the largest
eigenvalue bounds the learning rate, so the alignment of g with the leading eigenvectors decides:

    speed = (g^T Theta g) / (lambda_max |g|^2),      between 0 and 1,

the fraction of the fastest possible descent that the labels get.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_finite, check_integer, check_known
from jaxttp._core.compile import full_precision
from jaxttp._core.progress import readable_time
from jaxttp._core.results import RESULT, wrapped
from jaxttp._core.types import count
from jaxttp.adapters.inputs import check_samples
from jaxttp.dynamics.batches import check_batches
from jaxttp.forecast.methods.base import Linearizer
from jaxttp.forecast.options import Keywords, check_tokens, choose_kernel, refuse_mesh
from jaxttp.forecast.problem import Candidate, Problem, check_candidates, problem_of
from jaxttp.forecast.sweep import SweepPlan, forecast_leaders, screen, with_warnings
from jaxttp.forecast.sweep_result import Sweep
from jaxttp.forecast.training_setup import Hyperparameters
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule, Target, Values, targets_of
from jaxttp.ntk.estimators import KernelEstimator
from jaxttp.ntk.kernels import Kernel
from jaxttp.ntk.spectrum import eigendecomposition, label_alignment
from jaxttp.training import time_step

RATE_FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
"""Learning rates tried for every starting point, as fractions of its largest stable one."""
GOALS = (0.1, 0.5)
"""Targets when none are given, as fractions of the largest initial loss."""


class Explanation(NamedTuple):
    """What the kernel says about a starting point.

    Attributes:
        speed: g^T Theta g / (lambda_max |g|^2), in [0, 1], g the loss's gradient in the outputs.
        alignment: fraction of |g|^2 along the 10 leading eigenvectors.
        condition_number: lambda_max over the smallest eigenvalue that counts.
        rank: how many eigenvalues count (those above N C eps lambda_max).
    """

    speed: float
    alignment: float
    condition_number: float
    rank: int

    plot, _repr_html_, __repr__ = RESULT


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Starting points side by side, the fastest first; prints itself as a table.

    Attributes:
        names: the starting points, K of them, ranked by steps to the first target, then to the next
            one, then to the smallest threshold, the next one, then by the final loss; those that
            never get there, or diverge, come last.
        sweep: how each was trained, with its own best learning rate where none was given: one row
            for each. Its `trainings` are those of all settings tried.
        explanations: what the kernels say (K).
    """

    names: tuple[str, ...]
    sweep: Sweep
    explanations: tuple[Explanation, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary a starting point, of plain values; None where there is no number."""
        parts = zip(self.names, self.sweep.rows(), self.explanations, strict=True)
        return [{"name": name} | row | why._asdict() for name, row, why in parts]

    def __str__(self) -> str:
        sweep, width = self.sweep, max(map(len, self.names))
        targets = (*sweep.thresholds, *sweep.targets)
        lines = [f"Starting points, steps to {', '.join(map(sweep.label, targets))}:"]
        for i, (name, why) in enumerate(zip(self.names, self.explanations, strict=True)):
            times = ", ".join(sweep.time_words(i, target) for target in targets)
            seconds = sweep.step_seconds
            timed = "" if seconds is None else f", {readable_time(float(seconds[i]))} a step"
            lines.append(
                f"  {name:<{width}}  {times:>14}  loss {sweep.final_loss[i]:.4g}{timed}; speed "
                f"{why.speed:.2g}, {why.alignment:.0%} leading, condition "
                f"{why.condition_number:.2g}"
            )
            if sweep.warnings.get(i) is not None:
                lines.append(wrapped(f"    warning: {sweep.warnings[i]}", 11))
        notes = (
            "speed: fraction of the fastest descent that the labels get; leading: fraction of "
            "their gradient along the 10 leading eigenvectors",
            f"cost: the FLOPs of {sweep.trainings:.2g} training runs of one start",
        )
        return "\n".join([*lines, *(wrapped(f"  {line}", 2) for line in notes)])

    plot, _repr_html_, __repr__ = RESULT


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
        thresholds: the targets; for the rule "absolute" losses (or errors), by default a tenth and
            a half of the largest initial one.
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
        kernel: how kernels are computed, such as ``jaxttp.ntk.Sketched(4096, key)``, in place of
            the keywords that name it.
        max_bytes: bound on an exact kernel's working memory.

    Returns:
        A `Comparison`. As in `sweep` what oscillates at the edge of stability counts as twice as
        late; candidates whose every leading forecast had to hold a kernel on its way, since the
        rebuilt kernels were rejected, are last, whatever their times.

    Raises:
        ValueError: no candidates, numbers out of range, options that would do nothing, and whatever
            `predict_training_time` refuses of models and data.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.random.normal(jax.random.key(0), (20, 3))
        >>> y = (x[:, 0] > 0).astype(int)
        >>> f = lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"]
        >>> w = {"a": jnp.eye(3), "b": jnp.eye(3)[:, :2]}
        >>> result = compare({"all": Candidate(f, w), "head": Candidate(f, w, lambda p: p == "b")},
        ...                 x, y, steps=40, time_steps=False, relinearize=0)
        >>> sorted(result.names), result.sweep.steps.shape
        (['all', 'head'], (2, 2))

    Source:
        TTP Sections 1 and 6 propose it (pre-trained models, hyperparameters) for single forecasts;
        its Proposition 2 gives the alignment.
    """
    check_candidates(candidates)
    Keywords(relinearize=relinearize).check()
    own_targets = thresholds is None and rule == "absolute"
    check_integer("steps", steps, at_least=1)
    check_choice("time_steps", time_steps, (True, False))
    reading = Rule.of(
        GOALS if own_targets else thresholds, rule, metric, smooth, window, steps=steps
    )
    targets = targets_of(target_loss, target_error)
    x = check_samples("x", x)
    check_batches(batch_size, key, protocol, count(x))
    check_known(learning_rate=learning_rate, momentum=momentum, key=key)
    rate = 1.0 if learning_rate is None else learning_rate
    setting = Hyperparameters(rate, momentum, batch_size, loss=loss, steps=steps)
    estimator = choose_kernel(sketch_dim, key, None, max_bytes, kernel)
    refuse_mesh(estimator, "compare", "sweep for each candidate")
    check_finite("x", x)
    problems = {name: problem_of(name, start, x, y, loss) for name, start in candidates.items()}
    if own_targets:
        reading = dataclasses.replace(reading, thresholds=_own_targets(problems.values(), metric))
    rows, ranks, reasons = {}, {}, {}
    for name, problem in problems.items():
        check_tokens(problem, estimator)
        linearizer = Linearizer(problem, estimator)
        choices = (setting,) if learning_rate is not None else _below_limit(linearizer, setting)
        plan = SweepPlan(choices, len(problem.f0), reading, targets, key, protocol)
        result = screen(linearizer, plan)
        result = forecast_leaders(result, linearizer, plan, relinearize=relinearize)
        followed = [i for i in result.relinearized if result.stable[i]]
        best = min(followed or range(len(choices)), key=lambda i: _rank(result, i))
        result = with_warnings(result, linearizer, plan, (best,))
        seconds = _step_seconds(problem, setting) if time_steps else np.nan
        ranks[name] = _rank(result, best)
        rows[name], reasons[name] = (result, best, seconds), _explain(linearizer.first, problem)
    order = tuple(sorted(ranks, key=ranks.__getitem__))
    joined = _joined([rows[name] for name in order], targets)
    return Comparison(order, joined, tuple(reasons[name] for name in order))


def _joined(rows: list[tuple[Sweep, int, float]], targets: tuple[Target, ...]) -> Sweep:
    """One sweep of rows of several; each has its seconds a step, NaN where unknown."""

    def stacked(name: str) -> np.ndarray:
        return np.stack([getattr(result, name)[i] for result, i, _ in rows])

    first, seconds = rows[0][0], np.array([seconds for _, _, seconds in rows])
    followed = {
        k: result.forecasts[i] for k, (result, i, _) in enumerate(rows) if i in result.relinearized
    }
    return Sweep(
        tuple(result.settings[i] for result, i, _ in rows), first.samples, first.rule,
        stacked("loss"), stacked("error"), stacked("stable"), stacked("max_learning_rate"),
        targets, step_seconds=None if np.isnan(seconds[0]) else seconds,
        forecasts=followed, relinearized=tuple(followed),
        warnings={k: result.warnings[i] for k, (result, i, _) in enumerate(rows)},
        trainings=sum(result.trainings or 0.0 for result, _, _ in rows),
    )  # fmt: skip


def _own_targets(problems: Iterable[Problem], metric: str) -> tuple[float, ...]:
    """Fractions of the largest loss, or error, before training."""
    largest = 0.0
    for problem in problems:
        value = problem.loss.value if metric == "loss" else problem.loss.error
        largest = max(largest, float(value(problem.f0, problem.targets)))
    if not largest > 0:
        raise ValueError(
            f"candidates begin with {metric} 0, of which there is no tenth to get to: give "
            "thresholds or a target."
        )
    return tuple(fraction * largest for fraction in GOALS)


def _below_limit(linearizer: Linearizer, setting: Hyperparameters) -> tuple[Hyperparameters, ...]:
    """The setting at nine fractions of the largest stable rate of a starting point."""
    limit = linearizer.momentum_limit(setting.momentum)
    if limit >= float(np.finfo(np.float32).max):  # nothing moves, at whatever rate
        limit = 1.0
    return tuple(dataclasses.replace(setting, learning_rate=r * limit) for r in RATE_FRACTIONS)


def _step_seconds(problem: Problem, setting: Hyperparameters) -> float:
    """Seconds of a training step on this device."""
    optimizer = optax.sgd(setting.learning_rate, setting.momentum or None)
    return time_step(
        problem.network, problem.weights, problem.x, problem.labels, loss=setting.loss,
        optimizer=optimizer, batch_size=setting.batch_size,
    ).seconds  # fmt: skip


def _rank(result: Sweep, i: int) -> tuple[Any, ...]:
    """Smaller is better: targets as given, then the hardest thresholds first, then the final loss.

    Forecasts with a frozen kernel come last: at high rates their mean path is unreliable.
    """
    targets = () if result.shared else result.targets
    return (
        i in result.forecasts and result.forecasts[i].frozen_from is not None,
        *(result.expected(target)[i] for target in (*targets, *sorted(result.thresholds))),
        result.final_loss[i] if result.stable[i] else np.inf,
    )


@full_precision
def _explain(kernel: Kernel, problem: Problem, leading: int = 10) -> Explanation:
    gradient = problem.loss.gradient(problem.f0, problem.targets)
    system, times = eigendecomposition(kernel), 1
    if kernel.ndim == 4:
        fractions = label_alignment(system, gradient)
    else:  # K ⊗ I_C has every eigenvalue of K for each output
        times = gradient.shape[1]
        fractions = jax.vmap(label_alignment, (None, 1), 1)(system, gradient).reshape(-1)
    values = np.repeat(np.asarray(system.values, np.float64), times)
    fractions = np.asarray(fractions, np.float64)
    total, largest, rank = float(fractions.sum()), float(values[0]), times * int(system.rank)
    if not (total > 0 and largest > 0):  # nothing is left to learn, or nothing moves
        return Explanation(0.0, 0.0, float("nan"), rank)
    # Equal ones count together; zeros do not, whose order is rounding.
    last = values[min(leading, rank) - 1] * (1 - 1e-5)
    return Explanation(
        speed=float(fractions @ values) / (largest * total),
        alignment=float(fractions[values >= last].sum()) / total,
        condition_number=largest / float(values[rank - 1]),
        rank=rank,
    )
