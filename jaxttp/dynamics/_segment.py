"""One segment of the re-linearised recursion: the network at its ends, and the steps between.

Everything in weight space is a combination of known vectors: rows of the Jacobians at both ends of
a segment, the weights at its start, and the optimiser's accumulators (velocities) carried into it.
A linear optimiser acts on the coefficients of these combinations as it would act on weights, so
optax itself does the book-keeping (see `filters`).
"""

import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxttp._checks import check_finite_value, is_concrete
from jaxttp._types import ApplyFn, Params
from jaxttp.dynamics._edge import Damping
from jaxttp.dynamics._kernels import apply_kernel
from jaxttp.dynamics.filters import keep_dtypes, slots
from jaxttp.dynamics.recursion import dual_gradient, output_limit
from jaxttp.losses import Loss


class Start(NamedTuple):
    """Where a segment starts.

    `vectors` are the weight-space vectors that coefficients refer to: the weights, then one
    accumulator for every parameter-like leaf of the optimiser's state.
    """

    point: Params
    kernel: Array
    vectors: list[Params]
    f: Array
    state: optax.OptState


class Knot(NamedTuple):
    """A point of linearisation: its kernel, J v there for the vectors of the start, the damping."""

    kernel: Array
    pushed: Array
    damping: Damping | None = None


class Chord(NamedTuple):
    """The straight line from the start of a segment to its provisional end, D in weight space.

    Attributes:
        dual: J_s D (N, C).
        carried: the products of D with the vectors of the start (k,).
        size: D · D.
    """

    dual: Array
    carried: Array
    size: Array


class Run(NamedTuple):
    """A finished segment.

    Attributes:
        train: outputs (T + 1, N, C), filled up to the segment's end.
        rows: coefficients of the weights and of the accumulators.
        state: the optimiser's state in these coefficients.
        diverged_at: first step whose outputs could not be represented, or -1.
        length: ||w_t - w_{t-1}|| by the kernel at the segment's start, (T + 1,).
    """

    train: Array
    rows: list[Array]
    state: optax.OptState
    diverged_at: Array
    length: Array


class Network:
    """The network at the data: outputs and products with its Jacobian, counted and timed."""

    def __init__(self, apply_fn: ApplyFn, x: Any, kernel_fn: Callable[[Params], Array]) -> None:
        self._compiled = compile_network(apply_fn)
        self._x = x
        self._kernel = kernel_fn
        self.passes = 0
        self.seconds: list[float] = []

    @property
    def kernels(self) -> int:
        """Kernels built so far."""
        return len(self.seconds)

    def outputs(self, params: Params) -> Array:
        """The outputs (N, C)."""
        return self._compiled[0](params, self._x)

    def pull(self, params: Params, cotangent: Array) -> Params:
        """J^T a at `params`."""
        self.passes += 1
        return self._compiled[1](params, self._x, cotangent)

    def push(self, params: Params, tangent: Params) -> Array:
        """J v at `params`."""
        self.passes += 1
        return self._compiled[2](params, self._x, tangent)

    def kernel(self, params: Params) -> Array:
        """Theta at `params`."""
        begun = time.perf_counter()
        kernel = self._kernel(params)
        if is_concrete(kernel):
            jax.block_until_ready(kernel)
        if not self.seconds:  # the first; a later one is not finite where the forecast diverges
            kernel = check_finite_value("kernel", kernel)
        self.seconds.append(time.perf_counter() - begun)
        return kernel

    def push_all(self, here: Start, point: Params, in_use: list[bool]) -> Array:
        """J v at `point` for every vector that can enter the outputs, else zeros: (k, N, C)."""
        pairs = zip(in_use, here.vectors, strict=True)
        return jnp.stack(
            [self.push(point, v) if use else jnp.zeros_like(here.f) for use, v in pairs]
        )

    def combine(self, points: list[Params], vectors: list[Params], row: Array, f: Array) -> Params:
        """The weight-space vector whose coefficients are `row`."""
        size = f.size
        first, last, carried = row[:size], row[size : 2 * size], row[2 * size :]
        if len(points) == 1:
            total = self.pull(points[0], (first + last).reshape(f.shape))
        else:
            parts = zip(points, (first, last), strict=True)
            pulled = [self.pull(point, part.reshape(f.shape)) for point, part in parts]
            total = jax.tree.map(jnp.add, *pulled)
        for weight, vector in zip(carried, vectors, strict=True):
            total = jax.tree.map(lambda a, b, w=weight: a + w.astype(a.dtype) * b, total, vector)
        return total


def compile_network(apply_fn: ApplyFn) -> tuple[Callable, Callable, Callable]:
    """Outputs, J^T a and J v; the compiled functions are kept for a few networks."""
    try:
        return _compile_network(apply_fn)
    except TypeError:  # a callable without a hash, such as a module that holds arrays
        return _compile_network.__wrapped__(apply_fn)


@functools.lru_cache(maxsize=8)
def _compile_network(apply_fn: ApplyFn) -> tuple[Callable, Callable, Callable]:
    return (
        jax.jit(apply_fn),
        jax.jit(lambda w, x, a: jax.vjp(lambda v: apply_fn(v, x), w)[1](a)[0]),
        jax.jit(lambda w, x, v: jax.jvp(lambda u: apply_fn(u, x), (w,), (v,))[1]),
    )


def inner(left: Params, right: Params) -> Array:
    """The product of two vectors in weight space."""
    leaves = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return sum((jnp.vdot(a, b) for a, b in leaves), start=jnp.zeros(()))


def gram(here: Start, in_use: list[bool]) -> Array:
    """Products of the vectors of a start with each other (k, k), zero where one is not in use."""
    k, dtype = len(in_use), here.f.dtype
    out = jnp.zeros((k, k), dtype)
    for i in range(k):
        for j in range(i, k):
            if in_use[i] and in_use[j]:
                value = inner(here.vectors[i], here.vectors[j]).astype(dtype)
                out = out.at[i, j].set(value).at[j, i].set(value)
    return out


def chord(knot: Knot, products: Array, row: Array) -> Chord:
    """The chord of a segment from the coefficients `row` of its provisional end."""
    size = knot.pushed[0].size
    both = (row[:size] + row[size : 2 * size]).reshape(knot.pushed.shape[1:])
    carried = row[2 * size :].at[0].add(-1.0)  # the weights themselves are the start
    dual = apply_kernel(knot.kernel, both) + jnp.tensordot(carried, knot.pushed, 1)
    along = jnp.einsum("nc,knc->k", both, knot.pushed) + products @ carried
    return Chord(dual, along, jnp.vdot(both, dual) + jnp.vdot(carried, along))


@functools.lru_cache(maxsize=8)
def make_runner(loss: Loss, optimizer: optax.GradientTransformation) -> Callable[..., Run]:
    """One segment of the recursion, from `start` to `end`, compiled once for all segments.

    With two knots the kernel is interpolated along the chord of the provisional path: an update
    made at weights w enters through J(tau) = (1 - tau) J_s + tau J_e with tau = (w - w_s) · D /
    D · D, the share of the chord D that the weights have come (linear in time would do for the
    order; the chord is truer on a long segment, of which most is covered in the first steps). An
    update made at tau of gradients met earlier moves the outputs by J(tau) J(earlier)^T, for which
    the mean of both kernels stands, exact to second order in its symmetric part. `drift` (N, C) is
    added to the outputs at every step: what the linearisation was found to miss.
    """

    @jax.jit
    def run(
        knots: list[Knot],
        here: Start,
        products: Array,
        line: Chord | None,
        start: Array,
        end: Array,
        train: Array,
        targets: Array,
        indices: Array | None,
        drift: Array,
    ) -> Run:
        ends = (knots[0], knots[-1])
        shape, count, dtype = here.f.shape, len(here.vectors), train.dtype
        size = math.prod(shape)
        unit = jnp.eye(count, dtype=dtype)
        zero = jnp.zeros(2 * size, dtype)
        carried = iter([jnp.concatenate([zero, unit[k]]) for k in range(1, count)])
        state = optax.tree_utils.tree_map_params(
            optimizer, lambda leaf: next(carried).astype(leaf.dtype), here.state
        )
        weights = jnp.concatenate([zero, unit[0]])

        def share(weights: Array, t: Array) -> Array:
            timed = ((t - start) / (end - start)).astype(dtype)
            if line is None:
                return timed
            both = weights[:size] + weights[size : 2 * size]
            carried = weights[2 * size :] - unit[0]
            come = jnp.vdot(both, line.dual.reshape(-1)) + jnp.vdot(carried, line.carried)
            safe = jnp.where(line.size > 0, line.size, 1.0)
            return jnp.where(line.size > 0, jnp.clip(come / safe, *OVERSHOOT), timed)

        def step(t: Array, carry: tuple) -> tuple:
            weights, state, f, train, length, diverged_at = carry
            tau = share(weights, t)
            batch = None if indices is None else indices[t]
            gradient = dual_gradient(loss, f, targets, batch).reshape(-1)
            near, far = (gradient if k.damping is None else k.damping(gradient) for k in ends)
            split = [(1 - tau) * near, tau * far, jnp.zeros(count, dtype)]
            updates, after = optimizer.update(jnp.concatenate(split), state, weights)
            updates, state = jnp.asarray(updates, dtype), keep_dtypes(after, state)
            new_f = f + _move(knots, updates, tau, shape) + drift
            length = length.at[t + 1].set(_length(knots[0], products, updates, shape))
            weights = jnp.asarray(optax.apply_updates(weights, updates))
            good = (diverged_at < 0) & jnp.all(jnp.abs(new_f) < output_limit(dtype))
            diverged_at = jnp.where(good | (diverged_at >= 0), diverged_at, t + 1)
            f = jnp.where(good, new_f, f)
            return weights, state, f, train.at[t + 1].set(f), length, diverged_at

        zeros = jnp.zeros(train.shape[0], dtype)
        first = (weights, state, here.f, train, zeros, jnp.asarray(-1))
        out = jax.lax.fori_loop(start, end, step, first)
        weights, state, _, train, length, diverged_at = out
        rows = [weights, *(row.astype(dtype) for row in slots(optimizer, state))]
        return Run(train, rows, state, diverged_at, length)

    return run


OVERSHOOT = (-0.5, 1.5)
"""Bounds of tau: oscillating weights may pass an end of the chord, but not leave its region."""


def _move(knots: list[Knot], updates: Array, tau: Array, shape: tuple[int, ...]) -> Array:
    """How far one update moves the outputs."""
    size = math.prod(shape)
    first, last = updates[:size].reshape(shape), updates[size : 2 * size].reshape(shape)
    carried = updates[2 * size :]
    both = first + last
    if len(knots) == 1:
        return apply_kernel(knots[0].kernel, both) + jnp.tensordot(carried, knots[0].pushed, 1)
    left, right = knots
    at_left = 0.5 * ((1 - tau) * both + first)
    at_right = 0.5 * (tau * both + last)
    pushed = (1 - tau) * left.pushed + tau * right.pushed
    return (
        apply_kernel(left.kernel, at_left)
        + apply_kernel(right.kernel, at_right)
        + jnp.tensordot(carried, pushed, 1)
    )


def _length(knot: Knot, products: Array, updates: Array, shape: tuple[int, ...]) -> Array:
    """The length of one update in weight space, by the kernel at the segment's start."""
    size = math.prod(shape)
    both = (updates[:size] + updates[size : 2 * size]).reshape(shape)
    carried = updates[2 * size :]
    square = jnp.vdot(both, apply_kernel(knot.kernel, both))
    square = square + 2 * jnp.einsum("k,nc,knc->", carried, both, knot.pushed)
    square = square + jnp.vdot(carried, products @ carried)
    return jnp.sqrt(jnp.maximum(square, 0.0))
