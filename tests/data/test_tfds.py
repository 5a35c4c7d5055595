"""Loaders of downloads, on a stub and, where tensorflow-datasets is installed, on its mock data."""

import sys

import numpy as np
import pytest

from jaxttp.data import load_dataset
from jaxttp.data.tfds import TRAIN_SIZES

SHAPES = {"mnist": (28, 28, 1), "cifar10": (32, 32, 3)}


@pytest.mark.parametrize("name", SHAPES)
def test_training_samples_then_test_samples(name, stub_tfds):
    data = load_dataset(name)
    train, test = stub_tfds.data_source(name, ["train", "test"])
    assert data.x.shape == (30, *SHAPES[name])
    assert (data.num_classes, data.name) == (10, name)
    assert name in TRAIN_SIZES
    for i, sample in enumerate([*train, *test]):
        np.testing.assert_array_equal(np.round(data.x[i] * 255), sample["image"])
        assert data.y[i] == sample["label"]
    assert (data.x.min(), data.x.max()) == (0, 1)


@pytest.mark.parametrize("name", SHAPES)
def test_mock_data_of_the_real_package(name):
    tfds = pytest.importorskip("tensorflow_datasets")
    with tfds.testing.mock_data(num_examples=3):
        data = load_dataset(name)
    assert data.x.shape == (6, *SHAPES[name])  # three of each part


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r"mnist needs .*pip install 'jaxttp\[datasets\]'"):
        load_dataset("mnist")


@pytest.mark.parametrize(
    ("problem", "raised", "message"),
    [
        (
            OSError("no route to host"),
            ValueError,
            "could not be downloaded .*no route to host.*copy",
        ),
        (ImportError("No module tensorflow"), ImportError, "pip install tensorflow, or copy"),
    ],
)
def test_when_it_cannot_be_prepared(problem, raised, message, stub_tfds, monkeypatch):
    def fail(*_, **__):
        raise problem

    monkeypatch.setattr(stub_tfds, "data_source", fail)
    with pytest.raises(raised, match=message):
        load_dataset("cifar10")
