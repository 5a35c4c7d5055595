"""Small computations whose results are known, to see whether a backend computes what it should.

Each compiles afresh at every call, as a fault may depend on the compilation, and holds what JAX
returns against NumPy in float64. `jaxttp doctor` runs them on the user's machine, the tests here.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.version import __version__ as JAXLIB

from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.ntk import empirical_ntk

OTHER_JAXLIB = f"install another jaxlib (pip install --upgrade jax 'jaxlib!={JAXLIB}')"
OTHER_LAPACK = (
    "reinstall SciPy and NumPy (pip install --force-reinstall scipy numpy); if that does not help, "
    "set OPENBLAS_CORETYPE=Haswell, the kernels of an older CPU"
)

TOLERANCES = {"float32": 1e-5, "float64": 1e-12}
"""Ten times what rounding makes of these sums, a thousandth of what TF32 or a lost row does."""


class Answer(NamedTuple):
    """How far a known answer was missed.

    Attributes:
        error: the largest deviation, relative to the largest value; not finite where a value of the
            result is not, or where the computation failed.
        tolerance: the error that rounding explains.
        wrong: compilations whose result is off by more than that.
        compilations: all of them.
        remedy: what to do if it is wrong.
        failure: why the computation failed, or None.
    """

    error: float
    tolerance: float
    wrong: int
    compilations: int
    remedy: str
    failure: str | None = None

    @property
    def right(self) -> bool:
        """Whether every compilation gave the known answer."""
        return self.wrong == 0


def deviation(found: Any, known: np.ndarray) -> float:
    """Largest difference relative to the largest value; NaN counts as infinitely far.

    Args:
        found: what was computed.
        known: what is right, in float64, of the same shape.

    Returns:
        The deviation, 0 or more.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> deviation([1.0, 4.5], np.array([1.0, 4.0]))
        0.125
        >>> deviation([1.0, float("nan")], np.array([1.0, 4.0]))
        inf
    """
    found = np.asarray(found, np.float64)
    if found.shape != known.shape:
        raise ValueError(f"found has shape {found.shape}, known {known.shape}; they must agree.")
    if not np.all(np.isfinite(found)):
        return float("inf")
    return float(np.max(np.abs(found - known)) / np.max(np.abs(known)))


def _ask(
    once: Callable[[], float], compilations: int, remedy: str, dtype: str = "float32"
) -> Answer:
    """`once` compiles and returns the deviation."""
    errors, failure = [], None
    for _ in range(compilations):
        try:
            errors.append(once())
        except Exception as problem:  # whatever it is, the user has to hear of it
            errors.append(float("inf"))
            failure = f"{type(problem).__name__}: {problem}"
    wrong = sum(not error <= TOLERANCES[dtype] for error in errors)
    return Answer(max(errors), TOLERANCES[dtype], wrong, compilations, remedy, failure)


def cross_entropy(compilations: int = 1) -> Answer:
    """The mean of logsumexp(f) - sum(y f), mapped over 100 steps of 1,000 samples, float32.

    Beyond 32,768 rows jaxlib 0.10.2 is off by 0.1 to 0.7 of about 2.8.
    """
    f = np.random.default_rng(0).normal(size=(100, 1000, 10)).astype(np.float32)
    y = np.eye(10, dtype=np.float32)[np.arange(1000) % 10]
    f64, y64 = f.astype(np.float64), y.astype(np.float64)
    known = np.mean(np.log(np.sum(np.exp(f64), -1)) - np.sum(y64 * f64, -1), axis=1)

    def once() -> float:
        def loss(f: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.mean(jax.nn.logsumexp(f, axis=-1) - jnp.sum(y * f, axis=-1))

        return deviation(jax.jit(jax.vmap(loss, (0, None)))(f, y), known)

    return _ask(once, compilations, OTHER_JAXLIB)


def softmax_behind_layers(compilations: int = 1) -> Answer:
    """softmax(h(x) P) behind three residual ReLU layers, 1,024 samples, float32.

    P keeps the first 10 of 784 features. jaxlib 0.10.2 makes NaN of every entry on some CPUs, in 2
    to 5 of 8 compilations.
    """
    draw = np.random.default_rng(0)
    x = draw.normal(size=(1024, 784)).astype(np.float32)
    layers = (draw.normal(size=(3, 784, 784)) / 784**0.5).astype(np.float32)
    p = np.eye(10, 784, dtype=np.float32).T
    h = x.astype(np.float64)
    for w in layers.astype(np.float64):
        h = h + np.maximum(h @ w, 0)
    logits = h[:, :10] - np.max(h[:, :10], axis=1, keepdims=True)
    known = np.exp(logits) / np.sum(np.exp(logits), axis=1, keepdims=True)

    def once() -> float:
        def outputs(x: jax.Array, layers: list[jax.Array], p: jax.Array) -> jax.Array:
            h = x
            for w in layers:
                h = h + jax.nn.relu(jnp.matmul(h, w, precision="highest"))
            return jax.nn.softmax(jnp.matmul(h, p, precision="highest"))

        return deviation(jax.jit(outputs)(x, [*layers], p), known)

    return _ask(once, compilations, OTHER_JAXLIB)


def cholesky(compilations: int = 1, *, dtype: str = "float32") -> Answer:
    """The Cholesky factor of a Gram matrix of 300 rows, its condition number below 6."""
    g = np.random.default_rng(0).normal(size=(300, 600))
    gram = g @ g.T / 600 + 0.5 * np.eye(300)
    known = np.linalg.cholesky(gram)

    def once() -> float:
        with jax.enable_x64(dtype == "float64"):
            factor = jax.jit(lambda a: decompose(jnp.linalg.cholesky, a))
            return deviation(factor(gram.astype(dtype)), known)

    return _ask(once, compilations, OTHER_LAPACK, dtype)


def eigenvectors(compilations: int = 1, *, dtype: str = "float32") -> Answer:
    """Eigenvalues 1 to 1e-3 in a random basis of 200: values, A V = V diag(λ), V orthogonal."""
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(200, 200)))[0]
    known = np.geomspace(1e-3, 1, 200)
    matrix = (basis * known) @ basis.T
    matrix = (matrix + matrix.T) / 2

    def once() -> float:
        with jax.enable_x64(dtype == "float64"):
            ask = jax.jit(lambda a: tuple(decompose(jnp.linalg.eigh, a)))
            values, vectors = ask(matrix.astype(dtype))
            v = np.asarray(vectors, np.float64)
            return max(
                deviation(values, known),
                deviation((v * np.asarray(values, np.float64)) @ v.T, matrix),
                deviation(v.T @ v, np.eye(200)),
            )

    return _ask(once, compilations, OTHER_LAPACK, dtype)


def products(compilations: int = 1) -> Answer:
    """A matrix product at the precision that this library asks for, 500 x 700 x 300, float32.

    Half precision or TF32, which accelerators like to put in its place, is off by 1e-3.
    """
    draw = np.random.default_rng(0)
    a = draw.normal(size=(500, 700)).astype(np.float32)
    b = draw.normal(size=(700, 300)).astype(np.float32)
    known = a.astype(np.float64) @ b.astype(np.float64)

    def once() -> float:
        return deviation(jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))(a, b), known)

    elsewhere = "look for a variable that forbids full precision (XLA_FLAGS, NVIDIA_TF32_OVERRIDE)"
    return _ask(once, compilations, f"{elsewhere}, else {OTHER_JAXLIB}")


def kernel(compilations: int = 1) -> Answer:
    """`jaxttp.empirical_ntk` of tanh(x W) V on 24 samples, against its Jacobian's product.

    ∂f_c/∂W_ij = x_i (1 - h_j²) V_jc,      ∂f_c/∂V_jd = h_j δ_cd
    """
    draw = np.random.default_rng(0)
    x, w, v = (draw.normal(size=s).astype(np.float32) for s in ((24, 5), (5, 16), (16, 3)))
    h = np.tanh(x.astype(np.float64) @ w.astype(np.float64))
    by_w = np.einsum("ni,nj,jc->ncij", x, 1 - h**2, v).reshape(24, 3, -1)
    by_v = np.einsum("nj,cd->ncjd", h, np.eye(3)).reshape(24, 3, -1)
    jacobian = np.concatenate([by_w, by_v], axis=2)  # (N, C, P)
    known = np.einsum("ncp,mdp->ncmd", jacobian, jacobian)

    def once() -> float:
        def apply_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ params["w"]) @ params["v"]

        with jax.default_matmul_precision("highest"):
            return deviation(empirical_ntk(apply_fn, {"w": w, "v": v}, jnp.asarray(x)), known)

    return _ask(once, compilations, OTHER_JAXLIB)


KNOWN_ANSWERS: dict[str, Callable[[], Answer]] = {
    "cross-entropy of 100,000 rows": cross_entropy,
    "softmax behind three layers": softmax_behind_layers,
    "Cholesky, float32": cholesky,
    "Cholesky, float64": functools.partial(cholesky, dtype="float64"),
    "eigenvectors, float32": eigenvectors,
    "eigenvectors, float64": functools.partial(eigenvectors, dtype="float64"),
    "matrix product, full precision": products,
    "kernel of a network": kernel,
}
"""By name, in the order in which `jaxttp doctor` asks them."""
