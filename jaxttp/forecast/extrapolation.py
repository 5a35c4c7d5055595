"""From a subset's kernel to the training time on all the data."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxttp._checks import check_finite, check_integer, check_key, check_used
from jaxttp._result import RESULT
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters import check_per_sample
from jaxttp.adapters.inputs import check_samples
from jaxttp.crossing import check_reading, training_time
from jaxttp.forecast._options import check_memory, check_model
from jaxttp.forecast.hyperparameters import Hyperparameters
from jaxttp.forecast.spectra import (
    LEAST,
    Spectrum,
    check_method,
    extrapolate_spectrum,
    mode_curve,
)
from jaxttp.forecast.sweeps import sweep_kernel
from jaxttp.losses import Loss, Weighted, encode_targets, get_loss, squared_error
from jaxttp.ntk import empirical_ntk


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

    def __str__(self) -> str:
        lines = [f"From {self.subset} to {self.samples} samples, {len(self.loss) - 1} steps"]
        for threshold, step in self.steps.items():
            goal = f"{100 * threshold:g} %" if self.rule == "relative" else f"{threshold:g}"
            when = f"step {step}" if step >= 0 else "not reached"
            halves = self.spread[threshold]
            words = f"  (halves of the subset: {halves:.1f} off)" if np.isfinite(halves) else ""
            lines.append(f"  {self.rule:<9} {goal:<8} {when:>16}{words}")
        lines.append(f"  loss   {self.loss[0]:.4g} -> {self.loss[-1]:.4g}")
        if not self.stable:
            lines.append("  diverges")
        words = "the subset's kernel, used as it is" if self.spectrum is None else ""
        lines.append(f"  {words or self.spectrum.message}")  # type: ignore[union-attr]
        return "\n".join(lines)

    plot, _repr_html_, __repr__ = RESULT


def extrapolate(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    learning_rate: float,
    subset: int,
    key: Any,
    loss: str | Loss = "squared_error",
    momentum: float = 0.0,
    steps: int = 150,
    samples: int | None = None,
    thresholds: Sequence[float] = (0.01, 0.1, 0.4),
    rule: str = "relative",
    method: str | None = None,
    head: int | None = None,
    alpha: float | None = None,
    resamples: int = 8,
    trainable: Any = None,
    max_bytes: int | None = None,
) -> Extrapolation:
    """Forecast full-batch training on N samples from the kernel of N0 of them.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode.
        params: pytree of floating-point arrays, the weights before training.
        x: the samples at hand (M, ...); all of them are passed forward once.
        y: their integer labels (M,) or targets (M, C).
        learning_rate: eta > 0.
        subset: N0, samples of the kernel, drawn at random; at most M.
        key: a `jax.random.key`, for the draw of the subset and of its halves.
        loss: for "squared_error" the spectrum is extrapolated; for any other loss the subset's own
            curve is the forecast, and `spread` says how much that depends on the subset.
        momentum: heavy-ball, in [0, 1).
        steps: the horizon T.
        samples: N, where more data will be trained on than is at hand; M when None.
        thresholds: the epsilons, shares in (0, 1) for the rule "relative".
        rule: the definition of training time, see `training_time`.
        method: how the squared error's spectrum is extrapolated, "resolvent" (when None) or
            "power_law" (the paper's), see `jaxttp.forecast.spectra`.
        head: k0, leading modes kept as they are; when None N0 C/50 for "resolvent", N0 C/4 for
            "power_law".
        alpha: for "power_law", correction of the slope; 0 (when None) is none, the paper has 0.1 to
            0.2.
        resamples: random halves of the subset that measure `spread`.
        trainable: which parameters train, as in `empirical_ntk`.
        max_bytes: bound on the kernel's working memory, in bytes.

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
        ...                     learning_rate=0.02, subset=20, key=jax.random.key(2))
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
    x = check_samples("x", x)
    check_finite("x", x)
    m = len(x)
    check_integer("subset", subset, at_least=2, at_most=m, remedy=f"There are {m} samples.")
    n = m if samples is None else check_integer("samples", samples, at_least=m)
    check_integer("resamples", resamples, at_least=2)
    loss = get_loss(loss)
    setting = Hyperparameters(learning_rate, momentum, loss=loss, steps=steps)
    thresholds = check_reading(thresholds, rule, steps=steps)
    spectral = loss is squared_error
    for name, value in (("method", method), ("head", head), ("alpha", alpha)):
        remedy = "it is about the spectrum, which is extrapolated for loss='squared_error' alone"
        check_used(name, value, spectral, remedy)
    method, alpha = method or "resolvent", alpha or 0.0
    check_memory(None, max_bytes)
    check_method(method, subset, None, alpha)
    _, c = check_model(apply_fn, params, x, trainable)
    check_finite("params", params)
    check_per_sample(apply_fn, params, x)
    head = check_method(method, subset * c, head, alpha)
    if spectral:
        # The smallest kernel to be extrapolated is that of half the subset, with half the head.
        rows = subset // 2 * c
        remedy = f"Half a subset of {subset} samples has {rows} modes; raise subset."
        check_integer("head", head, at_least=1, at_most=max(1, 2 * rows - 2), remedy=remedy)
        if rows // 2 - rows // 10 < LEAST:
            raise ValueError(f"subset={subset} is too small for a spectrum. {remedy}")
    f0 = jax.jit(apply_fn)(params, x)
    check_finite("apply_fn(params, x)", f0)
    targets, _ = encode_targets(loss, y, f0)
    draw, *halves = jax.random.split(key, resamples + 1)
    chosen = np.asarray(jax.random.permutation(draw, m))[:subset]
    kernel = empirical_ntk(apply_fn, params, x[chosen], trainable=trainable, max_bytes=max_bytes)
    size = float(jnp.sum((f0 - targets) ** 2)) / m
    f0, targets = np.asarray(f0)[chosen], np.asarray(targets)[chosen]
    kernel = np.asarray(kernel)

    def curve(rows: np.ndarray) -> tuple[np.ndarray, bool, Spectrum | None]:
        part = kernel[rows][:, :, rows]
        if not spectral:
            found = sweep_kernel(part, f0[rows], targets[rows], (setting,))
            return found.loss[0], bool(found.stable[0]), None
        wanted = round(head * len(rows) / subset)
        spectrum = extrapolate_spectrum(
            part, f0[rows] - targets[rows], samples=n, size=size, method=method,
            head=max(1, wanted), alpha=alpha,
        )  # fmt: skip
        path, stable = mode_curve(spectrum.values, spectrum.residual, setting)
        return path, stable, spectrum

    everyone = np.arange(subset)
    path, stable, spectrum = curve(everyone)
    read = _reader(thresholds, rule)
    times = read(path) if stable else dict.fromkeys(thresholds, -1)
    others = [np.asarray(jax.random.permutation(k, subset))[: subset // 2] for k in halves]
    paths = [half for half, good, _ in map(curve, others) if good]
    spread = dict.fromkeys(thresholds, float("inf"))
    loss_spread = np.full(steps + 1, np.inf)
    if stable and len(paths) == resamples:
        loss_spread = _deviation(np.stack(paths), path)
        reads = [read(half) for half in paths]
        spread = {
            e: float(_deviation(np.array([r[e] for r in reads], float), times[e]))
            if min(times[e], *(r[e] for r in reads)) >= 0
            else float("inf")
            for e in thresholds
        }
    return Extrapolation(times, spread, path, loss_spread, subset, n, stable, spectrum, rule)


def _deviation(halves: np.ndarray, whole: Any) -> Any:
    """Root mean square; of halves about their whole, by the delete-half jackknife.

    So the whole would scatter about the truth if it differed from that by its draw alone.
    """
    return np.sqrt(np.mean((halves - whole) ** 2, axis=0))


def _reader(thresholds: Sequence[float], rule: str) -> Callable[[np.ndarray], Mapping[float, int]]:
    return lambda curve: {e: int(training_time(curve, e, rule=rule)) for e in thresholds}
