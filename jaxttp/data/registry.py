"""Data sets by name. To add one that comes with a package, enter its loader in `LOADERS`."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array

from jaxttp._core.checks import check_instance
from jaxttp.data import bundled
from jaxttp.data.cache import cached
from jaxttp.data.dataset import Dataset
from jaxttp.data.folders import LAYOUTS, folder_source
from jaxttp.data.images import Preprocessing, preprocess, read_images
from jaxttp.data.selection import select, select_rows
from jaxttp.data.tfds import SPLITS, tfds_source

LOADERS: dict[str, Callable[[], Dataset]] = {
    "digits": bundled.digits,
    "wine": bundled.wine,
    "breast_cancer": bundled.breast_cancer,
    "diabetes": bundled.diabetes,
}
"""Loaders of sets that come with scikit-learn; nothing is imported before one is called."""

PREFIX = "tfds:"


def dataset_names() -> tuple[str, ...]:
    """The names that `load_dataset` knows, besides ``tfds:NAME`` for any NAME.

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
    fewer: bool = False,
    key: Array | None = None,
    preprocessing: Preprocessing | None = None,
    folder: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
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
    Nothing is ever downloaded here: what is missing is an error with the command that fetches it.
    Only the chosen images are held in memory. Means and deviations of tables are those of all
    samples. Every call returns fresh arrays.

    Args:
        name: one of `dataset_names`, or ``tfds:NAME``.
        split: a part, "train" for instance, or any of tensorflow-datasets' expressions; None for
            all parts, the training part first ("train" alone for ``tfds:NAME``).
        classes: the labels to keep, or a number of random ones; see `select`.
        per_class: random samples of each class; None for all.
        fewer: whether a class that has fewer samples gives all it has.
        key: a JAX random key, needed where something is drawn.
        preprocessing: what is done to every image.
        folder: the unpacked archive of ``mit67`` and those after it.
        cache: a folder in which the result is kept as an ``.npz`` file with a checksum.

    Returns:
        The data set.

    Raises:
        ValueError: for an unknown name or part, what is not on this machine, too few classes or
            samples, images of different sizes, a damaged cache.
        ImportError: the extra `datasets` is needed and not installed.

    Example:
        >>> load_dataset("digits")
        Dataset('digits': x (1797, 8, 8, 1), 10 classes)
        >>> load_dataset("digits", classes=2, per_class=20, key=jax.random.key(0))
        Dataset('digits': x (40, 8, 8, 1), 2 classes)
    """
    check_instance("name", name, str, "dataset_names")
    known = dataset_names()
    if name not in known and not name.startswith(PREFIX):
        listed = ", ".join(map(repr, known))
        raise ValueError(f"name={name!r} is not known; choose one of {listed}, or 'tfds:NAME'.")
    if folder is not None and name not in LAYOUTS:
        raise ValueError(f"folder={str(folder)!r} is for {', '.join(LAYOUTS)}; got name={name!r}.")
    chosen: dict[str, Any] = {"classes": classes, "per_class": per_class, "fewer": fewer}

    def build() -> Dataset:
        if name in LOADERS:
            if split is not None:
                raise ValueError(f"split={split!r}: {name} has no parts; see jaxttp.data.split.")
            dataset = LOADERS[name]()
            if classes is not None or per_class is not None:
                dataset = select(dataset, **chosen, key=key)
            return dataset if preprocessing is None else preprocess(dataset, preprocessing)
        if name in LAYOUTS:
            source = folder_source(name, None if folder is None else os.fspath(folder), split)
        else:
            source = tfds_source(name.removeprefix(PREFIX), split)
        picked = select_rows(source.labels, source.class_names, name=source.name, **chosen, key=key)
        return read_images(source, *picked, preprocessing)

    if cache is None:
        return build()
    settings = chosen | {
        "name": name,
        "split": split,
        "classes": classes if classes is None or isinstance(classes, int) else list(classes),
        "key": None if key is None else jax.random.key_data(key).tolist(),
        "preprocessing": None if preprocessing is None else dataclasses.asdict(preprocessing),
        "folder": None if folder is None else os.path.abspath(folder),
    }
    return cached(cache, settings, build)
