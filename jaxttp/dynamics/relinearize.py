"""Re-linearisation: the recursion with the kernel rebuilt along the predicted path.

A linearised network errs because its kernel moves while it trains. So follow the PREDICTED path:
after a segment of steps set w <- w + J^T a (one vector-Jacobian product over the data, no training
step), rebuild Theta and f there, and go on. That is a method of first order in the length of a
segment. The second order is a Heun step whose right-hand side is a kernel: run the segment with
Theta_s, build Theta* at its provisional end, and run the segment again with the kernel interpolated
in time.

Everything in weight space is a combination of known vectors: rows of the Jacobians at both ends of
a segment, the weights at its start, and the optimiser's accumulators (velocities) carried into it.
A linear optimiser acts on the coefficients of these combinations as it would act on weights, so
optax itself does the book-keeping (see `filters`), and velocities cross a segment's end in WEIGHT
space; the dual velocity re-used with a new kernel would not converge.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxttp._checks import check_finite_value, check_integer
from jaxttp._types import ApplyFn, Params
from jaxttp.dynamics._kernels import apply_kernel
from jaxttp.dynamics.batches import batch_indices
from jaxttp.dynamics.filters import linear_filter
from jaxttp.dynamics.recursion import dual_gradient, output_limit
from jaxttp.losses import Loss, encode_targets


class RelinearizedTrajectory(eqx.Module):
    """Predicted outputs with the kernel rebuilt along the path.

    Attributes:
        ts: 0, 1, ..., steps.
        train: outputs (steps + 1, N, C).
        provisional: outputs before the second-order correction, (steps + 1, N, C); their distance
            from `train` is the error estimate. Equal to `train` for order 1.
        ends: the steps at which segments end and kernels were built.
        diverged_at: first step whose outputs could not be represented, -1 for never.
        kernels: kernels built, the first included.
        gradient_evaluations: passes back through the network over all samples, the kernels' own
            apart.
    """

    ts: Float[Array, " t"]
    train: Float[Array, "t n c"]
    provisional: Float[Array, "t n c"]
    ends: tuple[int, ...] = eqx.field(static=True)
    diverged_at: Array
    kernels: int = eqx.field(static=True)
    gradient_evaluations: int = eqx.field(static=True)


def segment_ends(steps: int, rebuilds: int, *, order: int = 2) -> tuple[int, ...]:
    """Where segments end: early and dense, late and sparse, as a network moves.

    Args:
        steps: the horizon T.
        rebuilds: kernels built after the first.
        order: 2 builds a kernel at the end of every segment, the last one included; 1 builds none
            at the horizon, so it has one segment more.

    Returns:
        Increasing step numbers, the last equal to `steps`.

    Example:
        >>> segment_ends(150, 4)
        (3, 22, 68, 150)
    """
    check_integer("rebuilds", rebuilds, at_least=0)
    segments = max(1, rebuilds if order == 2 else rebuilds + 1)
    segments = min(segments, steps)
    ends: list[int] = []
    for k in range(1, segments + 1):
        wanted = round(steps * (k / segments) ** PLACEMENT)
        least = ends[-1] + 1 if ends else 1
        ends.append(min(max(wanted, least), steps - (segments - k)))
    return tuple(ends)


PLACEMENT = 2.75
"""Segment k of K ends at T (k/K)^PLACEMENT."""


class _Network:
    """The network at the data: outputs and products with its Jacobian, compiled once, counted."""

    def __init__(self, apply_fn: ApplyFn, x: Any, kernel_fn: Callable[[Params], Array]) -> None:
        self._outputs = jax.jit(lambda w: apply_fn(w, x))
        self._pull = jax.jit(lambda w, a: jax.vjp(lambda v: apply_fn(v, x), w)[1](a)[0])
        self._push = jax.jit(lambda w, v: jax.jvp(lambda u: apply_fn(u, x), (w,), (v,))[1])
        self._kernel = kernel_fn
        self.passes = 0
        self.kernels = 0

    def outputs(self, params: Params) -> Array:
        return self._outputs(params)

    def pull(self, params: Params, cotangent: Array) -> Params:
        """J^T a at `params`."""
        self.passes += 1
        return self._pull(params, cotangent)

    def push(self, params: Params, tangent: Params) -> Array:
        """J v at `params`."""
        self.passes += 1
        return self._push(params, tangent)

    def kernel(self, params: Params) -> Array:
        self.kernels += 1
        return check_finite_value("kernel", self._kernel(params))


class _Start(NamedTuple):
    """Where a segment starts.

    `vectors` are the weight-space vectors that coefficients refer to: the weights, then one
    accumulator for every parameter-like leaf of the optimiser's state.
    """

    point: Params
    kernel: Array
    vectors: list[Params]
    f: Array
    state: optax.OptState


class _Knot(NamedTuple):
    """A point of linearisation: its kernel, and J v there for the vectors of the start."""

    point: Params
    kernel: Array
    pushed: Array


class _Result(NamedTuple):
    """A finished segment; `rows` are the coefficients of the weights and of the accumulators."""

    train: Array
    rows: list[Array]
    state: optax.OptState
    diverged_at: Array


def relinearized_recursion(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    loss: str | Loss,
    optimizer: optax.GradientTransformation,
    steps: int,
    kernel_fn: Callable[[Params], Array],
    rebuilds: int,
    order: int = 2,
    ends: tuple[int, ...] | None = None,
    batch_size: int | None = None,
    key: Array | None = None,
    protocol: str = "epochs",
    progress: Callable[[int, int], None] | None = None,
) -> RelinearizedTrajectory:
    """The dual recursion with the kernel rebuilt along the predicted path.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: the weights before training.
        x: samples (N, ...).
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.
        optimizer: a linear optax transformation, as in `recursion`.
        steps: number of steps T.
        kernel_fn: ``params -> Theta``, (N, C, N, C) or (N, N), exact or sketched.
        rebuilds: kernels built after the first one.
        order: 1 or 2.
        ends: where segments end, in place of `segment_ends`.
        batch_size: samples a step; all of them when None.
        key: a `jax.random.key`, needed with `batch_size`.
        protocol: how batches are drawn, see `batch_indices`.
        progress: called with (kernels built, kernels in all).

    Returns:
        A `RelinearizedTrajectory`.

    Raises:
        ValueError: an optimiser that is not linear, bad labels, segments not ending at `steps`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jaxttp.ntk import empirical_ntk
        >>> f, w, x = lambda w, x: jnp.tanh(x @ w), jnp.zeros((2, 1)), jnp.eye(2)
        >>> path = relinearized_recursion(
        ...     f, w, x, jnp.ones((2, 1)), loss="squared_error", optimizer=optax.sgd(0.5), steps=10,
        ...     kernel_fn=lambda w: empirical_ntk(f, w, x), rebuilds=2)
        >>> path.ends, path.train.shape
        ((1, 10), (11, 2, 1))

    Source:
        Ours: no paper has it. Measured against real training in experiments/bench.
    """
    check_integer("steps", steps, at_least=1)
    check_integer("rebuilds", rebuilds, at_least=1)
    if order not in (1, 2):
        raise ValueError(f"order must be 1 or 2; got {order!r}.")
    if ends is None:
        ends = segment_ends(steps, rebuilds, order=order)
    if ends[-1] != steps or any(b <= a for a, b in itertools.pairwise((0, *ends))):
        raise ValueError(f"ends must increase from above 0 to steps={steps}; got {ends}.")
    network = _Network(apply_fn, x, kernel_fn)
    f = network.outputs(params)
    targets, loss = encode_targets(loss, y, f)
    indices = None
    if batch_size is not None:
        indices = batch_indices(key, f.shape[0], batch_size, steps, protocol=protocol)

    decays = linear_filter(optimizer).weight_decay is not False
    slots = len(_slots(optimizer, optimizer.init(jnp.zeros(1, f.dtype))))
    state = optimizer.init(jnp.zeros(2 * f.size + 1 + slots, f.dtype))
    run = _runner(loss, optimizer, targets, indices)
    kernels = len(ends) + (order == 2)

    vectors = [params, *[jax.tree.map(jnp.zeros_like, params)] * slots]
    here = _Start(params, network.kernel(params), vectors, f, state)
    train = jnp.zeros((steps + 1, *f.shape), f.dtype).at[0].set(f)
    provisional, alive = train, jnp.asarray(True)
    diverged_at = jnp.asarray(-1)
    for start, end in itertools.pairwise((0, *ends)):
        if progress is not None:
            progress(network.kernels, kernels)
        in_use = [decays, *[start > 0] * slots]
        knots = [_Knot(here.point, here.kernel, _push_all(network, here, here.point, in_use))]
        result = run(knots, here, start, end, train)
        provisional = provisional.at[start + 1 : end + 1].set(result.train[start + 1 : end + 1])
        if order == 2:
            point = _combine(network, knots, here.vectors, result.rows[0])
            pushed = _push_all(network, here, point, in_use)
            knots.append(_Knot(point, network.kernel(point), pushed))
            result = run(knots, here, start, end, train)
        train = result.train
        diverged_at = jnp.where(alive & (result.diverged_at >= 0), result.diverged_at, diverged_at)
        alive = diverged_at < 0
        if end == steps and order == 1:
            break
        vectors = [_combine(network, knots, here.vectors, row) for row in result.rows]
        f = network.outputs(vectors[0])
        f = jnp.where(alive & jnp.all(jnp.isfinite(f)), f, train[end])
        train = train.at[end].set(f)
        point, kernel = knots[-1][:2]
        if order == 1:
            point, kernel = vectors[0], network.kernel(vectors[0])
        here = _Start(point, kernel, vectors, f, result.state)
    if progress is not None:
        progress(kernels, kernels)
    ts = jnp.arange(steps + 1, dtype=f.dtype)
    if order == 1:
        provisional = train
    return RelinearizedTrajectory(
        ts, train, provisional, ends, diverged_at, network.kernels, network.passes
    )


def _push_all(network: _Network, here: _Start, point: Params, in_use: list[bool]) -> Array:
    """J v at `point` for every vector that can enter the outputs, else zeros: (k, N, C)."""
    pairs = zip(in_use, here.vectors, strict=True)
    products = [network.push(point, v) if use else jnp.zeros_like(here.f) for use, v in pairs]
    return jnp.stack(products)


def _combine(network: _Network, knots: list[_Knot], vectors: list[Params], row: Array) -> Params:
    """The weight-space vector whose coefficients are `row`."""
    size = knots[0].pushed[0].size
    shape = knots[0].pushed.shape[1:]
    first, last, carried = row[:size], row[size : 2 * size], row[2 * size :]
    if len(knots) == 1:
        total = network.pull(knots[0].point, (first + last).reshape(shape))
    else:
        parts = zip(knots, (first, last), strict=True)
        pulled = [network.pull(knot.point, part.reshape(shape)) for knot, part in parts]
        total = jax.tree.map(jnp.add, *pulled)
    for weight, vector in zip(carried, vectors, strict=True):
        total = jax.tree.map(lambda a, b, w=weight: a + w.astype(a.dtype) * b, total, vector)
    return total


def _slots(optimizer: optax.GradientTransformation, state: optax.OptState) -> list[Array]:
    """The leaves of an optimiser's state that are shaped like its parameters (accumulators)."""
    found: list[Array] = []
    optax.tree_utils.tree_map_params(optimizer, lambda leaf: found.append(leaf) or leaf, state)
    return found


def _runner(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    targets: Array,
    indices: Array | None,
) -> Callable[..., _Result]:
    """One segment of the recursion, from `start` to `end`, compiled once for all segments.

    With two knots the kernel at time tau in [0, 1] of the segment is (1 - tau) Theta_s + tau
    Theta_e, and a gradient met at tau enters the weights through J(tau) = (1 - tau) J_s + tau J_e.
    An update made at tau of gradients met earlier moves the outputs by J(tau) J(earlier)^T, for
    which the mean of both kernels stands, exact to second order in its symmetric part.
    """
    size = targets.size

    @jax.jit
    def run(knots: list[_Knot], here: _Start, start: Array, end: Array, train: Array) -> _Result:
        count = len(here.vectors)
        unit = jnp.eye(count, dtype=targets.dtype)
        zero = jnp.zeros(2 * size, targets.dtype)
        rows = iter([jnp.concatenate([zero, unit[k]]) for k in range(1, count)])
        state = optax.tree_utils.tree_map_params(optimizer, lambda _: next(rows), here.state)
        weights = jnp.concatenate([zero, unit[0]])

        def step(t: Array, carry: tuple) -> tuple:
            weights, state, f, train, diverged_at = carry
            tau = ((t - start) / (end - start)).astype(f.dtype)
            batch = None if indices is None else indices[t]
            gradient = dual_gradient(loss, f, targets, batch).reshape(-1)
            split = [(1 - tau) * gradient, tau * gradient, jnp.zeros(count, f.dtype)]
            updates, state = optimizer.update(jnp.concatenate(split), state, weights)
            new_f = f + _move(knots, jnp.asarray(updates), tau, targets.shape)
            weights = optax.apply_updates(weights, updates)
            good = (diverged_at < 0) & jnp.all(jnp.abs(new_f) < output_limit(f.dtype))
            diverged_at = jnp.where(good | (diverged_at >= 0), diverged_at, t + 1)
            f = jnp.where(good, new_f, f)
            return weights, state, f, train.at[t + 1].set(f), diverged_at

        first = (weights, state, here.f, train, jnp.asarray(-1))
        weights, state, _, train, diverged_at = jax.lax.fori_loop(start, end, step, first)
        return _Result(train, [weights, *_slots(optimizer, state)], state, diverged_at)

    return run


def _move(knots: list[_Knot], updates: Array, tau: Array, shape: tuple[int, ...]) -> Array:
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
