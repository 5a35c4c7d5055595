"""Figures of condition numbers show the numbers of their results."""

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxttp import conditioning
from jaxttp.plots.conditioning import plot_rank_sensitivity, plot_spectrum
from tests import results

KEY = jax.random.key(0)


def curves(axes):
    return [line for line in axes.get_lines() if len(line.get_xdata()) > 2]


@pytest.mark.slow
def test_spectrum_and_ranks():
    found = results.Conditioning()
    left, right = found.plot().axes
    (line,) = curves(left)
    np.testing.assert_array_equal(line.get_ydata(), found.condition.eigenvalues)
    (line,) = curves(right)
    np.testing.assert_array_equal(line.get_ydata(), found.sensitivity.values)
    words = [text.get_text() for text in right.get_legend().get_texts()]
    assert words[0] == f"κ = {float(found.condition.value):.3g}"
    assert any("convex" in text for text in words)
    assert (left.get_yscale(), right.get_yscale()) == ("log", "log")


def test_zeros_are_left_out_of_logarithmic_axes():
    found = conditioning.condition_number(np.diag([4.0, 2.0, 0.0, 0.0]))
    left, right = Figure().subplots(1, 2)
    plot_spectrum(left, found)
    assert np.isnan(curves(left)[0].get_ydata()[2:]).all()
    plot_rank_sensitivity(right, conditioning.rank_sensitivity(found))
    star = [line for line in right.get_lines() if len(line.get_xdata()) == 1]
    assert star[0].get_xydata().tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("parameter", ["depth", "width", "alpha"])
def test_sweeps(parameter):
    data = {"data": np.random.default_rng(0).standard_normal((5, 4))}
    options = data if parameter == "alpha" else {"inputs": 5}
    values = {"depth": (1, 2), "width": (2, 9), "alpha": (0.0, 0.5)}[parameter]
    found = conditioning.sweep(parameter, values, outputs=3, width=9, seeds=3, key=KEY, **options)
    (axes,) = found.plot(title="here").axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    middle = np.median(found.condition, axis=1)
    np.testing.assert_allclose(lines["condition number"].get_ydata(), middle)
    assert axes.get_yscale() == "log"
    assert ("maximum bound" in str(lines)) == (parameter != "alpha")
