"""How long and in how much memory does a kernel, or a sketch, go to a store?

    python -m experiments.bench.store [--samples 20000] [--max-bytes 1073741824] [--path FOLDER]
                                      [--sketch 4096]

A float32 kernel (output="trace") of a network with 4,810 parameters and ten outputs, tile by tile.
With `--sketch` a sketch of that width, and 300 steps of batches of 32 that read it from the disk.
Peaks are those of the whole process, as the system counts them: Python and JAX included.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Print what it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--max-bytes", type=int, default=1 << 30)
    parser.add_argument(
        "--path", type=Path, help="of the store, which stays; else a folder that goes"
    )
    parser.add_argument("--sketch", type=int, help="its width")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.path or Path(folder)
        if given.sketch is None:
            print(measured(given.samples, given.max_bytes, path), flush=True)
        else:
            print(sketched(given.samples, given.max_bytes, path, given.sketch), flush=True)


def task(samples: int) -> tuple[Any, Any, Any]:
    """A network, its parameters, and samples."""
    import jax
    import jax.numpy as jnp

    first, second, third = (jax.random.key(seed) for seed in range(3))
    params = {
        "w": jax.random.normal(first, (64, 64), jnp.float32) / 8,
        "b": jnp.zeros(74, jnp.float32),
        "v": jax.random.normal(second, (64, 10), jnp.float32) / 8,
    }
    x = jax.random.normal(third, (samples, 64), jnp.float32)

    def network(params: dict, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ params["w"] + params["b"][None, :64])
        return hidden @ params["v"] + params["b"][None, 64:]

    return network, params, x


def measured(samples: int, max_bytes: int, path: Path) -> str:
    """One line: the kernel's size, seconds, and the peak of this process."""
    from jaxttp import print_progress
    from jaxttp.ntk import store_kernel

    network, params, x = task(samples)
    before, begun = peak(), time.perf_counter()
    kernel = store_kernel(
        network, params, x, path=path, output="trace", max_bytes=max_bytes,
        progress=print_progress("tiles"),
    )  # fmt: skip
    spent = time.perf_counter() - begun
    size = kernel.shape[0] * kernel.shape[1] * kernel.dtype.itemsize
    return (
        f"{kernel.shape[0]:,} x {kernel.shape[1]:,} {kernel.dtype}, {size / 1e9:.2f} GB, "
        f"{kernel.computed} tiles of {kernel.tile} samples computed: {spent:.0f} s, peak "
        f"{peak():.0f} MiB, {before:.0f} of them before"
    )


def sketched(samples: int, max_bytes: int, path: Path, dim: int) -> str:
    """The same of a sketch, and of training that reads it."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxttp import print_progress
    from jaxttp.dynamics import recursion
    from jaxttp.ntk import store_sketch

    network, params, x = task(samples)
    y = jnp.argmax(x[:, :10], axis=1)
    before, begun = peak(), time.perf_counter()
    kept = store_sketch(
        network, params, x, path=path, key=jax.random.key(4), dim=dim, max_bytes=max_bytes,
        progress=print_progress("blocks"),
    )  # fmt: skip
    spent, stored = time.perf_counter() - begun, peak()
    begun = time.perf_counter()
    course = recursion(
        kept.kernel(), network(params, x), y, loss="cross_entropy", steps=300, batch_size=32,
        optimizer=optax.sgd(0.1, momentum=0.9), key=jax.random.key(5),
    )  # fmt: skip
    jax.block_until_ready(course.train)
    size = kept.dtype.itemsize
    for length in kept.shape:
        size *= length
    return (
        f"sketch {kept.shape} {kept.dtype}, {size / 1e9:.2f} GB, {kept.computed} blocks of "
        f"{kept.tile} samples computed: {spent:.0f} s, peak {stored:.0f} MiB, {before:.0f} of them "
        f"before; 300 steps of 32: {time.perf_counter() - begun:.0f} s, peak {peak():.0f} MiB"
    )


def peak() -> float:
    """The most memory that this process had so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
