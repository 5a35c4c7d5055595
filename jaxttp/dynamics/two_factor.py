"""Two-factor cross-entropy dynamics: features f and unembedding W of logits f W, moving together.

    A = softmax(f W) - Y,    df/dt = -eta A W^T,    dW/dt = -eta f^T A        (SUMMED loss)

the smallest model of what happens to representations while a language model trains. f is (b, h), W
is (h, V), labels are (b,). Along the flow f^T f - W W^T does not change; from a balanced start
(where it is zero) both factors share their singular values, and these move by

    d sigma_1i/dt = -eta g_i sigma_2i,   d sigma_2i/dt = -eta g_i sigma_1i,   g_i = u_1i^T A v_2i.
"""

import functools
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import (
    check_array,
    check_finite_value,
    check_integer,
    check_key,
    check_known,
    check_number,
    is_concrete,
)
from jaxttp._core.results import RESULT
from jaxttp._core.xla_cpu.threads import after, decompose
from jaxttp.dynamics._kernels import check_rate, check_times
from jaxttp.dynamics.flow import solve_ode


class TwoFactorTrajectory(eqx.Module):
    """Both factors over time; one unit of time is one step of gradient descent.

    Attributes:
        ts: times (T,).
        f: features (T, b, h).
        w: unembedding (T, h, V).
    """

    ts: Float[Array, " t"]
    f: Float[Array, "t b h"]
    w: Float[Array, "t h v"]

    plot, _repr_html_, __repr__ = RESULT


class TwoFactorObservables(NamedTuple):
    """The quantities of the theorems at one time; singular values in decreasing order.

    Attributes:
        loss: the loss that drives the dynamics, summed over samples.
        imbalance: f^T f - W W^T (h, h), which the flow conserves.
        singular_f: S_1 (r,), r = min(b, h, V).
        singular_w: S_2 (r,).
        alignment: |v_1i . u_2i| (r,): 1 from a balanced start where singular values are simple and
            positive; inside a degenerate or zero block only the subspaces agree.
        g: u_1i^T A v_2i (r,), with the signs of the singular vectors made to agree.
        rate_f: d sigma_1i / dt (r,) by Lemma B.1, u_1i^T (df/dt) v_1i; for simple values.
        rate_w: d sigma_2i / dt (r,) likewise.
        theorem_f: -eta g_i sigma_2i (r,), Theorem B.3; equal to `rate_f` on a balanced path.
        theorem_w: -eta g_i sigma_1i (r,).
        residual_norm: ||A||_2, which bounds every |g_i|; at most sqrt(2 b), and at uniform
            prediction at most sqrt(N_max), N_max the size of the largest class.
    """

    loss: Array
    imbalance: Array
    singular_f: Array
    singular_w: Array
    alignment: Array
    g: Array
    rate_f: Array
    rate_w: Array
    theorem_f: Array
    theorem_w: Array
    residual_norm: Array

    plot, _repr_html_, __repr__ = RESULT


def two_factor_flow(
    f: ArrayLike,
    w: ArrayLike,
    labels: Any,
    *,
    learning_rate: Any,
    ts: Any,
    rtol: float | None = None,
    atol: float | None = None,
) -> TwoFactorTrajectory:
    """The coupled gradient flow of f and W under cross-entropy of the logits f W.

    Args:
        f: features at t = 0, (b, h).
        w: unembedding at t = 0, (h, V).
        labels: integer classes (b,) in 0..V-1.
        learning_rate: eta > 0, of the summed loss: that of a mean over samples, divided by b.
        ts: times (T,), non-negative and increasing; the flow starts at t = 0 whatever ts[0].
        rtol: relative tolerance; 1e-5 in float32 and 1e-10 in float64 when None.
        atol: absolute tolerance, likewise (1e-6, 1e-12).

    Returns:
        A `TwoFactorTrajectory`.

    Raises:
        ValueError: shapes that do not chain, labels out of range, a rate or times out of range,
            values that are not finite.
        RuntimeError: at run time, when the solver does not reach the last time.

    Example:
        >>> import jax.numpy as jnp
        >>> path = two_factor_flow(jnp.ones((4, 2)), jnp.eye(2), jnp.array([0, 0, 0, 1]),
        ...                        learning_rate=0.1, ts=jnp.array([0.0, 5.0]))
        >>> path.f.shape, path.w.shape
        ((2, 4, 2), (2, 2, 2))

    Source:
        TFD eq (12).
    """
    f, w, targets = _check(f, w, labels)
    rate = jnp.asarray(check_rate(learning_rate), f.dtype)
    ts = check_times(ts, f.dtype)
    is_single = f.dtype == jnp.float32
    rtol = (1e-5 if is_single else 1e-10) if rtol is None else rtol
    atol = (1e-6 if is_single else 1e-12) if atol is None else atol
    accuracy = jnp.asarray(rtol, f.dtype), jnp.asarray(atol, f.dtype)
    return TwoFactorTrajectory(ts, *_flow((f, w), targets, rate, ts, accuracy))


@eqx.filter_jit
def _flow(
    factors: tuple[Array, Array],
    targets: Array,
    rate: Array,
    ts: Array,
    accuracy: tuple[Array, Array],
) -> tuple[Array, Array]:
    def field(t: Any, state: tuple[Array, Array], args: Any) -> tuple[Array, Array]:
        return _velocity(*state, targets, rate)

    solver = diffrax.Tsit5() if ts.dtype == jnp.float32 else diffrax.Dopri8()
    return solve_ode(field, factors, ts, solver=solver, accuracy=accuracy)[0]


def two_factor_descent(
    f: ArrayLike, w: ArrayLike, labels: Any, *, learning_rate: Any, steps: int
) -> TwoFactorTrajectory:
    """Gradient descent on both factors at once; the invariant drifts by O(eta) over a fixed time.

    Args:
        f: features before training (b, h).
        w: unembedding before training (h, V).
        labels: integer classes (b,).
        learning_rate: eta > 0.
        steps: number of steps.

    Returns:
        A `TwoFactorTrajectory` with ts = 0, 1, ..., steps.

    Raises:
        ValueError: as in `two_factor_flow`; `steps` below 1.
        RuntimeError: at run time, when the factors overflow.

    Example:
        >>> import jax.numpy as jnp
        >>> path = two_factor_descent(jnp.ones((4, 2)), jnp.eye(2), jnp.array([0, 0, 0, 1]),
        ...                           learning_rate=0.1, steps=3)
        >>> path.f.shape
        (4, 4, 2)
    """
    f, w, targets = _check(f, w, labels)
    check_integer("steps", steps, at_least=1)
    rate = jnp.asarray(check_rate(learning_rate), f.dtype)
    return TwoFactorTrajectory(*_descend((f, w), targets, rate, steps))


@eqx.filter_jit
def _descend(
    start: tuple[Array, Array], targets: Array, rate: Array, steps: int
) -> tuple[Array, Array, Array]:
    def step(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], Any]:
        new = jax.tree.map(jnp.add, state, _velocity(*state, targets, rate))
        return new, new

    _, path = jax.lax.scan(step, start, None, length=steps)
    fs, ws = (jnp.concatenate([a[None], b]) for a, b in zip(start, path, strict=True))
    fs = eqx.error_if(
        fs,
        ~(jnp.all(jnp.isfinite(fs)) & jnp.all(jnp.isfinite(ws))),
        "two_factor_descent overflows; choose a smaller learning_rate",
    )
    return jnp.arange(steps + 1, dtype=fs.dtype), fs, ws


def two_factor_observables(
    f: ArrayLike, w: ArrayLike, labels: Any, *, learning_rate: Any
) -> TwoFactorObservables:
    """Singular values of both factors, their alignment and their predicted rates at one time.

    Map it over a trajectory with ``jax.vmap``.

    Args:
        f: features (b, h).
        w: unembedding (h, V).
        labels: integer classes (b,).
        learning_rate: eta > 0.

    Returns:
        A `TwoFactorObservables`.

    Raises:
        ValueError: as in `two_factor_flow`.

    Example:
        >>> import jax.numpy as jnp
        >>> now = two_factor_observables(jnp.eye(2), jnp.eye(2), jnp.array([0, 1]),
        ...                              learning_rate=1.0)
        >>> float(jnp.max(jnp.abs(now.imbalance)))
        0.0

    Source:
        TFD Lemma B.1, Theorems B.2 and B.3. Errata: the sums of (21) are nested, not a product; the
        printed O(N_max) for |g_i| is loose, |g_i| <= ||A||_2 <= sqrt(N_max) at uniform prediction.
    """
    f, w, targets = _check(f, w, labels)
    rate = jnp.asarray(check_rate(learning_rate), f.dtype)
    logits = _product(f, w)
    residual = jax.nn.softmax(logits) - targets
    samples = jax.nn.logsumexp(logits, axis=1) - jnp.sum(targets * logits, axis=1)
    rank = min(*f.shape, w.shape[1])
    u1, s1, v1t = decompose(jnp.linalg.svd, f, full_matrices=False)
    u2, s2, v2t = decompose(jnp.linalg.svd, after(w, s1), full_matrices=False)
    u1, v1, u2, v2 = u1[:, :rank], v1t[:rank].T, u2[:, :rank], v2t[:rank].T
    s1, s2 = s1[:rank], s2[:rank]
    overlap = jnp.sum(v1 * u2, axis=0)
    sign = jnp.where(overlap < 0, -1.0, 1.0).astype(f.dtype)
    g = jnp.sum(u1 * _product(residual, v2), axis=0) * sign
    df, dw = _velocity(f, w, targets, rate)
    return TwoFactorObservables(
        loss=jnp.sum(samples),
        imbalance=_product(f.T, f) - _product(w, w.T),
        singular_f=s1,
        singular_w=s2,
        alignment=jnp.abs(overlap),
        g=g,
        rate_f=jnp.sum(u1 * _product(df, v1), axis=0),
        rate_w=jnp.sum(u2 * _product(dw, v2), axis=0),
        theorem_f=-rate * g * s2,
        theorem_w=-rate * g * s1,
        residual_norm=decompose(jnp.linalg.norm, after(residual, s1, s2), ord=2),
    )


def balanced_features(w: ArrayLike, samples: int, *, key: Array) -> Float[Array, "b h"]:
    """Features f with f^T f = W W^T, by a random rotation: f = Q S_2 U_2^T with Q^T Q = I.

    Args:
        w: unembedding (h, V).
        samples: b, at least min(h, V).
        key: a `jax.random.key`.

    Returns:
        f (b, h).

    Raises:
        ValueError: fewer samples than W's largest possible rank.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w = jax.random.normal(jax.random.key(0), (3, 5))
        >>> f = balanced_features(w, 8, key=jax.random.key(1))
        >>> bool(jnp.allclose(f.T @ f, w @ w.T, atol=1e-4))
        True

    Source:
        TFD Theorem B.2, its premise.
    """
    w = check_finite_value("w", check_array("w", w, ndim=2, floating=True))
    check_key(key, optional=False)
    rank = min(w.shape)
    check_integer("samples", samples, at_least=rank, hint=f"W can have rank {rank}.")
    u, s, _ = decompose(jnp.linalg.svd, w, full_matrices=False)
    q, _ = decompose(jnp.linalg.qr, jax.random.normal(key, (samples, rank), w.dtype))
    return _product(q * s[None], u.T)


def power_law_labels(samples: int, classes: int, *, exponent: float = 1.0) -> Array:
    """Labels (b,) whose class sizes fall as 1/rank^exponent, class 0 the largest; deterministic.

    Args:
        samples: b.
        classes: V.
        exponent: 0 for balanced classes.

    Returns:
        Integer labels (b,), sorted; rare classes may be empty.

    Raises:
        ValueError: sizes below 1.

    Example:
        >>> power_law_labels(11, 3).tolist()
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    """
    check_integer("samples", samples, at_least=1)
    check_integer("classes", classes, at_least=1)
    check_number("exponent", exponent)
    check_known(exponent=exponent)
    fraction = 1.0 / np.arange(1, classes + 1) ** exponent
    ends = np.cumsum(fraction) / np.sum(fraction) * samples
    return jnp.asarray(np.searchsorted(ends, np.arange(samples) + 0.5).clip(max=classes - 1))


_product = functools.partial(jnp.matmul, precision="highest")


def _velocity(f: Array, w: Array, targets: Array, rate: Array) -> tuple[Array, Array]:
    residual = jax.nn.softmax(_product(f, w)) - targets
    return -rate * _product(residual, w.T), -rate * _product(f.T, residual)


def _check(f: ArrayLike, w: ArrayLike, labels: Any) -> tuple[Array, Array, Array]:
    f = check_finite_value("f", check_array("f", f, ndim=2, floating=True))
    w = check_finite_value("w", check_array("w", w, ndim=2).astype(f.dtype))
    if w.shape[0] != f.shape[1]:
        raise ValueError(f"w must be (h, V) with h = {f.shape[1]} as in f; got shape {w.shape}.")
    labels = check_array("labels", labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer) or labels.shape != (len(f),) or not len(f):
        raise ValueError(
            f"labels must be integers ({len(f)},), one a row of f, and one at least; got "
            f"{labels.dtype} {labels.shape}."
        )
    labels = labels.astype(np.int32)  # in 8 bits the classes themselves would wrap around
    message = f"labels must lie in 0..{w.shape[1] - 1}, the columns of w"
    if not is_concrete(labels):
        labels = eqx.error_if(labels, jnp.any((labels < 0) | (labels >= w.shape[1])), message)
    else:
        values = np.asarray(labels)  # within a trace `np.min` of a JAX array is traced
        if not 0 <= values.min() <= values.max() < w.shape[1]:
            raise ValueError(f"{message}; got {values.min()} to {values.max()}.")
    return f, w, jax.nn.one_hot(labels, w.shape[1], dtype=f.dtype)
