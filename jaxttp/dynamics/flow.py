"""Gradient flow in function space, df/dt = -(eta/N) Theta g(f), integrated by diffrax."""

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._checks import check_choice, is_concrete
from jaxttp.dynamics._kernels import apply_kernel, check_problem, check_rate, check_times
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.losses import Loss

SOLVERS = {
    "tsit5": diffrax.Tsit5,
    "dopri8": diffrax.Dopri8,
    "kvaerno5": diffrax.Kvaerno5,
}
STIFF = 3e4
"""Stiffness (fastest rate x horizon) beyond which "auto" takes the implicit solver."""


def gradient_flow(
    kernel: ArrayLike,
    f0: ArrayLike,
    y: Any,
    *,
    loss: str | Loss,
    learning_rate: Any,
    ts: Any,
    kernel_test: ArrayLike | None = None,
    f0_test: ArrayLike | None = None,
    solver: str = "auto",
    rtol: float | None = None,
    atol: float | None = None,
    max_steps: int = 1_000_000,
) -> Trajectory:
    """Outputs under gradient flow of the mean loss, df/dt = -(eta/N) Theta g(f).

    Test outputs follow df*/dt = -(eta/N) Theta(X*, X) g(f).

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C.
        f0: outputs at t = 0, (N, C).
        y: integer labels (N,) or targets (N, C).
        loss: "cross_entropy", "squared_error", "binary_cross_entropy" or a `Loss`.
        learning_rate: eta > 0; one unit of time is one step of that size.
        ts: times (T,), non-negative and increasing; the flow starts at t = 0 whatever ts[0].
        kernel_test: Theta(X*, X) (M, C, N, C), or (M, N).
        f0_test: test outputs at t = 0, (M, C).
        solver: "tsit5", "dopri8", "kvaerno5" (implicit, for very long horizons) or "auto".
        rtol: relative tolerance of the step-size control; by the dtype when None (1e-5 for
            float32, 1e-8 for float64).
        atol: absolute tolerance, likewise (1e-6 and 1e-9).
        max_steps: bound on the solver's steps.

    Returns:
        A `Trajectory`: train (T, N, C), test (T, M, C) or None, and the solver's step counts.

    Raises:
        ValueError: bad shapes, labels, rate, times or option.
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
    check_choice("solver", solver, ("auto", *SOLVERS))
    kernel, f0, targets, loss, kernel_test, f0_test = check_problem(
        kernel, f0, y, loss, kernel_test, f0_test
    )
    ts = check_times(ts, f0.dtype)
    n = f0.shape[0]
    rate = jnp.asarray(check_rate(learning_rate), f0.dtype) / n
    single = f0.dtype == jnp.float32
    controller = diffrax.PIDController(
        rtol=(1e-5 if single else 1e-8) if rtol is None else rtol,
        atol=(1e-6 if single else 1e-9) if atol is None else atol,
    )

    def field(t: Any, state: Any, args: Any) -> Any:
        force = -rate * loss.gradient(state[0], targets)
        train = apply_kernel(kernel, force)
        return (train,) if kernel_test is None else (train, apply_kernel(kernel_test, force))

    if solver == "auto":
        solver = _choose(kernel, f0, rate, ts)
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        SOLVERS[solver](),
        t0=jnp.zeros((), f0.dtype),
        t1=ts[-1],
        dt0=None,
        y0=(f0,) if f0_test is None else (f0, f0_test),
        saveat=diffrax.SaveAt(ts=ts),
        stepsize_controller=controller,
        max_steps=max_steps,
    )
    states = solution.ys
    assert states is not None
    return Trajectory(
        ts,
        states[0],
        None if f0_test is None else states[1],
        solution.stats["num_accepted_steps"],
        solution.stats["num_rejected_steps"],
    )


def _choose(kernel: Array, f0: Array, rate: Array, ts: Array) -> str:
    """The implicit solver where an explicit one would take tens of thousands of steps."""
    if not all(is_concrete(value) for value in (kernel, f0, rate, ts)):
        return "tsit5"

    def grow(vector: Array, _: None) -> tuple[Array, Array]:
        image = apply_kernel(kernel, vector)
        norm = jnp.linalg.norm(image)
        return image / jnp.where(norm > 0, norm, 1.0), norm

    start = jax.random.normal(jax.random.key(0), f0.shape, f0.dtype)
    norms = jax.lax.scan(grow, start / jnp.linalg.norm(start), None, length=10)[1]
    return "kvaerno5" if float(norms[-1] * rate * ts[-1]) > STIFF else "tsit5"
