"""Which of several starting points trains fastest, and why: checkpoints, networks, what is trained.

Why: the kernel decides. A residual g along eigenvector v_k falls at a rate proportional to
lambda_k, and the largest eigenvalue bounds the learning rate, so what counts is where g lies:

    speed = (g^T Theta g) / (lambda_max |g|^2),      between 0 and 1,

the share of the fastest possible descent that the labels get.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_finite, check_integer, check_known
from jaxttp._core.compile import full_precision
from jaxttp._core.results import RESULT, wrapped
from jaxttp._core.types import count
from jaxttp.adapters.inputs import check_samples
from jaxttp.dynamics._network import compile_network
from jaxttp.dynamics.batches import check_batches
from jaxttp.forecast.methods.base import Linearizer
from jaxttp.forecast.options import Keywords, check_tokens, choose_kernel, refuse_mesh
from jaxttp.forecast.problem import Candidate, Problem, check_candidates, problem_of
from jaxttp.forecast.sweep import Wanted, forecast_leaders, screen_kernel, with_trust
from jaxttp.forecast.swept import RISK, Sweep
from jaxttp.forecast.training_setup import Hyperparameters
from jaxttp.forecast.wall_clock import readable_time
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule, Target, Values, goal_words, targets_of
from jaxttp.ntk.estimators import KernelEstimator
from jaxttp.ntk.kernels import Kernel
from jaxttp.ntk.spectrum import eigendecomposition, label_alignment
from jaxttp.training import time_step


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What the kernel says about a starting point.

    Attributes:
        speed: g^T Theta g / (lambda_max |g|^2), in [0, 1], g the loss's gradient in the outputs.
        alignment: share of |g|^2 along the 10 leading eigenvectors.
        condition_number: lambda_max over the smallest eigenvalue that counts.
        rank: how many eigenvalues count (those above N C eps lambda_max).
        largest: lambda_max of Theta / N.
        sgd: what the first step of plain gradient descent takes off the loss, by the learning rate
            (of small ones): |grad L|^2. NaN where it was not computed.
        adam: the same of Adam, whose first step is as long in every weight: the sum of |grad L|.
    """

    speed: float
    alignment: float
    condition_number: float
    rank: int
    largest: float
    sgd: float = math.nan
    adam: float = math.nan

    plot, _repr_html_, __repr__ = RESULT


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Starting points side by side, the fastest first; prints itself as a table.

    Attributes:
        names: the starting points, ranked by steps to the first target, then to the next one, then
            to the smallest threshold, the next one, then by the final loss; those that never get
            there, or diverge, come last.
        thresholds: the goals.
        rule: the definition of training time.
        metric: the curve that it is read off, "loss" or "error".
        steps: (K, E), -1 where never reached or unstable.
        step_seconds: seconds of a training step (K,), NaN where not timed.
        settings: how each was trained, with its own best learning rate where none was given.
        final_loss: predicted loss at the horizon (K,).
        final_error: predicted error there (K,).
        loss: predicted loss curves (K, T + 1).
        explanations: what the kernels say (K).
        trust: how far each forecast can be trusted, where there is doubt (K); None where not.
        targets: losses and errors to get below, L of them.
        target_steps: steps to every target (K, L), -1 as in `steps`.
        error: predicted error curves (K, T + 1), with the metric "error" or a target of it; else
            None.
        trainings: what the forecasts cost by count, in trainings of one starting point, without
            what was asked for `trust`; None where it is not known.
    """

    names: tuple[str, ...]
    thresholds: tuple[float, ...]
    rule: str
    steps: np.ndarray
    step_seconds: np.ndarray
    settings: tuple[Hyperparameters, ...]
    final_loss: np.ndarray
    final_error: np.ndarray
    loss: np.ndarray
    explanations: tuple[Explanation, ...]
    metric: str = "loss"
    trust: tuple[str | None, ...] = ()
    targets: tuple[Target, ...] = ()
    target_steps: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0), int))
    error: np.ndarray | None = None
    trainings: float | None = None

    @property
    def price(self) -> str:
        """One line on what it cost; empty where that is not known."""
        if self.trainings is None:
            return ""
        return (
            f"by count this cost {self.trainings:.2g} trainings of one start; jaxttp.race_starts "
            "trains them in heats"
        )

    def seconds(self) -> np.ndarray:
        """Seconds to every threshold (K, E); infinite where never reached, NaN where not timed."""
        return self._seconds(self.steps)

    def target_seconds(self) -> np.ndarray:
        """Seconds to every target (K, L), likewise."""
        return self._seconds(self.target_steps)

    def _seconds(self, steps: np.ndarray) -> np.ndarray:
        return np.where(steps >= 0, steps * self.step_seconds[: len(steps), None], np.inf)

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary a starting point, of plain values; None where there is no number."""
        out = []
        for i, name in enumerate(self.names):
            row: dict[str, Any] = {
                "name": name,
                "learning_rate": self.settings[i].learning_rate,
                "final_loss": float(self.final_loss[i]),
                "final_error": float(self.final_error[i]),
            }
            columns = [*(f"{e:.4g}" for e in self.thresholds), *(t.column for t in self.targets)]
            for column, t in zip(columns, self._times(i), strict=True):
                row[f"steps_{column}"] = int(t) if t >= 0 else None
                if np.isfinite(self.step_seconds[i]):
                    row[f"seconds_{column}"] = float(t * self.step_seconds[i]) if t >= 0 else None
            row["trust"] = self.trust[i] if self.trust else None
            out.append(row | dataclasses.asdict(self.explanations[i]))
        return out

    def _times(self, i: int) -> list[int]:
        """Steps of one to every threshold, then to every target."""
        to_targets = [int(t) for t in self.target_steps[i]] if self.targets else []
        return [int(t) for t in self.steps[i]] + to_targets

    def gaps(self, far: float = 4.0) -> tuple[str, ...]:
        """Starting points that one learning rate does not suit, a sentence each.

        Held against the one that Adam's first step brings furthest: who is `far` times as slow
        with the same rate, by plain gradient descent or by Adam. Of adapters s A B with B = 0 the
        kernel grows as s^2, so that α/r at an eighth is 64 times slower by descent, 8 times by
        Adam; where every start has its own rate (`compare` without one) it does not matter.
        """
        slopes = np.array([(one.sgd, one.adam) for one in self.explanations])
        good = np.all(np.isfinite(slopes) & (slopes > 0), axis=1)
        if not np.any(good):
            return ()
        first = int(np.argmax(np.where(good, slopes[:, 1], -np.inf)))
        out = []
        for i in np.flatnonzero(good):
            by_descent, by_adam = slopes[first] / slopes[i]
            if max(by_descent, by_adam, 1 / by_descent) >= far:
                out.append(
                    f"{self.names[i]}: at the learning rate of {self.names[first]} its loss falls "
                    f"{_times(by_descent)} by gradient descent, {_times(by_adam)} by Adam."
                )
        return tuple(out)

    def __str__(self) -> str:
        words = [goal_words(e, self.rule, self.metric) for e in self.thresholds]
        goals = ", ".join([*words, *(target.words() for target in self.targets)])
        lines = [f"Starting points, steps to {goals}:"]
        width = max(map(len, self.names))
        for i, name in enumerate(self.names):
            why = self.explanations[i]
            times = ", ".join(str(t) if t >= 0 else "-" for t in self._times(i))
            each = self.step_seconds[i]
            each = f", {readable_time(float(each))} a step" if np.isfinite(each) else ""
            lines.append(
                f"  {name:<{width}}  {times:>14}  loss {self.final_loss[i]:.4g}{each}; speed "
                f"{why.speed:.2g}, {why.alignment:.0%} leading, condition "
                f"{why.condition_number:.2g}"
            )
            if self.trust and self.trust[i] is not None:
                lines.append(wrapped(f"    trust: {self.trust[i]}", 11))
        lines += [wrapped(f"  {words}", 4) for words in self.gaps()]
        if self.price:
            lines.append(wrapped(f"  {self.price}", 2))
        return "\n".join(lines)

    plot, _repr_html_, __repr__ = RESULT


def _times(ratio: float) -> str:
    """How much slower, or faster, in words."""
    if 0.8 < ratio < 1.25:
        return "as fast"
    word = "slower" if ratio > 1 else "faster"
    ratio = max(ratio, 1 / ratio)
    return f"{ratio:.0f} times {word}" if ratio >= 10 else f"{ratio:.2g} times {word}"


RATE_SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
"""Learning rates tried for every starting point, as shares of its largest stable one."""
GOALS = (0.1, 0.5)
"""Goals when none are given, as shares of the largest initial loss."""


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
    check_candidates(candidates)
    Keywords(relinearize=relinearize).check()
    own_goals = thresholds is None and rule == "absolute"
    check_integer("steps", steps, at_least=1)
    check_choice("time_steps", time_steps, (True, False))
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
    found = {}
    for name, problem in problems.items():
        check_tokens(problem, estimator)
        lines = Linearizer(problem, estimator)
        choices = _choices(lines, setting, given=learning_rate is not None)
        wanted = Wanted.of(choices, len(problem.f0), reading, targets, key, protocol, None)
        swept, best = _forecast(lines, wanted, relinearize)
        seconds = _step_seconds(problem, loss, choices[0]) if time_steps else np.nan
        found[name] = (swept, best, seconds, _explain(lines.first, problem))
    return _ranked(found, reading, targets, loss)


def _ranked(
    found: Mapping[str, tuple[Sweep, int, float, Explanation]],
    reading: Rule,
    targets: tuple[Target, ...],
    loss: str | Loss,
) -> Comparison:
    """The starting points side by side, the fastest first."""
    order = sorted(found, key=lambda name: _rank(found[name][0], found[name][1]))
    parts = [found[name] for name in order]
    reads_error = parts[0][0].error is not None
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
        error=np.stack(each("error")) if reads_error else None,
        trainings=sum(swept.trainings or 0.0 for swept, _, _, _ in parts),
    )


def _forecast(lines: Linearizer, wanted: Wanted, relinearize: int | str) -> tuple[Sweep, int]:
    """A sweep of the settings of a starting point, and the place of the best one."""
    problem = lines.problem
    swept = screen_kernel(lines.first, problem.f0, problem.targets, wanted)
    swept = forecast_leaders(swept, lines, problem.targets, wanted, relinearize=relinearize)
    best = _best(swept)
    return with_trust(swept, lines, problem.targets, wanted, only=(best,)), best


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
        i in swept.forecasts and swept.forecasts[i].held_from is not None,
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
def _explain(kernel: Kernel, problem: Problem, leading: int = 10) -> Explanation:
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
    last = values[min(leading, rank) - 1] * (1 - 1e-5)
    return Explanation(
        speed=float(shares @ values) / (largest * total),
        alignment=float(shares[values >= last].sum()) / total,
        condition_number=largest / float(values[rank - 1]),
        rank=rank,
        largest=largest / f0.shape[0],
        sgd=sum(float(jnp.vdot(leaf, leaf)) for leaf in slope),
        adam=sum(float(jnp.sum(jnp.abs(leaf))) for leaf in slope),
    )
