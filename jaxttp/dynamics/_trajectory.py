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
        end_dual: a (N, C) of the last weights w_T = c w_0 + J^T a, where an optimiser was followed.
        end_scale: c of them, 1 without weight decay.
    """

    ts: Float[Array, " t"]
    train: Float[Array, "t n c"]
    test: Float[Array, "t m c"] | None = None
    accepted_steps: Array | None = None
    rejected_steps: Array | None = None
    diverged_at: Array | None = None
    end_dual: Float[Array, "n c"] | None = None
    end_scale: Float[Array, ""] | None = None

    plot, _repr_html_, __repr__ = RESULT
