"""jaxttp's dynamics of outputs, as a user would call them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench.peers.protocol import Options, Prepared, Problem, serve
from jaxttp.dynamics import closed_form, gradient_flow, recursion


def _answer(found: Any) -> Problem:
    return {"train": np.asarray(found.train)}


def _start(problem: Problem) -> tuple[Any, Any, float, Any]:
    ts = jnp.arange(int(problem["steps"]) + 1.0)
    return jnp.asarray(problem["kernel"]), jnp.asarray(problem["f0"]), float(problem["rate"]), ts


def flow(problem: Problem, options: Options) -> Prepared:
    """`gradient_flow` of the cross-entropy. Options: its keywords."""
    kernel, f0, rate, ts = _start(problem)
    y = jnp.asarray(problem["y"])
    call = lambda: jax.block_until_ready(  # noqa: E731
        gradient_flow(
            kernel, f0, y, loss="cross_entropy", learning_rate=rate, ts=ts, **options
        )
    )  # fmt: skip
    return Prepared(call, _answer)


def closed(problem: Problem, options: Options) -> Prepared:
    """`closed_form` of the squared error."""
    kernel, f0, rate, ts = _start(problem)
    y = jnp.asarray(problem["y"])
    call = lambda: jax.block_until_ready(  # noqa: E731
        closed_form(kernel, f0, y, learning_rate=rate, ts=ts, **options)
    )
    return Prepared(call, _answer)


def momentum(problem: Problem, options: Options) -> Prepared:
    """`recursion` of gradient descent with momentum."""
    kernel, f0, rate, _ = _start(problem)
    y, optimizer = jnp.asarray(problem["y"]), optax.sgd(rate * options["factor"], momentum=0.9)
    call = lambda: jax.block_until_ready(  # noqa: E731
        recursion(
            kernel, f0, y, loss="cross_entropy", optimizer=optimizer, steps=int(problem["steps"])
        )
    )
    return Prepared(call, _answer)


WORKS = {"flow": flow, "closed": closed, "momentum": momentum}

if __name__ == "__main__":
    serve(WORKS, ("jaxttp", "jax", "jaxlib"))
