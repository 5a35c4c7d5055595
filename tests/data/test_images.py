"""What is done to images: against torchvision's own transforms, and the formulas."""

import pathlib

import numpy as np
import pytest
import safetensors.numpy

from jaxttp.data import (
    Dataset,
    Preprocessing,
    downsample,
    imagenet_preprocessing,
    load_dataset,
    vit_preprocessing,
    whiten,
)

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"


def photographs(shape=(5, 8, 8, 3)):
    x = np.random.default_rng(0).uniform(size=shape).astype(np.float32)
    names = ("a", "b")
    return Dataset(x, np.arange(len(x), dtype=np.int32) % 2, "toy", "Noise.", 2, names)


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


def test_box_takes_means():
    image = np.random.default_rng(1).integers(0, 256, (8, 8, 1), np.uint8)
    found = Preprocessing(crop=2, interpolation="box")(image)
    means = image.reshape(2, 4, 2, 4).mean((1, 3)) / 255
    # Rounded to eight bits, by rows and then by columns.
    np.testing.assert_allclose(found[..., 0], means, atol=1.01 / 255)


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


# --- as in the literature on conditioning ---------------------------------------------------------


def test_down_sampling_takes_means_of_squares():
    data = photographs()
    found = downsample(data, 4).x
    for i in range(2):
        for j in range(2):
            square = data.x[:, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
            np.testing.assert_allclose(found[:, i, j], square.mean((1, 2)), atol=1e-6)


@pytest.mark.parametrize("n", [200, 20])
def test_whitened_inputs_have_the_identity_as_covariance(n):
    x = whiten(photographs((n, 4, 4, 2))).x
    assert x.shape == (n, 32)
    values = np.linalg.eigvalsh(x.astype(np.float64).T @ x / n)
    rank = min(n - 1, 32)
    # On the range of the data; float32 inputs.
    np.testing.assert_allclose(values[-rank:], 1, atol=1e-5)
    np.testing.assert_allclose(values[:-rank], 0, atol=1e-5)
    np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-6)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: downsample(photographs(), 3), "factor=3 must divide"),
        (lambda: downsample(load_dataset("wine"), 1), "factor=1 must divide the sides of images"),
        (lambda: downsample(photographs(), 0), "factor must be an integer of at least 1"),
    ],
)
def test_inputs_that_do_not_fit(run, message):
    with pytest.raises(ValueError, match=message):
        run()
