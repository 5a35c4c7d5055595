"""A re-linearised path under construction: segments taken one after another, and the result."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxttp._checks import is_concrete
from jaxttp._result import RESULT
from jaxttp._types import ApplyFn, Params
from jaxttp.dynamics._edge import Damping, damping, make_edge
from jaxttp.dynamics._segment import Knot, Network, Run, Start, chord, gram, make_runner
from jaxttp.dynamics.filters import linear_filter, start_shares
from jaxttp.losses import Loss, encode_targets

SWEEPS = 3
"""How often at most a segment is done again with the defect at its end as a drift.

The defect is what the network says there beyond what the kernels do. Along stiff directions
training would have contracted it at once; added to the outputs afterwards it would stay.
"""
SMALL_DEFECT = 1e-3
"""A defect that moves the loss by less than this share of the drop so far is left as it is."""
TRUSTED = 0.25
"""Least share of the predicted fall of the loss that the network must confirm (trust regions)."""
DOUBT_FROM = 0.05
"""Falls of less than this share of the drop so far are not held against the network."""
RISE = 2.0
"""A stable forecast whose loss comes to this multiple of its start is not believed."""


class RelinearizedTrajectory(eqx.Module):
    """Predicted outputs with the kernel rebuilt along the path.

    Attributes:
        ts: 0, 1, ..., steps.
        train: outputs (steps + 1, N, C).
        provisional: outputs before the second-order correction, (steps + 1, N, C). Equal to `train`
            for order 1.
        loss: the loss curve (steps + 1,).
        loss_uncertainty: estimated error of `loss`, (steps + 1,): what the correction changed in
            the segments so far, summed over their ends, and inside the present one. Zero for
            order 1.
        ends: the steps at which segments end and kernels were built.
        local_errors: for every segment the largest change of the loss curve by the correction, as
            a share of the curve's drop; what "auto" holds below its tolerance.
        rejected: segments done again because their local error was too large; each cost a kernel.
        diverged_at: first step whose outputs could not be represented, -1 for never.
        edge_at: end of the first segment that crosses the edge of stability, -1 for never. From
            there on the path is the mean one, without the oscillations of a real training.
        held_from: the step from which on a kernel was held because the network stays at the edge,
            or because it denied the forecast, -1 for never.
        kernels: kernels built, the first and the rejected ones included.
        kernel_seconds: wall-clock seconds of every kernel, compilation included.
        gradient_evaluations: passes back through the network over all samples, the kernels' own
            apart.
    """

    ts: Float[Array, " t"]
    train: Float[Array, "t n c"]
    provisional: Float[Array, "t n c"]
    loss: Float[Array, " t"]
    loss_uncertainty: Float[Array, " t"]
    ends: tuple[int, ...] = eqx.field(static=True)
    local_errors: Float[Array, " s"]
    rejected: int = eqx.field(static=True)
    diverged_at: Array
    edge_at: int = eqx.field(static=True)
    held_from: int = eqx.field(static=True)
    kernels: int = eqx.field(static=True)
    kernel_seconds: tuple[float, ...] = eqx.field(static=True)
    gradient_evaluations: int = eqx.field(static=True)

    plot, _repr_html_, __repr__ = RESULT


class Walk:
    """A path under construction, one segment after another."""

    def __init__(
        self,
        apply_fn: ApplyFn,
        params: Params,
        x: Any,
        y: Any,
        loss: str | Loss,
        optimizer: optax.GradientTransformation,
        steps: int,
        kernel_fn: Callable[[Params], Array],
        order: int,
        accumulators: Sequence[Params] = (),
        damp: bool | None = None,
    ) -> None:
        self.network = Network(apply_fn, x, kernel_fn)
        self.order, self.steps = order, steps
        self.indices: Array | None = None
        self.report: Callable[[], None] = lambda: None
        f = self.network.outputs(params)
        self.targets, self.loss = encode_targets(loss, y, f)
        self.decays = linear_filter(optimizer, params, steps=steps).weight_decay is not False
        shares = start_shares(optimizer)
        self.slots = len(shares)
        state = optimizer.init(jnp.zeros(2 * f.size + 1 + self.slots, f.dtype))
        self.run = make_runner(self.loss, optimizer)
        if accumulators and len(accumulators) != self.slots:
            raise ValueError(
                f"accumulators must hold one pytree for each of the optimizer's {self.slots} "
                f"accumulators; got {len(accumulators)}."
            )
        self.moving = bool(accumulators)
        self.begun = [share != 0 for share in shares]
        # An average of weights takes its share from the weights themselves.
        self.decays = self.decays or any(self.begun)
        copies = [jax.tree.map(lambda w, s=s: jnp.asarray(s * w, w.dtype), params) for s in shares]
        vectors = [params, *(accumulators or copies)]
        self.here = Start(params, self.network.kernel(params), vectors, f, state)
        self.train = jnp.zeros((steps + 1, *f.shape), f.dtype).at[0].set(f)
        self.provisional = self.train
        self.diverged_at = jnp.asarray(-1)
        self.ends: list[int] = []
        self.gave_up = False
        self.edge_at, self.held_from = -1, -1
        self.edge = make_edge(optimizer)
        self.damps = order == 2 and damp is not False and is_concrete(f)
        self.damping = self._damping(self.here.kernel, f)
        if damp is None and _is_beyond(self.damping):  # a rate that is too large from the start
            self.damps, self.damping = False, None
        self.crossing: tuple[int, Run] | None = None
        self.curve = jax.jit(jax.vmap(lambda f: self.loss.value(f, self.targets)))

    def _in_use(self, start: int) -> list[bool]:
        """Which of the vectors that coefficients refer to can enter the outputs."""
        return [self.decays, *(self.moving or start > 0 or begun for begun in self.begun)]

    def explore(self, start: int, end: int) -> tuple[Knot, Array, Run]:
        """Run from `start` to `end` with the kernel at hand."""
        in_use = self._in_use(start)
        pushed = self.network.push_all(self.here, self.here.point, in_use)
        knot = Knot(self.here.kernel, pushed, self.damping)
        products = gram(self.here, in_use)
        return knot, products, self._run([knot], products, None, start, end)

    def _run(
        self,
        knots: list[Knot],
        products: Array,
        line: Any,
        start: int,
        end: int,
        drift: Array | None = None,
    ) -> Run:
        drift = jnp.zeros_like(self.here.f) if drift is None else drift
        return self.run(
            knots, self.here, products, line, start, end, self.train, self.targets, self.indices,
            drift,
        )  # fmt: skip

    def advance(
        self,
        start: int,
        end: int,
        explored: tuple[Knot, Array, Run],
        accept: Callable[[Array, Array], bool] | None = None,
    ) -> bool:
        """Take a segment, or nothing where `accept` refuses its provisional and final outputs."""
        self.report()
        knot, products, result = explored
        here, network = self.here, self.network
        provisional, knots, points, line = result.train, [knot], [here.point], None
        bound = None
        if self.order == 2:
            in_use = self._in_use(start)
            point = network.combine(points, here.vectors, result.rows[0], here.f)
            kernel = network.kernel(point)
            if is_concrete(kernel) and not bool(jnp.all(jnp.isfinite(kernel))):
                self._give_up(start)
                return True
            bound = self._damping(kernel, provisional[end])
            far = Knot(kernel, network.push_all(here, point, in_use), bound)
            line = chord(knot, products, result.rows[0])
            knots, points = [knot, far], [here.point, point]
            result = self._run(knots, products, line, start, end)
            if accept is not None and not accept(provisional, result.train):
                return False
            if _is_beyond(bound) and self.crossing is None:
                self.crossing, self.edge_at = (start, self.explore(start, self.steps)[2]), end
        last = end == self.steps and self.order == 1
        arrived = None if last else self._arrive(points, result)
        if arrived is not None and self.order == 2:
            drift = jnp.zeros_like(here.f)
            for _ in range(SWEEPS):
                if self._is_small(arrived[1], result.train[end]):
                    break
                drift = drift + (arrived[1] - result.train[end]) / (end - start)
                again = self._run(knots, products, line, start, end, drift)
                result, arrived = self._better(end, (result, arrived), again, points)
            lost = self.damps and self._is_contradicted(arrived[1], result.train[end])
            if lost or (end == self.steps and _is_beyond(bound)):
                self._hold(start, end, result.train)
                return True
        alive = self.diverged_at < 0
        self.train, inside = result.train, slice(start + 1, end + 1)
        self.provisional = self.provisional.at[inside].set(provisional[inside])
        self.diverged_at = jnp.where(
            alive & (result.diverged_at >= 0), result.diverged_at, self.diverged_at
        )
        self.ends.append(end)
        if arrived is None:
            return True
        weights, f = arrived
        good = (self.diverged_at < 0) & jnp.all(jnp.isfinite(f))
        f = jnp.where(good, f, self.train[end])
        self._spread(f - self.train[end], start, end)
        if end == self.steps:
            return True
        moving = [network.combine(points, here.vectors, row, here.f) for row in result.rows[1:]]
        vectors = [weights, *moving]
        if self.order == 1:
            point, kernel = vectors[0], network.kernel(vectors[0])
        else:
            point, kernel = points[-1], knots[-1].kernel
        self.here = Start(point, kernel, vectors, f, result.state)
        self.damping = self._damping(kernel, f)
        return True

    def _damping(self, kernel: Array, f: Array) -> Damping | None:
        """What keeps steps with this kernel stable; nothing where that is not wanted."""
        if not self.damps:
            return None
        edge = self.edge(self.here.state, f)
        return damping(kernel, f, self.targets, self.loss, edge)

    def _arrive(self, points: list[Params], result: Run) -> tuple[Params, Array]:
        """The weights at a segment's end, and what the network says there."""
        weights = self.network.combine(points, self.here.vectors, result.rows[0], self.here.f)
        return weights, self.network.outputs(weights)

    def _is_small(self, f: Array, forecast: Array) -> bool:
        """Whether the network agrees with the kernels on the loss; not known under `jit`."""
        values = [self.loss.value(each, self.targets) for each in (f, forecast, self.train[0])]
        small = jnp.abs(values[0] - values[1]) <= SMALL_DEFECT * jnp.abs(values[2] - values[0])
        return is_concrete(small) and bool(small)

    def _is_contradicted(self, f: Array, forecast: Array) -> bool:
        """Whether the network at a segment's end denies what the kernels say of its loss."""
        now, then, begun, first = (
            float(self.loss.value(each, self.targets))
            for each in (f, forecast, self.here.f, self.train[0])
        )
        if not max(now, then) <= RISE * max(first, begun):
            return True
        expected = begun - then
        return expected > DOUBT_FROM * abs(first - then) and begun - now < TRUSTED * expected

    def _hold(self, start: int, end: int, abandoned: Array) -> None:
        """Follow the last kernel within the edge to the horizon.

        A network that stays at the edge of stability is held there by its own oscillation: its
        kernel grows no further, while the mean path of damped steps would let it grow on.
        """
        if self.crossing is None:
            self.crossing = start, self.explore(start, self.steps)[2]
        start, plain = self.crossing
        rest, doubted = slice(start + 1, self.steps + 1), slice(start + 1, end + 1)
        self.train = self.train.at[rest].set(plain.train[rest])
        self.provisional = self.provisional.at[rest].set(plain.train[rest])
        self.provisional = self.provisional.at[doubted].set(abandoned[doubted])
        self.diverged_at = plain.diverged_at
        self.ends = [*(e for e in self.ends if e <= start), self.steps]
        self.held_from, self.gave_up = start, True

    def _better(
        self,
        end: int,
        before: tuple[Run, tuple[Params, Array]],
        again: Run,
        points: list[Params],
    ) -> tuple[Run, tuple[Params, Array]]:
        """The one of two runs that the network contradicts less at the segment's end."""
        after = (again, self._arrive(points, again))
        defects = [jnp.linalg.norm(f - run.train[end]) for run, (_, f) in (before, after)]
        return jax.tree.map(lambda a, b: jnp.where(defects[1] < defects[0], a, b), after, before)

    def _spread(self, defect: Array, start: int, end: int) -> None:
        """Bring the outputs of a segment to those of the network at its end, without a jump.

        A jump at the horizon alone would move every training time that is near it. The defect is
        taken to come up evenly in time (measured: better than along the chord).
        """
        part = jnp.arange(1, end - start + 1, dtype=defect.dtype) / (end - start)
        self.train = self.train.at[start + 1 : end + 1].add(part[:, None, None] * defect[None])

    def _give_up(self, start: int) -> None:
        """The network left the representable numbers: hold the last outputs that did not."""
        held = jnp.broadcast_to(self.here.f[None], self.train[start + 1 :].shape)
        self.train = self.train.at[start + 1 :].set(held)
        self.provisional = self.provisional.at[start + 1 :].set(held)
        self.diverged_at = jnp.where(self.diverged_at < 0, start + 1, self.diverged_at)
        self.ends.append(self.steps)
        self.gave_up = True

    def result(self, rejected: int) -> RelinearizedTrajectory:
        """The finished path, its loss and the error estimate."""
        loss = self.curve(self.train)
        provisional = self.train if self.order == 1 else self.provisional
        change = jnp.abs(loss - self.curve(provisional))
        drop = jnp.abs(loss[0] - loss[-1])
        drop = jnp.where(drop > 0, drop, 1.0)
        uncertainty, carried, local = change, jnp.zeros((), loss.dtype), []
        for start, end in itertools.pairwise((0, *self.ends)):
            inside = slice(start + 1, end + 1)
            uncertainty = uncertainty.at[inside].add(carried)
            carried = uncertainty[end]
            local.append(jnp.max(change[inside]) / drop)
        return RelinearizedTrajectory(
            ts=jnp.arange(self.steps + 1, dtype=loss.dtype),
            train=self.train,
            provisional=provisional,
            loss=loss,
            loss_uncertainty=uncertainty,
            ends=tuple(self.ends),
            local_errors=jnp.stack(local),
            rejected=rejected,
            diverged_at=self.diverged_at,
            edge_at=self.edge_at,
            held_from=self.held_from,
            kernels=self.network.kernels,
            kernel_seconds=tuple(self.network.seconds),
            gradient_evaluations=self.network.passes,
        )


def _is_beyond(bound: Damping | None) -> bool:
    return bound is not None and float(bound.largest) > 1.0
