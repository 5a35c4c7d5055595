"""Tables of one's own: what is a label, what a target, and what is refused."""

import inspect

import numpy as np
import pytest

from jaxttp.data import load_table, load_whole
from jaxttp.pipeline import (
    Settings,
    build_task,
)


def write(folder, text, name="own.csv"):
    path = folder / name
    path.write_text(text)
    return str(path)


ROWS = "1,10,{}\n2,20,{}\n3,60,{}\n"


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        (("b", "a", "b"), ("a", "b"), [1, 0, 1]),
        ((3, 7, 3), ("3", "7"), [0, 1, 0]),
        ((3.0, 7.0, 7.0), ("3", "7"), [0, 1, 1]),
    ],
)
def test_words_and_whole_numbers_are_labels(labels, names, expected, tmp_path):
    found = load_table(write(tmp_path, "w,h,kind\n" + ROWS.format(*labels)))
    assert found.class_names == names
    assert found.y.tolist() == expected
    # Mean 0 and deviation 1; float32 rounds at 1e-7.
    np.testing.assert_allclose(found.x.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(found.x.std(axis=0), 1, rtol=1e-6)
    np.testing.assert_allclose(found.x[:, 0], np.array([-1, 0, 1]) * np.sqrt(1.5), rtol=1e-6)


def test_other_numbers_are_targets_and_a_header_is_optional(tmp_path):
    found = load_table(write(tmp_path, ROWS.format(0.5, 1.5, 4)))
    assert found.num_classes is None
    np.testing.assert_allclose(found.y.mean(), 0, atol=1e-6)
    assert found.y.shape == (3, 1)
    found = load_table(write(tmp_path, "0,1,kind\n" + ROWS.format(3, 7, 3)))
    assert found.class_names == ("3", "7")


def test_pixels_are_scaled_and_what_was_scaled_is_said(tmp_path):
    pixels = np.arange(6 * 16, dtype=np.uint8).reshape(6, 4, 4) * 2
    labels = np.arange(6) % 2

    def load(x, y=labels):
        np.savez(tmp_path / "own.npz", x=x, y=y)
        return load_table(tmp_path / "own.npz")

    found = load(pixels)
    np.testing.assert_allclose(found.x, pixels / 255, rtol=1e-6)  # float32
    assert found.description == "own.npz, x divided by 255, 2 classes ('0' 3, '1' 3)."
    found = load(pixels.astype(float))
    np.testing.assert_array_equal(found.x, pixels)
    masks = load(pixels % 2)
    assert masks.x.max() <= 1
    assert "x as it is, 2 classes" in masks.description
    plain = load(pixels.reshape(6, 16), y=labels + 0.5)
    assert plain.description.endswith("features and targets of mean 0 and deviation 1.")


@pytest.mark.parametrize("form", ["csv", "npz"])
def test_labels_that_floats_do_not_tell_apart_are_refused(form, tmp_path):
    """Identifiers of 64 bits: two classes would silently be one."""
    ids = [2**53, 2**53 + 1, 2**53]
    path = str(tmp_path / f"ids.{form}")
    if form == "csv":
        write(tmp_path, "".join(f"{i},{one}\n" for i, one in enumerate(ids)), "ids.csv")
    else:
        np.savez(path, x=np.eye(3), y=np.array(ids, np.int64))
    with pytest.raises(ValueError, match="on whole numbers are not told apart"):
        load_table(path)
    assert load_table(path, targets=True).num_classes is None


def test_whole_numbers_are_targets_where_that_is_said(tmp_path):
    ages = [20, 35, 50, 35, 61, 44, 27, 73, 31]
    path = write(tmp_path, "w,age\n" + "".join(f"{i},{age}\n" for i, age in enumerate(ages)))
    assert load_table(path).num_classes == 8
    found = load_table(path, targets=True)
    with pytest.raises(ValueError, match="targets='y' is not known; choose one of None, True"):
        inspect.unwrap(load_table)(path, targets="y")  # without the type checks of tests
    assert found.num_classes is None
    np.testing.assert_allclose(found.y[:, 0], (ages - np.mean(ages)) / np.std(ages), rtol=1e-5)
    for loss, outputs in (("cross_entropy", 8), ("squared_error", 1)):
        task = build_task(Settings(data=path, loss=loss))
        assert f"MLP 1-64-64-{outputs} " in task.description
        assert task.y.shape == ((9, 1) if outputs == 1 else (9,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs rows of features and a label"),
        ("1,2,a\n", "needs rows of features"),
        ("w,h,k\n1,2,a\n3,b\n4,5,a\n", "line 3 has 2 cells, the first row of data 3"),
        ("1,2,a\n3,x,b\n", "1 cells of features in 2 rows are no .* 'x' in line 2, column 2. Fill"),
        ("1,2,a\n3,inf,b\n4,5,b\n", "the first is 'inf' in line 2, column 2"),
        ("1,NA,a\n3,4,b\n5,6,a\n", "the first is 'NA' in line 1, column 2"),  # no header
        ("w,sex,k\n1,f,a\n2,m,b\n", r"'f' in line 2, column 2 \('sex'\).* label \(--label\)"),
    ],
)
def test_bad_tables(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_table(write(tmp_path, text))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (("a", " ", ""), r"column 3 \('kind'\), is missing in 2 rows, first in line 3; leave"),
        (("0.5", "1.5", "soon"), r"line 4, column 3 \('kind'\) holds 'soon', while 2 of 3 rows"),
        (("1", "inf", "2"), r"line 3, column 3 \('kind'\) holds 'inf', while 2 of 3"),
    ],
)
def test_bad_last_columns(labels, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_table(write(tmp_path, "w,h,kind\n" + ROWS.format(*labels)))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((3, 2))}, "needs the arrays x and y"),
        ({"x": np.ones((3, 2)), "y": np.ones(2)}, "of one length"),
        ({"x": np.ones(3), "y": np.ones(3)}, "needs x"),
        ({"x": np.full((3, 2), np.nan), "y": np.ones(3)}, "x holds what is not finite"),
        ({"x": np.array([["a"], ["b"]]), "y": np.ones(2)}, "x holds <U1, not real numbers"),
        ({"x": np.ones((2, 2)), "y": np.array(["a", ""])}, r"y\[1\] holds '', 1 of 2 labels"),
        ({"x": np.ones((2, 2)), "y": np.array([["a", "b"], ["b", "a"]])}, "y .2, 2. holds words"),
    ],
)
def test_bad_arrays(arrays, message, tmp_path):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        load_table(tmp_path / "own.npz")


FIRST = "kind,age,w\na,1,5\nb,3,7\na,4,8\n"


@pytest.mark.parametrize("label", ["kind", 1, "1"])
def test_the_label_is_where_it_is_said_to_be(label, tmp_path):
    found = load_table(write(tmp_path, FIRST), label=label)
    assert found.class_names == ("a", "b")
    assert found.y.tolist() == [0, 1, 0]
    assert "2 classes ('a' 2, 'b' 1) from column 1 ('kind')" in found.description


def test_a_label_makes_or_numbers_a_head(tmp_path):
    """Heads of numbers (years) are told by the label."""
    years = write(tmp_path, "2019,2020,y\n1,2,3\n4,5,4\n", "years.csv")
    assert load_table(years, label="y").class_names == ("3", "4")
    assert load_table(years, label="2019").class_names == ("1", "4")  # a name before a number
    twos = write(tmp_path, "w,h,2\n1,5,2\n2,6,7\n", "twos.csv")
    assert load_table(twos, label="2").class_names == ("2", "7")
    assert load_table(twos, label=2).class_names == ("5", "6")  # but an integer is a number
    words = write(tmp_path, "b,1,2\na,3,4\nb,5,7\n", "words.csv")
    found = load_table(words, label=1)
    assert found.class_names == ("a", "b")
    assert len(found) == 3
    assert "from column 1, " in found.description
    with pytest.raises(ValueError, match=r"label='c' is no column: .* no names .* from 1 to 3"):
        load_table(words, label="c")


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("Kind", r"label='Kind' is no column: .* has the columns 1 \('kind'\), 2 \('age'\), 3"),
        (4, "label=4 is no column"),
        (0, "label must be an integer of at least 1; got 0"),
    ],
)
def test_labels_that_are_no_column(label, message, tmp_path):
    with pytest.raises((ValueError, TypeError), match=message):
        load_table(write(tmp_path, FIRST), label=label)


def test_a_label_is_for_a_csv(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.eye(4), y=np.arange(4))
    for path, load in ((tmp_path / "own.npz", load_table), ("wine", load_whole)):
        with pytest.raises(ValueError, match="label='kind' does nothing here"):
            load(path, label="kind")
