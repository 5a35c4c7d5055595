"""Exact steps on a named data set: the network follows its forecast."""

import json

import numpy as np
import pytest

from jaxttp.pipeline import StepSettings, gauss_newton_task

WINE = StepSettings(data="wine", samples_per_class=8, steps=6, learning_rate=0.3, bottleneck=64)


@pytest.mark.slow
def test_full_rank_steps_follow_the_forecast():
    found = gauss_newton_task(WINE)
    assert found.ranks.tolist() == [[24, 24], [24, 24]]
    assert found.residual < 1e-9
    shrinking = found.forecast.loss[0] * 0.7 ** (2 * np.arange(7))  # eps shrinks by 1 - rate
    np.testing.assert_allclose(found.forecast.loss, shrinking, rtol=1e-10)
    # the network is not linear: first order in the rate
    np.testing.assert_allclose(found.loss, found.forecast.loss, atol=0.1 * found.loss[0])
    assert found.stable
    for ahead, real in found.times().values():
        assert abs(ahead - real) <= 1
    assert found.error[-1] == 0


def test_results_are_plain_values():
    found = gauss_newton_task(WINE)
    text = json.dumps(found.to_json(), allow_nan=False)
    assert json.loads(text)["real"]["steps"]["0.1"] == found.times()[0.1][1]


def test_divergence_is_said_not_raised():
    found = gauss_newton_task(
        StepSettings(data="wine", samples_per_class=8, steps=6, learning_rate=40.0, bottleneck=64)
    )
    assert not found.stable
    assert not np.any(np.isnan(found.loss))
    assert all(real == -1 for _, real in found.times().values())
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "imagenet"}, "data='imagenet'"),
        ({"steps": 0}, "steps must be"),
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"loss": "hinge"}, "loss='hinge'"),
        ({"data": "diabetes", "loss": "cross_entropy"}, "needs classes"),
        ({"pseudoinverse": "exact", "bottleneck": 16}, "N"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ValueError, match=message):
        gauss_newton_task(StepSettings(**({"data": "wine", "samples_per_class": 8} | change)))
