"""What jaxttp, its peers and plain JAX do for a row of `experiments.bench.peers`, as users would.

    python -m experiments.bench.peers_sides ROW SIDE --rounds 5 --answer FILE

runs in the Python of a side's environment: one call, so many timed ones, the answer as an array in
a file of NumPy, and a line of JSON with seconds and versions. Every side makes the same weights and
data from seeds. What a side needs is imported where it is used.
"""

import argparse
import importlib.metadata
import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments.bench.harness import clock, peak_gib

Call = Callable[[], Any]
STEPS = 150
"""Of the gradient flow."""
WIDTHS = (784, 512, 512, 512, 10)
SAMPLES = 200


class Side(NamedTuple):
    """Who does the work: its environment, what it needs there, and what makes the call."""

    environment: str
    packages: tuple[str, ...]
    make: Callable[[str], Call]


# --- kernels: the whole (N, C, N, C) in float32 -----------------------------------------------


def kernel_ours(row: str) -> Call:
    """`empirical_ntk`."""
    from experiments.bench.kernel import CASES
    from jaxttp import empirical_ntk

    case = CASES[row.removeprefix("kernel-")]()
    return lambda: empirical_ntk(*case)


def kernel_plain(row: str) -> Call:
    """`vmap(jacrev)` and one einsum."""
    from experiments.bench.kernel import CASES, plain

    return plain(CASES[row.removeprefix("kernel-")]())


def kernel_nt(implementation: str) -> Callable[[str], Call]:
    """`empirical_ntk_fn` of neural-tangents, jitted, by one of its implementations."""

    def make(row: str) -> Call:
        import jax
        import neural_tangents as nt

        from experiments.bench.kernel import CASES

        apply_fn, params, x = CASES[row.removeprefix("kernel-")]()
        kernel_fn = nt.empirical_ntk_fn(
            apply_fn, trace_axes=(), vmap_axes=0,
            implementation=nt.NtkImplementation[implementation],
        )  # fmt: skip
        jitted = jax.jit(lambda params, x: kernel_fn(x, None, params).transpose(0, 2, 1, 3))
        return lambda: jitted(params, x)

    return make


# --- gradient flow of the cross-entropy at eta lambda_max / N = 1, every unit of time kept ----


def _motion() -> tuple[Any, ...]:
    """Kernel (N, C, N, C) of the digits ResNet, outputs, labels and rate."""
    from experiments.bench.kernel import CASES, plain

    case = CASES["digits"]()
    kernel, f0 = np.asarray(plain(case)()), np.asarray(case.apply_fn(case.params, case.x))
    labels = np.random.default_rng(2).integers(0, f0.shape[1], len(f0))
    largest = np.linalg.eigvalsh(kernel.reshape(f0.size, f0.size).astype(float))[-1]
    return kernel, f0, labels, float(len(f0) / largest)


def flow_ours(row: str) -> Call:
    """`gradient_flow` on its default tolerances."""
    import jax.numpy as jnp

    from jaxttp.dynamics import gradient_flow

    kernel, f0, labels, rate = _motion()
    options = {"loss": "cross_entropy", "learning_rate": rate, "ts": jnp.arange(STEPS + 1.0)}
    return lambda: gradient_flow(kernel, f0, labels, **options).train


def flow_plain(row: str, parts: int = 14) -> Call:
    """Euler's method in a `lax.scan`, so many steps a unit of time."""
    import jax
    import jax.numpy as jnp

    kernel, f0, labels, rate = _motion()
    targets = jnp.eye(f0.shape[1])[labels]
    step = rate / len(f0) / parts

    @jax.jit
    def run(kernel: Any, f0: Any) -> Any:
        def small(_: Any, f: Any) -> Any:
            return f - step * jnp.einsum("ncmd,md->nc", kernel, jax.nn.softmax(f) - targets)

        def unit(f: Any, _: Any) -> tuple[Any, Any]:
            f = jax.lax.fori_loop(0, parts, small, f)
            return f, f

        return jnp.concatenate([f0[None], jax.lax.scan(unit, f0, None, length=STEPS)[1]])

    return lambda: run(kernel, f0)


def flow_nt(row: str) -> Call:
    """`predict.gradient_descent` of neural-tangents; its solver takes no tolerance."""
    import jax
    import jax.numpy as jnp
    import neural_tangents as nt

    kernel, f0, labels, rate = _motion()
    targets, ts = jnp.eye(f0.shape[1])[labels], jnp.arange(STEPS + 1.0)

    def loss(f: Any, y: Any) -> Any:
        return -jnp.mean(jnp.sum(y * jax.nn.log_softmax(f), axis=1))

    def run(kernel: Any, f0: Any) -> Any:
        return nt.predict.gradient_descent(loss, kernel, targets, rate, trace_axes=())(ts, f0)

    jitted = jax.jit(run)
    ordered = jnp.asarray(kernel).transpose(0, 2, 1, 3)
    return lambda: jitted(ordered, jnp.asarray(f0))


# --- products with curvature: of the mean cross-entropy of an MLP, float64 --------------------


def _mlp() -> tuple[list[np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    """Weights [b_1, W_1, b_2, ...], inputs, labels and a vector of as many numbers as weights."""
    draw = np.random.default_rng(0)
    weights = []
    for a, b in itertools.pairwise(WIDTHS):
        weights += [np.zeros(b), np.sqrt(2 / a) * draw.standard_normal((a, b))]
    x, labels = draw.standard_normal((SAMPLES, WIDTHS[0])), draw.integers(0, WIDTHS[-1], SAMPLES)
    return weights, x, labels, draw.standard_normal(sum(part.size for part in weights))


def _apply_mlp(weights: Any, x: Any, relu: Callable[[Any], Any]) -> Any:
    for b, w in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        x = relu(x @ w + b)
    return x @ weights[-1] + weights[-2]


def product_ours(row: str) -> Call:
    """`curvature_operator`."""
    import jax

    from jaxttp.conditioning import curvature_operator

    jax.config.update("jax_enable_x64", True)
    weights, x, labels, vector = _mlp()
    operator = curvature_operator(
        lambda w, x: _apply_mlp(w, x, jax.nn.relu), weights, x, labels,
        kind=row.removeprefix("product-"), loss="cross_entropy",
    )  # fmt: skip
    return lambda: operator.mv(vector)


def product_plain(row: str) -> Call:
    """The jvp of grad for the Hessian; jvp, the loss's own product and vjp for Gauss-Newton."""
    import jax
    import jax.numpy as jnp
    from jax.flatten_util import ravel_pytree

    jax.config.update("jax_enable_x64", True)
    weights, x, labels, vector = _mlp()
    flat, unravel = ravel_pytree(weights)

    def outputs(flat: Any) -> Any:
        return _apply_mlp(unravel(flat), x, jax.nn.relu)

    def loss(flat: Any) -> Any:
        return -jnp.mean(jax.nn.log_softmax(outputs(flat))[jnp.arange(SAMPLES), labels])

    @jax.jit
    def hessian(vector: Any) -> Any:
        return jax.jvp(jax.grad(loss), (flat,), (vector,))[1]

    @jax.jit
    def generalized(vector: Any) -> Any:
        f, push = jax.linearize(outputs, flat)
        p, tangents = jax.nn.softmax(f), push(vector)
        image = p * (tangents - (p * tangents).sum(1, keepdims=True)) / SAMPLES
        return jax.linear_transpose(push, flat)(image)[0]

    product = hessian if row == "product-hessian" else generalized
    return lambda: product(vector)


def product_curvlinops(row: str) -> Call:
    """An operator of curvlinops."""
    import curvlinops
    import torch

    torch.set_default_dtype(torch.float64)
    weights, x, labels, vector = _mlp()

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ParameterList(
                torch.nn.Parameter(torch.tensor(part)) for part in weights
            )

        def forward(self, x: Any) -> Any:
            return _apply_mlp(list(self.parts), x, torch.relu)

    network = Network()
    kinds = {
        "product-hessian": curvlinops.HessianLinearOperator,
        "product-generalized": curvlinops.GGNLinearOperator,
    }
    operator = kinds[row](
        network, torch.nn.CrossEntropyLoss(), list(network.parameters()),
        [(torch.tensor(x), torch.tensor(labels))], check_deterministic=False,
    )  # fmt: skip
    given = torch.tensor(vector)
    return lambda: (operator @ given).detach().numpy()


OURS, JAX = ("jaxttp", "jax"), ("jax", "jaxlib")
NT = ("neural-tangents", "jax")
IMPLEMENTATIONS = ("STRUCTURED_DERIVATIVES", "NTK_VECTOR_PRODUCTS", "JACOBIAN_CONTRACTION")
KERNELS = {
    "jaxttp": Side("ours", OURS, kernel_ours),
    "vmap(jacrev)": Side("ours", JAX, kernel_plain),
} | {
    f"neural-tangents, {name.lower().replace('_', ' ')}": Side(
        "neural-tangents", NT, kernel_nt(name)
    )
    for name in IMPLEMENTATIONS
}
PRODUCTS = {
    "jaxttp": Side("ours", OURS, product_ours),
    "jvp and grad": Side("ours", JAX, product_plain),
    "curvlinops": Side("torch", ("curvlinops-for-pytorch", "torch"), product_curvlinops),
}
FLOWS = {
    "jaxttp": Side("ours", OURS, flow_ours),
    "Euler in lax.scan": Side("ours", JAX, flow_plain),
    "neural-tangents": Side("neural-tangents", NT, flow_nt),
}
ROWS: dict[str, dict[str, Side]] = (
    {f"kernel-{name}": KERNELS for name in ("digits", "mlp", "resnet20", "vit")}
    | {"flow": FLOWS}
    | {f"product-{kind}": PRODUCTS for kind in ("hessian", "generalized")}
)
"""Row -> its sides; the first one is ours, and its answer is what others are held against."""


def main() -> None:
    """Do the work of one side."""
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("row", choices=ROWS)
    command.add_argument("side")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--answer", required=True, help="a file of NumPy")
    given = command.parse_args()
    side = ROWS[given.row][given.side]
    call = side.make(given.row)
    first = clock(call)[0]
    walls, cpus = zip(*(clock(call) for _ in range(given.rounds)), strict=True)
    np.save(given.answer, np.asarray(call()))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in side.packages)
    print(json.dumps({
        "first": first, "wall": statistics.median(walls), "cpu": statistics.median(cpus),
        "peak GiB": peak_gib(), "versions": versions,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
