"""One backward pass a sample in place of C: the kernel of one signed sum of the outputs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.checks import check_integer, check_key
from jaxttp._core.results import RESULT
from jaxttp._core.traced import Network, network_of
from jaxttp._core.types import ApplyFn, Params, count, take
from jaxttp.adapters.gradients import check_gradients
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.ntk._select import select_leaves
from jaxttp.ntk.gram import kernel_of
from jaxttp.ntk.sketch import check_rows


class ClassSketch(NamedTuple):
    """Θ ≈ K ⊗ I_C, with the error measured on an exact block.

    Attributes:
        kernel: K (N, N), an unbiased estimate of the mean over c of Θ[n, c, m, c].
        error: ‖K ⊗ I_C − Θ‖_F / ‖Θ‖_F on the first `checked` samples.
        shared: the part of that error that no K could avoid, ‖K* ⊗ I_C − Θ‖_F / ‖Θ‖_F with the
            exact class mean K*.
        checked: samples of the exact block.
    """

    kernel: Array
    error: Array
    shared: Array
    checked: int

    plot, _repr_html_, __repr__ = RESULT


def class_sketch(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    *,
    key: Array,
    trainable: Any = None,
    check: int = 16,
    batch_size: int | None = None,
    max_bytes: int | None = None,
) -> ClassSketch:
    """One backward pass in place of C: Θ ≈ K ⊗ I_C, K the kernel of Σ_c s_c f_c / √C.

        K[n, m] = (1/C) Σ_cd s_c s_d Θ[n, c, m, d],     s_c = ±1 at random, the same for all samples

    E K is the mean over classes of Θ[n, c, m, c]. How good the approximation is depends on the
    task, so it is always checked against an exact block; look at `error` before using it.

    Args:
        apply_fn: ``(params, x (N, ...)) -> outputs (N, C)``.
        params: pytree of arrays.
        x: inputs (N, ...), an array or a pytree of arrays with N rows each.
        key: a JAX random key.
        trainable: see `empirical_ntk`.
        check: samples of the exact block.
        batch_size: see `empirical_ntk`.
        max_bytes: see `empirical_ntk`.

    Returns:
        The kernel (N, N) with its measured error.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> result = class_sketch(
        ...     lambda w, x: x @ w, jnp.ones((4, 4)), jnp.eye(4), key=jax.random.key(0)
        ... )
        >>> float(result.error)  # separate weights for each class: Θ is a Kronecker product
        0.0
    """
    check = check_integer("check", check, at_least=1)
    check_network(apply_fn, params)
    check_key(key, optional=False)
    x = check_samples("x", x)
    check_rows(apply_fn, params, x)
    mask = select_leaves(params, trainable)
    n = count(x)
    classes = jax.eval_shape(lambda *given: apply_fn(*given), params, x).shape[-1]
    tree = jax.tree.unflatten(jax.tree.structure(params), mask)
    kernel = signed_kernel(
        apply_fn, params, x, key=key, trainable=tree, batch_size=batch_size, max_bytes=max_bytes
    )
    check_gradients(apply_fn, params, x, kernel, trainable=mask)
    few = min(check, n)
    block = take(x, slice(few))
    exact = kernel_of(apply_fn, params, block, trainable=tree, max_bytes=max_bytes)

    size = jnp.max(jnp.abs(exact))  # squares of entries may not be numbers
    size = jnp.where(size > 0, size, jnp.ones((), exact.dtype))
    whole = jnp.linalg.norm((exact / size).ravel())
    whole = jnp.where(whole > 0, whole, jnp.ones((), exact.dtype))  # zeros are met without error

    def error(small: Array) -> Array:
        eye = jnp.eye(classes, dtype=small.dtype)
        guess = small[:, None, :, None] * eye[None, :, None, :]
        return jnp.linalg.norm(((guess - exact) / size).ravel()) / whole

    best = jnp.einsum("ncmc->nm", exact) / jnp.asarray(classes, exact.dtype)
    return ClassSketch(kernel, error(kernel[:few, :few]), error(best), few)


def signed_kernel(
    apply_fn: ApplyFn,
    params: Params,
    x1: Any,
    x2: Any = None,
    *,
    key: Array,
    trainable: Any = None,
    **options: Any,
) -> Float[Array, "n m"]:
    """The kernel of Σ_c s_c f_c / √C between two sets of samples, one backward pass a sample.

    Args:
        apply_fn: ``(params, x (N, ...)) -> outputs (N, C)``.
        params: pytree of arrays.
        x1: samples (N, ...).
        x2: samples (M, ...); `x1` when None.
        key: draws the signs s.
        trainable: see `empirical_ntk`.
        **options: batch_size, max_bytes and mesh of `empirical_ntk`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> weights = jnp.ones((4, 3))  # of its own for every class: K is X X^T
        >>> kernel = signed_kernel(lambda w, x: x @ w, weights, jnp.eye(4), key=jax.random.key(0))
        >>> kernel[0].round(3).tolist()
        [1.0, 0.0, 0.0, 0.0]
    """
    signed, pair, mask = signed_network(apply_fn, params, x1, key=key, trainable=trainable)
    return kernel_of(signed, pair, x1, x2, output="trace", trainable=mask, **options)


def signed_network(
    apply_fn: ApplyFn, params: Params, x: Any, *, key: Array | None, trainable: Any = None
) -> tuple[ApplyFn, tuple[Params, Array | np.ndarray], tuple[Any, bool]]:
    """Σ_c s_c f_c / √C as a network: its function, parameters, and which of them train.

    Args:
        apply_fn: ``(params, x (N, ...)) -> outputs (N, C)``.
        params: pytree of arrays.
        x: samples (N, ...).
        key: draws the signs s; None for signs that are all the same, where only shapes matter.
        trainable: see `empirical_ntk`.
    """
    outputs = jax.eval_shape(lambda *given: apply_fn(*given), params, x)
    classes = outputs.shape[-1]
    signs: Array | np.ndarray = np.full((classes, 1), classes**-0.5, outputs.dtype)
    if key is not None:
        signs = jax.random.rademacher(key, (classes, 1), outputs.dtype)
        signs = signs / jnp.sqrt(jnp.asarray(classes, outputs.dtype))
    signed = network_of(apply_fn).once(_signed)
    mask = jax.tree.unflatten(jax.tree.structure(params), select_leaves(params, trainable))
    return signed, (params, signs), (mask, False)


def _signed(apply_fn: ApplyFn) -> Network:
    def signed(pair: Any, x: Any) -> Array:
        params, signs = pair
        return apply_fn(params, x) @ signs

    return Network(signed)


__all__ = ["ClassSketch", "class_sketch"]
