"""The empirical neural tangent kernel, exactly, in bounded memory.

    Theta[i, a, j, b] = sum_p  d f_a(x_i)/d w_p  *  d f_b(x_j)/d w_p

The Jacobian J (N, C, D) of the whole data set never exists at once: tiles of a few samples are
made, contracted and dropped.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._checks import check_choice, check_finite, check_integer
from jaxttp._types import ApplyFn, Params

OUTPUTS = ("full", "trace", "diagonal")
METHODS = ("auto", "jacobian", "vector_product")
DEFAULT_BYTES = 2**30
"""Memory for the Jacobians of one pair of tiles where the caller sets no bound."""


def split_trainable(params: Params, trainable: Any) -> tuple[Params, Callable[[Params], Params]]:
    """The parameters that train, and the function that puts the frozen ones back.

    Args:
        params: any pytree of arrays.
        trainable: None (all of them), a pytree of booleans (a prefix of `params` is enough), or a
            predicate on a leaf's path as `jax.tree_util.keystr` prints it.

    Returns:
        ``(selected, restore)``: the selected leaves (None in place of the others) and a function
        from such a tree to the whole parameters.

    Raises:
        ValueError: `trainable` does not fit `params`, or selects nothing.
    """
    if trainable is None:
        mask = jax.tree.map(lambda leaf: True, params)
    elif callable(trainable):
        mask = jax.tree_util.tree_map_with_path(
            lambda path, leaf: bool(trainable(jax.tree_util.keystr(path))), params
        )
    else:
        try:
            mask = jax.tree.broadcast(trainable, params)
        except ValueError as problem:
            raise ValueError(
                f"trainable is a tree that does not fit params: {problem}; give a tree of booleans "
                "with the structure of params (a prefix is enough) or a predicate on the path."
            ) from None
    if not any(jax.tree.leaves(mask)):
        raise ValueError("trainable selects no parameter at all; select at least one leaf.")
    selected = jax.tree.map(lambda use, leaf: leaf if use else None, mask, params)

    def restore(tree: Params) -> Params:
        return jax.tree.map(
            lambda use, new, old: new if use else old,
            mask,
            jax.tree.map(lambda use, new: new, mask, tree, is_leaf=lambda leaf: leaf is None),
            params,
        )

    return selected, restore


def empirical_ntk(
    apply_fn: ApplyFn,
    params: Params,
    x1: ArrayLike,
    x2: ArrayLike | None = None,
    *,
    output: str = "full",
    method: str = "auto",
    trainable: Any = None,
    batch_size: int | None = None,
    max_bytes: int | None = None,
    mesh: Any = None,
) -> Array:
    """The empirical neural tangent kernel between two sets of samples.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``; row i depends on sample i alone.
        params: pytree of floating-point arrays.
        x1: samples (N1, ...).
        x2: samples (N2, ...); `x1` again when None (then only half the tiles are computed).
        output: "full" (N1, C, N2, C); "trace" (N1, N2), the mean over c of Theta[n, c, m, c];
            "diagonal" (N1, N2, C), Theta[n, c, m, c].
        method: "jacobian" (reverse mode, tiles of the Jacobian), "vector_product" (forward mode
            through the transpose, no Jacobian rows stored), or "auto".
        trainable: None for all parameters, a pytree of booleans (prefix allowed) or a predicate on
            the path string; the others are frozen and add nothing to the kernel.
        batch_size: samples a tile; chosen from `max_bytes` when None. The last tile may be ragged.
        max_bytes: bound on the memory of the Jacobian tiles held at once, in bytes (1 GiB).
        mesh: reserved for several devices; one device is used.

    Returns:
        The kernel, in the dtype of the outputs.

    Raises:
        ValueError: bad option, shapes, sizes, or non-finite `x1`, `x2` or `params`.

    Example:
        >>> import jax.numpy as jnp
        >>> kernel = empirical_ntk(lambda w, x: x @ w, jnp.ones((3, 2)), jnp.eye(3))
        >>> kernel.shape
        (3, 2, 3, 2)
        >>> bool(jnp.allclose(kernel.reshape(6, 6), jnp.eye(6)))
        True

    Source:
        TTP eq (2); the mean over outputs is the kernel that neural-tangents calls trace_axes.
    """
    check_choice("output", output, OUTPUTS)
    check_choice("method", method, METHODS)
    if mesh is not None:
        raise ValueError("mesh: kernels over several devices are not supported yet; leave it None.")
    x1 = jnp.asarray(x1)
    check_finite("x1", x1)
    check_finite("params", params)
    if x2 is not None:
        x2 = jnp.asarray(x2)
        check_finite("x2", x2)
        if x2.shape[1:] != x1.shape[1:]:
            raise ValueError(
                f"x1 and x2 must hold samples of one shape; got {x1.shape[1:]} and {x2.shape[1:]}."
            )
    for name, x in (("x1", x1), ("x2", x1 if x2 is None else x2)):
        if x.ndim == 0 or x.shape[0] == 0:
            raise ValueError(f"{name} must hold at least one sample; got shape {x.shape}.")
    shape = jax.eval_shape(apply_fn, params, x1).shape
    if len(shape) != 2 or shape[0] != x1.shape[0]:
        raise ValueError(
            f"apply_fn must return outputs (N, C) = ({x1.shape[0]}, C); got {shape}. "
            "Flatten or select its outputs."
        )
    selected, restore = split_trainable(params, trainable)
    if batch_size is None:
        batch_size = _default_batch(selected, shape[1], max_bytes)
    check_integer("batch_size", batch_size, at_least=1)
    tile = functools.partial(_TILES[method], lambda w, x: apply_fn(restore(w), x), selected)
    return _assemble(tile, x1, x2, shape[1], output, batch_size)


def _default_batch(params: Params, c: int, max_bytes: int | None) -> int:
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    bound = DEFAULT_BYTES if max_bytes is None else max_bytes
    least = 2 * c * size
    if max_bytes is not None and max_bytes < least:
        raise ValueError(
            f"max_bytes={max_bytes} cannot hold the Jacobians of two samples; {least} would do."
        )
    return max(1, math.floor(bound / least))


def _assemble(
    tile: Callable[[Array, Array, str], Array],
    x1: Array,
    x2: Array | None,
    c: int,
    output: str,
    batch_size: int,
) -> Array:
    """Fill the kernel tile by tile; without `x2` the lower half is the upper half transposed."""
    run = jax.jit(tile, static_argnums=2)
    columns = x1 if x2 is None else x2
    rows = []
    starts1 = range(0, x1.shape[0], batch_size)
    starts2 = range(0, columns.shape[0], batch_size)
    done: dict[tuple[int, int], Array] = {}
    for i in starts1:
        row = []
        for j in starts2:
            if x2 is None and j < i:
                block = _transpose(done[j, i], output)
            else:
                block = run(x1[i : i + batch_size], columns[j : j + batch_size], output)
                if x2 is None and i == j:
                    block = 0.5 * (block + _transpose(block, output))
                done[i, j] = block
            row.append(block)
        rows.append(jnp.concatenate(row, axis=2 if output == "full" else 1))
    return jnp.concatenate(rows, axis=0)


def _transpose(block: Array, output: str) -> Array:
    if output == "full":
        return jnp.transpose(block, (2, 3, 0, 1))
    return jnp.swapaxes(block, 0, 1)


def _jacobian_tile(f: ApplyFn, params: Params, x1: Array, x2: Array, output: str) -> Array:
    def rows(x: Array) -> Params:
        def single(sample: Array) -> Params:
            return jax.jacrev(lambda w: f(w, sample[None])[0])(params)

        return jax.vmap(single)(x)

    pattern = {"full": "iap,jbp->iajb", "trace": "iap,jap->ij", "diagonal": "iap,jap->ija"}[output]
    parts = []
    for left, right in zip(jax.tree.leaves(rows(x1)), jax.tree.leaves(rows(x2)), strict=True):
        flat = [leaf.reshape(*leaf.shape[:2], -1) for leaf in (left, right)]
        part = jnp.einsum(pattern, *flat, precision="highest")
        parts.append(part / left.shape[1] if output == "trace" else part)
    return functools.reduce(jnp.add, parts)


def _vector_product_tile(f: ApplyFn, params: Params, x1: Array, x2: Array, output: str) -> Array:
    def block(sample1: Array, sample2: Array) -> Array:
        _, pull = jax.vjp(lambda w: f(w, sample2[None])[0], params)

        def product(cotangent: Array) -> Array:
            tangent = pull(cotangent)[0]
            return jax.jvp(lambda w: f(w, sample1[None])[0], (params,), (tangent,))[1]

        c = jax.eval_shape(lambda w: f(w, sample2[None])[0], params)
        return jax.vmap(product, out_axes=1)(jnp.eye(c.shape[0], dtype=c.dtype))  # (C, C)

    full = jax.vmap(lambda a: jax.vmap(lambda b: block(a, b))(x2))(x1)  # (n, m, C, C)
    if output == "full":
        return jnp.swapaxes(full, 1, 2)
    diagonal = jnp.diagonal(full, axis1=2, axis2=3)
    return diagonal if output == "diagonal" else jnp.mean(diagonal, axis=-1)


_TILES = {
    "auto": _jacobian_tile,
    "jacobian": _jacobian_tile,
    "vector_product": _vector_product_tile,
}
