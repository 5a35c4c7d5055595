"""What would a kernel take on one GPU, eight, or a pod of 256? On paper; no such machine is asked.

    python -m experiments.bench.pods              # the tables of scaling.md
    python -m experiments.bench.pods --measure    # what this machine reaches, what programs gather

Operations and memory are the library's own counts of the share of one device
(`jaxttp.ntk.ntk_plan`), peaks are those of data sheets, and the share of them that is reached is an
assumption. With `--measure` counts are held against the clock on one CPU device, and the bytes
that are said to travel against the collectives of a program compiled for four virtual devices.
"""

import argparse
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

DEVICES = 4
REACHED, READ = 0.4, 0.7
"""Shares of the peaks of operations and of bandwidths that are assumed."""
SAMPLES = (10_000, 50_000, 200_000)
ROOM = 0.9
"""Of a device's memory that a kernel may take."""


class Machine(NamedTuple):
    """One device by its data sheet, and how many there are.

    Attributes:
        name: what it is called.
        devices: how many.
        flops: operations a second of float32 products at full precision.
        bandwidth: bytes a second of its memory.
        memory: bytes.
        link: bytes a second that it receives from the others.
    """

    name: str
    devices: int
    flops: float
    bandwidth: float
    memory: float
    link: float


# NVIDIA H100 SXM data sheet: float32 67 Tflop/s without tensor cores, 3.35 TB/s, 80 GB, NVLink 900
# GB/s in both directions. Google Cloud, TPU v5e: bfloat16 197 Tflop/s, 819 GB/s, 16 GB, 1,600
# Gbit/s between chips. A float32 product at full precision is six of bfloat16.
MACHINES = (
    Machine("one H100", 1, 67e12, 3.35e12, 80e9, math.inf),
    Machine("8 H100", 8, 67e12, 3.35e12, 80e9, 450e9),
    Machine("v5e-256", 256, 197e12 / 6, 8.19e11, 16e9, 200e9),
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one device's share of a kernel.

    Attributes:
        operations: counted.
        kernel: bytes of its rows.
        peak: bytes that it holds at most.
        gathered: bytes of features that it receives, and of blocks that others computed for it.
        product: bytes of the result of one product with outputs, which all receive.
    """

    operations: float
    kernel: float
    peak: float
    gathered: float
    product: float

    def seconds(self, machine: Machine) -> tuple[float, float, float]:
        """Of computing, of gathering, and of one product, where they do not overlap."""
        reading = self.kernel / (READ * machine.bandwidth) + self.product / (READ * machine.link)
        gathering = self.gathered / (READ * machine.link)
        return self.operations / (REACHED * machine.flops), gathering, reading


def cost(case: Any, samples: int, output: str, devices: int, max_bytes: float) -> Cost:
    """The share of one device, by the library's plan.

    Raises:
        ValueError: it does not fit.
    """
    import jax

    from jaxttp.ntk._costs import choose_forms, method_costs
    from jaxttp.ntk._memory import KEPT_ROWS, Memory
    from jaxttp.ntk._ring import fits
    from jaxttp.ntk.gram import Job

    x = jax.ShapeDtypeStruct((samples, *case.x.shape[1:]), case.x.dtype)
    job = Job.of(case.apply_fn, case.params, x, None, output, "auto", None, None, False)
    share = job.on_each(devices)
    plan = share.plan("auto", None, int(max_bytes))
    work, operations = share.work, plan.flops[plan.method]
    each = Memory.of(work, plan.method, choose_forms(work, plan.method), 1).per_sample
    gathered = math.ceil(work.n1 / plan.rows) * each * work.n2 * (devices - 1) / devices
    goes_around = devices > 1 and plan.rows == work.n1 and fits(plan, int(each * work.n1))
    if devices > 1:  # its own samples are differentiated; columns are by their own devices
        twice = dataclasses.replace(work, n1=2 * work.n1, n2=2 * work.n2)
        # Of samples the counts are linear, of pairs square.
        pairs = (method_costs(twice)[plan.method] - 2 * operations) / 2
        blocks = math.ceil(work.n1 / KEPT_ROWS)
        own = 0.75 if plan.columns >= work.n2 else (blocks + 1) / (2 * blocks)
        once = (own + (devices - 1) / 2) / devices if goes_around else 1.0
        operations = once * pairs + (operations - pairs) * work.n1 / (work.n1 + work.n2)
    if goes_around:
        sent = plan.kernel_bytes * ((devices - 1) // 2 + (1 - devices % 2) / 2) / devices
        gathered = each * work.n1 * (devices // 2) + sent
    product = 4.0 * work.n2 * work.classes * (devices - 1) / devices
    return Cost(operations, plan.kernel_bytes, plan.bytes, gathered, product)


def fewest(case: Any, samples: int, output: str, memory: float) -> int | None:
    """How many devices it takes at least."""
    import jax

    from jaxttp.ntk._shares import fewest_devices
    from jaxttp.ntk.gram import Job

    x = jax.ShapeDtypeStruct((samples, *case.x.shape[1:]), case.x.dtype)
    job = Job.of(case.apply_fn, case.params, x, None, output, "auto", None, None, False)
    plan = lambda devices: job.on_each(devices).plan("auto", None, int(ROOM * memory))  # noqa: E731
    return fewest_devices(1, plan, samples)


def table() -> Iterator[str]:
    """Rows of the table, a network, output and number of samples each."""
    from experiments.bench.kernel import mlp, resnet

    cases = {"MLP": mlp(1), "ResNet-20": resnet(1, 32, 3, 10, 3)}
    yield "| network | output | N | kernel (GB) | least H100 | machine | a device holds (GB) | " \
        "computes (s) | gathers (s) | one product (ms) |"  # fmt: skip
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for (name, case), output, samples in itertools.product(
        cases.items(), ("trace", "full"), SAMPLES
    ):
        size = 4.0 * samples**2 * (100 if output == "full" else 1)
        least = fewest(case, samples, output, MACHINES[0].memory)
        head = f"| {name} | {output} | {samples:,} | {size / 1e9:,.4g} | {least} "
        for machine in MACHINES:
            try:
                one = cost(case, samples, output, machine.devices, ROOM * machine.memory)
            except ValueError:
                row = f"| {machine.name} | does not fit | | | |"
            else:
                computes, gathers, product = one.seconds(machine)
                row = (
                    f"| {machine.name} | {one.peak / 1e9:.3g} | {computes:.3g} | {gathers:.2g} | "
                    f"{1e3 * product:.2g} |"
                )
            yield head + row
            head = "| | | | | "


def gathers(case: Any, output: str) -> tuple[float, int]:
    """Bytes that each of four devices receives for a kernel: as counted, and as compiled."""
    import jax

    from experiments.bench.devices import sizes
    from jaxttp.ntk._compiled import compiled
    from jaxttp.ntk._costs import choose_forms
    from jaxttp.ntk._memory import Memory
    from jaxttp.ntk._sharded import _pieces, shard_rows, stay
    from jaxttp.ntk.gram import Job
    from jaxttp.ntk.row_sharded import automatic

    mesh = automatic(jax.make_mesh((DEVICES,), ("rows",)))
    job = Job.of(*case, None, output, "auto", None, None, False)
    share = job.on_each(DEVICES)
    plan = share.plan("auto", None, None)
    each = Memory.of(share.work, plan.method, choose_forms(share.work, plan.method), 1).per_sample
    leaves, specs = stay(job.leaves, mesh)
    pieces = _pieces(compiled(job.work.program, job.variant(plan)), mesh, output, specs)
    x = [shard_rows(leaf, mesh) for leaf in job.rows]
    held = pieces.features(leaves, x, 0, size=share.work.n1)
    tiles = jax.jit(lambda *given: pieces.tiles(*given))
    text = tiles.lower(leaves, x, held, held).compile().as_text()
    lines = [line for line in text.splitlines() if " all-gather(" in line]
    read = sum(max(sizes(line.partition("all-gather(")[0])) for line in lines)
    return each * share.work.n2, read


def measure() -> Iterator[str]:
    """What is counted beside what is measured, on one device and on four virtual ones."""
    import jax
    import jax.numpy as jnp

    from experiments.bench.kernel import mlp, resnet
    from jaxttp.ntk import empirical_ntk, ntk_plan

    for name, case, output in (
        ("MLP", mlp(2000), "trace"), ("MLP", mlp(256), "full"),
        ("ResNet-20", resnet(256, 32, 3, 10, 3), "trace"),
    ):  # fmt: skip
        plan = ntk_plan(*case, output=output)
        spent = seconds(lambda: empirical_ntk(*case, output=output))  # noqa: B023 - called at once
        rate = plan.flops[plan.method] / spent / 1e9
        counted, read = gathers(case, output)
        yield (
            f"| {name} | {output} | {len(case.x)} | {plan.method} | {spent:.3g} | {rate:.3g} | "
            f"{counted / 2**20:.4g} | {read / 2**20:.4g} |"
        )
    matrix, vector = jnp.ones((6000, 6000), jnp.float32), jnp.ones((6000,), jnp.float32)
    product = jax.jit(lambda m, v: jnp.dot(m, v, precision="highest"))
    rate = 2 * 6000**3 / seconds(product, matrix, matrix) / 1e9
    read = matrix.nbytes / seconds(product, matrix, vector) / 1e9
    yield f"a matrix product of 6,000 rows: {rate:.3g} Gflop/s; of a vector: reads {read:.3g} GB/s"


def seconds(function: Any, *given: Any) -> float:
    """The fastest of three calls after the first."""
    import jax

    times = []
    for _ in range(4):
        begun = time.perf_counter()
        jax.block_until_ready(function(*given))
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="on this machine")
    given = parser.parse_args()
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    if given.measure:
        print(
            "| network | output | N | method | seconds | Gflop/s | counted (MiB) | gathered (MiB) |"
        )
        print("|---|---|---|---|---|---|---|---|")
    for line in measure() if given.measure else table():
        print(line, flush=True)


if __name__ == "__main__":
    main()
