"""What jaxttp does for a row, as a user would write it."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.peers import networks
from experiments.bench.peers.protocol import Options, Prepared, Problem, serve
from experiments.bench.peers.workers.plain import gram
from experiments.bench.transformer import operations
from jaxttp import empirical_ntk
from jaxttp.ntk import sketch_jacobian

SIDE = 2048


def kernel(problem: Problem, options: Options) -> Prepared:
    """The whole kernel by `empirical_ntk`. Options: its keywords."""
    apply_fn, params, x = networks.load(problem)

    def count() -> float:
        traced = jax.make_jaxpr(lambda x: empirical_ntk(apply_fn, params, x, **options))(x)
        return operations(traced.jaxpr)

    call = lambda: jax.block_until_ready(empirical_ntk(apply_fn, params, x, **options))  # noqa: E731
    return Prepared(call, lambda found: {"kernel": np.asarray(found)}, count)


def product(problem: Problem, options: Options) -> Prepared:
    """A product of square matrices in float32: the rate that operations can have here."""
    size = options.get("side", SIDE)
    square = jnp.ones((size, size), jnp.float32)
    times = jax.jit(lambda a: a @ a)
    call = lambda: jax.block_until_ready(times(square))  # noqa: E731
    return Prepared(call, lambda found: {}, lambda: 2.0 * size**3)


def sketch(problem: Problem, options: Options) -> Prepared:
    """`sketch_jacobian`. Options: its keywords."""
    apply_fn, params, x = networks.load(problem)
    key = jax.random.key(0)
    call = lambda: jax.block_until_ready(  # noqa: E731
        sketch_jacobian(apply_fn, params, x, key=key, **options)
    )
    return Prepared(call, gram)


WORKS = {"kernel": kernel, "product": product, "sketch": sketch}

if __name__ == "__main__":
    serve(WORKS, ("jaxttp", "jax", "jaxlib"))
