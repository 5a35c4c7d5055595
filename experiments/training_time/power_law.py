"""The spectrum of all the data from that of a subset, and the loss curve it gives.

For squared error the loss of the linearised network is a sum over the kernel's modes,

    L_t = (1/2) sum_k q_k d_k(t)^2,     d_k(t) = (1 - eta mu_k)^t  (without momentum),

with mu_k the eigenvalues of Theta/N and q_k = (v_k . dy)^2 / N. Two ways lead from N0 samples to N.

"resolvent": sums over the modes of a random kernel of R = N C rows are functions of a renormalised
kappa that do not depend on N,

    sum_k q_k / (mu_k + lambda) = S(kappa),   lambda = kappa (1 - df(kappa) / R),
    df = sum_k mu_k / (mu_k + lambda),

with df and S read off the subset at every lambda_0, hence kappa = lambda_0 / (1 - df / (N0 C)), and
continued as powers of kappa below what the subset resolves. For N the same kappa is at lambda =
kappa (1 - df / (N C)). A few leading modes are kept; to the rest of S a measure q >= 0 on a grid of
mu is fitted.

"power_law": the leading modes are kept, the N - N0 further samples bring C modes each, whose mu
follow a power law fitted to the subset's bulk, and whose q follow another one that starts where the
head ends and sums to what is known to be left, ||dy||^2 / N of ALL samples.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from scipy.optimize import nnls, root_scalar

from jaxttp.forecast import Hyperparameters
from jaxttp.ntk import fit_power_law

HEADS = {"resolvent": 50, "power_law": 4}
"""Leading modes kept when none are asked for: one in so many of the N0 C."""
LEAST = 4
"""Ranks that a power law must rest on."""
_DIVERGED = 1e6  # times the loss before training
_RESOLVED = 0.7  # fraction of the subset's modes that may be free
_FLOOR = 1e-7  # least lambda over the largest eigenvalue, about what float32 resolves
_SLOPE = 0.5  # decades of kappa whose slope is continued
_BEYOND = 1e-4  # how far, as a factor of kappa
_NODES = 20  # of the measure, a decade
_MISFIT = 0.1  # relative, from which on a fit is reported as infeasible


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """Modes of the kernel of N samples, and the residual's fraction in each.

    Attributes:
        values: eigenvalues mu_k of Theta/N in decreasing order (K,); with the method "resolvent"
            those of the head, then the points of a grid that stand for all others.
        residual: q_k = (v_k . dy)^2 / N (K,), or the sum of those that a point stands for.
        head: leading modes taken over from the subset as they are.
        exponent: s of the eigenvalues' tail, mu_k ~ k^-s; with "resolvent" beyond what the subset
            resolves, from df ~ kappa^(-1/s).
        residual_exponent: b of the residual's tail, q_k ~ k^-b; with "resolvent" likewise, from
            S ~ kappa^((b - 1)/s - 1).
        feasible: whether the fit succeeded: for "power_law" whether one with the residual's known
            size exists (where not, the subset's own residual is kept, rescaled to that size), for
            "resolvent" whether the measure gives S to 10 % everywhere.
        message: what was done, in words.
    """

    values: np.ndarray
    residual: np.ndarray
    head: int
    exponent: float
    residual_exponent: float
    feasible: bool
    message: str


def extrapolate_spectrum(
    kernel: Any,
    residual: Any,
    *,
    samples: int,
    size: float | None = None,
    method: str = "resolvent",
    head: int | None = None,
    alpha: float = 0.0,
) -> Spectrum:
    """The modes of N samples' kernel from the kernel of N0 of them.

    Args:
        kernel: Theta (N0, C, N0, C).
        residual: dy = f_0 - y (N0, C).
        samples: N, at least N0.
        size: ||dy||^2 / N on all samples; the subset's own when None.
        method: "resolvent" or "power_law", see the head of this module.
        head: k0, leading modes kept; when None N0 C/50 for "resolvent", N0 C/4 for "power_law".
        alpha: for "power_law", the tail's exponent is s - alpha (N0/N - 1).

    Returns:
        A `Spectrum`, of N C modes with "power_law"; with N = N0 the kernel's own, no exponents.

    Example:
        >>> import numpy as np
        >>> kernel = np.diag(10.0 / np.arange(1.0, 21) ** 2).reshape(20, 1, 20, 1)
        >>> found = extrapolate_spectrum(kernel, np.ones((20, 1)), samples=40, method="power_law")
        >>> found.values.shape, round(found.exponent, 6)
        ((40,), 2.0)

    Source:
        "power_law": TTP Appendix D; the print's lambda_k = c k^(-s + alpha)(N0/N - 1) is negative,
        the exponent is meant. "resolvent": the deterministic equivalent of sample covariances (such
        as Bach, "High-dimensional analysis of double descent", 2024, Section 3); its use here is
        ours.
    """
    kernel, residual = np.asarray(kernel, np.float64), np.asarray(residual, np.float64)
    (n0, c), n = residual.shape, samples
    rank0, rank = n0 * c, n * c
    head = max(1, rank0 // HEADS[method]) if head is None else head
    values, vectors = np.linalg.eigh(kernel.reshape(rank0, rank0))
    values = np.maximum(values[::-1], 0.0) / n0
    fractions = (vectors[:, ::-1].T @ residual.reshape(-1)) ** 2 / n0
    total = float(fractions.sum()) if size is None else size
    if fractions.sum() > 0:
        fractions = fractions * (total / fractions.sum())
    if n == n0:
        nan = float("nan")
        return Spectrum(values, fractions, rank, nan, nan, True, "all samples are in the kernel")
    if method == "resolvent":
        return _resolvent(values, fractions, rank, head)
    tail, exponent = _values_tail(values, head, rank, alpha * (n0 / n - 1.0))
    values = np.concatenate([values[:head], tail])
    found = _residual_tail(fractions, head, rank)
    if found is None:
        kept = np.concatenate([fractions, np.zeros(rank - rank0)])
        message = (
            "the residual's tail follows no power law of the known size (head "
            f"{fractions[:head].sum() / max(total, 1e-300):.0%} of it); the subset's own is kept"
        )
        return Spectrum(values, kept, head, exponent, float("nan"), False, message)
    tail, residual_exponent = found
    message = (
        f"{head} modes kept, tail of the spectrum k^-{exponent:.2f}, "
        f"of the residual k^-{residual_exponent:.2f}"
    )
    fractions = np.concatenate([fractions[:head], tail])
    return Spectrum(values, fractions, head, exponent, residual_exponent, True, message)


def _resolvent(values: np.ndarray, fractions: np.ndarray, rank: int, head: int) -> Spectrum:
    """A measure whose sum_k q_k lambda / (mu_k + lambda) is that of the larger kernel."""
    rank0, largest, total = len(values), float(values[0]), float(fractions.sum())
    nan = float("nan")
    if not (largest > 0 and total > 0):
        return Spectrum(
            values, fractions, head, nan, nan, True, "nothing moves, or is left to learn"
        )
    lam = np.geomspace(100 * largest, _FLOOR * largest, 500)
    spread = values[None] + lam[:, None]  # (lambda, modes)
    freedom = np.sum(values[None] / spread, axis=1)
    known = freedom < _RESOLVED * rank0
    freedom, resolvent = freedom[known], np.sum(fractions[None] / spread, axis=1)[known]
    kappa = lam[known] / (1 - freedom / rank0)
    end = kappa < kappa[-1] * 10**_SLOPE
    fits = [np.polyfit(np.log(kappa[end]), np.log(y[end]), 1)[0] for y in (freedom, resolvent)]
    narrower, steeper = min(float(fits[0]), -1e-3), min(max(float(fits[1]), -1.0), 0.0)
    # Down to where all N C rows are free, or as far as anybody would ask.
    last = max((freedom[-1] / rank) ** (-1 / narrower) * 1.0001, _BEYOND)
    more = np.geomspace(1.0, last, 200)[1:] if last < 1 else np.ones(0)
    kappa = np.concatenate([kappa, kappa[-1] * more])
    freedom = np.concatenate([freedom, freedom[-1] * more**narrower])
    resolvent = np.concatenate([resolvent, resolvent[-1] * more**steeper])
    lam_all = kappa * (1 - freedom / rank)
    left = lam_all * resolvent  # sum_k q_k lambda / (mu_k + lambda)

    low = 0.1 * lam_all[-1]
    top = max(float(values[head]), 10 * low)
    grid = np.geomspace(top, low, int(_NODES * np.log10(top / low)))
    grid = np.append(grid, 0.0)  # what is never learned
    fixed = np.sum(fractions[None, :head] * lam_all[:, None]
                   / (values[None, :head] + lam_all[:, None]), axis=1)  # fmt: skip
    rest = max(float(fractions[head:].sum()), 0.0)
    rows = lam_all[:, None] / (grid[None] + lam_all[:, None]) / left[:, None]
    certain = 100.0  # the total is known, so it counts as much as many rows
    rows = np.concatenate([rows, np.full((1, len(grid)), certain / total)])
    target = np.append((left - fixed) / left, certain * rest / total)
    measure, _ = nnls(rows, target, maxiter=30 * len(grid))
    misfit = float(np.max(np.abs(rows @ measure - target)[:-1]))
    kept = measure > 0
    measure *= rest / max(float(measure.sum()), 1e-300)
    exponent = -1 / narrower
    residual_exponent = 1 + exponent * (1 + steeper)
    message = (
        f"{head} of the subset's {rank0} modes kept, the rest by the resolvent (misfit "
        f"{misfit:.1%}); tails mu k^-{exponent:.2f}, q k^-{residual_exponent:.2f}"
    )
    return Spectrum(
        np.concatenate([values[:head], grid[kept]]),
        np.concatenate([fractions[:head], measure[kept]]),
        head, exponent, residual_exponent, misfit < _MISFIT, message,
    )  # fmt: skip


def _values_tail(
    values: np.ndarray, head: int, rank: int, correction: float
) -> tuple[np.ndarray, float]:
    """Eigenvalues beyond the head, by a power law through the bulk, never above the head's end."""
    positive = int(np.sum(values > values[0] * 1e-12))
    if positive < 2 * LEAST:  # a kernel of so low a rank has no tail
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


def _residual_tail(fractions: np.ndarray, head: int, rank: int) -> tuple[np.ndarray, float] | None:
    """A power law that starts at the head's level and has the tail's sum, or None."""
    left = float(fractions[head:].sum())
    around = slice(max(0, head - head // 4 - 2), head + head // 4 + 2)
    level = float(np.mean(fractions[around]))  # single fractions are as noisy as squares of normals
    ratios = np.arange(head + 1, rank + 1) / head
    if left <= 0 or level <= 0:
        return (np.zeros(rank - head), float("inf")) if left <= 0 else None
    excess = lambda b: float(np.log(level * np.sum(ratios**-b) / left))  # noqa: E731
    low, high = 0.0, 64.0
    if excess(low) < 0 or excess(high) > 0:
        return None
    exponent = float(root_scalar(excess, bracket=(low, high)).root)
    return level * ratios**-exponent, exponent


def mode_curve(values: np.ndarray, residual: np.ndarray, setting: Hyperparameters) -> np.ndarray:
    """Loss curve (T + 1,) of full-batch heavy-ball descent mode by mode; held where it diverges.

    Args:
        values: eigenvalues of Theta/N (K,).
        residual: q_k (K,).
        setting: rate, momentum, schedule and horizon.

    Example:
        >>> setting = Hyperparameters(0.5, loss="squared_error", steps=2)
        >>> mode_curve(np.array([1.0]), np.array([2.0]), setting).tolist()
        [1.0, 0.25, 0.0625]
    """
    decay, velocity = np.ones_like(values), np.zeros_like(values)
    curve = [0.5 * float(residual.sum())]
    for rate in setting.rates():
        velocity = setting.momentum * velocity + values * decay
        decay = decay - rate * velocity
        loss = 0.5 * float(np.sum(residual * decay**2))
        if loss > _DIVERGED * max(curve[0], 1e-300):
            break
        curve.append(loss)
    return np.array(curve + [curve[-1]] * (setting.steps + 1 - len(curve)))
