"""Named data sets as NumPy arrays, and parts of them."""

from jaxttp.data.dataset import Dataset
from jaxttp.data.registry import dataset_names, load_dataset
from jaxttp.data.selection import Split, select, split

__all__ = ["Dataset", "dataset_names", "load_dataset", "select", "split", "Split"]
