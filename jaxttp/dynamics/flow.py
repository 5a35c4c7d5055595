"""Gradient flow in function space, df/dt = -(eta/N) Theta g(f), integrated by diffrax."""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import is_concrete
from jaxttp._core.compile import jit
from jaxttp.dynamics._kernels import apply_kernel, check_problem, check_rate, check_times
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel, KernelLike

STIFF = 3e4
"""Stiffness (fastest rate x horizon) beyond which the implicit solver is the faster one."""
MOST_STEPS = 1_000_000
"""Of a solver, at most."""


def gradient_flow(
    kernel: KernelLike,
    f0: ArrayLike,
    y: Any,
    *,
    loss: str | Loss,
    learning_rate: Any,
    ts: Any,
    kernel_test: KernelLike | None = None,
    f0_test: ArrayLike | None = None,
) -> Trajectory:
    """Outputs under gradient flow of the mean loss, df/dt = -(eta/N) Theta g(f).

    Test outputs follow df*/dt = -(eta/N) Theta(X*, X) g(f). The solver is Tsit5, or where the
    problem is stiff over a long horizon the implicit Kvaerno5; its relative tolerance is 1e-5 in
    float32 and 1e-8 in float64.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C; an array, also on a mesh.
        f0: outputs at t = 0, (N, C).
        y: integer labels (N,) or targets (N, C).
        loss: "cross_entropy", "squared_error", "binary_cross_entropy" or a `Loss`.
        learning_rate: eta > 0; one unit of time is one step of that size.
        ts: times (T,), non-negative and increasing, or one time (T = 1); the flow starts at t = 0
            whatever ts[0]. For the limit of training see `closed_form` (squared error).
        kernel_test: Theta(X*, X) (M, C, N, C), or (M, N).
        f0_test: test outputs at t = 0, (M, C).

    Returns:
        A `Trajectory`: train (T, N, C), test (T, M, C) or None, and the solver's steps.

    Raises:
        ValueError: bad shapes, labels, rate or times.
        RuntimeError: at run time, when the solver does not reach the last time.

    Example:
        >>> import jax.numpy as jnp
        >>> kernel = jnp.eye(2).reshape(1, 2, 1, 2)
        >>> path = gradient_flow(kernel, jnp.zeros((1, 2)), jnp.array([0]), loss="cross_entropy",
        ...                      learning_rate=0.1, ts=jnp.array([0.0, 50.0]))
        >>> bool(path.train[1, 0, 0] > 1.0)
        True

    Source:
        TTP eq (1), deterministic part; the loss is the mean over samples (Section 3 sums it where
        Appendix F.1 averages it; it is the mean here, always).
    """
    kernel, f0, targets, loss, kernel_test, f0_test = check_problem(
        kernel, f0, y, loss, kernel_test, f0_test
    )
    ts = check_times(ts, f0.dtype)
    rate = jnp.asarray(check_rate(learning_rate), f0.dtype) / f0.shape[0]
    is_stiff = False
    if all(map(is_concrete, jax.tree.leaves((kernel, f0, rate, ts)))):
        is_stiff = float(_stiffness(kernel, f0, rate, ts[-1])) > STIFF
    kernels = (kernel,) if kernel_test is None else (kernel, kernel_test)
    initial = (f0,) if f0_test is None else (f0, f0_test)
    return _flow(kernels, initial, targets, rate, ts, loss=loss, is_stiff=is_stiff)


@eqx.filter_jit  # many small steps: not `_core`'s jit
def _flow(
    kernels: tuple[Kernel, ...],
    initial: tuple[Array, ...],
    targets: Array,
    rate: Array,
    ts: Array,
    *,
    loss: Loss,
    is_stiff: bool,
) -> Trajectory:
    def field(t: Any, outputs: tuple[Array, ...], args: Any) -> tuple[Array, ...]:
        force = -rate * loss.gradient(outputs[0], targets)
        return tuple(apply_kernel(kernel, force) for kernel in kernels)

    solver = diffrax.Kvaerno5() if is_stiff else diffrax.Tsit5()
    paths, steps = solve_ode(field, initial, ts, solver=solver)
    train, test = paths if len(paths) == 2 else (*paths, None)
    return Trajectory(ts, train, test, steps)


def solve_ode(
    field: Callable[[Any, Any, Any], Any],
    start: Any,
    ts: Array,
    *,
    solver: diffrax.AbstractAdaptiveSolver | None = None,
    accuracy: tuple[Any, Any] | None = None,
    save: Callable[[Any, Any, Any], Any] = lambda t, state, args: state,
) -> tuple[Any, Array]:
    """The saved values of the states at times `ts`, from t = 0 on, and the accepted steps.

    Args:
        field: ``(t, state, args) -> velocity``.
        start: a pytree.
        ts: times (T,), in whose dtype time runs.
        solver: of diffrax; Tsit5 when None.
        accuracy: relative and absolute tolerance; (1e-5, 1e-6) for float32, (1e-8, 1e-9) for
            float64 when None.
        save: ``(t, state, args) -> what to keep``.
    """
    if accuracy is None:
        accuracy = (1e-5, 1e-6) if ts.dtype == jnp.float32 else (1e-8, 1e-9)
    solution: Any = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        solver or diffrax.Tsit5(),
        t0=jnp.zeros((), ts.dtype),
        t1=ts[-1],
        dt0=None,
        y0=start,
        saveat=diffrax.SaveAt(ts=ts, fn=save),
        stepsize_controller=diffrax.PIDController(*accuracy),
        max_steps=MOST_STEPS,
    )
    return solution.ys, solution.stats["num_accepted_steps"]


@jit
def _stiffness(kernel: Kernel, f0: Array, rate: Array, end: Array) -> Array:
    """The fastest rate times the horizon, by power iteration."""

    def grow(vector: Array, _: None) -> tuple[Array, Array]:
        image = apply_kernel(kernel, vector)
        norm = jnp.linalg.norm(image)
        return image / jnp.where(norm > 0, norm, 1.0), norm

    start = jax.random.normal(jax.random.key(0), f0.shape, f0.dtype)
    norms = jax.lax.scan(grow, start / jnp.linalg.norm(start), None, length=10)[1]
    return norms[-1] * rate * end
