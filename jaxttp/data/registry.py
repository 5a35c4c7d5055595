"""Data sets by name. To add one, write a loader and enter it in `LOADERS`."""

from collections.abc import Callable

from jaxttp._checks import check_choice
from jaxttp.data import bundled
from jaxttp.data.dataset import Dataset

LOADERS: dict[str, Callable[[], Dataset]] = {
    "digits": bundled.digits,
    "wine": bundled.wine,
    "breast_cancer": bundled.breast_cancer,
    "diabetes": bundled.diabetes,
}
"""Loaders by name; nothing is imported or read before a loader is called."""


def dataset_names() -> tuple[str, ...]:
    """The names that `load_dataset` knows.

    Returns:
        The names, in the order of the registry.

    Example:
        >>> dataset_names()
        ('digits', 'wine', 'breast_cancer', 'diabetes')
    """
    return tuple(LOADERS)


def load_dataset(name: str) -> Dataset:
    """A data set by name, as NumPy arrays ready for a model.

    ================= ============== ======== ==================================================
    name              x              y        scaling
    ================= ============== ======== ==================================================
    ``digits``        1797, 8, 8, 1  10       pixels in [0, 1]
    ``wine``          178, 13        3        features of mean 0 and standard deviation 1
    ``breast_cancer`` 569, 30        2        features of mean 0 and standard deviation 1
    ``diabetes``      442, 10        (442, 1) features and target of mean 0 and standard deviation 1
    ================= ============== ======== ==================================================

    Means and standard deviations are those of all samples. Every call returns fresh arrays.

    Args:
        name: one of `dataset_names`.

    Returns:
        The data set.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> load_dataset("digits")
        Dataset('digits': x (1797, 8, 8, 1), 10 classes)
    """
    return LOADERS[check_choice("name", name, LOADERS)]()
