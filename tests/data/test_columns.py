"""New rows are prepared as the table's own were, by means, deviations and fills that are told."""

import json

import jax
import numpy as np
import pytest
from sklearn.preprocessing import StandardScaler
from typer.testing import CliRunner

from jaxttp.cli import app
from jaxttp.data import Columns, Dataset, cached, load_table, select
from jaxttp.pipeline import Settings, build_task

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


@pytest.mark.usefixtures("unchecked_types")
def test_rows_may_be_a_data_frame(path):
    class Frame:  # of pandas, say: iterated, it gives the names of its columns
        def __init__(self, rows):
            self.rows = rows

        def __iter__(self):
            return iter(self.rows[0])

        def to_numpy(self):
            return np.array(self.rows, dtype=object)

    found = load_table(path, fill="mean", one_hot=True)
    cells = [[1.0 if not one.words else one.words[0] for one in found.columns.features]] * 2
    expected = found.columns.prepare(cells)
    np.testing.assert_array_equal(found.columns.prepare(Frame(cells)), expected)


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


def test_outputs_that_do_not_fit(path, tmp_path):
    with pytest.raises(ValueError, match="this table has classes: take the argmax"):
        load_table(path, label="kind", drop_missing=True, one_hot=True).columns.restore([[1.0]])
    (tmp_path / "two.csv").write_text("w,price\n1,10.5\n2,20\n")
    with pytest.raises(ValueError, match=r"outputs must be \(M, 1\), one for every target; got"):
        load_table(tmp_path / "two.csv").columns.restore(np.zeros((2, 2)))
    np.savez(tmp_path / "own.npz", x=np.ones((2, 2, 2)), y=np.arange(2))
    with pytest.raises(ValueError, match="prepare is for tables; the inputs of these data stay"):
        load_table(tmp_path / "own.npz").columns.prepare([[1.0]])
    with pytest.raises(ValueError, match=r"values must be those of a columns\.json"):
        Columns.from_json({"features": []})


def test_columns_go_with_the_samples(path, tmp_path):
    """Through parts, caches, tasks, and the folder that `predict` writes."""
    options = dict(label="kind", fill="median", one_hot=True)
    found = load_table(path, **options)
    assert select(found, per_class=1, key=jax.random.key(0)).columns == found.columns

    def build() -> Dataset:
        return found

    for _ in range(2):
        kept = cached(tmp_path, {"name": "own"}, build)
        assert kept.columns == found.columns
    task = build_task(Settings(data=path, samples_per_class=None, **options))
    np.testing.assert_array_equal(task.columns.prepare([["1", "f", "3"]])[0], task.x[0])
    assert build_task(Settings(data="wine", samples_per_class=2)).columns is None
    call = ["predict", "--data", path, "--label", "kind", "--fill", "median", "--one-hot"]
    call += ["--hidden", "4", "--steps", "3", "--relinearize", "0", "--output", str(tmp_path / "o")]
    done = CliRunner().invoke(app, [*call, "--json"])
    assert done.exit_code == 0, done.stderr
    assert "2 missing values in 2 of 5 rows filled" in json.loads(done.stdout)["note"]
    written = json.loads((tmp_path / "o" / "columns.json").read_text())
    assert Columns.from_json(written) == found.columns
    assert written["features"][0]["fill"] == 4.5


def test_the_command_lists_columns_and_refuses_both(path):
    done = CliRunner().invoke(app, ["spectrum", "--data", path, "--label", "sort"])
    assert done.exit_code == 2
    assert "has the columns 1 ('kind'), 2 ('age'), 3 ('sex'), 4 ('port')" in done.stderr
    both = ["--fill", "mean", "--drop-missing"]
    for command in ("sweep", "conditioning", "gauss-newton"):
        done = CliRunner().invoke(app, [command, "--data", path, "--label", "kind", *both])
        assert done.exit_code == 2
        assert "fill='mean' and drop_missing=True both say" in done.stderr
