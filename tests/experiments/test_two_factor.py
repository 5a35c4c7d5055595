"""The scripts on two-factor dynamics run and show what the theorems say; small sizes."""

import math

import numpy as np
import pytest
from flax import nnx

from experiments.two_factor import language_model, text, theorems, transformer


@pytest.fixture(scope="module")
def result():
    return theorems.run(theorems.PRESETS["smoke"])


@pytest.mark.slow
def test_theorems_hold(result):
    worst = result.worst()
    assert worst["drift of the invariant, flow"] < 1e-8
    # First order in eta; the rates are large enough for the second order to show.
    assert abs(worst["slope of the drift in eta, descent"] - 1) < 0.1
    assert worst["Theorem B.2: |S_1 - S_2|"] < 1e-8
    assert worst["Theorem B.2: 1 - alignment"] < 1e-8
    for name in ("Lemma B.1", "Theorem B.3", "Lemma B.1 off balance"):
        assert worst[f"{name}, relative"] < 1e-6  # differences at a step of 1e-3 of the time
    assert worst["Theorem B.3 off balance, relative"] > 1e-3  # its premise is needed
    assert worst["||A||_2 / sqrt(N_max), largest"] <= 1 + 1e-9
    for g, norm, root, largest in result.bounds.values():
        assert g <= norm * (1 + 1e-12)
        assert root == math.sqrt(largest)


@pytest.mark.slow
def test_imbalance_makes_the_rank_dip(result):
    """Balanced classes keep the rank; a power law collapses it and it comes back."""
    even, skewed = (result.rank[exponent] for exponent in (0.0, 1.0))
    assert skewed.min() < even.min()
    assert skewed.min() < 0.9 * skewed[0]
    assert skewed[-1] > skewed.min()
    assert all(np.all(np.diff(loss) < 0) for loss in result.loss.values())
    assert set(theorems.plot(result)) == set(theorems.measure(result)) == set(theorems.CLAIM)


# --- the language model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_result():
    return language_model.run(language_model.PRESETS["smoke"])


@pytest.mark.slow
def test_language_model_is_measured_along_training(model_result):
    network, flows = model_result.network, model_result.flows
    assert network.clock[0] == 0
    assert network.clock[-1] == model_result.settings.steps
    assert network.loss[-1] < network.loss[0]
    assert set(flows) == {"its start", "small balanced start"}
    start = flows["its start"]
    np.testing.assert_allclose(start.loss[0], network.loss[0], rtol=1e-5)  # float32 network
    np.testing.assert_allclose(start.rankme[0], network.rankme[0], rtol=1e-10)
    for curves in (network, *flows.values()):
        assert np.all((curves.rankme >= 1) & (curves.rankme <= model_result.settings.width))
        assert len(curves.loss) == len(curves.clock) == len(curves.singular_f)
    for flow in flows.values():
        assert np.all(np.diff(flow.loss) < 0)
    assert model_result.cka[0] == pytest.approx(1.0)
    assert model_result.weight_cosine[0] == pytest.approx(1.0)
    pictures, measured = language_model.plot(model_result), language_model.measure(model_result)
    assert set(pictures) == set(measured) == set(language_model.CLAIM)


def test_phases_are_read_off_and_absence_is_said():
    clock = np.arange(6.0)
    found = language_model.phases(clock, np.array([8.0, 7.9, 3.0, 5.0, 9.0, 6.0]))
    assert found == {
        "collapse": "8.0 to 3.0 over 0-2",
        "expansion": "3.0 to 9.0 over 2-4",
        "compression": "9.0 to 6.0 over 4-5",
    }
    flat = language_model.phases(clock, np.array([5.0, 5.1, 5.0, 5.1, 5.0, 5.0]))
    assert all(text.startswith("absent") for text in flat.values())


@pytest.mark.parametrize("name", text.TEXTS)
def test_texts(name):
    corpus = text.load_text(name)
    everything = np.concatenate([corpus.train, corpus.held_out])
    assert everything.min() == 0
    assert everything.max() == corpus.vocabulary - 1
    assert len(corpus.held_out) == pytest.approx(0.1 * len(everything), abs=1)
    x, y = text.windows(corpus.train, 8, np.array([0, 5]))
    assert x.shape == y.shape == (2, 8)
    np.testing.assert_array_equal(x[1, 1:], y[1, :-1])
    with pytest.raises(ValueError, match="text='bible'"):
        text.load_text("bible")


@pytest.mark.slow
def test_a_position_sees_only_what_is_before_it():
    model = transformer.Transformer(9, context=6, width=8, depth=2, heads=2, rngs=nnx.Rngs(0))
    x = np.array([[1, 2, 3, 4, 5, 6]])
    y = np.array([[1, 2, 3, 8, 0, 7]])
    first, second = (model.states(tokens)["head"] for tokens in (x, y))
    np.testing.assert_allclose(first[:, :3], second[:, :3], atol=1e-6)
    assert float(np.abs(first[:, 3:] - second[:, 3:]).max()) > 1e-2
    assert list(model.activations(x)) == ["blocks.0", "blocks.1", "features", "head"]
    np.testing.assert_array_equal(model(x), first[:, -1])
