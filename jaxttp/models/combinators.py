"""Models made from models: other outputs, one layer's outputs, fewer parameters.

A `Model` is a pure function and its parameters, so these serve networks of any framework. A module
with a method ``activations(x)`` can be cut at any of its layers. It returns a dict from a layer's
name to its outputs in the order of the computation, "head" last; every model here has one.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_integer
from jaxttp._core.types import Model, Params, leaf_paths, noted, notes_of, select_leaves

Predicate = Callable[[str], bool]


def map_outputs(model: Model, output_fn: Callable[[Any], Array]) -> Model:
    """The model with ``output_fn(outputs)`` as its outputs, so that C stays small.

    For a language model with logits (N, T, V), ``lambda f: f[:, -1, [3, 7]]`` are the logits of
    two label words at the last token; for a network that returns a tuple, ``lambda f: f[0]``.

    Args:
        model: any model, whatever its outputs.
        output_fn: from its outputs for N samples to (N, C), each row by itself.

    Returns:
        A model with the same parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> both = Model(lambda w, x: (x @ w, x), jnp.ones((3, 4)))
        >>> sums = map_outputs(both, lambda f: f[0][:, :2].sum(1, keepdims=True))
        >>> sums.apply_fn(sums.params, jnp.ones((5, 3))).shape
        (5, 1)
    """
    apply_fn, params = check_model(model)
    if not callable(output_fn):
        raise TypeError(f"output_fn must be a function of outputs; got {output_fn!r}.")

    def apply(w: Params, x: Any) -> Any:
        return output_fn(apply_fn(w, x))

    return Model(noted(apply, lambda: notes_of(apply_fn)), params)


def check_model(model: Any) -> Model:
    """Network and parameters, else `TypeError`."""
    if not isinstance(model, tuple) or len(model) != 2 or not callable(model[0]):
        raise TypeError(
            "model must be (apply_fn, params), such as jaxttp.from_nnx gives; got a "
            f"{type(model).__name__}."
        )
    return Model(*model)


def freeze(model: Model, trainable: Any) -> Model:
    """The model with some of its parameters as constants: the others train.

    Args:
        model: any model.
        trainable: the parameters that stay, as in `jaxttp.empirical_ntk`: a pytree of bools or a
            predicate on the path, such as `head_only` and `last_blocks`.

    Returns:
        A model whose parameters are the trainable leaves, a dictionary by path.

    Raises:
        ValueError: nothing is trainable, or a mask does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"body": jnp.eye(3), "head": jnp.ones((3, 2))}
        >>> model = freeze(Model(lambda w, x: x @ w["body"] @ w["head"], params), head_only)
        >>> jax.tree.map(jnp.shape, model.params)
        {'head': (3, 2)}
    """
    apply_fn, params = check_model(model)
    mask = select_leaves(params, trainable)
    leaves, treedef = jax.tree.flatten(params)
    named = list(zip(leaf_paths(params), leaves, mask, strict=True))
    frozen = [(path, None if trains else leaf) for path, leaf, trains in named]

    def apply(weights: Params, x: Any) -> Any:
        whole = [weights[path] if leaf is None else leaf for path, leaf in frozen]
        return apply_fn(jax.tree.unflatten(treedef, whole), x)

    weights = {path: leaf for path, leaf, trains in named if trains}
    return Model(noted(apply, lambda: notes_of(apply_fn)), weights)


def head_only(path: str) -> bool:
    """Whether a parameter belongs to the last layer, an attribute ``head``: for `trainable`.

    Args:
        path: such as "blocks/0/conv1/kernel", or "blocks.0.conv1.weight" of `from_torch`.

    Returns:
        True for "head" and its parameters.

    Example:
        >>> head_only("head/kernel"), head_only("head.weight"), head_only("blocks/0/head/kernel")
        (True, True, False)
    """
    return path.replace(".", "/").split("/")[0] == "head"


def last_blocks(
    params: Params, count: int, *, name: str = "blocks", after: tuple[str, ...] = ("norm", "head")
) -> Predicate:
    """A predicate for `trainable`: the last blocks, and the layers after them.

    Args:
        params: of the model, with a list of blocks as `from_nnx` gives it.
        count: how many blocks; with 0 only the layers after them train.
        name: the list's name, "hidden" in an `MLP`.
        after: names of the layers behind the blocks, which train too.

    Returns:
        A function of the path.

    Raises:
        ValueError: there is no such list, or it has fewer blocks.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"blocks": {"0": jnp.ones(2), "1": jnp.ones(2)}, "head": jnp.ones(2)}
        >>> [path for path in leaf_paths(params) if last_blocks(params, 1)(path)]
        ['blocks/1', 'head']
    """
    paths = [path.split("/") for path in leaf_paths(params)]
    blocks = {int(path[1]) for path in paths if path[0] == name and path[1:2] and path[1].isdigit()}
    if not blocks:
        listed = ", ".join(sorted({path[0] for path in paths}))
        raise ValueError(f"name={name!r} is no list of blocks in params, which has {listed}.")
    total = max(blocks) + 1
    check_integer("count", count, at_least=0, at_most=total, hint=f"There are {total} blocks.")

    def predicate(path: str) -> bool:
        parts = path.split("/")
        return parts[0] in after or (parts[0] == name and int(parts[1]) >= total - count)

    return predicate


class LayerOutput(nnx.Module):
    """A module that stops at one layer, flattened to (N, h): give it to `jaxttp.from_nnx`.

    Args:
        module: a model with a method ``activations(x)``; it is referred to, not copied.
        layer: a key of ``module.activations(x)``.

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
        if not callable(getattr(module, "activations", None)):
            raise TypeError(
                f"{type(module).__name__} has no method activations(x) that returns a dict of "
                "layers; write one, or an apply_fn that returns the features."
            )
        self.module = module
        self.layer = layer

    def __call__(self, x: Any) -> Array:
        """The layer's outputs for inputs (N, ...), flattened to (N, h)."""
        layers = getattr(self.module, "activations")(x)  # noqa: B009  (nnx.Module promises none)
        features = layers[check_choice("layer", self.layer, layers)]
        return features.reshape(features.shape[0], -1)
