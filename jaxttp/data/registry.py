"""Data sets by name. To add one that comes with a package, enter its loader in `LOADERS`."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import check_instance
from jaxttp.data.dataset import Dataset, select, select_rows, standardized
from jaxttp.data.images import Preprocessing, preprocess, read_images
from jaxttp.data.sources import LAYOUTS, SPLITS, folder_source, tfds_source


def digits() -> Dataset:
    """1797 handwritten digits, 8x8 pixels; counts 0..16 divided by 16, so that x lies in [0, 1]."""
    x, y = _digits()
    x = (np.reshape(x, (-1, 8, 8, 1)) / 16).astype(np.float32)
    description = "Handwritten digits, 8x8 pixels of one channel, scaled to [0, 1]."
    return Dataset(x, y.astype(np.int32), "digits", description, 10, tuple("0123456789"))


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (1797, 64) and digits, from a file of scikit-learn, whose import is slow."""
    package = importlib.util.find_spec("sklearn")
    for folder in (package.submodule_search_locations or ()) if package else ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            rows = np.loadtxt(file, delimiter=",")
            return rows[:, :-1], rows[:, -1]
    from sklearn.datasets import load_digits

    return load_digits(return_X_y=True)  # type: ignore


def _table(name: str, class_names: tuple[str, ...], description: str, **options: Any) -> Dataset:
    """A table of scikit-learn: standardized features with labels, or with a standardized target."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True, **options)
    x = standardized(x).astype(np.float32)
    if not class_names:
        return Dataset(x, standardized(y[:, None]).astype(np.float32), name, description)
    return Dataset(x, y.astype(np.int32), name, description, len(class_names), class_names)


LOADERS: dict[str, Callable[[], Dataset]] = {
    "digits": digits,
    "wine": lambda: _table(
        "wine", ("cultivar 1", "cultivar 2", "cultivar 3"),
        "Wines of three cultivars by 13 chemical features, standardised.",
    ),
    "breast_cancer": lambda: _table(
        "breast_cancer", ("malignant", "benign"),
        "Malignant and benign tumours by 30 features of cell nuclei, standardised.",
    ),
    "diabetes": lambda: _table(
        "diabetes", (), "Progression of diabetes by 10 features; features and target standardised.",
        scaled=False,
    ),
}  # fmt: skip
"""Loaders of sets that come with scikit-learn; nothing is imported before one is called."""

PREFIX = "tfds:"


def dataset_names() -> tuple[str, ...]:
    """The names of data sets for `load_dataset`, besides ``tfds:NAME`` for any NAME.

    Returns:
        First those that come with scikit-learn, then those of tensorflow-datasets, then those that
        are read from a folder.

    Example:
        >>> dataset_names()[:6]
        ('digits', 'wine', 'breast_cancer', 'diabetes', 'mnist', 'cifar10')
    """
    return (*LOADERS, *SPLITS, *LAYOUTS)


def load_dataset(
    name: str,
    *,
    split: str | None = None,
    classes: Sequence[int] | int | None = None,
    per_class: int | None = None,
    key: Array | None = None,
    preprocessing: Preprocessing | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Dataset:
    """A data set by name, as NumPy arrays ready for a model.

    ========================= ================ ======== ===========================================
    name                      x                y        scaling
    ========================= ================ ======== ===========================================
    ``digits``                1797, 8, 8, 1    10       pixels in [0, 1]
    ``wine``                  178, 13          3        features of mean 0 and deviation 1
    ``breast_cancer``         569, 30          2        features of mean 0 and deviation 1
    ``diabetes``              442, 10          (442, 1) features and target of mean 0, deviation 1
    ``mnist``                 70000, 28, 28, 1 10       pixels in [0, 1]; the last 10,000 are tests
    ``cifar10``, ``cifar100`` 60000, 32, 32, 3 10, 100  pixels in [0, 1]; the last 10,000 are tests
    ``caltech_birds2011``     of many sizes    200      by `preprocessing`
    ``cars196``               of many sizes    196      by `preprocessing`
    ``stanford_dogs``         of many sizes    120      by `preprocessing`
    ``oxford_flowers102``     of many sizes    102      by `preprocessing`
    ``dtd``                   of many sizes    47       by `preprocessing`
    ``food101``               of many sizes    101      by `preprocessing`
    ``tfds:NAME``             of many sizes    any      of tensorflow-datasets; "image" and "label"
    ``mit67``                 of many sizes    67       by `preprocessing`; from `folder`
    ``fgvc_aircraft``         of many sizes    100      by `preprocessing`; from `folder`
    ``minc2500``              362, 362, 3      23       pixels in [0, 1]; from `folder`
    ``image_folder``          of many sizes    any      ``CLASS/*.jpg`` in `folder`
    ========================= ================ ======== ===========================================

    The first four come with scikit-learn. Those from ``mnist`` to ``tfds:NAME`` are prepared once
    by tensorflow-datasets, the last four are unpacked archives; both need the extra `datasets`.
    Nothing is downloaded here: a missing data set is an error with the command that fetches it.
    Only the chosen images are held in memory. Means and deviations of tables are those of all
    samples. Every call returns new arrays.

    Args:
        name: one of `dataset_names`, or ``tfds:NAME``.
        split: a part, "train" for instance, or any of tensorflow-datasets' expressions; None for
            all parts, the training part first ("train" alone for ``tfds:NAME``).
        classes: the labels to keep, or a number of random ones; see `select`.
        per_class: random samples of each class; None for all.
        key: a JAX random key, needed where something is drawn.
        preprocessing: applied to every image.
        folder: the unpacked archive of ``mit67`` and those after it.

    Returns:
        The data set.

    Raises:
        ValueError: for an unknown name or part, a data set that is not on this machine, too few
            classes or samples, images of different sizes.
        ImportError: the extra `datasets` is needed and not installed.

    Example:
        >>> import jax
        >>> load_dataset("digits")
        Dataset('digits': x (1797, 8, 8, 1), 10 classes)
        >>> load_dataset("digits", classes=2, per_class=20, key=jax.random.key(0))
        Dataset('digits': x (40, 8, 8, 1), 2 classes)
    """
    check_instance("name", name, str, "dataset_names")
    if name not in dataset_names() and not name.startswith(PREFIX):
        listed = ", ".join(map(repr, dataset_names()))
        raise ValueError(f"name={name!r} is not known; choose one of {listed}, or 'tfds:NAME'.")
    if folder is not None and name not in LAYOUTS:
        raise ValueError(f"folder={str(folder)!r} is for {', '.join(LAYOUTS)}; got name={name!r}.")
    selection: dict[str, Any] = {"classes": classes, "per_class": per_class, "key": key}

    if name in LOADERS:
        if split is not None:
            raise ValueError(f"split={split!r}: {name} has no parts; see jaxttp.data.split.")
        dataset = LOADERS[name]()
        if classes is not None or per_class is not None:
            dataset = select(dataset, **selection)
        return dataset if preprocessing is None else preprocess(dataset, preprocessing)
    if name in LAYOUTS:
        source = folder_source(name, folder, split)
    else:
        source = tfds_source(name.removeprefix(PREFIX), split)
    rows = select_rows(source.labels, source.class_names, name=source.name, **selection)
    return read_images(source, *rows, preprocessing)
