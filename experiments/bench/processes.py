"""Is a kernel on the devices of several processes that of one device? Loopback, or a cluster.

    python -m experiments.bench.processes [--count 2] [--devices 2]
    python -m experiments.bench.processes --address HOST:PORT --count 2 --index 0
    srun python -m experiments.bench.processes --cluster

The first starts its own processes on this machine, joined by `jax.distributed` over a free port,
each with some virtual CPU devices. The second is one of them, to be started by hand, one for every
index. The third takes address and number from Slurm, Open MPI, GKE or a TPU pod.

Every process computes the same on one device of its own, and prints the largest deviation.
"""

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

TIMEOUT = 900
"""Seconds after which processes that wait for each other are ended."""
TOLERANCE = 1e-10
"""Of float64 sums in another order, as a share of the largest entry."""
STEPS = 12
MODULE = "experiments.bench.processes"


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 where all agrees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2, help="processes")
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices of each")
    parser.add_argument("--address", help="host:port of process 0")
    parser.add_argument("--index", type=int, help="of this process")
    parser.add_argument("--cluster", action="store_true", help="as the cluster says")
    parser.add_argument("--only", default="", help="what has these words in its name")
    given = parser.parse_args(arguments)
    if given.address is None and not given.cluster:
        return start(given.count, given.devices, given.only)
    import jax

    jax.config.update("jax_enable_x64", True)
    if given.cluster:
        jax.distributed.initialize()
    else:
        jax.distributed.initialize(
            given.address, given.count, given.index, initialization_timeout=TIMEOUT // 2
        )
    return measure(given.only)


def start(count: int, devices: int, only: str = "") -> int:
    """Processes on this machine; the worst of their statuses."""
    with socket.socket() as place:
        place.bind(("localhost", 0))
        port = place.getsockname()[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", MODULE, "--count", str(count), "--only", only]
    command += ["--address", f"localhost:{port}", "--index"]
    running = [
        subprocess.Popen(
            [*command, str(index)], env=environment,
            stdout=None if index == 0 else subprocess.DEVNULL,
        )
        for index in range(count)
    ]  # fmt: skip
    try:
        return max(abs(process.wait(timeout=TIMEOUT)) for process in running)
    except subprocess.TimeoutExpired:
        print(f"no answer within {TIMEOUT} s", file=sys.stderr)
        return 1
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()


def measure(only: str) -> int:
    """In one of the processes: each way on all devices, beside the same on one."""
    import jax
    import numpy as np

    mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    worst = 0.0
    for name, way in ways(mesh):
        if only not in name:
            continue
        found, wanted = (np.asarray(each) for each in way())
        off = float(np.max(np.abs(found - wanted)) / np.max(np.abs(wanted)))
        worst = max(worst, off)
        if jax.process_index() == 0:
            print(f"{name}: {off:.1e}", flush=True)
    if jax.process_index() == 0:
        print(f"{jax.process_count()} processes, {jax.device_count()} devices: {worst:.1e} at most")
    return 0 if worst < TOLERANCE else 1


def ways(mesh: Any) -> list[tuple[str, Callable[[], tuple[Any, Any]]]]:
    """What is asked on all devices and on one: a name, and a function that gives both.

    Args:
        mesh: of the devices of all processes.
    """
    import dataclasses

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import NamedSharding, PartitionSpec
    from sklearn.datasets import load_digits

    from experiments.bench.devices import sizes
    from jaxttp import predict_training_time, sweep
    from jaxttp.conditioning import condition_number
    from jaxttp.dynamics import recursion
    from jaxttp.forecast import grid
    from jaxttp.ntk import (
        Exact,
        RowSharded,
        Sketched,
        empirical_ntk,
        extreme_eigenvalues,
        sketch_jacobian,
    )
    from jaxttp.ntk._sharded import place
    from jaxttp.ntk.row_sharded import automatic, on_host

    digits = load_digits()
    chosen = np.flatnonzero(digits.target < 3)
    x, y = digits.data[chosen] / 16.0, digits.target[chosen]
    key, first, second = (jax.random.key(seed) for seed in range(3))
    params = {
        "w": jax.random.normal(first, (64, 16)) / 8,
        "v": jax.random.normal(second, (16, 3)) / 4,
    }

    def network(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["w"]) @ params["v"]

    def kernels(count: int, given: Any = None) -> tuple[Any, Any]:
        given = x[:count] if given is None else given
        spread = empirical_ntk(network, params, given, mesh=mesh)
        return RowSharded.of(spread, mesh), empirical_ntk(network, params, x[:count])

    def own(count: int) -> Any:
        """Samples of which every process brings some."""
        each = count // jax.process_count()
        mine = x[:count][jax.process_index() * each :][:each]
        rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        return jax.make_array_from_process_local_data(rows, mine)

    def by_process() -> tuple[Any, Any]:
        count = 6 * jax.device_count()
        return kernels(count, own(count))

    def forecast_own(kernel: Any, **more: Any) -> tuple[Any, Any]:
        count = 24 * jax.device_count()
        given = ((own(count), dataclasses.replace(kernel, mesh=mesh)), (x[:count], kernel))
        spread, alone = (
            predict_training_time(
                network, params, some, y[:count], learning_rate=0.3, steps=STEPS, kernel=each,
                **more,
            )
            for some, each in given
        )  # fmt: skip
        return spread.loss, alone.loss

    def refused() -> tuple[Any, Any]:
        """Without a mesh, before any work."""
        try:
            predict_training_time(network, params, own(24), y[:24], learning_rate=0.3, steps=STEPS)
        except ValueError as problem:
            return float("x has rows that this process has not" in str(problem)), 1.0
        return 0.0, 1.0

    def swept_own() -> tuple[Any, Any]:
        count = 24 * jax.device_count()
        settings = grid(learning_rate=(0.1, 0.3), momentum=(0.0, 0.9), steps=STEPS)
        given = ((own(count), Exact(mesh=mesh)), (x[:count], Exact()))
        spread, alone = (
            sweep(network, params, some, y[:count], settings, kernel=each, relinearize=1)
            for some, each in given
        )
        return spread.loss, alone.loss

    def ends() -> tuple[Any, Any]:
        found = (extreme_eigenvalues(kernel, key=key, depth=16)[1] for kernel in kernels(101))
        return tuple(found)

    def forecast(kernel: Any, count: int, **more: Any) -> tuple[Any, Any]:
        spread, alone = (
            predict_training_time(
                network, params, x[:count], y[:count], learning_rate=0.3, steps=STEPS,
                kernel=each, **more,
            )
            for each in (dataclasses.replace(kernel, mesh=mesh), kernel)
        )  # fmt: skip
        return spread.loss, alone.loss

    def swept() -> tuple[Any, Any]:
        settings = grid(learning_rate=(0.1, 0.3), momentum=(0.0, 0.9), steps=STEPS)
        spread, alone = (
            sweep(network, params, x[:101], y[:101], settings, kernel=each, relinearize=0)
            for each in (Exact(mesh=mesh), Exact())
        )
        return spread.loss, alone.loss

    def sketches() -> tuple[Any, Any]:
        options = {"key": key, "dim": width}
        return tuple(
            on_host(sketch_jacobian(network, params, x[:101], mesh=each, **options))
            for each in (mesh, None)
        )

    def condition() -> tuple[Any, Any]:
        return tuple(condition_number(kernel).value for kernel in kernels(101))

    def condition_by_products() -> tuple[Any, Any]:
        """Of more than 1,024 outputs, by products; of rank 48, so that they meet all there is."""
        head = {"w": False, "v": True}
        return tuple(
            condition_number(
                empirical_ntk(network, params, x[:344], trainable=head, mesh=each)
            ).value
            for each in (mesh, None)
        )

    def shares() -> tuple[Any, Any]:
        """Of the kernel, and of what a recursion with it holds: its rows and no more."""
        spread, whole = kernels(101)
        f0 = network(params, x[:101])
        descent = {"loss": "cross_entropy", "optimizer": optax.sgd(0.1), "steps": 4}
        run = jax.jit(lambda kernel: recursion(kernel, f0, y[:101], **descent).train)
        largest = max(sizes(run.lower(spread).compile().as_text())) / whole.dtype.itemsize
        each = [shard.data.size for shard in spread.padded.addressable_shards]
        rows = spread.padded.size // jax.device_count()
        return [*each, largest], [rows] * (jax.local_device_count() + 1)

    def sharded_parameters() -> tuple[Any, Any]:
        """As of a network that trains so: cut over all devices, and each process has its part."""
        rows = NamedSharding(automatic(mesh), PartitionSpec(mesh.axis_names))
        cut = jax.tree.map(lambda leaf: place(leaf, rows.mesh, rows.spec), params)
        spread = empirical_ntk(network, cut, x[:101], output="trace", mesh=mesh)
        return spread, empirical_ntk(network, params, x[:101], output="trace")

    batches = {"batch_size": 16, "key": key}
    width = 16 * jax.device_count()
    return [
        ("kernel of 101 samples", lambda: kernels(101)),
        ("kernel of each process's own samples", by_process),
        ("no device has more than its rows", shares),
        ("kernel, parameters sharded", sharded_parameters),
        ("sketch", sketches),
        ("largest eigenvalue", ends),
        ("condition number", condition),
        ("condition number by products", condition_by_products),
        ("forecast, one kernel", lambda: forecast(Exact(), 101, relinearize=0)),
        ("forecast, two kernels, full batches", lambda: forecast(Exact(), 101, relinearize=1)),
        (
            "forecast, two sketched kernels, mini-batches",
            lambda: forecast(Sketched(width, key), 101, relinearize=1, **batches),
        ),
        ("gradient flow", lambda: forecast(Exact(), 101, dynamics="ode")),
        ("sweep", swept),
        ("forecast, own samples, one kernel", lambda: forecast_own(Exact(), relinearize=0)),
        ("forecast, own samples, two kernels", lambda: forecast_own(Exact(), relinearize=1)),
        (
            "forecast, own samples, sketched, mini-batches",
            lambda: forecast_own(Sketched(width, key), relinearize=1, **batches),
        ),
        (
            "forecast, own samples, two kernels, mini-batches, test samples",
            lambda: forecast_own(
                Exact(), relinearize=1, x_test=x[101:108], y_test=y[101:108], **batches
            ),
        ),
        ("own samples without a mesh: refused", refused),
        ("sweep, own samples, two kernels of those that lead", swept_own),
    ]


if __name__ == "__main__":
    sys.exit(main())
