"""Data for the figures: images by name, down-sampled and whitened, and patches of photographs."""

import functools
from typing import NamedTuple

import numpy as np

from jaxttp import conditioning
from jaxttp._core.checks import check_choice, check_integer
from jaxttp.data import dataset_names, load_dataset


class Inputs(NamedTuple):
    """Samples with labels.

    Attributes:
        x: (n, d), float64, centered.
        labels: (n,), 0..9; None for patches.
        images: (n, height, width, channels) before centring and whitening.
    """

    x: np.ndarray
    labels: np.ndarray | None
    images: np.ndarray

    @property
    def covariance(self) -> np.ndarray:
        """Sigma (d, d)."""
        return self.x.T @ self.x / len(self.x)


@functools.cache
def _photographs() -> tuple[np.ndarray, ...]:
    from sklearn.datasets import load_sample_images

    return tuple(np.asarray(image, np.float64) / 255 for image in load_sample_images().images)


def patches(count: int, side: int, seed: int) -> np.ndarray:
    """Random square patches (n, side, side, 3) of scikit-learn's two sample photographs, in [0, 1].

    The photographs are first averaged over blocks of 4 x 4, so that a patch shows a scene, not a
    texture.

    Args:
        count: n.
        side: pixels.
        seed: of the places.

    Returns:
        Images of two photographs; their spectrum falls by a power law, as that of CIFAR-10 does.
    """
    rng = np.random.default_rng(seed)
    pictures = [downsample(photo[None, :424, :640], (106, 160))[0] for photo in _photographs()]
    out = np.empty((count, side, side, 3))
    for place in range(count):
        picture = pictures[rng.integers(len(pictures))]
        row, column = (rng.integers(size - side + 1) for size in picture.shape[:2])
        out[place] = picture[row : row + side, column : column + side]
    return out


def downsample(images: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Images (n, height, width, channels) averaged over equal blocks.

    Args:
        images: height and width are multiples of the new ones.
        shape: (height, width).

    Returns:
        (n, *shape, channels).

    Raises:
        ValueError: blocks that are not whole.
    """
    n, height, width, channels = images.shape
    if height % shape[0] or width % shape[1]:
        raise ValueError(f"shape={shape} does not divide images of {height} x {width} pixels.")
    blocks = images.reshape(n, shape[0], height // shape[0], shape[1], width // shape[1], channels)
    return blocks.mean(axis=(2, 4))


def load_inputs(
    name: str,
    samples: int | None = None,
    *,
    side: int | None = None,
    gray: bool = False,
    whiten: bool = True,
    seed: int = 0,
) -> Inputs:
    """Centered images by name, as rows.

    Args:
        name: "patches", or a data set of images of `jaxttp.data`.
        samples: drawn at random; None for all (10,000 patches).
        side: pixels after averaging over blocks; None for the images as they are (patches: 8).
        gray: average the channels.
        whiten: to covariance 1 where it is not singular, computed on these samples.
        seed: draws the samples.

    Returns:
        `Inputs`.

    Raises:
        ValueError: an unknown name, too many samples, blocks that are not whole.
    """
    check_choice("name", name, ("patches", *dataset_names()))
    labels = None
    if name == "patches":
        images = patches(samples or 10_000, side or 8, seed)
    else:
        data = load_dataset(name)
        count = check_integer("samples", samples or len(data), at_least=1, at_most=len(data))
        data = data.take(np.sort(np.random.default_rng(seed).permutation(len(data))[:count]))
        images, labels = np.asarray(data.x, np.float64), data.y
        if side is not None and side != images.shape[1]:
            images = downsample(images, (side, side))
    if gray:
        images = images.mean(axis=-1, keepdims=True)
    x = images.reshape(len(images), -1)
    x = x - x.mean(axis=0)
    if whiten:
        x = x @ np.asarray(conditioning.whitening(x.T @ x / len(x)))
    return Inputs(x, labels, images)
