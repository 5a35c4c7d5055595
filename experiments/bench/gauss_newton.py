"""What exact Gauss-Newton costs: steps against Adam's, backward memory, the closed-form kernel.

    python -m experiments.bench.gauss_newton [steps] [svd] [memory] [kernel] [large]

CPU time, not wall time, of alternating steps in one process; the median of the repeats. Wall time,
and what other processes and LAPACK's threads do to it: `experiments.bench.threads`.
"""

import functools
import resource
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxttp.gauss_newton import (
    gauss_newton,
    orthonormal_readout,
    revmlp_forward,
    revmlp_kernel,
)


def network(
    blocks: int, half: int, width: int, samples: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights, bottlenecks and inputs, float32."""
    keys = jax.random.split(jax.random.key(0), 3)
    weights = 0.02 * jax.random.normal(keys[0], (blocks, 2, half, width))
    bottlenecks = jax.random.normal(keys[1], (blocks, 2, width, half)) / width**0.5
    return weights, bottlenecks, jax.random.normal(keys[2], (samples, 2 * half))


def cpu_times(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each function, called in turn after one call to compile."""
    for function in functions.values():
        jax.block_until_ready(function())
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.process_time()
            jax.block_until_ready(function())
            times[name].append(time.process_time() - start)
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def step_functions(
    samples: int = 1024, half: int = 392, width: int = 2000, blocks: int = 2, svd: bool = False
) -> dict[str, Callable[[], object]]:
    """A compiled step of each optimiser on the same batch; the SVD on demand, it is slow."""
    w, v, x = network(blocks, half, width, samples)
    p = orthonormal_readout(jax.random.key(1), 10, 2 * half)
    y = jax.random.randint(jax.random.key(2), (samples,), 0, 10)
    targets = jax.nn.one_hot(y, 10)
    adam = optax.adam(1e-3)

    def loss(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        f = revmlp_forward(w, v, x, reversible=False) @ p.T
        return 0.5 * jnp.mean(jnp.sum((f - targets) ** 2, axis=1))

    @jax.jit
    def adam_step(w, state, v, x):
        updates, state = adam.update(jax.grad(loss)(w, v, x), state, w)
        return optax.apply_updates(w, updates), state

    start = adam.init(w)
    functions: dict[str, Callable[[], object]] = {"adam": lambda: adam_step(w, start, v, x)}
    kinds = {
        "exact (cholesky)": {"pseudoinverse": "exact"},
        "truncate (eigh)": {"rtol": 0.01},
        "truncate (svd)": {"rtol": 0.01, "method": "svd"},
    }
    for name, options in list(kinds.items())[: 3 if svd else 2]:
        optimizer = gauss_newton(1.0, readout=p, measure=False, **options)

        @jax.jit
        def step(w, state, v, x, optimizer=optimizer):
            updates, state = optimizer.update(w, state, w, x=x, y=y, bottlenecks=v)
            return optax.apply_updates(w, updates), state

        state = optimizer.init(w)
        functions[name] = lambda step=step, state=state: step(w, state, v, x)
    return functions


def step_costs(
    samples: int = 1024,
    half: int = 392,
    width: int = 2000,
    blocks: int = 2,
    svd: bool = False,
    repeats: int = 5,
) -> dict[str, float]:
    """CPU seconds of a step of each optimiser."""
    return cpu_times(step_functions(samples, half, width, blocks, svd), repeats)


def steps(svd: bool = False) -> None:
    """Print the costs of a step at the size of MNIST."""
    samples, half, width, blocks = 1024, 392, 2000, 2
    found = step_costs(samples, half, width, blocks, svd)
    print(f"CPU seconds a step, {blocks} blocks, n = {samples}, h = {half}, m = {width}, float32")
    for name, seconds in found.items():
        print(f"  {name:18s} {seconds:7.3f} s   {seconds / found['adam']:5.2f} x Adam")


def memory() -> None:
    """Temporary memory of compiled gradients, by depth."""
    print("temporary memory of the gradient in W, n = 128, h = 64, m = 512, float32")
    for blocks in (4, 16, 64):
        w, v, x = network(blocks, 64, 512, 128)
        sizes = []
        for reversible in (True, False):
            gradient = jax.jit(
                jax.grad(
                    lambda w, v, x, r=reversible: jnp.sum(revmlp_forward(w, v, x, reversible=r))
                )
            )
            analysis = gradient.lower(w, v, x).compile().memory_analysis()
            sizes.append(analysis.temp_size_in_bytes / 2**20)
        print(f"  L = {blocks:2d}   reversible {sizes[0]:7.2f} MiB   stored {sizes[1]:7.2f} MiB")


def kernel(samples: int = 100, half: int = 392, width: int = 2000, blocks: int = 8) -> None:
    """The exact kernel of 12.5 million weights."""
    w, v, x = network(blocks, half, width, samples)
    p = orthonormal_readout(jax.random.key(1), 10, 2 * half)

    @jax.jit
    def compute(w, v, x):
        return revmlp_kernel(w, v, x, readout=p)

    analysis = compute.lower(w, v, x).compile().memory_analysis()
    start = time.perf_counter()
    jax.block_until_ready(compute(w, v, x))
    first = time.perf_counter() - start
    start = time.perf_counter()
    jax.block_until_ready(compute(w, v, x))
    wall = time.perf_counter() - start
    held = (analysis.temp_size_in_bytes + analysis.output_size_in_bytes) / 2**20
    print(
        f"kernel of {w.size / 1e6:.1f} M weights, {samples} samples, 10 outputs: {wall:.2f} s "
        f"({first:.2f} s with compilation), {held:.0f} MiB beside the network's "
        f"{analysis.argument_size_in_bytes / 2**20:.0f} MiB"
    )


def large(samples: int = 1024, half: int = 1536, width: int = 8000, blocks: int = 6) -> None:
    """One truncated step of 147 million weights: time and the process's highest memory."""
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    w, v, x = network(blocks, half, width, samples)
    p = orthonormal_readout(jax.random.key(1), 10, 2 * half)
    y = jax.random.randint(jax.random.key(2), (samples,), 0, 10)
    optimizer = gauss_newton(1.0, readout=p, rtol=0.01, measure=False)
    state = optimizer.init(w)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, state, v, x):
        updates, state = optimizer.update(w, state, w, x=x, y=y, bottlenecks=v)
        return optax.apply_updates(w, updates), state

    begun, cpu = time.perf_counter(), time.process_time()
    w, state = jax.block_until_ready(step(w, state, v, x))
    wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle) / 2**20
    finite = bool(jnp.all(jnp.isfinite(w)))
    print(
        f"{w.size / 1e6:.0f} M weights, {samples} samples: {wall:.0f} s wall, {cpu:.0f} s CPU with "
        f"compilation; {peak:.1f} GiB above the idle process; finite: {finite}"
    )


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["steps", "memory", "kernel"]
    for name in chosen:
        known = {"steps": steps, "memory": memory, "kernel": kernel, "large": large}
        known["svd"] = functools.partial(steps, svd=True)
        known[name]()
