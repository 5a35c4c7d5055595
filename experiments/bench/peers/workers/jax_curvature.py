"""Stochastic Lanczos by matfree on products in plain JAX, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matfree import decomp, eig

from experiments.bench.peers.protocol import Options, Prepared, Problem, serve
from experiments.bench.peers.workers.plain_curvature import matvec

jax.config.update("jax_enable_x64", True)


def density(problem: Problem, options: Options) -> Prepared:
    """The trace of log(1 + G) by matfree's Lanczos, fully reorthogonalised. Options: "depth"."""
    product = matvec(problem, "generalized")
    probes = jnp.asarray(problem["probes"])
    size = probes.shape[1]
    decompose = eig.eigh_partial(decomp.tridiag_sym(options["depth"], materialize=True))

    def one(probe: Any) -> Any:
        values, vectors = decompose(product, probe / jnp.linalg.norm(probe))
        weights = (vectors @ (probe / jnp.linalg.norm(probe))) ** 2
        return size * jnp.sum(weights * jnp.log1p(jnp.maximum(values, 0)))

    run = jax.jit(lambda probes: jnp.mean(jax.lax.map(one, probes)))
    call = lambda: jax.block_until_ready(run(probes))  # noqa: E731
    return Prepared(call, lambda found: {"trace": np.asarray(found)})


WORKS = {"density": density}

if __name__ == "__main__":
    serve(WORKS, ("jax", "jaxlib", "matfree"))
