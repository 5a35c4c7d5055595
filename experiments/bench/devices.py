"""What does each device hold, and what travels, where a kernel's rows lie on several?

    python -m experiments.bench.devices

Sizes of compiled programs, on virtual CPU devices, which share this machine's cores: no times are
measured. "holds" is what a program takes as arguments and needs beside them, "largest" its largest
array, "gathered" what all devices receive in one product with the kernel, or one turn of its tiles.
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

DEVICES = 4
SAMPLES, CLASSES, WIDTH = 400, 10, 128
WIDE = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "pred": 1}


def main() -> None:
    """Print the table."""
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
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


if __name__ == "__main__":
    main()
