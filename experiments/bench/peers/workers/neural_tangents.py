"""What neural-tangents does, as its documentation recommends."""

from typing import Any

import jax
import jax.numpy as jnp
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


def _dynamics(problem: Problem) -> tuple[Any, Any, Any]:
    """The kernel in the order (N, N, C, C), outputs and times."""
    kernel = jnp.asarray(problem["kernel"]).transpose(0, 2, 1, 3)
    return kernel, jnp.asarray(problem["f0"]), jnp.arange(int(problem["steps"]) + 1.0)


def flow(problem: Problem, options: Options) -> Prepared:
    """`predict.gradient_descent` of the mean cross-entropy; its solver takes no tolerance.

    Options: "double", to integrate in float64 as `jax_enable_x64` has it; "jit".
    """
    jax.config.update("jax_enable_x64", options["double"])
    kernel, f0, ts = _dynamics(problem)
    targets, rate = jnp.asarray(problem["targets"]), float(problem["rate"])
    if options["double"]:
        kernel, f0, targets = (array.astype(float) for array in (kernel, f0, targets))

    def loss(f: Any, y: Any) -> Any:
        return -jnp.mean(jnp.sum(y * jax.nn.log_softmax(f), axis=1))

    def run(kernel: Any, f0: Any) -> Any:
        return nt.predict.gradient_descent(loss, kernel, targets, rate, trace_axes=())(ts, f0)

    fn = jax.jit(run) if options["jit"] else run
    return Prepared(lambda: jax.block_until_ready(fn(kernel, f0)), _train)


def closed(problem: Problem, options: Options) -> Prepared:
    """`predict.gradient_descent_mse`, its decomposition in every call.

    Its loss is the mean over samples and outputs, ours the mean over samples: the rate is C times.
    """
    kernel, f0, ts = _dynamics(problem)
    targets, rate = jnp.asarray(problem["targets"]), float(problem["rate"]) * f0.shape[1]

    def call() -> Any:
        predict = nt.predict.gradient_descent_mse(kernel, targets, rate, trace_axes=())
        return jax.block_until_ready(predict(ts, f0))

    return Prepared(call, _train)


def _train(found: Any) -> Problem:
    return {"train": np.asarray(found)}


WORKS = {"kernel": kernel, "flow": flow, "closed": closed}

if __name__ == "__main__":
    serve(WORKS, ("neural-tangents", "jax", "jaxlib"))
