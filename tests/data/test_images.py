"""What is done to images: against torchvision's own transforms, and the formulas."""

import pathlib

import numpy as np
import pytest
import safetensors.numpy

from jaxttp.data import (
    Preprocessing,
    imagenet_preprocessing,
    vit_preprocessing,
)

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"


@pytest.mark.parametrize(
    ("name", "preprocessing"),
    [
        ("imagenet", imagenet_preprocessing(28)),
        ("vit", vit_preprocessing(28)),
        ("grey", Preprocessing(28, resize=30, mean=(0.1,), std=(0.5,), channels=1)),
    ],
)
@pytest.mark.parametrize("shape", ["wide", "tall"])
def test_pixels_are_those_of_torchvision(name, preprocessing, shape):
    golden = safetensors.numpy.load_file(GOLDENS / "preprocessing.safetensors")
    found = preprocessing(golden[shape])
    # The same library resizes; float32 normalises.
    np.testing.assert_allclose(found, golden[f"{name}.{shape}"], atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"crop": 0}, "crop must be an integer of at least 1"),
        ({"crop": 8, "resize": 7}, "resize must be an integer of at least 8; got 7"),
        ({"crop": 8, "channels": 2}, "channels must be None, 1 or 3; got 2"),
        ({"crop": 8, "std": (1.0, 0.0)}, "std must be positive"),
        ({"crop": 8, "interpolation": "nearest"}, "interpolation='nearest' is not known"),
    ],
)
def test_bad_preprocessing(arguments, message):
    with pytest.raises(ValueError, match=message):
        Preprocessing(**arguments)
