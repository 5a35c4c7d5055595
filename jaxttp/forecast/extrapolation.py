"""From a subset's kernel to the training time on all the data.

For squared error the loss of the linearised network is a sum over the kernel's modes,

    L_t = (1/2) sum_k q_k d_k(t)^2,     d_k(t) = (1 - eta mu_k)^t  (without momentum),

with mu_k the eigenvalues of Theta/N and q_k = (v_k . dy)^2 / N. Both settle as N grows, the leading
ones first. So a subset of N0 samples gives the head; the N - N0 further samples bring C modes each,
whose mu follow a power law fitted to the subset's bulk, and whose q follow another one that starts
where the head ends and sums to what is known to be left, ||dy||^2 / N of ALL samples.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxttp._checks import check_finite, check_integer, check_number
from jaxttp._result import RESULT
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters import check_per_sample, output_shape
from jaxttp.dynamics._kernels import check_problem
from jaxttp.forecast.crossing import check_thresholds, training_time
from jaxttp.forecast.hyperparameters import Hyperparameters
from jaxttp.forecast.sweeps import sweep_kernel
from jaxttp.losses import Loss, Weighted, encode_targets, get_loss, squared_error
from jaxttp.ntk import empirical_ntk, fit_power_law

_LEAST = 4  # ranks that a power law must rest on
_DIVERGED = 1e6  # times the loss before training


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """Modes of the kernel of N samples, and the residual's share in each.

    Attributes:
        values: eigenvalues mu_k of Theta/N in decreasing order (K,).
        residual: q_k = (v_k . dy)^2 / N (K,).
        head: leading modes taken over from the subset as they are.
        exponent: s of the eigenvalues' tail, mu_k ~ k^-s.
        residual_exponent: b of the residual's tail, q_k ~ k^-b.
        feasible: whether a power law with the residual's known size exists. Where not, the
            subset's own residual is kept, rescaled to that size.
        message: what was done, in words.
    """

    values: np.ndarray
    residual: np.ndarray
    head: int
    exponent: float
    residual_exponent: float
    feasible: bool
    message: str

    plot, _repr_html_, __repr__ = RESULT


@dataclasses.dataclass(frozen=True)
class Extrapolation:
    """A forecast for N samples from a kernel of N0; prints itself as a table.

    Attributes:
        steps: training time in steps for every threshold, -1 where never reached or unstable.
        spread: standard deviation of those steps, from random halves of the subset (delete-half
            jackknife), for every threshold.
        loss: predicted mean loss L_0, ..., L_T on all N samples, (T + 1,).
        loss_spread: standard deviation of that curve, (T + 1,).
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
            when = f"step {step} ± {self.spread[threshold]:.1f}" if step >= 0 else "not reached"
            lines.append(f"  {self.rule:<9} {goal:<8} {when:>16}")
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
    head: int | None = None,
    alpha: float = 0.0,
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
        head: k0, leading modes kept as they are; N0/2 when None.
        alpha: correction of the spectrum's slope; 0 is none, the paper has 0.1 to 0.2.
        resamples: random halves of the subset that measure the spread.
        trainable: which parameters train, as in `empirical_ntk`.
        max_bytes: bound on the kernel's working memory, in bytes.

    Returns:
        An `Extrapolation`.

    Raises:
        ValueError: a subset larger than the data or too small for a power law, N below M, numbers
            out of range, and whatever `predict_training_time` refuses of model and data.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.random.normal(jax.random.key(0), (60, 30))
        >>> y = x[:, :1] ** 2
        >>> wide = jax.random.normal(jax.random.key(1), (30, 80))
        >>> found = extrapolate(lambda w, x: jnp.tanh(x @ wide) @ w, jnp.zeros((80, 1)), x, y,
        ...                     learning_rate=0.02, subset=20, key=jax.random.key(2))
        >>> found.samples, found.stable, found.spectrum.values.shape
        (60, True, (60,))

    Source:
        TTP Section 4 and Appendix D, where p_k must be squared. A pure power law misses the
        spectrum's head, so the subset's own is kept. The default head N0/2 was chosen on an MLP
        from random weights on all ten digits.
    """
    if isinstance(y, Weighted):
        raise ValueError("y: weighted labels cannot be extrapolated; leave the masked samples out.")
    x = jnp.asarray(x)
    check_finite("x", x)
    check_finite("params", params)
    m, c = output_shape(apply_fn, params, x)
    check_integer("subset", subset, at_least=2, at_most=m, remedy=f"There are {m} samples.")
    n = m if samples is None else check_integer("samples", samples, at_least=m)
    check_integer("resamples", resamples, at_least=2)
    check_number("alpha", alpha, at_least=0.0)
    loss = get_loss(loss)
    setting = Hyperparameters(learning_rate, momentum, loss=loss, steps=steps)
    thresholds = check_thresholds(thresholds, rule)
    check_per_sample(apply_fn, params, x)
    if loss is squared_error:
        head = max(1, subset // 2) if head is None else head
        # The smallest kernel to be extrapolated is that of half the subset, with half the head.
        rows = subset // 2 * c
        remedy = f"Half a subset of {subset} samples has {rows} modes; raise subset."
        check_integer("head", head, at_least=1, at_most=max(1, 2 * rows - 2), remedy=remedy)
        if rows // 2 - rows // 10 < _LEAST:
            raise ValueError(f"subset={subset} is too small to fit a power law. {remedy}")
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
        if loss is not squared_error:
            found = sweep_kernel(part, f0[rows], targets[rows], (setting,))
            return found.loss[0], bool(found.stable[0]), None
        assert head is not None  # squared error set it
        wanted = round(head * len(rows) / subset)
        spectrum = extrapolate_spectrum(
            part, f0[rows] - targets[rows], samples=n, size=size, head=max(1, wanted), alpha=alpha
        )
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
    if stable and paths:
        loss_spread = _deviation(np.stack(paths), path)
        reads = [read(half) for half in paths]
        spread = {
            e: float(_deviation(np.array([r[e] for r in reads], float), times[e]))
            for e in thresholds
        }
    return Extrapolation(times, spread, path, loss_spread, subset, n, stable, spectrum, rule)


def extrapolate_spectrum(
    kernel: Any,
    residual: Any,
    *,
    samples: int,
    size: float | None = None,
    head: int | None = None,
    alpha: float = 0.0,
) -> Spectrum:
    """The modes of N samples' kernel from the kernel of N0 of them.

    Args:
        kernel: Theta (N0, C, N0, C).
        residual: dy = f_0 - y (N0, C).
        samples: N, at least N0.
        size: ||dy||^2 / N on all samples; the subset's own when None.
        head: k0, leading modes kept; N0/2 when None.
        alpha: the tail's exponent is s - alpha (N0/N - 1).

    Returns:
        A `Spectrum` of N C modes; with N = N0 the kernel's own, and no exponents.

    Raises:
        ValueError: bad shapes, N below N0, a head that leaves no tail.

    Example:
        >>> import numpy as np
        >>> kernel = np.diag(10.0 / np.arange(1.0, 21) ** 2).reshape(20, 1, 20, 1)
        >>> found = extrapolate_spectrum(kernel, np.ones((20, 1)), samples=40)
        >>> found.values.shape, round(found.exponent, 6)
        ((40,), 2.0)

    Source:
        TTP Appendix D; the print's lambda_k = c k^(-s + alpha)(N0/N - 1) is negative, the exponent
        is meant.
    """
    kernel = np.asarray(kernel, np.float64)
    residual = np.asarray(residual, np.float64)
    check_problem(kernel, residual, residual, squared_error)
    n0, c = residual.shape
    n = check_integer("samples", samples, at_least=n0)
    rank0, rank = n0 * c, n * c
    head = max(1, n0 // 2) if head is None else head
    check_integer("head", head, at_least=1, at_most=rank0 - 1)
    values, vectors = np.linalg.eigh(kernel.reshape(rank0, rank0))
    values = np.maximum(values[::-1], 0.0) / n0
    shares = (vectors[:, ::-1].T @ residual.reshape(-1)) ** 2 / n0
    total = float(shares.sum()) if size is None else check_number("size", size, at_least=0.0)
    if shares.sum() > 0:
        shares = shares * (total / shares.sum())
    if n == n0:
        nan = float("nan")
        return Spectrum(values, shares, rank, nan, nan, True, "all samples are in the kernel")
    tail, exponent = _values_tail(values, head, rank, alpha * (n0 / n - 1.0))
    values = np.concatenate([values[:head], tail])
    found = _residual_tail(shares, head, rank)
    if found is None:
        kept = np.concatenate([shares, np.zeros(rank - rank0)])
        message = (
            "the residual's tail follows no power law of the known size (head "
            f"{shares[:head].sum() / max(total, 1e-300):.0%} of it); the subset's own is kept"
        )
        return Spectrum(values, kept, head, exponent, float("nan"), False, message)
    tail, residual_exponent = found
    message = (
        f"{head} modes kept, tail of the spectrum k^-{exponent:.2f}, "
        f"of the residual k^-{residual_exponent:.2f}"
    )
    shares = np.concatenate([shares[:head], tail])
    return Spectrum(values, shares, head, exponent, residual_exponent, True, message)


def _values_tail(
    values: np.ndarray, head: int, rank: int, correction: float
) -> tuple[np.ndarray, float]:
    """Eigenvalues beyond the head, by a power law through the bulk, never above the head's end."""
    positive = int(np.sum(values > values[0] * 1e-12))
    if positive < 2 * _LEAST:  # a kernel of so low a rank has no tail
        return np.zeros(rank - head), float("inf")
    window = (max(1, positive // 10), max(2, positive // 2))
    with jax.enable_x64(True):
        law = fit_power_law(values[:positive], window=window)
    exponent = float(law.exponent) - correction
    # The slope is corrected about the window's middle, where the fit is best.
    middle = float(np.sqrt(window[0] * window[1]))
    ranks = np.arange(head + 1, rank + 1)
    level = float(law.coefficient) * middle ** -float(law.exponent)
    tail = level * (ranks / middle) ** -exponent
    scale = min(1.0, values[head - 1] / tail[0]) if tail.size and tail[0] > 0 else 1.0
    return scale * tail, exponent


def _residual_tail(shares: np.ndarray, head: int, rank: int) -> tuple[np.ndarray, float] | None:
    """A power law that starts at the head's level and has the tail's sum, or None."""
    left = float(shares[head:].sum())
    around = slice(max(0, head - head // 4 - 2), head + head // 4 + 2)
    level = float(np.mean(shares[around]))  # single shares are as noisy as squares of normals
    ratios = np.arange(head + 1, rank + 1) / head
    if left <= 0 or level <= 0:
        return (np.zeros(rank - head), float("inf")) if left <= 0 else None
    excess = lambda b: float(np.log(level * np.sum(ratios**-b) / left))  # noqa: E731
    low, high = 0.0, 64.0
    if excess(low) < 0 or excess(high) > 0:
        return None
    from scipy.optimize import root_scalar  # here, since it loads slowly

    exponent = float(root_scalar(excess, bracket=(low, high)).root)
    return level * ratios**-exponent, exponent


def mode_curve(
    values: np.ndarray, residual: np.ndarray, setting: Hyperparameters
) -> tuple[np.ndarray, bool]:
    """Loss curve (T + 1,) of full-batch heavy-ball descent mode by mode, and whether it is stable.

    Args:
        values: eigenvalues of Theta/N (K,).
        residual: q_k (K,).
        setting: rate, momentum, schedule and horizon.

    Returns:
        ``(curve, stable)``; an unstable curve is held at its last representable value.

    Example:
        >>> setting = Hyperparameters(0.5, loss="squared_error", steps=2)
        >>> mode_curve(np.array([1.0]), np.array([2.0]), setting)[0].tolist()
        [1.0, 0.25, 0.0625]
    """
    values, residual = np.asarray(values, np.float64), np.asarray(residual, np.float64)
    decay, velocity = np.ones_like(values), np.zeros_like(values)
    curve = [0.5 * float(residual.sum())]
    stable = True
    for rate in setting.rates():
        velocity = setting.momentum * velocity + values * decay
        decay = decay - rate * velocity
        loss = 0.5 * float(np.sum(residual * decay**2))
        if loss > _DIVERGED * max(curve[0], 1e-300):
            stable = False
            break
        curve.append(loss)
    curve += [curve[-1]] * (setting.steps + 1 - len(curve))
    return np.array(curve), stable and curve[-1] <= 2 * curve[0]


def _deviation(halves: np.ndarray, whole: Any) -> Any:
    """Delete-half jackknife: halves scatter about the whole as the whole does about the truth."""
    return np.sqrt(np.mean((halves - whole) ** 2, axis=0))


def _reader(thresholds: Sequence[float], rule: str) -> Callable[[np.ndarray], Mapping[float, int]]:
    return lambda curve: {e: int(training_time(curve, e, rule=rule)) for e in thresholds}
