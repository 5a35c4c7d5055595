"""From a subset's kernel to the training time on all the data."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxttp._core.checks import check_integer, check_key, check_known, check_used
from jaxttp._core.results import RESULT, wrapped
from jaxttp._core.samples import count
from jaxttp._core.types import ApplyFn, Params
from jaxttp.adapters.inputs import check_samples
from jaxttp.dynamics._kernels import flatten_kernel
from jaxttp.forecast._options import choose_kernel, refuse_mesh
from jaxttp.forecast.descent import Descent
from jaxttp.forecast.hyperparameters import Hyperparameters
from jaxttp.forecast.paths.base import Linearizer
from jaxttp.forecast.paths.recursion import Recursion
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.spectra import (
    LEAST,
    Spectrum,
    check_method,
    extrapolate_spectrum,
    mode_curve,
)
from jaxttp.forecast.sweeps import sweep_kernel
from jaxttp.losses import Loss, Weighted, get_loss, squared_error
from jaxttp.losses.rule import Curves, Rule, Target, Values, goal_words, reach, targets_of
from jaxttp.ntk.estimators import KernelEstimator

Goal = TypeVar("Goal", float, Target)


@dataclasses.dataclass(frozen=True)
class Extrapolation:
    """A forecast for N samples from a kernel of N0; prints itself as a table.

    Attributes:
        steps: training time in steps for every threshold, -1 where never reached or unstable.
        spread: how far off those steps are, root mean square, from random halves of the subset, for
            every threshold; infinite where it is not known, since the forecast or a half diverges
            or never gets there. It is what the draw of the subset changes and no error bar: what is
            off in every draw (the extrapolation, the linearisation) is not in it.
        loss: predicted mean loss L_0, ..., L_T on all N samples, (T + 1,).
        loss_spread: the same for that curve, (T + 1,); infinite where the forecast or a half
            diverges.
        subset: N0.
        samples: N.
        stable: False when the learning rate is beyond the limit.
        spectrum: the extrapolated modes (squared error); None where the subset's kernel was used
            as it is.
        rule: the definition of training time, see `training_time`.
        trust: how far one linearisation of the network can be trusted, as it is trained on the
            subset; None where there is no doubt.
        targets: the step at which every target is reached, -1 as in `steps`.
        targets_spread: the same as `spread`, for every target.
    """

    steps: Mapping[float, int]
    spread: Mapping[float, float]
    loss: np.ndarray
    loss_spread: np.ndarray
    subset: int
    samples: int
    stable: bool
    spectrum: Spectrum | None
    rule: str
    trust: str | None = None
    targets: Mapping[Target, int] = dataclasses.field(default_factory=dict)
    targets_spread: Mapping[Target, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"From {self.subset} to {self.samples} samples, {len(self.loss) - 1} steps"]
        goals = [(goal_words(e, self.rule), t, self.spread[e]) for e, t in self.steps.items()]
        goals += [(e.words(), t, self.targets_spread[e]) for e, t in self.targets.items()]
        for goal, step, halves in goals:
            when = f"step {step}" if step >= 0 else "not reached"
            words = f"  (halves of the subset: {halves:.1f} off)" if np.isfinite(halves) else ""
            lines.append(f"  {goal:<26} {when:>12}{words}")
        lines.append(f"  loss   {self.loss[0]:.4g} -> {self.loss[-1]:.4g}")
        if not self.stable:
            lines.append("  diverges")
        words = "the subset's kernel, used as it is" if self.spectrum is None else ""
        lines.append(f"  {words or self.spectrum.message}")  # type: ignore[union-attr]
        if self.trust is not None:
            lines.append(wrapped(f"  trust  {self.trust}", 9))
        return "\n".join(lines)

    plot, _repr_html_, __repr__ = RESULT


_IGNORED = "y: labels of -100 cannot be extrapolated; leave those samples out."
_TOKENS = "y: labels of tokens are forecast by predict_training_time(..., total_samples=) alone."


def extrapolate(  # noqa: PLR0913
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    learning_rate: float,
    subset: int,
    key: Any,
    loss: str | Loss = "cross_entropy",
    momentum: float = 0.0,
    steps: int = 150,
    samples: int | None = None,
    thresholds: Sequence[float] | None = None,
    target_loss: Values = None,
    rule: str | Rule = "relative",
    smooth: int = 1,
    window: int | None = None,
    method: str | None = None,
    head: int | None = None,
    alpha: float | None = None,
    resamples: int = 8,
    trainable: Any = None,
    sketch_dim: int | None = None,
    kernel: KernelEstimator | None = None,
    max_bytes: int | None = None,
) -> Extrapolation:
    """Forecast full-batch training on N samples from the kernel of N0 of them.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode.
        params: pytree of floating-point arrays, the weights before training.
        x: the samples at hand (M, ...), an array or a pytree of arrays with M rows each; all of
            them are passed forward once.
        y: their integer labels (M,) or targets (M, C).
        learning_rate: eta > 0.
        subset: N0, samples of the kernel, drawn at random; at most M.
        key: a `jax.random.key`, for the draw of the subset and of its halves.
        loss: as in `predict_training_time`. For "squared_error" the spectrum is extrapolated; for
            any other the subset's own curve is the forecast, and `spread` says how much that
            depends on the subset.
        momentum: heavy-ball, in [0, 1).
        steps: the horizon T.
        samples: N, where more data will be trained on than is at hand; M when None.
        thresholds: the epsilons, shares in (0, 1) for the rule "relative"; 0.01, 0.1 and 0.4 when
            None.
        target_loss: losses on all samples to get below, one or several, each above 0; the error is
            not extrapolated.
        rule: the definition of training time, see `training_time`; or a `Rule` of the loss, which
            takes the place of thresholds, smooth and window.
        smooth: steps over which the curve is averaged first, see `smooth_curve`.
        window: steps of the rule "plateau".
        method: how the squared error's spectrum is extrapolated, "resolvent" (when None) or
            "power_law" (the paper's), see `jaxttp.forecast.spectra`.
        head: k0, leading modes kept as they are; when None N0 C/50 for "resolvent", N0 C/4 for
            "power_law".
        alpha: for "power_law", correction of the slope; 0 (when None) is none, the paper has 0.1 to
            0.2.
        resamples: random halves of the subset that measure `spread`.
        trainable: which parameters train, as in `empirical_ntk`.
        sketch_dim: width of a random projection of the Jacobian that stands for the exact kernel,
            see `sketch_jacobian`.
        kernel: how kernels come about, such as ``jaxttp.ntk.Sketched(4096, key)``, in place of the
            keywords that name it.
        max_bytes: bound on the exact kernel's working memory, in bytes.

    Returns:
        An `Extrapolation`.

    Raises:
        ValueError: a subset larger than the data or too small for a power law, N below M, numbers
            out of range, options that would do nothing, and whatever `predict_training_time`
            refuses of model and data.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.random.normal(jax.random.key(0), (60, 30))
        >>> y = x[:, :1] ** 2
        >>> wide = jax.random.normal(jax.random.key(1), (30, 80))
        >>> found = extrapolate(lambda w, x: jnp.tanh(x @ wide) @ w, jnp.zeros((80, 1)), x, y,
        ...                     loss="squared_error", learning_rate=0.02, subset=20,
        ...                     key=jax.random.key(2))
        >>> found.samples, found.stable, found.spectrum.feasible
        (60, True, True)

    Source:
        TTP Section 4 and Appendix D, where p_k must be squared. A pure power law misses the
        spectrum's head, so the subset's own is kept. The method and the heads were chosen on
        other tasks than those reported in experiments/bench.
    """
    if isinstance(y, Weighted):
        raise ValueError("y: weighted labels cannot be extrapolated; leave the masked samples out.")
    check_key(key, optional=False)
    check_known(key=key, learning_rate=learning_rate)
    x = check_samples("x", x)
    m = count(x)
    check_integer("subset", subset, at_least=2, at_most=m, remedy=f"There are {m} samples.")
    n = m if samples is None else check_integer("samples", samples, at_least=m)
    check_integer("resamples", resamples, at_least=2)
    loss = get_loss(loss)
    setting = Hyperparameters(learning_rate, momentum, loss=loss, steps=steps)
    reading = Rule.of(thresholds, rule, smooth=smooth, window=window, steps=steps)
    if reading.metric != "loss":
        raise ValueError("rule: the error on all samples is not extrapolated; read the loss.")
    targets = targets_of(target_loss)
    spectral = loss is squared_error
    for name, value in (("method", method), ("head", head), ("alpha", alpha)):
        remedy = "it is about the spectrum, which is extrapolated for loss='squared_error' alone"
        check_used(name, value, spectral, remedy)
    method, alpha = method or "resolvent", alpha or 0.0
    estimator = choose_kernel(sketch_dim, key, None, max_bytes, kernel)
    refuse_mesh(estimator, "extrapolate", "total_samples of predict_training_time")
    check_method(method, subset, None, alpha)
    problem = Problem.of(apply_fn, params, x, y, loss=loss, trainable=trainable)
    if problem.loss.weighted:
        raise ValueError(_TOKENS if problem.loss.tokens else _IGNORED)
    head = _check_head(method, subset, problem.classes, head, alpha, spectral=spectral)
    draw, *halves = jax.random.split(key, resamples + 1)
    chosen = np.asarray(jax.random.permutation(draw, m))[:subset]
    lines = Linearizer(problem.take(chosen), estimator)
    outputs = (subset, problem.classes)
    theta = np.asarray(flatten_kernel(lines.first, problem.classes)).reshape(*outputs, *outputs)
    size = _squared_error(problem)
    curve = functools.partial(
        _curve, lines, theta, setting, samples=n, size=size, method=method, head=head, alpha=alpha
    )
    path, stable, spectrum = curve(np.arange(subset))
    times = reading.read(path, None, reached=stable)
    below = reach(Curves(path), targets, smooth=reading.smooth, reached=stable)
    others = [np.asarray(jax.random.permutation(k, subset))[: subset // 2] for k in halves]
    paths = [half for half, good, _ in map(curve, others) if good]
    spread, targets_spread = dict.fromkeys(times, np.inf), dict.fromkeys(below, np.inf)
    loss_spread = np.full(steps + 1, np.inf)
    if stable and len(paths) == resamples:
        loss_spread = _deviation(np.stack(paths), path)
        spread = _spreads([reading.read(half, None) for half in paths], times)
        near = [reach(Curves(half), targets, smooth=reading.smooth) for half in paths]
        targets_spread = _spreads(near, below)
    return Extrapolation(
        times, spread, path, loss_spread, subset, n, stable, spectrum, reading.kind,
        _trust(lines, setting) if stable else None, below, targets_spread,
    )  # fmt: skip


def _squared_error(problem: Problem) -> float:
    """The sum of squares a sample, before training."""
    found = float(jnp.sum((problem.f0 - problem.targets) ** 2)) / problem.f0.shape[0]
    if not np.isfinite(found):
        raise ValueError(
            "params gives outputs so large that their squared error is not finite; scale them."
        )
    return found


def _curve(
    lines: Linearizer,
    kernel: np.ndarray,
    setting: Hyperparameters,
    rows: np.ndarray,
    *,
    samples: int,
    size: float,
    method: str,
    head: int,
    alpha: float,
) -> tuple[np.ndarray, bool, Spectrum | None]:
    """The forecast for all samples from some rows of the subset, and whether it is stable."""
    problem, part = lines.problem.take(rows), kernel[rows][:, :, rows]
    if setting.loss is not squared_error:
        found = sweep_kernel(part, problem.f0, problem.targets, (setting,), rank_by="own")
        return found.loss[0], bool(found.stable[0]), None
    wanted = round(head * len(rows) / len(kernel))
    residual = np.asarray(problem.f0) - np.asarray(problem.targets)
    spectrum = extrapolate_spectrum(
        part, residual, samples=samples, size=size, method=method, head=max(1, wanted), alpha=alpha
    )
    path, stable = mode_curve(spectrum.values, spectrum.residual, setting)
    return path, stable, spectrum


def _spreads(halves: list[dict[Goal, int]], whole: dict[Goal, int]) -> dict[Goal, float]:
    """`_deviation` of the times to every goal, infinite where one is never reached."""
    out = {}
    for goal, time in whole.items():
        times = [half[goal] for half in halves]
        reached = min(time, *times) >= 0
        out[goal] = float(_deviation(np.array(times, float), time)) if reached else float("inf")
    return out


def _check_head(
    method: str, subset: int, classes: int, head: int | None, alpha: float, *, spectral: bool
) -> int:
    """The leading modes that are kept, refused where half a subset has too few to extrapolate."""
    head = check_method(method, subset * classes, head, alpha)
    if not spectral:
        return head
    # The smallest kernel to be extrapolated is that of half the subset, with half the head.
    rows = subset // 2 * classes
    remedy = f"Half a subset of {subset} samples has {rows} modes; raise subset."
    check_integer("head", head, at_least=1, at_most=max(1, 2 * rows - 2), remedy=remedy)
    if rows // 2 - rows // 10 < LEAST:
        raise ValueError(f"subset={subset} is too small for a spectrum. {remedy}")
    return head


def _trust(lines: Linearizer, setting: Hyperparameters) -> str | None:
    """What the network says of one linearisation, when it is trained on the subset."""
    descent = Descent.of(
        learning_rate=setting.learning_rate, momentum=setting.momentum, steps=setting.steps
    )
    way = Recursion()
    return way.trust(way.follow(lines, descent), Rule())


def _deviation(halves: np.ndarray, whole: Any) -> Any:
    """Root mean square; of halves about their whole, by the delete-half jackknife.

    So the whole would scatter about the truth if it differed from that by its draw alone.
    """
    return np.sqrt(np.mean((halves - whole) ** 2, axis=0))
