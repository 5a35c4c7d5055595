"""`experiments.bench.accelerator`: its rows on small things, whatever the device."""

import json

import pytest

from experiments.bench import accelerator


def rows(capsys, *arguments):
    accelerator.main([*arguments, "--size", "small", "--rounds", "1"])
    head, *found = map(json.loads, capsys.readouterr().out.splitlines())
    assert head["device"].startswith(("cpu: ", "gpu: ", "tpu: "))
    return found


def test_rates_and_steps(capsys):
    found = rows(capsys, "rates", "steps")
    assert [row["part"] for row in found] == ["rates"] * 3 + ["steps"] * 3
    assert all(row["operations a second"] > 0 for row in found[:2])
    assert [row["step"] for row in found[3:]] == ["adam", "exact (cholesky)", "truncate (eigh)"]
    assert all(row["first"] > row["later"] > 0 for row in found[3:])


def test_a_kernel_is_held_against_float64(capsys):
    (row,) = rows(capsys, "kernels", "--only", "gpt2")
    assert (row["kernel"], row["N"]) == ("gpt2", 3)
    assert row["error"] < 1e-5
    assert row["operations"] > 0


@pytest.mark.slow
def test_forecasts_and_a_sweep(capsys):
    exact, sketched, swept = rows(capsys, "forecasts", "sweep", "--only", "vgg5-32")
    assert (exact["forecast"], sketched["forecast"]) == ("exact", "sketch")
    for row in (exact, sketched):
        assert row["times"] == pytest.approx(4 * row["step"] / row["later"])
    assert swept["settings"] == 8


def test_cases_by_name():
    few = accelerator.only(accelerator.SIZES["large"], ["mlp", "resnet18-224"])
    assert (few.kernels, few.networks, few.forecasts) == (("mlp",), (), (("resnet18", 224),))
