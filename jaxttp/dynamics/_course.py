"""What a re-linearised path consists of: its course, its state, and the network's part in it."""

import dataclasses
import enum
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import is_concrete
from jaxttp._core.compile import jit
from jaxttp._core.types import ApplyFn, Params
from jaxttp.dynamics._batch_edge import calm
from jaxttp.dynamics._central import MOST, NEAR, Guard, steepening
from jaxttp.dynamics._edge import Damping, damping, find_edge, slow_down
from jaxttp.dynamics._features import run_batches
from jaxttp.dynamics._kernels import apply_kernel
from jaxttp.dynamics._network import compile_network
from jaxttp.dynamics._offsets import Offset
from jaxttp.dynamics._pieces import add_vectors, split_row, surveyed, zeros
from jaxttp.dynamics._segment import Chord, Knot, Run, Start, run_segment
from jaxttp.dynamics.optimizers import Optimizer, inlined
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Factored, Kernel

LINEAR = 1e-3
"""Kernels that differ by less than this share are those of a linear network."""


class Outcome(enum.Enum):
    """What came of a step."""

    ACCEPTED = "the segment is part of the path"
    REJECTED = "its error is too large, so that nothing was taken"
    HELD = "a kernel was held to the horizon: the network stays at the edge, or denies the forecast"
    DIVERGED = "the network left the representable numbers: the last outputs that did not are held"


@dataclasses.dataclass(frozen=True)
class Course:
    """What does not change along a path.

    Attributes:
        apply_fn: the network.
        x: samples.
        kernel_fn: params -> Theta.
        loss: the loss.
        targets: as encoded.
        optimizer: see `same_program`.
        steps: the horizon T.
        indices: the batches (T, B), or None.
        noise: the batches whose noise damped steps must bear, or None for full batches.
        by_error: whether kernels are placed by error.
        shares: what the accumulators of a fresh state hold, as multiples of the weights.
        decays: whether the initial weights can enter the outputs.
        moving: whether accumulators came along.
        damps: whether modes beyond the edge of stability are damped.
        x_test: samples whose outputs are followed beside, or None.
        cross_fn: params -> Theta(x_test, x), with them.
    """

    apply_fn: ApplyFn
    x: Any
    kernel_fn: Callable[[Params], Kernel]
    loss: Loss
    targets: Array
    optimizer: Optimizer
    steps: int
    indices: Array | None
    shares: tuple[float, ...]
    decays: bool
    moving: bool
    damps: bool
    x_test: Any = None
    cross_fn: Callable[[Params], Kernel] | None = None
    noise: Array | None = None
    by_error: bool = False

    @property
    def central(self) -> bool:
        """Whether modes are held back at the edge of stability.

        Not where noise is followed; and only with kernels placed by error, since a given number of
        them mostly is too few to follow modes that turn.
        """
        return self.damps and self.by_error and self.indices is None and self.noise is None

    def in_use(self, state: "State") -> tuple[bool, ...]:
        """Which of the vectors that coefficients refer to can enter the outputs."""
        begun = (self.moving or state.start > 0 or share != 0 for share in self.shares)
        carried = (each and not dual for each, dual in zip(begun, state.gathered, strict=True))
        guards = 0 if state.guard is None else state.guard.modes
        return (self.decays, *carried, *(True for _ in range(guards)))


class Beside(NamedTuple):
    """Test samples along a path from step 0 to step `start`.

    Attributes:
        kernel: Theta(x_test, x) at the point of linearisation.
        f: outputs there (M, C).
        path: outputs (T + 1, M, C), filled up to `start`.
    """

    kernel: Kernel
    f: Array
    path: Array


class Crossing(NamedTuple):
    """Where a path first crosses the edge of stability, and what is held if it stays there.

    Attributes:
        start: of the segment that crosses it.
        run: from there to the horizon with the kernel at hand.
        test: the test samples along it (T + 1, M, C), or None.
    """

    start: int
    run: Run
    test: Array | None


class Surveyed(NamedTuple):
    """What `survey` found where a segment starts, for as long as the start is the same.

    Attributes:
        start: with the vectors.
        in_use: which of them.
        pushed: J v there (k, N, C).
        products: of the vectors (k, k).
    """

    start: Start
    in_use: tuple[bool, ...]
    pushed: Array
    products: Array

    def holds(self, start: Start, in_use: tuple[bool, ...]) -> bool:
        """Whether this is what would be found."""
        same = self.start.point is start.point and self.start.vectors is start.vectors
        return same and self.in_use == in_use


class State(NamedTuple):
    """A path from step 0 to step `start`.

    Attributes:
        here: the point of linearisation and what is carried there.
        damping: what keeps steps there stable, or None.
        train: outputs (T + 1, N, C), filled up to `start`.
        provisional: the same before the second-order correction.
        diverged_at: first step whose outputs could not be represented, or -1.
        ends: where segments end.
        crossing: the first segment that crosses the edge of stability; None for never.
        edge_at: the end of that segment, or -1.
        held_from: the step from which on a kernel is held, or -1.
        rejected: segments that were not taken.
        passes: products with a Jacobian so far.
        run: steps of the recursion that were run so far.
        seconds: of every kernel built so far.
        beside: the test samples, or None.
        sharpest: the largest curvature so far, as a multiple of the edge of stability; 0 where that
            is not looked at.
        guard: what holds modes back from here on, or None.
        central_from: the start of the first segment in which that came to bear, or -1.
        gathered: for every accumulator, whether it is J^T of coefficients alone (`Start.duals`).
        surveyed: what `survey` found at `here`, or None.
        bends: whether two kernels of the network were seen to differ, looked at where something is
            damped: one that is linear has no oscillation that holds it at the edge of stability,
            and its kernel is the truth beyond it.
        offset: what the last segment's corrected end was off its provisional one, or None.
    """

    here: Start
    damping: Damping | None
    train: Array
    provisional: Array
    diverged_at: Array
    ends: tuple[int, ...] = ()
    crossing: Crossing | None = None
    edge_at: int = -1
    held_from: int = -1
    rejected: int = 0
    passes: int = 0
    run: int = 0
    seconds: tuple[float, ...] = ()
    beside: Beside | None = None
    sharpest: float = 0.0
    guard: Guard | None = None
    central_from: int = -1
    gathered: tuple[bool, ...] = ()
    surveyed: "Surveyed | None" = None
    bends: bool = False
    offset: Offset | None = None

    @property
    def start(self) -> int:
        """The step where the next segment starts."""
        return self.ends[-1] if self.ends else 0

    @property
    def kernels(self) -> int:
        """Kernels built so far."""
        return len(self.seconds)


class Ahead(NamedTuple):
    """A run from here on with the kernel at hand alone, to `end`."""

    end: int
    knot: Knot
    products: Array
    run: Run

    @property
    def path(self) -> np.ndarray:
        """The length of the path through weight space up to every step (T + 1,), from here."""
        return np.cumsum(np.asarray(self.run.length, np.float64))


def run_to(
    course: Course,
    state: State,
    knots: list[Knot],
    products: Array,
    line: Chord | Array | None,
    end: int,
    defect: Array | None = None,
) -> tuple[State, Run]:
    """A run from where the path is to step `end`; the path itself stays as it is."""
    here = state.here
    defect = zeros(here.f.shape, here.f.dtype) if defect is None else defect
    runner = run_segment
    if course.indices is not None and all(isinstance(k.kernel, Factored) for k in knots):
        runner = run_batches
    run = inlined(runner, course.optimizer)(
        course.optimizer, course.loss, knots, here, products, line, state.start, end, state.train,
        course.targets, course.indices, defect,
        record=state.beside is not None, **({} if state.guard is None else {"guard": state.guard}),
    )  # fmt: skip
    return state._replace(run=state.run + end - state.start), run


def damping_at(course: Course, state: State, kernel: Kernel, f: Array) -> Damping | None:
    """What keeps steps with this kernel stable; nothing where that is not wanted."""
    if not course.damps:
        return None
    optimizer, shares, inner = course.optimizer, course.shares, state.here.state
    edge = find_edge(optimizer, shares, inner, f.dtype)
    if course.noise is None:
        near = 1.0 if state.guard is None else NEAR
        return damping(kernel, f, course.targets, course.loss, edge, near)
    return calm(
        optimizer, shares, inner, kernel, f, course.targets, course.loss, course.noise, state.start,
        edge,
    )  # fmt: skip


def guarded(course: Course, state: State) -> State:
    """The state with its steepest modes held back at the edge of stability.

    Which these are its damping knows already.
    """
    here, bound = state.here, state.damping
    assert bound is not None  # modes are held back only where they are damped
    edge = find_edge(course.optimizer, course.shares, here.state, here.f.dtype)
    count = int(np.clip(np.sum(np.asarray(bound.values) > NEAR * float(edge)), 1, MOST))
    values, modes = bound.values[:count], bound.left[:, :count].T.reshape(count, *here.f.shape)
    steeper = steepening(course.apply_fn, course.loss)
    found = steeper(here.point, course.x, course.targets, modes, values)
    vectors = here.vectors[: 1 + len(course.shares)] + found
    return state._replace(
        here=here._replace(vectors=vectors), guard=Guard(values, edge, jnp.zeros_like(values)),
        damping=slow_down(here.kernel, bound.values, bound.left, edge, here.f.shape[1], NEAR),
        passes=state.passes + 4 * count,
    )  # fmt: skip


def is_beyond(bound: Damping | None) -> bool:
    """Whether there is a mode beyond the edge of stability."""
    return bound is not None and float(bound.largest) > 1.0


@jit
def differ(near: Kernel, far: Kernel) -> Array:
    """Whether the network is not linear, so that it can take kicks back."""
    probe = jax.random.normal(jax.random.key(0), near.shape[:2], near.dtype)
    one, two = (apply_kernel(kernel, probe) for kernel in (near, far))
    return jnp.linalg.norm(two - one) > LINEAR * jnp.linalg.norm(one)


def sharper(state: State, bound: Damping | None) -> State:
    """The state, knowing how sharp it is where a damping was found."""
    if bound is None:
        return state
    return state._replace(sharpest=max(state.sharpest, float(bound.largest)))


def timed(kernel_fn: Callable[[Params], Kernel], params: Params) -> tuple[Kernel, float]:
    """A kernel, and the seconds that it took."""
    begun = time.perf_counter()
    kernel = kernel_fn(params)
    if is_concrete(kernel):
        jax.block_until_ready(kernel)
    return kernel, time.perf_counter() - begun


def survey(
    course: Course, here: Start, point: Params, in_use: tuple[bool, ...]
) -> tuple[Array, Array]:
    """J v at `point` for the vectors in use (k, N, C), and their products with each other (k, k).

    Both are zero for a vector that cannot enter the outputs.
    """
    if not any(in_use):
        k, f = len(in_use), here.f
        return zeros((k, *f.shape), f.dtype), zeros((k, k), f.dtype)
    push = compile_network(course.apply_fn)[2]
    pairs = zip(in_use, here.vectors, strict=True)
    pushed = [push(point, course.x, vector) if used else None for used, vector in pairs]
    return surveyed(pushed, here.vectors, here.f, in_use)


def survey_here(course: Course, state: State) -> tuple[State, Array, Array]:
    """`survey` where the path is, which is done once for all that start there."""
    here, in_use, known = state.here, course.in_use(state), state.surveyed
    if known is None or not known.holds(here, in_use):
        pushed, products = survey(course, here, here.point, in_use)
        known = Surveyed(here, in_use, pushed, products)
        state = state._replace(surveyed=known, passes=state.passes + sum(in_use))
    return state, known.pushed, known.products


def combine(course: Course, state: State, points: list[Params], row: Array) -> tuple[State, Params]:
    """The weight-space vector whose coefficients are `row`, with Jacobians at one point or two."""
    pull, here = compile_network(course.apply_fn)[1], state.here
    first, last, weights = split_row(row, here.f, len(points) == 1)
    total = pull(points[0], course.x, first)
    beside = pull(points[1], course.x, last) if len(points) > 1 else here.vectors[0]
    vector = add_vectors(total, [beside, *here.vectors], weights)  # one program for both
    return state._replace(passes=state.passes + len(points)), vector
