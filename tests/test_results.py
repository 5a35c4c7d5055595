"""Every public result prints itself, shows itself in a notebook, and draws itself."""

import dataclasses

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

import jaxttp
from jaxttp import (
    conditioning,
    data,
    dynamics,
    forecast,
    gauss_newton,
    losses,
    ntk,
    pipeline,
    representation,
    training,
)
from jaxttp._core.results import html_table
from jaxttp.plots import draw
from tests import results

PUBLIC = (
    jaxttp, conditioning, data, dynamics, forecast, gauss_newton, losses, ntk, pipeline,
    representation, training,
)  # fmt: skip
INPUTS = {
    "Model", "Candidate", "Device", "Hyperparameters", "GaussNewtonState", "LinearGaussNewton",
    "NTKOperator", "Settings", "ConditionSettings", "StepSettings", "Task",
    "Dataset", "Loss", "Weighted", "Preprocessing", "Split", "Problem",
    "Descent", "Rule",
    "Target", "Arrival", "Choices", "LoraSettings", "Corpus",
    "Estimate", "Exact", "Factored", "Sketched", "ClassSketched", "Recursion",
    "GradientFlow", "ClosedForm", "WeightSpace", "Scaled", "Relinearized", "Preconditioned",
    "Noisy",
    "Linearizer",
    "HeavyBall", "CompiledStep", "Traced",
}  # fmt: skip
"""Public classes that go in, or hold data; the rest comes out."""
SLOW = {  # those that train or fill a pipeline
    "Forecast", "TaskSweep", "TaskSteps", "TaskReport", "TaskSpectrum",
    "Conditioning", "Prediction", "Cost", "OnlineForecast",
    "Diffusion", "FineTuning",
}  # fmt: skip
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in results.MAKERS
]


def public_results():
    found = set()
    for module in PUBLIC:
        for name in vars(module):
            one = getattr(module, name)
            if isinstance(one, type) and not name.startswith("_") and name not in INPUTS:
                fields = dataclasses.is_dataclass(one) or hasattr(one, "_fields")
                if fields and one.__module__.startswith("jaxttp"):
                    found.add(one)
    return found


def test_every_public_result_can_do_the_three():
    classes = public_results()
    assert len(classes) > 35
    for one in classes:
        assert callable(one.plot), one
        assert callable(one._repr_html_), one
        assert one.__repr__ is not object.__repr__, one


def test_every_public_result_is_tried_below():
    tried = {name.split("_")[-1] for name in results.MAKERS}
    assert {one.__name__ for one in public_results()} - tried == set()


@pytest.mark.parametrize("name", NAMES)
def test_prints_and_draws(name):
    result = results.MAKERS[name]()
    text = repr(result)
    assert text == str(result)
    assert max(map(len, text.splitlines())) <= 125
    assert " object at 0x" not in text
    html = result._repr_html_()
    assert html.startswith(("<table>", "<pre>"))
    figure = result.plot()
    assert isinstance(figure, Figure)
    drawn = [axes for axes in figure.axes if axes.axison]
    assert drawn
    for axes in drawn:
        assert axes.get_xlabel() or axes.get_ylabel(), name  # a colour bar has only one
        assert len(axes.get_children()) > 10
    figure.draw_without_rendering()
    assert figure.get_facecolor() == to_rgba("white")


def test_traced_results_are_still_printed():
    seen = []

    @jax.jit
    def inside(matrix):
        found = conditioning.condition_number(matrix)
        seen.extend([repr(found), repr(ntk.eigendecomposition(matrix))])
        return found.value

    inside(jnp.diag(jnp.array([1.0, 2.0])))
    assert all("traced float64[]" in text for text in seen)


def test_names_are_escaped():
    assert "<b>" not in html_table(["<b>"], [["<b>", None]])
    assert "<td>–</td>" in html_table(["<b>"], [["<b>", None]])


def test_a_result_with_rows_becomes_their_table():
    found = results.Sweep()
    html = found._repr_html_()
    assert html.count("<tr>") == 1 + len(found.settings)
    assert f"<td>{found.rows()[0]['final_loss']:.4g}</td>" in html


# --- figures --------------------------------------------------------------------------------------


def test_what_holds_no_numbers_is_refused():
    with pytest.raises(TypeError, match="Split holds no numbers"):
        draw(data.Split(None, None))
    with pytest.raises(TypeError, match="str is no result"):
        draw("forecast")


def test_numbers_are_drawn_as_they_are():
    axes = training.StepTime(2.0, 5.0).plot().axes[0]
    assert [bar.get_width() for bar in axes.patches] == [2.0, 5.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["seconds", "compile seconds"]


def test_the_style_is_left_behind():
    before = dict(mpl.rcParams)
    results.StepTime().plot()
    assert dict(mpl.rcParams) == before


def test_singular_values_are_those_of_the_factors():
    path = results.TwoFactorTrajectory()
    left, _ = path.plot().axes
    largest = next(line for line in left.lines if line.get_label() == "σ1")
    np.testing.assert_allclose(largest.get_ydata(), np.linalg.norm(path.f, 2, axis=(1, 2)))


def test_figures_follow_the_users_style():
    with mpl.rc_context({"figure.facecolor": "black"}):
        assert results.StepTime().plot().get_facecolor() == to_rgba("black")
