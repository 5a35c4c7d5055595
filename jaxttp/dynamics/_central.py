"""The central path: where a network that stays at the edge of stability goes on the average.

Beyond the edge a training oscillates along the steepest modes. By its third order the loss answers
to the variance s^2 of such an oscillation with a mean force -s^2/2 grad S on the weights, S the
curvature along the mode, and the oscillation grows until that keeps S at the edge. So on the
average the weights go where training would take them, held back from growing any steeper:

    w_{t+1} = w_t + u_t - sum_i xi_i d_i,  d_i = grad S_i,  xi_i >= 0 the least with S_i <= edge

with the updates u_t of the damped steps (see `_edge`), and S_i followed in first order from the
last point of linearisation, where both S_i and d_i are known, and in second order once the kernel
at the segment's end is. What is beyond the edge comes back a share of it a step. The loss of the
oscillation itself, about edge s^2/2 on top of that of the mean path, is not added: it comes late
where the oscillation has to grow from nothing, and by bursts.

Source:
    Cohen et al. 2024, "Understanding optimization in deep learning with central flows"
    (arXiv 2410.24206); in function space, for any linear optimiser and between kernels: ours.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxttp._core.compile import jit
from jaxttp._core.products import with_forward_mode
from jaxttp._core.traced import Traced, network_of
from jaxttp._core.types import ApplyFn, Params
from jaxttp.dynamics._network import inner
from jaxttp.losses import Loss

NEAR = 0.8
"""Modes are held back from this share of the edge on: within a segment they may come there."""
MOST = 4
"""Modes that are held back together, the steepest."""
BACK = 0.3
"""Share of what is beyond the edge that comes back a step."""
CLOSE = 1e-3
"""Share of the edge within which a mode is at it."""
SWEEPS = 16
"""Of Gauss and Seidel over the modes."""


class Guard(NamedTuple):
    """What holds modes back in a segment, whose last k vectors are the gradients d_i.

    Attributes:
        curvatures: S_i where the segment starts (k,).
        edge: of stability.
        missed: what the first order misses of S_i at the segment's end (k,); it comes up on the way
            there as what it misses of the outputs does.
    """

    curvatures: Float[Array, " k"]
    edge: Float[Array, ""]
    missed: Float[Array, " k"]

    @property
    def modes(self) -> int:
        """The number of modes."""
        return self.curvatures.shape[0]

    def bears(self, curvatures: Array | None) -> bool:
        """Whether S_i (k,) came to the edge in a run with this guard: something was held back."""
        assert curvatures is not None  # it had one
        return float(jnp.max(curvatures)) > (1 - CLOSE) * float(self.edge)

    def corrected(self, foreseen: Array, found: Array) -> "Guard":
        """The guard that knows what the first order missed.

        Args:
            foreseen: S_i at the segment's end in first order (k,).
            found: the largest curvatures there, falling (k or more,); matched by their order.
        """
        rank = jnp.argsort(jnp.argsort(-foreseen))
        return self._replace(missed=found[: self.modes][rank] - foreseen)


def least(gram: Array, excess: Array) -> Array:
    """The least xi >= 0 with gram xi >= excess, by complementarity (k,)."""
    diagonal = jnp.maximum(jnp.diagonal(gram), jnp.finfo(gram.dtype).tiny)

    def sweep(_: Array, xi: Array) -> Array:
        for i in range(len(xi)):
            xi = xi.at[i].add((excess[i] - gram[i] @ xi) / diagonal[i])
            xi = xi.at[i].set(jnp.maximum(xi[i], 0.0))
        return xi

    return jax.lax.fori_loop(0, SWEEPS, sweep, jnp.zeros_like(excess))


def hold_back(guard: Guard, curvatures: Array, change: Array, gram: Array) -> tuple[Array, Array]:
    """How far a step is held back: xi (k,), and S_i after it (k,).

    Args:
        guard: of the segment.
        curvatures: S_i before the step (k,).
        change: of them by the step, if it is not held back (k,).
        gram: products of the d_i (k, k).
    """
    edge = guard.edge
    bound = jnp.maximum(edge, curvatures - BACK * (curvatures - edge))
    xi = least(gram, curvatures + change - bound)
    return xi, curvatures + change - gram @ xi


def steepening(
    apply_fn: ApplyFn, loss: Loss
) -> Callable[[Params, Any, Array, Array, Array], list[Params]]:
    """(weights, x, targets, left (k, N, C), curvatures (k,)) -> d_i, without the modes themselves.

    `left` is H^(1/2) u of the modes u of `curvature_modes`, whose directions in weight space are
    J^T H^(1/2) u / sqrt(N S).
    """

    def both(
        weights: Params, x: Any, targets: Array, left: Array, curvatures: Array
    ) -> list[Params]:
        network = network_of(apply_fn).precise(weights, x)
        along = _modes(network, weights, x, left, curvatures)
        return _gradients(network, weights, x, targets, along, loss=loss)

    return both


@jit
def _modes(
    network: Traced, weights: Params, x: Any, left: Array, curvatures: Array
) -> list[Params]:
    _, pull = jax.vjp(lambda w: network(w, x), weights)
    sizes = jnp.sqrt(left.shape[1] * curvatures)
    return [pull(each / size)[0] for each, size in zip(left, sizes, strict=True)]


@functools.partial(jit, static_argnames="loss")
def _gradients(
    network: Traced, weights: Params, x: Any, targets: Array, along: list[Params], *, loss: Loss
) -> list[Params]:
    run = with_forward_mode(lambda w: network(w, x), weights)

    def curvature(weights: Params, mode: Params) -> Array:
        f, v = jax.jvp(run, (weights,), (mode,))
        return jnp.vdot(v, loss.hessian_vector_product(f, targets, v)) / f.shape[0]

    found = [jax.grad(curvature)(weights, mode) for mode in along]
    return [_without(each, along) for each in found]


def _without(vector: Params, others: list[Params]) -> Params:
    """A vector less its parts along some that are orthonormal."""
    for other in others:
        part = inner(vector, other)
        vector = jax.tree.map(lambda a, b, p=part: a - p.astype(a.dtype) * b, vector, other)
    return vector
