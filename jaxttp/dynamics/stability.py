"""The largest learning rate at which the linearised network does not diverge."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_number, is_concrete
from jaxttp._core.compile import jit
from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.dynamics._kernels import apply_kernel, check_problem, flatten_kernel
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel, KernelLike
from jaxttp.ntk.lanczos import lanczos
from jaxttp.ntk.sharded import on_many_devices

LANCZOS_STEPS = 64
OPERATOR_STEPS = 31
"""Of an iteration whose every product goes through the network; with its start they are 32."""
DENSE = 256
"""Outputs of a kernel whose eigenvectors are all computed, at most."""
MODES = 32
"""Stiffest modes of the curvature: so many can be tried and damped at once."""


def largest_curvature(
    kernel: KernelLike, f0: ArrayLike, y: Any, *, loss: str | Loss
) -> Float[Array, ""]:
    """The largest eigenvalue of (1/N) H^(1/2) Theta H^(1/2), H the loss's Hessian in f at f0.

    It is the largest eigenvalue of the generalised Gauss-Newton matrix of the mean loss.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C.
        f0: outputs (N, C).
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`, convex in the outputs.

    Returns:
        A scalar, for more than 256 outputs by Lanczos iteration with full re-orthogonalisation (64
        products at most), so from below and accurate to rounding for a decaying spectrum.

    Raises:
        ValueError: bad shapes or labels.

    Example:
        >>> import jax.numpy as jnp
        >>> kernel = jnp.diag(jnp.array([3.0, 1.0])).reshape(2, 1, 2, 1)
        >>> curvature = largest_curvature(kernel, jnp.zeros((2, 1)), jnp.ones((2, 1)),
        ...                               loss="squared_error")
        >>> round(float(curvature), 4)
        1.5
    """
    kernel, f0, targets, loss, _, _ = check_problem(kernel, f0, y, loss)
    return _largest_curvature(kernel, f0, targets, loss)


def _largest_curvature(kernel: Kernel, f0: Array, targets: Array, loss: Loss) -> Array:
    if f0.size <= DENSE:  # a program that is compiled in a third of the time
        return _largest_dense(kernel, f0, targets, loss)
    if isinstance(kernel, Array) and kernel.ndim == 2 and not on_many_devices(kernel):
        return _largest_repeated(kernel, f0, targets, loss)
    return curvature_modes(kernel, f0, targets, loss)[0][0]


@functools.partial(jit, static_argnums=3)
def _largest_dense(kernel: Kernel, f0: Array, targets: Array, loss: Loss) -> Array:
    root = _hessian_root(f0, targets, loss)
    values = decompose(jnp.linalg.eigvalsh, _rooted_kernel(kernel, root))
    return jnp.maximum(values[-1], 0.0)


@functools.partial(jit, static_argnums=3)
def _largest_repeated(kernel: Array, f0: Array, targets: Array, loss: Loss) -> Array:
    """Of K ⊗ I_C: with K = R R^T it is that of (1/N) R^T H R, for which no H is formed."""
    (n, c), (values, vectors) = f0.shape, decompose(jnp.linalg.eigh, kernel)
    root = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[None]

    def product(flat: Array) -> Array:
        moved = jnp.dot(root, flat.reshape(n, c), precision="highest")
        pushed = loss.hessian_vector_product(f0, targets, moved)
        return jnp.dot(root.T, pushed, precision="highest").reshape(-1) / n

    start = jax.random.normal(jax.random.key(0), (n * c,), f0.dtype)
    found = lanczos(product, product(start), LANCZOS_STEPS)
    return jnp.max(jnp.where(found.known, found.values, 0.0))


@functools.partial(jit, static_argnums=3)
def curvature_modes(
    kernel: Kernel, f: Array, targets: Array, loss: Loss
) -> tuple[Float[Array, " k"], Float[Array, "nc k"], Float[Array, "nc k"]]:
    """The largest eigenvalues of (1/N) H^(1/2) Theta H^(1/2), H^(1/2) u of their eigenvectors, u.

    The eigenvalues fall; arguments as validated by `check_problem`. There are `MODES`, or N C where
    that is less.
    """
    values, *vectors = _modes(kernel, f, targets, loss)
    left, u = (found[:, ::-1][:, :MODES] for found in vectors)
    return jnp.maximum(values[::-1][:MODES], 0.0), left, u


@functools.partial(jit, static_argnums=3)
def curvature_basis(
    kernel: Kernel, f: Array, targets: Array, loss: Loss
) -> tuple[Float[Array, " r"], Float[Array, "nc r"]]:
    """Eigenvalues and orthonormal eigenvectors of (1/N) H^(1/2) Theta H^(1/2).

    All of them where N C is at most `DENSE`, else the Ritz pairs of the Lanczos iteration.
    """
    root = _hessian_root(f, targets, loss)
    if f.size > DENSE:
        return _ritz(functools.partial(apply_kernel, kernel), root)
    return tuple(decompose(jnp.linalg.eigh, _rooted_kernel(kernel, root)))


def _rooted_kernel(kernel: Kernel, root: Float[Array, "n c c"]) -> Float[Array, "nc nc"]:
    """(1/N) H^(1/2) Theta H^(1/2)."""
    n, c, _ = root.shape
    matrix = flatten_kernel(kernel, c)
    half = jnp.einsum("nab,nbp->nap", root, matrix.reshape(n, c, n * c), precision="highest")
    whole = jnp.einsum("pnb,nba->pna", half.reshape(n * c, n, c), root, precision="highest")
    return whole.reshape(n * c, n * c) / n


@functools.partial(jit, static_argnums=3)
def _modes(kernel: Kernel, f: Array, targets: Array, loss: Loss) -> tuple[Array, Array, Array]:
    """Eigenvalues, the largest last, H^(1/2) times their vectors, these.

    Of more than `DENSE` outputs those of Lanczos' iteration; 0 where it found none.
    """
    root = _hessian_root(f, targets, loss)
    if f.size <= DENSE:  # a program that is compiled in a third of the time
        values, vectors = decompose(jnp.linalg.eigh, _rooted_kernel(kernel, root))
    else:
        values, vectors = _ritz(functools.partial(apply_kernel, kernel), root)
    n, c = f.shape
    each = jnp.einsum("nab,nbk->nak", root, vectors.reshape(n, c, -1), precision="highest")
    return values, each.reshape(n * c, -1), vectors


def _hessian_root(f: Array, targets: Array, loss: Loss) -> Float[Array, "n c c"]:
    """H^(1/2) of every sample; of a loss over tokens block by block."""
    hessian = loss.hessian(f, targets)
    if not loss.tokens:
        return _roots(hessian)
    (n, c), t = f.shape, loss.tokens
    blocks = jnp.einsum("ntatb->ntab", hessian.reshape(n, t, c // t, t, c // t))
    roots = jax.vmap(_roots)(blocks)
    apart = jnp.eye(t, dtype=f.dtype)
    return jnp.einsum("ntab,ts->ntasb", roots, apart, precision="highest").reshape(n, c, c)


def _roots(blocks: Float[Array, "n c c"]) -> Float[Array, "n c c"]:
    values, vectors = decompose(jnp.linalg.eigh, blocks)
    scaled = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[:, None, :]
    return jnp.einsum("nab,ncb->nac", scaled, vectors, precision="highest")


@functools.partial(jit, static_argnums=3)
def operator_curvature(operator: Any, f: Array, targets: Array, loss: Loss) -> Float[Array, ""]:
    """`largest_curvature` by 32 products with Theta, which is not formed: from below.

    Args:
        operator: Theta, such as `jaxttp.ntk.ntk_operator` gives; ``.mv(v)`` for v (N, C).
        f: outputs (N, C).
        targets: encoded.
        loss: the loss.
    """
    values, _ = _ritz(operator.mv, _hessian_root(f, targets, loss), OPERATOR_STEPS)
    return jnp.maximum(values[-1], 0.0)


def _ritz(
    times: Callable[[Array], Array], root: Float[Array, "n c c"], steps: int = LANCZOS_STEPS
) -> tuple[Array, Array]:
    """Ritz values, increasing, and their vectors, by products with Theta; 0 for what is not found.

    Args:
        times: v (N, C) -> Theta v.
        root: H^(1/2) of every sample.
        steps: products at most.
    """
    n, c, _ = root.shape

    def rooted(flat: Array) -> Array:
        return jnp.einsum("nab,nb->na", root, flat.reshape(n, c), precision="highest")

    def product(flat: Array) -> Array:
        return rooted(times(rooted(flat))).reshape(-1) / n

    start = jax.random.normal(jax.random.key(0), (n * c,), root.dtype)
    # A start inside the range of H^(1/2): outside it the iteration would only meet zeros.
    found = lanczos(product, product(start), min(steps, n * c))
    return jnp.where(found.known, found.values, 0.0), found.vectors()


def max_learning_rate(
    kernel: KernelLike,
    f0: ArrayLike,
    y: Any,
    *,
    loss: str | Loss,
    momentum: Any = 0.0,
    nesterov: bool = False,
) -> Float[Array, ""]:
    """The learning rate beyond which the linearised network diverges, with H taken at f0.

    2/lambda for gradient descent, 2(1 + m)/lambda for heavy-ball momentum m and
    2(1 + m)/((1 + 2m) lambda) for Nesterov's, lambda the `largest_curvature`. Cross-entropy
    flattens or sharpens along the way, so for it this is the limit at the start of training.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C.
        f0: outputs before training (N, C).
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.
        momentum: m in [0, 1).
        nesterov: whether the momentum is Nesterov's.

    Returns:
        A finite positive scalar; the largest float where the curvature is zero.

    Raises:
        ValueError: bad shapes or labels, momentum outside [0, 1).

    Example:
        >>> import jax.numpy as jnp
        >>> kernel = jnp.full((1, 1, 1, 1), 4.0)
        >>> float(max_learning_rate(kernel, jnp.zeros((1, 1)), jnp.ones((1, 1)),
        ...                         loss="squared_error"))
        0.5

    Source:
        Standard; the generalisation to (1/N) H^(1/2) Theta H^(1/2) is derived.
    """
    check_number("momentum", momentum, at_least=0.0, below=1.0)
    kernel, f0, targets, loss, _, _ = check_problem(kernel, f0, y, loss)
    return rate_limit(_largest_curvature(kernel, f0, targets, loss), momentum, nesterov)


def rate_limit(curvature: Array, momentum: Any, nesterov: bool = False) -> Array:
    """The limit of `max_learning_rate` by the largest of some eigenvalues."""
    if is_concrete(curvature) and is_concrete(momentum):  # no program for it
        return jax.device_put(_limit(np, np.asarray(curvature), np.asarray(momentum), nesterov))
    return _limit(jnp, curvature, momentum, nesterov)


def _limit(xp: Any, curvature: Any, momentum: Any, nesterov: bool) -> Any:
    """The same in NumPy or in JAX."""
    curvature = xp.max(curvature)
    factor = 2.0 * (1.0 + momentum) / (1.0 + 2.0 * momentum if nesterov else 1.0)
    huge = xp.finfo(curvature.dtype).max
    safe = xp.where(curvature > 0, curvature, 1.0)
    limit = xp.where(curvature > 0, xp.minimum(factor / safe, huge), huge)
    return limit.astype(curvature.dtype)
