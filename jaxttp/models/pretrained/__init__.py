"""Trained weights: the file format, and the checkpoint that ships with the library."""

from jaxttp.models.pretrained.checkpoint import Checkpoint as Checkpoint
from jaxttp.models.pretrained.checkpoint import checkpoint_path as checkpoint_path
from jaxttp.models.pretrained.checkpoint import load_params as load_params
from jaxttp.models.pretrained.checkpoint import load_pretrained as load_pretrained
from jaxttp.models.pretrained.checkpoint import save_params as save_params
from jaxttp.models.pretrained.checkpoint import with_params as with_params
from jaxttp.models.pretrained.importer import load_weights as load_weights
