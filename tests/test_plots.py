"""Figures show the data of the result, with axes that say what they are."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from IPython.core import formatters
from matplotlib.figure import Figure

from jaxttp import predict_training_time, weighted
from jaxttp.forecast import Target
from jaxttp.losses import Loss, unexplained_variance
from jaxttp.plots import draw, save
from tests import tiny


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines() if len(line.get_xdata()) > 2}


def marks(axes):
    """Positions of the single points."""
    points = [line.get_xydata() for line in axes.get_lines() if len(line.get_xdata()) == 1]
    return sorted(tuple(point[0]) for point in points)


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_lines_are_the_data_of_the_result():
    result = tiny.verified()
    left, right = draw(result).axes
    for axes, predicted, real, factor in (
        (left, result.prediction.loss, result.run.loss, 1),
        (right, result.prediction.error, result.run.error, 100),
    ):
        drawn = lines(axes)
        assert set(drawn) == {"forecast", "real training"}
        for label, curve in (("forecast", predicted), ("real training", real)):
            np.testing.assert_array_equal(drawn[label].get_xdata(), np.arange(16))
            # Percent of a float32: rtol 1e-6 is its rounding.
            np.testing.assert_allclose(drawn[label].get_ydata(), factor * curve, rtol=1e-6)
        assert drawn["forecast"].get_color() != drawn["real training"].get_color()
        assert drawn["forecast"].get_linestyle() != drawn["real training"].get_linestyle()
        assert {"forecast", "real training"} <= set(legend(axes))
        low, high = axes.get_xlim()
        assert low <= 0 < 15 <= high


def test_training_times_are_marked_on_the_curves():
    result = tiny.verified()
    left, _ = draw(result).axes
    expected = [(t, result.prediction.loss[t]) for t in result.prediction.steps.values()]
    really = result.run.read(tuple(result.prediction.steps))
    expected += [(t, result.run.loss[t]) for t in really.values()]
    np.testing.assert_array_equal(marks(left), sorted(expected))
    for e in result.prediction.steps:
        predicted, real = result.prediction.steps[e], really[e]
        text = f"{100 * e:g} % of the loss decrease left: step {predicted}, real {real}"
        assert text in legend(left)


def test_targets_are_lines_and_stars():
    result = tiny.verified()
    targets = (Target(0.3), Target(1e-9), Target(0.1, "error"))
    found = result.prediction.reach(targets)
    prediction = dataclasses.replace(result.prediction, targets=found)
    left, right = draw(dataclasses.replace(result, prediction=prediction)).axes
    real = result.run.reach(targets)
    assert found[targets[0]] >= 0
    assert real[targets[0]] >= 0
    for axes, target, predicted, really, scale in (
        (left, targets[0], prediction.loss, result.run.loss, 1),
        (right, targets[2], prediction.error, result.run.error, 100),
    ):
        # Percent of a float32: 1e-6 is its rounding, here and below.
        heights = [line.get_ydata()[0] for line in axes.get_lines() if line.get_linestyle() == ":"]
        assert scale * target.value in [pytest.approx(height) for height in heights]
        stars = [line.get_xydata()[0] for line in axes.get_lines()
                 if line.get_marker() == "*" and len(line.get_xdata())]  # fmt: skip
        want = [(s[target], scale * c[s[target]]) for s, c in ((found, predicted), (real, really))]
        np.testing.assert_allclose(sorted(map(tuple, stars)), sorted(want), rtol=1e-6)
        words = f"step {found[target]}, real {real[target]}"
        name = "loss below 0.3" if axes is left else "error below 10 %"
        assert f"{name}: {words}" in legend(axes)
    assert "loss below 1e-09: not reached, real not reached" in legend(left)


def test_a_real_run_that_diverged_is_drawn_as_far_as_it_goes(tmp_path):
    figure = draw(tiny.real_run_diverged())
    left, _ = figure.axes
    assert len(marks(left)) == 3  # those of the forecast alone
    assert sum(text.endswith("real diverges") for text in legend(left)) == 3
    save(figure, tmp_path / "diverged.pdf")
    assert (tmp_path / "diverged.pdf").read_bytes().startswith(b"%PDF")


def test_a_notebook_shows_a_figure_before_pyplot_drew_any():
    """IPython's formatter as it is before the inline backend teaches it matplotlib's figures."""
    shown = formatters.PNGFormatter()(tiny.verified().plot())
    assert shown.startswith(b"\x89PNG")
    assert formatters.PNGFormatter()(Figure()) is None


def test_the_error_is_called_what_it_is():
    """Labels count errors whatever the loss; a loss of one's own may not."""
    x = jnp.eye(4)
    own = Loss("mine", lambda f, y: 0.5 * jnp.sum((f - y) ** 2), unexplained_variance)
    many = "misclassified training samples (%)"
    weights = weighted([0, 1, 0, 1], sample_weight=[1.0, 2.0, 1.0, 1.0])
    for loss, y, words in (
        ("squared_error", [0, 1, 0, 1], many), ("cross_entropy", weights, many),
        (own, x[:, :2], "unexplained variance"),
    ):  # fmt: skip
        found = predict_training_time(
            lambda w, x: x @ w, jnp.zeros((4, 2)), x, y, loss=loss, learning_rate=0.1, steps=3,
            relinearize=0,
        )  # fmt: skip
        assert found.plot().axes[1].get_ylabel() == words
