"""Low-rank adapters on the kernels of any model, named and scaled as PEFT does it."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp._core.checks import check_integer, check_key, check_known, check_leaves, check_number
from jaxttp._core.types import Model, Params, leaf_paths, noted, notes_of
from jaxttp.models.combinators import Predicate, check_model

Targets = Predicate | str | Sequence[str]
"""Which kernels: a predicate on paths, or ends of names of modules."""

_SEPARATOR = re.compile(r"[/.]")
"""Separates the parts of a path; dots are those of PyTorch's names."""
_LOOKED_UP = re.compile(
    r".*embed.*|(.*_)?emb(_.*)?|wte|wpe|tok|(.*_)?tokens?|pos|positions?|segments?"
    r"|(pos|position|positional)_enc(oding)?", re.IGNORECASE
)  # fmt: skip
"""Parts of paths of embeddings, positions and tokens."""
_NO_KERNEL = re.compile(r"b\d*|(.*_)?bias\d*(_.*)?|scale|gamma|beta", re.IGNORECASE)
"""Names of leaves that are no kernels, whatever their shape."""
_BY_HEADS = re.compile(r"(query|key|value|qkv|q|k|v)(_proj)?", re.IGNORECASE)
"""Modules of attention whose kernels Flax shapes (fan_in, heads, head_dim)."""


def lora(
    model: Model,
    *,
    rank: int,
    key: Array,
    targets: Targets | None = None,
    alpha: float | None = None,
    rslora: bool = False,
    also: Predicate | None = None,
    output_axis: int = -1,
) -> Model:
    """The model with low-rank adapters on its kernels as its only parameters.

        W = W_0 + s A B,    A (fan_in, r) ~ N(0, 1/fan_in),    B (r, fan_out) = 0

    with s = α/r, or α/√r where `rslora` asks for it,

    for each kernel W_0 reshaped to (fan_in, fan_out); of a convolution, fan_in is height times
    width times channels. Of Flax's attention, queries, keys and values (in, heads, head_dim) have
    fan_out = heads times head_dim, and the output (heads, head_dim, out) has that as its fan_in.
    The function starts as the model's own. Everything else is frozen.

    Args:
        model: any model.
        rank: r, at least 1.
        key: a JAX random key, draws A.
        targets: which kernels. None for all leaves with at least two axes, but not biases (a leaf
            ``bias``, ``b`` or ``scale``), not embeddings, positions and tokens, by their usual
            names in a path, and not the head. As in PEFT's ``target_modules``: names of modules or
            their ends, such as ``["q_proj", "v_proj"]``; a module's name is the path of its kernel
            with dots, ``blocks.0.attention.q_proj``. Or a predicate on the path, such as that of
            `adapter_targets`.
        alpha: α; the rank when None.
        rslora: whether the scale is α/√r, which keeps large ranks learning.
        also: parameters to train in full beside the adapters, a predicate on the path, such as
            `head_only`.
        output_axis: the axis of the outputs: -1 in Flax, 0 in Equinox and PyTorch.

    Returns:
        A model whose parameters are ``{path: {"a": A, "b": B}}``, and ``{path: array}`` of what
        trains in full; `merge_lora` gives the kernels.

    Raises:
        ValueError: no kernel is chosen, a name fits none, or a chosen leaf has fewer than two axes;
            a rank above the smaller side of a kernel; something has an adapter and trains in full.

    Example:
        >>> base = Model(lambda w, x: x @ w["kernel"], {"kernel": jnp.ones((4, 3))})
        >>> model = lora(base, rank=2, key=jax.random.key(0))
        >>> jax.tree.map(jnp.shape, model.params)
        {'kernel': {'a': (4, 2), 'b': (2, 3)}}

    Source:
        Hu et al. 2021, "LoRA: Low-rank adaptation of large language models"; Kalajdzievski 2023,
        "A rank stabilization scaling factor for fine-tuning with LoRA".
    """
    scale = lora_scale(rank, alpha=alpha, rslora=rslora)
    apply_fn, params = check_model(model)
    check_key(key, optional=False)
    leaves = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    kernels = {path: leaves[path] for path in _adapted(leaves, targets)}
    if not kernels:
        raise ValueError(f"targets chooses no kernel; params has {', '.join(list(leaves)[:8])}.")
    adapters: dict[str, Any] = {path: leaf for path, leaf in leaves.items() if also and also(path)}
    if twice := [path for path in kernels if path in adapters]:
        raise ValueError(
            f"also: {', '.join(twice)} has an adapter; leave it out of one of the two."
        )
    for index, (path, leaf) in enumerate(kernels.items()):
        if leaf.ndim < 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"targets: {path} is {leaf.dtype} {leaf.shape}, not a kernel.")
        fan_in, fan_out = _sides(path, leaves, output_axis)
        check_integer(
            "rank", rank, at_least=1, at_most=min(fan_in, fan_out),
            hint=f"{path} is a {fan_in} by {fan_out} matrix; leave it out by targets.",
        )  # fmt: skip
        drawn = jax.random.normal(jax.random.fold_in(key, index), (fan_in, rank), leaf.dtype)
        a = drawn / jnp.sqrt(jnp.asarray(fan_in, leaf.dtype))
        adapters[path] = {"a": a, "b": jnp.zeros((rank, fan_out), leaf.dtype)}

    def apply(adapters: Params, x: Any) -> Any:
        return apply_fn(merge_lora(params, adapters, scale=scale, output_axis=output_axis), x)

    return Model(noted(apply, lambda: notes_of(apply_fn)), adapters)


def lora_scale(rank: int, *, alpha: float | None = None, rslora: bool = False) -> float:
    """The factor s of A B: α/r, or α/√r.

    Args:
        rank: r.
        alpha: α; the rank when None.
        rslora: whether the root of the rank divides.

    Returns:
        s.

    Raises:
        ValueError: a rank below 1, an α that is not positive.

    Example:
        >>> lora_scale(4, alpha=8), lora_scale(4, alpha=8, rslora=True)
        (2.0, 4.0)
    """
    check_known(alpha=alpha)
    check_integer("rank", rank, at_least=1)
    number = check_number("alpha", rank if alpha is None else alpha, above=0)
    return float(number) / (math.sqrt(rank) if rslora else rank)


def merge_lora(
    params: Params, adapters: Mapping[str, Any], *, scale: float = 1.0, output_axis: int = -1
) -> Params:
    """The parameters with the adapters added to their kernels: W_0 + s A B.

    Args:
        params: of the model that `lora` was given.
        adapters: the parameters of the model that it returned, trained or not; arrays that train in
            full replace those of `params`.
        scale: s, as it was there; see `lora_scale`.
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
    check_leaves("params", params)
    check_number("scale", scale)
    if not isinstance(adapters, Mapping):
        raise TypeError(f"adapters must be those of lora, by path; got {adapters!r}.")
    paths = leaf_paths(params)
    if unknown := [path for path in adapters if path not in paths]:
        raise ValueError(f"adapters: params has no {', '.join(unknown)}.")
    leaves, treedef = jax.tree.flatten(params)
    merged = []
    for path, leaf in zip(paths, leaves, strict=True):
        adapter = adapters.get(path, leaf)
        if not isinstance(adapter, Mapping):
            leaf = adapter
        else:
            shape = jnp.moveaxis(leaf, output_axis, -1).shape
            update = jnp.asarray(scale, leaf.dtype) * (adapter["a"] @ adapter["b"])
            leaf = leaf + jnp.moveaxis(update.reshape(shape), -1, output_axis)
        merged.append(leaf)
    return jax.tree.unflatten(treedef, merged)


def _is_kernel(path: str) -> bool:
    """Whether a leaf with two axes or more is a kernel, by its path."""
    parts = _SEPARATOR.split(path)
    looked_up = any(map(_LOOKED_UP.fullmatch, parts))
    return parts[0] != "head" and not looked_up and not _NO_KERNEL.fullmatch(parts[-1])


def _sides(path: str, leaves: Mapping[str, Any], output_axis: int) -> tuple[int, int]:
    """The fan_in and fan_out of a kernel.

    With three axes, the last two are outputs where its bias has their shape. Without a bias, the
    name of its module decides.
    """
    shape = leaves[path].shape
    fan_out = shape[output_axis]
    if len(shape) == 3 and output_axis in (-1, 2):
        parts = _SEPARATOR.split(path)
        bias = leaves.get(path.removesuffix(parts[-1]) + "bias")
        named = any(map(_BY_HEADS.fullmatch, parts[-2:]))
        if named if bias is None else bias.shape == shape[1:]:
            fan_out = shape[1] * shape[2]
    return math.prod(shape) // fan_out, fan_out


def matching_modules(names: Sequence[str], ends: str | Sequence[str]) -> list[str]:
    """The modules whose names have these ends, in their order.

    Args:
        names: of all modules with a kernel, with dots.
        ends: names or their last parts, as in PEFT's ``target_modules``.

    Returns:
        Some of the names.

    Raises:
        ValueError: an end that fits no module.

    Example:
        >>> matching_modules(["a.q", "a.v"], ["v"])
        ['a.v']
    """
    ends = [ends] if isinstance(ends, str) else list(ends)
    fitting = {end: [name for name in names if f".{name}".endswith(f".{end}")] for end in ends}
    if lost := [repr(end) for end, fits in fitting.items() if not fits]:
        listed = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
        raise ValueError(f"targets: {', '.join(lost)} fits no module; they end in {listed}.")
    return [name for name in names if any(name in fits for fits in fitting.values())]


def _adapted(leaves: Mapping[str, Any], targets: Targets | None) -> list[str]:
    """The paths of the kernels that get adapters."""
    if targets is None:
        return [path for path, leaf in leaves.items() if leaf.ndim > 1 and _is_kernel(path)]
    if callable(targets):
        return [path for path in leaves if targets(path)]
    modules: dict[str, list[str]] = {}  # a recurrent cell has two kernels
    for path, leaf in leaves.items():
        if leaf.ndim > 1 and not _NO_KERNEL.fullmatch(_SEPARATOR.split(path)[-1]):
            modules.setdefault(path.replace("/", ".").rpartition(".")[0], []).append(path)
    return [path for name in matching_modules(list(modules), targets) for path in modules[name]]
