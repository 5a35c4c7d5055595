import numpy as np
import pytest

from jaxttp.data import load_dataset
from jaxttp.data.cache import _checksum, cached

SETTINGS = {"name": "wine"}


class Counted:
    """Builds a data set and counts how often."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return load_dataset("wine")


def test_a_miss_builds_and_a_hit_does_not(tmp_path):
    build = Counted()
    first = cached(tmp_path / "new", SETTINGS, build)
    again = cached(tmp_path / "new", SETTINGS, build)
    assert build.calls == 1
    np.testing.assert_array_equal(again.x, first.x)
    np.testing.assert_array_equal(again.y, first.y)
    assert (again.x.dtype, again.y.dtype) == (np.float32, np.int32)
    for field in ("name", "description", "num_classes", "class_names"):
        assert getattr(again, field) == getattr(first, field)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".npz"]


def test_a_regression_is_kept_too(tmp_path):
    for _ in range(2):
        data = cached(tmp_path, {"name": "diabetes"}, lambda: load_dataset("diabetes"))
        assert data.num_classes is None


def test_other_settings_are_another_file(tmp_path):
    build = Counted()
    for seed in (0, 1, 0):
        cached(tmp_path, SETTINGS | {"seed": seed}, build)
    assert build.calls == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_load_dataset_keeps_what_it_drew(tmp_path, key):
    options = {"classes": (1, 2), "per_class": 3, "cache": tmp_path}
    first = load_dataset("digits", **options, key=key)
    again = load_dataset("digits", **options, key=key)
    np.testing.assert_array_equal(first.x, again.x)
    load_dataset("digits", **(options | {"per_class": 4}), key=key)
    assert len(list(tmp_path.glob("digits-*.npz"))) == 2


def write(path, **changes):
    with np.load(path) as file:
        arrays = dict(file) | changes
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})


def damage_values(path):
    with np.load(path) as file:
        x = file["x"].copy()
    x[3, 2] += 1
    write(path, x=x)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_values, "does not match its checksum"),
        (lambda path: path.write_bytes(path.read_bytes()[:-200]), "is damaged"),
        (lambda path: path.write_bytes(b"nothing"), "is damaged"),
        (lambda path: write(path, sha256=None), "is damaged"),
    ],
)
def test_a_damaged_file(damage, message, tmp_path):
    build = Counted()
    cached(tmp_path, SETTINGS, build)
    (path,) = tmp_path.iterdir()
    damage(path)
    with pytest.raises(ValueError, match=rf"cache file .*wine-\w+\.npz {message}.*delete it"):
        cached(tmp_path, SETTINGS, build)
    path.unlink()
    cached(tmp_path, SETTINGS, build)
    assert build.calls == 2


def test_a_file_of_other_settings_under_this_name(tmp_path):
    cached(tmp_path, SETTINGS, Counted())
    (path,) = tmp_path.iterdir()
    cached(tmp_path, SETTINGS | {"seed": 1}, Counted())
    (other,) = set(tmp_path.iterdir()) - {path}
    other.replace(path)
    with pytest.raises(ValueError, match="is of other settings"):
        cached(tmp_path, SETTINGS, Counted())


def damage_meta(path):
    """A right checksum about words that are none: of another program, or another version."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in ("x", "y")}
    arrays["meta"] = np.array('{"settings": NaN}')
    np.savez(path, **arrays, sha256=np.array(_checksum(arrays)))


def test_words_that_are_none_are_refused_too(tmp_path):
    cached(tmp_path, SETTINGS, Counted())
    (path,) = tmp_path.iterdir()
    damage_meta(path)
    with pytest.raises(ValueError, match=r"is damaged \(NaN is not a finite number\).*delete it"):
        cached(tmp_path, SETTINGS, Counted())
