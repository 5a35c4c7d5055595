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
        ("1,2,a\n3,x,b\n", "line 2, column 2 holds 'x'"),
        ("1,x,a\n3,inf,b\n4,y,b\n", "line 1, column 2 holds 'x', while 0 of 3"),
        ("1,2,a\n3,,b\n", "in 1 of 2 rows: column 2 in 1; the first is '' in line 2. Drop these"),
        ("1,NA,a\n3,4,b\n5,6,a\n", "column 2 in 1; the first is 'NA' in line 1"),  # no header
        ("w,h,k\n?,2,a\n3,,b\n,,b\n", r"in 3 of 3 rows: column 1 \('w'\) in 2, column 2 "),
        ("w,sex,k\n1,f,a\n2,m,b\n", r"column 2 \('sex'\) holds words, 2 different .* encode it"),
        ("w,kind\n1,0.5\n2,\n", r"column 2 \('kind'\), is missing in line 3 \(''\); write it"),
        ("w,kind\n1,a\n2, \n3,\n", r"is missing in line 3 \(''\), line 4 \(''\); write"),
        ("w,kind\n1,0.5\n2,1.5\n3,soon\n", r"line 4, column 2 \('kind'\) holds 'soon', while 2 of"),
        ("w,kind\n1,1\n2,inf\n3,2\n", r"line 3, column 2 \('kind'\) holds 'inf', while 2 of 3"),
    ],
)
def test_bad_tables(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_table(write(tmp_path, text))


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


MIXED = "age,port,sex,kind\n1,S,f,a\n2,C,m,b\n,S,m,a\n4,Q,f,b\n5,S,?,b\n6,C,f,NA\n7,S,m,a\n"


def test_rows_with_gaps_are_dropped_and_words_become_indicators(tmp_path):
    """Rows 3, 5 and 6 miss a feature or the label; ports C, Q, S and sexes f, m in sorted order."""
    found = load_table(write(tmp_path, MIXED), drop_missing=True, one_hot=True)
    assert found.y.tolist() == [0, 1, 1, 0]
    words = "own.csv, 3 of 7 rows with missing values dropped, columns of words: 2, as 5 "
    words += "indicators, 2 classes ('a' 2, 'b' 2) from column 4 ('kind'), "
    assert found.description == words + "features of mean 0 and deviation 1."
    columns = [[1, 2, 4, 7], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    plain = np.array(columns, float).T
    expected = (plain - plain.mean(axis=0)) / plain.std(axis=0)
    np.testing.assert_allclose(found.x, expected, rtol=1e-6)  # float32


FIRST = "kind,age,sex\na,1,f\nb,,m\na,4,m\nb,10,\nb,5,f\n"


@pytest.mark.parametrize("label", ["kind", 1, "1"])
def test_the_label_is_where_it_is_said_to_be(label, tmp_path):
    found = load_table(write(tmp_path, FIRST), label=label, drop_missing=True, one_hot=True)
    assert found.class_names == ("a", "b")
    assert found.y.tolist() == [0, 0, 1]
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
        ("age", r"the label or target, column 2 \('age'\), is missing in line 3 \(''\)"),
    ],
)
def test_labels_that_are_no_column(label, message, tmp_path):
    with pytest.raises((ValueError, TypeError), match=message):
        load_table(write(tmp_path, FIRST), label=label, fill="mean", one_hot=True)


@pytest.mark.parametrize(("fill", "age"), [("median", 4.5), ("mean", 5.0), ("most_frequent", 1.0)])
def test_missing_cells_are_filled(fill, age, tmp_path):
    """Ages 1, 4, 10, 5; of words the most frequent, and of several the first in sorted order."""
    found = load_table(write(tmp_path, FIRST), label="kind", fill=fill, one_hot=True)
    ages = np.array([1, age, 4, 10, 5])
    np.testing.assert_allclose(found.x[:, 0], (ages - ages.mean()) / ages.std(), rtol=1e-6)
    assert (found.x[:, 1] > 0).tolist() == [True, False, False, True, True]  # "f"
    kind = {"most_frequent": "most frequent value"}.get(fill, fill)
    words = f"own.csv, 2 missing values in 2 of 5 rows filled with the column's {kind}"
    assert found.description.startswith(words)


def test_what_cannot_be_filled(tmp_path):
    path = write(tmp_path, FIRST)
    with pytest.raises(ValueError, match="fill='median' and drop_missing=True both say"):
        load_table(path, label="kind", fill="median", drop_missing=True, one_hot=True)
    with pytest.raises(ValueError, match="fill='zero' is not known; choose one of 'median'"):
        load_table(path, fill="zero")
    with pytest.raises(ValueError, match=r"no row has a value in column 1; take such a column"):
        load_table(write(tmp_path, "?,1,a\n?,2,b\n"), fill="mean")
    np.savez(tmp_path / "own.npz", x=np.eye(4), y=np.arange(4))
    for path, load in ((tmp_path / "own.npz", load_table), ("wine", load_whole)):
        with pytest.raises(ValueError, match="fill='mean' does nothing here"):
            load(path, fill="mean")


def test_what_neither_option_mends(tmp_path):
    with pytest.raises(
        ValueError, match=r"values are missing in 2 of 7 rows: column 1 \('age'\) in"
    ):
        load_table(write(tmp_path, MIXED), one_hot=True)
    with pytest.raises(ValueError, match=r"column 2 \('port'\) holds words, 3 different .*'C'"):
        load_table(write(tmp_path, MIXED), drop_missing=True)
    with pytest.raises(ValueError, match="1 of 3 rows have no missing value; drop the columns"):
        load_table(write(tmp_path, "1,,a\n,2,b\n3,4,a\n"), drop_missing=True)
    many = "".join(f"{i},word{i},{i % 2}\n" for i in range(101))
    with pytest.raises(ValueError, match="column 2 holds 101 different words, such as 'word0'"):
        load_table(write(tmp_path, many), one_hot=True)


IDS = "id,w,kind,h\n907,1,a,5\n13,3,b,6\n4444,2,a,8\n"


@pytest.mark.parametrize("drop", [["id"], [1], ("id", "id")])
def test_a_column_is_left_out(drop, tmp_path):
    path = write(tmp_path, IDS)
    found = load_table(path, label="kind", drop=drop)
    same = load_table(write(tmp_path, "w,h,kind\n1,5,a\n3,6,b\n2,8,a\n", "same.csv"))
    np.testing.assert_array_equal(found.x, same.x)
    np.testing.assert_array_equal(found.y, same.y)
    assert f"own.csv, without {drop[0]!r}, " in found.description
    assert "column 3 ('kind')" in found.description  # its place in the file


@pytest.mark.parametrize(
    ("drop", "problem", "words"),
    [
        (["ID"], ValueError, r"drop='ID' is no column: .*has the columns 1 \('id'\), 2 \('w'\)"),
        ([9], ValueError, "drop=9 is no column"),
        ([0], ValueError, "drop must be an integer of at least 1; got 0"),
        (["kind"], ValueError, "drop='kind' is the column of the label"),
        (["id", "w", "h"], ValueError, "leaves no feature"),
        ("id", TypeError, "drop must be a list of columns"),
    ],
)
def test_what_cannot_be_left_out(drop, problem, words, tmp_path):
    with pytest.raises(problem, match=words):
        load_table(write(tmp_path, IDS), label="kind", drop=drop)
