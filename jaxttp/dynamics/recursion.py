"""Discrete time: any linear optax optimiser, run in the dual space.

The linearised network's weights stay in the span of its gradients, w_t - w_0 = J^T a_t, so the
optimiser can be run on the dual coefficients a (N, C) instead of the weights: feed it g/N (zero
outside the batch) and read f_t = f_0 + Theta a_t. With weight decay the initial weights decay too:
w_t = c_t w_0 + J^T a_t, and f_t gains (c_t - 1) J w_0.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import check_integer
from jaxttp._core.compile import jit
from jaxttp.dynamics._dual import Coefficients, dual_gradient, output_limit, start
from jaxttp.dynamics._kernels import apply_kernel, check_problem
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.dynamics.batches import batch_indices
from jaxttp.dynamics.filters import linear_filter
from jaxttp.dynamics.optimizers import HeavyBall, Optimizer, inlined, keep_dtypes, same_program
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel, KernelLike


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
    """Outputs of the linearised network under an optimiser, step for step and exactly.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C; an array, also on a mesh.
        f0: outputs before training (N, C).
        y: integer labels (N,) or targets (N, C).
        loss: "cross_entropy", "squared_error", "binary_cross_entropy" or a `Loss`.
        optimizer: an optax transformation that is one linear scalar filter for every weight: SGD,
            momentum, Nesterov, schedules, `add_decayed_weights`, and chains of these. Or a
            `HeavyBall`, whose rates and momentum are numbers that compiled code does not hold.
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
        diverging run are held at their last representable value, and `diverged_at` says from
        which step on (-1: never).

    Raises:
        ValueError: an optimiser that is not linear; weight decay without `initial_tangent`; a batch
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
    n = f0.shape[0]
    indices = None
    if batch_size is not None:
        indices = batch_indices(key, n, batch_size, steps, protocol=protocol)
    tangent = _check_tangent(optimizer, initial_tangent, f0, steps)
    if kernel_test is None or tangent is None:
        initial_tangent_test = None
    elif initial_tangent_test is None:
        raise ValueError(
            "optimizer decays the weights, so initial_tangent_test (J* w_0, as f0_test) is "
            "needed beside kernel_test."
        )
    else:
        initial_tangent_test = jnp.asarray(initial_tangent_test, f0.dtype)
    if isinstance(optimizer, HeavyBall):
        optimizer = optimizer.with_velocity()
    descent, state = same_program(optimizer, start(f0)), None
    if descent is not optimizer:  # the numbers of an initial state are its own
        state = optimizer.init(start(f0))
    return inlined(_follow, descent)(
        descent, state, kernel, f0, targets, indices, tangent, kernel_test, f0_test,
        initial_tangent_test, loss=loss, steps=steps,
    )  # fmt: skip


@functools.partial(jit, static_argnames=("loss", "steps"))
def _follow(
    optimizer: Optimizer,
    state: optax.OptState | None,
    kernel: Kernel,
    f0: Array,
    targets: Array,
    indices: Array | None,
    tangent: Array | None,
    kernel_test: Kernel | None,
    f0_test: Array | None,
    tangent_test: Array | None,
    *,
    loss: Loss,
    steps: int,
) -> Trajectory:
    def outputs(coefficients: Coefficients) -> Array:
        moved = f0 + apply_kernel(kernel, coefficients.dual)
        return moved if tangent is None else moved + (coefficients.weights - 1.0) * tangent

    def step(carry: tuple, batch: Array | None) -> tuple[tuple, tuple]:
        coefficients, state, f, alive = carry
        gradient = Coefficients(dual_gradient(loss, f, targets, batch), jnp.zeros((), f.dtype))
        updates, after = optimizer.update(gradient, state, coefficients)
        state = keep_dtypes(after, state)
        new: Any = optax.apply_updates(coefficients, updates)
        new_f = outputs(new)
        alive = alive & jnp.all(jnp.abs(new_f) < output_limit(f.dtype))
        coefficients, f = jax.tree.map(
            lambda a, b: jnp.where(alive, a, b), (new, new_f), (coefficients, f)
        )
        return (coefficients, state, f, alive), (coefficients, f, alive)

    begin = start(f0)
    first = (begin, optimizer.init(begin) if state is None else state, f0, jnp.asarray(True))
    _, (path, train, alive) = jax.lax.scan(step, first, indices, length=steps)
    train = jnp.concatenate([f0[None], train])
    test = None
    if kernel_test is not None and f0_test is not None:
        moved = f0_test[None] + apply_kernel(kernel_test, path.dual)
        if tangent_test is not None:
            moved = moved + (path.weights - 1.0)[:, None, None] * tangent_test[None]
        test = jnp.concatenate([f0_test[None], moved])
    diverged_at = jnp.where(jnp.all(alive), -1, 1 + jnp.argmin(alive))
    ts = jnp.arange(steps + 1, dtype=f0.dtype)
    dual = jnp.concatenate([begin.dual[None], path.dual])
    scale = jnp.concatenate([begin.weights[None], path.weights])
    return Trajectory(ts, train, test, diverged_at=diverged_at, dual=dual, scale=scale)


_NOT_FINITE = "optimizer: the response to a weight is not finite"


def _check_tangent(
    optimizer: optax.GradientTransformation | HeavyBall,
    tangent: ArrayLike | None,
    f0: Array,
    steps: int,
) -> Array | None:
    """J w_0 where the optimiser decays the weights, None where it does not."""
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
