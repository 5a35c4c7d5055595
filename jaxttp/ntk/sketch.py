"""Random projections of the Jacobian, J R with E[R Rᵀ] = I, so that E[(J R)(J R)ᵀ] = Θ.

CountSketch (the default) multiplies each coordinate by a random sign, cuts each parameter leaf into
blocks of `dim` coordinates, rolls each block by a random shift and adds the blocks up. It needs no
scatter and no stored projection. With x, y two rows of J, and sums over pairs of coordinates of
DIFFERENT blocks only (two coordinates of one block never collide),

    E|Θ̂_xy − Θ_xy|² = (‖x‖²‖y‖² + ⟨x,y⟩² − 2 Σ x_a² y_a²) / dim     (all pairs; an upper bound)

Dense kinds multiply by a matrix that is drawn block by block and thrown away. All randomness is
derived from the key, the leaf and the block of coordinates, never from the batch.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._checks import (
    check_array,
    check_choice,
    check_finite,
    check_finite_value,
    check_integer,
    check_key,
)
from jaxttp._convolutions import quick
from jaxttp._jit import jit
from jaxttp._result import RESULT
from jaxttp._samples import count, take
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.adapters.outputs import check_per_sample
from jaxttp.ntk._select import select_leaves
from jaxttp.ntk._sharded_sketch import check_width, sharded_sketch
from jaxttp.ntk.gram import kernel_of
from jaxttp.ntk.row_sharded import RowSharded, several

_KINDS = ("countsketch", "rademacher", "gaussian", "achlioptas")
_DENSE_BLOCK = 1024  # coordinates whose projection is drawn at once
_GRADIENT_BYTES = 256 << 20

Projections = dict[int, tuple[Array, Array]]


def sketch_jacobian(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    *,
    key: Array,
    dim: int,
    kind: str = "countsketch",
    trainable: Any = None,
    batch_size: int | None = None,
    mesh: Any = None,
) -> Array:
    """A random projection S (N, C, dim) of the Jacobian with E[S Sᵀ] = Θ.

        S[n, c] = J[n, c] R,     E|S Sᵀ − Θ|² = (‖x‖²‖y‖² + ⟨x,y⟩² − 2 Σ x²y²)/dim per entry

    The last term is absent for "gaussian" and "achlioptas", whose entries have kurtosis 3 (in
    general it is kurtosis − 3). The projection is the same whatever the batch size, so sketches of
    two data sets with one key give their cross kernel.

    Args:
        apply_fn: ``(params, x (N, ...)) -> outputs (N, C)``; row i depends on row i of x alone.
        params: pytree of arrays.
        x: inputs (N, ...), an array or a pytree of arrays with N rows each.
        key: a JAX random key.
        dim: width of the sketch, k.
        kind: "countsketch" (cheapest), "rademacher" (±1), "gaussian" or "achlioptas"
            (√3 {-1, 0, +1} with probabilities 1/6, 2/3, 1/6).
        trainable: see `empirical_ntk`.
        batch_size: samples differentiated at a time; None for as many as fit into 256 MiB.
        mesh: a `jax.sharding.Mesh` over whose devices the samples are differentiated, and the
            columns of the sketch sharded; None for one device. `batch_size` is then of each.

    Returns:
        The sketch (N, C, dim).

    Raises:
        ValueError: an unknown kind, `dim` or `batch_size` below one, nothing trainable; a `dim`
            that the devices of `mesh` do not divide.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w, x = jnp.ones((50, 2)), jnp.ones((3, 50))
        >>> sketch_jacobian(lambda w, x: x @ w, w, x, key=jax.random.key(0), dim=8).shape
        (3, 2, 8)

    Source:
        Charikar, Chen, Farach-Colton 2002 (CountSketch); Achlioptas 2003.
    """
    check_network(apply_fn, params)
    check_key(key, optional=False)
    x = check_samples("x", x)
    _check_rows(apply_fn, params, x)
    return sketch_of(
        apply_fn, params, x, key=key, dim=dim, kind=kind, trainable=trainable,
        batch_size=batch_size, mesh=mesh,
    )  # fmt: skip


def _check_rows(apply_fn: ApplyFn, params: Params, x: Any) -> None:
    """Finite parameters and samples, one at least; outputs (N, C), each of its own sample."""
    for name, value in (("params", params), ("x", x)):
        check_finite(name, value)
    if count(x) == 0:
        raise ValueError("x must hold at least one sample; it is empty.")
    check_per_sample(apply_fn, params, x)


def sketch_of(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    *,
    key: Array,
    dim: int,
    kind: str = "countsketch",
    trainable: Any = None,
    batch_size: int | None = None,
    mesh: Any = None,
) -> Array:
    """`sketch_jacobian` of a network whose outputs are known to be of one sample each."""
    check_choice("kind", kind, _KINDS)
    dim = check_integer("dim", dim, at_least=1)
    devices = several(mesh)
    if devices is not None:
        check_width(dim, devices)
    check_network(apply_fn, params)
    mask = select_leaves(params, trainable)
    leaves, treedef = jax.tree.flatten(params)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    x = check_samples("x", x)
    n = count(x)
    if batch_size is None:
        outputs = jax.eval_shape(apply_fn, params, x).shape[-1]
        size = sum(
            leaf.size * leaf.dtype.itemsize for leaf, on in zip(leaves, mask, strict=True) if on
        )
        batch_size = max(1, _GRADIENT_BYTES // max(1, size * outputs))
    size = min(check_integer("batch_size", batch_size, at_least=1), n)
    with jax.default_matmul_precision("highest"):
        try:
            hash(apply_fn)
        except TypeError:
            run = _sketcher.__wrapped__
        else:
            run = _sketcher
        sketch = run(apply_fn, treedef, mask, dim, kind)
        sizes = tuple((i, leaf.size) for i, leaf in enumerate(leaves) if mask[i])
        draws = _draws(key, sizes, dim) if kind == "countsketch" else {}
        if devices is not None:
            return sharded_sketch(sketch, devices, leaves, x, draws, key, size)
        parts = [
            sketch(leaves, take(x, slice(low, low + size)), draws, key) for low in range(0, n, size)
        ]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


@functools.lru_cache(maxsize=64)
def _sketcher(
    apply_fn: ApplyFn, treedef: Any, mask: tuple[bool, ...], dim: int, kind: str
) -> Callable[..., Array]:
    quick_fn = quick(apply_fn)

    def row(leaves: list[Array], draws: Projections, key: Array, sample: Any) -> Array:
        chosen = {i: leaf for i, leaf in enumerate(leaves) if mask[i]}

        def network(chosen: dict[int, Array]) -> Array:
            mixed = [chosen.get(i, leaf) for i, leaf in enumerate(leaves)]
            batch = jax.tree.map(lambda a: a[None], sample)
            return quick_fn(jax.tree.unflatten(treedef, mixed), batch)[0]

        def project(leaf: int, rows: Array) -> Array:
            rows = rows.reshape(rows.shape[0], -1)
            if kind == "countsketch":
                return _countsketch(rows, *draws[leaf])
            return _dense_sketch(rows, jax.random.fold_in(key, leaf), dim, kind=kind)

        gradients = jax.jacrev(network)(chosen)  # each (C, ...)
        return functools.reduce(jnp.add, [project(i, gradients[i]) for i in chosen])

    @jit
    def sketch(leaves: list[Array], x: Any, draws: Projections, key: Array) -> Array:
        return jax.vmap(lambda sample: row(leaves, draws, key, sample))(x)

    return sketch


@functools.partial(jit, static_argnames=("sizes", "dim"))
def _draws(key: Array, sizes: tuple[tuple[int, int], ...], dim: int) -> Projections:
    """By leaf, of its number and size: signs (blocks, dim) of coordinates, shifts (blocks,)."""

    def draw(key: Array) -> tuple[Array, Array]:
        sign_key, shift_key = jax.random.split(key)
        signs = jax.random.rademacher(sign_key, (1, dim), "int8")[0]
        return signs, jax.random.randint(shift_key, (), 0, dim)

    def of(leaf: int, size: int) -> tuple[Array, Array]:
        own = jax.random.fold_in(key, leaf)
        keys = jax.vmap(lambda index: jax.random.fold_in(own, index))(jnp.arange(-(-size // dim)))
        return jax.vmap(draw)(keys)

    return {leaf: of(leaf, size) for leaf, size in sizes}


def _countsketch(rows: Array, signs: Array, shifts: Array) -> Array:
    """Signs for coordinates, a roll for each block of `dim`, and the sum of the blocks."""
    many, size = rows.shape
    blocks, dim = signs.shape
    padded = jnp.pad(rows, ((0, 0), (0, blocks * dim - size)))

    def add(index: Array, total: Array) -> Array:
        block = jax.lax.dynamic_slice_in_dim(padded, index * dim, dim, axis=1)
        block = block * signs[index][None].astype(rows.dtype)
        start = dim - shifts[index]  # of two turns, which are laid over each other at the end
        there = jax.lax.dynamic_slice_in_dim(total, start, dim, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(total, there + block, start, axis=1)

    turns = jax.lax.fori_loop(0, blocks, add, jnp.zeros((many, 2 * dim), rows.dtype))
    return turns[:, :dim] + turns[:, dim:]


def _dense_sketch(rows: Array, key: Array, dim: int, *, kind: str) -> Array:
    """A dense random matrix, drawn for a block of coordinates at a time."""
    classes, size = rows.shape
    width = min(_DENSE_BLOCK, size)
    blocks = -(-size // width)
    padded = jnp.pad(rows, ((0, 0), (0, blocks * width - size)))

    def add(index: Array, total: Array) -> Array:
        matrix = _draw(jax.random.fold_in(key, index), (width, dim), kind, rows.dtype)
        return total + jax.lax.dynamic_slice_in_dim(padded, index * width, width, 1) @ matrix

    total = jax.lax.fori_loop(0, blocks, add, jnp.zeros((classes, dim), rows.dtype))
    return total / jnp.sqrt(jnp.asarray(dim, rows.dtype))


def _draw(key: Array, shape: tuple[int, int], kind: str, dtype: Any) -> Array:
    """Independent entries of mean 0 and variance 1."""
    if kind == "gaussian":
        return jax.random.normal(key, shape, dtype)
    if kind == "rademacher":
        return jax.random.rademacher(key, shape, dtype)
    face = jax.random.randint(key, shape, 0, 6)
    value = (face == 0).astype(dtype) - (face == 1).astype(dtype)
    return value * jnp.sqrt(jnp.asarray(3.0, dtype))


def sketch_error(sketch: Array) -> Array:
    """Expected relative Frobenius error of the sketched kernel, from the sketch alone.

        E‖Θ̂ − Θ‖²_F ≈ ((tr Θ)² + ‖Θ‖²_F) / k

    so the error falls as 1/√k; the traces come from Θ̂ itself, whose squared norm is corrected for
    the noise it contains. It is an upper bound up to sampling noise (the terms that CountSketch and
    Rademacher spare are left in), and close when there are many parameters.

    Args:
        sketch: from `sketch_jacobian`, (N, C, dim).

    Returns:
        A scalar; 0.05 means five per cent. Of a kernel of zeros it is 0.
    """
    sketch = check_finite_value("sketch", check_array("sketch", sketch, floating=True))
    if sketch.ndim < 2 or sketch.size == 0:
        raise ValueError(f"sketch must be (N, C, dim), not empty; got shape {sketch.shape}.")
    rows = sketch.reshape(-1, sketch.shape[-1])
    size = jnp.max(jnp.abs(rows))  # the fourth power of an entry may not be a number
    rows = rows / jnp.where(size > 0, size, jnp.ones((), rows.dtype))
    dim = jnp.asarray(sketch.shape[-1], rows.dtype)
    trace = jnp.sum(rows**2)
    gram = rows @ rows.T if rows.shape[0] <= rows.shape[1] else rows.T @ rows
    squared = jnp.sum(gram**2)
    clean = jnp.maximum((squared - trace**2 / dim) / (1 + 1 / dim), squared / (dim + 1))
    known = jnp.where(clean > 0, clean, jnp.ones((), rows.dtype))
    return jnp.sqrt(jnp.where(clean > 0, (trace**2 + clean) / dim / known, clean))


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
    _check_rows(apply_fn, params, x)
    mask = select_leaves(params, trainable)
    n = count(x)
    classes = jax.eval_shape(apply_fn, params, x).shape[-1]
    tree = jax.tree.unflatten(jax.tree.structure(params), mask)
    kernel = signed_kernel(
        apply_fn, params, x, key=key, trainable=tree, batch_size=batch_size, max_bytes=max_bytes
    )
    assert isinstance(kernel, jax.Array)  # without a mesh
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
) -> Float[Array, "n m"] | RowSharded:
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
    outputs = jax.eval_shape(apply_fn, params, x)
    classes = outputs.shape[-1]
    signs: Array | np.ndarray = np.full((classes, 1), classes**-0.5, outputs.dtype)
    if key is not None:
        signs = jax.random.rademacher(key, (classes, 1), outputs.dtype)
        signs = signs / jnp.sqrt(jnp.asarray(classes, outputs.dtype))
    try:
        signed = _signed(apply_fn)
    except TypeError:
        signed = _signed.__wrapped__(apply_fn)
    mask = jax.tree.unflatten(jax.tree.structure(params), select_leaves(params, trainable))
    return signed, (params, signs), (mask, False)


@functools.lru_cache(maxsize=64)
def _signed(apply_fn: ApplyFn) -> ApplyFn:
    def signed(pair: Any, x: Any) -> Array:
        params, signs = pair
        return apply_fn(params, x) @ signs

    return signed


__all__ = ["ClassSketch", "class_sketch", "sketch_error", "sketch_jacobian"]
