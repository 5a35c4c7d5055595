"""From names to condition numbers, against the parts put together by hand."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from jaxttp import conditioning, from_nnx
from jaxttp.data import load_dataset
from jaxttp.models import MLP
from jaxttp.pipeline import (
    SWEEP_VALUES,
    ConditionSettings,
    condition,
    condition_sweep,
    sweep_to_json,
)

WINE = ConditionSettings(data="wine", width=20)


def kappa(matrix, rank):
    values = np.linalg.eigvalsh(matrix)[::-1]
    return values[0] / values[rank - 1]


@pytest.mark.slow
def test_a_linear_network_on_whitened_data():
    found = condition(WINE)
    weights = conditioning.gaussian_weights((13, 20, 20, 3), key=jax.random.key(0))
    # All 13 features of wine vary, so whitened the covariance is the identity.
    matrix = np.asarray(conditioning.gauss_newton_linear(weights))
    assert found.generic_rank == int(found.condition.rank) == 39
    assert float(found.condition.value) == pytest.approx(kappa(matrix, 39), rel=1e-9)
    assert 1 < float(found.condition.value) <= found.bounds["convex"] <= found.bounds["maximum"]
    k = float(found.condition.value)
    assert found.contraction == pytest.approx((k - 1) / (k + 1))
    assert found.steps == np.ceil(np.log(0.01) / np.log((k - 1) / (k + 1)))
    assert "13-20-20-3 on 178 samples of wine, whitened" in found.description
    assert found.sensitivity.rank == 39


@pytest.mark.parametrize("n", [100, 20])
def test_whitened_inputs_have_the_identity_as_covariance(n):
    x = np.random.default_rng(0).normal(size=(n, 32))
    x = x - x.mean(axis=0)
    x = x @ np.asarray(conditioning.whitening(x.T @ x / n))
    values = np.linalg.eigvalsh(x.T @ x / n)
    rank = min(n - 1, 32)
    np.testing.assert_allclose(values[-rank:], 1, atol=1e-9)  # on the range of the data
    np.testing.assert_allclose(values[:-rank], 0, atol=1e-9)


def test_leaky_relu():
    settings = ConditionSettings(data="wine", network="leaky_relu", samples=12, width=30)
    found = condition(settings)
    assert len(found.condition.eigenvalues) == 36
    assert float(found.condition.value) <= found.bounds["eq (11)"] * (1 + 1e-9)


def test_an_mlp_is_its_curvature_matrix():
    settings = ConditionSettings(
        data="wine", network="mlp", samples=10, width=16, depth=2, whiten=False
    )
    found = condition(settings)
    assert found.bounds == {}
    rows = np.sort(np.random.default_rng(0).permutation(178)[:10])
    model = from_nnx(MLP((13, 16, 3), rngs=nnx.Rngs(0)))
    matrix = conditioning.curvature_matrix(*model, load_dataset("wine").x[rows])
    np.testing.assert_allclose(
        found.condition.eigenvalues[:20], np.linalg.eigvalsh(matrix)[::-1][:20], rtol=1e-8
    )


@pytest.mark.parametrize("parameter", SWEEP_VALUES)
def test_sweeps(parameter):
    network = "leaky_relu" if parameter == "alpha" else "linear"
    settings = ConditionSettings(data="wine", network=network, width=20, samples=12)
    values = SWEEP_VALUES[parameter][:2]
    found = condition_sweep(settings, parameter, values, seeds=2)
    assert found.condition.shape == (2, 2)
    assert np.all(found.condition <= found.bound * (1 + 1e-9))
    written = json.loads(json.dumps(sweep_to_json(found), allow_nan=False))
    assert written["parameter"] == parameter
    assert written["values"] == list(values)
    assert ("maximum_bound" in written) == (network == "linear")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"network": "vgg"}, "network='vgg'"),
        ({"samples": 1000}, "samples"),
        ({"accuracy": 2.0}, "accuracy"),
    ],
)
def test_bad_settings(change, words):
    with pytest.raises(ValueError, match=words):
        condition(ConditionSettings(**{"data": "wine"} | change))


def test_bad_sweeps():
    with pytest.raises(ValueError, match="sweep='size'"):
        condition_sweep(WINE, "size")
    with pytest.raises(ValueError, match="parameter='alpha' needs data"):
        condition_sweep(WINE, "alpha")
    with pytest.raises(ValueError, match="network='mlp' is not known"):
        condition_sweep(ConditionSettings(data="wine", network="mlp"), "depth")
