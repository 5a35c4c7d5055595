"""New rows are prepared as the table's own were, by means, deviations and fills that are told."""

import numpy as np
import pytest
from sklearn.preprocessing import StandardScaler

from jaxttp.data import load_table

TABLE = "kind,age,sex,port\na,1,f,3\nb,,m,3\na,4,m,3\nb,10,,3\nb,5,f,3\n"


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "own.csv"
    found.write_text(TABLE)
    return str(found)


def test_means_and_deviations_are_those_of_scikit_learn(path):
    columns = load_table(path, label="kind", fill="mean", one_hot=True).columns
    ages = np.array([1, 5, 4, 10, 5.0])
    sexes = np.array([[1, 0], [0, 1], [0, 1], [1, 0], [1, 0.0]])
    scaler = StandardScaler().fit(np.column_stack([ages, sexes, np.full(5, 3.0)]))
    np.testing.assert_allclose(sum((one.mean for one in columns.features), ()), scaler.mean_)
    np.testing.assert_allclose(sum((one.deviation for one in columns.features), ()), scaler.scale_)
    assert columns.features[1].words == ("f", "m")
    assert columns.targets == ()


def test_rows_of_the_table_come_out_as_its_x(path):
    """To the bit, as text and as numbers; new ones on the same scale, missing ones filled."""
    found = load_table(path, label="kind", fill="mean", one_hot=True)
    rows = [line.split(",")[1:] for line in TABLE.splitlines()[1:]]
    np.testing.assert_array_equal(found.columns.prepare(rows), found.x)
    assert found.columns.prepare(rows).dtype == np.float32
    mixed = found.columns.prepare([[1, "f", 3], [None, "m", 3.0], (4.0, "m", 3)])
    np.testing.assert_array_equal(mixed, found.x[:3])
    again = found.columns.prepare([[float("nan"), "m", 3.0]])
    np.testing.assert_array_equal(again, found.x[1:2])
    older = found.columns.prepare([[5 + 2 * np.std([1, 5, 4, 10, 5]), "?", 4]])
    np.testing.assert_allclose(older[0, [0, 3]], [2.0, 1.0], rtol=1e-6)  # float32
    assert found.columns.prepare(np.empty((0, 3))).shape == (0, 4)


def test_targets_come_back_in_their_units(tmp_path):
    (tmp_path / "own.csv").write_text("w,price\n1,10.5\n2,20\n5,90\n")
    found = load_table(tmp_path / "own.csv")
    np.testing.assert_allclose(found.columns.restore(found.y)[:, 0], [10.5, 20, 90], rtol=1e-6)
    x, y = np.arange(12.0).reshape(4, 3) ** 2, np.arange(8.0).reshape(4, 2) ** 3 + 0.5
    np.savez(tmp_path / "own.npz", x=x, y=y)
    found = load_table(tmp_path / "own.npz")
    np.testing.assert_allclose(found.columns.restore(found.y), y, rtol=1e-5)
    np.testing.assert_array_equal(found.columns.prepare(x), found.x)
    assert [one.name for one in found.columns.targets] == ["y column 1", "y column 2"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["1", "f"]], "row 0 has 2 cells; the features are age, sex, port, 3 of them, without"),
        ([["1", "f", 3], ["2", "x", 3]], "'sex' in row 1 holds 'x'; the table knows 'f', 'm'"),
        ([["old", "f", 3]], "'age' in row 0 holds 'old', which is no finite number"),
        ([["inf", "f", 3]], "'age' in row 0 holds 'inf'"),
        ([["", "f", 3]], "'age' is missing in row 0, 1 of 1 miss it, and no fill was asked for"),
    ],
)
def test_rows_that_do_not_fit(rows, message, path):
    columns = load_table(path, label="kind", drop_missing=True, one_hot=True).columns
    with pytest.raises(ValueError, match=message):
        columns.prepare(rows)
