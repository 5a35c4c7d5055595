"""Optimizers that are a linear filter behind a diagonal of past gradients: Adam and its relatives.

The update of every weight is

    u_t = -q_t sum_{s <= t} k[t, s] g_s - d_t w_t,    q_t a function of the weight's past g_s^2,

with one filter k for all weights, as in Adam, AdamW, NAdam, AMSGrad, RMSProp and Adagrad.
`preconditioned_filter` recognizes them by their updates of given gradients, not by name, and reads
off the filter. The optimizer itself computes the diagonal, from squared gradients.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from jaxttp._core.compile import jit
from jaxttp._core.types import Params
from jaxttp.dynamics._kernels import image_size
from jaxttp.dynamics.optimizers import (
    LinearRecurrence,
    Optimizer,
    inlined,
    keep_dtypes,
    same_program,
    slots,
)
from jaxttp.dynamics.recursion import Motion

REFUSAL = (
    "optimizer is not one linear filter behind a diagonal of past gradients (clipping, sign and "
    "accumulated steps are not), so its path cannot be followed by kernels. Simulate the "
    "linearized network in weight space instead (dynamics='weight_space')."
)
LARGE = 4096
"""Numbers of a leaf that is probed in its own shape, at most."""
SMALL = 1e-6
"""Gradients that probe a filter: their squares leave the diagonal as it is."""


class PreconditionedFilter(eqx.Module):
    """An optimizer that is a linear filter behind a diagonal.

    Attributes:
        optimizer: the optimizer.
        matrices: of its filter (T, k + 1, k + 1), see `LinearRecurrence`, in float64. Their scale
            is that of a diagonal which is 1 where all past gradients are 1.
        decay: d (T,), of the weights that decay.
        decays: for every leaf of the parameters whether it decays.
        linear: for every accumulator of the optimizer whether it is linear in the gradients.
        start: the optimizer's state before the first step.
    """

    optimizer: Optimizer
    matrices: np.ndarray
    decay: np.ndarray
    decays: tuple[bool, ...] = eqx.field(static=True)
    linear: tuple[bool, ...] = eqx.field(static=True)
    start: Any = None

    @property
    def scales(self) -> np.ndarray:
        """The filter's response to a gradient in its own step (T,)."""
        return self.matrices[:, 0, 0]

    @property
    def divisors(self) -> Array:
        """`scales`, with 1 where a step does not move the weights (T,)."""
        scales = jnp.asarray(self.matrices)[:, 0, 0]
        return jnp.where(scales == 0, 1.0, scales)

    def select(self, weights: Params, *, decaying: bool) -> Params:
        """The weights that decay, or those that do not; zero for the others."""
        leaves, treedef = jax.tree.flatten(weights)
        kept = [
            w if decays == decaying else jnp.zeros_like(w)
            for w, decays in zip(leaves, self.decays, strict=True)
        ]
        return jax.tree.unflatten(treedef, kept)

    def split(self, state: Any, size: int) -> list[list[Array]]:
        """The accumulators of a state, each as the leaves of parameters with `size` leaves."""
        leaves = slots(self.optimizer, state)
        return [leaves[i : i + size] for i in range(0, len(leaves), size)]

    def without_filter(self, state: Any, values: tuple[Any, ...] | None = None) -> Any:
        """A state with these linear accumulators (one number each); zero when None."""
        values = (0.0,) * sum(self.linear) if values is None else values
        fill = iter(values)
        rows = [next(fill) if is_linear else None for is_linear in self.linear]
        position = iter(range(1 << 30))
        size = len(slots(self.optimizer, state)) // max(1, len(self.linear))

        def put(leaf: Array) -> Array:
            value = rows[next(position) // size]
            return leaf if value is None else jnp.full_like(leaf, value)

        return optax.tree_utils.tree_map_params(self.optimizer, put, state)

    def step(self, state: Any, squares: Params, weights: Params) -> tuple[Params, Any]:
        """The diagonal times the filter's response to a gradient, and the next state.

        Args:
            state: before the step.
            squares: of the gradients.
            weights: that are stepped.
        """
        sizes = jax.tree.map(jnp.sqrt, squares)
        # Without the weights that decay: rounding would be all of a response to a tiny gradient.
        still = self.select(weights, decaying=False)
        updates, after = self.optimizer.update(sizes, self.without_filter(state), still)
        # A weight without any gradient does not move. One that had gradients before is held, too:
        # its history is tiny as a rule, and the diagonal of such weights makes paths diverge.
        response = jax.tree.map(
            lambda u, s: jnp.where(s > 0, -u / jnp.where(s > 0, s, 1.0), 0.0), updates, sizes
        )
        return response, keep_dtypes(after, state)


def preconditioned_filter(optimizer: Any, params: Params, steps: int) -> PreconditionedFilter:
    """An optimizer as a linear filter behind a diagonal.

    Args:
        optimizer: an optax transformation.
        params: the weights that it trains.
        steps: the horizon T.

    Returns:
        A `PreconditionedFilter`.

    Raises:
        ValueError: it is not one.

    Example:
        >>> import optax
        >>> adam = preconditioned_filter(optax.adamw(0.1), {"w": jnp.ones(3)}, steps=2)
        >>> adam.linear, adam.matrices[0].round(3).tolist()
        ((True, False), [[0.1, 0.9], [0.1, 0.9]])

    Source:
        ADAM and its relatives in function space: ours.
    """
    try:
        with jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
            like, decays = _representative(optimizer, params)
            preconditioner = _probe(optimizer, like, steps)
            is_one = _deviation(preconditioner, like, optimizer) < 1e-6 and _remembers(
                preconditioner, like, optimizer
            )
    except (ValueError, TypeError, LookupError, AttributeError, ZeroDivisionError) as problem:
        raise ValueError(f"{REFUSAL} (The probe failed with: {problem})") from problem
    if not is_one:
        raise ValueError(REFUSAL)
    if preconditioner.decays != (
        decays if len(preconditioner.decays) == len(decays) else (any(decays),)
    ):
        raise ValueError(REFUSAL)
    program = same_program(optimizer, params)
    start = optimizer.init(params)
    return dataclasses.replace(preconditioner, optimizer=program, start=start, decays=decays)


def _filled(params: Params, value: Any) -> Params:
    """Weights of these shapes with one value."""
    return jax.tree.map(lambda leaf: jnp.full(np.shape(leaf), value, jnp.float64), params)


def _representative(optimizer: Any, params: Params) -> tuple[Params, tuple[bool, ...]]:
    """The smallest leaf that stands for all, or small leaves; and which of all decay.

    An optimizer of one leaf is compiled much faster than one of hundreds. Masks may look at shapes:
    which weights decay is seen with all of them.
    """

    def respond(tree: Params) -> tuple[np.ndarray, np.ndarray]:
        """Updates of equal gradients, and those by decay alone (steps, leaves)."""
        zeros, ones = _filled(tree, 0.0), _filled(tree, 1.0)
        state, rows = optimizer.init(zeros), []
        for size in (0.3, 0.7, 0.2):
            decayed = jax.tree.map(
                jnp.subtract, *(optimizer.update(zeros, state, w)[0] for w in (ones, zeros))
            )
            updates, state = optimizer.update(_filled(tree, size), state, zeros)
            rows.append([[float(u.reshape(-1)[0]) for u in jax.tree.leaves(some)]
                         for some in (updates, decayed)])  # fmt: skip
        table = np.nan_to_num(np.array(rows))  # an epsilon of 0 makes 0 / 0 of no gradient
        return table[:, 0], table[:, 1]

    updates, decayed = respond(params)
    decays = np.any(decayed != 0.0, axis=0)
    leaves = jax.tree.leaves(params)
    leaf = min(range(len(leaves)), key=lambda i: (not decays[i], np.size(leaves[i])))
    small = jax.tree.map(lambda a: np.zeros((2,) * np.ndim(a)), params)
    sized = leaves if np.size(leaves[leaf]) <= LARGE else jax.tree.leaves(small)
    one = {"weight": sized[leaf]}
    flags = tuple(map(bool, decays))
    try:
        alone = np.concatenate(respond(one))
    except Exception:  # a mask that knows the names of all leaves
        return small, flags
    alike = not np.any(np.ptp(updates, axis=1))
    alike &= not np.any(decays) or not np.any(np.ptp(decayed[:, decays], axis=1))
    is_one = alike and np.array_equal(alone, np.concatenate([updates, decayed])[:, leaf, None])
    return (one if is_one else small), flags


def _probe(optimizer: Any, params: Params, steps: int) -> PreconditionedFilter:
    program = same_program(optimizer, params)
    zeros, count = _filled(params, 0.0), len(jax.tree.leaves(params))
    start = optimizer.init(zeros)

    def accumulators(gradient: float) -> list[Array]:
        state = start
        for _ in range(2):
            _, state = optimizer.update(_filled(params, gradient), state, zeros)
        return [leaf.reshape(-1)[0] for leaf in slots(optimizer, state)[::count]]

    before = [leaf.reshape(-1)[0] for leaf in slots(optimizer, start)[::count]]
    linear = tuple(
        bool(first == 0 and once != 0 and jnp.allclose(3.0 * once, three, rtol=1e-9, atol=0.0))
        for first, once, three in zip(before, accumulators(1.0), accumulators(3.0), strict=True)
    )
    none = np.zeros((steps, 1, 1))
    preconditioner = PreconditionedFilter(program, none, none[:, 0, 0], (False,) * count, linear)
    matrices, decay = inlined(_matrices, program)(preconditioner, start, params, steps)
    decay = np.asarray(decay)
    decays = tuple(bool(np.any(decay[:, leaf])) for leaf in range(count))
    most = np.max(decay, axis=1)
    if any(on and not np.allclose(decay[:, leaf], most) for leaf, on in enumerate(decays)):
        raise ValueError("its weights decay at several rates")
    return PreconditionedFilter(program, np.asarray(matrices), most, decays, linear)


@functools.partial(jit, static_argnums=3)
def _matrices(
    preconditioner: PreconditionedFilter, start: Any, params: Params, steps: int
) -> tuple:
    """The filter's matrices (T, k + 1, k + 1), and how weights decay (T, leaves)."""
    optimizer, k = preconditioner.optimizer, sum(preconditioner.linear)
    zeros, ones = _filled(params, 0.0), _filled(params, 1.0)
    count = len(jax.tree.leaves(params))

    def respond(state: Any, gradient: Any, values: Any, weight: Any) -> tuple[Array, Array]:
        state = preconditioner.without_filter(state, tuple(values))
        updates, after = optimizer.update(_filled(params, gradient), state, _filled(params, weight))
        rows = preconditioner.split(after, count)
        kept = [
            row[0].reshape(-1)[0] for row, on in zip(rows, preconditioner.linear, strict=True) if on
        ]
        first = jnp.stack([leaf.reshape(-1)[0] for leaf in jax.tree.leaves(updates)])
        return first, jnp.stack([first[0], *kept])

    def step(state: Any, _: Any) -> tuple[Any, tuple]:
        none = jnp.zeros(k)
        size = -respond(state, 1.0, none, 0.0)[1][0]  # the response to a gradient
        _, after = optimizer.update(ones, state, zeros)
        history = iter(slots(optimizer, after))  # so that no diagonal is zero
        primed = optax.tree_utils.tree_map_params(optimizer, lambda _: next(history), state)
        probes = SMALL * jnp.eye(k + 1)
        columns = jax.vmap(lambda row: respond(primed, row[0], row[1:], 0.0)[1])(probes).T / SMALL
        scale = jnp.where(
            columns[0, 0] == 0, 0.0, size / jnp.where(columns[0, 0] == 0, 1.0, columns[0, 0])
        )
        decay = -respond(primed, 0.0, none, 1.0)[0]
        return keep_dtypes(after, state), (columns.at[0].multiply(scale), decay)

    return jax.lax.scan(step, start, length=steps)[1]


def _remembers(preconditioner: PreconditionedFilter, like: Params, optimizer: Any) -> bool:
    """Whether a diagonal that is not constant depends on more than the present gradient."""
    if not all(preconditioner.linear):
        return True
    first, second = (
        jax.tree.leaves(preconditioner.step(optimizer.init(like), _filled(like, s), like)[0])
        for s in (1e-4, 1e4)
    )
    return all(np.allclose(a, b) for a, b in zip(first, second, strict=True))


def _deviation(preconditioner: PreconditionedFilter, like: Params, optimizer: Any) -> float:
    """The largest relative difference between an optimizer's updates and those of the model."""
    steps, rng = min(64, len(preconditioner.decay)), np.random.default_rng(0)
    draw = lambda: jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape)), like)  # noqa: E731
    worst = 0.0
    for size in (1e-2, 1e2):
        gradients = [jax.tree.map(lambda g: size * g, draw()) for _ in range(steps)]  # noqa: B023
        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *gradients)
        weights = draw()
        state = optimizer.init(weights)  # of this one: equal programs may differ in their numbers
        real, model = inlined(_both, preconditioner.optimizer)(
            preconditioner, weights, state, stacked
        )
        worst = max(worst, *(
            float(jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(a)), 1e-300))
            for a, b in zip(jax.tree.leaves(real), jax.tree.leaves(model), strict=True)
        ))  # fmt: skip
    return worst


@jit
def _both(
    preconditioner: PreconditionedFilter, weights: Params, state: Any, gradients: Params
) -> tuple[Params, Params]:
    """Updates by an optimizer and by the model, of the same gradients (T, ...)."""
    filtering = LinearRecurrence(jnp.asarray(preconditioner.matrices))
    decays = jax.tree.unflatten(jax.tree.structure(weights), preconditioner.decays)

    def step(carry: tuple, inputs: tuple) -> tuple[tuple, tuple]:
        w, state, second, filtered = carry
        gradient, decay, scale = inputs
        updates, after = preconditioner.optimizer.update(gradient, state, w)
        response, second = preconditioner.step(second, jax.tree.map(jnp.square, gradient), w)
        flat, unravel = ravel_pytree(gradient)
        moved, filtered = filtering.update(flat, filtered)
        model = jax.tree.map(
            lambda q, u, w, on: q / scale * u - (decay * w if on else 0.0),
            response, unravel(moved), w, decays,
        )  # fmt: skip
        w = optax.apply_updates(w, updates)
        return (w, keep_dtypes(after, state), second, filtered), (updates, model)

    flat = ravel_pytree(weights)[0]
    first = weights, state, state, filtering.init(flat)
    steps = len(jax.tree.leaves(gradients)[0])
    inputs = gradients, jnp.asarray(preconditioner.decay)[:steps], preconditioner.divisors[:steps]
    return jax.lax.scan(step, first, inputs)[1]


# --- along a path ---------------------------------------------------------------------------------


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
    _, diagonal = _advance(
        preconditioner, preconditioner.start, squares, squares, weights, constant, 0, first
    )
    return Scaling(diagonal, squares, preconditioner.start)


def next_scaling(
    preconditioner: PreconditionedFilter,
    scaling: Scaling,
    weights: Params,
    squares: Params,
    fractions: np.ndarray,
    start: int,
    end: int,
) -> Scaling:
    """The diagonal at the end of a segment.

    Args:
        preconditioner: the optimizer.
        scaling: at the segment's start.
        weights: at its end.
        squares: of the gradients there.
        fractions: of the squares at the start in those of every step (T,).
        start: the segment's first step.
        end: its last.
    """
    stop = min(end, len(preconditioner.scales) - 1)
    near, state = scaling.squares, scaling.state
    state, diagonal = _advance(
        preconditioner, state, near, squares, weights, fractions, start, stop
    )
    if preconditioner.scales[stop] == 0.0:
        diagonal = scaling.diagonal
    return Scaling(diagonal, squares, state)


def _advance(preconditioner: PreconditionedFilter, *arguments: Any) -> tuple[Any, Params]:
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
    stop: Array,
) -> tuple[Any, Params]:
    """The state before step `stop`, and the diagonal of that step."""

    def step(t: Any, state: Any) -> Any:
        part = fractions[t]
        squares = jax.tree.map(lambda a, b: (part * a + (1 - part) * b).astype(a.dtype), near, far)
        return preconditioner.step(state, squares, weights)[1]

    state = jax.lax.fori_loop(start, stop, step, state)
    response, _ = preconditioner.step(state, far, weights)
    scale = preconditioner.divisors[stop]
    return state, jax.tree.map(lambda q: (q / scale).astype(q.dtype), response)


class ScaledMotion(Motion):
    """`Motion` behind a diagonal q, which moves from q_near to q_far with the kernels.

    Kernels are those of u -> f(w + q^(1/2) u), J q J^T. Among the carried vectors stand the weights
    that decay, then the accumulators times q_near, then times q_far. An optimizer's update becomes
    ((1 - tau) q_near + tau q_far) times the filter's at the present tau. The parts J_near^T and
    J_far^T of the gradients keep their own diagonal, exact to second order.

    Attributes:
        decay: d (T,).
    """

    decay: Float[Array, " steps"] = None  # type: ignore[assignment]

    def applied(self, update: Array, vector: Array, t: Any) -> Array:
        """See `Motion`; weights decay."""
        n, k = len(self.ends) * self.f.size, len(self.ends[0].pushed)
        lost = -self.decay[t] * vector[n]
        if self.tau is None:
            return update.at[n].set(lost)
        tau, width = self.tau[t], image_size(self.ends[0].kernel, self.f.shape[1])
        dual = update[:n].reshape(2, -1).sum(0)
        carried = update[n + 1 : n + k].reshape(2, -1).sum(0)
        near, far = (update[n + k :][i * 2 * width :][: 2 * width] for i in (0, 1))
        near, far = near.reshape(2, -1).sum(0), far.reshape(2, -1).sum(0)
        none = jnp.zeros(width, update.dtype)
        return jnp.concatenate([
            (1 - tau) * dual, tau * dual, lost[None], (1 - tau) * carried, tau * carried,
            (1 - tau) * near, none, none, tau * far,
        ])  # fmt: skip

    def moves(self, update: Array, t: Any) -> list[Array]:
        """See `Motion`."""
        if self.tau is None:
            return super().moves(update, t)
        n, k = 2 * self.f.size, len(self.ends[0].pushed)
        tau, width = self.tau[t], image_size(self.ends[0].kernel, self.f.shape[1])
        carried, images = update[n : n + k], update[n + k :]
        near, far = carried.at[0].multiply(1 - tau), carried.at[0].multiply(tau)
        return [images[:width], near, images[3 * width :], far]
