"""Optimizers that are a linear filter behind a diagonal of past gradients: Adam and its relatives.

The update of every weight is

    u_t = -q_t sum_{s <= t} k[t, s] g_s - d_t w_t,    q_t a function of the weight's past g_s^2,

with one filter k for all weights, as in Adam, AdamW, NAdam, AMSGrad, RMSProp and Adagrad; and the
same after gradients are clipped by their global norm. `preconditioned_filter` recognizes them by
their updates of given gradients, not by name, and reads off the filter. The optimizer itself
computes the diagonal, from squared gradients.
"""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from jaxttp._core.compile import jit
from jaxttp._core.types import Params
from jaxttp.dynamics.optimizers import (
    LinearRecurrence,
    Optimizer,
    inlined,
    keep_dtypes,
    same_program,
    slots,
)

REFUSAL = (
    "optimizer is not one linear filter behind a diagonal of past gradients (clipping by value, "
    "sign and accumulated steps are not), so its path cannot be followed by kernels. Simulate the "
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
            is that of a diagonal which is 1 where all past gradients are `unit`.
        decay: d (T,), of the weights that decay.
        decays: for every leaf of the parameters whether it decays.
        linear: for every accumulator of the optimizer whether it is linear in the gradients.
        start: the optimizer's state before the first step.
        max_norm: the global norm that gradients are clipped to; infinite for none.
        unit: a size of gradients, 1 where they are not clipped.
    """

    optimizer: Optimizer
    matrices: np.ndarray
    decay: np.ndarray
    decays: tuple[bool, ...] = eqx.field(static=True)
    linear: tuple[bool, ...] = eqx.field(static=True)
    start: Any = None
    max_norm: float = np.inf
    unit: float = 1.0

    @property
    def is_constant(self) -> bool:
        """Whether the diagonal is 1: a linear filter of clipped gradients."""
        return all(self.linear)

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

    def clipped(self, gradient: Params) -> Params:
        """A gradient with a global norm of `max_norm` at most."""
        part = jnp.minimum(1.0, self.max_norm / jnp.maximum(optax.global_norm(gradient), 1e-30))
        return jax.tree.map(lambda g: (part * g).astype(g.dtype), gradient)

    def kept(self, squares: Params) -> float:
        """The part of a gradient with these squares that clipping keeps."""
        norm = np.sqrt(sum(float(jnp.sum(s)) for s in jax.tree.leaves(squares)))
        return min(1.0, float(self.max_norm) / max(norm, 1e-30))

    def step(self, state: Any, squares: Params, weights: Params) -> tuple[Params, Any]:
        """The diagonal times the filter's response to a gradient, and the next state.

        Args:
            state: before the step.
            squares: of the gradients.
            weights: that are stepped.
        """
        sizes = self.clipped(jax.tree.map(jnp.ones_like if self.is_constant else jnp.sqrt, squares))
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
            preconditioner = _probe(optimizer, like, steps, _max_norm(optimizer, params, like))
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


def _small(params: Params) -> Params:
    """Small leaves with as many axes as these."""
    return jax.tree.map(lambda leaf: np.zeros((2,) * np.ndim(leaf)), params)


def _representative(optimizer: Any, params: Params) -> tuple[Params, tuple[bool, ...]]:
    """The smallest leaf that stands for all, or small leaves; and which of all decay.

    An optimizer of one leaf is compiled much faster than one of hundreds. Masks may look at shapes:
    which weights decay is seen with all of them.
    """

    def respond(tree: Params) -> tuple[np.ndarray, np.ndarray]:
        """Updates of equal gradients, and those by decay alone (steps, leaves)."""
        zeros, ones = _filled(tree, 0.0), _filled(tree, 1.0)
        state, rows = optimizer.init(zeros), []
        for size in (3e-6, 7e-6, 2e-6):  # too small to be clipped
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
    small = _small(params)
    sized = leaves if np.size(leaves[leaf]) <= LARGE else jax.tree.leaves(small)
    one, whole = {"weight": sized[leaf]}, np.concatenate([updates, decayed])
    flags = tuple(map(bool, decays))
    alike = not np.any(np.ptp(updates, axis=1))
    alike &= not np.any(decays) or not np.any(np.ptp(decayed[:, decays], axis=1))
    try:
        alike &= np.array_equal(np.concatenate(respond(one)), whole[:, leaf, None])
    except Exception:  # a mask that knows the names of all leaves
        alike = False
    if alike:
        return one, flags
    if not np.allclose(np.concatenate(respond(small)), whole, rtol=1e-6, atol=0.0):
        raise ValueError("small leaves are treated in another way")
    return small, flags


def _max_norm(optimizer: Any, params: Params, like: Params) -> float:
    """The global norm that gradients are clipped to, by which all larger ones act alike."""

    def act(size: float, tree: Params) -> list[np.ndarray]:
        """The accumulators after two steps, the updates where there are none."""
        rng, zeros, updates = np.random.default_rng(1), _filled(tree, 0.0), None
        draws = jax.tree.map(lambda a: rng.standard_normal(np.shape(a)), zeros)
        part, state = size / optax.global_norm(draws), optimizer.init(zeros)
        gradient = jax.tree.map(lambda g: part * g, draws)
        for _ in range(2):  # the first rate may be zero
            updates, state = optimizer.update(gradient, state, zeros)
        rows = slots(optimizer, state) or jax.tree.leaves(updates)
        return [row for row in map(np.asarray, rows) if np.any(row)]

    def are_alike(size: float, tree: Params) -> list[bool]:
        pairs = zip(act(size, tree), act(1e12, tree), strict=True)
        return [np.allclose(a, b, rtol=1e-10, atol=0.0) for a, b in pairs]

    def is_clipped(size: float, tree: Params) -> bool:
        return all(are_alike(size, tree))

    small = _small(params)
    if not any(are_alike(1e6, small)):
        return np.inf
    low, high = 1e-6, 1e6
    while high / low > 1 + 1e-9:
        middle = np.sqrt(low * high)
        low, high = (low, middle) if is_clipped(middle, like) else (middle, high)
    if high < 2e-6 or not is_clipped(high, small) or is_clipped(0.9 * high, small):
        raise ValueError("it is no clipping by the global norm of all gradients")
    return float(high)


def _probe(optimizer: Any, params: Params, steps: int, max_norm: float) -> PreconditionedFilter:
    program = same_program(optimizer, params)
    unit = min(1.0, 0.3 * max_norm / np.sqrt(sum(map(np.size, jax.tree.leaves(params)))))
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
        for first, once, three in zip(
            before, accumulators(unit), accumulators(3.0 * unit), strict=True
        )
    )
    none = np.zeros((steps, 1, 1))
    preconditioner = PreconditionedFilter(
        program, none, none[:, 0, 0], (False,) * count, linear, None, max_norm, unit
    )
    matrices, decay = inlined(_matrices, program)(preconditioner, start, params, steps)
    decay = np.asarray(decay)
    decays = tuple(bool(np.any(decay[:, leaf])) for leaf in range(count))
    most = np.max(decay, axis=1)
    if any(on and not np.allclose(decay[:, leaf], most) for leaf, on in enumerate(decays)):
        raise ValueError("its weights decay at several rates")
    return dataclasses.replace(
        preconditioner, matrices=np.asarray(matrices), decay=most, decays=decays
    )


@functools.partial(jit, static_argnums=3)
def _matrices(
    preconditioner: PreconditionedFilter, start: Any, params: Params, steps: int
) -> tuple:
    """The filter's matrices (T, k + 1, k + 1), and how weights decay (T, leaves)."""
    optimizer, k = preconditioner.optimizer, sum(preconditioner.linear)
    unit, count = preconditioner.unit, len(jax.tree.leaves(params))
    zeros, ones = _filled(params, 0.0), _filled(params, unit)

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
        size = -respond(state, unit, none, 0.0)[1][0] / unit  # the response to a gradient
        _, after = optimizer.update(ones, state, zeros)
        history = iter(slots(optimizer, after))  # so that no diagonal is zero
        primed = optax.tree_utils.tree_map_params(optimizer, lambda _: next(history), state)
        small = SMALL * unit
        probes = small * jnp.eye(k + 1)
        columns = jax.vmap(lambda row: respond(primed, row[0], row[1:], 0.0)[1])(probes).T / small
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
    for size in (1e-2 * preconditioner.unit, 1e2 * preconditioner.unit):
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
        gradient = preconditioner.clipped(gradient)
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
