"""The checkpoints inside the package, by name. No download, ever."""

from collections.abc import Callable
from pathlib import Path

from flax import nnx

from jaxttp._core.checks import check_choice
from jaxttp.models.pretrained.checkpoint import load_params, with_params
from jaxttp.models.resnet import ResNet, digits_resnet

_NETWORKS: dict[str, Callable[[], ResNet]] = {
    "digits-resnet": lambda: digits_resnet(5, rngs=nnx.Rngs(0)),
}


def pretrained_names() -> tuple[str, ...]:
    """The names that `load_pretrained` knows.

    Example:
        >>> pretrained_names()
        ('digits-resnet',)
    """
    return tuple(_NETWORKS)


def checkpoint_path(name: str = "digits-resnet") -> Path:
    """Where a shipped checkpoint lies, for `load_params` and its metadata.

    Args:
        name: one of `pretrained_names`.

    Returns:
        The path of the safetensors file.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> checkpoint_path("digits-resnet").name
        'digits-resnet.safetensors'
    """
    check_choice("name", name, _NETWORKS)
    return Path(__file__).with_name(f"{name}.safetensors")


def load_pretrained(name: str = "digits-resnet") -> ResNet:
    """A network with the weights that ship with the library.

    ``digits-resnet``: `digits_resnet` with five outputs, trained on the digits 0-4 of
    scikit-learn's 8x8 digits (``python -m experiments.pretrain_digits``), inputs as
    ``load_dataset("digits")`` gives them, in [0, 1]. Fine-tune it with `fresh_head`.

    Args:
        name: one of `pretrained_names`.

    Returns:
        The network, float32.

    Raises:
        ValueError: an unknown name, or a file that does not fit the network.
        FileNotFoundError: the installation lacks the file.

    Example:
        >>> import jax.numpy as jnp
        >>> load_pretrained("digits-resnet")(jnp.zeros((1, 8, 8, 1))).shape
        (1, 5)
    """
    params = load_params(checkpoint_path(name)).params
    return with_params(nnx.eval_shape(_NETWORKS[name]), params)
