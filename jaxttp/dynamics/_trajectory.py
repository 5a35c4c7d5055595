"""The result of every dynamics function."""

import equinox as eqx
from jaxtyping import Array, Float

from jaxttp._result import RESULT


class Trajectory(eqx.Module):
    """Predicted outputs over time; one unit of time is one optimiser step.

    Attributes:
        ts: times (T,).
        train: outputs on the training samples (T, N, C).
        test: outputs on the test samples (T, M, C), or None.
        accepted_steps: steps that the ODE solver accepted, or None where there is no solver.
        rejected_steps: steps that it rejected, or None.
        diverged_at: first step whose outputs could not be represented (they are held at the last
            that could), -1 for never, or None where divergence cannot happen.
        dual: a_t (T, N, C) of the weights w_t = c_t w_0 + J^T a_t, where an optimiser was followed.
        scale: c_t of them (T,), 1 without weight decay.
    """

    ts: Float[Array, " t"]
    train: Float[Array, "t n c"]
    test: Float[Array, "t m c"] | None = None
    accepted_steps: Array | None = None
    rejected_steps: Array | None = None
    diverged_at: Array | None = None
    dual: Float[Array, "t n c"] | None = None
    scale: Float[Array, " t"] | None = None

    plot, _repr_html_, __repr__ = RESULT
