"""How cost grows: points are measured, exponents are slopes."""

import json
import subprocess
import sys

import pytest

from experiments.bench import growth
from experiments.bench.growth import PRESETS, WORKS, Size, places


@pytest.mark.parametrize("name", WORKS)
def test_a_point(name):
    tiny = Size(samples=4, outputs=2, width=6, depth=1)
    found = growth.one(name, tiny)
    assert found["first"] > 0
    assert found["seconds"] > 0
    assert found["operations"] > 0
    assert found["counted_bytes"] > 0
    assert found["bytes"] >= 0  # the peak of a process with a history may not rise


def test_a_point_in_a_process_of_its_own_and_one_that_is_over():
    asked = ["--one", "primal dynamics, 50 steps", "--size", json.dumps({"samples": 4})]
    command = [sys.executable, "-m", "experiments.bench.growth", *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["operations"] == 4 * 50 * 4 * 8 * 1024
    late = growth.measure("exact kernel", "samples", Size(), 0.01)
    assert late["left"] == "over 0.01 s"
    wrong = growth.measure("exact kernel", "samples", Size(samples=-1), 60.0)
    assert "seconds" not in wrong
    assert wrong["left"]


def test_points_cover_their_axis():
    for work in WORKS.values():
        for axis, (low, high) in work.axes.items():
            found = [getattr(size, axis) for size in places(work, axis, PRESETS["cpu"])]
            assert (found[0], found[-1]) == (low, high)
            assert found == sorted(set(found))


def test_exponents_are_those_of_the_last_decade():
    """A cubic with a constant that hides it below ten."""
    rows = [
        {
            "work": "exact kernel", "axis": "samples", "at": at, "seconds": 1000 + at**3,
            "bytes": at**2, "operations": at**3, "counted_bytes": 7 * at,
        }
        for at in (1, 10, 100, 1000)
    ]  # fmt: skip
    assert growth.exponent(rows, "seconds") == pytest.approx(3, abs=1e-3)
    heads, _, row = growth.table([*rows, rows[0] | {"at": 5, "left": "over 60 s"}])
    assert heads.count("|") == row.count("|")
    assert "| exact kernel | samples | 1 - 1,000 | 1e+03 - 1e+09 | 3.00 | 3.00 |" in row
    assert row.endswith("| 2.00 | 1.00 |")
