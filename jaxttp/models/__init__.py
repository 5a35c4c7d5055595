"""Networks in Flax NNX. A sample's outputs depend on that sample alone: no batch statistics."""

from jaxttp.models.head import fresh_head, linear_head
from jaxttp.models.layers import LayerOutput, layer_names
from jaxttp.models.mlp import MLP
from jaxttp.models.pretrained import (
    load_params,
    load_pretrained,
    pretrained_names,
    save_params,
    with_params,
)
from jaxttp.models.resnet import ResidualBlock, ResNet, digits_resnet
from jaxttp.models.revmlp import RevMLP

__all__ = [
    "MLP",
    "RevMLP",
    "ResNet",
    "ResidualBlock",
    "digits_resnet",
    "LayerOutput",
    "layer_names",
    "linear_head",
    "fresh_head",
    "save_params",
    "load_params",
    "with_params",
    "pretrained_names",
    "load_pretrained",
]
