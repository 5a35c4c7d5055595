"""`jaxttp doctor`: versions, devices, and small computations whose results are known.

Each computation compiles afresh, as a fault may depend on the compilation, and holds what JAX
returns against NumPy in float64.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console

from jaxttp._core.process import versions
from jaxttp._core.results import plain_number
from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.cli._options import FORECAST, GOALS, TASK, TRAINING, Options, takes
from jaxttp.cli._shell import say
from jaxttp.cli._tables import table
from jaxttp.ntk import empirical_ntk

TOLERANCES = {"float32": 1e-5, "float64": 1e-12}
"""Ten times the rounding error of these sums, a thousandth of the error of TF32 or a lost row."""
HINT = (
    "install another jaxlib (pip install --upgrade jax jaxlib), and look for variables that change "
    "what is computed (XLA_FLAGS, NVIDIA_TF32_OVERRIDE, OPENBLAS_CORETYPE)"
)


def deviation(result: Any, expected: np.ndarray) -> float:
    """Largest difference relative to the largest value; NaN counts as infinitely far.

    Example:
        >>> deviation([1.0, 4.5], np.array([1.0, 4.0]))
        0.125
        >>> deviation([1.0, float("nan")], np.array([1.0, 4.0]))
        inf
    """
    result = np.asarray(result, np.float64)
    if not np.all(np.isfinite(result)):
        return float("inf")
    return float(np.max(np.abs(result - expected)) / np.max(np.abs(expected)))


def cross_entropy() -> float:
    """The mean of logsumexp(f) - sum(y f), mapped over 100 steps of 1,000 samples.

    Beyond 32,768 rows jaxlib 0.10.2 is off by 0.1 to 0.7 of about 2.8.
    """
    f = np.random.default_rng(0).normal(size=(100, 1000, 10)).astype(np.float32)
    y = np.eye(10, dtype=np.float32)[np.arange(1000) % 10]
    wide = f.astype(np.float64)
    expected = np.mean(np.log(np.sum(np.exp(wide), -1)) - np.sum(y * wide, -1), axis=1)

    def loss(f: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.logsumexp(f, axis=-1) - jnp.sum(y * f, axis=-1))

    return deviation(jax.jit(jax.vmap(loss, (0, None)))(f, y), expected)


def softmax_behind_layers() -> float:
    """softmax(h(x) P) behind three residual ReLU layers, 1,024 samples; P keeps 10 of 784 features.

    jaxlib 0.10.2 makes NaN of every entry on some CPUs, in 2 to 5 of 8 compilations.
    """
    draw = np.random.default_rng(0)
    x = draw.normal(size=(1024, 784)).astype(np.float32)
    layers = (draw.normal(size=(3, 784, 784)) / 784**0.5).astype(np.float32)
    p = np.eye(10, 784, dtype=np.float32).T
    h = x.astype(np.float64)
    for w in layers.astype(np.float64):
        h = h + np.maximum(h @ w, 0)
    powers = np.exp(h[:, :10] - np.max(h[:, :10], axis=1, keepdims=True))

    def outputs(x: jax.Array, layers: list[jax.Array], p: jax.Array) -> jax.Array:
        h = x
        for w in layers:
            h = h + jax.nn.relu(jnp.matmul(h, w, precision="highest"))
        return jax.nn.softmax(jnp.matmul(h, p, precision="highest"))

    expected = powers / np.sum(powers, axis=1, keepdims=True)
    return deviation(jax.jit(outputs)(x, [*layers], p), expected)


def cholesky(dtype: str) -> float:
    """The Cholesky factor of a Gram matrix of 300 rows, its condition number below 6."""
    g = np.random.default_rng(0).normal(size=(300, 600))
    gram = g @ g.T / 600 + 0.5 * np.eye(300)
    with jax.enable_x64(dtype == "float64"):
        factor = jax.jit(lambda a: decompose(jnp.linalg.cholesky, a))(gram.astype(dtype))
    return deviation(factor, np.linalg.cholesky(gram))


def eigenvectors(dtype: str) -> float:
    """Eigenvalues 1 to 1e-3 in a random basis of 200: values, A V = V diag(λ), V orthogonal."""
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(200, 200)))[0]
    expected = np.geomspace(1e-3, 1, 200)
    matrix = (basis * expected) @ basis.T
    with jax.enable_x64(dtype == "float64"):
        eigh = jax.jit(lambda a: tuple(decompose(jnp.linalg.eigh, a)))
        values, v = (np.asarray(part, np.float64) for part in eigh(matrix.astype(dtype)))
    rebuilt, products = deviation((v * values) @ v.T, matrix), deviation(v.T @ v, np.eye(200))
    return max(deviation(values, expected), rebuilt, products)


def product() -> float:
    """A matrix product at full precision, 500 x 700 x 300; TF32 or half precision is 1e-3 off."""
    draw = np.random.default_rng(0)
    a, b = (draw.normal(size=size).astype(np.float32) for size in ((500, 700), (700, 300)))
    result = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))(a, b)
    return deviation(result, a.astype(np.float64) @ b.astype(np.float64))


def kernel() -> float:
    """`jaxttp.empirical_ntk` of tanh(x W) V on 24 samples, against its Jacobian's product.

    ∂f_c/∂W_ij = x_i (1 - h_j²) V_jc,      ∂f_c/∂V_jd = h_j δ_cd
    """
    draw = np.random.default_rng(0)
    x, w, v = (draw.normal(size=s).astype(np.float32) for s in ((24, 5), (5, 16), (16, 3)))
    h = np.tanh(x.astype(np.float64) @ w.astype(np.float64))
    by_w = np.einsum("ni,nj,jc->ncij", x, 1 - h**2, v).reshape(24, 3, -1)
    by_v = np.einsum("nj,cd->ncjd", h, np.eye(3)).reshape(24, 3, -1)
    jacobian = np.concatenate([by_w, by_v], axis=2)  # (N, C, P)

    def apply_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ params["w"]) @ params["v"]

    with jax.default_matmul_precision("highest"):
        theta = empirical_ntk(apply_fn, {"w": w, "v": v}, jnp.asarray(x))
    return deviation(theta, np.einsum("ncp,mdp->ncmd", jacobian, jacobian))


KNOWN_ANSWERS: dict[str, Callable[[], float]] = {
    "cross-entropy of 100,000 rows, float32": cross_entropy,
    "softmax behind three layers, float32": softmax_behind_layers,
    "Cholesky, float32": functools.partial(cholesky, "float32"),
    "Cholesky, float64": functools.partial(cholesky, "float64"),
    "eigenvectors, float32": functools.partial(eigenvectors, "float32"),
    "eigenvectors, float64": functools.partial(eigenvectors, "float64"),
    "matrix product, float32": product,
    "kernel of a network, float32": kernel,
}


@takes(TASK, TRAINING, GOALS, FORECAST, "no_cache")
def doctor(options: Options) -> None:
    """Versions, devices, and small computations against known answers; exit status 0 or 1."""
    shell = dataclasses.replace(options.shell, cache=False)  # compile afresh
    with shell.work() as report:
        rows = []
        for k, (name, deviation_of) in enumerate(KNOWN_ANSWERS.items()):
            report("known answers", k, len(KNOWN_ANSWERS))
            error, allowed = deviation_of(), TOLERANCES[name.rpartition(", ")[2]]
            row = {"answer": name, "error": plain_number(error), "allowed": allowed}
            rows.append(row | {"right": error <= allowed})
        devices = [f"{d.platform} {d.id}: {d.device_kind}" for d in jax.devices()]
    flags = {name: text for name, text in os.environ.items() if "XLA" in name or "JAX" in name}
    plain = {"versions": versions(), "devices": devices, "variables": flags, "answers": rows}

    def show(console: Console) -> None:
        pairs = (versions() | {f"\n{name}": text for name, text in flags.items()}).items()
        say(console, ", ".join(f"{name} {text}" for name, text in pairs), "; ".join(devices))
        answers = table("known answer", "error", "allowed", "")
        for row in rows:
            error = "not finite" if row["error"] is None else f"{row['error']:.1e}"
            verdict = "right" if row["right"] else "WRONG"
            answers.add_row(row["answer"], error, f"{row['allowed']:.0e}", verdict)
        console.print(answers)

    shell.deliver("doctor", plain, show, {})
    if wrong := [row["answer"] for row in rows if not row["right"]]:
        print(f"jaxttp: wrong: {'; '.join(wrong)}. To mend it: {HINT}.", file=sys.stderr)
        raise typer.Exit(1)
