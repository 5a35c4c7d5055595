"""Exact steps on a named data set: the network follows its forecast."""

import dataclasses

import numpy as np
import pytest

from jaxttp.pipeline import StepSettings, gauss_newton_task

WINE = StepSettings(
    data="wine", samples_per_class=8, steps=6, learning_rate=0.3, bottleneck=64,
    loss="squared_error",
)  # fmt: skip


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


@pytest.mark.parametrize(
    "change",
    [{"bottleneck": 6}, {"pseudoinverse": "damp", "rtol": 0.2}, {"pseudoinverse": "noise"}],
)
def test_steps_that_are_not_exact_say_what_would_do(change):
    found = gauss_newton_task(dataclasses.replace(WINE, steps=1, **change))
    assert found.residual > 0.05
    assert found.shortfall is not None
    assert f"rank {found.ranks.min()} of 24" in found.shortfall
    assert "bottleneck of at least 48" in found.shortfall


def test_what_diverges_says_what_would_do():
    found = gauss_newton_task(dataclasses.replace(WINE, learning_rate=50.0, steps=2))
    assert found.problem.startswith("diverges at learning rate 50 with rtol 1e-06; try a smaller ")
    assert np.isinf(found.loss[-1]) or found.loss[-1] > found.loss[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"pseudoinverse": "exact", "rtol": 0.01},
            "rtol=0.01 does nothing here: pseudoinverse='ex",
        ),
        ({"pseudoinverse": "best"}, "pseudoinverse='best' is not known"),
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"data": "diabetes", "loss": "cross_entropy", "samples_per_class": 30}, "needs classes"),
        ({"rtol": 1.0}, "rtol must be at least 0 and less than 1; got 1.0"),
        ({"data": "diabetes", "samples_per_class": 5}, "samples_per_class=5 does nothing here: a "),
    ],
)
def test_options_of_no_use_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        gauss_newton_task(dataclasses.replace(WINE, **change))
