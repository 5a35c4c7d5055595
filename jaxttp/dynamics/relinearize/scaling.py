"""The diagonal of Adam and its relatives along a relinearized path.

Within a segment the network u -> f(w + q^(1/2) u) is followed with the mean of both ends' q^(1/2).
Weights whose gradients have been small so far have a large q, which falls as soon as they get a
gradient. Two things keep this out of the path. The diagonal at an end is that after a step whose
squared gradients are larger by the change of the gradients' size over the last segment, the same
for all weights of a leaf. And every step is scaled so that its g^T q g is that of the diagonal
which the optimizer has at this step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.compile import jit
from jaxttp._core.types import Params
from jaxttp.dynamics._kernels import image_of
from jaxttp.dynamics._network import inner, scale
from jaxttp.dynamics.optimizers import inlined
from jaxttp.dynamics.preconditioned import PreconditionedFilter
from jaxttp.dynamics.recursion import Motion


class Scaling(NamedTuple):
    """The diagonal at a point of a path.

    Attributes:
        diagonal: q, shaped like the weights.
        squares: of the gradients there (their mean over batches).
        state: of the optimizer; its linear accumulators are not used.
    """

    diagonal: Params
    squares: Params
    state: Any


class Steps(NamedTuple):
    """Numbers of every step of a segment (T,).

    Attributes:
        factors: g^T q g over that with the mean of both ends' q^(1/2).
        ratios: g^T g over that, with which gradients are clipped.
    """

    factors: np.ndarray
    ratios: np.ndarray

    @classmethod
    def of_start(cls, scaling: Scaling, steps: int) -> "Steps":
        """With the diagonal at a segment's start."""
        roots = jax.tree.map(jnp.sqrt, scaling.diagonal)
        plain, near, *_ = np.asarray(_traces(scaling.squares, roots, roots), np.float64)
        one = np.ones(steps)
        return cls(one, one * (plain / near if near > 0 else 1.0))


def first_scaling(
    preconditioner: PreconditionedFilter, weights: Params, squares: Params
) -> Scaling:
    """The diagonal of the first step that moves the weights.

    Args:
        preconditioner: the optimizer.
        weights: before training.
        squares: of the gradients there.
    """
    first = int(np.argmax(preconditioner.scales != 0.0))
    constant = np.ones(len(preconditioner.scales))
    _, diagonal, _ = _advance(
        preconditioner, preconditioner.start, squares, squares, weights, constant, 0, first
    )
    return Scaling(diagonal, squares, preconditioner.start)


def next_scaling(
    preconditioner: PreconditionedFilter,
    scaling: Scaling,
    weights: Params,
    squares: Params,
    fractions: np.ndarray,
    tau: np.ndarray,
    start: int,
    end: int,
) -> tuple[Scaling, Steps]:
    """The diagonal at the end of a segment, and the numbers of its steps.

    Args:
        preconditioner: the optimizer.
        scaling: at the segment's start.
        weights: at its end.
        squares: of the gradients there.
        fractions: of the squares at the start in those of every step (T,).
        tau: the position of every step between both ends (T + 1,).
        start: the segment's first step.
        end: its last.
    """
    near, state = scaling.squares, scaling.state
    state, diagonal, traces = _advance(
        preconditioner, state, near, squares, weights, fractions, start, end
    )
    if preconditioner.scales[min(end, len(fractions) - 1)] == 0.0:
        diagonal = scaling.diagonal
    roots = [jax.tree.map(jnp.sqrt, q) for q in (scaling.diagonal, diagonal)]
    mixed = total = 0.0  # g^T q g with the mean of both ends' q^(1/2), and g^T g, of every step
    weights_of = np.stack([(1 - tau) ** 2, 2 * tau * (1 - tau), tau**2])[:, :-1]
    for part, fraction in ((near, fractions), (squares, 1 - fractions)):
        plain, *sums = np.asarray(_traces(part, *roots), np.float64)
        mixed, total = mixed + fraction * (sums @ weights_of), total + fraction * plain
    traces = np.asarray(traces, np.float64)
    is_good = (traces > 0) & (mixed > 0)
    safe = np.where(is_good, mixed, 1.0)
    steps = Steps(np.where(is_good, traces / safe, 1.0), np.where(is_good, total / safe, 1.0))
    return Scaling(diagonal, squares, state), steps


@jit
def _traces(squares: Params, near: Params, far: Params) -> Array:
    """Sums over the weights of the squares, and of the squares times a^2, a b and b^2."""
    pairs = (near, near), (near, far), (far, far)
    plain = jnp.asarray(sum(map(jnp.sum, jax.tree.leaves(squares))))
    return jnp.stack([plain, *(inner(squares, scale(*pair)) for pair in pairs)])


def _advance(preconditioner: PreconditionedFilter, *arguments: Any) -> tuple[Any, Params, Array]:
    return inlined(_advance_jit, preconditioner.optimizer)(preconditioner, *arguments)


@jit
def _advance_jit(
    preconditioner: PreconditionedFilter,
    state: Any,
    near: Params,
    far: Params,
    weights: Params,
    fractions: Array,
    start: Array,
    end: Array,
) -> tuple[Any, Params, Array]:
    """The state before step `end`, the diagonal there, and g^T q g of every step (T,)."""

    def step(t: Any, carry: tuple) -> tuple:
        state, traces = carry
        part = fractions[t]
        squares = jax.tree.map(lambda a, b: (part * a + (1 - part) * b).astype(a.dtype), near, far)
        response, state = preconditioner.step(state, squares, weights)
        trace = inner(squares, response) / preconditioner.divisors[t]
        return state, traces.at[t].set(trace.astype(traces.dtype))

    last = jnp.minimum(end, len(fractions) - 1)  # there is no step after the horizon
    state, traces = jax.lax.fori_loop(start, last, step, (state, jnp.zeros_like(fractions)))

    def drifted(a: Array, b: Array) -> Array:
        change = jnp.mean((jnp.sqrt(b) - jnp.sqrt(a)) ** 2)
        return b + jnp.where(end - start > 1, change, 0.0)  # single steps are exact

    response, _ = preconditioner.step(state, jax.tree.map(drifted, near, far), weights)
    scale = preconditioner.divisors[last]
    state, traces = jax.lax.fori_loop(last, end, step, (state, traces))
    return state, jax.tree.map(lambda q: (q / scale).astype(q.dtype), response), traces


class ScaledMotion(Motion):
    """`Motion` behind a diagonal q, which moves from q_near to q_far with the linearizations.

    Kernels are those of u -> f(w + q^(1/2) u), as factors J q^(1/2) S with one projection S. The
    mean of both ends' q^(1/2) stands for that at the present tau, where gradients are taken and
    where they are applied: coefficients are those of

        q_near^(1/2) (q_near^(1/2) J_near^T, q_far^(1/2) J_far^T), q_far^(1/2) (the same).

    Among the carried vectors stand the weights that decay, then the accumulators times q_near, then
    times q_far.

    Attributes:
        decay: d (T,).
        factors: of the steps (T,).
        norms: the norm that |S^T q^(1/2) J^T g| is clipped to (T,); None where gradients are not.
    """

    decay: Float[Array, " steps"] = None  # type: ignore[assignment]
    factors: Float[Array, " steps"] = None  # type: ignore[assignment]
    norms: Float[Array, " steps"] | None = None

    @property
    def duals(self) -> int:
        """See `Motion`."""
        return len(self.ends) ** 2 * self.f.size

    def pulled(self, gradient: Array, batch: Array | None, t: Any, folds: list) -> Array:
        """See `Motion`; clipped."""
        vector = super().pulled(gradient, batch, t, folds)
        if self.norms is None:
            return vector
        fractions = [1.0] if self.tau is None else [1 - self.tau[t], self.tau[t]]
        images = [image_of(end.kernel, gradient, batch) for end in self.ends]
        image = sum(part * image for part, image in zip(fractions, images, strict=True))
        size = jnp.maximum(jnp.linalg.norm(jnp.asarray(image)), 1e-30)
        return jnp.minimum(1.0, self.norms[t] / size) * vector

    def applied(self, update: Array, vector: Array, t: Any) -> Array:
        """See `Motion`; weights decay."""
        n, k = self.duals, len(self.ends[0].pushed)
        update = self.factors[t] * update
        update = update.at[n].set(-self.decay[t] * vector[n])
        if self.tau is None:
            return update
        parts = jnp.stack([1 - self.tau[t], self.tau[t]])
        for low, high in ((0, n), (n + 1, n + k)):
            first = update[low : low + (high - low) // 2]
            update = update.at[low:high].set(jnp.outer(parts, first).reshape(-1))
        return update

    def moves(self, update: Array, t: Any) -> list[Array]:
        """See `Motion`: `applied` has split the accumulators."""
        if self.tau is None:
            return super().moves(update, t)
        near, _, far, _ = super().moves(update, t)
        carried = update[self.duals : self.size]
        parts = [carried.at[0].multiply(part) for part in (1 - self.tau[t], self.tau[t])]
        return [near, parts[0], far, parts[1]]
