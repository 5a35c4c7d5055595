"""How do time and memory grow with samples, outputs, width and depth, over two decades?

    python -m experiments.bench.growth [--preset smoke|cpu] [--only WORDS] [--store FILE]

Every point is a process of its own: seconds are medians of calls after the first, memory is what
the peak of the process rose by. Exponents are slopes on logarithmic axes through the last decade of
every axis; beside them stand those of what the library counts before it starts (operations and
bytes of `ntk_plan`, or the formula that is named). Points beyond the time or memory that is given
are left out, which the table says by where it ends.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.stored import go_on

SKETCH, STEPS = 1024, 50
AXES = ("samples", "outputs", "width", "depth")
Call = Callable[[], Any]
Count = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Size:
    """An MLP of `depth` hidden layers on samples of 64 numbers, float32."""

    samples: int = 128
    outputs: int = 8
    width: int = 128
    depth: int = 3

    @property
    def weights(self) -> float:
        """How many weights it has."""
        inner = (self.depth - 1) * self.width**2
        return 64 * self.width + inner + self.width * self.outputs


@dataclasses.dataclass(frozen=True)
class Work:
    """Something to measure.

    Attributes:
        make: (size) -> a call, and its counted operations and bytes.
        axes: what it grows with, and from where to where.
        counted: by what.
        base: the size where the axis does not say.
    """

    make: Callable[[Size], tuple[Call, Count]]
    axes: dict[str, tuple[int, int]]
    counted: str
    base: Size = Size()


@dataclasses.dataclass(frozen=True)
class GrowthSettings:
    """Points on every axis, and how long one process may take."""

    points: int = 5
    limit: float = 60.0
    share: float = 1.0


PRESETS = {"smoke": GrowthSettings(points=2, share=0.1), "cpu": GrowthSettings()}


def network_of(size: Size) -> tuple[Callable, list[Any], Any]:
    """``(apply_fn, params, x)``."""
    import jax
    import jax.numpy as jnp

    widths = (64, *[size.width] * size.depth, size.outputs)
    keys = jax.random.split(jax.random.key(0), len(widths))
    params = [
        jax.random.normal(key, pair, jnp.float32) / math.sqrt(pair[0])
        for key, pair in zip(keys, itertools.pairwise(widths), strict=False)
    ]
    x = jax.random.normal(keys[-1], (size.samples, 64), jnp.float32)

    def apply_fn(params: list[Any], x: Any) -> Any:
        for weights in params[:-1]:
            x = jnp.tanh(x @ weights)
        return x @ params[-1]

    return apply_fn, params, x


def kernel(size: Size, output: str) -> tuple[Call, Count]:
    """The exact kernel."""
    from jaxttp.ntk import empirical_ntk, ntk_plan

    given = network_of(size)
    plan = ntk_plan(*given, output=output)
    counted = plan.flops[plan.method], float(plan.bytes)
    return lambda: empirical_ntk(*given, output=output), counted


def sketch(size: Size) -> tuple[Call, Count]:
    """A CountSketch of the Jacobian."""
    import jax

    from jaxttp.ntk import sketch_jacobian

    given, key = network_of(size), jax.random.key(1)
    gradients = size.samples * size.outputs * size.weights
    kept = 4.0 * size.samples * size.outputs * SKETCH
    return lambda: sketch_jacobian(*given, key=key, dim=SKETCH), (gradients, kept)


def primal(size: Size) -> tuple[Call, Count]:
    """Cross-entropy dynamics in a sketch's space."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxttp.dynamics import recursion
    from jaxttp.ntk import Factored

    shape = size.samples, size.outputs, SKETCH
    rows = jax.random.normal(jax.random.key(0), shape, jnp.float32) / SKETCH
    theta = Factored.of(rows, rows)
    f0, y = jnp.zeros(shape[:2], jnp.float32), jnp.arange(size.samples) % size.outputs
    numbers = float(math.prod(shape))

    def call() -> Any:
        return recursion(
            theta, f0, y, loss="cross_entropy", optimizer=optax.sgd(0.1), steps=STEPS
        ).train

    return call, (4 * STEPS * numbers, 4 * numbers)


def conditioned_kernel(size: Size) -> tuple[Call, Count]:
    """The condition number of a kernel (N C, N C) that is there."""
    from jaxttp.conditioning import condition_number

    matrix = np.asarray(kernel(size, "full")[0](), np.float64)
    n = float(size.samples * size.outputs)
    return lambda: condition_number(matrix).value, (n**3 / 3, 8 * n**2)


def conditioned_network(size: Size) -> tuple[Call, Count]:
    """The condition number of a linear network's Gauss-Newton matrix, by its structure."""
    from jaxttp.conditioning import condition_number, gauss_newton_linear_operator

    rng = np.random.default_rng(0)
    widths = (64, *[size.width] * size.depth, size.outputs)
    weights = [
        rng.standard_normal((b, a)) / math.sqrt(a) for a, b in itertools.pairwise(widths)
    ]  # fmt: skip
    operator = gauss_newton_linear_operator(weights)
    return lambda: condition_number(operator).value, (size.weights, 8 * size.weights)


WORKS = {
    "exact kernel": Work(
        functools.partial(kernel, output="full"),
        {"samples": (12, 1200), "outputs": (2, 100), "width": (16, 1600), "depth": (1, 100)},
        "`ntk_plan`",
    ),
    "exact kernel, trace": Work(
        functools.partial(kernel, output="trace"),
        {"samples": (64, 6400), "outputs": (2, 200), "width": (16, 1600), "depth": (1, 100)},
        "`ntk_plan`",
    ),
    "sketch of 1,024": Work(
        sketch,
        {"samples": (32, 3200), "outputs": (2, 200), "width": (16, 1600), "depth": (1, 100)},
        "N C D; 4 N C k bytes",
    ),
    "primal dynamics, 50 steps": Work(
        primal, {"samples": (200, 20_000), "outputs": (2, 200)}, "4 T N C k; 4 N C k bytes"
    ),
    "condition number of a kernel": Work(
        conditioned_kernel,
        {"samples": (4, 400), "outputs": (2, 64)},
        "(N C)^3 / 3; 8 (N C)^2 bytes",
        Size(samples=64),
    ),
    "condition number, linear network": Work(
        conditioned_network, {"width": (16, 800), "depth": (1, 64)}, "D a product; 8 D bytes"
    ),
}


def places(work: Work, axis: str, settings: GrowthSettings) -> Iterator[Size]:
    """Sizes along an axis."""
    low, high = work.axes[axis]
    high = max(2 * low, round(settings.share * high))
    for value in np.geomspace(low, high, settings.points):
        yield dataclasses.replace(work.base, **{axis: round(value)})


def one(name: str, size: Size) -> dict[str, Any]:
    """A point, measured in this process."""
    import jax

    call, (operations, counted) = WORKS[name].make(size)
    jax.block_until_ready(network_of(Size(samples=2))[2])  # JAX is there
    before = peak()
    begun = time.perf_counter()
    jax.block_until_ready(call())
    first = time.perf_counter() - begun
    spent: list[float] = []
    while len(spent) < 3 or (sum(spent) < 1.0 and len(spent) < 20):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        spent.append(time.perf_counter() - begun)
    return {
        "first": first, "seconds": statistics.median(spent), "bytes": peak() - before,
        "operations": operations, "counted_bytes": counted,
    }  # fmt: skip


def peak() -> float:
    """Bytes that this process has held at most."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(name: str, axis: str, size: Size, limit: float) -> dict[str, Any]:
    """A point in a process of its own; without numbers where it took too long."""
    asked = json.dumps(dataclasses.asdict(size))
    command = [sys.executable, "-m", "experiments.bench.growth", "--one", name, "--size", asked]
    row = {"key": f"{name}/{axis}/{asked}", "work": name, "axis": axis, "at": getattr(size, axis)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return row | {"left": f"over {limit:g} s"}
    if done.returncode:
        return row | {"left": done.stderr.strip().splitlines()[-1][:200]}
    return row | json.loads(done.stdout.splitlines()[-1])


def exponent(rows: list[dict[str, Any]], what: str) -> float:
    """The slope of a quantity through the last decade, on logarithmic axes."""
    last = [row for row in rows if row["at"] >= rows[-1]["at"] / 10.5 and row[what] > 0]
    if len(last) < 2:
        return math.nan
    x, y = (np.log([row[one] for row in last]) for one in ("at", what))
    return float(np.polyfit(x, y, 1)[0])


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A row for every work and axis."""
    heads = (
        "work", "axis", "from - to", "seconds", "exponent", "counted", "peak rose by (MiB)",
        "exponent", "counted",
    )  # fmt: skip
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for name, axis in itertools.product(WORKS, AXES):
        found = [row for row in rows if (row["work"], row["axis"]) == (name, axis)]
        found = sorted((row for row in found if "seconds" in row), key=lambda row: row["at"])
        if not found:
            continue
        cells = [name, axis, f"{found[0]['at']:,} - {found[-1]['at']:,}"]
        for what, counted, unit in (
            ("seconds", "operations", 1), ("bytes", "counted_bytes", 2**20),
        ):  # fmt: skip
            cells.append(f"{found[0][what] / unit:.3g} - {found[-1][what] / unit:.3g}")
            cells += [f"{exponent(found, one):.2f}" for one in (what, counted)]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure what the store lacks, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--only", default="", help="works with these words in their name")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no point after that")
    parser.add_argument("--store", type=Path, help="a file of JSON lines (default: by preset)")
    parser.add_argument("--one", choices=WORKS, help=argparse.SUPPRESS)
    parser.add_argument("--size", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(one(given.one, Size(**json.loads(given.size)))))
        return
    settings = PRESETS[given.preset]
    jobs = (
        (
            f"{name}/{axis}/{json.dumps(dataclasses.asdict(size))}",
            functools.partial(measure, name, axis, size, settings.limit),
        )
        for name, work in WORKS.items()
        if given.only in name
        for axis in work.axes
        for size in places(work, axis, settings)
    )
    store = given.store or Path(f"growth-{given.preset}.jsonl")
    rows = go_on(store, jobs, given.minutes, key="key")
    print("\n".join(table(rows)))
    left = [f"{row['key']}: {row['left']}" for row in rows if "left" in row]
    print("\n".join(["", *left]))


if __name__ == "__main__":
    main()
