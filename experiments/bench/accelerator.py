"""What jaxttp takes on the device at hand, a GPU as a rule, and how far off its float32 is there.

    python -m experiments.bench.accelerator [rates kernels forecasts sweep steps] [--size small]
                                            [--only mlp resnet18-64 ...] [--rounds 5]

rates: products of matrices at full precision (what the library asks for) and as JAX comes (TF32
on NVIDIA's GPUs), and a copy. kernels: exact kernels of `experiments.bench.kernel` and of the
transformers of `experiments.bench.transformer`; "ratio" is a call's time over what the operations
of its products take at the rate of full precision; "error" the largest deviation from a float64
Jacobian on four samples, "plain" that of `vmap(jacrev)` and one einsum at the default precision.
forecasts: N = 150 images, C = 5, random weights: a training step, forecasts of 150 steps without
rebuilding, first and later, and 150 steps over a later one. sweep: 1,000 settings beside one
training. steps: Gauss-Newton beside Adam.

Everything waits until it is computed; medians of --rounds after a first call, which compiles.
"peak" is the device's, since the start of the process. Rows are printed as soon as they are there.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench import gauss_newton, kernel, transformer
from experiments.bench import sweep as sweeping
from experiments.bench.full_size import random_network
from jaxttp import from_nnx, predict_training_time, train
from jaxttp.ntk.gram import kernel_of

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        side: of the square matrices.
        kernels: cases of `experiments.bench.kernel`.
        networks: of `experiments.bench.transformer`.
        decoder: their sizes.
        forecasts: networks and pixels a side.
        samples: N of the forecasts.
        steps: T.
        sketch_dim: of the projected kernel.
        sweep: sizes of the sweep.
        batch: samples, half, width and blocks of the reversible network.
    """

    side: int = 8192
    kernels: tuple[str, ...] = ("digits", "digits-600", "mlp", "resnet20", "resnet20-1000", "vit")
    networks: tuple[str, ...] = transformer.NETWORKS
    decoder: transformer.Sizes = transformer.LARGE
    forecasts: tuple[tuple[str, int], ...] = (
        ("resnet18", 64), ("vit_small", 64), ("resnet18", 224),
    )  # fmt: skip
    samples: int = 150
    steps: int = 150
    sketch_dim: int = 4096
    sweep: sweeping.SweepSettings = sweeping.PRESETS["cpu"]
    batch: tuple[int, int, int, int] = (1024, 392, 2000, 2)


SIZES = {
    "large": Sizes(),
    "small": Sizes(
        side=64, kernels=("digits",), networks=("gpt2",), decoder=transformer.SMALL,
        forecasts=(("vgg5", 32),), samples=6, steps=4, sketch_dim=64,
        sweep=sweeping.PRESETS["smoke"],
        batch=(16, 8, 40, 2),
    ),
}  # fmt: skip


def only(sizes: Sizes, names: Sequence[str]) -> Sizes:
    """The kernels and forecasts of these names."""
    return dataclasses.replace(
        sizes,
        kernels=tuple(name for name in sizes.kernels if name in names),
        networks=tuple(name for name in sizes.networks if name in names),
        forecasts=tuple(pair for pair in sizes.forecasts if f"{pair[0]}-{pair[1]}" in names),
    )


def peak() -> int | None:
    """The device's highest memory in bytes, None where it does not tell."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def timed(call: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Seconds of the first call and of a later one, the median of `rounds`."""
    seconds = []
    for _ in range(1 + rounds):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begun)
    return seconds[0], statistics.median(seconds[1:])


def product_rate(side: int, rounds: int, precision: str | None) -> float:
    """Operations a second of a product of two square float32 matrices."""
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.float32) for i in range(2))
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    return 2 * side**3 / timed(lambda: multiply(a, b), rounds)[1]


def rates(sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Of products and of a copy."""
    for name, precision in (("full precision", "highest"), ("as JAX comes", None)):
        found = product_rate(sizes.side, rounds, precision)
        yield {"product": name, "side": sizes.side, "operations a second": found}
    numbers = jax.random.normal(jax.random.key(0), (sizes.side, sizes.side), jnp.float32)
    negative = jax.jit(jnp.negative)
    seconds = timed(lambda: negative(numbers), rounds)[1]
    yield {"copy, bytes a second": 2 * numbers.nbytes / seconds}


def kernels(sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Exact kernels, their errors and their time over that of the operations."""
    rate = product_rate(sizes.side, rounds, "highest")
    cases = {name: kernel.CASES[name] for name in sizes.kernels}
    for name in sizes.networks:
        cases[name] = lambda name=name: kernel.Case(*transformer.make(name, sizes.decoder))
    for name, make in cases.items():
        case = make()
        call = lambda case=case: kernel_of(*case)  # noqa: E731
        first, later = timed(call, rounds)
        traced = jax.make_jaxpr(lambda x, case=case: kernel_of(case.apply_fn, case.params, x))
        counted = transformer.operations(traced(case.x).jaxpr)
        row = {
            "kernel": name, "N": len(case.x), "first": first, "later": later,
            "operations": counted, "ratio": later * rate / counted, "peak": peak(),
        }  # fmt: skip
        yield row | _errors(case, call())
        del case, call
        gc.collect()


def _errors(case: kernel.Case, found: Any) -> Row:
    """Of the library's kernel and of a plain one, relative to the largest entry, four samples."""
    exact = kernel.exact(case, 4)
    plain = np.asarray(kernel.plain(case._replace(x=case.x[:4]))())
    found = np.asarray(found[:4, :, :4])
    size = np.max(np.abs(exact))
    return {
        "error": float(np.max(np.abs(found - exact)) / size),
        "plain": float(np.max(np.abs(plain - exact)) / size),
    }


def forecasts(sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Training steps, and forecasts by the exact and the projected kernel."""
    for name, pixels in sizes.forecasts:
        draw = np.random.default_rng(0)
        x = draw.standard_normal((sizes.samples, pixels, pixels, 3)).astype(np.float32)
        y = np.arange(sizes.samples) % 5
        model = from_nnx(random_network(name, x, 5))
        options = {"learning_rate": 1e-3, "steps": sizes.steps, "relinearize": 0}
        few = min(20, sizes.steps)
        real = train(*model, x, y, loss="cross_entropy", optimizer=optax.sgd(1e-3), steps=few)
        step = real.seconds / few
        row = {"network": name, "pixels": pixels, "step": step, "compiling": real.compile_seconds}
        for kind, more in (("exact", {}), ("sketch", {"sketch_dim": sizes.sketch_dim})):
            call = lambda m=model, x=x, y=y, o=options | more: predict_training_time(  # noqa: E731
                *m, x, y, key=jax.random.key(0), **o
            )
            first, later = timed(call, rounds)
            found = {"first": first, "later": later, "times": sizes.steps * step / later}
            yield row | {"forecast": kind} | found | {"peak": peak()}
        gc.collect()


def sweeps(sizes: Sizes, rounds: int) -> Iterator[Row]:
    """1,000 settings beside one training."""
    yield sweeping.cost(dataclasses.replace(sizes.sweep, repeats=rounds))


def steps(sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Seconds of a step by Gauss-Newton and by Adam."""
    for name, call in gauss_newton.step_functions(*sizes.batch).items():
        first, later = timed(call, rounds)
        yield {"step": name, "first": first, "later": later, "peak": peak()}


PARTS: dict[str, Callable[[Sizes, int], Iterator[Row]]] = {
    "rates": rates, "kernels": kernels, "forecasts": forecasts, "sweep": sweeps, "steps": steps,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Measure what was asked for; a row of JSON for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[], metavar="PART")
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--only", nargs="+", help="kernels, and networks of forecasts")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    head = {"device": f"{device.platform}: {device.device_kind}", "jax": jax.__version__}
    print(json.dumps(head), flush=True)
    sizes = SIZES[options.size]
    if options.only:
        sizes = only(sizes, options.only)
    for part in options.parts or PARTS:
        for row in PARTS[part](sizes, options.rounds):
            print(json.dumps({"part": part} | row), flush=True)


if __name__ == "__main__":
    main()
