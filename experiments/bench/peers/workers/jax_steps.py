"""Steps of Adam (optax), and nonlinear least squares by optimistix."""

from typing import Any

import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optax

from experiments.bench.peers.protocol import Options, Prepared, Problem, serve
from experiments.bench.peers.reversible import NO_ANSWER, arrays, forward, half_squared_error


def _loss(problem: Problem) -> tuple[Any, Any]:
    w, v, readout, x, targets = arrays(problem)
    return w, lambda w: half_squared_error(forward(w, v, readout, x), targets)


def adam_step(problem: Problem, options: Options) -> Prepared:
    """One step of Adam on the same batch."""
    w, loss = _loss(problem)
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(w: Any, state: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(w), state, w)
        return optax.apply_updates(w, updates), state

    state = optimizer.init(w)
    return Prepared(lambda: jax.block_until_ready(step(w, state)), lambda _: NO_ANSWER)


def adam_fit(problem: Problem, options: Options) -> Prepared:
    """Adam in a `lax.while_loop`. Options: "rate", "target", "most" steps."""
    w0, loss = _loss(problem)
    optimizer = optax.adam(options["rate"])
    value_and_grad = jax.value_and_grad(loss)

    @jax.jit
    def run(w: Any) -> Any:
        def more(carry: Any) -> Any:
            return (carry[2] >= options["target"]) & (carry[3] < options["most"])

        def step(carry: Any) -> Any:
            w, state, _, count = carry
            value, slope = value_and_grad(w)
            updates, state = optimizer.update(slope, state, w)
            return optax.apply_updates(w, updates), state, value, count + 1

        return jax.lax.while_loop(more, step, (w, optimizer.init(w), jnp.inf, 0))[2:]

    def answer(found: Any) -> Problem:
        return {"loss": np.asarray(found[0]), "steps": np.asarray(found[1])}

    return Prepared(lambda: jax.block_until_ready(run(w0)), answer)


def least_squares(problem: Problem, options: Options) -> Prepared:
    """What optimistix makes of the residuals. Options: "solver", "target", "rtol"."""
    import optimistix

    w0, v, readout, x, targets = arrays(problem)
    scale = (1 / len(x)) ** 0.5
    rtol = options["rtol"]
    solver = {
        "LevenbergMarquardt": lambda: optimistix.LevenbergMarquardt(rtol, rtol),
        "IndirectLevenbergMarquardt": lambda: optimistix.IndirectLevenbergMarquardt(rtol, rtol),
        "Dogleg": lambda: optimistix.Dogleg(rtol, rtol, linear_solver=lineax.SVD()),
        "GaussNewton": lambda: optimistix.GaussNewton(rtol, rtol, linear_solver=lineax.SVD()),
    }[options["solver"]]()

    def residuals(w: Any, _: Any) -> Any:
        return scale * (forward(w, v, readout, x) - targets)

    @jax.jit
    def run(w: Any) -> Any:
        found = optimistix.least_squares(residuals, solver, w, max_steps=100, throw=False)
        left = residuals(found.value, None)
        return 0.5 * jnp.sum(left**2), found.stats["num_steps"]

    def answer(found: Any) -> Problem:
        return {"loss": np.asarray(found[0]), "steps": np.asarray(found[1])}

    return Prepared(lambda: jax.block_until_ready(run(w0)), answer)


WORKS = {
    "adam_step": adam_step, "adam_fit": adam_fit,
    "least_squares": least_squares,
}  # fmt: skip

if __name__ == "__main__":
    serve(WORKS, ("jax", "jaxlib", "optimistix", "optax"))
