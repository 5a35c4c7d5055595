"""Checks and products of kernels, shared by all dynamics functions.

A kernel is an array (M, C, N, C), its factors (`jaxttp.ntk.Factored`), or (M, N), which stands for
K ⊗ I_C (the same scalar kernel for every output, no mixing), as the class sketch gives it: see
`jaxttp.ntk.kernels`, which multiplies by all three.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxttp._core.checks import (
    all_finite,
    check_array,
    check_finite,
    check_finite_value,
    check_number,
    is_concrete,
)
from jaxttp.losses import Loss, encode_targets
from jaxttp.ntk.kernels import Factored, Kernel, KernelOperator, operator_of


def apply_kernel(
    kernel: Kernel | KernelOperator, vectors: Float[Array, "*t n c"]
) -> Float[Array, "*t m c"]:
    """Theta v for one v (N, C) or many (T, N, C), as one product of pinned precision."""
    return operator_of(kernel).mv(vectors)


def image_of(
    kernel: Kernel, gradient: Float[Array, "b c"], batch: Int[Array, " b"] | None = None
) -> Float[Array, " k"]:
    """B^T v of a kernel A B^T, v (N, C) being zero outside a batch; Theta v of an array.

    With a batch Theta is that of the training samples, whose rows are its columns. Rows are
    contiguous in memory.
    """
    if batch is None:
        if isinstance(kernel, Factored):
            return jnp.dot(gradient.reshape(-1), kernel.columns, precision="highest")
        return operator_of(kernel).mv(gradient).reshape(-1)
    if isinstance(kernel, Factored):
        rows = kernel.some_columns(batch).columns
    else:
        rows = jnp.take(jnp.asarray(kernel), batch, axis=0)
        if rows.ndim == 2:  # K of K ⊗ I_C
            return jnp.dot(rows.T, gradient, precision="highest").reshape(-1)
    # Twice: XLA's CPU backend would select the rows anew for every column of a product with one
    # vector. For a batch of 64 of 1,000 samples that took 1.6 ms, this takes 0.2 ms.
    twice = jnp.stack(2 * [gradient.reshape(-1)])
    return jnp.dot(twice, rows.reshape(gradient.size, -1), precision="highest")[0]


def image_size(kernel: Kernel, classes: int) -> int:
    """The length of `image_of`."""
    return kernel.columns.shape[1] if isinstance(kernel, Factored) else kernel.shape[0] * classes


def outputs_of(
    kernel: Kernel, image: Float[Array, " k"], classes: int, batch: Int[Array, " b"] | None = None
) -> Float[Array, "b c"]:
    """A times an image, on a batch or on all samples."""
    if isinstance(kernel, Factored):
        factors = kernel if batch is None else kernel.some_rows(batch)
        return jnp.dot(factors.rows, image, precision="highest").reshape(-1, classes)
    outputs = image.reshape(-1, classes)
    return outputs if batch is None else outputs[batch]


def block_of(kernel: Kernel, rows: Any, columns: Any) -> Kernel:
    """Theta[rows, :, columns] of a kernel, by the indices of samples."""
    return operator_of(kernel).block(rows, columns).plain


def flatten_kernel(kernel: Kernel, c: int) -> Float[Array, "mc nc"]:
    """The kernel as a matrix (M C, N C), sample-major."""
    return operator_of(kernel, c).as_matrix()


def check_problem(
    kernel: Any, f0: Any, y: Any, loss: str | Loss, kernel_test: Any = None, f0_test: Any = None
) -> tuple[Kernel, Array, Array, Loss, Kernel | None, Array | None]:
    """Validated ``(kernel, f0, targets, loss, kernel_test, f0_test)`` as arrays of one dtype."""
    f0 = check_finite_value("f0", check_array("f0", f0, ndim=2, floating=True))
    n, c = f0.shape
    kernel, f0 = _check_kernel("kernel", kernel, f0, n)
    targets, loss = encode_targets(loss, y, f0)
    if (kernel_test is None) != (f0_test is None):
        raise ValueError("kernel_test and f0_test belong together: give both or neither.")
    if kernel_test is not None:
        f0_test = check_array("f0_test", f0_test, ndim=2).astype(f0.dtype)
        if f0_test.shape[1] != c:
            raise ValueError(f"f0_test must be outputs (M, {c}); got shape {f0_test.shape}.")
        f0_test = check_finite_value("f0_test", f0_test)
        kernel_test, f0_test = _check_kernel("kernel_test", kernel_test, f0_test, n)
    return kernel, f0, targets, loss, kernel_test, f0_test


def _check_kernel(name: str, kernel: Any, outputs: Array, n: int) -> tuple[Kernel, Array]:
    """A kernel of these outputs (M, C) by N samples, in their dtype; and the outputs.

    For a traced kernel the run-time check is attached to the outputs: `error_if` would move the
    kernel to one device for a moment.
    """
    kernel = kernel if isinstance(kernel, Factored) else check_array(name, kernel)
    kernel, (m, c) = kernel.astype(outputs.dtype), outputs.shape
    if kernel.shape not in ((m, c, n, c), (m, n)):
        raise ValueError(
            f"{name} must have shape {(m, c, n, c)}, or {(m, n)} for one scalar kernel for "
            f"all outputs; got {kernel.shape}."
        )
    if all(map(is_concrete, jax.tree.leaves(kernel))):
        check_finite(name, kernel)
        return kernel, outputs
    return kernel, eqx.error_if(outputs, ~all_finite(kernel), f"{name} holds NaN or infinity")


def check_times(ts: Any, dtype: Any, *, limit: bool = False) -> Array:
    """Validated output times (T,), non-negative and increasing; of one number T is 1.

    Args:
        ts: one time or several.
        dtype: of the result.
        limit: whether infinity, the limit of training, is a time.
    """
    ts = jnp.atleast_1d(check_array("ts", ts).astype(dtype))
    if ts.ndim != 1 or ts.shape[0] == 0:
        raise ValueError(f"ts must be a time or a non-empty vector of them; got shape {ts.shape}.")
    if not is_concrete(ts):
        return ts
    times = np.asarray(ts)
    check_finite("ts", times[times != np.inf] if limit else times)
    if times[0] < 0 or np.any(times[1:] < times[:-1]):
        raise ValueError("ts must be non-negative and increasing; sort it (the flow starts at 0).")
    return ts


def check_rate(learning_rate: Any) -> Any:
    """A learning rate greater than zero."""
    return check_number(
        "learning_rate", learning_rate, above=0.0, hint="Use a small positive step."
    )
