"""What exact Gauss-Newton costs: steps against Adam's, backward memory, the closed-form kernel.

    python -m experiments.bench.gauss_newton [steps] [memory] [kernel]

steps: a step of the size of MNIST (2 blocks, n = 1024, h = 392, m = 2000, float32) in turn with
Adam's, "of Adam" in CPU seconds. memory: temporary memory of the gradient by depth (n = 128,
h = 64, m = 512), reversible and stored. kernel: the exact kernel of 12.5 million weights, 100
samples, 10 outputs.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax

from experiments.bench.harness import Row, in_turn, parser, publish, store_of
from jaxttp.gauss_newton import (
    gauss_newton,
    orthonormal_readout,
    revmlp_forward,
    revmlp_kernel,
)

MODULE = "experiments.bench.gauss_newton"
COLUMNS = ("what", "first", "wall", "cpu", "of Adam", "MiB")


def network(
    blocks: int, half: int, width: int, samples: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights, bottlenecks and inputs, float32."""
    keys = jax.random.split(jax.random.key(0), 3)
    weights = 0.02 * jax.random.normal(keys[0], (blocks, 2, half, width))
    bottlenecks = jax.random.normal(keys[1], (blocks, 2, width, half)) / width**0.5
    return weights, bottlenecks, jax.random.normal(keys[2], (samples, 2 * half))


def step_functions(
    samples: int = 1024, half: int = 392, width: int = 2000, blocks: int = 2
) -> dict[str, Callable[[], object]]:
    """A compiled step of each optimiser on the same batch."""
    w, v, x = network(blocks, half, width, samples)
    p = orthonormal_readout(jax.random.key(1), 10, 2 * half)
    y = jax.random.randint(jax.random.key(2), (samples,), 0, 10)
    targets = jax.nn.one_hot(y, 10)
    adam = optax.adam(1e-3)

    def loss(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        f = revmlp_forward(w, v, x, reversible=False) @ p.T
        return 0.5 * jnp.mean(jnp.sum((f - targets) ** 2, axis=1))

    @jax.jit
    def adam_step(w, state, v, x):
        updates, state = adam.update(jax.grad(loss)(w, v, x), state, w)
        return optax.apply_updates(w, updates), state

    start = adam.init(w)
    functions: dict[str, Callable[[], object]] = {"adam": lambda: adam_step(w, start, v, x)}
    for mode in ("exact", "truncate"):
        optimizer = gauss_newton(1.0, readout=p, pseudoinverse=mode, rtol=0.01, measure=False)

        @jax.jit
        def step(w, state, v, x, optimizer=optimizer):
            updates, state = optimizer.update(w, state, w, x=x, y=y, bottlenecks=v)
            return optax.apply_updates(w, updates), state

        functions[mode] = functools.partial(step, w, optimizer.init(w), v, x)
    return functions


def steps() -> Iterator[Row]:
    """A step of each optimiser."""
    found = in_turn(step_functions())
    for name, timing in found.items():
        yield {"what": name} | timing._asdict() | {"of Adam": timing.cpu / found["adam"].cpu}


def memory() -> Iterator[Row]:
    """Temporary memory of compiled gradients, by depth."""
    for blocks in (4, 16, 64):
        w, v, x = network(blocks, 64, 512, 128)
        for kind, reversible in (("reversible", True), ("stored", False)):
            gradient = jax.jit(
                jax.grad(
                    lambda w, v, x, r=reversible: jnp.sum(revmlp_forward(w, v, x, reversible=r))
                )
            )
            analysis = gradient.lower(w, v, x).compile().memory_analysis()
            size = analysis.temp_size_in_bytes / 2**20
            yield {"what": f"gradient, L = {blocks}, {kind}", "MiB": size}


def kernel(
    samples: int = 100, half: int = 392, width: int = 2000, blocks: int = 8
) -> Iterator[Row]:
    """The exact kernel, and what it holds beside the network."""
    w, v, x = network(blocks, half, width, samples)
    p = orthonormal_readout(jax.random.key(1), 10, 2 * half)
    compute = jax.jit(lambda w, v, x: revmlp_kernel(w, v, x, readout=p))
    analysis = compute.lower(w, v, x).compile().memory_analysis()
    held = (analysis.temp_size_in_bytes + analysis.output_size_in_bytes) / 2**20
    timing = in_turn({"": lambda: compute(w, v, x)}, rounds=1)[""]
    yield {"what": f"kernel of {w.size / 1e6:.1f} M weights", "MiB": held} | timing._asdict()


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "steps": steps, "memory": memory, "kernel": kernel,
}  # fmt: skip


def main() -> None:
    """Print the table."""
    command = parser(MODULE, __doc__)
    command.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[], metavar="PART")
    options = command.parse_args()
    chosen = options.parts or ("steps", "memory", "kernel")
    rows = (row for part in chosen for row in PARTS[part]())
    publish(rows, COLUMNS, store_of(MODULE, options))


if __name__ == "__main__":
    main()
