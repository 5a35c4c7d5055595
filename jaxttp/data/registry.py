"""Data sets by name. To add one, write a loader and enter it in `LOADERS`."""

from collections.abc import Callable

from jaxttp._checks import check_choice
from jaxttp.data import bundled, tfds
from jaxttp.data.dataset import Dataset

LOADERS: dict[str, Callable[[], Dataset]] = {
    "digits": bundled.digits,
    "wine": bundled.wine,
    "breast_cancer": bundled.breast_cancer,
    "diabetes": bundled.diabetes,
    "mnist": tfds.mnist,
    "cifar10": tfds.cifar10,
}
"""Loaders by name; nothing is imported or read before a loader is called."""


def dataset_names() -> tuple[str, ...]:
    """The names that `load_dataset` knows.

    Returns:
        The names, in the order of the registry.

    Example:
        >>> dataset_names()
        ('digits', 'wine', 'breast_cancer', 'diabetes', 'mnist', 'cifar10')
    """
    return tuple(LOADERS)


def load_dataset(name: str) -> Dataset:
    """A data set by name, as NumPy arrays ready for a model.

    ================= ================ ======== ==================================================
    name              x                y        scaling
    ================= ================ ======== ==================================================
    ``digits``        1797, 8, 8, 1    10       pixels in [0, 1]
    ``wine``          178, 13          3        features of mean 0 and standard deviation 1
    ``breast_cancer`` 569, 30          2        features of mean 0 and standard deviation 1
    ``diabetes``      442, 10          (442, 1) features and target of mean 0 and deviation 1
    ``mnist``         70000, 28, 28, 1 10       pixels in [0, 1]; the last 10,000 are the test set
    ``cifar10``       60000, 32, 32, 3 10       pixels in [0, 1]; the last 10,000 are the test set
    ================= ================ ======== ==================================================

    The last two are downloaded once by tensorflow-datasets, which is in the extra `datasets`; the
    others come with scikit-learn.

    Means and standard deviations are those of all samples. Every call returns fresh arrays.

    Args:
        name: one of `dataset_names`.

    Returns:
        The data set.

    Raises:
        ValueError: for an unknown name, or a download that fails.
        ImportError: the extra `datasets` is needed and not installed.

    Example:
        >>> load_dataset("digits")
        Dataset('digits': x (1797, 8, 8, 1), 10 classes)
    """
    return LOADERS[check_choice("name", name, LOADERS)]()
