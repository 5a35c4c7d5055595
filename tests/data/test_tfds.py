"""Loaders of downloads, on a stub and, where tensorflow-datasets is installed, on its mock data."""

import types

import numpy as np
import pytest

from jaxttp.data import imagenet_preprocessing, load_dataset
from jaxttp.data.sources import TRAIN_SIZES

SHAPES = {"mnist": (28, 28, 1), "cifar10": (32, 32, 3)}


@pytest.mark.parametrize("name", SHAPES)
def test_training_samples_then_test_samples(name, stub_tfds):
    data = load_dataset(name)
    train, test = stub_tfds.data_source(name, ["train", "test"], False, False)
    assert data.x.shape == (30, *SHAPES[name])
    assert (data.num_classes, data.name) == (10, name)
    assert name in TRAIN_SIZES
    for i, sample in enumerate([*train, *test]):
        np.testing.assert_array_equal(np.round(data.x[i] * 255), sample["image"])
        assert data.y[i] == sample["label"]
    assert (data.x.min(), data.x.max()) == (0, 1)


@pytest.fixture
def mocked():
    """tensorflow-datasets of random images, three of each part."""
    tfds = pytest.importorskip("tensorflow_datasets")
    with tfds.testing.mock_data(num_examples=3):
        yield tfds


@pytest.mark.parametrize(
    ("name", "parts", "classes"),
    [
        ("mnist", 2, 10),
        ("cars196", 2, 196),
        ("oxford_flowers102", 3, 102),
        ("tfds:svhn_cropped", 1, 10),
    ],
)
def test_mock_data_of_the_real_package(name, parts, classes, mocked):
    data = load_dataset(name, preprocessing=imagenet_preprocessing(24))
    assert data.x.shape == (3 * parts, 24, 24, 3)
    assert data.num_classes == len(data.class_names) == classes
    assert data.name == name.removeprefix("tfds:")
    # ImageNet's normalisation of pixels in [0, 1].
    assert -2.2 < data.x.min() < -1
    assert 1 < data.x.max() < 2.7


def test_a_set_without_labels(stub_tfds, monkeypatch):
    info = types.SimpleNamespace(features={"text": None})
    part = types.SimpleNamespace(dataset_info=info)
    monkeypatch.setattr(stub_tfds, "data_source", lambda *_, **__: [part])
    with pytest.raises(ValueError, match=r"features text; images with labels need 'image' and"):
        load_dataset("tfds:imdb_reviews")
