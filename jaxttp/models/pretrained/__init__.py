"""Trained weights: the file format, and the checkpoint that ships with the library."""

from jaxttp.models.pretrained.checkpoint import Checkpoint, load_params, save_params, with_params
from jaxttp.models.pretrained.importer import load_weights
from jaxttp.models.pretrained.shipped import checkpoint_path, load_pretrained, pretrained_names

__all__ = [
    "Checkpoint",
    "save_params",
    "load_params",
    "with_params",
    "load_weights",
    "pretrained_names",
    "checkpoint_path",
    "load_pretrained",
]
