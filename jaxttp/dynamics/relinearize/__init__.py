"""Relinearization: the recursion with the kernel rebuilt along the predicted path.

A linearized network errs because its kernel moves during training. So the PREDICTED path is
followed: after a segment of steps the weights are w + J^T a (one vector-Jacobian product over the
data, no training step), and the kernel is rebuilt there. `solver` takes a segment in second order,
`controller` chooses where segments end, `edge` keeps modes within the stability limit, and
`integrate` records the path. Velocities cross a segment's end in weight space: a dual velocity b
stands for J^T b, so reusing b with the next Jacobian would change the velocity, an error at every
segment's end that more segments would not reduce.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import (
    check_finite_value,
    check_integer,
    check_optimizer,
    is_concrete,
)
from jaxttp._core.types import ApplyFn, Params
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.dynamics._network import compile_network, promote_all, squared_gradients
from jaxttp.dynamics._trajectory import RelinearizedTrajectory as RelinearizedTrajectory
from jaxttp.dynamics.batches import batch_indices
from jaxttp.dynamics.optimizers import (
    HeavyBall,
    LinearRecurrence,
    linear_filter,
    same_program,
    start_fractions,
)
from jaxttp.dynamics.preconditioned import PreconditionedFilter, preconditioned_filter
from jaxttp.dynamics.recursion import Motion
from jaxttp.dynamics.relinearize.controller import Controller
from jaxttp.dynamics.relinearize.integrate import integrate
from jaxttp.dynamics.relinearize.scaling import first_scaling
from jaxttp.dynamics.relinearize.solver import Costs, Setup, State, linearize
from jaxttp.dynamics.stability import curvature_limits
from jaxttp.losses import Loss, encode_targets
from jaxttp.ntk.kernels import Factored, Kernel


def relinearized_recursion(  # noqa: PLR0913
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    loss: str | Loss,
    optimizer: optax.GradientTransformation | HeavyBall | PreconditionedFilter,
    steps: int,
    kernel_fn: Callable[[Params], Kernel],
    rebuilds: int | str | tuple[int, ...],
    tolerance: float = 0.02,
    max_rebuilds: int = 16,
    max_products: tuple[float, float] = (math.inf, 0.0),
    batch_size: int | None = None,
    key: Array | None = None,
    protocol: str = "epochs",
    accumulators: Sequence[Params] = (),
    damp: bool | None = None,
    x_test: Any = None,
    kernel_test_fn: Callable[[Params], Kernel] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RelinearizedTrajectory:
    """The dual recursion with the kernel rebuilt along the predicted path.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: the weights before training; bfloat16 and float16 are promoted to float32, with the
            samples and a warning.
        x: samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.
        optimizer: a linear optax transformation, as in `recursion`, or one that is linear behind a
            diagonal of past gradients (Adam and its relatives).
        steps: number of steps T.
        kernel_fn: ``params -> Theta``, (N, C, N, C) or (N, N), exact or sketched; behind a diagonal
            ``(params, q) -> J diag(q) J^T``, the kernel of u -> f(params + q^(1/2) u), as factors
            J q^(1/2) S of one projection S. Clipped gradients need factors, too.
        rebuilds: kernels built after the first one, kernel k of K at a fraction (k/K)^1.8 of the
            predicted path's length through weight space; the steps to build them at, the last being
            `steps`; or "auto": number and steps chosen by `tolerance`.
        tolerance: for "auto", the largest change of the loss curve by the second-order correction
            of one segment, as a fraction of the loss decrease. It bounds the error of FIRST order;
            the corrected curve is more accurate.
        max_rebuilds: for "auto", no more kernels than that after the first.
        max_products: for "auto", no more Jacobian products than the first number, of which each
            kernel counts for the second one. By what kernels took so far, fewer are built.
        batch_size: samples a step; all of them when None. The path follows exactly the batches
            drawn with the key.
        key: a `jax.random.key`, needed with `batch_size`.
        protocol: how batches are drawn, see `batch_indices`.
        accumulators: the optimizer's accumulators before the first step, shaped like `params`, one
            for each of its state (heavy-ball has one, the velocity); none, or zeros, at the start
            of training.
        damp: whether modes are damped where a kernel grows beyond the edge of stability, so that
            the forecast follows the mean path of a network that oscillates there without diverging.
            When None, unless the first kernel already is beyond it.
        x_test: test samples (M, ...), whose outputs are followed, too: between kernels by the cross
            kernel, interpolated as the kernel is, and at every end of a segment by evaluating the
            network. Give `kernel_test_fn` with them.
        kernel_test_fn: Theta(x_test, x) of the same arguments, (M, C, N, C) or (M, N); called where
            a segment was accepted.
        progress: called with (kernels built, kernels in all; for "auto" at most).

    Returns:
        A `RelinearizedTrajectory`.

    Raises:
        ValueError: an optimizer that is not linear, bad labels, segments not ending at `steps`, a
            wrong number of accumulators, one of x_test and kernel_test_fn alone; traced values: it
            reads them, so it does not work under `jit`.
        TypeError: an array where the optimizer needs factors.

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
        New here; measured against real training in experiments/bench.
    """
    check_integer("steps", steps, at_least=1)
    if not isinstance(optimizer, HeavyBall | PreconditionedFilter):
        check_optimizer(optimizer)
    check_network(apply_fn, params)
    if not callable(kernel_fn):
        raise TypeError(f"kernel_fn must be a function of the parameters; got {kernel_fn!r}.")
    x = check_samples("x", x)
    params, x, x_test = promote_all(params, x, x_test)
    controller = Controller.of(rebuilds, steps, tolerance, max_rebuilds)
    controller = dataclasses.replace(controller, products=max_products)
    if (x_test is None) != (kernel_test_fn is None):
        raise ValueError("x_test and kernel_test_fn belong together: give both or neither.")
    outputs, pull, push = compile_network(apply_fn)
    f0 = outputs(params, x)
    if not is_concrete(f0):
        raise ValueError(
            "params, x: relinearized_recursion looks at values, so it does not work under jit."
        )
    targets, loss = encode_targets(loss, y, f0)
    batches = None
    if batch_size is not None:
        batches = batch_indices(key, len(f0), batch_size, steps, protocol=protocol)
    scaled = _scaled(optimizer, params, steps)
    descent: Any = optimizer
    if scaled is not None:
        descent = LinearRecurrence(jax.device_put(scaled.matrices.astype(f0.dtype)))
    fractions = (0.0,) * sum(scaled.linear) if scaled else start_fractions(descent)
    decays = any(fractions)  # an average of weights contains the weights themselves
    if scaled is not None:
        decays = bool(np.any(scaled.decay))
    elif not isinstance(optimizer, HeavyBall):
        decays |= linear_filter(descent, params, steps=steps).weight_decay is not False
    if accumulators and scaled is not None:
        raise ValueError(
            "accumulators cannot be given for an optimizer behind a diagonal, whose second moments "
            "they lack: leave them out."
        )
    if accumulators and len(accumulators) != len(fractions):
        raise ValueError(
            f"accumulators must hold one pytree for each of the optimizer's {len(fractions)} "
            f"accumulators; got {len(accumulators)}."
        )
    velocities = accumulators or [
        None if part == 0 else jax.tree.map(lambda w, s=part: (s * w).astype(w.dtype), params)
        for part in fractions
    ]
    squares = _mean_squares(apply_fn, pull, x, targets, loss, batch_size, protocol)
    scaling, diagonals = None, []
    if scaled is not None:
        scaling = first_scaling(scaled, params, squares(params, f0))
        if not scaled.is_constant:
            sign_step = int(np.argmax(scaled.scales != 0.0)) + 1
            controller = dataclasses.replace(controller, sign_step=sign_step)
            diagonals = [scaling.diagonal]
    kernel = check_finite_value("kernel", kernel_fn(params, *diagonals))
    if scaled is not None and not isinstance(kernel, Factored):
        raise TypeError(
            "kernel_fn must return jaxttp.ntk.Factored for an optimizer that is followed behind a "
            f"diagonal, or clips; got an array {kernel.shape}. Its columns belong to one random "
            "projection at all weights, see jaxttp.ntk.sketch_jacobian."
        )
    motion = Motion.of(kernel, f0, None)  # the optimizer acts on its vectors
    setup = Setup(
        outputs, pull, push, x, f0, targets, loss, kernel_fn,
        same_program(descent, motion.unit(0)), steps, curvature_limits(descent, steps), decays,
        damp is not False, batches, x_test, kernel_test_fn, scaled, squares, Costs(kernels=1),
    )  # fmt: skip
    damping, _ = setup.damping(kernel, f0, 0, scaling)
    # A rate that is too large from the start may really diverge: damping would hide that. Behind a
    # diagonal the first curvature is that of a sign step, and lasts for one step.
    if damp is None and damping is not None:
        setup, damping = dataclasses.replace(setup, damps=scaled is not None), None
    counters = descent.init(jax.device_put(np.zeros((), f0.dtype)))
    state = State(0, params, motion.ends[0], params, tuple(velocities), f0, counters, scaling)
    state = state._replace(linearization=linearize(setup, state, kernel, params, damping))
    return integrate(setup, state, controller, progress or (lambda built, planned: None))


def _scaled(optimizer: Any, params: Params, steps: int) -> PreconditionedFilter | None:
    """A nonlinear optimizer as a filter behind a diagonal; None for a linear one."""
    if isinstance(optimizer, HeavyBall | PreconditionedFilter):
        return optimizer if isinstance(optimizer, PreconditionedFilter) else None
    try:
        linear_filter(optimizer, params, steps=steps)
    except ValueError as refusal:
        try:
            return preconditioned_filter(optimizer, params, steps)
        except ValueError:
            raise refusal from None
    return None


def _mean_squares(
    apply_fn: ApplyFn,
    pull: Any,
    x: Any,
    targets: Array,
    loss: Loss,
    batch_size: int | None,
    protocol: str = "epochs",
) -> Callable[[Params, Array], Params]:
    """(weights, outputs) -> the mean squares of the gradients of batches.

    They are g^2 + (N - B) / (N - 1) / B times the variance of the samples' gradients, with
    replacement g^2 + 1 / B times.
    """
    squared, n = squared_gradients(apply_fn), len(targets)
    part = 0.0 if batch_size is None else 1 / batch_size
    if batch_size is not None and protocol != "replacement":
        part *= (n - batch_size) / max(n - 1, 1)

    def mean_squares(weights: Params, f: Array) -> Params:
        residual = loss.gradient(f, targets)
        squares = jax.tree.map(jnp.square, pull(weights, x, residual / n))
        if part == 0:
            return squares
        samples = squared(weights, x, residual)
        return jax.tree.map(lambda g, s: g + part * (s / n - g), squares, samples)

    return mean_squares
