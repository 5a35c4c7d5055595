"""What a caller finds who asks for help: a page, a list of names, packages that load themselves."""

import pydoc
import re
import subprocess
import sys

import pytest

import jaxttp

LATER = ("data", "models", "plots")


def test_every_public_name_is_on_the_page():
    """And every name of the page is there."""
    page = jaxttp.__doc__
    assert page is not None
    assert 25 <= len(page.splitlines()) <= 50
    named = {word.removeprefix("jaxttp.").split(".")[0] for word in re.findall(r"`([\w.]+)`", page)}
    beside = {"x", "x_test", "load_table", "read"}  # arguments, a function of data, a method
    assert named - beside <= {*jaxttp.__all__, *LATER}
    told_elsewhere = {"Cost", "Model", "Online", "Prediction"}  # what functions return or take
    assert set(jaxttp.__all__) - named <= told_elsewhere


def test_all_names_are_there():
    assert set(jaxttp.__all__) <= set(dir(jaxttp))
    assert all(getattr(jaxttp, name) is not None for name in jaxttp.__all__)
    assert "predict_training_time" in pydoc.render_doc(jaxttp, renderer=pydoc.plaintext)
    with pytest.raises(AttributeError, match="module 'jaxttp' has no attribute 'plot'"):
        _ = jaxttp.plot


def test_packages_load_when_they_are_asked_for():
    """In a process of its own, as this one has loaded them all."""
    heavy = "('flax', 'matplotlib', 'sklearn', 'jaxttp.models', 'jaxttp.data', 'jaxttp.plots')"
    code = (
        "import sys, jaxttp\n"
        f"print([name for name in {heavy} if name in sys.modules])\n"
        "assert 'plots' in dir(jaxttp)\n"
        "found = jaxttp.training.StepTime(2.0, 1.0)\n"
        "repr(found), found._repr_html_()\n"
        "assert 'matplotlib' not in sys.modules\n"
        "found.plot()\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "print(jaxttp.models.MLP.__name__, jaxttp.data.load_table.__name__)\n"
        "print(jaxttp.plots.draw.__name__)\n"
        "from jaxttp import *\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "MLP load_table", "draw"]
