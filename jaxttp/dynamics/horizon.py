"""Long horizons: the flow's loss without its outputs, and the moment at which it crosses a value.

Saving T outputs (T, N, C) is what fills the memory of a long forecast; the loss alone is (T,), and
the time of one crossing is a number, found by the solver itself as an event.
"""

from typing import Any

import diffrax
import equinox as eqx
import jax.numpy as jnp
import optimistix as optx
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_choice, check_number
from jaxttp._core.results import RESULT
from jaxttp.dynamics._kernels import check_problem, check_rate, check_times
from jaxttp.dynamics.flow import SOLVERS, Motion, solve, tolerances
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import KernelLike


class FlowCurves(eqx.Module):
    """Loss and error under gradient flow.

    Attributes:
        ts: times (T,).
        loss: the mean loss (T,).
        error: the error (T,).
        accepted_steps: steps that the solver accepted.
        rejected_steps: steps that it rejected.
    """

    ts: Float[Array, " t"]
    loss: Float[Array, " t"]
    error: Float[Array, " t"]
    accepted_steps: Array
    rejected_steps: Array

    plot, _repr_html_, __repr__ = RESULT


def flow_curves(
    kernel: KernelLike,
    f0: ArrayLike,
    y: Any,
    *,
    loss: str | Loss,
    learning_rate: Any,
    ts: Any,
    solver: str = "tsit5",
    basis: str = "kernel",
    rtol: float | None = None,
    atol: float | None = None,
    max_steps: int = 1_000_000,
) -> FlowCurves:
    """Loss and error under gradient flow, without keeping any outputs.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C.
        f0: outputs at t = 0 (N, C).
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.
        learning_rate: eta > 0; one unit of time is one step of that size.
        ts: times (T,), non-negative and increasing.
        solver: "tsit5", "dopri8" or "kvaerno5".
        basis: "kernel" or "eigen", see `gradient_flow`.
        rtol: relative tolerance, see `gradient_flow`.
        atol: absolute tolerance.
        max_steps: bound on the solver's steps.

    Returns:
        A `FlowCurves`.

    Raises:
        ValueError: bad shapes, labels, rate, times or option.

    Example:
        >>> import jax.numpy as jnp
        >>> curves = flow_curves(jnp.eye(2), jnp.zeros((2, 1)), jnp.ones((2, 1)),
        ...                      loss="squared_error", learning_rate=1.0,
        ...                      ts=jnp.array([0.0, 2.0]))
        >>> [round(float(value), 4) for value in curves.loss]
        [0.5, 0.0677]
    """
    check_choice("solver", solver, SOLVERS)
    check_choice("basis", basis, ("kernel", "eigen"))
    kernel, f0, targets, loss, _, _ = check_problem(kernel, f0, y, loss)
    ts = check_times(ts, f0.dtype)
    rate = jnp.asarray(check_rate(learning_rate), f0.dtype) / f0.shape[0]
    motion = Motion.of(kernel, f0, targets, loss, rate, basis=basis)
    return _curves(motion, ts, tolerances(f0.dtype, rtol, atol), solver, max_steps)


@eqx.filter_jit
def _curves(
    motion: Motion, ts: Array, accuracy: tuple[Array, Array], solver: str, max_steps: int
) -> FlowCurves:
    def curves(t: Any, state: Any, args: Any) -> tuple[Array, Array]:
        f, _ = motion.outputs(state)
        return motion.loss.value(f, motion.targets), motion.loss.error(f, motion.targets)

    saveat = diffrax.SaveAt(ts=ts, fn=curves)
    solution = solve(motion, solver, ts[-1], accuracy, max_steps, saveat=saveat)
    assert solution.ys is not None
    values, errors = solution.ys
    stats = solution.stats
    return FlowCurves(ts, values, errors, stats["num_accepted_steps"], stats["num_rejected_steps"])


def crossing_time(
    kernel: KernelLike,
    f0: ArrayLike,
    y: Any,
    *,
    loss: str | Loss,
    learning_rate: Any,
    value: Any,
    horizon: float = 1e6,
    solver: str = "tsit5",
    basis: str = "kernel",
    rtol: float | None = None,
    atol: float | None = None,
    max_steps: int = 1_000_000,
) -> Float[Array, ""]:
    """The moment at which the loss under gradient flow falls to a value, as an event of the solver.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C.
        f0: outputs at t = 0 (N, C).
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.
        learning_rate: eta > 0; one unit of time is one step of that size.
        value: the loss to wait for.
        horizon: when to stop waiting.
        solver: "tsit5", "dopri8" or "kvaerno5".
        basis: "kernel" or "eigen", see `gradient_flow`.
        rtol: relative tolerance, see `gradient_flow`.
        atol: absolute tolerance.
        max_steps: bound on the solver's steps.

    Returns:
        A time that need not be whole; 0 where the loss is there at the start, infinity where it is
        not at the horizon.

    Raises:
        ValueError: bad shapes, labels, rate, horizon or option.

    Example:
        >>> import jax.numpy as jnp
        >>> time = crossing_time(jnp.eye(2), jnp.zeros((2, 1)), jnp.ones((2, 1)),
        ...                      loss="squared_error", learning_rate=1.0, value=0.25)
        >>> round(float(time), 3)  # ln 2
        0.693
    """
    check_choice("solver", solver, SOLVERS)
    check_choice("basis", basis, ("kernel", "eigen"))
    check_number("horizon", horizon, above=0.0)
    check_number("value", value)
    kernel, f0, targets, loss, _, _ = check_problem(kernel, f0, y, loss)
    rate = jnp.asarray(check_rate(learning_rate), f0.dtype) / f0.shape[0]
    motion = Motion.of(kernel, f0, targets, loss, rate, basis=basis)
    goal, end = jnp.asarray(value, f0.dtype), jnp.asarray(horizon, f0.dtype)
    return _crossing(motion, goal, end, tolerances(f0.dtype, rtol, atol), solver, max_steps)


@eqx.filter_jit
def _crossing(
    motion: Motion,
    goal: Array,
    end: Array,
    accuracy: tuple[Array, Array],
    solver: str,
    max_steps: int,
) -> Array:
    def above(t: Any, y: Any, args: Any, **options: Any) -> Array:
        return motion.loss.value(motion.outputs(y)[0], motion.targets) - goal

    fine = float(jnp.finfo(goal.dtype).eps) ** 0.5
    event = diffrax.Event(above, optx.Newton(fine, fine))
    saveat = diffrax.SaveAt(t1=True)
    solution = solve(motion, solver, end, accuracy, max_steps, saveat=saveat, event=event)
    assert solution.ts is not None
    reached = jnp.where(solution.ts[-1] < end, solution.ts[-1], jnp.inf)
    return jnp.where(motion.loss.value(motion.f0, motion.targets) <= goal, 0.0, reached)
