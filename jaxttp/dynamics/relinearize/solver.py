"""One step of the integrator: a segment of the path in second order, and its outcome.

The path is that of w' = -J(w)^T g. Within a segment the linearized dynamics are solved exactly, by
the recursion, with the kernel interpolated between both ends: an exponential Heun method. The end
is first predicted with the kernel at the start alone; the change by the correction is the error
estimate. Then the network is evaluated at the corrected end. The defect, its outputs minus the
linearized ones, drives the segment once more as a forcing: along stiff directions training
contracts it at once, whereas a defect added afterwards would stay. The small remaining defect is
added (`integrate`).
"""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxttp._core.checks import all_finite
from jaxttp._core.compile import jit
from jaxttp._core.types import Params
from jaxttp.dynamics._kernels import apply_kernel
from jaxttp.dynamics._network import add_scaled, inner, scale
from jaxttp.dynamics._trajectory import curves
from jaxttp.dynamics.optimizers import Optimizer, inlined
from jaxttp.dynamics.preconditioned import (
    PreconditionedFilter,
    ScaledMotion,
    Scaling,
    next_scaling,
)
from jaxttp.dynamics.recursion import Followed, Linearization, Motion, follow
from jaxttp.dynamics.relinearize.controller import CONTROLS
from jaxttp.dynamics.relinearize.edge import Damping, damping, is_nonlinear
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel


class Outcome(enum.Enum):
    """The outcome of a step."""

    ACCEPTED = "the segment is part of the path"
    REJECTED = "its error is too large: a shorter one is tried next"
    FROZEN = "the path stays beyond the edge of stability: a kernel from before it is kept"
    DIVERGED = "outputs or kernel are not finite: the last finite outputs are kept"


@dataclasses.dataclass
class Costs:
    """The cost so far: kernels, Jacobian products over all samples, recursion steps."""

    kernels: int = 0
    products: int = 0
    steps: int = 0


@dataclasses.dataclass(frozen=True)
class Setup:
    """The constants of a path.

    Attributes:
        outputs: (weights, x) -> f (N, C).
        pull: (weights, x, a) -> J^T a.
        push: (weights, x, v) -> J v.
        x: samples.
        f0: outputs before training (N, C).
        targets: encoded.
        loss: of outputs.
        kernel_fn: weights -> Theta; (weights, diagonal) -> Theta with a preconditioner.
        optimizer: see `same_program`.
        steps: the horizon T.
        limits: the largest stable curvature at every step (T,).
        decays: whether the weights themselves enter the outputs, as with weight decay.
        damps: whether modes beyond the edge of stability are damped.
        indices: the batches (T, B); None for full batches.
        x_test: test samples, or None.
        cross_fn: Theta(x_test, x) of the same arguments, with them.
        preconditioner: of an optimizer with a diagonal, whose filter `optimizer` is; or None.
        squares: (weights, outputs) -> mean squares of the gradients of batches, with it.
        costs: counted as they arise.
    """

    outputs: Callable[[Params, Any], Array]
    pull: Callable[[Params, Any, Array], Params]
    push: Callable[[Params, Any, Params], Array]
    x: Any
    f0: Array
    targets: Array
    loss: Loss
    kernel_fn: Callable[..., Kernel]
    optimizer: Optimizer
    steps: int
    limits: np.ndarray
    decays: bool
    damps: bool
    indices: Array | None = None
    x_test: Any = None
    cross_fn: Callable[..., Kernel] | None = None
    preconditioner: PreconditionedFilter | None = None
    squares: Callable[[Params, Array], Params] | None = None
    costs: Costs = dataclasses.field(default_factory=Costs)

    def damping(self, kernel: Kernel, f: Array, step: int) -> tuple[Damping | None, float]:
        """The damping for the next steps with this kernel, and its curvature over the limit."""
        if not self.damps:
            return None, 0.0
        limit = float(np.min(self.limits[min(step, self.steps - 1) :][:HORIZON]))
        return damping(kernel, f, self.targets, self.loss, limit, CONTROLS.damped)

    def losses(self, *outputs: Array) -> list[float]:
        """The loss of each of these outputs (N, C)."""
        return [float(self.loss.value(f, self.targets)) for f in outputs]


RISE = 2.0
"""A segment whose predicted end has a loss of this many times its start's is taken shorter."""
HORIZON = 64
"""Steps ahead whose limits of stability count: a schedule's rate may rise soon. A rule of thumb."""


class State(NamedTuple):
    """The current point of a path.

    Attributes:
        step: the step.
        point: weights near those of the path, where the kernel is computed: the predicted end of
            the segment before. A kernel at its corrected end would be one more.
        linearization: of the network at `point`.
        weights: of the path.
        velocities: the optimizer's accumulators, in weight space; None for zero.
        outputs: of the network at the path's weights (N, C).
        optimizer: its state with one parameter, of which only the counters are used.
        scaling: the preconditioner's diagonal at `point`, or None.
    """

    step: int
    point: Params
    linearization: Linearization
    weights: Params
    velocities: tuple[Params | None, ...]
    outputs: Float[Array, "n c"]
    optimizer: optax.OptState
    scaling: Scaling | None = None

    @property
    def diagonals(self) -> list[Params]:
        """The arguments of kernels beside the weights."""
        return [] if self.scaling is None else [self.scaling.diagonal]


class Prediction(NamedTuple):
    """A run from a state to the horizon with the current kernel.

    Attributes:
        train: outputs (T + 1, N, C), from the state's step on.
        coefficients: of the weights (T + 1, N C + 1 + k), likewise.
        diverged_at: see `Followed`.
        path: the length of the path through weight space from the state to every step (T + 1,).
        decrease: of the loss, from step 0 to the horizon.
    """

    train: Array
    coefficients: Array
    diverged_at: int
    path: np.ndarray
    decrease: float


class Segment(NamedTuple):
    """A segment between two linearizations.

    Attributes:
        end: its last step.
        points: weights at its linearizations, the first at its start.
        kernel: at the second.
        damping: at the second.
        tau: the position of every step between both (T + 1,), as a fraction of the predicted path
            length; the first steps of a long segment cover most of it.
        scaling: at the second, or None.
    """

    end: int
    points: list[Params]
    kernel: Kernel
    damping: Damping | None
    tau: Float[Array, " t"]
    scaling: Scaling | None = None


class Arrival(NamedTuple):
    """The end of a segment.

    Attributes:
        run: the run of the recursion.
        weights: at its end.
        outputs: of the network at these weights.
    """

    run: Followed
    weights: Params
    outputs: Array


class Step(NamedTuple):
    """The result of a step.

    Attributes:
        outcome: which of the fields count.
        error: the largest change of the losses by the correction, as a fraction of the decrease.
        segment: the accepted segment,
        arrival: and its end.
        sharpness: the curvature at its end as a multiple of the limit.
    """

    outcome: Outcome
    error: float = np.inf
    segment: Segment | None = None
    arrival: Arrival | None = None
    sharpness: float = 0.0


_is_finite = jit(all_finite)


@jit
def at(path: Array, step: Any) -> Array:
    """A row, by one compiled function for all steps."""
    return path[step]


def linearize(
    setup: Setup,
    state: State,
    kernel: Kernel,
    point: Params,
    damping: Damping | None,
    far: Scaling | None = None,
) -> Linearization:
    """The linearization at a point, for the vectors that the state carries."""
    pushed = push_carried(setup, state, point, setup.x, state.outputs, far)
    return Linearization(kernel, pushed, damping)


def push_carried(
    setup: Setup, state: State, point: Params, x: Any, like: Array, far: Scaling | None = None
) -> Array:
    """J v at a point (k, ., C) for the carried vectors, zero for a vector that is None."""
    vectors = _carried(setup, state, far)
    setup.costs.products += sum(vector is not None for vector in vectors)
    none = np.zeros(like.shape, like.dtype)
    # NumPy stacks without a compiled function for every number of vectors.
    pushed = [none if v is None else np.asarray(setup.push(point, x, v)) for v in vectors]
    return jax.device_put(np.stack(pushed))


def _carried(setup: Setup, state: State, far: Scaling | None = None) -> list[Params | None]:
    """The weights, where they enter the outputs, and the velocities; see `ScaledMotion`."""
    weights, velocities = state.weights if setup.decays else None, list(state.velocities)
    if setup.preconditioner is None or state.scaling is None:
        return [weights, *velocities]
    diagonal = (state.scaling if far is None else far).diagonal
    scaled = [None if m is None else scale(diagonal, m) for m in velocities]
    none: list[Params | None] = [None] * len(velocities)
    if weights is not None:
        weights = setup.preconditioner.select(weights, decaying=True)
    return [weights, *(scaled + none if far is None else none + scaled)]


def motion_of(setup: Setup, ends: list[Linearization], *more: Any) -> Motion:
    """How outputs move between these linearizations."""
    if setup.preconditioner is None:
        return Motion(ends, *more)
    decay = jax.device_put(setup.preconditioner.decay.astype(more[0].dtype))
    return ScaledMotion(ends, *more, decay=decay)


def combine(setup: Setup, state: State, points: list[Params], row: Array | np.ndarray) -> Params:
    """The vector of weight space with these coefficients, see `Motion`."""
    row = np.asarray(row)
    duals, weights = np.split(row, [len(points) * state.outputs.size])
    duals = duals.reshape(-1, *state.outputs.shape)
    setup.costs.products += len(points)
    total = setup.pull(points[0], setup.x, jax.device_put(duals[0]))
    for point, dual in zip(points[1:], duals[1:], strict=True):
        part = setup.pull(point, setup.x, jax.device_put(dual))
        total = add_scaled(total, np.ones((), row.dtype), part)
    vectors = [state.weights, *state.velocities]
    for weight, vector in zip(weights, vectors, strict=setup.preconditioner is None):
        total = total if vector is None else add_scaled(total, weight, vector)
    return total


def new_weights(
    setup: Setup,
    state: State,
    points: list[Params],
    row: Array | np.ndarray,
    far: Scaling | None = None,
) -> Params:
    """The weights with these coefficients, see `Motion` and `ScaledMotion`.

    Args:
        setup: constants of the path.
        state: its current point.
        points: weights at one or two linearizations.
        row: the coefficients.
        far: the diagonal at the second one.
    """
    if setup.preconditioner is None:
        return combine(setup, state, points, row)
    diagonals = [*state.diagonals, *([] if far is None else [far.diagonal])]
    row = np.asarray(row)
    duals, weights = np.split(row, [len(points) * state.outputs.size])
    duals, k = duals.reshape(len(points), -1), len(state.velocities)
    decaying = setup.preconditioner.select(state.weights, decaying=True)
    total = add_scaled(state.weights, weights[0] - np.ones((), row.dtype), decaying)
    for i, (point, dual, diagonal) in enumerate(zip(points, duals, diagonals, strict=True)):
        own = np.concatenate([dual, np.zeros(1, row.dtype), weights[1 + i * k :][:k]])
        part = combine(setup, state, [point], own)
        total = add_scaled(total, np.ones((), row.dtype), scale(diagonal, part))
    return total


def run(setup: Setup, state: State, motion: Motion, end: int, *, keep: bool = False) -> Followed:
    """The recursion from a state to step `end`; with its coefficients if `keep`."""
    setup.costs.steps += end - state.step
    return inlined(_run, setup.optimizer)(
        setup.optimizer, setup.loss, motion, state.optimizer, setup.targets, setup.indices,
        state.step, end, steps=setup.steps, keep=keep,
    )  # fmt: skip


@functools.partial(jit, static_argnames=("loss", "steps", "keep"))
def _run(
    optimizer: Optimizer,
    loss: Loss,
    motion: Motion,
    state: optax.OptState,
    targets: Array,
    indices: Array | None,
    start: Array,
    end: Array,
    *,
    steps: int,
    keep: bool,
) -> Followed:
    # The accumulators are in weight space (`State.velocities`): here the optimizer's state holds
    # coefficients of those vectors, initially one for each.
    carried = iter(range(1, len(motion.ends[0].pushed)))
    state = optax.tree_utils.tree_map_params(
        optimizer, lambda leaf: motion.unit(next(carried)).astype(leaf.dtype), state
    )
    f = motion.f
    followed = follow(
        optimizer, loss, motion, (motion.unit(0), state), targets, indices, start, end,
        records=jnp.zeros((steps + 1, *f.shape), f.dtype),
        coefficients=jnp.zeros((steps + 1, motion.size), f.dtype) if keep else None,
    )  # fmt: skip
    # A scalar for every accumulator, so that one compiled function serves all segments.
    counters = optax.tree_utils.tree_map_params(
        optimizer, lambda leaf: jnp.zeros((), leaf.dtype), followed.state
    )
    return followed._replace(state=counters)


def predict(setup: Setup, state: State) -> Prediction:
    """The path to the horizon with the current kernel."""
    motion = motion_of(setup, [state.linearization], state.outputs)
    ahead = run(setup, state, motion, setup.steps, keep=True)
    carried = _carried(setup, state)
    others = carried
    if setup.preconditioner is not None:  # lengths in the diagonal's metric
        none = [None] * len(state.velocities)
        carried, others = [None, *carried[1:]], [None, *state.velocities, *none]
    products = np.array([
        [0.0 if a is None or b is None else float(inner(a, b)) for b in others] for a in carried
    ])  # fmt: skip
    assert ahead.coefficients is not None  # they are kept
    length = np.asarray(_lengths(state.linearization, ahead.coefficients, products), np.float64)
    length = np.where(np.arange(len(length)) > state.step, length, 0.0)
    first, last = setup.losses(setup.f0, at(ahead.records, setup.steps))
    decrease, path = abs(first - last), np.cumsum(length)
    return Prediction(ahead.records, ahead.coefficients, int(ahead.diverged_at), path, decrease)


@jit
def _lengths(linearization: Linearization, coefficients: Array, products: Array) -> Array:
    """The length in weight space of every step's update (T + 1,)."""
    updates = jnp.diff(coefficients, axis=0, prepend=coefficients[:1])
    k, shape = len(linearization.pushed), linearization.pushed.shape[1:]
    dual, carried = updates[:, :-k].reshape(-1, *shape), updates[:, -k:]
    square = jnp.sum(dual * apply_kernel(linearization.kernel, dual), (1, 2))
    square = square + 2 * jnp.einsum("tk,tnc,knc->t", carried, dual, linearization.pushed)
    square = square + jnp.einsum("tk,kj,tj->t", carried, products.astype(dual.dtype), carried)
    return jnp.sqrt(jnp.maximum(square, 0.0))


def step(setup: Setup, state: State, ahead: Prediction, end: int, limit: float) -> Step:
    """Take the segment from a state to step `end`.

    Args:
        setup: constants of the path.
        state: the current point of the path.
        ahead: the prediction from this point.
        end: the segment's last step.
        limit: the largest acceptable error; infinite where no shorter segment is left to try.
    """
    row = np.asarray(at(ahead.coefficients, end))
    lost = Step(Outcome.DIVERGED if limit == np.inf else Outcome.REJECTED)
    if not np.all(np.isfinite(row)):
        return lost
    point = new_weights(setup, state, [state.point], row)
    scaling = None
    if state.scaling is not None:
        f = setup.outputs(point, setup.x)
        now, then = setup.losses(state.outputs, f)
        if limit < np.inf and not then <= RISE * now:
            return lost
        scaling = _far_scaling(setup, state, ahead, point, f, end)
    kernel = setup.kernel_fn(point, *([] if scaling is None else [scaling.diagonal]))
    setup.costs.kernels += 1
    if not bool(_is_finite(kernel)):
        return lost
    damped, sharpness = None, 0.0
    if setup.damps and bool(is_nonlinear(state.linearization.kernel, kernel)):
        damped, sharpness = setup.damping(kernel, at(ahead.train, end), end)
    length = ahead.path - ahead.path[state.step]
    fractions = np.clip(length / (length[end] if length[end] > 0 else 1.0), 0.0, 1.0)
    tau = jax.device_put(fractions.astype(row.dtype))
    segment = Segment(end, [state.point, point], kernel, damped, tau, scaling)
    far = linearize(setup, state, kernel, point, damped, scaling)
    forcing = jax.device_put(np.zeros_like(state.outputs))
    motion = motion_of(setup, [state.linearization, far], state.outputs, tau, forcing)
    corrected = run(setup, state, motion, end, keep=setup.x_test is not None)
    error = _change(setup, ahead, corrected.records, state.step, end)
    if not error <= limit:
        return Step(Outcome.REJECTED, error)
    # A path that comes back below the edge keeps its damped segments; otherwise they are dropped.
    # Behind a diagonal the edge is where training stays, and no earlier kernel serves longer.
    if sharpness > 1 and end == setup.steps and setup.preconditioner is None:
        return Step(Outcome.FROZEN, error, sharpness=sharpness)
    arrival = _correct(setup, state, segment, motion, corrected)
    return Step(Outcome.ACCEPTED, error, segment, arrival, sharpness)


def _far_scaling(
    setup: Setup, state: State, ahead: Prediction, point: Params, f: Array, end: int
) -> Scaling:
    """The preconditioner's diagonal at the predicted end of a segment, with outputs f."""
    assert setup.preconditioner is not None
    assert setup.squares is not None
    assert state.scaling is not None
    squares = setup.squares(point, f)
    sizes = np.asarray(_gradient_sizes(ahead.train, setup.targets, setup.loss), np.float64)
    first, last = sizes[state.step], sizes[end]
    # Squares of gradients follow those of the outputs' gradients between both ends.
    position = (np.arange(len(sizes)) - state.step) / (end - state.step)
    fractions = 1 - position if first == last else (sizes - last) / (first - last)
    return next_scaling(
        setup.preconditioner, state.scaling, point, squares, np.clip(fractions, 0.0, 1.0)[:-1],
        state.step, end,
    )  # fmt: skip


@functools.partial(jit, static_argnames="loss")
def _gradient_sizes(train: Array, targets: Array, loss: Loss) -> Array:
    """The squared norm of the loss's gradient along outputs (T + 1,)."""
    return jax.vmap(lambda f: jnp.sum(loss.gradient(f, targets) ** 2))(train)


def _correct(
    setup: Setup, state: State, segment: Segment, motion: Motion, followed: Followed
) -> Arrival:
    """The end of a segment; the segment is run again where the network's outputs differ there."""
    end = segment.end
    arrival = _arrive(setup, state, segment, followed)
    first, linearized, exact = setup.losses(setup.f0, at(followed.records, end), arrival.outputs)
    if abs(exact - linearized) <= CONTROLS.defect * abs(first - exact):
        return arrival
    defect = np.asarray(arrival.outputs) - np.asarray(at(followed.records, end))
    motion = dataclasses.replace(motion, forcing=jax.device_put(defect))
    followed = run(setup, state, motion, end, keep=followed.coefficients is not None)
    forced = _arrive(setup, state, segment, followed)
    # The forcing can overshoot: the run that agrees better with the network is kept.
    return forced if _gap(forced, end) < _gap(arrival, end) else arrival


def _arrive(setup: Setup, state: State, segment: Segment, followed: Followed) -> Arrival:
    row, points = followed.rows[0], segment.points
    weights = new_weights(setup, state, points, row, segment.scaling)
    return Arrival(followed, weights, setup.outputs(weights, setup.x))


def _gap(arrival: Arrival, end: int) -> float:
    """How far the network's outputs at a segment's end are from those of the recursion."""
    gap = np.asarray(arrival.outputs, np.float64) - np.asarray(at(arrival.run.records, end))
    return float(np.linalg.norm(gap)) if np.all(np.isfinite(gap)) else np.inf


def _change(setup: Setup, ahead: Prediction, train: Array, start: int, end: int) -> float:
    """The largest change of the losses by the correction, as a fraction of the decrease."""
    losses = (curves(path, setup.targets, setup.loss)[0] for path in (ahead.train, train))
    before, after = (np.asarray(loss, np.float64)[start : end + 1] for loss in losses)
    change = float(np.max(np.abs(before - after))) / max(ahead.decrease, 1e-30)
    return change if np.isfinite(change) else np.inf
