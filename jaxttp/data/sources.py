"""Images with labels on this machine: of tensorflow-datasets, or folders of image files.

Nothing is downloaded. Sets of tensorflow-datasets are prepared once, by ``tfds build``, which needs
TensorFlow; here they are read without it (extra `datasets`). A loader of a folder takes the
unpacked archive, as its authors distribute it, and names of parts.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxttp.data.images import ImageSource, open_image

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".tif", ".tiff", ".webp")


@dataclasses.dataclass(frozen=True)
class Layout:
    """The files of a data set on disk, and their origin.

    Attributes:
        load: (folder, parts) -> source.
        splits: its parts; empty where there is one only.
        folder: the contents of the unpacked archive.
        fetch: the command that fetches and unpacks it.
    """

    load: Callable[[Path, tuple[str, ...]], ImageSource]
    splits: tuple[str, ...]
    folder: str
    fetch: str


def image_folder(folder: Path, parts: tuple[str, ...] = ()) -> ImageSource:
    """``CLASS/*.jpg``: a folder for each class, labels in the order of the folders' names."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in _SUFFIXES
    ]
    if not files:
        raise ValueError(
            f"folder={str(folder)!r} has no images in folders named after their classes."
        )
    return _source("image_folder", f"Images of {folder.name}", files, classes)


def mit67(folder: Path, parts: tuple[str, ...]) -> ImageSource:
    """Images/CLASS/*.jpg, and TrainImages.txt and TestImages.txt in the same folder as Images."""
    root = folder / "Images" if (folder / "Images").is_dir() else folder
    classes = sorted(path.name for path in root.iterdir() if path.is_dir())
    listed = _listed(folder, *(f"{part.title()}Images.txt" for part in parts))
    files = [(_below(root, name), _label(name, 0, classes, folder)) for name in listed]
    return _source("mit67", "Indoor scenes", files, classes)


def fgvc_aircraft(folder: Path, parts: tuple[str, ...]) -> ImageSource:
    """data/images/*.jpg with variants.txt; the copyright banner of 20 rows is cut off."""
    root = folder / "data" if (folder / "data").is_dir() else folder
    classes = _listed(root, "variants.txt")
    files = []
    for entry in _listed(root, *(f"images_variant_{part}.txt" for part in parts)):
        number, _, variant = entry.partition(" ")
        label = _label(variant, None, classes, root)
        files.append((_below(root / "images", f"{number}.jpg"), label))
    return _source("fgvc_aircraft", "Aircraft by variant", files, classes, cut=20)


def minc2500(folder: Path, parts: tuple[str, ...]) -> ImageSource:
    """images/CLASS/*.jpg with categories.txt and labels/train1.txt; the first of five splits."""
    classes = _listed(folder, "categories.txt")
    listed = _listed(folder, *(f"labels/{part}1.txt" for part in parts))
    files = [(_below(folder, name), _label(name, 1, classes, folder)) for name in listed]
    return _source("minc2500", "Materials", files, classes)


_INDOOR = "http://groups.csail.mit.edu/vision/LabelMe/NewImages/indoorCVPR_09.tar"
_INDOOR_LISTS = "https://web.mit.edu/torralba/www/{TrainImages,TestImages}.txt"
_AIRCRAFT = (
    "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz"
)
_MATERIALS = "http://opensurfaces.cs.cornell.edu/static/minc/minc-2500.tar.gz"

LAYOUTS: dict[str, Layout] = {
    "image_folder": Layout(image_folder, (), "CLASS/*.jpg", "mkdir FOLDER"),
    "mit67": Layout(
        mit67, ("train", "test"), "Images, TrainImages.txt, TestImages.txt",
        f"curl -O {_INDOOR} && tar xf indoorCVPR_09.tar && curl -O '{_INDOOR_LISTS}'",
    ),
    "fgvc_aircraft": Layout(
        fgvc_aircraft, ("train", "val", "test"), "fgvc-aircraft-2013b",
        f"curl {_AIRCRAFT} | tar xz",
    ),
    "minc2500": Layout(
        minc2500, ("train", "validate", "test"), "minc-2500", f"curl {_MATERIALS} | tar xz"
    ),
}  # fmt: skip
"""Layouts by name."""


def folder_source(
    name: str, folder: str | os.PathLike[str] | None, split: str | None
) -> ImageSource:
    """A named layout's images.

    Args:
        name: one of `LAYOUTS`.
        folder: what its archive unpacked to.
        split: a part, or None for all.

    Returns:
        The source.

    Raises:
        ValueError: no folder given, a file in it missing, an unknown part.
    """
    layout = LAYOUTS[name]
    if folder is None or not Path(folder).is_dir():
        cause = "folder is missing" if folder is None else f"folder={str(folder)!r} does not exist"
        raise ValueError(
            f"{name} is read from a folder, and {cause}: give the one that holds {layout.folder}. "
            f"It is fetched by: {layout.fetch}"
        )
    if split is not None and split not in layout.splits:
        listed = ", ".join(map(repr, layout.splits)) or "none, it has one part only"
        raise ValueError(f"split={split!r} is no part of {name}; choose among {listed}.")
    try:
        return layout.load(Path(folder), layout.splits if split is None else (split,))
    except FileNotFoundError as problem:
        raise ValueError(
            f"folder={str(folder)!r} lacks {problem.filename}; {name} as distributed is fetched "
            f"by: {layout.fetch}"
        ) from problem


def _listed(folder: Path, *names: str) -> list[str]:
    """The lines of some files that are not blank."""
    lines = [line for name in names for line in (folder / name).read_text().splitlines()]
    return [line.strip() for line in lines if line.strip()]


def _label(text: str, index: int | None, classes: list[str], folder: Path) -> int:
    """The label of the class that a line names, by one directory of its path or as a whole."""
    names = [text] if index is None else text.split("/")[index : index + 1]
    if not names or names[0] not in classes:
        raise ValueError(f"folder={str(folder)!r} lists {text!r}, whose class it does not have.")
    return classes.index(names[0])


def _below(root: Path, name: str) -> Path:
    """The path of a listed file, which has to lie below the folder."""
    if not {"..", ""}.isdisjoint(name.replace("\\", "/").split("/")) or Path(name).is_absolute():
        raise ValueError(f"folder={str(root)!r} lists {name!r}, which does not lie below it.")
    return root / name


def _source(
    name: str, description: str, files: list[tuple[Path, int]], classes: list[str], cut: int = 0
) -> ImageSource:
    def read(row: int) -> np.ndarray:
        pixels = open_image(files[row][0])
        return pixels[: len(pixels) - cut]

    labels = np.array([label for _, label in files], np.int32)
    return ImageSource(name, description, labels, tuple(classes), read)


TRAIN_SIZES = {"mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}
"""Samples of the standard training set, which come first."""

SPLITS = {
    "mnist": ("train", "test"),
    "cifar10": ("train", "test"),
    "cifar100": ("train", "test"),
    "caltech_birds2011": ("train", "test"),
    "cars196": ("train", "test"),
    "stanford_dogs": ("train", "test"),
    "oxford_flowers102": ("train", "validation", "test"),
    "dtd": ("train", "validation", "test"),
    "food101": ("train", "validation"),
}
"""The parts of data sets with names of their own; all are loaded by default."""

_CIFAR10 = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_DESCRIPTIONS = {
    "mnist": "Handwritten digits, 28x28 pixels of one channel",
    "cifar10": "Photographs of ten classes, 32x32 pixels of three channels",
}


def tfds_source(name: str, split: str | None) -> ImageSource:
    """The images of a set of tensorflow-datasets with features "image" and "label".

    All labels are read at once, by one pass over the files; each image when it is used.

    Args:
        name: as tensorflow-datasets has it, "cifar10" or "imagenette/160px-v2".
        split: a part in its syntax, "train" or "train[:10%]"; None for all of the known sets,
            "train" of others.

    Returns:
        The source.

    Raises:
        ImportError: the extra is not installed.
        ValueError: the set is not on this machine (the message has the command that prepares it),
            is unknown, or has no images with labels.
    """
    try:
        import tensorflow_datasets as tfds  # pyright: ignore[reportMissingImports]
    except ImportError as problem:
        raise ImportError(
            f"{name} needs tensorflow-datasets ({problem}); install the extra: "
            "pip install 'jaxttp[datasets]'."
        ) from problem
    splits = SPLITS.get(name, ("train",)) if split is None else (split,)
    try:
        # Random access needs no TensorFlow, unlike `tfds.load`.
        parts: Any = tfds.data_source(name, split=list(splits), download=False, try_gcs=False)
    except Exception as problem:  # of the disk or tensorflow-datasets' own
        if type(problem).__name__ == "DatasetNotFoundError":
            raise ValueError(f"name={name!r} is no data set of tensorflow-datasets.") from problem
        first = (str(problem).splitlines() or [""])[0]
        raise ValueError(
            f"{name} could not be read on this machine ({type(problem).__name__}: {first}). "
            f"Fetch it once: pip install tensorflow && tfds build {name} "
            "--file_format=array_record; or copy its folder from a machine that has it into "
            "~/tensorflow_datasets (or TFDS_DATA_DIR)."
        ) from problem
    features = parts[0].dataset_info.features
    if not {"image", "label"} <= set(features):
        raise ValueError(
            f"{name} has the features {', '.join(sorted(features))}; images with labels need "
            "'image' and 'label'."
        )
    ends = np.cumsum([len(part) for part in parts])

    def row(index: int) -> Any:
        part = int(np.searchsorted(ends, index, side="right"))
        return parts[part][index - (int(ends[part - 1]) if part else 0)]

    names = tuple(map(str, features["label"].names))
    return ImageSource(
        name=name,
        description=_DESCRIPTIONS.get(name, f"Images of {name} of tensorflow-datasets"),
        labels=np.array([int(row(i)["label"]) for i in range(ends[-1])], np.int32),
        class_names=_CIFAR10 if name == "cifar10" else names,
        read=lambda index: np.asarray(row(index)["image"], np.uint8),
    )
