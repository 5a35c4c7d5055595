"""How Hugging Face folders call the weights of language models, tensor by tensor."""

from typing import NamedTuple

from jaxttp.models.language.architecture import Architecture


class Tensor(NamedTuple):
    """Where one of our arrays is in a file.

    Attributes:
        name: of the tensor.
        transposed: whether it lies (out, in) there, as PyTorch's linear layers do.
        head: whether it belongs to what comes after the body, and may be drawn afresh.
    """

    name: str
    transposed: bool = False
    head: bool = False

    def file_shape(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the file's tensor must have."""
        return own[::-1] if self.transposed else own


_LLAMA = {
    "embed": "embed_tokens",
    "blocks": "layers",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attention": "self_attn",
    "norm": "norm",
}
_GPT2 = {
    "embed": "wte",
    "positions": "wpe.weight",
    "blocks": "h",
    "norm1": "ln_1",
    "norm2": "ln_2",
    "attention": "attn",
    "attention.qkv_proj": "attn.c_attn",
    "attention.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "norm": "ln_f",
}
_BERT = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings.weight",
    "segments": "embeddings.token_type_embeddings.weight",
    "embed_norm": "embeddings.LayerNorm",
    "blocks": "encoder.layer",
    "norm1": "attention.output.LayerNorm",
    "norm2": "output.LayerNorm",
    "attention.q_proj": "attention.self.query",
    "attention.k_proj": "attention.self.key",
    "attention.v_proj": "attention.self.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
}
_BODIES = {"bert": _BERT, "roberta": _BERT, "gpt2": _GPT2}
PREFIXES = {"bert": "bert.", "roberta": "roberta.", "gpt2": "transformer."}
"""What a file puts before the names of a body with a head; "model." in Llama's family."""

_HEADS = {
    ("bert", "classification"): {"pooler": "bert.pooler.dense", "head": "classifier"},
    ("bert", "language_model"): {
        "transform": "cls.predictions.transform.dense",
        "transform_norm": "cls.predictions.transform.LayerNorm",
        "head_bias": "cls.predictions.bias",
        "head": "cls.predictions.decoder",
    },
    ("roberta", "classification"): {"pooler": "classifier.dense", "head": "classifier.out_proj"},
    ("roberta", "language_model"): {
        "transform": "lm_head.dense",
        "transform_norm": "lm_head.layer_norm",
        "head_bias": "lm_head.bias",
        "head": "lm_head.decoder",
    },
}
_DECODER_HEADS = {"classification": {"head": "score"}, "language_model": {"head": "lm_head"}}

UNUSED = (
    "pooler.", "cls.", "lm_head.", "classifier.", "score.", "qa_outputs.",
    "embeddings.position_ids", "attn.bias", "attn.masked_bias", "rotary_emb.inv_freq",
)  # fmt: skip
"""What files hold besides a body and the head that was asked for: other heads, and constants."""


def tensor_of(name: str, shape: Architecture, head: str) -> Tensor:
    """Where the file has one of our arrays.

    Args:
        name: ours, with dots.
        shape: the architecture.
        head: its kind of head.

    Returns:
        The tensor's name, and how it lies.

    Example:
        >>> shape = Architecture("gpt2", 50, width=8, depth=1, heads=2, hidden=8, length=16)
        >>> tensor_of("blocks.0.mlp.up_proj.kernel", shape, "states").name
        'transformer.h.0.mlp.c_fc.weight'
    """
    family = shape.family
    heads = _HEADS.get((family, head), _DECODER_HEADS.get(head, {}))
    body = _BODIES.get(family, _LLAMA)
    prefix = PREFIXES.get(family, "model.")
    *path, leaf = name.split(".")
    ending = "bias" if leaf == "bias" else "weight"
    if not path:  # an array of its own, not of a layer
        return Tensor(heads[leaf], head=True) if leaf in heads else Tensor(prefix + body[leaf])
    first = path[0]
    if first in heads:
        return Tensor(f"{heads[first]}.{ending}", leaf == "kernel", head=True)
    if first != "blocks":
        return Tensor(f"{prefix}{body[first]}.{ending}")
    part = ".".join(path[2:])
    top = body.get(path[2], path[2])
    inner = body.get(part, ".".join([top, *path[3:]]))
    transposed = leaf == "kernel" and family != "gpt2"
    return Tensor(f"{prefix}{body['blocks']}.{path[1]}.{inner}.{ending}", transposed)
