"""The benchmarks: their plans and tables by hand, their records, and small runs of a few."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments.bench import (
    accelerator,
    accuracy,
    accuracy_tables,
    adam,
    harness,
    kernel,
    lora,
    lora_tasks,
    planning,
    races,
    scaling,
    warnings,
)
from experiments.bench.accuracy_tasks import REPORTED, TUNING, make
from experiments.bench.warning_tasks import FINE_TUNED, FITTING, HELD_OUT


def cells(text, *start):
    """The cells after these ones in the line that begins with them."""
    begin = f"| {' | '.join(start)} |"
    line = next(line for line in text.splitlines() if line.startswith(begin))
    return [cell.strip() for cell in line[len(begin) :].strip("|").split("|")]


# --- records and clocks -----------------------------------------------------------------------


def test_rows_are_kept_stamped_and_not_measured_again(tmp_path, capsys):
    store = tmp_path / "rows.jsonl"
    made = []

    def measure(name):
        made.append(name)
        return {"name": name}

    jobs = [(name, lambda name=name: measure(name)) for name in "ab"]
    assert len(harness.go_on(store, jobs, minutes=0.0)) == 0
    assert "call again" in capsys.readouterr().out
    harness.go_on(store, jobs[:1])
    rows = harness.go_on(store, jobs)
    assert made == ["a", "b"]
    assert rows == harness.load(store)
    assert set(rows[0]["measured"]) == {"date", "machine", "device", "python", "versions"}


# --- accuracy ---------------------------------------------------------------------------------


def row(**changes):
    """A run of 10 steps whose plain forecast is 0, 3 and -1 steps off."""
    cost = {"kernels": 1, "seconds": 0.5, "compile_seconds": 1.5}
    cost |= {"operations": 3.0, "training_operations": 4.0}
    plain = {"steps": [8, 9, 1], "loss": [1.0, 0.8, 0.0], "stable": True, "cost": cost}
    plain["warnings"] = "may be off"
    real = {"steps": [8, 6, 2], "loss": [1.0, 0.5, 0.0], "seconds": 2.0, "compile_seconds": 1.0}
    base = {
        "name": "a", "task": "wine, MLP", "rate": 1.0, "horizon": 10, "momentum": 0.0,
        "batch_size": None, "real": real, "forecasts": {"one kernel": plain},
    }  # fmt: skip
    return base | changes


def test_errors_are_signed_and_divergence_counts_as_the_horizon():
    off, real = accuracy_tables.errors([row()], "one kernel")
    np.testing.assert_array_equal(off, [[0, 3, -1]])
    np.testing.assert_array_equal(real, [[8, 6, 2]])
    gone = row()
    gone["forecasts"]["one kernel"]["stable"] = False
    np.testing.assert_array_equal(accuracy_tables.errors([gone], "one kernel")[0], [[2, 4, 8]])
    assert accuracy_tables.curve_error(row(), "one kernel") == pytest.approx(0.1)


def test_tables_of_accuracy_by_hand():
    rows = [row(), row(batch_size=16)]
    assert cells(accuracy_tables.accuracy_table(rows), "GD", "one kernel") == [
        "1", "0.0 / 3.0 / 1.0 (1.3)", "67 %", "67 %", "67 %", "67 %", "67 %",
        f"{np.corrcoef([8, 9, 1], [8, 6, 2])[0, 1]:.3f}", "33 / 0 %", "10.0 %",
    ]  # fmt: skip
    other = row(task="b", name="b")
    other["real"] = other["real"] | {"steps": [4, 4, 4], "loss": [1.0, 0.2, 0.05]}
    plain = other["forecasts"]["one kernel"] | {"loss": [1.0, 0.8, 0.1]}
    other["forecasts"] = {"one kernel": plain}
    table = accuracy_tables.target_table([row(), other])
    # 0.5 and 0.25 of the start are reached at 2 and 1, 0.1 at 2; forecasts say 2, and 2, 2 and
    # never, which is 10
    assert cells(table, "one kernel") == ["2.7", "1.7 (6)", "83 %", "1.50", "2.0"]
    assert cells(table, "the median time of other tasks") == ["2.7", "0.7 (6)", "100 %", "", ""]


def test_what_is_reported_tuned_nothing():
    runs = accuracy.plan(accuracy.PRESETS["cpu"])
    assert len({run.name for run in runs}) == len(runs) == 24
    assert {run.task for run in runs} == set(REPORTED)
    assert {run.batch_size for run in runs} == {None, 16, 32, 64}
    parts = [set(part) for part in (REPORTED, TUNING, FITTING, HELD_OUT, FINE_TUNED)]
    assert len(set().union(*parts)) == sum(map(len, parts))
    tuned, reported = ({t.name for t in part} for part in (lora_tasks.TUNING, lora_tasks.REPORTED))
    assert not tuned & reported


@pytest.mark.slow
def test_a_small_run_of_the_accuracy(tmp_path):
    first, other = make("wine, MLP", 0, 1.0), make("wine, MLP", 1, 0.5)
    assert first.model.apply_fn is other.model.apply_fn  # compiled once
    assert not np.array_equal(first.x, other.x)
    small = dataclasses.replace(accuracy.PRESETS["smoke"], runs=1, projections=10)
    rows = accuracy.run_all(small, tmp_path / "rows.jsonl", 10.0)
    for found in rows:
        assert set(found["forecasts"]) == {"one kernel", "1 rebuilt", "Algorithm 1"}
        assert all(len(one["loss"]) == 21 for one in found["forecasts"].values())
    assert "1 runs of 1 tasks" in accuracy_tables.report(json.loads(json.dumps(rows)))


# --- other tables -----------------------------------------------------------------------------


def test_warnings_are_counted_among_wrong_and_right_forecasts():
    real = np.exp(-np.arange(101) / 20.0).tolist()
    late = np.exp(-np.arange(101) / 60.0).tolist()
    assert warnings.off(real, real) == 0.0
    assert warnings.off(late, real) > 0.13
    task = next(iter(FITTING))
    rows = [
        {"task": task, "real": real, "forecasts": {"0": {"loss": loss, "warnings": warning}}}
        for loss, warning in ((real, None), (late, "may be off"), (late, None), (None, None))
    ]
    assert cells(warnings.report(rows), "0", "fitting") == ["3", "2", "50 %", "1", "0 %"]


def test_errors_of_times_are_fractions_of_the_real_ones():
    real = np.exp(-np.arange(101) / 20.0)
    assert max(planning.reading_errors(real, True, real)) == 0.0
    assert set(planning.reading_errors(real, False, real)) == {1.0}
    late = np.exp(-np.arange(101) / 25.0)  # a quarter late, to any loss
    assert planning.reading_errors(late, True, real)[-1] == pytest.approx(0.25, abs=0.02)


def test_a_power_law_carries_the_first_part_of_a_training_on():
    t = np.arange(101)
    real = 0.2 + 2.0 * (1 + t / 3.0) ** -0.7
    # the law itself is found again; the fit stops where the logarithms agree to 1e-4
    np.testing.assert_allclose(adam.power_law(real), real, rtol=1e-3)
    loss = 1.5 + 2.0 * (t + 3.0) ** -0.5
    np.testing.assert_allclose(lora.power_law(loss, 0.2), loss, atol=1e-3)


def test_the_law_of_samples_in_a_table():
    # A quarter late, right to the step, never reached by the subset: two readings, one within 15 %.
    readings = [(2, 10, 5, 12.5, 0.1), (2, 1, 1, 2, 0.1), (2, 10, np.inf, np.inf, 0.1)]
    table = scaling.table([{"readings": readings}])
    assert cells(table, "2", "2", "subset")[:3] == ["0.49", "0.35", "50%"]
    assert cells(table, "2", "2", "law") == ["0.16", "0.11", "50%", "50%, 50%"]


def test_choices_are_held_against_the_best_of_the_grid():
    one = {"grid": "AdamW", "fraction": 0.1, "best": 10.0, "settings": 4}
    rows = [{"readings": [one | {"race": race, "race cost": 2.0}]} for race in (11.0, 20.0)]
    table = races.table(rows)
    assert cells(table, "AdamW", "race", "0.1") == [
        "2", "50%", "50%", "55 %", "2", "4"
    ]  # fmt: skip


def test_operations_are_those_of_products_as_often_as_they_run():
    def run(a, b):
        turned = jax.lax.scan(lambda h, _: (h @ b, None), a, None, length=5)[0]
        return jax.jit(lambda h: h @ b)(turned)

    jaxpr = jax.make_jaxpr(run)(np.ones((2, 3)), np.ones((3, 3))).jaxpr
    assert kernel.operations(jaxpr) == 6 * 2 * 2 * 3 * 3


@pytest.mark.parametrize("groups", [1, 2])
def test_operations_of_a_convolution(groups):
    """Each output sums over the window and the channels of its group."""

    def run(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    jaxpr = jax.make_jaxpr(run)(np.ones((2, 5, 5, 4)), np.ones((3, 3, 4 // groups, 6))).jaxpr
    assert kernel.operations(jaxpr) == 2 * (2 * 5 * 5 * 6) * (3 * 3 * 4 // groups)


# --- on the current device --------------------------------------------------------------------


@pytest.mark.slow
def test_the_accelerator_s_rows(tmp_path, capsys):
    def rows(*arguments):
        store = str(tmp_path / "rows.jsonl")
        accelerator.main([*arguments, "--size", "small", "--rounds", "1", "--store", store])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]

    found = rows("rates", "steps")
    assert [one["part"] for one in found] == ["rates"] * 3 + ["steps"] * 3
    (found,) = rows("kernels", "--only", "gpt2")
    assert (found["kernel"], found["N"]) == ("gpt2", 3)
    assert found["error"] < 1e-5
    few = accelerator.only(accelerator.SIZES["large"], ["mlp", "resnet18-224"])
    assert (few.kernels, few.forecasts) == (("mlp",), (("resnet18", 224),))
