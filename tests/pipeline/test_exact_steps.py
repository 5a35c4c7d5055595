"""Exact steps on a named data set: the network follows its forecast."""

import dataclasses

import numpy as np
import pytest

from jaxttp.pipeline import StepSettings, gauss_newton_task

WINE = StepSettings(
    data="wine", samples_per_class=8, steps=6, learning_rate=0.3, bottleneck=64,
    loss="squared_error", target_loss=(1.0,), target_error=(0.1,),
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
    ("change", "remedy"),
    [
        ({"bottleneck": 6}, "bottleneck of at least 48"),
        ({"rtol": 0.2}, "rtol 1e-06"),
        ({"pseudoinverse": "damp", "rtol": 0.2}, "pseudoinverse truncate"),
        ({"pseudoinverse": "noise"}, "pseudoinverse truncate"),  # asked for a key nobody could give
    ],
)
def test_steps_that_are_not_exact_say_what_would_do(change, remedy):
    found = gauss_newton_task(dataclasses.replace(WINE, steps=1, **change))
    assert found.residual > 0.05
    assert found.shortfall is not None
    assert f"rank {found.ranks.min()} of 24" in found.shortfall
    assert remedy in found.shortfall
    assert found.to_json()["shortfall"] == found.shortfall


@pytest.mark.slow
def test_a_rate_that_is_not_given_is_halved_until_the_loss_does_not_rise(tmp_path):
    # Targets that jump between near neighbours ask for large weights: a step of 0.5 is too long.
    x = np.random.default_rng(0).normal(size=(60, 8))
    np.savez(tmp_path / "rough.npz", x=x, y=np.sign(np.sin(9 * x[:, :1])))
    settings = StepSettings(
        data=str(tmp_path / "rough.npz"), steps=8, bottleneck=120, loss="squared_error"
    )
    found = gauss_newton_task(settings)
    assert found.diverged[:1] == (0.5,)
    assert found.settings.learning_rate == 0.5 ** (1 + len(found.diverged))
    assert found.stable
    assert found.loss[-1] <= 1.5 * found.loss.min()
    assert found.to_json()["diverged"] == list(found.diverged)
    whole = gauss_newton_task(dataclasses.replace(settings, learning_rate=0.5))
    assert whole.diverged == ()
    assert whole.loss[-1] > 1.5 * whole.loss.min()


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """Pairs of samples that hardly differ, with opposite targets: 1e-6 keeps what is rounding."""
    path = tmp_path_factory.mktemp("data") / "twins.npz"
    x = np.random.default_rng(0).normal(size=(6, 6))
    np.savez(path, x=np.concatenate([x, x + 1e-4]), y=np.repeat([[1.0], [-1.0]], 6, axis=0))
    return StepSettings(data=str(path), steps=3, bottleneck=24, loss="squared_error")


def test_what_diverges_says_what_was_tried_and_what_would_do(twins):
    """ "Choose none, it is then found" was said to those who had given none."""
    fine = gauss_newton_task(dataclasses.replace(twins, rtol=1e-6))
    assert fine.settings.rtol == 1e-6
    assert fine.problem.startswith(
        "diverges at every learning rate from 0.5 to 0.015625 with rtol 1e-06; try a larger rtol, "
    )
    rate = gauss_newton_task(dataclasses.replace(twins, rtol=1e-6, learning_rate=0.5))
    assert rate.problem.startswith("diverges at learning rate 0.5 with rtol 1e-06; try a smaller ")
    large = gauss_newton_task(dataclasses.replace(twins, learning_rate=50.0))
    assert large.diverged == ()  # what is asked for is done
    assert "at learning rate 50 with rtol 1e-06; try a smaller one, a larger rtol" in large.problem


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"pseudoinverse": "exact", "rtol": 0.01},
            "rtol=0.01 does nothing here: pseudoinverse='ex",
        ),
        ({"pseudoinverse": "best"}, "pseudoinverse='best' is not known"),
        ({"rtol": 1.0}, "rtol must be at least 0 and less than 1; got 1.0"),
        ({"data": "diabetes", "samples_per_class": 5}, "samples_per_class=5 does nothing here: a "),
    ],
)
def test_options_of_no_use_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        gauss_newton_task(dataclasses.replace(WINE, **change))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"data": "diabetes", "loss": "cross_entropy"}, "needs classes"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ValueError, match=message):
        gauss_newton_task(StepSettings(**({"data": "wine", "samples_per_class": 8} | change)))
