"""The results of the dynamics functions."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxttp._core.compile import jit
from jaxttp._core.results import RESULT
from jaxttp.losses import Loss


def output_limit(f: Array) -> float:
    """Outputs beyond this size count as diverged: their squares would soon overflow."""
    return 1e-3 * float(jnp.finfo(f.dtype).max) ** 0.5


@functools.partial(jit, static_argnums=2)
def curves(path: Array, targets: Array, loss: Loss) -> tuple[Array, Array]:
    """Loss and error (T + 1,) along outputs (T + 1, N, C)."""
    return jax.vmap(lambda f: (loss.value(f, targets), loss.error(f, targets)))(path)


class Trajectory(eqx.Module):
    """Predicted outputs over time; one unit of time is one optimizer step.

    Attributes:
        ts: times (T,).
        train: outputs on the training samples (T, N, C).
        test: outputs on the test samples (T, M, C), or None.
        accepted_steps: steps that the ODE solver accepted, or None where there is no solver.
        diverged_at: first step whose outputs could not be represented (they are held at the last
            that could), -1 for never, or None where divergence cannot happen.
        dual: a_t (T, N, C) of the weights w_t = c_t w_0 + J^T a_t, where an optimizer was followed.
        scale: c_t of them (T,): the fraction of the weights before training that weight decay has
            left after t steps; 1 without decay.
    """

    ts: Float[Array, " t"]
    train: Float[Array, "t n c"]
    test: Float[Array, "t m c"] | None = None
    accepted_steps: Array | None = None
    diverged_at: Array | None = None
    dual: Float[Array, "t n c"] | None = None
    scale: Float[Array, " t"] | None = None

    plot, _repr_html_, __repr__ = RESULT


class RelinearizedTrajectory(eqx.Module):
    """Predicted outputs with the kernel rebuilt along the path.

    Attributes:
        ts: 0, 1, ..., steps.
        train: outputs (steps + 1, N, C).
        loss: the loss curve (steps + 1,).
        loss_uncertainty: estimated error of `loss`, (steps + 1,): the change by the correction in
            the present segment, plus those at the ends of earlier segments, each as a fraction of
            the loss there.
        ends: the steps at which segments end and kernels were built.
        local_errors: for every segment the largest change of the loss curve by the correction, as
            a fraction of the loss decrease. "auto" aims at its tolerance and accepts twice as much.
        rejected: segments done again because their local error was too large; each cost a kernel.
        diverged_at: first step whose outputs could not be represented, -1 for never.
        edge_at: end of the first segment that crosses the edge of stability, -1 for never. From
            there on the path is the mean one, without the oscillations of a real training.
        frozen_from: the step from which on the kernel is frozen because the path stays beyond the
            edge of stability, -1 for never.
        kernels: kernels built, the first and the rejected ones included.
        gradient_evaluations: Jacobian products over all samples, without those of the kernels.
        test: outputs on the test samples (steps + 1, M, C), or None.
        steps_run: steps of the recursion that were run, predictions and repeated segments
            included.
    """

    ts: Float[Array, " t"]
    train: Float[Array, "t n c"]
    loss: Float[Array, " t"]
    loss_uncertainty: Float[Array, " t"]
    ends: tuple[int, ...] = eqx.field(static=True)
    local_errors: Float[Array, " s"]
    rejected: int = eqx.field(static=True)
    diverged_at: Array
    edge_at: int = eqx.field(static=True)
    frozen_from: int = eqx.field(static=True)
    kernels: int = eqx.field(static=True)
    gradient_evaluations: int = eqx.field(static=True)
    test: Float[Array, "t m c"] | None = None
    steps_run: int = eqx.field(static=True, default=0)

    plot, _repr_html_, __repr__ = RESULT
