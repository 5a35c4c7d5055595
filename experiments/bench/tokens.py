"""Products with the Hessian of a cross-entropy over tokens, at a large vocabulary.

    python -m experiments.bench.tokens [CASE ...]

A process for every case: seconds of a second call, peak memory of the process (and what it had
before the call), and how far the product is from p∘u - p (p·u), which NumPy computes in float64
token by token. Cases: "pieces" and "whole" multiply logits (M, V) in float32 by the Hessian, some
tokens at a time and by differentiating the gradient; "operator" multiplies by J^T H J of a network
with logits (N, T, V), one sequence at a time, in float64; "operator-whole" all sequences at once.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxttp.conditioning import curvature_operator
from jaxttp.losses import encode_targets

VOCABULARY = 50_000
CASES = {
    "pieces 64": ("pieces", 64),
    "pieces 1024": ("pieces", 1024),
    "whole 64": ("whole", 64),
    "whole 1024": ("whole", 1024),
    "operator 8 x 16": ("operator", 8),
    "operator 32 x 16": ("operator", 32),
    "operator-whole 8 x 16": ("operator-whole", 8),
    "operator-whole 32 x 16": ("operator-whole", 32),
}
TOKENS, WIDTH = 16, 32


def main(arguments: list[str] | None = None) -> None:
    """Measure the cases that are named, all of them when none is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--here", help="measure one case in this process and print JSON")
    options = parser.parse_args(arguments)
    if options.here:
        print(json.dumps(measure(*CASES[options.here])))
        return
    print("| case | logits | seconds | peak GiB | before the call | off by |")
    print("|---|---|---|---|---|---|")
    for name in options.cases or CASES:
        command = [sys.executable, "-m", "experiments.bench.tokens", "--here", name]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        row = json.loads(out.splitlines()[-1])
        print(
            f"| {name} | {row['logits']:,} | {row['seconds']:.2f} | {row['peak']:.2f} | "
            f"{row['before']:.2f} | {row['off']:.0e} |",
            flush=True,
        )


def measure(kind: str, count: int) -> dict[str, float]:
    """One case."""
    make = logits_alone if kind in ("pieces", "whole") else network
    product, expected, logits = make(kind, count)
    before = memory()
    jax.block_until_ready(product())
    peak = memory()
    begun = time.perf_counter()
    found = jax.block_until_ready(product())
    seconds = time.perf_counter() - begun
    known = expected()
    off = np.abs(np.asarray(found, float) - known).max() / np.abs(known).max()
    return {"seconds": seconds, "peak": peak, "before": before, "off": off, "logits": logits}


def memory() -> float:
    """The most memory that this process has had so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def one_token(f: np.ndarray, u: np.ndarray) -> np.ndarray:
    """p∘u - p (p·u)."""
    p = np.exp(f - f.max())
    p /= p.sum()
    return p * u - p * (p @ u)


def logits_alone(kind: str, count: int) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """The Hessian of the loss in logits of one sequence of `count` tokens."""
    rng = np.random.default_rng(0)
    f, u = (jnp.asarray(rng.standard_normal((1, count * VOCABULARY), "float32")) for _ in range(2))
    y = rng.integers(0, VOCABULARY, (1, count))
    shape = jax.ShapeDtypeStruct((1, count, VOCABULARY), jnp.float32)
    targets, loss = encode_targets("cross_entropy", y, shape)

    @jax.jit
    def whole(f: Any, u: Any) -> Any:
        return jax.jvp(lambda f: loss.gradient(f, targets), (f,), (u,))[1]

    def expected() -> np.ndarray:
        pairs = zip(*(np.asarray(a).reshape(count, -1) for a in (f, u)), strict=True)
        return np.concatenate([one_token(a.astype(float), b) for a, b in pairs])[None] / count

    if kind == "whole":
        return lambda: whole(f, u), expected, f.size
    return lambda: loss.hessian_vector_product(f, targets, u), expected, f.size


def network(kind: str, count: int) -> tuple[Callable[[], Any], Callable[[], Any], int]:
    """J^T H J of the last layer over fixed features, sequences of `TOKENS` tokens."""
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, TOKENS, WIDTH))
    w, v = (rng.normal(size=(WIDTH, VOCABULARY)) / WIDTH**0.5 for _ in range(2))
    y = rng.integers(0, VOCABULARY, (count, TOKENS))
    size = count if kind == "operator-whole" else 1
    operator = curvature_operator(
        lambda w, x: jnp.tanh(x) @ w, jnp.asarray(w), jnp.asarray(x), y, kind="generalized",
        loss="cross_entropy", batch_size=size,
    )  # fmt: skip
    flat = jnp.asarray(v.reshape(-1))

    def expected() -> np.ndarray:
        total = np.zeros_like(w)
        for h in np.tanh(x).reshape(-1, WIDTH):
            total += np.outer(h, one_token(h @ w, h @ v))
        return total.reshape(-1) / (count * TOKENS)

    return lambda: operator.mv(flat), expected, count * TOKENS * VOCABULARY


if __name__ == "__main__":
    main()
