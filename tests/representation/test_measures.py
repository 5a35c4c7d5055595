"""The measures of features against plain NumPy, their invariances, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxttp.representation import (
    alpha_req,
    feature_moments,
    init_moments,
    merge_moments,
    participation_ratio,
    rankme,
    representation_geometry,
    singular_value_trajectory,
    singular_values,
    update_moments,
)

RNG = np.random.default_rng(0)
SHAPES = {"tall": (60, 7), "wide": (9, 20), "square": (12, 12)}


def features(shape, seed=0, decay=0.5):
    n, h = shape
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, h)) * np.arange(1, h + 1) ** -decay + 0.3


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


def oracle_slope(values, first, last):
    return np.polyfit(np.log(np.arange(first, last + 1)), np.log(values[first - 1 : last]), 1)[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stream", [False, True])
def test_measures_equal_numpy(shape, stream):
    """Uncentred features have full rank here, so that roots of eigenvalues keep ten digits."""
    z = features(SHAPES[shape])
    given = update_moments(init_moments(z.shape[1]), z) if stream else z
    r = min(z.shape)
    s = oracle_values(z, False)[:r]
    np.testing.assert_allclose(singular_values(given)[:r], s, rtol=1e-10)
    if shape == "wide" and stream:
        np.testing.assert_array_equal(singular_values(given)[r:], 0.0)
    np.testing.assert_allclose(rankme(given), oracle_rank(s), rtol=1e-10)
    entropy = rankme(given, normalization="eigenvalues")
    np.testing.assert_allclose(entropy, oracle_rank(s**2), rtol=1e-10)
    centred = oracle_values(z, True)
    pr = (centred**2).sum() ** 2 / (centred**4).sum()
    np.testing.assert_allclose(participation_ratio(given), pr, rtol=1e-10)
    law = alpha_req(given, window=(1, r - 1))
    np.testing.assert_allclose(law.exponent, -oracle_slope(centred**2, 1, r - 1), rtol=1e-10)
    assert law.window == (1, r - 1)


def test_goodness_and_the_default_window():
    z = features((200, 40))
    law = alpha_req(z)
    assert law.window == (4, 20)
    values = oracle_values(z, True) ** 2 / 200
    x, y = np.log(np.arange(4, 21)), np.log(values[3:20])
    np.testing.assert_allclose(law.r_squared, np.corrcoef(x, y)[0, 1] ** 2, rtol=1e-10)
    np.testing.assert_allclose(
        law.coefficient, np.exp(np.polyval(np.polyfit(x, y, 1), 0.0)), rtol=1e-9
    )


def test_all_together_are_the_single_ones():
    z = features((30, 8))
    seen = representation_geometry(z, window=(1, 6))
    np.testing.assert_array_equal(seen.singular_values, singular_values(z, center=True))
    np.testing.assert_array_equal(seen.rankme, rankme(z, center=True))
    np.testing.assert_array_equal(
        seen.entropy_rank, rankme(z, center=True, normalization="eigenvalues")
    )
    np.testing.assert_array_equal(seen.participation_ratio, participation_ratio(z))
    np.testing.assert_array_equal(seen.alpha.exponent, alpha_req(z, window=(1, 6)).exponent)
    assert "ranks 1-6" in str(seen)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_known_ranks(k):
    """k equal directions have rank k by every measure."""
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


@given(seed=st.integers(0, 2**31), scale=st.floats(1e-6, 1e6))
def test_rotation_scale_and_order_do_not_matter(seed, scale):
    rng = np.random.default_rng(seed)
    z = features((15, 6), seed)
    q, _ = np.linalg.qr(rng.standard_normal((6, 6)))
    moved = scale * z[rng.permutation(15)] @ q
    np.testing.assert_allclose(every(moved), every(z), rtol=1e-9)  # rounding over small values


@given(seed=st.integers(0, 2**31), shift=st.floats(-100, 100))
def test_a_shift_does_not_matter_to_centred_measures(seed, shift):
    z = features((15, 6), seed)
    for measure in (participation_ratio, lambda z: alpha_req(z, window=(1, 4)).exponent):
        np.testing.assert_allclose(measure(z + shift), measure(z), rtol=1e-9)


def test_a_shift_does_matter_to_others():
    z = features((15, 6))
    assert float(rankme(z + 10.0)) < 0.8 * float(rankme(z))


@given(seed=st.integers(0, 2**31), shape=st.sampled_from([(2, 9), (7, 5), (11, 2)]))
def test_bounds(seed, shape):
    z = np.random.default_rng(seed).standard_normal(shape) ** 3
    r = min(shape)
    high, low = float(rankme(z)), float(rankme(z, normalization="eigenvalues"))
    pr = float(participation_ratio(z, center=False))
    # Renyi entropies fall with their order: exp H_1 >= exp H_2.
    assert 1 - 1e-12 <= pr <= low * (1 + 1e-12)
    assert low <= high * (1 + 1e-12) <= r * (1 + 1e-11)


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.slow
@given(  # few sizes of batches: each is compiled
    seed=st.integers(0, 2**31), cuts=st.lists(st.sampled_from([1, 20, 39]), max_size=4)
)
def test_batches_of_any_size_give_the_same_moments(seed, cuts):
    z = features((40, 5), seed) + 100.0  # a large mean: nothing may cancel
    moments = init_moments(5)
    for part in np.split(z, sorted(set(cuts))):
        moments = update_moments(moments, part)
    np.testing.assert_allclose(moments.samples, 40)
    np.testing.assert_allclose(moments.mean, z.mean(axis=0), rtol=1e-13)
    # Deviations of size 1 around a mean of 100: 1e-14 of 100^2 is rounding.
    np.testing.assert_allclose(moments.covariance, np.cov(z.T, bias=True), rtol=0, atol=1e-12)
    np.testing.assert_allclose(moments.second_moment, z.T @ z / 40, rtol=1e-13)


def test_merged_moments_are_those_of_all():
    z = features((11, 3))
    halves = [update_moments(init_moments(3), part) for part in (z[:4], z[4:])]
    both, whole = merge_moments(*halves), update_moments(init_moments(3), z)
    for a, b in zip(both, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)
    for a, b in zip(merge_moments(init_moments(3), whole), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-15)


def test_streaming_through_a_network(strict_dtypes):
    w = jnp.asarray(RNG.standard_normal((4, 6)))
    x = jnp.asarray(RNG.standard_normal((23, 4)))
    moments = feature_moments(lambda w, x: jnp.tanh(x @ w), w, x, batch_size=5)
    z = np.tanh(np.asarray(x) @ np.asarray(w))
    np.testing.assert_allclose(rankme(moments), oracle_rank(oracle_values(z, False)), rtol=1e-10)


def test_update_works_as_a_scan():
    z = features((24, 3))

    def body(moments, batch):
        return update_moments(moments, batch), None

    scanned, _ = jax.jit(lambda z: jax.lax.scan(body, init_moments(3), z))(z.reshape(6, 4, 3))
    np.testing.assert_allclose(scanned.covariance, np.cov(z.T, bias=True), atol=1e-14)


def test_float32_processes_get_float64_measures():
    z = features((30, 5)).astype(np.float32)
    with jax.enable_x64(False):
        single = jnp.asarray(z)
        assert single.dtype == jnp.float32
        direct = rankme(single)
        moments = update_moments(init_moments(5), single)
        compiled = jax.jit(lambda m, z: update_moments(m, z))(moments, single)
        streamed = rankme(moments)
    assert direct.dtype == streamed.dtype == compiled.scatter.dtype == jnp.float64
    expected = oracle_rank(oracle_values(z.astype(np.float64), False))
    np.testing.assert_allclose([direct, streamed], expected, rtol=1e-10)


# --- transformations ------------------------------------------------------------------------------


def test_jit_and_vmap():
    z = np.stack([features((10, 4), seed) for seed in range(3)])
    for measure in (rankme, participation_ratio, lambda z: alpha_req(z, window=(1, 3)).exponent):
        together = jax.jit(jax.vmap(measure))(z)
        np.testing.assert_allclose(together, [measure(one) for one in z], rtol=1e-12)


def test_trajectories():
    z = np.stack([features((10, 4), seed) for seed in range(3)])
    path = singular_value_trajectory(z)
    np.testing.assert_allclose(path, [oracle_values(one, False) for one in z], rtol=1e-10)
    moments = [update_moments(init_moments(4), one) for one in z]
    np.testing.assert_allclose(singular_value_trajectory(moments), path, rtol=1e-10)
    centred = singular_value_trajectory(list(z), center=True)
    np.testing.assert_allclose(centred[1], oracle_values(z[1], True), rtol=1e-10)


def test_images_are_flattened():
    z = RNG.standard_normal((8, 3, 2, 2))
    np.testing.assert_array_equal(rankme(z), rankme(z.reshape(8, -1)))


# --- bad input ------------------------------------------------------------------------------------

BAD = {
    "empty rows": (np.zeros((0, 3)), "must not be empty"),
    "empty columns": (np.zeros((3, 0)), "must not be empty"),
    "a vector": (np.zeros(3), r"\(N, h\)"),
    "text": (np.array([["a"]]), "real numbers"),
    "zeros": (np.zeros((5, 3)), "all are the same"),
    "constant": (np.full((5, 3), 0.1), "all are the same"),
    "one sample": (np.ones((1, 3)), "all are the same"),
    "nan": (np.array([[1.0, np.nan], [0.0, 1.0]]), "NaN or infinite"),
    "infinite": (np.array([[1.0, np.inf], [0.0, 1.0]]), "NaN or infinite"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize(
    "measure", [rankme, participation_ratio, alpha_req, singular_values, representation_geometry]
)
def test_features_without_geometry_are_refused(case, measure):
    value, words = BAD[case]
    with pytest.raises(ValueError, match=f"features.*{words}"):
        measure(value)


def test_streams_without_geometry_are_refused():
    with pytest.raises(ValueError, match=r"features.*all are the same"):
        rankme(init_moments(3))
    moments = update_moments(init_moments(3), np.full((4, 3), 0.1))
    for _ in range(5):
        moments = update_moments(moments, np.full((7, 3), 0.1))
    with pytest.raises(ValueError, match=r"features.*all are the same"):
        participation_ratio(moments)
    with pytest.raises(ValueError, match="NaN"):
        update_moments(moments, np.full((2, 3), np.nan))
    with pytest.raises(ValueError, match="3 columns"):
        update_moments(moments, np.ones((2, 4)))
    with pytest.raises(ValueError, match="width"):
        merge_moments(moments, init_moments(2))
    with pytest.raises(ValueError, match="x must hold samples"):
        feature_moments(lambda w, x: x, 0.0, np.zeros((0, 3)))


@pytest.mark.parametrize("bad", [np.full((4, 3), 0.5), np.full((4, 3), np.nan)])
def test_inside_jit_it_is_an_error_at_run_time(bad):
    with pytest.raises(Exception, match="features"):
        jax.jit(rankme)(bad).block_until_ready()


def test_windows_and_options():
    z = features((10, 6))
    with pytest.raises(ValueError, match="window"):
        alpha_req(z, window=(3, 3))
    with pytest.raises(ValueError, match="window"):
        alpha_req(z, window=(1, 7))
    with pytest.raises(ValueError, match="rank below 5"):
        alpha_req(z[:, :1] * np.ones((1, 6)) + np.eye(10, 6) @ np.diag([1, 2, 0, 0, 0, 0]),
                  window=(1, 5))  # fmt: skip
    with pytest.raises(ValueError, match="slope needs at least two"):
        alpha_req(z[:, :1])
    with pytest.raises(ValueError, match="normalization='sum'"):
        rankme(z, normalization="sum")
    with pytest.raises(ValueError, match="history"):
        singular_value_trajectory([z, z[:4]])
    with pytest.raises(ValueError, match="history"):
        singular_value_trajectory(z)
