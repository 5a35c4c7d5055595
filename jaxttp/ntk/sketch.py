"""Random projections: of the Jacobian's columns (`sketch_jacobian`), of classes (`class_sketch`).

J R with E[R Rᵀ] = I has E[(J R)(J R)ᵀ] = Θ. CountSketch multiplies each coordinate by a random sign
and adds it to one of `dim` buckets (see `_countsketch`). With x, y two rows of J, and sums over
pairs of coordinates that may collide (those of one block of `dim` never do),

    E|Θ̂_xy − Θ_xy|² = (‖x‖²‖y‖² + ⟨x,y⟩² − 2 Σ x_a² y_a²) / dim     (all pairs; an upper bound)

Achlioptas' dense matrix is drawn block by block and thrown away. All randomness is derived from the
key, the leaf and the block of coordinates, never from the batch.

A class sketch is the kernel of one signed sum of the outputs: one backward pass a sample in place
of C.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.checks import check_choice, check_finite, check_integer, check_key
from jaxttp._core.compile import jit
from jaxttp._core.results import RESULT
from jaxttp._core.traced import Network, network_of
from jaxttp._core.types import ApplyFn, Params, count, select_leaves, take
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.adapters.outputs import check_gradients, check_per_sample
from jaxttp.ntk._countsketch import FACTORS, Projections, SketchLayers, countsketch_rows
from jaxttp.ntk._plan import Workload
from jaxttp.ntk._program import NetworkProgram
from jaxttp.ntk._sites import find_sites
from jaxttp.ntk.gram import Job, kernel_of
from jaxttp.ntk.layerwise import Features, Layers
from jaxttp.ntk.sharded import several, sharded_sketch

_KINDS = ("countsketch", "achlioptas")
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

    The last term is absent for "achlioptas", whose entries have kurtosis 3 (in general it is
    kurtosis − 3). The projection is the same whatever the batch size, so sketches of two data sets
    with one key give their cross kernel.

    Args:
        apply_fn: ``(params, x (N, ...)) -> outputs (N, C)``; row i depends on row i of x alone.
        params: pytree of arrays.
        x: inputs (N, ...), an array or a pytree of arrays with N rows each.
        key: a JAX random key.
        dim: width of the sketch, k.
        kind: "countsketch", or "achlioptas" for a dense matrix (√3 {-1, 0, +1} with probabilities
            1/6, 2/3, 1/6), as in the literature.
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
    check_key(key, optional=False)
    x = _checked_samples(apply_fn, params, x)
    sketch = sketch_of(
        apply_fn, params, x, key=key, dim=dim, kind=kind, trainable=trainable,
        batch_size=batch_size, mesh=mesh,
    )  # fmt: skip
    check_gradients(apply_fn, params, x, sketch, trainable=select_leaves(params, trainable))
    return sketch


def _checked_samples(apply_fn: ApplyFn, params: Params, x: Any) -> Any:
    """Samples, one at least, finite as the parameters; outputs (N, C), each of its own sample."""
    check_network(apply_fn, params)
    x = check_samples("x", x)
    for name, value in (("params", params), ("x", x)):
        check_finite(name, value)
    if count(x) == 0:
        raise ValueError("x must hold at least one sample; it is empty.")
    check_per_sample(apply_fn, params, x)
    return x


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
    diagonal: Params | None = None,
) -> Array:
    """`sketch_jacobian` of a network whose outputs are known to be of one sample each.

    With a diagonal q, shaped like the parameters, it is that of J diag(q)^(1/2).
    """
    devices = several(mesh)
    check_choice("kind", kind, _KINDS)
    dim = check_integer("dim", dim, at_least=1)
    x = check_samples("x", x)
    job = Job.of(apply_fn, params, x, trainable=trainable)
    work, leaves = job.work, [jnp.asarray(leaf) for leaf in job.leaves]
    sketcher = Sketcher(work.program, work.trainable, dim, kind, diagonal is not None)
    if batch_size is None:
        width = max(leaf.dtype.itemsize for leaf in leaves)
        batch_size = max(1, _BYTES // (width * sketcher.working_size(work)))
    size = min(check_integer("batch_size", batch_size, at_least=1), count(x))
    draws: Any = sketcher.draw(key)
    if diagonal is not None:
        constants = leaves[len(work.trainable) :]
        diagonal = [*jax.tree.leaves(diagonal), *constants]
        draws[FACTORS] = _factors(sketcher, diagonal, jax.tree.leaves(take(x, slice(1))))
    with jax.default_matmul_precision("highest"):
        if devices is not None:
            return sharded_sketch(sketcher, devices, leaves, x, draws, size)
        n = count(x)
        chunk = -(-n // -(-n // size))
        parts = []
        for low in range(0, n, chunk):  # the last chunk overlaps, so that all shapes are equal
            start = min(low, n - chunk)
            rows = sketcher(leaves, take(x, slice(start, start + chunk)), draws)
            parts.append(rows[low - start :])
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


@dataclasses.dataclass(frozen=True)
class Sketcher:
    """(leaves, x (B, ...), draws) -> rows (B, C, dim); equal for networks of the same equations.

    Attributes:
        program: the network.
        mask: which leaves train.
        dim: width of the sketch.
        kind: "countsketch" or "achlioptas".
        is_scaled: whether the entries of gradients are multiplied by those of a diagonal.
    """

    program: NetworkProgram
    mask: tuple[bool, ...]
    dim: int
    kind: str
    is_scaled: bool = False

    @property
    def layers(self) -> SketchLayers:
        """How each leaf enters a CountSketch."""
        sites = find_sites(self.program, self.mask)
        return SketchLayers.of(self.program, sites, self.mask, self.dim, is_scaled=self.is_scaled)

    def working_size(self, work: Workload) -> int:
        """Numbers held at a time for a sample."""
        dense = self.kind == "achlioptas"
        return 2 * work.classes * work.size if dense else self.layers.working_size

    def draw(self, key: Array) -> Projections | Array:
        """The draws that all samples share; the key of a dense matrix, which is drawn in use."""
        return key if self.kind == "achlioptas" else self.layers.draw(key)

    def __call__(self, leaves: list[Array], x: Any, draws: Any) -> Array:
        """The rows of some samples.

        The network is one compiled function and every shape of a layer another, so that a deep
        network compiles as fast as one block.
        """
        factors = draws.get(FACTORS, {}) if isinstance(draws, dict) else {}
        features = _features(self, leaves, x, factors)
        if self.kind == "achlioptas":
            return _achlioptas_rows(features.gradients, draws, dim=self.dim)
        return countsketch_rows(features, draws, self.dim)


@functools.partial(jit, static_argnums=0)
def _factors(sketcher: Sketcher, diagonal: list[Array], x: list[Array]) -> dict[int, Array]:
    is_trained = itertools.chain(sketcher.mask, itertools.repeat(False))
    roots = [jnp.sqrt(q) if one else q for q, one in zip(diagonal, is_trained, strict=False)]
    return sketcher.layers.layers.factors(roots, x)


@functools.partial(jit, static_argnums=0)
def _features(
    sketcher: Sketcher, leaves: list[Array], x: Any, factors: dict[int, Array]
) -> Features:
    if sketcher.kind == "achlioptas":
        direct = tuple(leaf for leaf, is_trained in enumerate(sketcher.mask) if is_trained)
        layers = Layers(sketcher.program, (), (), direct)
    else:
        layers = sketcher.layers.layers
    return layers.features(leaves, jax.tree.leaves(x), factors)


@functools.partial(jit, static_argnames=("dim", "block"))
def _achlioptas_rows(
    gradients: dict[str, Array], key: Array, *, dim: int, block: int = 1024
) -> Array:
    """J R with R of entries √3 {-1, 0, +1} / √dim, of which `block` rows are drawn at a time."""

    def draw(key: Array, dtype: Any) -> Array:
        face = jax.random.randint(key, (block, dim), 0, 6)
        sign = (face == 0).astype(dtype) - (face == 1).astype(dtype)
        return sign * jnp.asarray((3.0 / dim) ** 0.5, dtype)

    def project(rows: Array, key: Array) -> Array:
        blocks = -(-rows.shape[-1] // block)
        padded = jnp.pad(rows, ((0, 0), (0, 0), (0, blocks * block - rows.shape[-1])))

        def add(index: Array, total: Array) -> Array:
            some = jax.lax.dynamic_slice_in_dim(padded, index * block, block, 2)
            return total + some @ draw(jax.random.fold_in(key, index), rows.dtype)

        return jax.lax.fori_loop(0, blocks, add, jnp.zeros((*rows.shape[:2], dim), rows.dtype))

    parts = [project(rows, jax.random.fold_in(key, i)) for i, rows in enumerate(gradients.values())]
    return functools.reduce(jnp.add, parts)


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
    check_key(key, optional=False)
    x = _checked_samples(apply_fn, params, x)
    mask = select_leaves(params, trainable)
    n = count(x)
    classes = jax.eval_shape(lambda *args: apply_fn(*args), params, x).shape[-1]
    tree = jax.tree.unflatten(jax.tree.structure(params), mask)
    kernel = signed_kernel(
        apply_fn, params, x, key=key, trainable=tree, batch_size=batch_size, max_bytes=max_bytes
    )
    check_gradients(apply_fn, params, x, kernel, trainable=mask)
    few = min(check, n)
    block = take(x, slice(few))
    exact = kernel_of(apply_fn, params, block, trainable=tree, max_bytes=max_bytes)

    size = jnp.max(jnp.abs(exact))  # squares of entries may overflow
    size = jnp.where(size > 0, size, jnp.ones((), exact.dtype))
    whole = jnp.linalg.norm((exact / size).ravel())
    whole = jnp.where(whole > 0, whole, jnp.ones((), exact.dtype))  # the error for zeros is 0

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
    outputs = jax.eval_shape(lambda *args: apply_fn(*args), params, x)
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
