"""Gradient flow in function space, df/dt = -(eta/N) Theta g(f), integrated by diffrax.

Saving T outputs (T, N, C) is what fills the memory of a long forecast; `flow_curves` keeps the loss
and the error alone, (T,).
"""

import functools
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_choice, is_concrete
from jaxttp._core.compile import jit
from jaxttp._core.results import RESULT
from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.dynamics._kernels import (
    apply_kernel,
    check_problem,
    check_rate,
    check_times,
    flatten_kernel,
    regularized,
)
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.dynamics.closed_form import closed_form
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel, KernelLike

SOLVERS = {
    "tsit5": diffrax.Tsit5,
    "dopri8": diffrax.Dopri8,
    "kvaerno5": diffrax.Kvaerno5,
}
STIFF = 3e4
"""Stiffness (fastest rate x horizon) beyond which "auto" takes the implicit solver."""


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
    diag_reg: Any = 0.0,
    solver: str = "auto",
    rtol: float | None = None,
    atol: float | None = None,
    max_steps: int = 1_000_000,
    basis: str = "kernel",
) -> Trajectory:
    """Outputs under gradient flow of the mean loss, df/dt = -(eta/N) Theta g(f).

    Test outputs follow df*/dt = -(eta/N) Theta(X*, X) g(f).

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C; an array, also on a mesh.
        f0: outputs at t = 0, (N, C).
        y: integer labels (N,) or targets (N, C).
        loss: "cross_entropy", "squared_error", "binary_cross_entropy" or a `Loss`.
        learning_rate: eta > 0; one unit of time is one step of that size.
        ts: times (T,), non-negative and increasing, or one time (T = 1); the flow starts at t = 0
            whatever ts[0]. The last one may be ``jnp.inf``, the limit of training, for the squared
            error, whose whole path is then that of `closed_form`; other losses need not have one.
        kernel_test: Theta(X*, X) (M, C, N, C), or (M, N).
        f0_test: test outputs at t = 0, (M, C).
        diag_reg: a number r of at least 0. Training outputs follow the kernel Theta + r m I, where
            m is the mean of Theta's diagonal; see `closed_form`.
        solver: "tsit5", "dopri8", "kvaerno5" (implicit, for very long horizons) or "auto".
        rtol: relative tolerance of the step-size control; by the dtype when None (1e-5 for
            float32, 1e-8 for float64).
        atol: absolute tolerance, likewise (1e-6 and 1e-9).
        max_steps: bound on the solver's steps.
        basis: "kernel", or "eigen": one eigendecomposition, then the motion in the range of Theta
            only, f = f_0 + V z, which costs 2 NC r instead of (NC)^2 a product for rank r. Worth it
            for low rank and many steps.

    Returns:
        A `Trajectory`: train (T, N, C), test (T, M, C) or None, and the solver's step counts.

    Raises:
        ValueError: bad shapes, labels, rate, times, `diag_reg` or option; an infinite time with
            another loss than the squared error.
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
    check_choice("basis", basis, ("kernel", "eigen"))
    kernel, f0, targets, loss, kernel_test, f0_test = check_problem(
        kernel, f0, y, loss, kernel_test, f0_test
    )
    kernel = regularized(kernel, diag_reg)
    ts = check_times(ts, f0.dtype, limit=True)
    if not is_concrete(ts):
        ts = eqx.error_if(ts, jnp.isinf(ts[-1]), "ts holds infinity: see `closed_form`")
    elif jnp.isinf(ts[-1]):
        if loss.name != "squared_error":
            raise ValueError(
                f"ts holds infinity: the outputs of loss={loss.name!r} need not have a limit, as "
                "those of a cross-entropy on labels grow without bound. Give a finite time, or "
                "loss='squared_error'."
            )
        return closed_form(
            kernel, f0, targets, loss=loss, learning_rate=learning_rate, ts=ts,
            kernel_test=kernel_test, f0_test=f0_test,
        )  # fmt: skip
    rate = jnp.asarray(check_rate(learning_rate), f0.dtype) / f0.shape[0]
    if solver == "auto":
        solver = _choose(kernel, f0, rate, ts)
    motion = Motion.of(kernel, f0, targets, loss, rate, kernel_test, f0_test, basis)
    return _flow(motion, ts, tolerances(f0.dtype, rtol, atol), solver, max_steps)


@eqx.filter_jit
def _flow(
    motion: "Motion", ts: Array, accuracy: tuple[Array, Array], solver: str, max_steps: int
) -> Trajectory:
    saveat = diffrax.SaveAt(ts=ts, fn=lambda t, state, args: motion.outputs(state))
    solution = solve(motion, solver, ts[-1], accuracy, max_steps, saveat=saveat)
    assert solution.ys is not None
    train, test = solution.ys
    stats = solution.stats
    return Trajectory(ts, train, test, stats["num_accepted_steps"], stats["num_rejected_steps"])


class Motion(eqx.Module):
    """The ODE of the outputs in some coordinates: where it starts, its field, and the way back.

    Attributes:
        kernel: Theta, None in the kernel's eigenbasis.
        f0: outputs at t = 0 (N, C).
        targets: as encoded.
        rate: eta / N.
        kernel_test: Theta(X*, X), or None.
        f0_test: test outputs at t = 0, or None.
        values: the kernel's eigenvalues (r,) in its eigenbasis, else None.
        vectors: their eigenvectors (N C, r).
        basis_test: what test outputs move by (M, C, r).
        loss: the loss.
    """

    kernel: Kernel | None
    f0: Array
    targets: Array
    rate: Array
    kernel_test: Kernel | None
    f0_test: Array | None
    values: Array | None
    vectors: Array | None
    basis_test: Array | None
    loss: Loss = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        kernel: Kernel,
        f0: Array,
        targets: Array,
        loss: Loss,
        rate: Array,
        kernel_test: Kernel | None = None,
        f0_test: Array | None = None,
        basis: str = "kernel",
    ) -> "Motion":
        """The motion of checked arrays, in outputs or in the kernel's eigenbasis."""
        if basis == "kernel":
            return cls(kernel, f0, targets, rate, kernel_test, f0_test, None, None, None, loss)
        n, c = f0.shape
        values, vectors = decompose(jnp.linalg.eigh, flatten_kernel(kernel, c))
        if is_concrete(values):  # under jit every direction is kept
            known = np.asarray(values)
            keep = known > n * c * jnp.finfo(f0.dtype).eps * known[-1]
            values, vectors = values[keep], vectors[:, keep]
        basis_test = None
        if kernel_test is not None:
            basis_test = _basis_test(kernel_test, values, vectors, n)
        return cls(None, f0, targets, rate, None, f0_test, values, vectors, basis_test, loss)

    @property
    def start(self) -> Any:
        """The state at t = 0."""
        return (self.f0, self.f0_test) if self.values is None else jnp.zeros_like(self.values)

    def field(self, t: Any, state: Any, args: Any) -> Any:
        """The velocity of a state."""
        train, _ = self.outputs(state)
        if self.kernel is not None:
            force = -self.rate * self.loss.gradient(train, self.targets)
            test = None if self.kernel_test is None else apply_kernel(self.kernel_test, force)
            return apply_kernel(self.kernel, force), test
        assert self.values is not None  # then in the eigenbasis
        assert self.vectors is not None
        force = self.loss.gradient(train, self.targets).reshape(-1)
        return -self.rate * self.values * jnp.matmul(self.vectors.T, force, precision="highest")

    def outputs(self, state: Any) -> tuple[Array, Array | None]:
        """The outputs on training and test samples in a state."""
        if self.vectors is None:
            return state
        moved = jnp.matmul(self.vectors, state, precision="highest")
        train = self.f0 + moved.reshape(self.f0.shape)
        if self.basis_test is None or self.f0_test is None:
            return train, None
        return train, self.f0_test + jnp.matmul(self.basis_test, state, precision="highest")


@functools.partial(jit, static_argnums=3)
def _basis_test(kernel_test: Kernel, values: Array, vectors: Array, n: int) -> Array:
    """Theta* V l^-1 (M, C, r): f* moves by it times z."""
    each = jnp.moveaxis(vectors.reshape(n, -1, values.shape[0]), -1, 0)
    moved = jnp.moveaxis(apply_kernel(kernel_test, each), 0, -1)
    return moved / jnp.where(values > 0, values, 1.0)[None, None, :]


def tolerances(dtype: Any, rtol: Any, atol: Any) -> tuple[Array, Array]:
    """The relative and absolute tolerance, those that suit the dtype where there are none."""
    single = dtype == jnp.float32
    rtol = (1e-5 if single else 1e-8) if rtol is None else rtol
    atol = (1e-6 if single else 1e-9) if atol is None else atol
    return jnp.asarray(rtol, dtype), jnp.asarray(atol, dtype)


def solve(
    motion: Motion,
    solver: str,
    end: Any,
    accuracy: tuple[Array, Array],
    max_steps: int,
    *,
    saveat: diffrax.SaveAt,
) -> diffrax.Solution:
    """Integrate a motion from 0 to `end`, with the given relative and absolute tolerance."""
    return diffrax.diffeqsolve(
        diffrax.ODETerm(motion.field),
        SOLVERS[solver](),
        t0=jnp.zeros((), motion.f0.dtype),
        t1=end,
        dt0=None,
        y0=motion.start,
        saveat=saveat,
        stepsize_controller=diffrax.PIDController(*accuracy),
        max_steps=max_steps,
    )


def _choose(kernel: Kernel, f0: Array, rate: Array, ts: Array) -> str:
    """The implicit solver where an explicit one would take tens of thousands of steps."""
    if not all(is_concrete(value) for value in (kernel, f0, rate, ts)):
        return "tsit5"

    return "kvaerno5" if float(_stiffness(kernel, f0, rate, ts[-1])) > STIFF else "tsit5"


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
