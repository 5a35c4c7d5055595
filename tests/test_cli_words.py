"""What commands say where something is out of the ordinary: words that most runs never print."""

import importlib
import io
import types

import numpy as np
import pytest
from rich.console import Console

from jaxttp.cli import _vocabulary
from tests import results

# The package shows the commands, functions of the same names.
gauss_newton, predict = (
    importlib.import_module(f"jaxttp.cli.{name}") for name in ("gauss_newton", "predict")
)


class Altered:
    """A result with other values of some attributes."""

    def __init__(self, result, **others):
        self._result = result
        self.__dict__.update(others)

    def __getattr__(self, name):
        return getattr(self._result, name)


def printed(function, result):
    text = io.StringIO()
    function(Console(file=text, width=300), result)
    return text.getvalue()


TASK = types.SimpleNamespace(description="a task", note=None, columns=None)
STEPS = types.SimpleNamespace(
    description="exact steps", times=lambda: {0.1: (3, -1)}, targets=(), ranks=np.array([2, 3]),
    loss=np.array([1.0, 0.5]), error=np.array([0.5, 0.1]), samples=4, residual=1e-9,
    forecast=types.SimpleNamespace(loss=np.array([1.0, 0.4])),
    settings=types.SimpleNamespace(rtol=0.1, learning_rate=0.25),
    too_fine=(0.01, 0.03), diverged=(1.0, 0.5), shortfall="4 samples, 3 features",
)  # fmt: skip


def test_what_was_tried_before_exact_steps_is_said():
    """A coarser tolerance and a smaller rate than were asked for, and steps that are not exact."""
    text = printed(gauss_newton._print, STEPS)
    assert "rtol 0.1, as every rate diverged with 0.01 and 0.03" in text
    assert "learning rate 0.25, as 1, 0.5 diverged" in text
    assert "not exact: 4 samples, 3 features" in text
    assert "not reached" in text
    plain = types.SimpleNamespace(
        **vars(STEPS) | {"too_fine": (), "diverged": (), "shortfall": None}
    )
    assert "diverged" not in printed(gauss_newton._print, plain)
    assert "not exact" not in printed(gauss_newton._print, plain)


def test_doubts_of_a_forecast_are_said():
    doubted = Altered(
        results.Prediction(), returns=("above 0.3 again from step 9",), out_of_reach="0.1 is below",
        trust="the loss rises", plan="exact kernels", message="stable for Adam",
    )  # fmt: skip
    result = types.SimpleNamespace(
        prediction=doubted, run=None, task=TASK, seconds={}, targets=(), real_steps=None,
        real_seconds=None, step_time=types.SimpleNamespace(seconds=0.1),
        settings=types.SimpleNamespace(optimizer="adam", total_samples=5000),
    )  # fmt: skip
    text = printed(predict._print, result)
    for words in (
        "for 5,000 samples, read off these and their halves", "above 0.3 again from step 9",
        "0.1 is below", "trust: the loss rises", "plan: exact kernels", "stable for Adam",
    ):  # fmt: skip
        assert words in text
    assert "largest stable learning rate" not in text


@pytest.mark.parametrize(
    ("parse", "good", "bad", "words"),
    [
        (_vocabulary.parse_widths, {None: None, "64,32": (64, 32)}, "64,1.5", "hidden='64,1.5'"),
        (_vocabulary.parse_classes, {None: None, "5": 5, "0,3": (0, 3)}, "0.5", "classes='0.5'"),
        (_vocabulary.parse_samples, {"all": None, "30": 30}, "few", "samples_per_class='few'"),
        (_vocabulary.parse_mesh, {None: None, "all": "all", "4": 4}, "many", "mesh='many'"),
    ],
)
def test_options_are_numbers_or_refused_by_name(parse, good, bad, words):
    assert {text: parse(text) for text in good} == good
    with pytest.raises(ValueError, match=words):
        parse(bad)
    assert _vocabulary.parse_kernels("3") == 3
    assert _vocabulary.parse_kernels("auto") == "auto"


def test_names_for_the_shell_to_complete():
    assert {"wine", "digits"} <= set(_vocabulary._data_names())
    assert {"resnet18", "vgg5"} <= set(_vocabulary.model_choices())
