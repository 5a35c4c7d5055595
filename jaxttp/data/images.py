"""Images one at a time, and their preprocessing."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxttp._core.checks import check_choice, check_instance, check_integer
from jaxttp.data.dataset import Dataset

INTERPOLATIONS = ("bilinear", "bicubic")


class ImageSource(NamedTuple):
    """Labels at once, images when they are read.

    Attributes:
        name: of the data set.
        description: of the images.
        labels: (N,), int32.
        class_names: in the order of their labels.
        read: row number -> pixels (H, W, C), uint8.
    """

    name: str
    description: str
    labels: np.ndarray
    class_names: tuple[str, ...]
    read: Callable[[int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """Resize, center crop, scale to [0, 1], normalize: as in a network's pre-training.

        x = (pixels/255 - mean) / std

    Attributes:
        crop: side of the square that is cut out of the middle.
        resize: the shorter side before that; `crop` when None.
        mean: by channel, or one number for all.
        std: likewise.
        channels: 3 repeats grey images, 1 makes grey ones (ITU-R 601 luma); None leaves them.
        interpolation: "bilinear" or "bicubic".

    Raises:
        ValueError: a crop larger than the resized image, numbers out of range.

    Example:
        >>> image = np.full((40, 60, 3), 255, np.uint8)
        >>> x = Preprocessing(crop=32, mean=(0.5,), std=(0.5,))(image)
        >>> x.shape, float(x.min()), float(x.max())
        ((32, 32, 3), 1.0, 1.0)
    """

    crop: int
    resize: int | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    channels: int | None = None
    interpolation: str = "bilinear"

    def __post_init__(self):
        check_integer("crop", self.crop, at_least=1)
        if self.resize is not None:
            hint = f"A square of crop={self.crop} is cut out of it."
            check_integer("resize", self.resize, at_least=self.crop, hint=hint)
        if self.channels not in (None, 1, 3):
            raise ValueError(f"channels must be None, 1 or 3; got {self.channels!r}.")
        check_choice("interpolation", self.interpolation, INTERPOLATIONS)
        if not all(value > 0 for value in self.std):
            raise ValueError(f"std must be positive; got {self.std!r}.")

    def __call__(self, image: np.ndarray) -> np.ndarray:
        """Pixels (H, W, C), uint8 or in [0, 1], to (crop, crop, channels), float32."""
        pillow = _pillow("Preprocessing")
        if image.dtype != np.uint8:
            image = np.round(255 * image).astype(np.uint8)
        picture = pillow.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
        if self.channels is not None:
            picture = picture.convert("L" if self.channels == 1 else "RGB")
        width, height = picture.size
        side = self.resize or self.crop
        # The longer side is rounded down and the margins to the nearest, as torchvision does.
        size = max(side, int(side * width / height)), max(side, int(side * height / width))
        picture = picture.resize(size, getattr(pillow.Resampling, self.interpolation.upper()))
        left, top = (round((length - self.crop) / 2.0) for length in size)
        picture = picture.crop((left, top, left + self.crop, top + self.crop))
        pixels = np.asarray(picture, np.float32) / 255
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        return (pixels - mean) / std


def imagenet_preprocessing(crop: int = 224) -> Preprocessing:
    """That of torchvision's ResNets: resize to 8/7 of the crop, ImageNet's mean and deviation.

    Args:
        crop: side of the images.

    Returns:
        A `Preprocessing` for three channels.

    Example:
        >>> imagenet_preprocessing().resize
        256
    """
    check_integer("crop", crop, at_least=1)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return Preprocessing(crop, resize=round(crop * 8 / 7), mean=mean, std=std, channels=3)


def vit_preprocessing(crop: int = 224) -> Preprocessing:
    """That of timm's ViTs: bicubic, resize to 10/9 of the crop, pixels from -1 to 1.

    Args:
        crop: side of the images.

    Returns:
        A `Preprocessing` for three channels.

    Example:
        >>> vit_preprocessing().resize
        248
    """
    check_integer("crop", crop, at_least=1)
    resize = math.floor(crop / 0.9)
    return Preprocessing(crop, resize, (0.5,), (0.5,), channels=3, interpolation="bicubic")


def read_images(
    source: ImageSource,
    rows: Sequence[int] | np.ndarray,
    labels: np.ndarray,
    class_names: tuple[str, ...],
    preprocessing: Preprocessing | None,
) -> Dataset:
    """The chosen images of a source as a data set.

    Args:
        source: where they come from.
        rows: which ones.
        labels: their labels, (len(rows),).
        class_names: the names of these labels.
        preprocessing: applied to every image; None for scaling to [0, 1] alone.

    Returns:
        A data set.

    Raises:
        ValueError: images of different sizes without a preprocessing.
    """
    apply = preprocessing or (lambda image: image.astype(np.float32) / 255)
    images = [apply(source.read(int(row))) for row in rows]
    shapes = {image.shape for image in images}
    if len(shapes) > 1:
        raise ValueError(
            f"{source.name} has images of {len(shapes)} sizes, such as {min(shapes)} and "
            f"{max(shapes)}; give a preprocessing, such as imagenet_preprocessing(64)."
        )
    scale = "scaled to [0, 1]" if preprocessing is None else _format_preprocessing(preprocessing)
    x, y = np.stack(images).astype(np.float32), np.asarray(labels, np.int32)
    description = f"{source.description}, {scale}."
    return Dataset(x, y, source.name, description, len(class_names), class_names)


def preprocess(dataset: Dataset, preprocessing: Preprocessing) -> Dataset:
    """A data set of images in [0, 1], each preprocessed (pixels are rounded to 8 bits first).

    Args:
        dataset: x (N, H, W, C) in [0, 1].
        preprocessing: applied to every image.

    Returns:
        A data set.

    Raises:
        ValueError: `dataset` has no images in [0, 1].

    Example:
        >>> from jaxttp.data import load_dataset
        >>> part = load_dataset("digits").take(np.arange(3))
        >>> preprocess(part, imagenet_preprocessing(32)).x.shape
        (3, 32, 32, 3)
    """
    check_instance("dataset", dataset, Dataset, "load_dataset")
    check_instance("preprocessing", preprocessing, Preprocessing, "Preprocessing(crop)")
    if dataset.x.ndim != 4 or dataset.x.min() < 0 or dataset.x.max() > 1:
        raise ValueError(
            f"dataset: {dataset.name} with x {dataset.x.shape} from {dataset.x.min():g} to "
            f"{dataset.x.max():g} has no images (N, H, W, C) in [0, 1]."
        )
    x = np.stack([preprocessing(image) for image in dataset.x])
    description = f"{dataset.description} Then {_format_preprocessing(preprocessing)}."
    return dataclasses.replace(dataset, x=x, description=description)


def _format_preprocessing(preprocessing: Preprocessing) -> str:
    return f"cropped to {preprocessing.crop}x{preprocessing.crop} and normalised"


FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""Formats of image files, whatever their names: for other formats Pillow starts other processes."""


def open_image(path: Any) -> np.ndarray:
    """An image file's pixels (H, W, 3), uint8; needs Pillow."""
    pillow = _pillow(str(path))
    problems = (OSError, SyntaxError, ValueError, EOFError, pillow.DecompressionBombError)
    try:
        with warnings.catch_warnings():
            # Pillow itself raises only above twice its limit, at 537 MB of pixels.
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with pillow.open(path, formats=FORMATS) as picture:
                return np.asarray(picture.convert("RGB"))
    except (*problems, pillow.DecompressionBombWarning) as problem:
        raise ValueError(f"{path} is not an image that can be read ({problem}).") from problem


def _pillow(what: str) -> Any:
    try:
        from PIL import Image
    except ImportError as problem:
        raise ImportError(
            f"{what} needs Pillow ({problem}); install the extra: pip install 'jaxttp[datasets]'."
        ) from problem
    return Image
