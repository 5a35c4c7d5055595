"""The notebooks are readable as they lie there, and running them gives what they say."""

import nbformat
import pytest

from experiments.notebooks import (
    NOTEBOOKS,
    differences,
    executed,
    is_picture,
    text_differences,
    unsupported,
)

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
KILOBYTES = 100  # a host shows them at once, and the repository does not grow by every new picture

each = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@each
def test_it_can_be_read_without_running_it(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    outputs = outputs_of(notebook)
    assert any(map(is_picture, outputs))
    assert any(output.output_type == "stream" for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert path.stat().st_size < 1000 * KILOBYTES
    words = path.read_text()
    assert "/home/" not in words
    assert "/tmp/" not in words


@each
def test_every_number_in_bold_is_one_that_was_printed(path):
    assert not unsupported(nbformat.read(path, as_version=4))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_processes")
@each
def test_fresh_and_stored_outputs_agree(path, tmp_path):
    stored = nbformat.read(path, as_version=4)
    assert differences(stored, executed(stored, tmp_path)) == []


# What the comparison sees, and what it leaves out.


@pytest.mark.parametrize(
    ("stored", "fresh"),
    [
        ("loss below 0.5 at step 26", "loss below 0.5 at step 28"),  # a step or two
        ("loss 0.1015 ± 0.21", "loss 0.1021 ± 0.22"),  # 2 %, or 1 in the last digit
        ("residual 2e-13", "residual -7e-16"),  # rounding
        ("18.1 ms a step, 2.47 s", "0.2 s a step, 66.78 s"),  # another machine
        ("310 kB, costs 0.00, $ 3", "2.1 MB, costs 0.13, $ 4.5"),
        ("steps [11, 19]", "steps [ 9,  20]"),  # columns move with their numbers
    ],
)
def test_runs_on_two_machines_agree(stored, fresh):
    assert list(text_differences(stored, fresh)) == []


@pytest.mark.parametrize(
    ("stored", "fresh"),
    [
        ("stable; rate 0.5", "unstable; rate 0.5"),
        ("loss 0.550", "loss 0.605"),
        ("loss 0.550", "loss -0.550"),
        ("step 120", "step 132"),
        ("residual 2e-13", "residual 2e-9"),
        ("step 26", "step 26 ± 3"),
        ("float32", "float64"),
        ("a word", ""),
        ("[1, 2]", "[1, 2, 3]"),
    ],
)
def test_a_difference_is_seen(stored, fresh):
    assert len(list(text_differences(stored, fresh))) == 1
