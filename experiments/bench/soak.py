"""Many forecasts of changing shapes in one process: memory and compiled programs.

    python -m experiments.bench.soak [--forecasts 200] [--every 20] [--same]

Forecast by forecast a network of other widths, samples, classes and steps, drawn from a seed; one
in four has mini-batches, one in four Adam, one in four a loss of squares. Every so many forecasts a
line says how much memory the process has and how many programs it holds. ``--same`` draws four
shapes again and again: then nothing may grow.
"""

import argparse
import gc
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxttp import predict_training_time


def network(params: Any, x: Any) -> jax.Array:
    """Two layers."""
    return jnp.tanh(x @ params["w"]) @ params["v"]


def forecast(seed: int) -> float:
    """The last loss of a random forecast."""
    rng = np.random.default_rng(seed)
    n, d, h, c = (int(rng.integers(low, high)) for low, high in ((6, 40), (2, 12), (2, 24), (2, 6)))
    params = {"w": jnp.asarray(rng.normal(size=(d, h)) / d**0.5, jnp.float32),
              "v": jnp.asarray(rng.normal(size=(h, c)) / h**0.5, jnp.float32)}  # fmt: skip
    x, y = jnp.asarray(rng.normal(size=(n, d)), jnp.float32), np.arange(n) % c
    kind, steps = seed % 4, int(rng.integers(5, 40))
    options: dict[str, Any] = {"learning_rate": 0.1, "steps": steps}
    if kind == 1:
        options |= {"batch_size": int(rng.integers(2, n)), "key": jax.random.key(seed)}
    elif kind == 2:
        options = {"optimizer": optax.adam(0.01), "steps": steps}
    elif kind == 3:
        options["loss"] = "squared_error"
    return float(predict_training_time(network, params, x, jnp.asarray(y), **options).loss[-1])


def memory() -> float:
    """What the process has, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def maps() -> int:
    """How many pieces of memory are mapped; Linux allows 65530, and every program takes some."""
    return len(Path("/proc/self/maps").read_text().splitlines())


def programs() -> int:
    """How many compiled programs are alive."""
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


def main(arguments: list[str] | None = None) -> int:
    """Forecast, and print what it costs to keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--forecasts", type=int, default=200, help="how many")
    parser.add_argument("--every", type=int, default=20, help="forecasts between two lines")
    parser.add_argument("--same", action="store_true", help="four shapes, again and again")
    options = parser.parse_args(arguments)
    print("forecasts   MiB programs   maps  seconds", flush=True)
    begun = time.perf_counter()
    for done in range(options.forecasts + 1):
        if done % options.every == 0:
            spent = time.perf_counter() - begun
            print(f"{done:9d} {memory():5.0f} {programs():8d} {maps():6d} {spent:8.0f}", flush=True)
        forecast(done % 4 if options.same else done)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
