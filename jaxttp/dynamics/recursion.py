"""Discrete time: a linear optimizer, followed step by step in function space.

The linearized network's weights stay in the span of its gradients, w_t - w_0 = J^T a_t, so the
optimizer can be run on the dual coefficients a (N, C) instead of the weights: feed it g/N (zero
outside the batch) and read f_t = f_0 + Theta a_t. With weight decay the initial weights decay too:
w_t = c_t w_0 + J^T a_t, and f_t gains (c_t - 1) J w_0.

One loop, `follow`, does this for full batches and mini-batches, for kernels as arrays and in
factors, for many settings at once (under `vmap`), and for the segments of a relinearized path,
along which the kernel moves from one linearization to the next.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxttp._core.checks import check_integer
from jaxttp._core.compile import jit
from jaxttp.dynamics._kernels import apply_kernel, check_problem, image_of, image_size, outputs_of
from jaxttp.dynamics._trajectory import Trajectory, output_limit
from jaxttp.dynamics.batches import batch_indices
from jaxttp.dynamics.optimizers import (
    HeavyBall,
    Optimizer,
    inlined,
    keep_dtypes,
    linear_filter,
    same_program,
    slots,
)
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Factored, Kernel, KernelLike

CHUNK = 32
"""Steps whose outputs on all samples are one product, for steps computed on a mini-batch alone."""


def recursion(
    kernel: KernelLike,
    f0: ArrayLike,
    y: Any,
    *,
    loss: str | Loss,
    optimizer: optax.GradientTransformation | HeavyBall,
    steps: int,
    batch_size: int | None = None,
    key: Array | None = None,
    kernel_test: KernelLike | None = None,
    f0_test: ArrayLike | None = None,
    protocol: str = "epochs",
    initial_tangent: ArrayLike | None = None,
    initial_tangent_test: ArrayLike | None = None,
) -> Trajectory:
    """Outputs of the linearized network under an optimizer, step for step and exactly.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C; an array, also on a mesh.
        f0: outputs before training (N, C).
        y: integer labels (N,) or targets (N, C).
        loss: "cross_entropy", "squared_error", "binary_cross_entropy" or a `Loss`.
        optimizer: an optax transformation that is one linear scalar filter for every weight: SGD,
            momentum, Nesterov, schedules, `add_decayed_weights`, and chains of these. Or a
            `HeavyBall`, whose rates and momentum are traced.
        steps: number of steps.
        batch_size: samples a step; all of them when None.
        key: a `jax.random.key`, needed with `batch_size`.
        kernel_test: Theta(X*, X) (M, C, N, C), or (M, N).
        f0_test: test outputs before training (M, C).
        protocol: how batches are drawn, see `batch_indices`.
        initial_tangent: J w_0 (N, C), the network's derivative along its own weights; needed by
            weight decay only.
        initial_tangent_test: the same on the test samples (M, C).

    Returns:
        A `Trajectory` with ts = 0, 1, ..., steps; train (steps + 1, N, C), f0 first. Outputs of a
        diverging run are held at their last representable value, from step `diverged_at` on
        (-1: never).

    Raises:
        ValueError: an optimizer that is not linear; weight decay without `initial_tangent`; a batch
            size without a key; bad shapes, labels or options.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> kernel = jnp.eye(2).reshape(1, 2, 1, 2)
        >>> path = recursion(kernel, jnp.zeros((1, 2)), jnp.array([0]), loss="cross_entropy",
        ...                  optimizer=optax.sgd(0.1, momentum=0.9), steps=3)
        >>> path.train.shape
        (4, 1, 2)

    Source:
        TTP treats momentum by an effective learning rate eta/(1 - m), which misses the warm-up of
        the accumulator; the recursion is exact (derived, tested against weight-space training).
    """
    kernel, f0, targets, loss, kernel_test, f0_test = check_problem(
        kernel, f0, y, loss, kernel_test, f0_test
    )
    check_integer("steps", steps, at_least=1)
    indices = None
    if batch_size is not None:
        indices = batch_indices(key, f0.shape[0], batch_size, steps, protocol=protocol)
    tangent = _check_tangent(optimizer, initial_tangent, f0, steps)
    tangent_test = None
    if kernel_test is not None and tangent is not None:
        if initial_tangent_test is None:
            raise ValueError(
                "optimizer decays the weights, so initial_tangent_test (J* w_0, as f0_test) is "
                "needed with kernel_test."
            )
        tangent_test = jnp.asarray(initial_tangent_test, f0.dtype)
    if isinstance(optimizer, HeavyBall):
        optimizer = optimizer.with_velocity()
    motion = Motion.of(kernel, f0, tangent)
    descent = same_program(optimizer, motion.unit(0))
    return inlined(_recursion, descent)(
        descent, optimizer.init(motion.unit(0)), motion, targets, indices, kernel_test, f0_test,
        tangent_test, loss=loss, steps=steps,
    )  # fmt: skip


@functools.partial(jit, static_argnames=("loss", "steps"))
def _recursion(
    optimizer: Optimizer,
    state: optax.OptState,
    motion: "Motion",
    targets: Array,
    indices: Array | None,
    kernel_test: Kernel | None,
    f0_test: Array | None,
    tangent_test: Array | None,
    *,
    loss: Loss,
    steps: int,
) -> Trajectory:
    f0 = motion.f
    run = follow(
        optimizer, loss, motion, (motion.unit(0), state), targets, indices, 0, steps,
        records=jnp.zeros((steps + 1, *f0.shape), f0.dtype),
        coefficients=jnp.zeros((steps + 1, motion.size), f0.dtype),
    )  # fmt: skip
    train, coefficients = run.records, run.coefficients
    assert coefficients is not None  # they are recorded
    dual, scale = coefficients[:, :-1].reshape(train.shape), coefficients[:, -1]
    test = None
    if kernel_test is not None and f0_test is not None:
        test = f0_test[None] + apply_kernel(kernel_test, dual)
        if tangent_test is not None:
            test = test + (scale - 1.0)[:, None, None] * tangent_test[None]
    ts = jnp.arange(steps + 1, dtype=f0.dtype)
    return Trajectory(ts, train, test, diverged_at=run.diverged_at, dual=dual, scale=scale)


@functools.partial(jit, static_argnames="loss")
def heavy_ball_curves(
    kernel: Kernel,
    f0: Float[Array, "n c"],
    targets: Float[Array, "n k"],
    rates: Float[Array, "t s"],
    momenta: Float[Array, " s"],
    indices: Int[Array, "t b"] | None,
    loss: Loss,
) -> tuple[Float[Array, "t_plus_1 s"], Float[Array, "t_plus_1 s"], Bool[Array, " s"]]:
    """Loss and error curves (T + 1, S) of S settings, and which of these did not diverge (S,).

    All settings take a step together, by ONE product of the kernel with a matrix. A setting that
    diverges is held where its outputs were last representable.
    """
    motion, steps = Motion.of(kernel, f0, None), len(rates)

    def curves(rates: Array, momentum: Array) -> tuple[Array, Array, Array]:
        optimizer, none = HeavyBall(rates, momentum), jnp.zeros(steps + 1, f0.dtype)
        run = follow(
            optimizer, loss, motion, (motion.unit(0), optimizer.init(motion.unit(0))), targets,
            indices, 0, steps, records=(none, none),
            save=lambda f: (loss.value(f, targets), loss.error(f, targets)),
        )  # fmt: skip
        return *run.records, run.diverged_at < 0

    return jax.vmap(curves, (1, 0), (1, 1, 0))(rates, momenta)


class Linearization(NamedTuple):
    """The linearization of the network at a point.

    Attributes:
        kernel: Theta there.
        pushed: J v there (k, N, C) of the carried vectors v: the weights and the optimizer's
            accumulators at the start.
        damping: the projection that keeps steps with this kernel stable
            (`jaxttp.dynamics.relinearize.edge`).
    """

    kernel: Kernel
    pushed: Float[Array, "k n c"]
    damping: Any = None


class Motion(eqx.Module):
    """How outputs move as an optimizer acts, with one linearization or between two.

    A linear optimizer acts on every linear image of the weights as it acts on the weights. So it
    runs on a vector of images, which gives outputs and weights:

        [near (N C), far (N C), carried (k), images],

    the coefficients of J_near^T, of J_far^T and of the carried vectors, then their images under the
    kernels A B^T. For an array A = 1 and B^T = Theta; factors have width k, so that a
    mini-batch of B samples costs B C k a step. With one linearization there is one part of each.

    An update at w(tau) = (1 - tau) w_near + tau w_far is J(tau)^T g, with the parts (1 - tau) g
    and tau g. It moves outputs through J at the present tau. Factors are random projections J S
    with one S, and S^T J(tau)^T g is one image. Arrays lack the products of J_near with J_far: the
    images B_near^T (near, far), B_far^T (near, far) stand for them by the mean of both kernels,
    exact to second order in its symmetric part.

    Attributes:
        ends: the linearizations.
        f: outputs where the motion starts (N, C).
        tau: of every step (T + 1,); None with one linearization.
        forcing: the error of the linearized outputs at tau = 1 (N, C); it grows as tau^2.
    """

    ends: list[Linearization]
    f: Float[Array, "n c"]
    tau: Float[Array, " t"] | None = None
    forcing: Float[Array, "n c"] | None = None

    @classmethod
    def of(cls, kernel: Kernel, f0: Array, tangent: Array | None) -> "Motion":
        """With one kernel; J w_0 is the tangent where weights decay."""
        # Zeros of NumPy compile nothing.
        pushed = np.zeros((1, *f0.shape), f0.dtype) if tangent is None else tangent[None]
        return cls([Linearization(kernel, jax.device_put(pushed))], f0)

    @property
    def duals(self) -> int:
        """The number of coefficients of J^T."""
        return len(self.ends) * self.f.size

    @property
    def size(self) -> int:
        """The number of coefficients."""
        return self.duals + len(self.ends[0].pushed)

    @property
    def samples(self) -> tuple[int, int]:
        """N and C of the training samples."""
        kernel = self.ends[0].kernel
        return kernel.shape[-2 if kernel.ndim == 4 else -1], self.f.shape[1]

    @property
    def is_projected(self) -> bool:
        """Whether kernels are factors, with one image of both ends."""
        return all(isinstance(end.kernel, Factored) for end in self.ends)

    def unit(self, carried: int) -> Array:
        """The optimizer's vector for one of the carried vectors."""
        width = image_size(self.ends[0].kernel, self.f.shape[1])
        images = 1 if self.is_projected else len(self.ends) ** 2
        vector = np.zeros(self.size + images * width)
        vector[self.duals + carried] = 1.0
        return jax.device_put(vector.astype(self.f.dtype))

    def folds(self) -> list[list[Array | None]]:
        """B^T left of every kernel with every damping, which dampings subtract from images."""
        dampings = [end.damping for end in self.ends]
        return [
            [None if damp is None else damp.fold(end.kernel, self.f.shape) for damp in dampings]
            for end in self.ends
        ]

    def pulled(self, gradient: Array, batch: Array | None, t: Any, folds: list) -> Array:
        """The optimizer's input for the gradient of a batch's outputs (B, C)."""
        whole = gradient
        if batch is not None:
            whole = jnp.zeros_like(self.f).at[batch].add(gradient)
        fractions = [1.0] if self.tau is None else [1 - self.tau[t], self.tau[t]]
        parts, components = [], []
        for end, fraction in zip(self.ends, fractions, strict=True):
            force, component = whole.reshape(-1), None
            if end.damping is not None:
                component = end.damping.right.T @ force
                force = force - end.damping.left @ component
            components.append(component)
            parts.append(fraction * force)
        parts.append(jnp.zeros(self.size - len(self.ends) * self.f.size, self.f.dtype))
        images = []
        for end, end_folds in zip(self.ends, folds, strict=True):
            image = image_of(end.kernel, gradient, batch)
            for fraction, fold, component in zip(fractions, end_folds, components, strict=True):
                images.append(fraction * (image if fold is None else image - fold @ component))
        return jnp.concatenate(parts + self.joined(images))

    def joined(self, images: list[Array]) -> list[Array]:
        """The images that are followed, of B^T of every end times every part of a gradient."""
        if not self.is_projected:
            return images
        return [functools.reduce(jnp.add, images[:: len(self.ends) + 1])]  # near near + far far

    def applied(self, update: Array, vector: Array, t: Any) -> Array:
        """The change of the vector by the optimizer's update."""
        return update

    def moves(self, update: Array, t: Any) -> list[Array]:
        """The change of each end's image and carried part by an update."""
        carried, images = update[self.duals : self.size], update[self.size :]
        if self.tau is None:
            return [images, carried]
        tau = self.tau[t]
        if self.is_projected:
            near, far = (1 - tau) * images, tau * images
        else:
            near, far = images.reshape(2, 2, -1)
            near, far = ((1 - tau) * near.sum(0) + near[0]) / 2, (tau * far.sum(0) + far[1]) / 2
        return [near, (1 - tau) * carried, far, tau * carried]

    def no_moves(self) -> list[Array]:
        """Moves of zero."""
        classes = self.f.shape[1]
        sizes = [(image_size(end.kernel, classes), len(end.pushed)) for end in self.ends]
        return [jnp.zeros(size, self.f.dtype) for pair in sizes for size in pair]

    def outputs(self, moved: list[Array], t: Any, batch: Array | None = None) -> Array:
        """Outputs of a batch, or of all samples, after some moves."""

        def select(rows: Array) -> Array:
            return rows if batch is None else rows[..., batch, :]

        f = select(self.f)
        for end, image, carried in zip(self.ends, moved[::2], moved[1::2], strict=True):
            f = f + outputs_of(end.kernel, image, f.shape[1], batch)
            f = f + jnp.tensordot(carried, select(end.pushed), 1)
        if self.forcing is not None and self.tau is not None:
            f = f + self.tau[t] ** 2 * select(self.forcing)
        return f


class Followed(NamedTuple):
    """The result of `follow`.

    Attributes:
        records: see `follow`, filled from the first step to the last.
        diverged_at: the first step whose outputs could not be represented, or -1. From there on
            records are held.
        rows: the last coefficients of the weights, then of each of the optimizer's accumulators.
        state: the optimizer's.
        coefficients: of the weights at every step, if recorded.
    """

    records: Any
    diverged_at: Array
    rows: list[Array]
    state: optax.OptState
    coefficients: Array | None


def follow(
    optimizer: Optimizer,
    loss: Loss,
    motion: Motion,
    begin: tuple[Array, optax.OptState],
    targets: Array,
    indices: Int[Array, "t b"] | None,
    start: Any,
    end: Any,
    *,
    records: Any,
    coefficients: Array | None = None,
    save: Callable[[Array], Any] = lambda f: f,
) -> Followed:
    """The recursion from step `start` to `end`.

    Differentiable in reverse where both are Python's integers; with arrays one compiled function
    serves segments of all lengths.

    Args:
        optimizer: see `same_program`.
        loss: of outputs.
        motion: how they move.
        begin: the optimizer's vector (see `Motion`) and its state.
        targets: encoded.
        indices: the batches; None for full ones.
        start: the first step.
        end: the last.
        records: room for `save` of the outputs at every step, with a leading axis (T + 1).
        coefficients: room for the weights' coefficients (T + 1, size).
        save: (N, C) -> the values to record.
    """
    horizon, limit, folds = len(jax.tree.leaves(records)[0]), output_limit(motion.f), motion.folds()
    # With factors, steps of mini-batches compute the batch's rows alone. `_fill` adds the others,
    # many steps at once.
    by_rows = indices is not None and motion.is_projected

    def record(f: Array) -> tuple[Any, Array]:
        return save(f), jnp.all(jnp.abs(f) < limit)

    def arrive(moved: list[Array], t: Any, vector: Array, room: Any, coefficients: Any) -> tuple:
        """The gradient at step t, whether outputs are finite, and both records with that step."""
        batch = None if indices is None else indices[t]
        f = motion.outputs(moved, t, batch if by_rows else None)
        is_alive = jnp.all(jnp.abs(f) < limit)
        values = moved if by_rows else record(f)
        room = jax.tree.map(lambda rows, value: rows.at[t].set(value), room, values)
        if coefficients is not None:
            coefficients = coefficients.at[t].set(vector[: motion.size])
        f = f if batch is None or by_rows else f[batch]
        gradient = loss.gradient(f, targets if batch is None else targets[batch]) / len(f)
        return gradient, is_alive, room, coefficients

    def step(t: Any, carry: tuple) -> tuple:
        # The gradient comes from the step before: XLA's CPU backend would compute a gradient made
        # here anew for every row of its product with the kernel (jaxlib 0.10: ten times as long).
        vector, state, moved, gradient, is_alive, room, coefficients = carry
        pulled = motion.pulled(gradient, None if indices is None else indices[t], t, folds)
        updates, after = optimizer.update(pulled, state, vector)
        updates = motion.applied(jnp.asarray(updates, motion.f.dtype), vector, t)
        updates = jnp.where(is_alive, updates, 0.0)
        moved = [a + b for a, b in zip(moved, motion.moves(updates, t), strict=True)]
        vector = jnp.asarray(optax.apply_updates(vector, updates))
        gradient, good, *rooms = arrive(moved, t + 1, vector, room, coefficients)
        return vector, keep_dtypes(after, state), moved, gradient, is_alive & good, *rooms

    good, moved = jnp.ones(horizon, bool), motion.no_moves()
    room: Any = (records, good)
    if by_rows:
        room = [jnp.zeros((horizon + CHUNK, *part.shape), part.dtype) for part in moved]
    vector, state = begin
    first = vector, state, moved, *arrive(moved, start, vector, room, coefficients)
    vector, state, *_, room, coefficients = jax.lax.fori_loop(start, end, step, first)
    if by_rows:
        room = _fill(motion, record, room, (records, good), start, end)
    records, good = room
    ts = jnp.arange(horizon)
    bad = ~good & (ts > start) & (ts <= end)
    is_lost, first_bad = jnp.any(bad), jnp.argmax(bad)
    kept = jnp.where(is_lost & (ts >= first_bad) & (ts <= end), first_bad - 1, ts)
    records, coefficients = jax.tree.map(lambda rows: rows[kept], (records, coefficients))
    rows = [row[: motion.size].astype(motion.f.dtype) for row in (vector, *slots(optimizer, state))]
    return Followed(records, jnp.where(is_lost, first_bad, -1), rows, state, coefficients)


def _fill(
    motion: Motion, record: Callable, moved: list[Array], room: tuple, start: Any, end: Any
) -> tuple:
    """`record` of the outputs of all samples after these moves, from `start` to `end`."""

    def chunk(index: Any, room: tuple) -> tuple:
        low = start + index * CHUNK
        steps = low + jnp.arange(CHUNK)
        moves = [jax.lax.dynamic_slice_in_dim(rows, low, CHUNK) for rows in moved]
        values = jax.vmap(record)(jax.vmap(motion.outputs)(moves, steps))

        def put(rows: Array, new: Array) -> Array:
            old = jax.lax.dynamic_slice_in_dim(rows, low, CHUNK)
            inside = (steps <= end).reshape(-1, *[1] * (new.ndim - 1))
            return jax.lax.dynamic_update_slice_in_dim(rows, jnp.where(inside, new, old), low, 0)

        return jax.tree.map(put, room, values)

    padded = jax.tree.map(
        lambda rows: jnp.concatenate([rows, jnp.zeros((CHUNK, *rows.shape[1:]), rows.dtype)]), room
    )
    horizon, chunks = len(room[1]), (end - start + CHUNK) // CHUNK
    padded = jax.lax.fori_loop(0, chunks, chunk, padded)
    return jax.tree.map(lambda rows: rows[:horizon], padded)


_NOT_FINITE = "optimizer: the response to a weight is not finite"


def _check_tangent(
    optimizer: optax.GradientTransformation | HeavyBall,
    tangent: ArrayLike | None,
    f0: Array,
    steps: int,
) -> Array | None:
    """J w_0 where the optimizer decays the weights, None where it does not."""
    if isinstance(optimizer, HeavyBall):
        return None
    response = linear_filter(optimizer, steps=steps)
    if response.weight_decay is False:
        return None
    if tangent is not None:
        tangent = jnp.asarray(tangent, f0.dtype)
        if tangent.shape != f0.shape:
            raise ValueError(
                f"initial_tangent must have the shape of f0, {f0.shape}; got {tangent.shape}."
            )
        if response.weight_decay is None:  # traced: whether it is linear is known at run time
            return eqx.error_if(tangent, jnp.any(jnp.isnan(response.decay)), _NOT_FINITE)
        return tangent
    message = (
        "optimizer decays the weights, so initial_tangent = J w_0 is needed: "
        "jax.jvp(lambda w: apply_fn(w, x), (params,), (params,))[1]."
    )
    if response.weight_decay:
        raise ValueError(message)
    return eqx.error_if(jnp.zeros_like(f0), jnp.any(response.decay != 0), message)
