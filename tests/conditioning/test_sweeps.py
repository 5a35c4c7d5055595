"""What the paper's figures are made of, against brute force and with the trends that hold."""

import jax
import numpy as np
import pytest

from jaxttp import conditioning

KEY = jax.random.key(3)
RNG = np.random.default_rng(0)


def covariance(d, condition=50.0):
    q, _ = np.linalg.qr(RNG.standard_normal((d, d)))
    return q * np.geomspace(1.0, 1.0 / condition, d) @ q.T


def test_spectra_of_partial_products():
    weights = [np.asarray(w) for w in conditioning.gaussian_weights((4, 6, 5, 3), key=KEY)]
    found = conditioning.layer_spectra(weights)
    w1, w2, w3 = weights
    outer, inner = [w3 @ w2, w3, np.eye(3)], [np.eye(4), w1, w2 @ w1]
    for products, condition, smallest in (
        (outer, found.outer_condition, found.outer_smallest),
        (inner, found.inner_condition, found.inner_smallest),
    ):
        values = [np.linalg.svd(p, compute_uv=False) for p in products]
        np.testing.assert_allclose(condition, [(s[0] / s[-1]) ** 2 for s in values], rtol=1e-10)
        np.testing.assert_allclose(smallest, [s[-1] ** 2 for s in values], rtol=1e-10)
    point = conditioning.linear_point(weights)
    np.testing.assert_allclose(found.outer_condition * found.inner_condition, point.terms)
    narrow = conditioning.layer_spectra([RNG.standard_normal((2, 4)), RNG.standard_normal((3, 2))])
    assert narrow.inner_smallest[1] == narrow.outer_smallest[0] == 0
    assert narrow.inner_condition[1] == narrow.outer_condition[0] == np.inf


def test_rank_sensitivity():
    found = conditioning.condition_number(np.diag([8.0, 4.0, 2.0, 1e-20, 0.0]))
    seen = conditioning.rank_sensitivity(found)
    assert seen.rank == 3
    assert seen.ranks.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(seen.values, [1, 2, 4, 8e20, np.inf])
    near = conditioning.rank_sensitivity(found, fraction=0.2)
    assert near.ranks.tolist() == [2, 3, 4]


SWEEPS = {
    "depth": {"inputs": 5, "values": (1, 2, 4)},
    "width": {"covariance": covariance(5), "values": (4, 8, 30)},
    "skip": {"inputs": 5, "values": (0.0, 0.5, 1.0)},
    "alpha": {"data": RNG.standard_normal((5, 4)), "values": (0.0, 0.3, 1.0)},
}


@pytest.mark.slow
@pytest.mark.parametrize("parameter", SWEEPS)
def test_no_bound_is_violated(parameter):
    found = conditioning.sweep(
        parameter, outputs=3, width=SWEEPS[parameter].get("width", 9), depth=3, seeds=4, key=KEY,
        **SWEEPS[parameter],
    )  # fmt: skip
    assert found.condition.shape == found.bound.shape == (3, 4)
    assert np.all(found.condition <= found.bound * (1 + 1e-9))
    if parameter == "alpha":
        assert found.maximum is None
    else:
        assert np.all(found.bound <= found.maximum * (1 + 1e-9))
    assert len(np.unique(found.condition)) >= 9 or parameter == "depth"


def test_whitening_and_batch_norm_help():
    """GNC Figures 19 and 7: both take away what the data's covariance adds."""
    sigma = covariance(12, 1e4)
    options = {"outputs": 3, "depth": 2, "seeds": 3, "key": KEY}
    raw = conditioning.sweep("width", (40,), covariance=sigma, **options)
    white = conditioning.sweep("width", (40,), inputs=12, **options)
    assert np.all(raw.condition > 100 * white.condition)
    normed = conditioning.sweep("width", (40,), covariance=sigma, batch_norm=True, **options)
    assert normed.condition.shape == raw.condition.shape
    assert np.all(normed.condition <= normed.bound * (1 + 1e-9))


@pytest.mark.parametrize(
    ("parameter", "options", "words"),
    [
        ("size", {"inputs": 3}, "parameter='size'"),
        ("depth", {"inputs": 3, "values": ()}, "values"),
        ("depth", {}, "inputs"),
        ("depth", {"inputs": 0}, "inputs"),
        ("depth", {"inputs": 3, "values": (0,)}, "depth"),
        ("width", {"inputs": 3, "values": (1.5,)}, "width"),
        ("alpha", {"inputs": 3}, "alpha.* needs data"),
        ("alpha", {"data": np.ones((3, 2)), "values": (1.5,)}, "alpha"),
        ("skip", {"data": np.ones((3, 2))}, "linear networks"),
        ("depth", {"inputs": 3, "seeds": 0}, "seeds"),
        ("depth", {"inputs": 3, "outputs": 0}, "outputs"),
    ],
)
def test_bad_sweeps(parameter, options, words):
    with pytest.raises(ValueError, match=words):
        conditioning.sweep(parameter, options.pop("values", (2,)), key=KEY, **options)


def test_other_bad_input():
    with pytest.raises(ValueError, match="widths"):
        conditioning.gaussian_weights((3,), key=KEY)
    with pytest.raises(ValueError, match="gain"):
        conditioning.gaussian_weights((3, 2), key=KEY, gain=0.0)
    found = conditioning.condition_number(np.eye(3))
    with pytest.raises(ValueError, match="fraction"):
        conditioning.rank_sensitivity(found, fraction=1.5)
    big = conditioning.gauss_newton_linear_operator(
        conditioning.gaussian_weights((60, 70, 20), key=KEY)
    )
    with pytest.raises(ValueError, match="extreme eigenvalues only"):
        conditioning.rank_sensitivity(conditioning.condition_number(big))
