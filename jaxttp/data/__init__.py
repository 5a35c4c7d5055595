"""Named data sets as NumPy arrays, and parts of them."""

from jaxttp.data.cache import cached
from jaxttp.data.columns import Column, Columns
from jaxttp.data.corpus import Corpus, load_corpus
from jaxttp.data.dataset import Dataset
from jaxttp.data.images import (
    Preprocessing,
    imagenet_preprocessing,
    preprocess,
    vit_preprocessing,
)
from jaxttp.data.registry import dataset_names, load_dataset
from jaxttp.data.selection import Split, select, split
from jaxttp.data.tables import is_table, load_table, load_whole
from jaxttp.data.text import Tokenizer, has_texts, load_texts, load_tokenizer
from jaxttp.data.transforms import downsample, grayscale, whiten

__all__ = [
    "Dataset",
    "Column",
    "Columns",
    "dataset_names",
    "load_dataset",
    "load_table",
    "load_whole",
    "is_table",
    "Tokenizer",
    "load_tokenizer",
    "load_texts",
    "Corpus",
    "load_corpus",
    "has_texts",
    "select",
    "split",
    "Split",
    "Preprocessing",
    "imagenet_preprocessing",
    "vit_preprocessing",
    "preprocess",
    "grayscale",
    "downsample",
    "whiten",
    "cached",
]
