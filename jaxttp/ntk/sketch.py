"""Random projections of the Jacobian, J R with E[R Rᵀ] = I, so that E[(J R)(J R)ᵀ] = Θ.

CountSketch (the default) multiplies each coordinate by a random sign and adds it to one of `dim`
buckets; how, `_countsketch` says, and `_countsketch` that most layers' gradients are never kept.
With x, y two rows of J, and sums over pairs of coordinates that may collide (those of one block of
`dim` never do),

    E|Θ̂_xy − Θ_xy|² = (‖x‖²‖y‖² + ⟨x,y⟩² − 2 Σ x_a² y_a²) / dim     (all pairs; an upper bound)

Dense kinds multiply by a matrix that is drawn block by block and thrown away. All randomness is
derived from the key, the leaf and the block of coordinates, never from the batch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._core.checks import (
    check_array,
    check_choice,
    check_finite,
    check_finite_value,
    check_integer,
    check_key,
)
from jaxttp._core.compile import full_precision, jit
from jaxttp._core.types import ApplyFn, Params, count, take
from jaxttp.adapters.gradients import check_gradients
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.adapters.outputs import check_per_sample
from jaxttp.ntk._countsketch import LayeredSketcher, Projections, SketchLayers
from jaxttp.ntk._program import NetworkProgram
from jaxttp.ntk._select import select_leaves
from jaxttp.ntk.gram import job_of
from jaxttp.ntk.sharded import several, sharded_sketch

_KINDS = ("countsketch", "rademacher", "gaussian", "achlioptas")
_BYTES = 256 << 20  # of the work on the samples differentiated at a time


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
        mesh: a `jax.sharding.Mesh` over whose devices the rows of the sketch are sharded;
            None for one device. `batch_size` is then of each.

    Returns:
        The sketch (N, C, dim).

    Raises:
        ValueError: an unknown kind, `dim` or `batch_size` below one, nothing trainable, or
            gradients that are not finite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w, x = jnp.ones((50, 2)), jnp.ones((3, 50))
        >>> sketch_jacobian(lambda w, x: x @ w, w, x, key=jax.random.key(0), dim=8).shape
        (3, 2, 8)

    Source:
        Charikar, Chen, Farach-Colton 2002 (CountSketch); Pham and Pagh 2013 (of products);
        Achlioptas 2003.
    """
    check_network(apply_fn, params)
    check_key(key, optional=False)
    x = check_samples("x", x)
    check_rows(apply_fn, params, x)
    sketch = sketch_of(
        apply_fn, params, x, key=key, dim=dim, kind=kind, trainable=trainable,
        batch_size=batch_size, mesh=mesh,
    )  # fmt: skip
    check_gradients(apply_fn, params, x, sketch, trainable=select_leaves(params, trainable))
    return sketch


def check_rows(apply_fn: ApplyFn, params: Params, x: Any) -> None:
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
    devices = several(mesh)
    x = check_samples("x", x)
    work = Projection.of(apply_fn, params, x, key, dim, kind, trainable, batch_size)
    with jax.default_matmul_precision("highest"):
        if devices is not None:
            return sharded_sketch(
                work.program, devices, work.leaves, x, work.draws, work.batch_size
            )
        return work.all_rows(x)


class Projection(NamedTuple):
    """How the rows of a sketch are made.

    Attributes:
        program: (leaves, x (B, ...), draws) -> rows (B, C, k).
        leaves: parameters, then what the network closes over.
        draws: of a CountSketch, what all samples share; of dense kinds, which draw a matrix where
            it is used, the key.
        batch_size: samples at a time.
    """

    program: Callable[..., Array]
    leaves: list[Array]
    draws: Projections | Array
    batch_size: int

    @classmethod
    def of(
        cls, apply_fn: ApplyFn, params: Params, x: Any, key: Array, dim: int, kind: str,
        trainable: Any, batch_size: int | None,
    ) -> "Projection":  # fmt: skip
        """That of a network, with the arguments of `sketch_jacobian`."""
        check_choice("kind", kind, _KINDS)
        dim = check_integer("dim", dim, at_least=1)
        check_network(apply_fn, params)
        job = job_of(apply_fn, params, x, trainable)
        work, leaves = job.work, [jnp.asarray(leaf) for leaf in job.leaves]
        mask, itemsize = work.trainable, max(leaf.dtype.itemsize for leaf in leaves)
        if kind == "countsketch":
            layers = SketchLayers.of(work.program, work.sites, mask, dim)
            numbers = layers.numbers
            program = LayeredSketcher(work.program, mask, dim)
            draws = layers.draw(key)
        else:
            numbers = 2 * work.classes * work.size
            program, draws = _DenseSketcher(work.program, mask, dim, kind), key
        size = numbers * itemsize
        if batch_size is None:
            batch_size = max(1, _BYTES // max(1, size))
        batch_size = min(check_integer("batch_size", batch_size, at_least=1), count(x))
        return cls(program, leaves, draws, batch_size)

    def all_rows(self, x: Any) -> Array:
        """Of all samples, some at a time; the last ones once more, so that all calls are alike."""
        n = count(x)
        each = -(-n // -(-n // min(n, self.batch_size)))
        parts = []
        for low in range(0, n, each):
            start = min(low, n - each)
            parts.append(self.rows(take(x, slice(start, start + each)))[low - start :])
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

    def rows(self, x: Any) -> Array:
        """Of some samples (B, ...), the sketch (B, C, k)."""
        return self.program(self.leaves, x, self.draws)


@dataclasses.dataclass(frozen=True)
class _DenseSketcher:
    """(leaves, x (B, ...), key) -> rows (B, C, dim), by a dense random matrix."""

    program: NetworkProgram
    mask: tuple[bool, ...]
    dim: int
    kind: str

    def __call__(self, leaves: list[Array], x: Any, key: Array) -> Array:
        return _dense_rows(self, leaves, x, key)


@functools.partial(jit, static_argnums=0)
def _dense_rows(how: _DenseSketcher, leaves: list[Array], x: Any, key: Array) -> Array:
    chosen = {i: leaves[i] for i, wanted in enumerate(how.mask) if wanted}

    def row(*sample: Array) -> Array:
        def network(chosen: dict[int, Array]) -> Array:
            mixed = [chosen.get(i, leaf) for i, leaf in enumerate(leaves)]
            return how.program.run(mixed, sample, {}, {})[0]

        def project(leaf: int, rows: Array) -> Array:
            own = jax.random.fold_in(key, leaf)
            return _dense_sketch(rows.reshape(rows.shape[0], -1), own, how.dim, kind=how.kind)

        gradients = jax.jacrev(network)(chosen)  # each (C, ...)
        return functools.reduce(jnp.add, [project(i, gradients[i]) for i in chosen])

    return jax.vmap(row)(*jax.tree.leaves(x))


def _dense_sketch(rows: Array, key: Array, dim: int, *, kind: str, block: int = 1024) -> Array:
    """A dense random matrix, drawn for a block of coordinates at a time."""
    classes, size = rows.shape
    width = min(block, size)
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


@full_precision
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


__all__ = ["sketch_error", "sketch_jacobian"]
