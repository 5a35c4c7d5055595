"""The notebooks are readable as they lie there, and running them gives what they say."""

import nbformat
import numpy as np
import pytest

from experiments.notebooks import (
    NOTEBOOKS,
    agree,
    differences,
    executed,
    is_picture,
    printed,
    text_differences,
    unsupported,
)
from tests.models.texts import WORDS, write_model

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
KILOBYTES = 100  # a host shows them at once, and the repository does not grow by every new picture

each = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_there_are_notebooks():
    assert [path.stem[0] for path in PATHS] == list("12345678")


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


@pytest.mark.slow
@pytest.mark.usefixtures("quick_processes")
def test_the_one_on_lora_takes_a_folder_and_a_text_of_one_s_own(tmp_path):
    """Forecasts alone, in float32: nothing is trained, and nothing of the tiny network is there."""
    write_model(tmp_path, "llama-lm")
    draw = np.random.default_rng(0)
    (tmp_path / "corpus.txt").write_text(" ".join(draw.choice(WORDS[4:], 1500)))
    notebook = nbformat.read(next(NOTEBOOKS.glob("8_*.ipynb")), as_version=4)
    cells = {cell.id: cell for cell in notebook.cells}
    for old, new in (
        ("folder = None", f"folder = {str(tmp_path)!r}"),
        ("text = None", f"text = {str(tmp_path / 'corpus.txt')!r}"),
        ("length = 32", "length = 8"),
    ):
        assert old in cells["own"].source
        cells["own"].source = cells["own"].source.replace(old, new)
    ran = {cell.id: cell for cell in executed(notebook, tmp_path).cells}
    assert not ran["text"].outputs
    assert not ran["network"].outputs
    assert any(map(is_picture, ran["picture"].outputs))
    words = printed(ran["rank"])[0]
    assert words.count("end ") == 4
    assert "real" not in words + printed(ran["forecast"])[0]


# What the comparison sees, and what it leaves out.


@pytest.mark.parametrize(
    ("stored", "fresh"),
    [
        ("loss below 0.5 at step 26", "loss below 0.5 at step 28"),  # a step or two
        ("loss 0.1015 ± 0.21", "loss 0.1021 ± 0.22"),  # 2 %, or 1 in the last digit
        ("rate 0.02527", "rate 0.02528"),
        ("residual 2e-13", "residual -7e-16"),  # rounding
        ("18.1 ms a step, 2.47 s", "0.2 s a step, 66.78 s"),  # another machine
        ("to 0.1: 1 h 20 min 3 s", "to 0.1: 55 min"),
        ("310 kB, costs 0.00, $ 3", "2.1 MB, costs 0.13, $ 4.5"),
        ("steps [11, 19]", "steps [ 9,  20]"),  # columns move with their numbers
        ("float32[20,  5]", "float32[20, 5]"),
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
        ("2e-3", "2e-4"),
        ("step 26", "step 26 ± 3"),
        ("step 26", "not reached"),
        ("float32", "float64"),
        ("a word", ""),
        ("[1, 2]", "[1, 2, 3]"),
    ],
)
def test_a_difference_is_seen(stored, fresh):
    assert len(list(text_differences(stored, fresh))) == 1


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("100", "102", True), ("10", "13", False), ("1000", "1019", True),
        ("0.50", "0.51", True), ("0.50", "0.53", False), ("-3", "3", False),
        ("1.0e-05", "1.1e-05", True), ("1.0e-05", "1.3e-05", False), ("0", "1e-12", True),
    ],
)  # fmt: skip
def test_numbers_agree_within_the_tolerance(one, other, same):
    assert agree(one, other) is agree(other, one) is same


@pytest.fixture
def ran():
    """A notebook with a text, a table, a picture, and a number in its words."""
    new = nbformat.v4
    table = {"text/plain": "steps 26", "text/html": "<td>26</td>"}
    first = new.new_code_cell("print(...)", id="first", outputs=[
        new.new_output("stream", text="loss 0.55, 3.2 s\n"),
        new.new_output("execute_result", data=table),
    ])  # fmt: skip
    second = new.new_code_cell("draw()", id="second", outputs=[
        new.new_output("display_data", data={"image/png": "aGVsbG8=", "text/plain": "<Figure>"}),
    ])  # fmt: skip
    words = new.new_markdown_cell("**In short**: step **26**, in 3 s; see notebook 2.", id="words")
    return new.new_notebook(cells=[first, second, words])
