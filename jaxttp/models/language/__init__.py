"""Language models: encoders and decoders, from Hugging Face folders on disk."""

from jaxttp.models.language.architecture import Architecture
from jaxttp.models.language.decoder import Decoder
from jaxttp.models.language.encoder import Encoder
from jaxttp.models.language.folder import load_transformer
from jaxttp.models.language.peft import adapter_targets, load_adapter, save_adapter

__all__ = [
    "Architecture",
    "Encoder",
    "Decoder",
    "load_transformer",
    "adapter_targets",
    "load_adapter",
    "save_adapter",
]
