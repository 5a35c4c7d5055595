"""jaxttp's Gauss-Newton steps on a reversible MLP, one and until a loss is reached."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench.peers.protocol import Options, Prepared, Problem, serve
from experiments.bench.peers.reversible import arrays, forward, half_squared_error
from jaxttp.gauss_newton import gauss_newton

MODES = {
    "exact": {"pseudoinverse": "exact"},
    "truncate": {"rtol": 0.01},
    "truncate little": {"rtol": 1e-4},
    "truncate by svd": {"rtol": 0.01, "method": "svd"},
}


def _step(problem: Problem, mode: str, rate: float) -> Any:
    w, v, readout, x, _ = arrays(problem)
    y = jnp.asarray(problem["y"])
    optimizer = gauss_newton(
        rate, readout=readout, measure=False, loss="squared_error", **MODES[mode]
    )

    @jax.jit
    def step(w: Any, state: Any) -> Any:
        updates, state = optimizer.update(w, state, w, x=x, y=y, bottlenecks=v)
        return optax.apply_updates(w, updates), state

    return step, optimizer.init(w)


def step(problem: Problem, options: Options) -> Prepared:
    """One step from the first weights. Options: "mode"."""
    run, state = _step(problem, options["mode"], 1.0)
    w = jnp.asarray(problem["w"])
    call = lambda: jax.block_until_ready(run(w, state))[0]  # noqa: E731
    return Prepared(call, lambda found: {"change": np.asarray(found - w)})


def fit(problem: Problem, options: Options) -> Prepared:
    """Steps until the loss is below "target", 100 at most. Options: "mode", "target"."""
    run, start = _step(problem, options["mode"], 1.0)
    w0, v, readout, x, targets = arrays(problem)
    loss = jax.jit(lambda w: half_squared_error(forward(w, v, readout, x), targets))

    def call() -> Any:
        w, state, count, found = w0, start, 0, np.inf
        while found >= options["target"] and count < 100:
            w, state = run(w, state)
            found, count = float(loss(w)), count + 1
        return {"loss": np.asarray(found), "steps": np.asarray(count)}

    return Prepared(call, lambda found: found)


def own_step(problem: Problem, options: Options) -> Prepared:
    """One step that is not held against another: its pseudo-inverse is not the first side's."""
    return step(problem, options)._replace(answer=lambda _: {})


WORKS = {"step": step, "step-own": own_step, "fit": fit}

if __name__ == "__main__":
    serve(WORKS, ("jaxttp", "jax", "jaxlib"))
