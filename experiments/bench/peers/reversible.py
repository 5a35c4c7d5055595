"""A reversible MLP in plain JAX, for optimisers that do not know ours."""

from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.peers.protocol import Problem

NO_ANSWER: Problem = {}
"""Of a step that is another optimiser's: there is nothing to hold it against."""


def forward(w: Any, v: Any, readout: Any, x: Any) -> Any:
    """Outputs (N, C) of weights (L, 2, d/2, m), bottlenecks (L, 2, m, d/2), readout (C, d)."""
    first, second = jnp.split(x, 2, axis=1)
    for block in range(len(w)):
        first = first + jax.nn.relu(second @ v[block][0].T) @ w[block][0].T
        second = second + jax.nn.relu(first @ v[block][1].T) @ w[block][1].T
    return jnp.concatenate([first, second], axis=1) @ readout.T


def arrays(problem: Problem) -> tuple[Any, Any, Any, Any, Any]:
    """Weights, bottlenecks, readout, inputs and targets."""
    return tuple(jnp.asarray(problem[key]) for key in ("w", "v", "readout", "x", "targets"))  # type: ignore


def half_squared_error(f: Any, targets: Any) -> Any:
    """The mean over samples."""
    return 0.5 * jnp.mean(jnp.sum((f - targets) ** 2, axis=1))
