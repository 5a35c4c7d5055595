"""Image data sets of tensorflow-datasets, read without TensorFlow; needs the extra `datasets`.

They are prepared once, by ``tfds build``, which needs TensorFlow; here nothing is downloaded.
"""

from typing import Any

import numpy as np

from jaxttp.data.images import ImageSource

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
"""The parts of the sets that are known by name, all of which are loaded unless one is chosen."""

_CIFAR10 = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_KNOWN = {
    "mnist": "Handwritten digits, 28x28 pixels of one channel",
    "cifar10": "Photographs of ten classes, 32x32 pixels of three channels",
}


def tfds_source(name: str, split: str | None) -> ImageSource:
    """The images of a set of tensorflow-datasets with features "image" and "label".

    The labels are read at once, which reads through the files; an image when it is asked for.

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
    wanted = SPLITS.get(name, ("train",)) if split is None else (split,)
    try:
        # Random access needs no TensorFlow, unlike `tfds.load`.
        parts: Any = tfds.data_source(name, split=list(wanted), download=False, try_gcs=False)
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
        description=_KNOWN.get(name, f"Images of {name} of tensorflow-datasets"),
        labels=np.array([int(row(i)["label"]) for i in range(ends[-1])], np.int32),
        class_names=_CIFAR10 if name == "cifar10" else names,
        read=lambda index: np.asarray(row(index)["image"], np.uint8),
    )
