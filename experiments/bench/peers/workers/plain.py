"""Without a library: what one writes in a few lines of JAX, NumPy and SciPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg

from experiments.bench.peers import networks, problems
from experiments.bench.peers.protocol import Options, Prepared, Problem, serve


def _train(found: Any) -> Problem:
    return {"train": np.asarray(found)}


def _motion(problem: Problem) -> tuple[Any, Any, Any, float]:
    f0, targets = jnp.asarray(problem["f0"]), jnp.asarray(problem["targets"])
    kernel = jnp.asarray(problem["kernel"]).reshape(f0.size, f0.size)
    return kernel, f0.reshape(-1), targets, float(problem["rate"]) / len(f0)


def _gradient(flat: Any, targets: Any) -> Any:
    return (jax.nn.softmax(flat.reshape(targets.shape)) - targets).reshape(-1)


def euler(problem: Problem, options: Options) -> Prepared:
    """Gradient flow by Euler steps in a `lax.scan`. Options: "parts" of a unit of time."""
    kernel, f0, targets, rate = _motion(problem)
    parts, steps = options["parts"], int(problem["steps"])

    @jax.jit
    def run(kernel: Any, f0: Any, targets: Any) -> Any:
        def small(_: Any, f: Any) -> Any:
            return f - rate / parts * (kernel @ _gradient(f, targets))

        def unit(f: Any, _: Any) -> tuple[Any, Any]:
            f = jax.lax.fori_loop(0, parts, small, f)
            return f, f

        _, path = jax.lax.scan(unit, f0, None, length=steps)
        return jnp.concatenate([f0[None], path]).reshape(-1, *targets.shape)

    return Prepared(lambda: jax.block_until_ready(run(kernel, f0, targets)), _train)


def momentum(problem: Problem, options: Options) -> Prepared:
    """Gradient descent with momentum 0.9 in a `lax.scan`."""
    kernel, f0, targets, rate = _motion(problem)
    rate = rate * options["factor"]

    @jax.jit
    def run(kernel: Any, f0: Any, targets: Any) -> Any:
        def step(state: Any, _: Any) -> tuple[Any, Any]:
            f, velocity = state
            velocity = 0.9 * velocity + kernel @ _gradient(f, targets)
            f = f - rate * velocity
            return (f, velocity), f

        _, path = jax.lax.scan(step, (f0, jnp.zeros_like(f0)), None, length=int(problem["steps"]))
        return jnp.concatenate([f0[None], path]).reshape(-1, *targets.shape)

    return Prepared(lambda: jax.block_until_ready(run(kernel, f0, targets)), _train)


def closed(problem: Problem, options: Options) -> Prepared:
    """One `jnp.linalg.eigh` and two products."""
    kernel, f0, targets, rate = _motion(problem)

    @jax.jit
    def run(kernel: Any, f0: Any, targets: Any) -> Any:
        values, vectors = jnp.linalg.eigh(kernel)
        start = vectors.T @ (f0 - targets.reshape(-1))
        times = jnp.arange(int(problem["steps"]) + 1.0)
        left = jnp.exp(-rate * times[:, None] * values) * start
        return targets + (left @ vectors.T).reshape(-1, *targets.shape)

    return Prepared(lambda: jax.block_until_ready(run(kernel, f0, targets)), _train)


def projection(problem: Problem, options: Options) -> Prepared:
    """The Jacobian by `vmap(jacrev)`, a piece of samples at a time, times a Gaussian matrix.

    Options: "dim", "piece". The matrix is drawn once, before the clock starts.
    """
    apply_fn, params, x = networks.load(problem)
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    dim, piece = options["dim"], options["piece"]
    matrix = jax.random.normal(jax.random.key(0), (flat.size, dim)) / np.sqrt(dim)

    @jax.jit
    def run(flat: Any, x: Any, matrix: Any) -> Any:
        def one(row: Any) -> Any:
            return jax.jacrev(lambda p: apply_fn(unravel(p), row[None])[0])(flat) @ matrix

        return jax.lax.map(one, x, batch_size=piece)

    call = lambda: jax.block_until_ready(run(flat, x, matrix))  # noqa: E731
    return Prepared(call, gram)


def gram(sketch: Any) -> Problem:
    """The kernel that a sketch (N, C, k) stands for."""
    s = np.asarray(sketch, float)
    return {"kernel": np.einsum("nak,mbk->namb", s, s)}


def dense_condition(problem: Problem, options: Options) -> Prepared:
    """The Gauss-Newton matrix of a linear network by `numpy.kron`, then all eigenvalues.

    Sum over layers of A A^T (x) B^T B with A = W_{L..l+1} and B = W_{l-1..1} Sigma^(1/2).
    """
    weights, sigma = problems.linear_weights(problem), problem["covariance"]

    def call() -> np.ndarray:
        values, vectors = np.linalg.eigh(sigma)
        root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
        total: Any = 0.0
        for index in range(len(weights)):
            below, above = root, np.eye(len(weights[-1]))
            for w in weights[:index]:
                below = w @ below
            for w in reversed(weights[index + 1 :]):
                above = above @ w
            total = total + np.kron(above @ above.T, below.T @ below)
        return scipy.linalg.eigvalsh(total, overwrite_a=True, driver="evd")

    def answer(found: np.ndarray) -> Problem:
        return {"largest": found[-1], "smallest": found[0], "value": found[-1] / found[0]}

    return Prepared(call, answer)


WORKS = {
    "euler": euler, "momentum": momentum, "closed": closed, "projection": projection,
    "dense_condition": dense_condition,
}  # fmt: skip

if __name__ == "__main__":
    serve(WORKS, ("jax", "jaxlib", "scipy"))
