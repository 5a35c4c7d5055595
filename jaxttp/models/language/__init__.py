"""Language models: encoders and decoders, from Hugging Face folders on disk."""

from jaxttp.models.language.architecture import Architecture as Architecture
from jaxttp.models.language.folder import adapter_targets as adapter_targets
from jaxttp.models.language.folder import load_transformer as load_transformer
from jaxttp.models.language.network import Decoder as Decoder
from jaxttp.models.language.network import Encoder as Encoder
