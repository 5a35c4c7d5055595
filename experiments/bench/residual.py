"""What residual blocks cost on a CPU with their sums computed once, beside the network as it is.

    python -m experiments.bench.residual [--depths 4 8 12 16] [--width 192] [--samples 16]

Vision transformers (layer norms before attention and before the MLP; 64 tokens) of several depths:
a jitted gradient with respect to all weights, of the network as it stands and as jaxttp runs it on
CPUs (`xla_cpu.fusion`), compilation apart, in alternation in one process; medians. The last
column is the largest difference of the two gradients over the largest entry.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxttp import from_nnx
from jaxttp._core.traced import network_of
from jaxttp.models import ViT


class Row(NamedTuple):
    """Seconds of one depth: of the network as it is, and put differently."""

    depth: int
    compiling: tuple[float, float]
    running: tuple[float, float]
    difference: float


def measure(depth: int, width: int, samples: int, rounds: int) -> Row:
    """One depth.

    Args:
        depth: number of blocks.
        width: of the residual stream.
        samples: images of 64 x 64 pixels in a batch.
        rounds: timed gradients of each.
    """
    options: dict[str, Any] = {"image_size": 64, "patch_size": 8, "width": width, "depth": depth}
    model = from_nnx(ViT(5, heads=3, rngs=nnx.Rngs(0), **options))
    x = jax.random.normal(jax.random.key(0), (samples, 64, 64, 3))
    networks = (model.apply_fn, network_of(model.apply_fn).run)
    compiled = [_compile(network, model.params, x) for network in networks]
    found = [jax.block_until_ready(one(model.params, x)) for one, _ in compiled]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for (gradient, _), spent in zip(compiled, times, strict=True):
            begun = time.perf_counter()
            jax.block_until_ready(gradient(model.params, x))
            spent.append(time.perf_counter() - begun)
    plain, ours = (jnp.concatenate([jnp.ravel(a) for a in jax.tree.leaves(g)]) for g in found)
    difference = float(jnp.max(jnp.abs(plain - ours)) / jnp.max(jnp.abs(plain)))
    medians = (statistics.median(times[0]), statistics.median(times[1]))
    return Row(depth, (compiled[0][1], compiled[1][1]), medians, difference)


def _compile(network: Callable[..., Any], params: Any, x: Any) -> tuple[Any, float]:
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(network(w, x) ** 2)))
    begun = time.perf_counter()
    compiled = gradient.lower(params, x).compile()
    return compiled, time.perf_counter() - begun


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--depths", nargs="+", type=int, default=[4, 8, 12, 16])
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    print("| blocks | as it is: compiling | s | sums once: compiling | s | s/s | difference |")
    print("|---|---|---|---|---|---|---|")
    for depth in options.depths:
        row = measure(depth, options.width, options.samples, options.rounds)
        print(
            f"| {row.depth} | {row.compiling[0]:.1f} s | {row.running[0]:.3f} "
            f"| {row.compiling[1]:.1f} s | {row.running[1]:.3f} "
            f"| {row.running[0] / row.running[1]:.2f} | {row.difference:.0e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
