"""Curvature without a library: jvp and grad in JAX, and SciPy's Lanczos on it, in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse.linalg
from jax.flatten_util import ravel_pytree

from experiments.bench.peers import networks
from experiments.bench.peers.protocol import Options, Prepared, Problem, serve

jax.config.update("jax_enable_x64", True)


def matvec(problem: Problem, kind: str, dtype: str = "float64") -> Callable[[Any], Any]:
    """A product with the Hessian or the GGN of the mean cross-entropy."""
    apply_fn, params, x = networks.load(problem)
    y = jnp.asarray(problem["y"])
    flat, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf.astype(dtype), params))
    x = x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def outputs(flat: Any) -> Any:
        return apply_fn(unravel(flat), x)

    def loss(flat: Any) -> Any:
        logs = jax.nn.log_softmax(outputs(flat))
        return -jnp.mean(jnp.take_along_axis(logs, y[:, None], 1))

    def hessian(vector: Any) -> Any:
        return jax.jvp(jax.grad(loss), (flat,), (vector,))[1]

    def generalized(vector: Any) -> Any:
        f, push = jax.linearize(outputs, flat)
        shares, tangents = jax.nn.softmax(f), push(vector)
        image = shares * (tangents - (shares * tangents).sum(1, keepdims=True)) / len(x)
        return jax.linear_transpose(push, flat)(image)[0]

    return {"hessian": hessian, "generalized": generalized}[kind]


def product(problem: Problem, options: Options) -> Prepared:
    """One product, jitted. Options: "kind", "dtype"."""
    dtype = options.get("dtype", "float64")
    run, vector = jax.jit(matvec(problem, options["kind"], dtype)), problem["vector"]
    given = jnp.asarray(vector.astype(dtype))
    call = lambda: jax.block_until_ready(run(given))  # noqa: E731

    def answer(found: Any) -> Problem:
        found = np.asarray(found, float)
        return {"norm": np.linalg.norm(found), "form": np.vdot(found, vector)}

    return Prepared(call, answer)


def converged(problem: Problem, options: Options) -> Prepared:
    """The largest eigenvalue to rounding, to hold others against. Options: "kind"."""
    run, size = jax.jit(matvec(problem, options["kind"])), len(problem["vector"])
    matrix: Any = scipy.sparse.linalg.LinearOperator(
        (size, size), matvec=lambda v: np.asarray(run(jnp.asarray(v.reshape(-1)))), dtype=np.float64
    )

    def call() -> Any:
        return scipy.sparse.linalg.eigsh(
            matrix, k=1, which="LA", tol=1e-10, v0=problem["vector"], return_eigenvectors=False
        )

    return Prepared(call, lambda found: {"largest": np.asarray(found[0])})


WORKS = {"product": product, "converged": converged}

if __name__ == "__main__":
    serve(WORKS, ("jax", "jaxlib", "scipy"))
