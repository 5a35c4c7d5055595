"""jaxttp's curvature: products, spectra, condition numbers."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.peers import networks, problems
from experiments.bench.peers.protocol import Options, Prepared, Problem, serve
from jaxttp.conditioning import condition_number, curvature_operator, gauss_newton_linear_operator
from jaxttp.ntk import extreme_eigenvalues, spectral_density

jax.config.update("jax_enable_x64", True)


def _operator(problem: Problem, kind: str) -> object:
    apply_fn, params, x = networks.load(problem)
    y = jnp.asarray(problem["y"])
    return curvature_operator(apply_fn, params, x, y, kind=kind, loss="cross_entropy")


def product(problem: Problem, options: Options) -> Prepared:
    """A product with the Hessian or the GGN, as `curvature_operator` has it. Options: "kind"."""
    operator, vector = _operator(problem, options["kind"]), jnp.asarray(problem["vector"])
    call = lambda: jax.block_until_ready(operator.mv(vector))  # noqa: E731

    def answer(found: jax.Array) -> Problem:
        return {"norm": np.linalg.norm(found), "form": np.vdot(found, vector)}

    return Prepared(call, answer)


def largest(problem: Problem, options: Options) -> Prepared:
    """The largest eigenvalue by `extreme_eigenvalues`. Options: "kind", "depth"."""
    operator, key = _operator(problem, options["kind"]), jax.random.key(0)
    depth = options["depth"]
    call = lambda: jax.block_until_ready(  # noqa: E731
        extreme_eigenvalues(operator, key=key, depth=depth)[1]
    )
    return Prepared(call, lambda found: {"largest": np.asarray(found)})


def density(problem: Problem, options: Options) -> Prepared:
    """The trace of log(1 + G) by `spectral_density` of the GGN. Options: "depth"."""
    operator, key = _operator(problem, "generalized"), jax.random.key(problems.DENSITY_KEY)
    probes, size = problem["probes"].shape

    def run(key: jax.Array) -> jax.Array:
        found = spectral_density(operator, key=key, depth=options["depth"], probes=probes)
        return size * jnp.sum(found.weights * jnp.log1p(jnp.maximum(found.nodes, 0)))

    return Prepared(lambda: jax.block_until_ready(run(key)), lambda it: {"trace": np.asarray(it)})


def condition(problem: Problem, options: Options) -> Prepared:
    """The condition number of a linear network's Gauss-Newton matrix, matrix-free."""
    weights, sigma = problems.linear_weights(problem), problem["covariance"]
    call = lambda: condition_number(gauss_newton_linear_operator(weights, sigma))  # noqa: E731
    return Prepared(
        call,
        lambda it: {
            name: np.asarray(getattr(it, name)) for name in ("largest", "smallest", "value")
        },
    )


WORKS = {"product": product, "largest": largest, "density": density, "condition": condition}

if __name__ == "__main__":
    serve(WORKS, ("jaxttp", "jax", "jaxlib"))
