"""The last linear layer of a model, and how to replace it.

Every model here keeps its last layer, an `nnx.Linear`, in the attribute ``head``; that is all that
`fresh_head` asks of a module, so it serves modules from elsewhere that do the same.
"""

from typing import TypeVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxttp._core.checks import (
    check_instance,
    check_integer,
    check_key,
    check_known,
    check_number,
)
from jaxttp.models.activations import kernel_init

M = TypeVar("M", bound=nnx.Module)


def linear_head(
    features: int,
    outputs: int,
    *,
    rngs: nnx.Rngs,
    scale: float = 1.0,
    use_bias: bool = True,
    param_dtype: DTypeLike = jnp.float32,
) -> nnx.Linear:
    """A linear layer with kernel ~ N(0, scale²/features) and bias 0.

    Features of unit second moment then give outputs of standard deviation `scale`.

    Args:
        features: width of the input, the fan-in.
        outputs: number of outputs.
        rngs: Flax's random streams; draws one key of ``params``.
        scale: standard deviation of an output; 0 gives a kernel of zeros.
        use_bias: whether there is a bias.
        param_dtype: dtype of the parameters.

    Returns:
        The layer, kernel (features, outputs) and bias (outputs,).

    Raises:
        ValueError: `outputs` is below 1 or `scale` negative.

    Example:
        >>> linear_head(64, 5, rngs=nnx.Rngs(0)).kernel.shape
        (64, 5)
    """
    check_integer("features", features, at_least=1)
    check_integer("outputs", outputs, at_least=1)
    check_instance("rngs", rngs, nnx.Rngs, "flax.nnx, such as nnx.Rngs(0)")
    check_known(scale=scale)
    check_number("scale", scale, at_least=0)
    return nnx.Linear(
        features,
        outputs,
        use_bias=use_bias,
        kernel_init=kernel_init(scale**2),
        param_dtype=param_dtype,
        rngs=rngs,
    )


def fresh_head(module: M, num_classes: int, *, key: Array, scale: float = 1.0) -> M:
    """A copy of the module whose last linear layer is new: the start of fine-tuning.

    The new head has kernel ~ N(0, scale²/fan_in) and bias 0 (no bias where the old one had none),
    in the old head's dtype. Everything else is copied; the module given stays as it is.

    Args:
        module: a model with its last layer, an `nnx.Linear`, in the attribute ``head``.
        num_classes: number of outputs of the new head.
        key: a JAX random key; the same key gives the same head.
        scale: standard deviation of an output for features of unit second moment.

    Returns:
        A new module of the same type.

    Raises:
        TypeError: `module` has no `nnx.Linear` called ``head``.
        ValueError: `num_classes` is below 1 or `scale` negative.

    Example:
        >>> import jax
        >>> from jaxttp.models import MLP
        >>> old = MLP((4, 8, 3), rngs=nnx.Rngs(0))
        >>> new = fresh_head(old, 2, key=jax.random.key(1))
        >>> old.head.kernel.shape, new.head.kernel.shape
        ((8, 3), (8, 2))
    """
    check_integer("num_classes", num_classes, at_least=1)
    check_key(key, optional=False)
    old = getattr(module, "head", None)
    if not isinstance(old, nnx.Linear):
        found = "no such attribute" if old is None else f"a {type(old).__name__}"
        raise TypeError(
            f"fresh_head needs a module whose last layer is an nnx.Linear called 'head'; "
            f"{type(module).__name__} has {found}."
        )
    head = linear_head(
        old.in_features,
        num_classes,
        rngs=nnx.Rngs(params=key),
        scale=scale,
        use_bias=old.use_bias,
        param_dtype=old.kernel.dtype,
    )
    copy = nnx.clone(module)
    setattr(copy, "head", head)  # noqa: B010  (M promises no attribute to the type checker)
    return copy
