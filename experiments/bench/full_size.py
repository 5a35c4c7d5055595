"""Time and memory of a forecast of full-size networks, one process for each case.

    python -m experiments.bench.full_size resnet18 vit_small
    python -m experiments.bench.full_size resnet18 --sketch-dim 4096

N = 150 random images of 64x64 pixels in C = 5 classes, random weights (batch norm at the averages
of the images); batch norm, convolutions and attention are those of the checkpoints, so weights
from a file cost the same. Columns: forecast = wall seconds of `predict_training_time`, of which
compile; CPU = CPU seconds; peak = highest resident memory of the process, imports included.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import jax
import numpy as np
from flax import nnx

from jaxttp import from_nnx, predict_training_time
from jaxttp.models import calibrate_batch_norm, freeze, head_only, lora, make_model

CASES = ("resnet18", "vit_small")
PARTS = ("all", "head", "lora")


def random_network(name: str, x: np.ndarray, classes: int) -> nnx.Module:
    """A network by name with random weights, for such images; batch norm at their averages."""
    size = x.shape[1]
    network = nnx.jit(lambda: make_model(name, classes, image_size=size, rngs=nnx.Rngs(0)))()
    return network if name.startswith("vit") else calibrate_batch_norm(network, x)


def measure(name: str, options: argparse.Namespace) -> dict:
    """One forecast in this process."""
    n, classes, size = options.samples, 5, options.image_size
    draw = np.random.default_rng(0)
    x = draw.standard_normal((n, size, size, 3)).astype(np.float32)
    y = np.arange(n) % classes
    model = from_nnx(random_network(name, x, classes))
    if options.train == "head":
        model = freeze(model, head_only)
    elif options.train == "lora":
        model = lora(model, rank=4, key=jax.random.key(1))
    size = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    begun, used = time.perf_counter(), time.process_time()
    found = predict_training_time(
        *model, x, y, relinearize=0, learning_rate=options.learning_rate, steps=150,
        sketch_dim=options.sketch_dim, key=jax.random.key(0), max_bytes=options.max_bytes,
        kernel_batch_size=options.batch_size,
    )  # fmt: skip
    return {
        "case": name,
        "trained": options.train,
        "parameters": size,
        "kernel": "exact" if options.sketch_dim is None else f"sketch {options.sketch_dim}",
        "forecast": time.perf_counter() - begun,
        "compile": found.cost.compile_seconds,
        "CPU": time.process_time() - used,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "stable": found.stable,
        "max_learning_rate": found.max_learning_rate,
        "steps": {str(e): t for e, t in found.steps.items()},
    }


def main(arguments: list[str] | None = None) -> None:
    """Print a table; each case runs in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} or any network by name")
    parser.add_argument("--train", choices=PARTS, default="all")
    parser.add_argument("--samples", type=int, default=150)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--sketch-dim", type=int)
    parser.add_argument("--batch-size", type=int, help="samples a tile of the kernel")
    parser.add_argument("--max-bytes", type=int, default=4 * 2**30)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        print(json.dumps(measure(options.cases[0], options)))
        return
    given = sys.argv[1:] if arguments is None else arguments
    flags = [word for word in given if word not in options.cases]
    print("| network | trained | parameters | kernel | forecast s | compile s | CPU s | peak GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.cases or CASES:
        command = [sys.executable, "-m", "experiments.bench.full_size", name, *flags, "--here"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(f"| {name} | failed with {done.returncode} |")
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        print(
            f"| {row['case']} | {row['trained']} | {row['parameters']:,} | {row['kernel']} "
            f"| {row['forecast']:.0f} | {row['compile']:.0f} | {row['CPU']:.0f} "
            f"| {row['peak']:.2f} |",
            flush=True,
        )
        print(f"# {row}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
