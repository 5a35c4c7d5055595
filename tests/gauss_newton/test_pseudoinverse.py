"""Pseudo-inverses against NumPy's SVD, on matrices of known spectra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.gauss_newton.pseudoinverse import KINDS, _gram, as_pseudoinverse
from tests.compiled import compilations
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def apply_pseudoinverse(s, t, *, pseudoinverse="truncate", **options):
    return as_pseudoinverse(pseudoinverse, **options).apply(jnp.asarray(s), jnp.asarray(t))


def matrix(spectrum, rows, columns, seed=0):
    """A matrix with these singular values."""
    rng = np.random.default_rng(seed)
    k = len(spectrum)
    u = np.linalg.qr(rng.normal(size=(rows, k)))[0]
    v = np.linalg.qr(rng.normal(size=(columns, k)))[0]
    return (u * np.asarray(spectrum)) @ v.T


def reference(s, t, mode, rtol, atol):
    """φ(S) by NumPy's SVD, rank-deficient directions dropped."""
    u, values, vt = np.linalg.svd(s, full_matrices=False)
    delta = rtol * values[0]
    alive = values > 1e-10 * values[0]
    with np.errstate(divide="ignore"):
        weight = {
            "exact": 1 / values,
            "truncate": np.where(values >= max(delta, atol), 1 / values, 0),
            "damp": 1 / (values + delta),
            "tikhonov": values / (values**2 + delta**2),
        }[mode]
    return vt.T @ (np.where(alive, weight, 0)[:, None] * (u.T @ t))


SPECTRUM = [9.0, 4.0, 1.0, 0.5, 0.05, 0.02]


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
@pytest.mark.parametrize("mode", ["truncate", "damp", "tikhonov"])
@pytest.mark.parametrize("method", ["auto", "svd"])
def test_every_filter_and_shape(shape, mode, method):
    s = matrix(SPECTRUM, *shape)
    t = np.random.default_rng(1).normal(size=(shape[0], 3))
    found = apply_pseudoinverse(s, t, pseudoinverse=mode, rtol=0.01, method=method)
    expected = reference(s, t, mode, 0.01, 1e-5)
    # The required 1e-9; a Gram of condition (9/0.02)² = 2e5 in float64 leaves about 1e-11.
    np.testing.assert_allclose(found.solution, expected, atol=1e-9)
    np.testing.assert_allclose(found.achieved, s @ expected, atol=1e-9)
    assert int(found.rank) == (4 if mode == "truncate" else 6)
    assert abs(float(found.largest) - 9) < 1e-12  # the top of a spectrum is well conditioned
    relative = np.linalg.norm(s @ expected - t) / np.linalg.norm(t)
    assert abs(float(found.residual) - relative) < 1e-9  # of the same size as the solution's error


@pytest.mark.parametrize("method", ["cholesky", "eigh", "svd"])
def test_exact_is_moore_penrose_on_every_route(method):
    s, t = matrix(SPECTRUM, 6, 20), np.random.default_rng(1).normal(size=(6, 3))
    found = apply_pseudoinverse(s, t, pseudoinverse="exact", method=method)
    np.testing.assert_allclose(found.solution, np.linalg.pinv(s) @ t, atol=1e-9)  # as above
    assert float(found.residual) < 1e-10  # as above
    assert int(found.rank) == 6


def test_float32_cholesky_is_refined():
    s = matrix(np.geomspace(1, 1e-2, 30), 30, 80).astype(np.float32)
    t = np.random.default_rng(1).normal(size=(30, 4)).astype(np.float32)
    found = apply_pseudoinverse(s, t, pseudoinverse="exact")
    expected = np.linalg.pinv(s.astype(np.float64)) @ t
    error = np.linalg.norm(np.asarray(found.solution, float) - expected) / np.linalg.norm(expected)
    # Refined until the residual is below 1e-4; the solution is then right to a few of that.
    assert error < 5e-4
    assert float(found.residual) < 1.2e-4


def test_float32_falls_back_to_float64_where_the_gram_breaks_down():
    """Pairs of rows e and e + 2^-13 e': in float32 1 + 2^-26 is 1, in whatever order and by FMA.

    So the Gram repeats each row and every second pivot is 1 - 1 * 1 = 0 on any machine. In float64
    it has a condition number of 3e8.
    """
    s = np.zeros((30, 80), np.float32)
    s[np.arange(30), np.arange(30) // 2] = 1.0
    s[np.arange(1, 30, 2), np.arange(15, 30)] = 2.0**-13
    t = np.random.default_rng(1).normal(size=(30, 4)).astype(np.float32)
    gram = np.asarray(_gram(jnp.asarray(s)))
    np.testing.assert_array_equal(gram, np.kron(np.eye(15), np.ones((2, 2))))
    assert not np.isfinite(np.asarray(jnp.linalg.cholesky(jnp.asarray(gram)))).all()
    with jax.enable_x64(False):
        found = jax.jit(lambda s, t: apply_pseudoinverse(s, t, pseudoinverse="exact"))(s, t)
    expected = np.linalg.pinv(s.astype(np.float64)) @ t
    error = np.linalg.norm(np.asarray(found.solution, float) - expected) / np.linalg.norm(expected)
    assert error < 1e-5  # a float64 solve (1e-8) stored in float32
    assert float(found.residual) < 1e-2  # the float32 product s u, of condition 1e4


@pytest.mark.parametrize("mode", ["truncate", "tikhonov"])
@pytest.mark.parametrize("shape", [(60, 100), (100, 60)])
def test_float32_eigenvectors_serve_where_they_resolve_what_is_kept(mode, shape):
    """Random features, those of ReLU with a mean that stands above all; no float64 is needed."""
    rng = np.random.default_rng(2)
    s = np.maximum(rng.normal(size=(shape[0], 20)) @ rng.normal(size=(20, shape[1])), 0)
    s, t = s.astype(np.float32), rng.normal(size=(shape[0], 5)).astype(np.float32)
    rtol = 0.03
    inverse = as_pseudoinverse(mode, rtol=rtol)
    _, resolved = inverse._spectral_narrow(jnp.asarray(s), jnp.asarray(t))
    assert bool(resolved)
    found = apply_pseudoinverse(s, t, pseudoinverse=mode, rtol=rtol)
    expected = reference(s.astype(np.float64), t, mode, rtol, 1e-5)
    error = np.linalg.norm(np.asarray(found.solution, float) - expected) / np.linalg.norm(expected)
    assert error < 1e-3  # 2e-3 is allowed; measured below 1e-4
    values = np.linalg.svd(s.astype(np.float64), compute_uv=False)
    assert abs(float(found.largest) / values[0] - 1) < 1e-5
    if mode == "truncate":
        assert int(found.rank) == np.sum(values >= rtol * values[0])
    achieved = s @ expected
    assert np.linalg.norm(np.asarray(found.achieved) - achieved) < 1e-3 * np.linalg.norm(achieved)


def test_float64_takes_over_where_float32_resolves_too_little():
    s = matrix(np.geomspace(100, 0.1, 40), 40, 90).astype(np.float32)
    t = np.ones((40, 1), np.float32)
    for rtol, expected in ((0.5, True), (1e-2, False)):
        inverse = as_pseudoinverse("truncate", rtol=rtol, atol=0.0)
        _, resolved = inverse._spectral_narrow(jnp.asarray(s), jnp.asarray(t))
        assert bool(resolved) == expected
    zero = as_pseudoinverse("truncate", atol=0.0)
    assert not bool(zero._spectral_narrow(jnp.zeros((3, 5)), jnp.ones((3, 1)))[1])


def test_a_zero_matrix_moves_nothing():
    found = apply_pseudoinverse(np.zeros((3, 5)), np.ones((3, 2)), atol=0.0)
    assert int(found.rank) == 0
    assert float(found.residual) == 1
    assert not found.solution.any()
    still = apply_pseudoinverse(np.eye(3), np.zeros((3, 2)))
    assert float(still.residual) == 0


def test_noise_is_the_exact_inverse_of_a_disturbed_matrix(key):
    s, t = matrix(SPECTRUM, 6, 20), np.ones((6, 2))
    found = apply_pseudoinverse(s, t, pseudoinverse="noise", key=key)
    disturbed = s + 0.1 * s.std() * np.asarray(normal(key, s.shape))
    np.testing.assert_allclose(found.solution, np.linalg.pinv(disturbed) @ t, atol=1e-9)  # as above
    np.testing.assert_allclose(found.achieved, s @ np.asarray(found.solution), atol=1e-12)
    assert float(found.residual) > 1e-3  # the noise is felt


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_keys_are_traced(kind, key):
    """Under jit and vmap, and other ones compile nothing."""
    s, t = jnp.asarray(matrix(SPECTRUM, 6, 20)), jnp.ones((6, 2))

    def solve(inverse):
        return inverse.apply(s, t).solution

    inverses = [
        as_pseudoinverse(kind, rtol=rtol, key=key)
        for rtol, key in ((0.01, key), (0.3, jax.random.key(1)))
    ]
    compiled = jax.jit(solve)
    first = compiled(inverses[0])
    np.testing.assert_allclose(first, solve(inverses[0]), atol=1e-10)  # other summations
    with compilations() as programs:
        second = np.asarray(compiled(inverses[1]))
    assert not programs
    assert np.any(np.asarray(first) != second) == (kind != "exact")
    both = jax.vmap(solve)(inverses[0].for_layers((3,)))
    assert both.shape == (3, 20, 2)
    assert np.any(both[0] != both[1]) == (kind == "noise")  # a key of its own for each


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "noise", "key": jnp.zeros(3)}, "key must be a jax.random.key"),
        ({"kind": "lucky"}, "pseudoinverse='lucky' is not known"),
        ({"rtol": -0.1}, "rtol must be at least 0"),
        ({"rtol": 1.0}, "less than 1"),
        ({"atol": np.nan}, "atol must be finite"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        as_pseudoinverse(**({"kind": "truncate"} | options))


@pytest.mark.parametrize(("kind", "message"), [("exact", "N = 6 samples, m = 4"), ("noise", "key")])
def test_features_that_have_no_inverse(kind, message):
    with pytest.raises(ValueError, match=message):
        as_pseudoinverse(kind).check(6, 4 if kind == "exact" else 8)
