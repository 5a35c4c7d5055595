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
import itertools
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
from jaxttp.dynamics.preconditioned import PreconditionedFilter
from jaxttp.dynamics.recursion import Followed, Linearization, Motion, follow
from jaxttp.dynamics.relinearize.controller import CONTROLS
from jaxttp.dynamics.relinearize.edge import Damping, damping, is_nonlinear
from jaxttp.dynamics.relinearize.scaling import ScaledMotion, Scaling, Steps, next_scaling
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

    def damping(
        self, kernel: Kernel, f: Array, step: int, scaling: Scaling | None = None
    ) -> tuple[Damping | None, float]:
        """The damping for the next steps with this kernel, and its curvature over the limit."""
        if not self.damps:
            return None, 0.0
        limit = float(np.min(self.limits[min(step, self.steps - 1) :][:HORIZON]))
        if scaling is not None and self.preconditioner is not None:  # clipped steps are smaller
            limit /= self.preconditioner.kept(scaling.squares)
        return damping(kernel, f, self.targets, self.loss, limit, CONTROLS.damped)

    def diagonals(self, scaling: Scaling | None) -> list[Params]:
        """The further argument of the kernel's functions: none for a diagonal of 1."""
        is_one = self.preconditioner is None or self.preconditioner.is_constant
        return [] if scaling is None or is_one else [scaling.diagonal]

    def losses(self, *outputs: Array) -> list[float]:
        """The loss of each of these outputs (N, C)."""
        return [float(self.loss.value(f, self.targets)) for f in outputs]


RISE = 2.0
"""Behind a diagonal, a segment whose end has a loss of this many times its start's is shortened."""
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


def motion_of(
    setup: Setup, ends: list[Linearization], *more: Any, steps: Steps | None = None
) -> Motion:
    """How outputs move between these linearizations; `steps` are those behind a diagonal."""
    preconditioner = setup.preconditioner
    if preconditioner is None:
        return Motion(ends, *more)
    dtype, norms = more[0].dtype, None
    if steps is not None and np.isfinite(preconditioner.max_norm):
        norms = jax.device_put((preconditioner.max_norm / np.sqrt(steps.ratios)).astype(dtype))
    factors = np.ones(setup.steps) if steps is None else steps.factors
    numbers = [jax.device_put(rows.astype(dtype)) for rows in (preconditioner.decay, factors)]
    return ScaledMotion(ends, *more, decay=numbers[0], factors=numbers[1], norms=norms)


def combine(
    setup: Setup, state: State, points: list[Params], duals: np.ndarray, weights: np.ndarray
) -> Params:
    """The sum of J^T duals (N C each) at these points and of the state's vectors.

    Args:
        setup: constants of the path.
        state: its current point.
        points: weights.
        duals: one for each; more are not used.
        weights: of the state's weights and accumulators.
    """
    setup.costs.products += len(points)
    one, total = np.ones((), duals.dtype), None
    for point, dual in zip(points, duals, strict=False):
        f = jax.device_put(dual.reshape(state.outputs.shape))
        part = setup.pull(point, setup.x, f)
        total = part if total is None else add_scaled(total, one, part)
    for weight, vector in zip(weights, [state.weights, *state.velocities], strict=False):
        total = total if vector is None else add_scaled(total, weight, vector)
    return total


def split(setup: Setup, state: State, row: Array | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of J^T (., N C), and of the carried vectors; see `Motion`, `ScaledMotion`."""
    copies = 1 if setup.preconditioner is None else 2
    carried = 1 + copies * len(state.velocities)
    duals, weights = np.split(np.asarray(row), [-carried])
    return duals.reshape(-1, state.outputs.size), weights


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
    duals, weights = split(setup, state, row)
    if setup.preconditioner is None:
        return combine(setup, state, points, duals, weights)
    scalings = [scaling for scaling in (state.scaling, far) if scaling is not None]
    roots = [jax.tree.map(jnp.sqrt, scaling.diagonal) for scaling in scalings]
    own = weights[1:].reshape(2, -1)  # of the accumulators at each end
    one, none = np.ones((), duals.dtype), np.zeros((), duals.dtype)
    decaying = setup.preconditioner.select(state.weights, decaying=True)
    total = add_scaled(state.weights, weights[0] - one, decaying)
    pairs = itertools.product(range(len(points)), range(len(points)))
    for dual, (applied, taken) in zip(duals, pairs, strict=True):
        carried = np.append(none, own[taken]) if applied == taken else np.zeros(1, none.dtype)
        gradient = combine(setup, state, [points[taken]], dual[None], carried)
        total = add_scaled(total, one, scale(roots[applied], scale(roots[taken], gradient)))
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
    steps = None if state.scaling is None else Steps.of_start(state.scaling, setup.steps)
    motion = motion_of(setup, [state.linearization], state.outputs, steps=steps)
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
    if setup.preconditioner is not None:  # where it diverges, lengths say nothing
        loss = np.asarray(curves(ahead.records, setup.targets, setup.loss)[0], np.float64)
        is_risen = ~(loss <= RISE * loss[state.step]) & (length > 0)
        has_risen = np.cumsum(is_risen) > 0
        most = np.max(length, where=~has_risen, initial=0.0)
        length = np.where(has_risen, np.fmin(length, most), length)
    first, last = setup.losses(setup.f0, at(ahead.records, setup.steps))
    # A path that diverges would make any error look small.
    decrease, path = min(abs(first - last), abs(first)), np.cumsum(length)
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
    length = ahead.path - ahead.path[state.step]
    tau = np.clip(length / (length[end] if length[end] > 0 else 1.0), 0.0, 1.0)
    scaling = steps = None
    if state.scaling is not None:
        f = setup.outputs(point, setup.x)
        if limit < np.inf and _rises(setup, state, f):
            return lost
        if end > state.step + 1:  # the outputs of the path: at `point` stiff modes are off
            f = at(ahead.train, end)
        scaling, steps = _far_scaling(setup, state, ahead.train, point, f, tau, end)
    kernel = setup.kernel_fn(point, *setup.diagonals(scaling))
    setup.costs.kernels += 1
    if not bool(_is_finite(kernel)):
        return lost
    damped, sharpness = None, 0.0
    if setup.damps and bool(is_nonlinear(state.linearization.kernel, kernel)):
        damped, sharpness = setup.damping(kernel, at(ahead.train, end), end, scaling)
    position = jax.device_put(tau.astype(row.dtype))
    segment = Segment(end, [state.point, point], kernel, damped, position, scaling)
    far = linearize(setup, state, kernel, point, damped, scaling)
    forcing = jax.device_put(np.zeros_like(state.outputs))
    ends = [state.linearization, far]
    motion = motion_of(setup, ends, state.outputs, position, forcing, steps=steps)
    corrected = run(setup, state, motion, end, keep=setup.x_test is not None)
    error = _change(setup, ahead, corrected.records, state.step, end)
    if not error <= limit:
        return Step(Outcome.REJECTED, error)
    # A path that comes back below the edge keeps its damped segments; otherwise they are dropped.
    # Behind a diagonal the edge is where training stays, and no earlier kernel serves longer.
    if sharpness > 1 and end == setup.steps and setup.preconditioner is None:
        return Step(Outcome.FROZEN, error, sharpness=sharpness)
    arrival = _correct(setup, state, segment, motion, corrected)
    if scaling is not None:
        has_risen = _rises(setup, state, arrival.outputs)
        if has_risen and limit < np.inf:
            return lost
        # Without any correction, then; but for the first step, along the gradient's signs.
        if has_risen and 0 < state.step < end - 1:
            return Step(Outcome.FROZEN, error, sharpness=sharpness)
    if scaling is not None and end < setup.steps:
        # The optimizer's state is by the gradients of the corrected path.
        weights, f = arrival.weights, arrival.outputs
        true, _ = _far_scaling(setup, state, arrival.run.records, weights, f, tau, end)
        segment = segment._replace(scaling=true._replace(diagonal=scaling.diagonal))
    return Step(Outcome.ACCEPTED, error, segment, arrival, sharpness)


def _rises(setup: Setup, state: State, f: Array) -> bool:
    """Whether the loss of outputs is `RISE` times that of the state's, or not finite."""
    now, then = setup.losses(state.outputs, f)
    return not then <= RISE * now


def _far_scaling(
    setup: Setup, state: State, train: Array, point: Params, f: Array, tau: np.ndarray, end: int
) -> tuple[Scaling, Steps]:
    """The diagonal at the end of a segment, with outputs f, and the numbers of its steps."""
    assert setup.preconditioner is not None
    assert setup.squares is not None
    assert state.scaling is not None
    squares = setup.squares(point, f)
    setup.costs.products += 1 if setup.indices is None else 2
    sizes = np.asarray(_gradient_sizes(train, setup.targets, setup.loss), np.float64)
    first, last = sizes[state.step], sizes[end]
    # Squares of gradients follow those of the outputs' gradients between both ends.
    position = (np.arange(len(sizes)) - state.step) / (end - state.step)
    fractions = 1 - position if first == last else (sizes - last) / (first - last)
    return next_scaling(
        setup.preconditioner, state.scaling, point, squares, np.clip(fractions, 0.0, 1.0)[:-1],
        tau, state.step, end,
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
