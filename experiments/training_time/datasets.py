"""Table 2: the data sets, from the loaders; on embedded data those that come with scikit-learn."""

import dataclasses
import functools

import numpy as np
from matplotlib.figure import Figure

from experiments.bench.accuracy_tasks import patches
from experiments.store import Pieces, listed, runner
from jaxttp.data import load_dataset
from jaxttp.data.registry import LOADERS
from jaxttp.data.sources import LAYOUTS, folder_source, tfds_source

CLAIM = {
    "ttp-table-2": "Images, classes, mean samples a class and imbalance of the target data sets. "
    "(TTP Table 2)",
}
HEADS = ("data set", "samples", "classes", "mean samples per class", "imbalance factor")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Data sets.

    Attributes:
        data: (name, part, folder) each; "patches" are those of the accuracy benchmark.
    """

    data: tuple[tuple[str, str | None, str | None], ...] = tuple(
        (name, None, None) for name in ("digits", "wine", "breast_cancer", "patches")
    )


PRESETS = {
    "smoke": Settings((("wine", None, None),)),
    "cpu": Settings(),
    "paper": Settings((
        ("cifar10", "train", None), ("cifar100", "train", None),
        ("caltech_birds2011", "train", None), ("fgvc_aircraft", None, "fgvc-aircraft-2013b"),
        ("mit67", "train", "mit67"), ("minc2500", "train", "minc-2500"),
        ("cars196", "train", None),
    )),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One data set: samples of every class (C,)."""

    name: str
    counts: np.ndarray

    @property
    def cells(self) -> tuple[str, ...]:
        """As the table has them; imbalance: the largest class over the smallest."""
        counts = self.counts
        return (
            self.name, str(counts.sum()), str(len(counts)), f"{counts.mean():.1f}",
            f"{counts.max() / counts.min():.2f}",
        )  # fmt: skip


def pieces(settings: Settings) -> Pieces:
    """A data set each."""
    return {item[0]: functools.partial(_count, *item) for item in settings.data}


run = runner(pieces, listed)
"""A `Row` for every data set."""


def _count(name: str, split: str | None, folder: str | None) -> Row:
    if name == "patches":
        labels = patches().y
    elif name in LOADERS:
        labels = load_dataset(name).y
    elif name in LAYOUTS:
        labels = folder_source(name, folder, split).labels
    else:
        labels = tfds_source(name, split).labels
    counts = np.bincount(np.asarray(labels))
    return Row(name, counts[counts > 0])


def plot(result: list[Row]) -> dict[str, Figure]:
    """The table."""
    figure = Figure(figsize=(8, 0.6 + 0.4 * len(result)), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    table = axes.table([list(row.cells) for row in result], colLabels=HEADS, loc="center")
    table.scale(1, 1.4)
    return {"ttp-table-2": figure}


def measure(result: list[Row]) -> dict[str, list[str]]:
    """The same as lines."""
    lines = [
        ", ".join(f"{head}: {cell}" for head, cell in zip(HEADS, row.cells, strict=True))
        for row in result
    ]
    return {"ttp-table-2": lines}
