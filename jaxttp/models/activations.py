"""Activations by name, each with the gain that keeps a signal's size at initialisation.

A layer with kernel ~ N(0, gain/fan_in) that is fed by activations φ keeps the second moment of its
input when

    gain = 1 / E[φ(z)²],    z ~ N(0, 1),

which for the ReLU is the 2 of He et al. 2015.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import nnx
from jax import Array

from jaxttp._core.checks import check_choice


class Activation(NamedTuple):
    """A function of one number and the gain of the layers around it.

    Attributes:
        function: the activation, elementwise.
        gain: 1 / E[φ(z)²] for a standard normal z.
    """

    function: Callable[[Array], Array]
    gain: float


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _identity(x: Array) -> Array:
    return x


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(jax.nn.relu, 2.0),
    "tanh": Activation(jax.nn.tanh, 2.536175433),
    "gelu": Activation(_gelu, 2.351715613),
    "softplus": Activation(jax.nn.softplus, 1.085486503),
    "identity": Activation(_identity, 1.0),
}
"""Every activation that the models know. ``gelu`` is the exact one, with the error function."""


def get_activation(name: str) -> Activation:
    """The activation of that name.

    Args:
        name: one of relu, tanh, gelu, softplus, identity.

    Returns:
        The function with its gain.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> get_activation("relu").gain
        2.0
    """
    return ACTIVATIONS[check_choice("activation", name, ACTIVATIONS)]


def kernel_init(gain: float) -> nnx.Initializer:
    """Kernels ~ N(0, gain/fan_in), not truncated.

    Args:
        gain: variance of a kernel entry times fan_in; 0 gives zeros.

    Returns:
        An initializer ``(key, shape, dtype) -> array`` whose fan_in is all but the last axis.

    Example:
        >>> kernel_init(2.0)(jax.random.key(0), (3, 3, 16, 32)).shape
        (3, 3, 16, 32)
    """
    if gain == 0:
        return nnx.initializers.zeros
    return nnx.initializers.variance_scaling(gain, "fan_in", "normal")
