"""The largest learning rate at which the linearised network does not diverge."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._checks import check_number
from jaxttp._threads import decompose
from jaxttp.dynamics._kernels import apply_kernel, check_problem, flatten_kernel
from jaxttp.losses import Loss
from jaxttp.ntk._lanczos import lanczos
from jaxttp.ntk.factored import Factored, Kernel

LANCZOS_STEPS = 64
DENSE = 256
"""Outputs of a kernel whose eigenvectors are all computed, at most."""


def largest_curvature(
    kernel: ArrayLike | Factored, f0: ArrayLike, y: Any, *, loss: str | Loss
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
    return jnp.maximum(_modes(kernel, f0, targets, loss)[0][-1], 0.0)


@functools.partial(jax.jit, static_argnums=3)
def _largest_dense(kernel: Kernel, f0: Array, targets: Array, loss: Loss) -> Array:
    values = decompose(jnp.linalg.eigvalsh, _dense(kernel, f0, targets, loss))
    return jnp.maximum(values[-1], 0.0)


def curvature_modes(
    kernel: Kernel, f: Array, targets: Array, loss: Loss, count: int
) -> tuple[Float[Array, " k"], Float[Array, "nc k"], Float[Array, "nc k"]]:
    """The largest eigenvalues of (1/N) H^(1/2) Theta H^(1/2), H^(1/2) u of their eigenvectors, u.

    The eigenvalues fall; arguments as validated by `check_problem`, with at most as many modes as
    the iteration has steps (64, or N C where that is less).
    """
    values, *vectors = _modes(kernel, f, targets, loss)
    left, u = (found[:, ::-1][:, :count] for found in vectors)
    return jnp.maximum(values[::-1][:count], 0.0), left, u


@functools.partial(jax.jit, static_argnums=3)
def curvature_basis(
    kernel: Kernel, f: Array, targets: Array, loss: Loss
) -> tuple[Float[Array, " r"], Float[Array, "nc r"]]:
    """Eigenvalues and orthonormal eigenvectors of (1/N) H^(1/2) Theta H^(1/2).

    All of them where N C is at most `DENSE`, else the Ritz pairs of the Lanczos iteration.
    """
    n, c = f.shape
    if n * c > DENSE:
        return _ritz(kernel, f, targets, loss)[:2]
    return tuple(decompose(jnp.linalg.eigh, _dense(kernel, f, targets, loss)))


def _dense(kernel: Kernel, f: Array, targets: Array, loss: Loss) -> Float[Array, "nc nc"]:
    """(1/N) H^(1/2) Theta H^(1/2)."""
    n, c = f.shape
    matrix, root = flatten_kernel(kernel, c), _hessian_root(f, targets, loss)
    half = jnp.einsum("nab,nbp->nap", root, matrix.reshape(n, c, n * c), precision="highest")
    whole = jnp.einsum("pnb,nba->pna", half.reshape(n * c, n, c), root, precision="highest")
    return whole.reshape(n * c, n * c) / n


@functools.partial(jax.jit, static_argnums=3)
def _modes(kernel: Kernel, f: Array, targets: Array, loss: Loss) -> tuple[Array, Array, Array]:
    """Ritz values, the largest last, H^(1/2) times their vectors, these; 0 where there are none."""
    values, vectors, rooted = _ritz(kernel, f, targets, loss)
    return values, jax.vmap(lambda u: rooted(u).reshape(-1), 1, 1)(vectors), vectors


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


def _ritz(
    kernel: Kernel, f: Array, targets: Array, loss: Loss
) -> tuple[Array, Array, Callable[[Array], Array]]:
    """Ritz values, increasing, their vectors, and the product with H^(1/2)."""
    n, c = f.shape
    root = _hessian_root(f, targets, loss)

    def rooted(flat: Array) -> Array:
        return jnp.einsum("nab,nb->na", root, flat.reshape(n, c), precision="highest")

    def product(flat: Array) -> Array:
        image = apply_kernel(kernel, rooted(flat))
        return rooted(image).reshape(-1) / n

    start = jax.random.normal(jax.random.key(0), (n * c,), f.dtype)
    # A start inside the range of H^(1/2): outside it the iteration would only meet zeros.
    found = lanczos(product, product(start), min(LANCZOS_STEPS, n * c))
    return jnp.where(found.known, found.values, 0.0), found.vectors(), rooted


def max_learning_rate(
    kernel: ArrayLike | Factored,
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
    return _limit(_largest_curvature(kernel, f0, targets, loss), momentum, nesterov)


@functools.partial(jax.jit, static_argnums=2)
def _limit(curvature: Array, momentum: Any, nesterov: bool) -> Array:
    factor = 2.0 * (1.0 + momentum) / (1.0 + 2.0 * momentum if nesterov else 1.0)
    huge = jnp.finfo(curvature.dtype).max
    safe = jnp.where(curvature > 0, curvature, 1.0)
    return jnp.where(curvature > 0, jnp.minimum(factor / safe, huge), huge)
