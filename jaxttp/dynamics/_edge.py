"""The edge of stability: which modes of a kernel a step of the optimiser would drive apart.

A full step is stable along an eigenvector of (1/N) H^(1/2) Theta H^(1/2) with eigenvalue s as long
as s is below the optimiser's edge, 2/eta for gradient descent and 2 (1 + m)/eta for momentum. A
network whose kernel grows beyond it does not diverge as its linearisation would: along these modes
it oscillates about a mean path, which is where it would be if their motion were damped. So the
forecast damps them, scaling the force on such a mode by what makes it stable.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxttp._core.compile import jit
from jaxttp.dynamics._kernels import apply_kernel
from jaxttp.dynamics.optimizers import Optimizer, keep_dtypes
from jaxttp.dynamics.stability import curvature_modes
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel

DAMPED = 0.5
"""A damped mode moves as one whose eigenvalue is this share of the edge."""
TRIAL = 64
"""Steps after which a mode that grows is called unstable."""
FAR = 1e6
"""Where a diverging trial is held."""
GRID = 129
"""Curvatures tried at once, twice over: the second time between two of the first."""
RANGE = (-9.0, 9.0)
"""Decimal logarithms of the curvatures between which the edge is looked for."""


class Damping(NamedTuple):
    """The map g - left (right^T g) on gradients (N C,), which scales the force on some modes.

    Attributes:
        left: (N C, k).
        right: (N C, k).
        largest: the largest eigenvalue as a share of the edge.
        values: the largest ones, falling (m,).
    """

    left: Float[Array, "nc k"]
    right: Float[Array, "nc k"]
    largest: Float[Array, ""]
    values: Float[Array, " m"]

    def __call__(self, gradient: Float[Array, " nc"]) -> Float[Array, " nc"]:
        """The gradient whose force on unstable modes is scaled down."""
        along = jnp.einsum("pk,p->k", self.right, gradient, precision="highest")
        return gradient - jnp.einsum("pk,k->p", self.left, along, precision="highest")


def damping(
    kernel: Kernel, f: Array, targets: Array, loss: Loss, edge: Array, near: float = 1.0
) -> Damping:
    """What keeps a step with this kernel stable at outputs f.

    The coordinate of a mode u is z = u^T H^(1/2) df, and the force on it u^T H^(1/2) Theta g. With
    left = H^(1/2) U and right = Theta H^(1/2) U D / s the force becomes (1 - D) times that.
    """
    values, left, _ = curvature_modes(kernel, f, targets, loss)
    return slow_down(kernel, values, left, edge, f.shape[1], near)


@functools.partial(jit, static_argnums=4)
def slow_down(
    kernel: Kernel, values: Array, left: Array, edge: Array, c: int, near: Any = 1.0
) -> Damping:
    """The damping of the modes of `curvature_modes` beyond the edge, or a share `near` of it."""
    n = left.shape[0] // c
    beyond = values > near * edge
    share = jnp.where(beyond, 1.0 - DAMPED * edge / jnp.where(beyond, values, 1.0), 0.0)
    image = apply_kernel(kernel, left.T.reshape(-1, n, c)).reshape(-1, n * c).T / n
    right = image * (share / jnp.where(beyond, values, 1.0))[None]
    return Damping(left, right, values[0] / edge, values)


@functools.partial(jit, static_argnames=("shares", "dtype"))
def find_edge(
    optimizer: Optimizer, shares: tuple[float, ...], state: optax.OptState, dtype: Any
) -> Float[Array, ""]:
    """`edge_of`, compiled."""
    return edge_of(optimizer, shares, state, dtype)


def edge_of(
    optimizer: Optimizer, shares: tuple[float, ...], state: optax.OptState, dtype: Any
) -> Float[Array, ""]:
    """The curvature beyond which an optimiser in this state is unstable.

    It is found by running the optimiser on quadratics of many curvatures, from that state on but
    at rest, so that momentum, schedules and weight decay count. (For filters that begin to grow by
    changing sign it is 2 / |sum_s (-1)^s k_s| of the impulse response k. Not all do: a gradient
    that comes one step late grows by turning, from 1 on, where that formula says 2.)

    Args:
        optimizer: see `same_program`.
        shares: of `start_shares`.
        state: the optimiser's state; what it has accumulated does not count.
        dtype: of the result.
    """

    def is_unstable(curvatures: Array) -> Array:
        weights = jnp.ones_like(curvatures)
        # As if training began at these weights: copies of them that a state holds count as well.
        begun = iter(shares)
        rest = optax.tree_utils.tree_map_params(
            optimizer, lambda leaf: (next(begun) * weights).astype(leaf.dtype), state
        )

        def step(carry: tuple, _: None) -> tuple[tuple, Array]:
            weights, state = carry
            updates, after = optimizer.update(curvatures * weights, state, weights)
            state = keep_dtypes(after, state)
            new = jnp.clip(jnp.asarray(optax.apply_updates(weights, updates)), -FAR, FAR)
            return (new, state), jnp.abs(new)

        _, sizes = jax.lax.scan(step, (weights, rest), length=TRIAL)
        early, late = growth(sizes)
        # A slow swing that only begins also grows, but never beyond where it was let go.
        return ((late > early) & (late > 1.0)) | (late >= FAR)

    def narrow(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        grid = jnp.linspace(*bounds, GRID, dtype=dtype)
        unstable = is_unstable(10.0**grid)
        first = jnp.where(jnp.any(unstable), jnp.argmax(unstable), GRID - 1)
        return grid[jnp.maximum(first - 1, 0)], grid[first]

    bounds = jnp.asarray(RANGE[0], dtype), jnp.asarray(RANGE[1], dtype)
    return 10.0 ** jax.lax.fori_loop(0, 2, narrow, bounds)[0]


def growth(sizes: Array) -> tuple[Array, Array]:
    """The largest sizes (TRIAL, ...) of the second quarter of a trial, and of its last."""
    early, late = sizes[TRIAL // 4 : TRIAL // 2], sizes[-TRIAL // 4 :]
    return jnp.max(early, axis=0), jnp.max(late, axis=0)
