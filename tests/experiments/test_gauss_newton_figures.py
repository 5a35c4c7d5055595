"""The figures on exact Gauss-Newton: all of them run small, and draw again without computing."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from experiments.gauss_newton import forecasts, representation, variants
from experiments.gauss_newton.training import Phase, load, train
from experiments.gauss_newton.variants import Case, Settings, build, training_of
from experiments.harness import load_script
from experiments.scripts import SCRIPTS
from tests.experiments.smoke import check_smoke

FIGURES = [name for name, path in SCRIPTS.items() if "experiments.gauss_newton" in path]
QUICK = ("xgn-regression-mini",)
WINE = Settings((), data="wine", blocks=1, bottleneck=64, batch_size=32, seeds=(0,))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FIGURES]
)
def test_smoke(name, tmp_path):
    check_smoke(name, tmp_path)


@pytest.mark.parametrize("name", FIGURES)
def test_presets(name):
    """All three, with the paper's sizes; no two scripts draw the same picture."""
    script = load_script(name)
    assert set(script.presets) == {"smoke", "cpu", "paper"}
    assert all(re.search(r"\((XGN Figures? [\w ,]+|ours)\)$", c) for c in script.claim.values())
    pictures = [picture for other in FIGURES for picture in load_script(other).claim]
    assert len(pictures) == len(set(pictures))


def _train(case, **more):
    data = load("wine", key=jax.random.key(0))
    model = build(WINE, case, data, 0)
    training = training_of(WINE, case, [Phase("sgd", 0.1, 3)], **more)
    return model, train(model, data, training, key=jax.random.key(0))


def test_weight_decay_is_taken_off_beside_the_direction():
    """One step of SGD with decay equals one without, minus rate x decay x the weights."""
    data = load("wine", key=jax.random.key(0))
    ends = []
    for decay in (0.0, 0.5):
        case = Case("", (("sgd", 1),), weight_decay=decay, scale=0.1)
        model = build(WINE, case, data, 0)
        training = training_of(WINE, case, [Phase("sgd", 0.1, 1)])
        ends.append(np.asarray(train(model, data, training, key=jax.random.key(0)).weights))
    np.testing.assert_allclose(
        ends[1], ends[0] - 0.1 * 0.5 * np.asarray(model.weights[...]), atol=1e-12
    )  # the same sums


def test_a_batch_is_measured_after_its_own_step():
    case = Case("", (("sgd", 3),))
    _, record = _train(case, own_batch=True)
    assert np.all(record.own_batch_loss < record.batch_loss)  # a small rate lowers its own loss
    _, plain = _train(case)
    assert np.all(np.isnan(plain.own_batch_loss))
    np.testing.assert_array_equal(plain.batch_loss, record.batch_loss)


def test_observed_weights_are_those_that_are_evaluated():
    data = load("wine", key=jax.random.key(0))
    case = Case("", (("sgd", 2),))
    model = build(WINE, case, data, 0)
    seen = {}
    record = train(
        model, data, training_of(WINE, case, [Phase("sgd", 0.1, 8)]), key=jax.random.key(0),
        observe=lambda step, weights: seen.setdefault(step, weights),
    )  # fmt: skip
    assert list(seen) == record.steps.tolist()
    np.testing.assert_array_equal(seen[0], model.weights[...])
    np.testing.assert_array_equal(seen[8], record.weights)


def test_the_forecast_of_small_gauss_newton_steps_is_right():
    settings = dataclasses.replace(forecasts.PRESETS["smoke"], rates=(0.05,), steps=20, shares=())
    (pair,) = forecasts.run(settings)
    # first order in the rate: the curves are a few per cent of the first loss apart
    np.testing.assert_allclose(pair.forecast, pair.real, atol=0.05 * pair.real[0])
    np.testing.assert_allclose(pair.forecast[0], pair.real[0], rtol=1e-12)


@pytest.mark.slow
def test_similarities_begin_at_one():
    (path, *_) = representation.run(dataclasses.replace(representation.PRESETS["smoke"], epochs=1))
    np.testing.assert_allclose(path.cka[0], 1, atol=1e-9)
    np.testing.assert_allclose(path.cosine[0], 1, atol=1e-12)
    assert path.distance[0] == pytest.approx(0, abs=1e-12)
    assert path.distance[1] > 0


def test_every_case_of_a_figure_has_its_own_label():
    for name in FIGURES:
        for preset in load_script(name).presets.values():
            if isinstance(preset, variants.Settings):
                labels = [case.label for case in preset.cases]
                assert len(labels) == len(set(labels)) <= len(variants.COLORS)
