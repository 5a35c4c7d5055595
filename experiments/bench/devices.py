"""What does each device hold, and what travels, where a kernel's rows lie on several?

    python -m experiments.bench.devices [--strong [--samples N] [--rounds R]]

Sizes of compiled programs, on virtual CPU devices. With `--strong` seconds of the same work on one,
two and four of them in turns: they share this machine's cores, so that no more than "no slower" is
to be had. "holds" is what a program takes as arguments and needs beside them, "largest" its largest
array, "gathered" what all devices receive in one product with the kernel, or one turn of its tiles.
"""

import argparse
import itertools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

DEVICES = 4
SAMPLES, CLASSES, WIDTH = 400, 10, 128
WIDE = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "pred": 1}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--strong", action="store_true", help="seconds in place of sizes")
    parser.add_argument("--rounds", type=int, default=9, help="of those")
    parser.add_argument("--samples", type=int, default=512, help="of those")
    given = parser.parse_args()
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    if given.strong:
        strong(given.samples, given.rounds)
        return
    print("| program | devices | holds (MiB) | largest (MiB) | gathered (KiB) |")
    print("|---|---|---|---|---|")
    for name, count, compiled in programs():
        memory = compiled.memory_analysis()
        holds = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**20
        text = compiled.as_text()
        largest = max(sizes(text), default=0) / 2**20
        gathers = [line for line in text.splitlines() if re.search(r"= .*all-gather\(", line)]
        travel = sum(max(sizes(line.partition("all-gather(")[0])) for line in gathers) / 2**10
        print(f"| {name} | {count} | {holds:.1f} | {largest:.1f} | {travel:.1f} |", flush=True)


def sizes(text: str) -> Iterator[int]:
    """The bytes of every array that a program's text names."""
    for kind, shape in re.findall(r"\b(f64|f32|s32|u32|pred)\[([0-9,]+)\]", text):
        yield WIDE[kind] * math.prod(int(size) for size in shape.split(","))


def programs() -> Iterator[tuple[str, int, Any]]:
    """What is compiled, for one, two and four devices."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxttp.dynamics import recursion
    from jaxttp.ntk import RowSharded, empirical_ntk, extreme_eigenvalues
    from jaxttp.ntk.row_sharded import automatic

    first, second, third = (jax.random.key(seed) for seed in range(3))
    params = {
        "w": jax.random.normal(first, (64, WIDTH)) / 8,
        "v": jax.random.normal(second, (WIDTH, CLASSES)) / math.sqrt(WIDTH),
    }
    x = jax.random.normal(third, (SAMPLES, 64))

    def network(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["w"]) @ params["v"]

    f0 = network(params, x)
    y = jnp.arange(SAMPLES) % CLASSES
    descent = {"loss": "cross_entropy", "optimizer": optax.sgd(0.1), "steps": 20}
    asked: dict[str, Callable[[Any], Any]] = {
        "recursion, 20 steps": lambda kernel: recursion(kernel, f0, y, **descent).train[-1],
        "Lanczos, 16 steps": lambda kernel: extreme_eigenvalues(kernel, key=first, depth=16),
    }
    for count in (1, 2, 4):
        mesh = jax.make_mesh((count,), ("rows",), devices=jax.devices()[:count])
        kernel = empirical_ntk(network, params, x, mesh=mesh)
        if count > 1:
            kernel = RowSharded.of(kernel, automatic(mesh))
        for name, function in asked.items():
            yield name, count, jax.jit(function).lower(kernel).compile()


def strong(samples: int, rounds: int) -> None:
    """Print medians of seconds, and their range, of whole calls in turns."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxttp.dynamics import recursion
    from jaxttp.ntk import RowSharded, empirical_ntk, sketch_jacobian
    from jaxttp.ntk.row_sharded import automatic

    keys = jax.random.split(jax.random.key(0), 4)
    widths = (64, 512, 512, CLASSES)
    params = [
        jax.random.normal(key, pair, jnp.float32) / math.sqrt(pair[0])
        for key, pair in zip(keys, itertools.pairwise(widths), strict=False)
    ]
    x = jax.random.normal(keys[3], (samples, 64), jnp.float32)

    def network(params: Any, x: Any) -> Any:
        for weights in params[:-1]:
            x = jnp.tanh(x @ weights)
        return x @ params[-1]

    f0, y = network(params, x), jnp.arange(len(x)) % CLASSES
    descent = {"loss": "cross_entropy", "optimizer": optax.sgd(0.1), "steps": 50}
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    for count in (1, 2, 4):
        mesh = jax.make_mesh((count,), ("rows",), devices=jax.devices()[:count])
        kernel = empirical_ntk(network, params, x, mesh=mesh)
        if count > 1:
            kernel = RowSharded.of(kernel, automatic(mesh))
        for name, call in (
            (f"exact kernel, N = {samples:,}",
             lambda m=mesh: empirical_ntk(network, params, x, mesh=m)),
            ("sketch, k = 1,024",
             lambda m=mesh: sketch_jacobian(network, params, x, key=keys[0], dim=1024, mesh=m)),
            ("recursion, 50 steps", lambda k=kernel: recursion(k, f0, y, **descent).train),
        ):  # fmt: skip
            calls[name, count] = call
    spent: dict[tuple[str, int], list[float]] = {asked: [] for asked in calls}
    for number in range(rounds + 1):
        for asked, call in calls.items():
            begun = time.perf_counter()
            jax.block_until_ready(jax.tree.leaves(call()))
            if number:  # the first one compiles
                spent[asked].append(time.perf_counter() - begun)
    print("| work | 1 device, s | 2 | 4 |\n|---|---|---|---|")
    for name in dict.fromkeys(name for name, _ in calls):
        cells = [
            f"{statistics.median(found):.3f} ({min(found):.3f} - {max(found):.3f})"
            for (what, _), found in spent.items()
            if what == name
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
