"""The data sets that come with scikit-learn: no download.

A loader is a function without arguments that returns a `Dataset`.
"""

import importlib.util
from pathlib import Path

import numpy as np

from jaxttp.data._standardized import standardized
from jaxttp.data.dataset import Dataset


def digits() -> Dataset:
    """1797 handwritten digits, 8x8 pixels; counts 0..16 divided by 16, so that x lies in [0, 1]."""
    x, y = _digits()
    return Dataset(
        x=(np.reshape(x, (-1, 8, 8, 1)) / 16).astype(np.float32),
        y=np.asarray(y, np.int32),
        name="digits",
        description="Handwritten digits, 8x8 pixels of one channel, scaled to [0, 1].",
        num_classes=10,
        class_names=tuple("0123456789"),
    )


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (1797, 64) and digits, from the file of scikit-learn, whose import takes long."""
    package = importlib.util.find_spec("sklearn")
    for folder in (package.submodule_search_locations or ()) if package else ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            rows = np.loadtxt(file, delimiter=",")
            return rows[:, :-1], rows[:, -1]
    from sklearn.datasets import load_digits

    return load_digits(return_X_y=True)  # type: ignore


def wine() -> Dataset:
    """178 wines of three cultivars; 13 chemical features, standardised."""
    from sklearn.datasets import load_wine

    x, y = load_wine(return_X_y=True)
    return Dataset(
        x=standardized(x).astype(np.float32),
        y=np.asarray(y, np.int32),
        name="wine",
        description="Wines of three cultivars by 13 chemical features, standardised.",
        num_classes=3,
        class_names=("cultivar 1", "cultivar 2", "cultivar 3"),
    )


def breast_cancer() -> Dataset:
    """569 tumours, malignant (0) or benign (1); 30 features of cell nuclei, standardised."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return Dataset(
        x=standardized(x).astype(np.float32),
        y=np.asarray(y, np.int32),
        name="breast_cancer",
        description="Malignant and benign tumours by 30 features of cell nuclei, standardised.",
        num_classes=2,
        class_names=("malignant", "benign"),
    )


def diabetes() -> Dataset:
    """442 patients; 10 features and the disease's progression after a year, all standardised."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)
    return Dataset(
        x=standardized(x).astype(np.float32),
        y=standardized(np.reshape(y, (-1, 1))).astype(np.float32),
        name="diabetes",
        description="Progression of diabetes by 10 features; features and target standardised.",
    )
