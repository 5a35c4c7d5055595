"""Kernels of a small transformer beside the rate of a large matrix product in the same process.

    python -m experiments.bench.transformer [gpt2 llama] [--methods auto layerwise jacobian ...]

Decoders of the library's own: width 256, six blocks, 64 tokens, N = 64 sequences, the logits of
four words at the last token (C = 4), tied embeddings of 1,024 tokens; "gpt2" with layer norms,
biases and learned positions, "llama" with RMS norms, rotary positions, gates, two heads of keys
and values. A process for each network and method. Products of (2048, 2048) float32 matrices are
timed in alternation with the kernel, before and after each.

Operations are those of all products of matrices in the programs that a call runs, contractions
included, as JAX traces them; norms, activations and copies count nothing. "ratio" is the kernel's
time over what these operations take at the rate of the product, by the clock and by CPU seconds
of the process: medians of the rounds. On a machine that others use the second says more.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxttp import from_nnx, label_words
from jaxttp.models import Architecture, Decoder
from jaxttp.models.language.architecture import read_rotary
from jaxttp.ntk import ntk_plan
from jaxttp.ntk.gram import kernel_of

METHODS = ("auto", "layerwise", "jacobian", "vector_product")
NETWORKS = ("gpt2", "llama")
SIDE = 2048


class Sizes(NamedTuple):
    """Of the network and its samples."""

    samples: int = 64
    tokens: int = 64
    width: int = 256
    depth: int = 6
    words: int = 4
    vocabulary: int = 1024


LARGE = Sizes()
"""What is measured."""
SMALL = Sizes(3, 4, 8, 1, 2, 11)
"""For the tests."""


def make(name: str, sizes: Sizes) -> tuple[Callable[..., Any], Any, Any]:
    """A network, its parameters and its inputs."""
    width, heads = sizes.width, 4
    common: dict[str, Any] = {
        "width": width, "depth": sizes.depth, "heads": heads, "length": sizes.tokens, "tied": True,
    }  # fmt: skip
    if name == "llama":
        shape = Architecture(
            "llama", sizes.vocabulary, hidden=11 * width // 4, kv_heads=2, activation="silu",
            rotary=read_rotary({}, width // heads, sizes.tokens), rms_norm=True, gated=True,
            biases=(), **common,
        )  # fmt: skip
    else:
        shape = Architecture("gpt2", sizes.vocabulary, hidden=4 * width, **common)
    model = from_nnx(Decoder(shape, head="language_model", rngs=nnx.Rngs(0)))
    draw = np.random.default_rng(0)
    ids = draw.integers(0, sizes.vocabulary, (sizes.samples, sizes.tokens))
    return label_words(model.apply_fn, list(range(sizes.words))), model.params, jnp.asarray(ids)


def operations(jaxpr: Any) -> float:
    """Operations of products of matrices and convolutions in a traced function, loops unrolled."""
    total = 0.0
    for equation in jaxpr.eqns:
        inner = list(jex.core.jaxprs_in_params(equation.params))
        total += equation.params.get("length", 1) * sum(operations(one) for one in inner)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            size = float(np.prod([shape[axis] for axis in contracted]))
            total += 2 * size * equation.outvars[0].aval.size
        elif equation.primitive.name == "conv_general_dilated":
            kernel, numbers = equation.invars[1].aval.shape, equation.params["dimension_numbers"]
            outputs = kernel[numbers.rhs_spec[0]]  # channels into one group, and the window, remain
            total += 2 * float(np.prod(kernel)) / outputs * equation.outvars[0].aval.size
    return total


def measure(
    name: str, method: str, rounds: int, sizes: Sizes = LARGE, side: int = SIDE
) -> dict[str, Any]:
    """One network and method in this process."""
    apply_fn, params, x = make(name, sizes)
    plan = ntk_plan(apply_fn, params, x, method=method)
    square = jnp.ones((side, side))
    product = jax.jit(lambda a: a @ a)

    def call() -> Any:
        return kernel_of(apply_fn, params, x, method=method)

    begun = time.perf_counter()
    jax.block_until_ready(call())
    first = time.perf_counter() - begun
    traced = jax.make_jaxpr(lambda x: kernel_of(apply_fn, params, x, method=method))(x)
    counted = operations(traced.jaxpr)
    timed(lambda: product(square))
    rates, found = [timed(lambda: product(square))], []
    for _ in range(rounds):
        found.append(timed(call))
        rates.append(timed(lambda: product(square)))
    ratios = []
    for index, spent in enumerate(found):
        around = [(a + b) / 2 for a, b in zip(rates[index], rates[index + 1], strict=True)]
        ratios.append([s * 2 * side**3 / (r * counted) for s, r in zip(spent, around, strict=True)])
    wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
    seconds = [statistics.median(column) for column in zip(*found, strict=True)]
    return {
        "network": name, "method": method, "chosen": plan.method, "first": first,
        "blocks": f"{plan.rows}x{plan.columns}/{plan.chunk}", "operations": counted,
        "planned": plan.flops[plan.method], "wall": seconds[0], "cpu": seconds[1],
        "rate": 2 * side**3 / statistics.median(r[1] for r in rates), "ratio": wall,
        "cpu ratio": cpu, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }  # fmt: skip


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock, and of the process's CPUs."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return time.perf_counter() - wall, time.process_time() - cpu


def main(arguments: list[str] | None = None) -> None:
    """Measure every network by every method, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", choices=[[], *NETWORKS], default=[], metavar="NET")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["auto"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        print(json.dumps(measure(options.networks[0], options.methods[0], options.rounds)))
        return
    print(
        "| network | method | blocks | 1e9 operations | first s | s | CPU s "
        "| 1e9/CPU s of a product | ratio | ratio, CPU | peak GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in options.networks or NETWORKS:
        for method in options.methods:
            command = [sys.executable, "-m", "experiments.bench.transformer", name, "--here"]
            command += ["--methods", method, "--rounds", str(options.rounds)]
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            r = json.loads(out.splitlines()[-1])
            label = method + (f" ({r['chosen']})" if method == "auto" else "")
            print(
                f"| {name} | {label} | {r['blocks']} | {r['operations'] / 1e9:.0f} "
                f"| {r['first']:.0f} | {r['wall']:.1f} | {r['cpu']:.1f} | {r['rate'] / 1e9:.0f} "
                f"| {r['ratio']:.2f} | {r['cpu ratio']:.2f} | {r['peak']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
