"""No range beside a warning that does not say by how much the forecast may be off."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxttp
from jaxttp.dynamics import weight_space
from jaxttp.forecast import Noisy, Relinearized
from jaxttp.forecast.methods import Path
from jaxttp.forecast.uncertainty import Doubt
from jaxttp.losses.rule import Rule, Target
from tests.draws import normal
from tests.forecast.predictions import prediction

X = normal(0, (12, 3))
Y = (X[:, 0] * X[:, 1] > 0).astype(int)
W = {"a": normal(1, (3, 8)), "b": normal(2, (8, 2))}
STEPS = 30


def network(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def linear(w, x):
    return x @ w


@pytest.fixture(scope="module")
def broken():
    """AdamW at a rate at which one linearization does not hold to the end."""
    return jaxttp.predict_training_time(
        network, W, X, Y, optimizer=optax.adamw(0.05), steps=STEPS, target_loss=(1e-6, 0.3)
    )


def test_late_times_of_a_broken_linearization_are_approximate(broken):
    path = weight_space(
        network, W, X, Y, loss="cross_entropy", optimizer=optax.adamw(0.05), steps=STEPS
    )
    share = float(path.mismatch) * np.asarray(path.displacement / path.displacement[-1])
    assert share[-1] > 0.1  # of the predicted change, as `trust` says
    assert broken.doubted_from == np.flatnonzero(share > 0.1)[0]
    late = max(broken.steps.values())
    assert late > broken.doubted_from
    assert f"about step {late}" in str(broken)
    assert "±" not in str(broken)


def test_no_advice_is_built_on_a_warning(broken):
    assert "try more steps" not in str(broken)
    assert "(see trust)" in broken.out_of_reach
    assert f"from step {broken.doubted_from} on" in broken.out_of_reach


def test_a_sound_forecast_is_as_certain_as_before():
    """The linearization of a linear network is exact, by Adam too."""
    for how in ({"optimizer": optax.adam(0.05)}, {"learning_rate": 0.5}):
        found = jaxttp.predict_training_time(
            linear, jnp.zeros((3, 2)), X, Y, steps=STEPS, target_loss=1e-6, **how
        )
        assert (found.trust, found.doubted_from) == (None, None)
        assert "about" not in str(found)
        assert "try more steps" in found.out_of_reach


def path_of(**witness):
    loss = jnp.linspace(1.0, 0.0, 101)
    steps = {"held_from": -1} | witness
    return Path(
        jnp.zeros((101, 1, 1)), loss, loss, uncertainty=jnp.full(101, 0.02),
        witness=SimpleNamespace(**steps),
    )  # fmt: skip


def test_rebuilt_kernels_are_doubted_from_the_first_step_without_a_size():
    way = Relinearized()
    assert way.doubted_from(path_of()) is None
    assert way.doubted_from(path_of(held_from=9)) == 9
    drawn = dataclasses.replace(path_of(), witness=path_of(held_from=9))
    assert Noisy(centre=way).doubted_from(drawn) == 9


def test_ranges_end_where_the_doubt_begins():
    """The curve falls by 0.01 a step: 40.5 % are left at step 60, 1.5 % at step 99."""
    rule, targets = Rule((0.405, 0.015)), (Target(0.5), Target(0.2))
    whole = Doubt.of(path_of(), rule, stable=True, targets=targets)
    part = Doubt.of(path_of(), rule, stable=True, targets=targets, doubted_from=60)
    assert part.steps == whole.steps == {0.405: 60, 0.015: 99}
    assert set(whole.steps_uncertainty) == {0.405, 0.015}
    assert part.steps_uncertainty == {0.405: whole.steps_uncertainty[0.405]}
    assert set(part.targets_uncertainty) == {Target(0.5)}


def test_words_and_pictures_end_there_too():
    found = jaxttp.predict_training_time(network, W, X, Y, learning_rate=0.1, steps=STEPS)
    assert "±" in found.end_in_doubt
    doubted = dataclasses.replace(found, doubted_from=4)
    assert doubted.end_in_doubt == ""
    assert dataclasses.replace(found, stable=False).end_in_doubt == ""
    for forecast, last in ((found, STEPS), (doubted, 4)):
        (band, *_) = forecast.plot().axes[0].collections
        assert band.get_paths()[0].vertices[:, 0].max() == last


def test_times_of_settings_thrown_about_are_approximate():
    found = jaxttp.sweep(network, W, X, Y, jaxttp.grid(learning_rate=0.1, steps=STEPS))
    time = int(found.times(0.4)[0])
    known = dataclasses.replace(
        found, forecasts={0: prediction(steps_uncertainty={0.4: 1})}, relinearized=(0,)
    )
    assert known.time_words(0, 0.4) == f"{time} ± 1"
    doubted = prediction(doubted_from=0, targets=dict.fromkeys(found.targets, 0))
    rough = dataclasses.replace(known, forecasts={0: doubted})
    assert rough.time_words(0, 0.4) == f"about {time}"
