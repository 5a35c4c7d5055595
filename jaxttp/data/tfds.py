"""Data sets of tensorflow-datasets, which are downloaded once; needs the extra `datasets`.

A loader is a function without arguments that returns a `Dataset`: the standard training set, then
the standard test set. `TRAIN_SIZES` says where the one ends.
"""

from typing import Any

import numpy as np

from jaxttp.data.dataset import Dataset

TRAIN_SIZES = {"mnist": 60_000, "cifar10": 50_000}
"""Samples of the standard training set, which come first."""


def mnist() -> Dataset:
    """70,000 handwritten digits, 28x28 pixels of one channel; the last 10,000 are the test set."""
    return _load(
        "mnist",
        "Handwritten digits, 28x28 pixels of one channel, scaled to [0, 1].",
        tuple("0123456789"),
    )


def cifar10() -> Dataset:
    """60,000 photographs, 32x32 pixels of three channels; the last 10,000 are the test set."""
    return _load(
        "cifar10",
        "Photographs of ten classes, 32x32 pixels of three channels, scaled to [0, 1].",
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    )


def _load(name: str, description: str, class_names: tuple[str, ...]) -> Dataset:
    try:
        import tensorflow_datasets as tfds  # pyright: ignore[reportMissingImports]
    except ImportError as problem:
        raise ImportError(
            f"{name} needs tensorflow-datasets ({problem}); install the extra: "
            "pip install 'jaxttp[datasets]'."
        ) from problem
    try:
        # Random access needs no TensorFlow, unlike `tfds.load`.
        parts = tfds.data_source(name, split=["train", "test"])
    except ImportError as problem:
        raise ImportError(
            f"{name} is not prepared on this machine yet, which takes more than the extra "
            f"`datasets` once ({problem}): pip install tensorflow, or copy the folder {name!r} of "
            "a machine that has it into ~/tensorflow_datasets (or TFDS_DATA_DIR)."
        ) from problem
    except Exception as problem:  # of the network, the disk or tensorflow-datasets' own
        raise ValueError(
            f"{name} could not be downloaded or read ({type(problem).__name__}: {problem}). "
            f"Connect to the internet once, or copy the folder {name!r} of a machine that has it "
            "into ~/tensorflow_datasets (or TFDS_DATA_DIR); 'digits' needs no download."
        ) from problem
    samples = [sample for part in parts for sample in _rows(part)]
    return Dataset(
        x=np.stack([image for image, _ in samples]).astype(np.float32) / 255,
        y=np.array([label for _, label in samples], np.int32),
        name=name,
        description=description,
        num_classes=len(class_names),
        class_names=class_names,
    )


def _rows(part: Any) -> list[tuple[np.ndarray, int]]:
    rows = (part[i] for i in range(len(part)))
    return [(np.asarray(row["image"], np.uint8), int(row["label"])) for row in rows]
