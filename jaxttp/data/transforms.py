"""Inputs as the conditioning literature prepares them: grey, smaller, whitened."""

import dataclasses

import numpy as np

from jaxttp._core.checks import check_instance, check_integer
from jaxttp._core.covariance import whitening
from jaxttp.data.dataset import Dataset


def grayscale(dataset: Dataset) -> Dataset:
    """Images of one channel: 0.299 red + 0.587 green + 0.114 blue (ITU-R 601).

    Args:
        dataset: images (N, H, W, 3).

    Returns:
        Images (N, H, W, 1).

    Raises:
        ValueError: `dataset` has no images of three channels.

    Example:
        >>> x, y = np.ones((1, 2, 2, 3), np.float32), np.zeros(1, np.int32)
        >>> grayscale(Dataset(x, y, "a", "White.", num_classes=1, class_names=("a",))).x.shape
        (1, 2, 2, 1)
    """
    check_instance("dataset", dataset, Dataset, "load_dataset")
    if dataset.x.ndim != 4 or dataset.x.shape[-1] != 3:
        raise ValueError(f"dataset: {dataset.name} with x {dataset.x.shape} has no three channels.")
    luma = np.array([0.299, 0.587, 0.114])
    grey = (dataset.x.astype(np.float64) @ luma)[..., None]
    return _with(dataset, grey, "grey")


def downsample(dataset: Dataset, factor: int) -> Dataset:
    """Images whose pixels are the means of squares of `factor` by `factor` pixels.

    CIFAR-10 by 4 and in grey has d = 64, MNIST by 2 has d = 196.

    Args:
        dataset: images (N, H, W, C).
        factor: divides H and W.

    Returns:
        Images (N, H/factor, W/factor, C).

    Raises:
        ValueError: `dataset` has no images, or the factor does not divide their sides.

    Example:
        >>> from jaxttp.data import load_dataset
        >>> downsample(load_dataset("digits"), 2).x.shape
        (1797, 4, 4, 1)

    Source:
        GNC Section 6 and Appendix G.
    """
    check_instance("dataset", dataset, Dataset, "load_dataset")
    check_integer("factor", factor, at_least=1)
    shape = dataset.x.shape
    if len(shape) != 4 or shape[1] % factor or shape[2] % factor:
        raise ValueError(f"factor={factor} must divide the sides of images; x is {shape}.")
    n, height, width, channels = shape
    squares = dataset.x.reshape(n, height // factor, factor, width // factor, factor, channels)
    means = squares.astype(np.float64).mean(axis=(2, 4))
    return _with(dataset, means, f"down-sampled by {factor}")


def whiten(dataset: Dataset) -> Dataset:
    """Inputs (N, d) of mean zero and covariance XᵀX/N = I on the range of the data.

    Args:
        dataset: any inputs (N, ...), which are flattened.

    Returns:
        The inputs (N, d) times the covariance's pseudo-inverse root, computed in float64.

    Raises:
        ValueError: all inputs are the same.

    Example:
        >>> from jaxttp.data import load_dataset
        >>> x = whiten(load_dataset("wine")).x
        >>> bool(np.allclose(x.T @ x / len(x), np.eye(13), atol=1e-5))
        True

    Source:
        GNC Section 4, whose experiments whiten MNIST and CIFAR-10.
    """
    check_instance("dataset", dataset, Dataset, "load_dataset")
    x = dataset.x.reshape(len(dataset), -1).astype(np.float64)
    x = x - x.mean(axis=0)
    return _with(dataset, x @ np.asarray(whitening(x.T @ x / len(x))), "whitened")


def _with(dataset: Dataset, x: np.ndarray, what: str) -> Dataset:
    text = f"{dataset.description.rstrip('.')}, {what}."
    return dataclasses.replace(dataset, x=x.astype(np.float32), description=text)
