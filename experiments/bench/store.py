"""How long and in how much memory does a kernel go to a store?

    python -m experiments.bench.store [--samples 20000] [--max-bytes 1073741824] [--path FOLDER]

A float32 kernel (output="trace") of a network with 4,810 parameters and ten outputs, tile by tile.
Peaks are those of the whole process, as the system counts them: Python and JAX included.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Print what it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--max-bytes", type=int, default=1 << 30)
    parser.add_argument(
        "--path", type=Path, help="of the store, which stays; else a folder that goes"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(measured(given.samples, given.max_bytes, given.path or Path(folder)), flush=True)


def measured(samples: int, max_bytes: int, path: Path) -> str:
    """One line: the kernel's size, seconds, and the peak of this process."""
    import jax
    import jax.numpy as jnp

    from jaxttp import print_progress
    from jaxttp.ntk import store_kernel

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


def peak() -> float:
    """The most memory that this process had so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
