"""Squared error: the outputs at any time from one eigendecomposition.

    f_t  = y + exp(-(eta/N) Theta t) (f_0 - y)
    f*_t = f*_0 - Theta* phi(Theta, t) (f_0 - y),   phi(l, t) = (1 - exp(-(eta/N) l t)) / l

phi is finite at l = 0, so test outputs need no inverse of Theta.
"""

import functools
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.compile import jit
from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.dynamics._kernels import (
    apply_kernel,
    check_problem,
    check_rate,
    check_times,
    flatten_kernel,
)
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.losses import Loss, get_loss
from jaxttp.ntk.kernels import Kernel, KernelLike


def closed_form(
    kernel: KernelLike,
    f0: ArrayLike,
    y: Any,
    *,
    loss: str | Loss = "squared_error",
    learning_rate: Any,
    ts: Any,
    kernel_test: KernelLike | None = None,
    f0_test: ArrayLike | None = None,
) -> Trajectory:
    """Gradient flow of the squared error, exact at any time.

    Differentiate in reverse with respect to the rate or the outputs; with respect to a kernel with
    repeated eigenvalues, such as K ⊗ I_C, the derivative of its eigenvectors is not defined (NaN):
    `gradient_flow` has one.

    Args:
        kernel: Theta (N, C, N, C), symmetric and positive semi-definite; or (N, N) for K ⊗ I_C.
        f0: outputs at t = 0, (N, C).
        y: integer labels (N,), which become one-hot targets, or targets (N, C).
        loss: "squared_error", the only one that has a closed form.
        learning_rate: eta > 0; one unit of time is one step of that size.
        ts: times (T,), non-negative and increasing, or one time (T = 1); the flow starts at t = 0
            whatever ts[0]. ``jnp.inf`` is the limit of training, where eigenvalues of the kernel
            below rounding count as 0.
        kernel_test: Theta(X*, X) (M, C, N, C), or (M, N).
        f0_test: test outputs at t = 0, (M, C).

    Returns:
        A `Trajectory`: train (T, N, C), test (T, M, C) or None.

    Raises:
        ValueError: another loss, bad shapes, values or times.
        RuntimeError: at run time, a kernel with an eigenvalue below -1e-3 of the largest.

    Example:
        >>> import jax.numpy as jnp
        >>> kernel = jnp.ones((1, 1, 1, 1))
        >>> path = closed_form(kernel, jnp.zeros((1, 1)), jnp.ones((1, 1)), learning_rate=0.1,
        ...                    ts=jnp.array([0.0, 10.0]))
        >>> [round(float(f), 4) for f in path.train[:, 0, 0]]
        [0.0, 0.6321]

    Source:
        TTP eq (4)-(5) and Appendix F.2. Errata: the drift is -eta Theta (f - y), the projections
        are squared, and exp(-2 eta l t) presupposes the 1/2 in the loss, as here.
    """
    if get_loss(loss).name != "squared_error":
        raise ValueError(
            f"loss={loss!r} has no closed form; use 'squared_error', or gradient_flow for {loss!r}."
        )
    kernel, f0, targets, loss, kernel_test, f0_test = check_problem(
        kernel, f0, y, loss, kernel_test, f0_test
    )
    ts = check_times(ts, f0.dtype, limit=True)
    rate = jnp.asarray(check_rate(learning_rate), f0.dtype) / f0.shape[0]
    matrix, delta, root, mean = _prepare(kernel, f0, targets, loss.weighted)
    spectrum = decompose(jnp.linalg.eigh, matrix)
    return _evaluate(spectrum, delta, root, mean, kernel, f0, rate, ts, kernel_test, f0_test)


@functools.partial(jit, static_argnums=3)
def _prepare(
    kernel: Kernel, f0: Array, targets: Array, is_weighted: bool
) -> tuple[Array, Array, Array | None, Array]:
    """The symmetric matrix that drives the residual, the residual, W^(1/2) or None, and y."""
    root = None
    if is_weighted:
        targets, weights = jnp.split(targets, 2, axis=1)
        root = jnp.sqrt(weights)
    scalar = kernel.ndim == 2 and root is None
    matrix = flatten_kernel(kernel, 1 if scalar else f0.shape[1])
    delta = f0 - targets
    if root is not None:  # of weights: u = W^(1/2) (f - y) has the kernel W^(1/2) Theta W^(1/2)
        delta = root * delta
        matrix = root.reshape(-1, 1) * matrix * root.reshape(1, -1)
    delta = delta.reshape(matrix.shape[0], -1)  # (NC, 1), or (N, C) for K ⊗ I
    return 0.5 * (matrix + matrix.T), delta, root, targets


@eqx.filter_jit
def _evaluate(
    spectrum: tuple[Array, Array],
    delta: Array,
    root: Array | None,
    targets: Array,
    kernel: Kernel,
    f0: Array,
    rate: Array,
    ts: Array,
    kernel_test: Kernel | None,
    f0_test: Array | None,
) -> Trajectory:
    """The outputs at all times from the eigendecomposition of the residual's matrix."""
    (values, vectors), (n, c) = spectrum, f0.shape
    largest = jnp.maximum(values[-1], 0.0)
    values = eqx.error_if(
        values,
        values[0] < -1e-3 * largest,
        "kernel is not positive semi-definite: its smallest eigenvalue is below -1e-3 times the "
        "largest. Compute it in float64, or pass the kernel of empirical_ntk unchanged.",
    )
    values = jnp.maximum(values, 0.0)
    parts = jnp.matmul(vectors.T, delta, precision="highest")
    # In the limit the part of the residual in the range of Theta, to rounding, has decayed.
    limit, finite = jnp.isinf(ts)[:, None], jnp.where(jnp.isinf(ts), 0.0, ts)
    moves = (values > values.size * jnp.finfo(f0.dtype).eps * largest)[None]
    exponent = rate * jnp.outer(finite, values)  # (T, K)
    exponent = jnp.where(limit & moves, jnp.inf, exponent)
    safe = jnp.where(exponent > 0, exponent, 1.0)
    ratio = jnp.where(exponent > 0, -jnp.expm1(-safe) / safe, 1.0)
    phi_limit = jnp.where(moves, 1.0 / jnp.where(moves, values[None], 1.0), 0.0)
    phi = jnp.where(limit, phi_limit, rate * finite[:, None] * ratio)
    dual = jnp.matmul(vectors[None], phi[:, :, None] * parts[None], precision="highest")
    dual = dual.reshape(-1, n, c)
    if root is None:
        decayed = jnp.exp(-exponent)[:, :, None] * parts[None]
        train = jnp.matmul(vectors[None], decayed, precision="highest")
        train = targets[None] + train.reshape(-1, n, c)
    else:  # outputs of weight 0 move with the others, and have no part in u
        dual = root[None] * dual
        train = f0[None] - apply_kernel(kernel, dual)
    test = None
    if kernel_test is not None and f0_test is not None:
        test = f0_test[None] - apply_kernel(kernel_test, dual)
    return Trajectory(ts, train, test)
