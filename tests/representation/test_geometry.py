"""The measures of features against plain NumPy, their invariances, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxttp.representation import (
    alpha_req,
    participation_ratio,
    rankme,
    representation_geometry,
    singular_values,
)

RNG = np.random.default_rng(0)
SHAPES = {"tall": (60, 7), "wide": (9, 20)}


def features(shape, seed=0):
    n, h = shape
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, h)) * np.arange(1, h + 1) ** -0.5 + 0.3


# --- oracles: eigenvalues of Gram matrices, never an SVD ------------------------------------------


def oracle_values(z, center):
    """Singular values as roots of eigenvalues of the smaller Gram matrix; 1e-8 of the largest."""
    z = z - z.mean(axis=0) if center else z
    gram = z.T @ z if z.shape[1] <= z.shape[0] else z @ z.T
    return np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0))


def oracle_rank(p):
    p = p / p.sum()
    p = p[p > 0]
    return float(np.prod(p**-p))


@pytest.mark.parametrize("shape", SHAPES)
def test_measures_equal_numpy(shape):
    """Uncentred features have full rank here, so that roots of eigenvalues keep ten digits."""
    z = features(SHAPES[shape])
    r = min(z.shape)
    s = oracle_values(z, False)[:r]
    np.testing.assert_allclose(singular_values(z), s, rtol=1e-10)
    np.testing.assert_allclose(rankme(z), oracle_rank(s), rtol=1e-10)
    entropy = rankme(z, normalization="eigenvalues")
    np.testing.assert_allclose(entropy, oracle_rank(s**2), rtol=1e-10)
    values = oracle_values(z, True) ** 2
    ratio = values.sum() ** 2 / (values**2).sum()
    np.testing.assert_allclose(participation_ratio(z), ratio, rtol=1e-10)
    law = alpha_req(z, window=(1, r - 1))
    slope, _ = np.polyfit(np.log(np.arange(1, r)), np.log(values[: r - 1]), 1)
    np.testing.assert_allclose(law.exponent, -slope, rtol=1e-10)
    assert law.window == (1, r - 1)
    assert alpha_req(z).window == (max(1, r // 10), max(2, r // 2))


def test_all_together_are_the_single_ones():
    z = features((30, 8))
    found = representation_geometry(z, window=(1, 6))
    np.testing.assert_array_equal(found.singular_values, singular_values(z, center=True))
    np.testing.assert_array_equal(found.rankme, rankme(z, center=True))
    entropy = rankme(z, center=True, normalization="eigenvalues")
    np.testing.assert_array_equal(found.entropy_rank, entropy)
    np.testing.assert_array_equal(found.participation_ratio, participation_ratio(z))
    np.testing.assert_array_equal(found.alpha.exponent, alpha_req(z, window=(1, 6)).exponent)


@pytest.mark.parametrize("k", [1, 6])
def test_k_equal_directions_have_rank_k_by_every_measure(k):
    q, _ = np.linalg.qr(RNG.standard_normal((20, 6)))
    z = 5 * q[:, :k] @ np.linalg.qr(RNG.standard_normal((6, 6)))[0][:k]
    for normalization in ("singular_values", "eigenvalues"):
        np.testing.assert_allclose(rankme(z, normalization=normalization), k, rtol=1e-10)
    np.testing.assert_allclose(participation_ratio(z, center=False), k, rtol=1e-10)


# --- invariances ----------------------------------------------------------------------------------


def every(z):
    return np.array(
        [
            rankme(z),
            rankme(z, normalization="eigenvalues"),
            participation_ratio(z),
            alpha_req(z, window=(1, 4)).exponent,
            alpha_req(z, window=(1, 4), center=False).exponent,
        ]
    )


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-6, 1e6), shift=st.floats(-100, 100))
def test_rotation_scale_order_and_shift(seed, scale, shift):
    """No measure sees the first three; those that are centred by default do not see a shift."""
    rng = np.random.default_rng(seed)
    z = features((15, 6), seed)
    q, _ = np.linalg.qr(rng.standard_normal((6, 6)))
    moved = scale * z[rng.permutation(15)] @ q
    np.testing.assert_allclose(every(moved), every(z), rtol=1e-9)  # rounding over small values
    np.testing.assert_allclose(every(z + shift)[2:4], every(z)[2:4], rtol=1e-9)


def test_a_shift_does_matter_to_rankme():
    z = features((15, 6))
    assert float(rankme(z + 10.0)) < 0.8 * float(rankme(z))


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), shape=st.sampled_from([(2, 9), (7, 5), (11, 2)]))
def test_renyi_entropies_fall_with_their_order(seed, shape):
    """1 <= exp H_2 <= exp H_1 <= rank."""
    z = np.random.default_rng(seed).standard_normal(shape) ** 3
    high, low = float(rankme(z)), float(rankme(z, normalization="eigenvalues"))
    ratio = float(participation_ratio(z, center=False))
    assert 1 - 1e-12 <= ratio <= low * (1 + 1e-12)
    assert low <= high * (1 + 1e-12) <= min(shape) * (1 + 1e-11)


# --- transformations, precision and bad input -----------------------------------------------------


def test_float32_processes_get_float64_measures():
    z = features((30, 5)).astype(np.float32)
    with jax.enable_x64(False):
        found = rankme(jnp.asarray(z))
    assert found.dtype == jnp.float64
    expected = oracle_rank(oracle_values(z.astype(np.float64), False))
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_images_are_flattened():
    z = RNG.standard_normal((8, 3, 2, 2))
    np.testing.assert_array_equal(rankme(z), rankme(z.reshape(8, -1)))


BAD = {
    "empty": (np.zeros((0, 3)), "must not be empty"),
    "a vector": (np.zeros(3), r"\(N, h\)"),
    "text": (np.array([["a"]]), "real numbers"),
    "constant": (np.full((5, 3), 0.1), "all are the same"),
    "one sample": (np.ones((1, 3)), "all are the same"),
    "nan": (np.array([[1.0, np.nan], [0.0, 1.0]]), "NaN or infinite"),
}


@pytest.mark.parametrize("case", BAD)
def test_features_without_geometry_are_refused(case):
    value, words = BAD[case]
    with pytest.raises(ValueError, match=f"features.*{words}"):
        singular_values(value)


def test_windows_and_names_are_checked():
    with pytest.raises(ValueError, match="normalization"):
        rankme(np.eye(3), normalization="sigma")
    with pytest.raises(ValueError, match="window"):
        alpha_req(np.eye(5), window=(0, 3))
    with pytest.raises(ValueError, match="features have a rank below 3"):
        alpha_req(np.diag([3.0, 2.0, 0.0]), center=False, window=(1, 3))
    with pytest.raises(ValueError, match="at least two"):
        alpha_req(np.array([[1.0], [2.0]]))
    with pytest.raises(Exception, match="all are the same"):
        jax.jit(rankme)(np.ones((3, 2))).block_until_ready()
