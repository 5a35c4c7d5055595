"""Networks in Flax NNX. A sample's outputs depend on that sample alone: no batch statistics."""

from jaxttp.models.attention import Attention, TransformerBlock
from jaxttp.models.catalog import make_model, model_names
from jaxttp.models.combinators import (
    freeze,
    head_only,
    last_blocks,
    map_outputs,
)
from jaxttp.models.head import fresh_head, linear_head
from jaxttp.models.language import (
    Architecture,
    Decoder,
    Encoder,
    adapter_targets,
    load_adapter,
    load_transformer,
    save_adapter,
)
from jaxttp.models.layers import LayerOutput, layer_names
from jaxttp.models.low_rank import lora, lora_scale, merge_lora
from jaxttp.models.mlp import MLP
from jaxttp.models.normalization import calibrate_batch_norm
from jaxttp.models.pretrained import (
    load_params,
    load_pretrained,
    load_weights,
    pretrained_names,
    save_params,
    with_params,
)
from jaxttp.models.residual import BottleneckBlock, ResidualBlock
from jaxttp.models.resnet import (
    ResNet,
    digits_resnet,
    resnet18,
    resnet20,
    resnet32,
    resnet34,
    resnet50,
)
from jaxttp.models.revmlp import RevMLP
from jaxttp.models.transformer import Transformer
from jaxttp.models.vgg import VGG, vgg5
from jaxttp.models.vit import ViT, vit_base, vit_small, vit_tiny

__all__ = [
    "MLP",
    "RevMLP",
    "ResNet",
    "ResidualBlock",
    "BottleneckBlock",
    "digits_resnet",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet20",
    "resnet32",
    "calibrate_batch_norm",
    "VGG",
    "vgg5",
    "ViT",
    "vit_tiny",
    "vit_small",
    "vit_base",
    "make_model",
    "model_names",
    "Transformer",
    "Attention",
    "TransformerBlock",
    "Architecture",
    "Encoder",
    "Decoder",
    "load_transformer",
    "map_outputs",
    "freeze",
    "head_only",
    "last_blocks",
    "lora",
    "lora_scale",
    "merge_lora",
    "adapter_targets",
    "load_adapter",
    "save_adapter",
    "LayerOutput",
    "layer_names",
    "linear_head",
    "fresh_head",
    "save_params",
    "load_params",
    "with_params",
    "load_weights",
    "pretrained_names",
    "load_pretrained",
]
