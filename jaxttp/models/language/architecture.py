"""The architecture of a language model, from the ``config.json`` of a Hugging Face folder."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.checks import check_choice, check_integer, check_number

KINDS = ("default", "llama3")


Rotary = tuple[float, ...]
"""Frequencies of rotary positions (d/2,), radians a position, of the pairs of a head of width d."""


def rotary_tables(frequencies: Rotary, length: int, dtype: Any) -> tuple[Array, Array]:
    """Cosines and sines (T, d/2) of the first T positions, computed in float64."""
    angles = np.arange(length)[:, None] * np.asarray(frequencies)
    return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)


def read_rotary(config: Mapping[str, Any], width: int, length: int) -> Rotary:
    """The frequencies of rotary positions in a ``config.json`` of transformers.

        ω_j = θ^(−2j/d),   j = 0 ... d/2 − 1

    "llama3" divides them by a factor where a period is longer than the sequences of the
    pre-training, keeps those of short periods, and interpolates between.

    Args:
        config: with ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` (from version 5).
        width: d, of a head.
        length: the longest sequence.

    Returns:
        ω (d/2,).

    Raises:
        ValueError: a kind that is not supported, numbers that are missing or out of range.

    Example:
        >>> read_rotary({"rope_theta": 100.0}, 4, 16)
        (1.0, 0.1)
    """
    if width % 2:
        raise ValueError(f"head_dim={width} must be even for rotary positions.")
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    check_number("rope_theta", theta, above=0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    check_choice("rope_type", kind, KINDS, hint="Others change the angles with the length.")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor: heads that turn in part are not supported.")
    frequencies = theta ** -(np.arange(0, width, 2) / width)
    if kind == "llama3":
        frequencies = _llama3(frequencies, rope, length)
    return tuple(map(float, frequencies))


def _llama3(frequencies: np.ndarray, rope: Mapping[str, Any], length: int) -> np.ndarray:
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        if name not in rope:
            raise ValueError(f"rope_type='llama3' needs {name}.")
        check_number(name, rope[name], above=0)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    periods = rope.get("original_max_position_embeddings", length) * frequencies / (2 * math.pi)
    fraction = np.clip((periods - low) / (high - low), 0, 1)
    return (1 - fraction) * frequencies / rope["factor"] + fraction * frequencies


def rotate(
    x: Float[Array, "n t *h d"], cosines: Float[Array, "n t e"], sines: Float[Array, "n t e"]
) -> Float[Array, "n t *h d"]:
    """Pairs (x_j, x_{j + d/2}) rotated by the angles of their positions.

    Args:
        x: queries or keys (N, T, ..., d).
        cosines: (N, T, d/2).
        sines: (N, T, d/2).

    Returns:
        The same shape.

    Example:
        >>> x = jnp.array([[[[1.0, 0.0]]]])
        >>> rotate(x, jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1))).tolist()
        [[[[0.0, 1.0]]]]

    Source:
        Su et al. 2021, "RoFormer"; halves are paired as in GPT-NeoX and Llama.
    """
    first, second = jnp.split(x, 2, axis=-1)
    shape = (*cosines.shape[:2], *(1,) * (x.ndim - 3), cosines.shape[-1])
    cosines, sines = cosines.reshape(shape), sines.reshape(shape)
    rotated = (first * cosines - second * sines, second * cosines + first * sines)
    return jnp.concatenate(rotated, axis=-1)


_GELU = functools.partial(jax.nn.gelu, approximate=False)
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": _GELU, "gelu_python": _GELU,
    "gelu_new": jax.nn.gelu, "gelu_fast": jax.nn.gelu, "gelu_pytorch_tanh": jax.nn.gelu,
    "silu": jax.nn.silu, "swish": jax.nn.silu, "relu": jax.nn.relu,
}  # fmt: skip
"""Activations by transformers' names; the first two are exact, the next three take a tanh."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The sizes and settings of an `Encoder` or a `Decoder`.

    Attributes:
        family: "bert", "roberta", "gpt2", "llama", "mistral" or "qwen2": names the tensors of
            files.
        vocabulary: V, tokens.
        width: D, of the states.
        depth: blocks.
        heads: of the queries.
        hidden: units inside a block.
        length: the longest sequence.
        kv_heads: of keys and values, a divisor of `heads`.
        head_width: of a head.
        activation: a key of `ACTIVATIONS`.
        norm_epsilon: of the norms.
        types: segments of a sequence, 0 for none.
        rotary: frequencies of rotary positions; None for learned ones.
        rms_norm: whether norms are RMS norms, without means and biases.
        gated: whether the network of a block is a gated one.
        fused: whether queries, keys and values come from one kernel.
        biases: the layers with biases: of "qkv", "o", "mlp".
        tied: whether the logits of tokens come from the embedding's own matrix.
        outputs: classes of the checkpoint's own head.
        pad: the token of padded positions, if the file names it.

    Raises:
        ValueError: a size below 1, heads that do not divide.

    Example:
        >>> Architecture("gpt2", vocabulary=50, width=8, depth=1, heads=2, hidden=32, length=16)
        Architecture(family='gpt2', vocabulary=50, width=8, ...)
    """

    family: str
    vocabulary: int
    width: int
    depth: int
    heads: int
    hidden: int
    length: int
    kv_heads: int | None = None
    head_width: int | None = None
    activation: str = "gelu_new"
    norm_epsilon: float = 1e-5
    types: int = 0
    rotary: Rotary | None = None
    rms_norm: bool = False
    gated: bool = False
    fused: bool = False
    biases: tuple[str, ...] = ("qkv", "o", "mlp")
    tied: bool = True
    outputs: int = 2
    pad: int | None = None

    def __post_init__(self):
        for name in ("vocabulary", "width", "depth", "heads", "hidden", "length", "outputs"):
            check_integer(name, getattr(self, name), at_least=1)
        check_number("norm_epsilon", self.norm_epsilon, above=0)
        check_choice("activation", self.activation, ACTIVATIONS)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        if self.heads % self.key_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}.")
        if self.head_width is None:
            if self.width % self.heads:
                raise ValueError(f"heads={self.heads} must divide width={self.width}.")
            object.__setattr__(self, "head_width", self.width // self.heads)

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def encoder(self) -> bool:
        """Whether every position sees all others."""
        return self.family in ("bert", "roberta")

    @property
    def first_position(self) -> int:
        """The row of the first token in the positions' table; earlier rows are unused (RoBERTa)."""
        return (1 if self.pad is None else self.pad) + 1 if self.family == "roberta" else 0


def read_architecture(
    config: Mapping[str, Any], *, where: str = "config", architecture: str | None = None
) -> Architecture:
    """The architecture that a ``config.json`` of transformers describes.

    Args:
        config: its contents.
        where: its name in messages.
        architecture: one of `ARCHITECTURES` in place of the file's ``model_type``.

    Returns:
        The architecture.

    Raises:
        ValueError: an architecture that is not known here, a setting
            that is not supported, by its name, a size that is missing or out of range.

    Example:
        >>> sizes = {"vocab_size": 50, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
        >>> read_architecture({"model_type": "gpt2"} | sizes).hidden
        32
        >>> read_architecture({"model_type": "qwen3"} | sizes)
        Traceback (most recent call last):
        ...
        ValueError: config: model_type='qwen3' is not known here, but bert, roberta, gpt2...
    """
    name = config.get("model_type") if architecture is None else architecture
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{where}: model_type={name!r} is not known here, but {', '.join(ARCHITECTURES)}. Pass "
            "architecture='llama' if it is built like that one, or bring the network as a function "
            "of its parameters (docs/pytorch.md)."
        )
    for key, allowed in _REFUSED.items():
        if key in config and config[key] not in allowed:
            raise ValueError(
                f"{where}: {key}={config[key]!r} is not supported; networks with "
                f"{key}={allowed[0]!r} are."
            )
    try:
        read = _Config(config)
        outputs = len(read("id2label", ())) or read("num_labels", 2)
        return dataclasses.replace(ARCHITECTURES[name](read, name), outputs=outputs)
    except KeyError as problem:
        raise ValueError(f"{where} has no {problem.args[0]!r}, which a {name} needs.") from None
    except (ValueError, TypeError) as problem:
        raise ValueError(f"{where}: {problem}") from problem


_REFUSED: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}
"""Settings that change a network's outputs, with their supported values."""


class _Config:
    """Settings by name, with defaults where a file may leave them out."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config

    def __call__(self, name: str, default: Any = ...) -> Any:
        value = self.config.get(name)
        if value is not None:
            return value
        if default is ...:
            raise KeyError(name)
        return default


def _bert(read: _Config, family: str) -> Architecture:
    pad = read("pad_token_id", 1 if family == "roberta" else 0)
    length = read("max_position_embeddings")
    return Architecture(
        family,
        vocabulary=read("vocab_size"),
        width=read("hidden_size"),
        depth=read("num_hidden_layers"),
        heads=read("num_attention_heads"),
        hidden=read("intermediate_size"),
        length=length - (pad + 1 if family == "roberta" else 0),
        activation=read("hidden_act", "gelu"),
        norm_epsilon=read("layer_norm_eps", 1e-12),
        types=read("type_vocab_size", 2),
        pad=pad,
    )


def _gpt2(read: _Config, family: str) -> Architecture:
    width = read("n_embd")
    return Architecture(
        family,
        vocabulary=read("vocab_size"),
        width=width,
        depth=read("n_layer"),
        heads=read("n_head"),
        hidden=read("n_inner", 4 * width),
        length=read("n_positions"),
        activation=read("activation_function", "gelu_new"),
        norm_epsilon=read("layer_norm_epsilon", 1e-5),
        fused=True,
        tied=read("tie_word_embeddings", True),
        pad=read("pad_token_id", None),
    )


def _llama(read: _Config, family: str) -> Architecture:
    biases = ("qkv",) if family == "qwen2" else ()
    if family == "llama":
        biases += ("qkv", "o") if read("attention_bias", False) else ()
        biases += ("mlp",) if read("mlp_bias", False) else ()
    heads, width = read("num_attention_heads"), read("hidden_size")
    head_width = read("head_dim", width // heads)
    rotary = read_rotary(read.config, head_width, length := read("max_position_embeddings"))
    window = read.config.get("sliding_window", 4096)  # transformers' own default; null is none
    if window and family != "llama" and read("use_sliding_window", family == "mistral"):
        length = min(length, window)  # within the first window all positions see each other
    return Architecture(
        family,
        vocabulary=read("vocab_size"),
        width=width,
        depth=read("num_hidden_layers"),
        heads=heads,
        hidden=read("intermediate_size"),
        length=length,
        kv_heads=read("num_key_value_heads", 8 if family == "mistral" else heads),
        head_width=head_width,
        activation=read("hidden_act", "silu"),
        norm_epsilon=read("rms_norm_eps", 1e-6),
        rotary=rotary,
        rms_norm=True,
        gated=True,
        biases=biases,
        tied=read("tie_word_embeddings", False),
        pad=read("pad_token_id", None),
    )


ARCHITECTURES: dict[str, Callable[[_Config, str], Architecture]] = {
    "bert": _bert,
    "roberta": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
}
"""The supported architectures, by the ``model_type`` of their ``config.json``."""
