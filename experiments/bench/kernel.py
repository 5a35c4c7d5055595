"""Time, peak memory and error of the kernel, one process for each case and method.

    python -m experiments.bench.kernel                      # every case, the method "auto"
    python -m experiments.bench.kernel digits mlp --methods auto layerwise jacobian
    python -m experiments.bench.kernel resnet20-1000 --max-bytes 2147483648

Columns: compile = first call minus a later one; run = median wall seconds of a call; CPU = median
CPU seconds of a call (on a machine shared with others, half of it is what two free cores would
need at least); peak = highest resident memory of the process above that of an idle one that has
imported JAX; error = largest deviation from a float64 Jacobian on a few samples, relative to the
largest entry. "plain" is `vmap(jacrev)` and one einsum, what one writes without a library.
"""

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

METHODS = ("auto", "layerwise", "jacobian", "vector_product", "plain")


class Case(NamedTuple):
    """A network and its inputs."""

    apply_fn: Callable[[Any, Any], Any]
    params: Any
    x: Any


def _conv(layer: Any, x: Any, stride: int = 1) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(
        x, layer["w"], (stride, stride), "SAME", dimension_numbers=numbers
    )
    return y + layer["b"]


def _layer(rng: np.random.Generator, *shape: int) -> dict[str, Any]:
    scale = np.sqrt(2 / np.prod(shape[:-1]))
    w = scale * rng.standard_normal(shape)
    return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(shape[-1], jnp.float32)}


def _inputs(rng: np.random.Generator, *shape: int) -> Any:
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def resnet(n: int, size: int, channels: int, classes: int, blocks: int) -> Case:
    """Residual stages of widths 16/32/64, strides 1/2/2, `blocks` blocks each; norm-free."""
    rng = np.random.default_rng(0)
    params: dict[str, Any] = {"stem": _layer(rng, 3, 3, channels, 16)}
    plan: list[tuple[str, int]] = []
    width = 16
    for stage, out in enumerate((16, 32, 64)):
        for block in range(blocks):
            name = f"stage{stage}_{block}"
            stride = 2 if stage and not block else 1
            params[name] = {
                "one": _layer(rng, 3, 3, width, out),
                "two": _layer(rng, 3, 3, out, out),
            }
            if stride > 1:
                params[name]["short"] = _layer(rng, 1, 1, width, out)
            plan.append((name, stride))
            width = out
    params["head"] = _layer(rng, 64, classes)

    def apply_fn(params: Any, x: Any) -> Any:
        h = jax.nn.relu(_conv(params["stem"], x))
        for name, stride in plan:
            block = params[name]
            inner = _conv(block["two"], jax.nn.relu(_conv(block["one"], h, stride)))
            short = _conv(block["short"], h, stride) if "short" in block else h
            h = jax.nn.relu(short + 0.5 * inner)
        return h.mean((1, 2)) @ params["head"]["w"] + params["head"]["b"]

    return Case(apply_fn, params, _inputs(rng, n, size, size, channels))


def mlp(n: int, widths: tuple[int, ...] = (784, 512, 512, 512, 10)) -> Case:
    """ReLU network."""
    rng = np.random.default_rng(0)
    params = [_layer(rng, a, b) for a, b in itertools.pairwise(widths)]

    def apply_fn(params: Any, x: Any) -> Any:
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    return Case(apply_fn, params, _inputs(rng, n, widths[0]))


def vit(n: int, size: int = 32, patch: int = 4, width: int = 64, depth: int = 4) -> Case:
    """Vision transformer: patches, positions, pre-norm attention blocks, mean over tokens."""
    rng = np.random.default_rng(0)
    tokens, heads, classes = (size // patch) ** 2, 4, 10
    params: dict[str, Any] = {
        "embed": _layer(rng, patch * patch * 3, width),
        "position": 0.1 * _inputs(rng, tokens, width),
        "head": _layer(rng, width, classes),
    }
    for block in range(depth):
        params[f"block{block}"] = {
            "norm1": jnp.ones(width),
            "norm2": jnp.ones(width),
            "qkv": _layer(rng, width, 3 * width),
            "out": _layer(rng, width, width),
            "up": _layer(rng, width, 2 * width),
            "down": _layer(rng, 2 * width, width),
        }

    def dense(layer: Any, h: Any) -> Any:
        return h @ layer["w"] + layer["b"]

    def norm(scale: Any, h: Any) -> Any:
        h = h - h.mean(-1, keepdims=True)
        return scale * h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-6)

    def apply_fn(params: Any, x: Any) -> Any:
        grid = size // patch
        x = x.reshape(-1, grid, patch, grid, patch, 3).swapaxes(2, 3)
        h = dense(params["embed"], x.reshape(-1, tokens, patch * patch * 3)) + params["position"]
        for block in (params[f"block{index}"] for index in range(depth)):
            qkv = dense(block["qkv"], norm(block["norm1"], h))
            q, k, v = jnp.moveaxis(qkv.reshape(-1, tokens, 3, heads, width // heads), 2, 0)
            scores = jnp.einsum("nlhe,nmhe->nhlm", q, k) / np.sqrt(width // heads)
            mixed = jnp.einsum("nhlm,nmhe->nlhe", jax.nn.softmax(scores), v)
            h = h + dense(block["out"], mixed.reshape(-1, tokens, width))
            h = h + dense(block["down"], jax.nn.gelu(dense(block["up"], norm(block["norm2"], h))))
        return dense(params["head"], h.mean(1))

    return Case(apply_fn, params, _inputs(rng, n, size, size, 3))


CASES: dict[str, Callable[[], Case]] = {
    "digits": lambda: resnet(150, 8, 1, 5, 1),
    "digits-600": lambda: resnet(600, 8, 1, 5, 1),
    "mlp": lambda: mlp(200),
    "resnet20": lambda: resnet(200, 32, 3, 10, 3),
    "resnet20-1000": lambda: resnet(1000, 32, 3, 10, 3),
    "vit": lambda: vit(100),
}
DEFAULT = ("digits", "digits-600", "mlp", "resnet20", "vit")


def _peak() -> int:
    """The process's highest resident memory in bytes (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plain(case: Case) -> Callable[[], Any]:
    """What one writes without a library, compiled."""

    def one(params: Any, row: Any) -> Any:
        return jax.jacrev(lambda p: case.apply_fn(p, row[None])[0])(params)

    @jax.jit
    def kernel(params: Any, x: Any) -> Any:
        leaves = jax.tree.leaves(jax.vmap(one, (None, 0))(params, x))
        flat = [leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves]
        return sum(jnp.einsum("ncd,med->ncme", leaf, leaf) for leaf in flat)

    return lambda: kernel(case.params, case.x)


def exact(case: Case, few: int) -> Any:
    """The kernel of the first few samples, all in float64; token ids stay integers."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), case.params)
        x = case.x[:few]
        x = x if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(jnp.float64)
        return np.asarray(plain(Case(case.apply_fn, params, x))())


def measure(name: str, method: str, max_bytes: int | None, repeats: int) -> dict[str, Any]:
    """One case in this process."""
    jnp.zeros(1).block_until_ready()
    idle = _peak()
    case = CASES[name]()
    size = sum(leaf.size for leaf in jax.tree.leaves(case.params))
    if method == "plain":
        plan, call = None, plain(case)
    else:
        from jaxttp.ntk import empirical_ntk, ntk_plan

        plan = ntk_plan(*case, method=method, max_bytes=max_bytes)
        call = lambda: empirical_ntk(*case, method=method, max_bytes=max_bytes)  # noqa: E731
    start = time.perf_counter()
    kernel = jax.block_until_ready(call())
    first = time.perf_counter() - start
    walls, cpus = [], []
    for _ in range(repeats):
        del kernel
        start, cpu = time.perf_counter(), time.process_time()
        kernel = jax.block_until_ready(call())
        walls.append(time.perf_counter() - start)
        cpus.append(time.process_time() - cpu)
    peak = _peak() - idle
    run = statistics.median(walls) if walls else first
    few = min(len(case.x), 4)
    known = exact(case, few)
    got = np.asarray(kernel[:few, :, :few])
    return {
        "case": name,
        "method": method,
        "chosen": plan.method if plan else "",
        "blocks": f"{plan.rows}x{plan.columns}/{plan.chunk}" if plan else "",
        "parameters": size,
        "compile": first - run,
        "run": run,
        "cpu": statistics.median(cpus) if cpus else float("nan"),
        "peak_mib": peak / 2**20,
        "planned_mib": plan.bytes / 2**20 if plan else float("nan"),
        "error": float(np.max(np.abs(got - known)) / np.max(np.abs(known))),
    }


def main() -> None:
    """Parse the command line, run each case in a fresh process, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(DEFAULT), help=", ".join(CASES))
    parser.add_argument("--methods", nargs="+", default=["auto"], choices=METHODS)
    parser.add_argument("--max-bytes", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        (name,), (method,) = arguments.cases, arguments.methods
        print(json.dumps(measure(name, method, arguments.max_bytes, arguments.repeats)))
        return
    print("| case | method | blocks | compile s | run s | CPU s | peak MiB | planned MiB | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in arguments.cases:
        for method in arguments.methods:
            command = [sys.executable, "-m", "experiments.bench.kernel", name, "--inside"]
            command += ["--methods", method, "--repeats", str(arguments.repeats)]
            if arguments.max_bytes is not None:
                command += ["--max-bytes", str(arguments.max_bytes)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
                print(f"| {name} | {method} | failed: {reason[:90]} | | | | | | |", flush=True)
                continue
            r = json.loads(done.stdout.strip().splitlines()[-1])
            label = method + (f" ({r['chosen']})" if method == "auto" else "")
            print(
                f"| {name} | {label} | {r['blocks']} | {r['compile']:.1f} | {r['run']:.3f} "
                f"| {r['cpu']:.3f} | {r['peak_mib']:.0f} | {r['planned_mib']:.0f} "
                f"| {r['error']:.1e} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
