"""The inside of a model as a model: what one layer gives, for kernels, CKA, ranks, anything.

Every model here has a method ``activations(x)`` that returns a dict from a layer's name to what it
gives, in the order of the computation, the outputs last ("head"). That is all that is asked of a
module, so it serves modules from elsewhere that do the same.
"""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_leaves
from jaxttp._core.samples import count


def layer_names(module: Any, x: Any) -> tuple[str, ...]:
    """The names of a module's layers, from shapes alone: nothing is computed.

    Args:
        module: a model with a method ``activations(x)``.
        x: inputs (N, ...).

    Returns:
        The names, in the order of the computation.

    Raises:
        TypeError: a module without that method.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp.models import MLP
        >>> layer_names(MLP((4, 8, 8, 3), rngs=nnx.Rngs(0)), jnp.zeros((1, 4)))
        ('hidden.0', 'hidden.1', 'head')
    """
    _check_has_activations(module)
    shapes: list[str] = []

    def run(x: Any) -> list[Array]:
        layers = module.activations(x)
        shapes.extend(layers)
        return list(layers.values())

    check_leaves("x", x)
    if count(x) == 0:
        raise ValueError("x must hold at least one sample; it is empty.")
    jax.eval_shape(run, x)
    return tuple(shapes)


class LayerOutput(nnx.Module):
    """A module that stops at one layer, flattened to (N, h): give it to `jaxttp.from_nnx`.

    Args:
        module: a model with a method ``activations(x)``; it is referred to, not copied.
        layer: one of `layer_names`.

    Raises:
        TypeError: a module without that method.
        ValueError: when called, a layer that the module does not have.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp import from_nnx
        >>> from jaxttp.models import MLP
        >>> from jaxttp.representation import rankme
        >>> model = MLP((4, 8, 3), rngs=nnx.Rngs(0))
        >>> apply_fn, params = from_nnx(LayerOutput(model, "hidden.0"))
        >>> features = apply_fn(params, jnp.eye(4))
        >>> features.shape, bool(1 < rankme(features) < 4)
        ((4, 8), True)
    """

    def __init__(self, module: nnx.Module, layer: str):
        _check_has_activations(module)
        self.module = module
        self.layer = layer

    def __call__(self, x: Any) -> Array:
        """What the layer gives for inputs (N, ...), flattened to (N, h)."""
        layers = getattr(self.module, "activations")(x)  # noqa: B009  (nnx.Module promises none)
        features = layers[check_choice("layer", self.layer, layers)]
        return features.reshape(features.shape[0], -1)


def _check_has_activations(module: Any) -> None:
    if not callable(getattr(module, "activations", None)):
        raise TypeError(
            f"{type(module).__name__} has no method activations(x) that returns a dict of layers; "
            "write one, or an apply_fn that returns the features."
        )
