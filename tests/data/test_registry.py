import importlib.util

import numpy as np
import pytest
import sklearn.datasets

from jaxttp.data import imagenet_preprocessing, load_dataset, select

SHAPES = {
    "digits": ((1797, 8, 8, 1), 10),
    "wine": ((178, 13), 3),
    "breast_cancer": ((569, 30), 2),
    "diabetes": ((442, 10), None),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_dtypes_and_labels(name):
    shape, num_classes = SHAPES[name]
    data = load_dataset(name)
    assert data.name == name
    assert data.description
    assert data.x.shape == shape
    assert data.x.dtype == np.float32
    assert np.all(np.isfinite(data.x))
    assert data.num_classes == num_classes
    if num_classes is None:
        assert data.y.shape == (shape[0], 1)
        assert data.y.dtype == np.float32
    else:
        assert data.y.dtype == np.int32
        np.testing.assert_array_equal(np.unique(data.y), np.arange(num_classes))
        assert len(data.class_names) == num_classes


@pytest.mark.parametrize("moved", [False, True])
def test_digits_are_those_of_scikit_learn(monkeypatch, moved):
    """Read from its file, or by it where the file is elsewhere."""
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    if moved:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = load_dataset("digits")
    np.testing.assert_array_equal(found.x.reshape(-1, 64) * 16, x)
    np.testing.assert_array_equal(found.y, y)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"name='svhn' is not known.*'digits'.*'cifar10'"):
        load_dataset("svhn")


def test_the_options_of_a_set_that_comes_with_a_package(key):
    part = load_dataset(
        "digits", classes=(3, 5), per_class=4, key=key, preprocessing=imagenet_preprocessing(32)
    )
    assert part.x.shape == (8, 32, 32, 3)
    assert part.class_names == ("3", "5")
    whole = select(load_dataset("digits"), classes=(3, 5), per_class=4, key=key)
    np.testing.assert_array_equal(part.y, whole.y)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", {"split": "train"}, "split='train': digits has no parts"),
        ("digits", {"folder": "x"}, "folder='x' is for image_folder, mit67"),
        ("wine", {"preprocessing": imagenet_preprocessing(8)}, r"wine with x .* has no images"),
        ("diabetes", {"classes": 2}, "diabetes is a regression"),
    ],
)
def test_options_that_do_not_fit(name, options, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(name, **options)
