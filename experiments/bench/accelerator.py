"""What jaxttp takes on the current device, a GPU as a rule, and how far off its float32 is there.

    python -m experiments.bench.accelerator [answers rates kernels forecasts sweep steps]
                                            [--size small] [--only mlp resnet18-64 ...] [--rounds 5]

answers: `jaxttp doctor`, known answers on this device. rates: products of matrices at full
precision (what the library asks for) and as JAX comes (TF32 on NVIDIA's GPUs), and a copy. kernels:
those of `experiments.bench.kernel`; "ratio" is a call's time over what the operations of its
products take at the rate of full precision, "error" the largest deviation from a float64 Jacobian
on four samples, "plain error" that of `vmap(jacrev)` and one einsum at the default precision.
forecasts: N = 150 images, C = 5, random weights: a training step, a forecast of 150 steps without
rebuilding by the exact and by a sketched kernel, and how many times as long the 150 steps take.
sweep: 1,000 settings by one kernel beside one training. steps: Gauss-Newton beside Adam.

Each row is a line of JSON, printed as soon as it is there and kept in the store. Seconds are those
of the first call, which compiles ("first"), and medians of ``--rounds`` later ones ("wall", "cpu").
"peak" is the device's highest memory since the start of the process.
"""

import dataclasses
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.bench import gauss_newton, kernel
from experiments.bench.harness import Row, in_turn, keep, parser, stamp, store_of
from jaxttp import empirical_ntk, from_nnx, grid, predict_training_time, sweep, train
from jaxttp.models import calibrate_batch_norm, make_model
from jaxttp.pipeline import Settings, build_task

MODULE = "experiments.bench.accelerator"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        side: of the square matrices.
        kernels: cases of `experiments.bench.kernel`.
        decoder: sizes of "gpt2" and "llama" among them.
        forecasts: networks and pixels a side.
        samples: N of the forecasts.
        steps: T.
        sketch_dim: of the projected kernel.
        sweep: learning rates and momenta of the sweep, and samples of each class.
        batch: samples, half, width and blocks of the reversible network.
    """

    side: int = 8192
    kernels: tuple[str, ...] = tuple(kernel.CASES)
    decoder: kernel.Tokens = kernel.LARGE
    forecasts: tuple[tuple[str, int], ...] = (
        ("resnet18", 64), ("vit_small", 64), ("resnet18", 224),
    )  # fmt: skip
    samples: int = 150
    steps: int = 150
    sketch_dim: int = 4096
    sweep: tuple[int, int, int] = (100, 10, 30)
    batch: tuple[int, int, int, int] = (1024, 392, 2000, 2)


SIZES = {
    "large": Sizes(),
    "small": Sizes(
        side=64, kernels=("digits", "gpt2"), decoder=kernel.SMALL, forecasts=(("vgg5", 32),),
        samples=6, steps=4, sketch_dim=64, sweep=(4, 2, 4), batch=(16, 8, 40, 2),
    ),
}  # fmt: skip


def only(sizes: Sizes, names: Sequence[str]) -> Sizes:
    """The kernels and forecasts of these names."""
    return dataclasses.replace(
        sizes,
        kernels=tuple(name for name in sizes.kernels if name in names),
        forecasts=tuple(pair for pair in sizes.forecasts if f"{pair[0]}-{pair[1]}" in names),
    )


def peak() -> int | None:
    """The device's highest memory in bytes, None where it does not tell."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def random_network(name: str, x: np.ndarray, classes: int) -> nnx.Module:
    """A network by name with random weights, for such images; batch norm at their averages."""
    size = x.shape[1]
    network = nnx.jit(lambda: make_model(name, classes, image_size=size, rngs=nnx.Rngs(0)))()
    return network if name.startswith("vit") else calibrate_batch_norm(network, x)


def product_rate(side: int, rounds: int, precision: str | None) -> float:
    """Operations a second of a product of two square float32 matrices."""
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.float32) for i in range(2))
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    return 2 * side**3 / in_turn({"": lambda: multiply(a, b)}, rounds)[""].wall


def rates(sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Of products and of a copy."""
    for name, precision in (("full precision", "highest"), ("as JAX comes", None)):
        found = product_rate(sizes.side, rounds, precision)
        yield {"product": name, "side": sizes.side, "operations a second": found}
    numbers = jax.random.normal(jax.random.key(0), (sizes.side, sizes.side), jnp.float32)
    negative = jax.jit(jnp.negative)
    seconds = in_turn({"": lambda: negative(numbers)}, rounds)[""].wall
    yield {"copy, bytes a second": 2 * numbers.nbytes / seconds}


def kernels(sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Exact kernels, their errors and their time over that of the operations."""
    rate = product_rate(sizes.side, rounds, "highest")
    for name in sizes.kernels:
        tokens = name in ("gpt2", "llama")
        case = kernel.decoder(name, sizes.decoder) if tokens else kernel.CASES[name]()
        call = lambda case=case: empirical_ntk(*case)  # noqa: E731
        found = in_turn({"": call}, rounds)[""]
        traced = jax.make_jaxpr(lambda x, case=case: empirical_ntk(*case[:2], x))(case.x)
        counted = kernel.operations(traced.jaxpr)
        few = case._replace(x=case.x[:4])
        yield {"kernel": name, "N": len(case.x)} | found._asdict() | {
            "operations": counted, "ratio": found.wall * rate / counted, "peak": peak(),
            "error": kernel.error(case, call()),
            "plain error": kernel.error(few, kernel.plain(few)()),
        }  # fmt: skip
        del case, call, few
        gc.collect()


def forecasts(sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Training steps, and forecasts by the exact and the projected kernel."""
    for name, pixels in sizes.forecasts:
        draw = np.random.default_rng(0)
        x = draw.standard_normal((sizes.samples, pixels, pixels, 3)).astype(np.float32)
        y = np.arange(sizes.samples) % 5
        model = from_nnx(random_network(name, x, 5))
        few = min(20, sizes.steps)
        real = train(*model, x, y, loss="cross_entropy", optimizer=optax.sgd(1e-3), steps=few)
        step = real.seconds / few
        row = {"network": name, "pixels": pixels, "step": step, "compiling": real.compile_seconds}
        for kind, sketch in (("exact", None), ("sketch", sizes.sketch_dim)):
            call = lambda model=model, x=x, y=y, dim=sketch: predict_training_time(  # noqa: E731
                *model, x, y, learning_rate=1e-3, steps=sizes.steps, relinearize=0, sketch_dim=dim,
                key=jax.random.key(0),
            ).loss  # fmt: skip
            found = in_turn({"": call}, rounds)[""]
            times = sizes.steps * step / found.wall
            yield row | {"forecast": kind} | found._asdict() | {"times": times, "peak": peak()}
        gc.collect()


def sweeps(sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Many settings by one kernel beside one training of the same task."""
    many, momenta, per_class = sizes.sweep
    task = build_task(Settings(samples_per_class=per_class))
    choices = grid(
        learning_rate=np.geomspace(1e-4, 2e-2, many), momentum=np.linspace(0, 0.9, momenta),
        steps=sizes.steps,
    )  # fmt: skip
    calls = {
        "sweep": lambda: sweep(*task.model, task.x, task.y, choices, relinearize=0).times(),
        "training": lambda: train(
            *task.model, task.x, task.y, loss=task.loss, optimizer=optax.sgd(0.005),
            steps=sizes.steps,
        ).loss,
    }  # fmt: skip
    for name, found in in_turn(calls, rounds).items():
        yield {"work": name, "settings": len(choices)} | found._asdict()


def steps(sizes: Sizes, rounds: int) -> Iterator[Row]:
    """Seconds of a step by Gauss-Newton and by Adam."""
    for name, found in in_turn(gauss_newton.step_functions(*sizes.batch), rounds).items():
        yield {"step": name} | found._asdict() | {"peak": peak()}


PARTS: dict[str, Callable[[Sizes, int], Iterator[Row]]] = {
    "rates": rates, "kernels": kernels, "forecasts": forecasts, "sweep": sweeps, "steps": steps,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure what was asked for; the exit status is that of the known answers."""
    command = parser(MODULE, __doc__)
    names = ("answers", *PARTS)
    command.add_argument("parts", nargs="*", choices=[[], *names], default=[], metavar="PART")
    command.add_argument("--size", choices=SIZES, default="large")
    command.add_argument("--only", nargs="+", help="kernels, and networks of forecasts")
    command.add_argument("--rounds", type=int, default=5)
    options = command.parse_args(arguments)
    parts, wrong = options.parts or names, 0
    if "answers" in parts:  # first, and in its own process: one at a time has the device's memory
        wrong = subprocess.run([sys.executable, "-m", "jaxttp", "doctor"]).returncode
    print(json.dumps(stamp()), flush=True)
    sizes = SIZES[options.size]
    if options.only:
        sizes = only(sizes, options.only)
    for part in (part for part in parts if part in PARTS):
        for row in PARTS[part](sizes, options.rounds):
            print(json.dumps(row := {"part": part} | row), flush=True)
            keep(store_of(MODULE, options), row)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
