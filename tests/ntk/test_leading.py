"""The largest eigenpairs against NumPy's, with copies, clusters, low ranks and both signs."""

import warnings

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

from jaxttp.conditioning import curvature_matrix, curvature_operator
from jaxttp.ntk import density as module
from jaxttp.ntk import extreme_eigenvalues, ntk_operator, spectral_density, top_eigenpairs
from tests import oracles

KEY = jax.random.key(0)
SIZE, K = 60, 5
SPECTRA = {
    "simple": np.linspace(-1.0, 2.0, SIZE) ** 3,
    "copies": np.r_[[3.0] * 3, [2.0] * 4, np.linspace(-1.0, 1.0, SIZE - 7)],  # two of four are in
    "one of many copies": np.repeat(np.arange(6.0), 10),
    "a cluster": np.r_[2.0 + 1e-7 * np.arange(4), 1.5, np.linspace(-1.0, 1.0, SIZE - 5)],
    "rank 3": np.r_[4.0, 2.0, 1.0, np.zeros(SIZE - 3)],
    "rank 3, two negative": np.r_[4.0, -2.0, -9.0, np.zeros(SIZE - 3)],
    "negative": -(np.arange(1.0, SIZE + 1) ** 2),
    "the identity": np.ones(SIZE),
    "zeros": np.zeros(SIZE),
    "large": 1e30 * np.arange(SIZE),
    "small": 1e-30 * np.arange(SIZE),
}


def symmetric(values, dtype=np.float64):
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((SIZE, SIZE)))[0]
    matrix = (basis * values) @ basis.T
    return (0.5 * (matrix + matrix.T)).astype(dtype)


def check(matrix, values, vectors, rtol):
    """Largest first with every copy; unit vectors of right angles; small residuals."""
    matrix, values = np.asarray(matrix, float), np.asarray(values, float)
    vectors = np.asarray(vectors, float).reshape(len(values), -1)
    spectrum = np.linalg.eigvalsh(matrix)[::-1]
    scale = np.max(np.abs(spectrum))
    np.testing.assert_allclose(values, spectrum[: len(values)], rtol=0, atol=rtol * scale)
    assert np.all(np.diff(values) <= 0)
    assert np.all(np.linalg.norm(vectors @ matrix - values[:, None] * vectors, axis=1)
                  <= rtol * scale)  # fmt: skip
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(len(values)), atol=rtol)
    for vector in vectors:
        sizes = np.abs(vector)
        assert vector[np.flatnonzero(sizes >= 0.999 * sizes.max())[0]] > 0


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", SPECTRA)
def test_prescribed_spectra_by_restarts(name, dtype):
    """With 12 vectors at a time; the bound is the documented one, and rounding, 10 eps sqrt(n)."""
    matrix = symmetric(SPECTRA[name], dtype)
    values, vectors = top_eigenpairs(jnp.asarray(matrix), K, key=KEY, depth=12)
    assert values.dtype == vectors.dtype == dtype
    assert vectors.shape == (K, SIZE)
    eps = np.finfo(dtype).eps
    check(matrix, values, vectors, eps ** (2 / 3) + 10 * eps * SIZE**0.5)


@pytest.mark.parametrize("name", ["copies", "rank 3, two negative", "zeros"])
def test_as_many_as_there_are(name):
    matrix = symmetric(SPECTRA[name])
    check(matrix, *top_eigenpairs(jnp.asarray(matrix), SIZE, key=KEY), 1e-13)  # rounding


def test_the_space_of_the_vectors():
    matrix = symmetric(SPECTRA["copies"])
    _, vectors = top_eigenpairs(jnp.asarray(matrix), 7, key=KEY, depth=14)
    wanted = np.linalg.eigh(matrix)[1][:, -7:]
    # The residual, 4e-11 of the largest value 3, over the gap of 1 behind the seventh.
    np.testing.assert_allclose(vectors.T @ vectors, wanted @ wanted.T, atol=1e-10)


def network(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


@pytest.fixture(scope="module")
def task():
    draw = np.random.default_rng(1)
    params = {"in": draw.normal(size=(3, 4)), "out": draw.normal(size=(4, 2))}
    x, labels = draw.normal(size=(6, 3)), np.array([0, 1, 1, 0, 1, 0])
    return jax.tree.map(jnp.asarray, params), jnp.asarray(x), jnp.asarray(labels)


@pytest.mark.parametrize("depth", [None, 8])
def test_of_a_hessian_both_ends(task, depth, monkeypatch):
    options = {"kind": "hessian", "loss": "cross_entropy"}
    matrix = curvature_matrix(network, *task, **options)
    operator = curvature_operator(network, *task, **options)
    found = top_eigenpairs(operator, 3, key=KEY, depth=depth)
    check(matrix, *found, 1e-10)
    check(-matrix, *top_eigenpairs(-operator, 2, key=KEY), 1e-10)
    # On a CPU every step is a program of its own, unless a transformation is going on.
    monkeypatch.setattr(module, "is_walked", lambda kernel: False)
    for one, other in zip(found, top_eigenpairs(operator, 3, key=KEY, depth=depth), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)  # the residual over the gaps


def test_vectors_are_as_the_operator_takes_them(task):
    params, x, _ = task
    theta = oracles.kernel(network, params, x)
    for kernel in (theta, ntk_operator(network, params, x)):
        values, vectors = top_eigenpairs(kernel, 2, key=KEY)
        assert vectors.shape == (2, 6, 2)
        check(theta.reshape(12, 12), values, vectors, 1e-10)
    structure = jax.eval_shape(lambda: {"a": jnp.zeros(2), "b": jnp.zeros((2, 1))})
    double = lx.FunctionLinearOperator(
        lambda v: {"a": 3.0 * v["b"][:, 0], "b": 3.0 * v["a"][:, None]}, structure,
        lx.symmetric_tag,
    )  # fmt: skip
    values, vectors = top_eigenpairs(double, 3, key=KEY)
    np.testing.assert_allclose(values, [3.0, 3.0, -3.0], atol=1e-14)  # rounding
    assert {name: leaf.shape for name, leaf in vectors.items()} == {"a": (3, 2), "b": (3, 2, 1)}
    np.testing.assert_allclose(vectors["a"][:2], vectors["b"][:2, :, 0], atol=1e-14)


def test_float64_operators_in_a_float32_process(task):
    """A start vector in float32 gave a float32 result and three warnings."""
    options = {"kind": "hessian", "loss": "cross_entropy"}
    matrix = curvature_matrix(network, *task, **options)
    spectrum = np.linalg.eigvalsh(matrix)
    operator = curvature_operator(network, *task, **options)
    with jax.enable_x64(False), warnings.catch_warnings():
        warnings.simplefilter("error")
        ends = [*extreme_eigenvalues(operator, key=KEY), *extreme_eigenvalues(matrix, key=KEY)]
        values, vectors = top_eigenpairs(operator, 2, key=KEY)
        traced = jax.jit(lambda key: top_eigenpairs(operator, 2, key=key)[0])(KEY)
        density = spectral_density(operator, key=KEY, probes=2)
        arrays = [*ends, values, vectors, traced, *density[:2], *density.integral(jnp.abs)]
        assert {array.dtype for array in arrays} == {np.dtype(np.float64)}
        assert density.plot().axes
        np.testing.assert_allclose(ends, spectrum[[0, -1, 0, -1]], rtol=1e-12)  # rounding
        np.testing.assert_allclose(values, spectrum[:-3:-1], rtol=1e-12)
        np.testing.assert_allclose(traced, values, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"k": 0}, "k must be an integer between 1 and 3; got 0"),
        ({"k": 4}, "k must be an integer between 1 and 3; got 4"),
        ({"k": 1, "depth": 2}, "depth must be an integer of at least 3; got 2"),
        ({"k": 1, "rtol": -1.0}, "rtol must be at least 0"),
        ({"k": 1, "kernel": jnp.ones((2, 3))}, "kernel must be"),
        ({"k": 1, "kernel": jnp.full((2, 2), jnp.nan)}, "kernel holds 4 value"),
    ],
)
def test_bad_input(options, match):
    with pytest.raises(ValueError, match=match):
        top_eigenpairs(**{"kernel": jnp.eye(3), "key": KEY} | options)


def slow(rows=500):
    """500 eigenvalues 0.002 apart, for three vectors at a time."""
    size = jax.ShapeDtypeStruct((rows,), float)
    return lx.FunctionLinearOperator(lambda v: jnp.linspace(0.0, 1.0, rows) * v, size)


@pytest.mark.parametrize(
    "kernel",
    [
        jnp.triu(jnp.ones((6, 6))),  # not symmetric
        lx.MatrixLinearOperator(jnp.full((3, 3), jnp.nan), lx.symmetric_tag),
        slow(),
    ],
    ids=["not symmetric", "not finite", "not converged"],
)
def test_pairs_that_are_none_are_refused(kernel):
    with pytest.raises(ValueError, match="kernel: eigenpairs did not converge; give a larger"):
        top_eigenpairs(kernel, 1, key=KEY, depth=3)


def test_pairs_that_are_none_are_refused_in_compiled_programs():
    with pytest.raises(Exception, match="eigenpairs did not converge"):
        jax.jit(lambda matrix: top_eigenpairs(matrix, 1, key=KEY, depth=3))(
            jnp.triu(jnp.eye(6) + 1)
        )


def test_a_coarser_bound_ends_earlier():
    value = top_eigenpairs(slow(), 1, key=KEY, depth=12, rtol=1e-3)[0]
    assert 1.0 - 1e-3 <= value <= 1.0
