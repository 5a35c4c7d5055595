"""What neural-tangents does, as its documentation recommends."""

from typing import Any

import jax
import neural_tangents as nt
import numpy as np

from experiments.bench.peers import networks
from experiments.bench.peers.protocol import Options, Prepared, Problem, serve


def kernel(problem: Problem, options: Options) -> Prepared:
    """The whole kernel by `empirical_ntk_fn`, jitted, on the variant that is asked for.

    Options: "implementation" (a name of `nt.NtkImplementation`), "batch" (samples a tile by
    `nt.batch`, 0 for all at once).
    """
    apply_fn, params, x = networks.load(problem)
    kernel_fn = nt.empirical_ntk_fn(
        apply_fn, trace_axes=(), vmap_axes=0,
        implementation=nt.NtkImplementation[options["implementation"]],
    )  # fmt: skip
    if size := options.get("batch", 0):
        fn = nt.batch(jax.jit(kernel_fn), batch_size=size, device_count=0, store_on_device=False)
        call = lambda: fn(x, None, params)  # noqa: E731
    else:
        fn = jax.jit(lambda params, x: kernel_fn(x, None, params))
        call = lambda: jax.block_until_ready(fn(params, x))  # noqa: E731
    return Prepared(call, lambda found: {"kernel": np.asarray(found).transpose(0, 2, 1, 3)})


WORKS: dict[str, Any] = {"kernel": kernel}

if __name__ == "__main__":
    serve(WORKS, ("neural-tangents", "jax", "jaxlib"))
