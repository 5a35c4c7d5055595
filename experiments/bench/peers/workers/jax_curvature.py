"""Curvature by jvp and grad in plain JAX, and matfree's stochastic Lanczos on it, in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from matfree import decomp, eig

from experiments.bench.peers import networks
from experiments.bench.peers.protocol import Options, Prepared, Problem, serve

jax.config.update("jax_enable_x64", True)


def _matvec(problem: Problem, kind: str, dtype: str = "float64") -> Callable[[Any], Any]:
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
    run, vector = jax.jit(_matvec(problem, options["kind"], dtype)), problem["vector"]
    given = jnp.asarray(vector.astype(dtype))
    call = lambda: jax.block_until_ready(run(given))  # noqa: E731

    def answer(found: Any) -> Problem:
        found = np.asarray(found, float)
        return {"norm": np.linalg.norm(found), "form": np.vdot(found, vector)}

    return Prepared(call, answer)


def density(problem: Problem, options: Options) -> Prepared:
    """The trace of log(1 + G) by matfree's Lanczos, fully reorthogonalised. Options: "depth"."""
    matvec = _matvec(problem, "generalized")
    probes = jnp.asarray(problem["probes"])
    size = probes.shape[1]
    decompose = eig.eigh_partial(decomp.tridiag_sym(options["depth"], materialize=True))

    def one(probe: Any) -> Any:
        values, vectors = decompose(matvec, probe / jnp.linalg.norm(probe))
        weights = (vectors @ (probe / jnp.linalg.norm(probe))) ** 2
        return size * jnp.sum(weights * jnp.log1p(jnp.maximum(values, 0)))

    run = jax.jit(lambda probes: jnp.mean(jax.lax.map(one, probes)))
    call = lambda: jax.block_until_ready(run(probes))  # noqa: E731
    return Prepared(call, lambda found: {"trace": np.asarray(found)})


WORKS = {"product": product, "density": density}

if __name__ == "__main__":
    serve(WORKS, ("jax", "jaxlib", "matfree"))
