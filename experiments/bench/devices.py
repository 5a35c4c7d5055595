"""What each device holds, and what travels, where a kernel's rows lie on several devices.

    python -m experiments.bench.devices

Compiled for one, two and four virtual CPU devices, which share this machine's cores: sizes are read
off the compiled functions, no seconds. "holds" is what a function takes as arguments and needs
beside them on one device, "largest" its largest array, "gathered" what all devices receive in one
product with the kernel.
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

DEVICES = 4
FLAG = f"--xla_force_host_platform_device_count={DEVICES}"
if __name__ == "__main__":  # before JAX starts
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}".strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from experiments.bench.harness import Row, parser, publish, store_of  # noqa: E402
from jaxttp.dynamics import recursion  # noqa: E402
from jaxttp.ntk import RowSharded, empirical_ntk, extreme_eigenvalues  # noqa: E402
from jaxttp.ntk.row_sharded import automatic  # noqa: E402

MODULE = "experiments.bench.devices"
COLUMNS = ("function", "devices", "holds, MiB", "largest, MiB", "gathered, KiB")
SAMPLES, CLASSES, WIDTH = 400, 10, 128
WIDE = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "pred": 1}


def sizes(text: str) -> Iterator[int]:
    """The bytes of every array that a compiled function's text names.

    Example:
        >>> list(sizes("f32[4,2] = all-gather(f32[2,2], pred[8])"))
        [32, 16, 8]
    """
    for kind, shape in re.findall(r"\b(f64|f32|s32|u32|pred)\[([0-9,]+)\]", text):
        yield WIDE[kind] * math.prod(int(size) for size in shape.split(","))


def network(params: Any, x: Any) -> Any:
    """Outputs (N, CLASSES) of an MLP with one hidden layer."""
    return jnp.tanh(x @ params["w"]) @ params["v"]


def rows() -> Iterator[Row]:
    """A recursion and a Lanczos process on one, two and four devices."""
    first, second, third = (jax.random.key(seed) for seed in range(3))
    params = {
        "w": jax.random.normal(first, (64, WIDTH)) / 8,
        "v": jax.random.normal(second, (WIDTH, CLASSES)) / math.sqrt(WIDTH),
    }
    x = jax.random.normal(third, (SAMPLES, 64))
    f0, y = network(params, x), jnp.arange(SAMPLES) % CLASSES
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
            compiled = jax.jit(function).lower(kernel).compile()
            memory, text = compiled.memory_analysis(), compiled.as_text()
            held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            gathers = re.findall(r"= (.*)all-gather\(", text)
            travel = sum(max(sizes(shapes)) for shapes in gathers)
            numbers = (held / 2**20, max(sizes(text), default=0) / 2**20, travel / 2**10)
            yield dict(zip(COLUMNS, (name, count, *numbers), strict=True))


def main() -> None:
    """Print the table."""
    options = parser(MODULE, __doc__).parse_args()
    publish(rows(), COLUMNS, store_of(MODULE, options))


if __name__ == "__main__":
    main()
