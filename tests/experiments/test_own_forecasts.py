"""What the figures of our own forecasts are made of, on hand-made runs."""

import dataclasses

import numpy as np
import pytest

from experiments.bench import early_stopping, pays, scaling
from experiments.bench.bands import Band, Runs
from experiments.training_time import adapting, calibration, closing, dynamics, paying, sweeping


def _runs() -> Runs:
    curves = np.array([[1.0, 0.5, 0.2], [1.0, 0.7, 0.4]])
    times = np.array([[2, 2, 1], [2, 1, 1]])
    wide = Band(np.array([[0.0] * 3, [1.0] * 3]), np.array([[0, 2]] * 3))
    narrow = Band(np.array([[1.0, 0.4, 0.1], [1.0, 0.6, 0.3]]), np.array([[2, 2], [2, 2], [0, 0]]))
    return Runs(curves, times, {("re-linearised", 0.9): wide, ("one kernel", 0.9): narrow})


def test_covered_are_times_and_losses_within_the_ends():
    runs = _runs()
    steps, losses = runs.covered("one kernel", 0.9)
    assert steps.tolist() == [1.0, 0.5, 0.0]
    assert losses == 0.5  # the first run at both steps, step 0 does not count
    steps, losses = runs.covered("re-linearised", 0.9)
    assert (steps.tolist(), losses) == ([1.0, 1.0, 1.0], 1.0)


def test_calibration_is_a_mean_over_tasks():
    settings = calibration.Settings(tasks=("a", "b"), levels=(0.9,))
    result = calibration.Result(settings, {"a": _runs(), "b": _runs()})
    lines = calibration.measure(result)["ours-bands"]
    assert lines[0].startswith("re-linearised, level 90 %: 100 % of times and 100 % of losses")
    assert lines[1].startswith("one kernel, level 90 %: 50 % of times and 50 % of losses")
    assert set(calibration.plot(result)) == {"ours-bands"}


def test_the_best_setting_has_the_fewest_steps_then_the_least_loss():
    steps = np.array([[5, 3], [3, -1]])
    assert sweeping._best(steps, np.array([[0.0, 0.2], [0.1, 0.0]])) == (1, 0)
    assert sweeping._best(np.full((1, 2), -1), np.zeros((1, 2))) is None
    grid = sweeping.Grid(
        "task", 0.3, np.array([0.1, 1.0]), steps, np.array([[5, 4], [10, 2]]),
        np.array([[0.0, 0.2], [0.1, 0.0]]), np.array([[0.3, 0.2], [0.1, 0.0]]),
        np.array([[2, 2], [1, 2]]), (1, 1), 0.5,
    )  # fmt: skip
    settings = sweeping.Settings(tasks=("task",), rates=2, momenta=(0.0, 0.9))
    (line,) = sweeping.measure(sweeping.Result(settings, [grid]))["ours-sweep"]
    assert "off by 2.7 on average, within 20 % or 2 steps in 67 %" in line
    assert "1 judged wrongly" in line
    assert "the kernel picks m = 0.9, rate 0.1, really 10 steps" in line
    assert "the race m = 0.9, rate 1, really 2 steps; the best is m = 0.9, rate 1, really" in line
    assert line.endswith("the race costs 0.5 trainings")


def test_online_errors_are_means_of_three_times():
    t = np.arange(101)
    real, late = (t < 10).astype(float), (t < 40).astype(float)  # every time is 10, or 40
    loop = closing.Loop("task", real, late, {("losses", 0.1): (t < 16).astype(float)}, 0)
    settings = closing.Settings(tasks=("task",), shares=(0.1,), kinds=("losses",))
    lines = closing.measure(closing.Result(settings, [loop]))["ours-online"]
    assert closing._off(loop.before, real) == 30
    assert lines[1] == "by losses after 10 % of the steps: 0.20 of 30.0"


def test_every_picture_of_dynamics_has_cases():
    for preset in dynamics.PRESETS.values():
        assert {case.picture for case in preset.cases} == set(dynamics.CLAIM)
    assert adapting.PRESETS["paper"].task is not None


def test_the_law_of_samples_in_a_table():
    # A quarter late, right to the step, never reached by the subset: two readings, one within 15 %.
    late = scaling.Reading("a", 2, 10.0, 5.0, 20.0, 12.5, 0.1)
    near = scaling.Reading("a", 2, 1.0, 1.0, 2.0, 2.0, 0.1)
    never = scaling.Reading("a", 2, 10.0, np.inf, np.inf, np.inf, 0.1)
    subset, _, law = scaling.summary([late, near, never]).splitlines()[2:]
    assert subset.startswith("| 2 | 2 | subset | 0.49 | 0.35 | 50% |")
    assert law == "| 2 | 2 | law | 0.16 | 0.11 | 50% | 50%, 50% |"


@pytest.mark.slow
def test_the_law_of_samples_by_real_trainings():
    settings = dataclasses.replace(scaling.PRESETS["smoke"], forecasts=False)
    (found,) = scaling.measure("clusters, random MLP", settings)
    assert found.ratio == 2
    assert 1 <= found.subset <= found.scaled


@pytest.mark.slow
def test_a_test_loss_that_rises_again_is_foreseen(capsys):
    (row,) = early_stopping.main(["--preset", "smoke"])
    assert row.verdict
    assert row.forecast.overfits
    assert row.off <= 0.2
    assert "within 20 % of the real step where it overfits: 1 of 1" in capsys.readouterr().out


def _guess(loss, share=0.1):
    return pays.Guess(np.asarray(loss), True, share, 1.0, 0.5, "")


def test_a_power_law_carries_a_tenth_of_the_training_on():
    t = np.arange(101)
    real = pays.Real(0.2 + 2.0 * (1 + t / 3.0) ** -0.7, 10.0, 1.0)
    found = pays.power_law(real, 100)
    assert (found.share, found.seconds) == (0.1, 1.0)
    np.testing.assert_array_equal(found.loss[:11], real.loss[:11])
    # the law itself is found again; the fit stops where the logarithms agree to 1e-4
    np.testing.assert_allclose(found.loss[11:], real.loss[11:], rtol=1e-3)


def test_what_pays_is_measured_apart_from_the_mlp():
    real = pays.Real(np.exp(-np.arange(101) / 20.0), 4.0, 1.0)
    late = np.exp(-np.arange(101) / 40.0)
    rows = [
        pays.Row("MLP", "gradient descent", 100, "default", _guess(late, 30.0), real),
        pays.Row("ResNet", "gradient descent", 100, "default", _guess(real.loss), real),
        pays.Row("ResNet", "gradient descent", 100, pays.TENTH, _guess(late), real),
    ]
    assert max(rows[1].readings) == rows[1].end == 0.0
    assert min(rows[2].readings) > pays.WITHIN
    assert rows[2].end == pytest.approx(late[-1] - real.loss[-1], rel=0.02)  # the drop is 0.993
    resnet, tenth, mlp = paying.measure(rows)["ours-pays"]
    assert "all but the MLP, default: 1 trainings, by count 0.1 of the training" in resnet
    assert (
        "6 of 6 times within 13 %, mean error 0 %; end within 10 % of the drop in 1 of 1" in resnet
    )
    assert "0 of 6 times" in tenth
    assert mlp.startswith("MLP, default: 1 trainings, by count 30 of the training")
    lines = pays.table(rows)
    assert lines[3] == (
        "| ResNet | gradient descent | 100 | default | 0.1 | 0.25, 0.3 | 6 of 6 | 0 % | 0 % |"
    )
    panels = [axes.get_title() for axes in paying.plot(rows)["ours-pays"].axes]
    assert panels == ["MLP", "ResNet"]


def test_forecasts_of_a_way_are_those_that_it_allows():
    settings = pays.PaysSettings(budgets=(0.1, 1 / 3))
    full = pays.forecasts(settings, pays.WAYS["gradient descent"])
    assert list(full) == [
        "default", "budget 1/10", "budget 1/3", "one kernel", "one class sketch", "equation (1)"
    ]  # fmt: skip
    assert list(pays.forecasts(settings, pays.WAYS["AdamW, batches of 32"])) == ["default"]
