"""The figures of the training-time paper: all of them run small, and what they are made of."""

import types

import jax
import numpy as np
import pytest

from experiments.harness import run_script
from experiments.scripts import SCRIPTS
from experiments.training_time import comparison, costs, scatter
from experiments.training_time.comparison import Pair, Way
from jaxttp.forecast import training_time
from jaxttp.pipeline import Settings
from tests.experiments.smoke import check_smoke

NAMES = [name for name, path in SCRIPTS.items() if "experiments.training_time" in path]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_smoke(name, tmp_path):
    check_smoke(name, tmp_path)


def test_presets_of_the_paper_have_its_settings():
    paper = scatter.PRESETS["paper"]
    tasks = [task for task in paper.tasks if isinstance(task, Settings)]
    assert len(tasks) == len(paper.tasks) == 7
    assert {(task.classes, task.samples_per_class) for task in tasks} == {(5, 30)}
    assert {task.model for task in tasks} == {"resnet18"}
    assert (paper.low, paper.high, paper.steps) == ((0.0001, 0.001), (0.005,), 150)
    assert not paper.relative


FREE = ("ttp-datasets", "ours-next-token")
"""Those whose data are made, or are what is installed."""


@pytest.mark.parametrize("name", [n for n in NAMES if n not in FREE])
def test_paper_runs_need_data_and_say_so(name, tmp_path):
    """Data and weights of the paper are not in the repository: an error that says what to fetch."""
    with pytest.raises((ValueError, ImportError), match=r"datasets|fetched|Fetch|tfds"):
        run_script(name, "paper", results=tmp_path)


@pytest.mark.slow
def test_beside_another_device_stand_forecasts_on_the_cpu(monkeypatch):
    found = jax.devices()
    accelerator = types.SimpleNamespace(platform="gpu", device_kind="made up")
    monkeypatch.setattr(
        costs.jax, "devices", lambda kind=None: found if kind == "cpu" else [accelerator]
    )
    result = costs.run(costs.PRESETS["smoke"])
    (seconds,) = result.seconds.values()
    assert seconds.device == "made up"
    assert seconds.cpu is not None
    assert seconds.cpu.shape == (2, 2)
    assert np.all(seconds.cpu >= 0)
    (line,) = costs.measure(result)["ttp-5"]
    assert "on the CPU exact" in line
    (axes,) = costs.plot(result)["ttp-5"].axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sum("on the CPU" in label for label in labels) == 2


def _pair(forecast, real):
    curves = [np.stack([np.asarray(c), np.asarray(c) / 2]) for c in (forecast, real)]
    return Pair("task", 0, Way(1.0), 0.1, *curves)


def test_pair_reads_times_off_both_curves():
    t = np.arange(31)
    pair = _pair(np.exp(-0.2 * t), np.exp(-0.1 * t))
    predicted, real = pair.times((0.1, 0.4))
    expected = [
        [int(training_time(np.exp(-rate * t), e)) for e in (0.1, 0.4)] for rate in (0.2, 0.1)
    ]
    assert [predicted.tolist(), real.tolist()] == expected
    assert np.all(predicted < real)
    errors, _ = pair.times((0.1, 0.4), metric="error")  # the same curve halved
    assert errors.tolist() == predicted.tolist()
    assert pair.finite
    assert not _pair(np.full(31, np.nan), np.exp(-0.1 * t)).finite


def test_slope_is_of_the_line_through_the_origin():
    real = np.array([1.0, 2.0, 5.0])
    assert scatter._slope(1.1 * real, real) == pytest.approx(1.1)


def test_unit_is_the_largest_rate_of_the_mean_loss():
    """N / lambda_max: gradient descent on the squared error is stable below twice that."""
    job = comparison.load("wine, MLP", 0, 12)
    kernel = comparison.kernel_of(job)
    n, c = kernel.f0.shape
    matrix = np.asarray(kernel.theta, np.float64).reshape(n * c, n * c)
    assert kernel.unit == pytest.approx(n / np.linalg.norm(matrix, 2), rel=1e-5)
    assert len(job.x) == 12


def test_more_samples_than_there_are_is_refused():
    with pytest.raises(ValueError, match="samples=1000: wine, MLP has"):
        comparison.load("wine, MLP", 0, 1000)
