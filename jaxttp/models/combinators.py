"""Models made from models: other outputs, fewer parameters, low-rank adapters.

A `Model` is a pure function and its parameters, so these serve networks of any framework.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._checks import check_integer, check_number
from jaxttp._types import Model, Params, noted, notes_of
from jaxttp.ntk._select import leaf_paths, select_leaves

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
        >>> both = Model(lambda w, x: (x @ w, x), jnp.ones((3, 4)))
        >>> sums = map_outputs(both, lambda f: f[0][:, :2].sum(1, keepdims=True))
        >>> sums.apply_fn(sums.params, jnp.ones((5, 3))).shape
        (5, 1)
    """
    apply_fn, params = model

    def apply(w: Params, x: Any) -> Any:
        return output_fn(apply_fn(w, x))

    return Model(noted(apply, lambda: notes_of(apply_fn)), params)


def freeze(model: Model, trainable: Any) -> Model:
    """The model with some of its parameters as constants: what is left trains.

    Args:
        model: any model.
        trainable: the parameters that stay, as in `jaxttp.empirical_ntk`: a pytree of bools or a
            predicate on the path, such as `head_only` and `last_blocks`.

    Returns:
        A model whose parameters are the chosen leaves, a dictionary by path.

    Raises:
        ValueError: nothing is chosen, or a mask does not fit.

    Example:
        >>> params = {"body": jnp.eye(3), "head": jnp.ones((3, 2))}
        >>> model = freeze(Model(lambda w, x: x @ w["body"] @ w["head"], params), head_only)
        >>> jax.tree.map(jnp.shape, model.params)
        {'head': (3, 2)}
    """
    apply_fn, params = model
    mask = select_leaves(params, trainable)
    leaves, treedef = jax.tree.flatten(params)
    named = list(zip(leaf_paths(params), leaves, mask, strict=True))
    frozen = [(path, None if chosen else leaf) for path, leaf, chosen in named]

    def apply(chosen: Params, x: Any) -> Any:
        whole = [chosen[path] if leaf is None else leaf for path, leaf in frozen]
        return apply_fn(jax.tree.unflatten(treedef, whole), x)

    noted(apply, lambda: notes_of(apply_fn))
    return Model(apply, {path: leaf for path, leaf, chosen in named if chosen})


def head_only(path: str) -> bool:
    """Whether a parameter belongs to the last layer, an attribute ``head``: for `trainable`.

    Args:
        path: such as "blocks/0/conv1/kernel".

    Returns:
        True for "head" and what is in it.

    Example:
        >>> head_only("head/kernel"), head_only("blocks/0/head/kernel")
        (True, False)
    """
    return path.split("/")[0] == "head"


def last_blocks(
    params: Params, count: int, *, name: str = "blocks", after: tuple[str, ...] = ("norm", "head")
) -> Predicate:
    """A predicate for `trainable`: the last blocks, and what comes after them.

    Args:
        params: of the model, with a list of blocks as `from_nnx` gives it.
        count: how many blocks; 0 leaves what comes after them.
        name: the list's name, "hidden" in an `MLP`.
        after: names of the layers behind the blocks, which train too.

    Returns:
        A function of the path.

    Raises:
        ValueError: there is no such list, or it has fewer blocks.

    Example:
        >>> params = {"blocks": {"0": jnp.ones(2), "1": jnp.ones(2)}, "head": jnp.ones(2)}
        >>> [path for path in leaf_paths(params) if last_blocks(params, 1)(path)]
        ['blocks/1', 'head']
    """
    paths = [path.split("/") for path in leaf_paths(params)]
    blocks = {int(path[1]) for path in paths if path[0] == name and path[1:2] and path[1].isdigit()}
    if not blocks:
        known = ", ".join(sorted({path[0] for path in paths}))
        raise ValueError(f"name={name!r} is no list of blocks in params, which has {known}.")
    total = max(blocks) + 1
    check_integer("count", count, at_least=0, at_most=total, remedy=f"There are {total} blocks.")

    def predicate(path: str) -> bool:
        parts = path.split("/")
        return parts[0] in after or (parts[0] == name and int(parts[1]) >= total - count)

    return predicate


def lora(
    model: Model,
    *,
    rank: int,
    key: Array,
    targets: Predicate | None = None,
    alpha: float | None = None,
    output_axis: int = -1,
) -> Model:
    """The model with low-rank adapters on its kernels as its only parameters.

        W = W_0 + (α/r) A B,    A (fan_in, r) ~ N(0, 1/fan_in),    B (r, fan_out) = 0

    for each kernel W_0 reshaped to (fan_in, fan_out); of a convolution, fan_in is height times
    width times channels. The function starts as the model's own. Everything else is frozen.

    Args:
        model: any model.
        rank: r, at least 1.
        key: a JAX random key, draws A.
        targets: which kernels, a predicate on the path; None for all floating-point leaves with at
            least two axes of length above 1, but not positions, tokens and the head.
        alpha: α; the rank when None, so that the factor is 1.
        output_axis: the axis of the outputs: -1 in Flax, 0 in Equinox and PyTorch.

    Returns:
        A model whose parameters are ``{path: {"a": A, "b": B}}``; `merge_lora` gives the kernels.

    Raises:
        ValueError: no kernel is chosen, or a chosen leaf has fewer than two axes; a rank above the
            smaller side of a kernel.

    Example:
        >>> base = Model(lambda w, x: x @ w["kernel"], {"kernel": jnp.ones((4, 3))})
        >>> model = lora(base, rank=2, key=jax.random.key(0))
        >>> jax.tree.map(jnp.shape, model.params)
        {'kernel': {'a': (4, 2), 'b': (2, 3)}}

    Source:
        Hu et al. 2021, "LoRA: Low-rank adaptation of large language models".
    """
    check_integer("rank", rank, at_least=1)
    scale = check_number("alpha", rank if alpha is None else alpha, above=0) / rank
    apply_fn, params = model
    chosen = targets or _is_kernel
    kernels = {
        path: leaf
        for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True)
        if (leaf.ndim > 1 or targets is not None) and chosen(path)
    }
    if not kernels:
        listed = ", ".join(leaf_paths(params)[:8])
        raise ValueError(f"targets chooses no kernel; params has {listed}.")
    adapters = {}
    for index, (path, leaf) in enumerate(kernels.items()):
        if leaf.ndim < 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"targets: {path} is {leaf.dtype} {leaf.shape}, not a kernel.")
        fan_out = leaf.shape[output_axis]
        fan_in = math.prod(leaf.shape) // fan_out
        check_integer(
            "rank", rank, at_least=1, at_most=min(fan_in, fan_out),
            remedy=f"{path} is a {fan_in} by {fan_out} matrix; leave it out by targets.",
        )  # fmt: skip
        drawn = jax.random.normal(jax.random.fold_in(key, index), (fan_in, rank), leaf.dtype)
        a = drawn / jnp.sqrt(jnp.asarray(fan_in, leaf.dtype))
        adapters[path] = {"a": a, "b": jnp.zeros((rank, fan_out), leaf.dtype)}

    def apply(adapters: Params, x: Any) -> Any:
        return apply_fn(merge_lora(params, adapters, scale=scale, output_axis=output_axis), x)

    return Model(noted(apply, lambda: notes_of(apply_fn)), adapters)


def merge_lora(
    params: Params, adapters: Mapping[str, Any], *, scale: float = 1.0, output_axis: int = -1
) -> Params:
    """The parameters with the adapters added to their kernels: W_0 + scale A B.

    Args:
        params: of the model that `lora` was given.
        adapters: the parameters of the model that it returned, trained or not.
        scale: α/r, as it was there.
        output_axis: as it was there.

    Returns:
        Parameters for the model that `lora` was given.

    Raises:
        ValueError: an adapter for a path that params does not have.

    Example:
        >>> adapters = {"kernel": {"a": jnp.ones((2, 1)), "b": jnp.ones((1, 3))}}
        >>> merge_lora({"kernel": jnp.zeros((2, 3))}, adapters)["kernel"].tolist()
        [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    paths = leaf_paths(params)
    if unknown := [path for path in adapters if path not in paths]:
        raise ValueError(f"adapters: params has no {', '.join(unknown)}.")
    leaves, treedef = jax.tree.flatten(params)
    merged = []
    for path, leaf in zip(paths, leaves, strict=True):
        if path in adapters:
            a, b = adapters[path]["a"], adapters[path]["b"]
            shape = jnp.moveaxis(leaf, output_axis, -1).shape
            update = jnp.asarray(scale, leaf.dtype) * (a @ b)
            leaf = leaf + jnp.moveaxis(update.reshape(shape), -1, output_axis)
        merged.append(leaf)
    return jax.tree.unflatten(treedef, merged)


def _is_kernel(path: str) -> bool:
    return path.split("/")[0] not in ("head", "positions", "cls_token", "embed", "segments")
