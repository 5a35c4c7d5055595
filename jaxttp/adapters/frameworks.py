"""Networks of Flax NNX, Flax Linen and Equinox as `Model`s, in evaluation mode."""

import functools
import inspect
import operator
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from jaxttp._core.types import Model, Params, noted
from jaxttp.adapters.evaluation import (
    Evaluation,
    call_inputs,
    counted,
    describe,
    evaluation_arguments,
    evaluation_class,
    switch_attributes,
)
from jaxttp.adapters.inputs import ADAPTERS, library_of


def from_nnx(module: Any) -> Model:
    """A Flax NNX module in evaluation mode, as a pure function and its parameters.

    The module is copied, neither mutated nor referred to: training it later changes nothing here.

    Args:
        module: an instance of ``flax.nnx.Module`` whose call takes x (N, ...) and returns (N, C);
            or several inputs, such as ids and a mask, which x holds by name or in order.

    Returns:
        ``Model(apply_fn, params)``. `params` holds every floating-point ``nnx.Param`` (subclasses
        such as ``nnx.LoRAParam`` included) as nested dicts of arrays whose keys are strings, the
        items of a list ``"0", "1", ...``; joined by dots they are names for a safetensors file. A
        parameter that two layers share is there once, under the first of its names. All other
        variables (running averages, random streams) are frozen in `apply_fn`.

    Raises:
        TypeError: `module` is not an instance of ``flax.nnx.Module``, or cannot be called.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> rngs = nnx.Rngs(0)
        >>> layers = [nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5)]
        >>> apply_fn, params = from_nnx(nnx.Sequential(*layers))
        >>> jax.tree.map(jnp.shape, params)
        {'layers': {'0': {'bias': (4,), 'kernel': (3, 4)}, '1': {'bias': (4,), 'scale': (4,)}}}
        >>> apply_fn(params, jnp.ones((5, 3))).shape
        (5, 4)
    """
    from flax import linen, nnx, traverse_util

    _check_kind("flax.nnx", module)
    if not isinstance(module, nnx.Module):
        raise TypeError(f"module must be an nnx.Module; got {type(module).__name__}.")
    network = nnx.view(
        nnx.clone(module), deterministic=True, use_running_average=True, raise_if_not_found=False
    )
    evaluation, described = Evaluation(), []
    for _, part in list(nnx.iter_modules(network)):
        switch_attributes(part)
        described.append(describe(part))
        # NNX has no interceptors: an argument in a parent's call, such as
        # self.norm(x, use_running_average=False), is only reachable from the class of the part.
        object.__setattr__(part, "__class__", evaluation_class(type(part)))
    signature = inspect.signature(module.__call__)
    graphdef, state = nnx.split(network)
    variables: dict[tuple, Any] = dict(nnx.to_flat_state(state))
    names, params = {}, {}
    for path, variable in variables.items():
        if not isinstance(variable, nnx.Param):
            continue
        value = jax.tree.map(jnp.asarray, variable.get_raw_value())
        if all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(value)):
            names[path] = tuple(str(part) for part in path)
            params[names[path]] = value
            variables[path] = variable.replace(None)  # keeps the metadata, lets go of the array

    def apply_fn(params: Params, x: Any) -> Any:
        flat = dict(variables)
        for path, keys in names.items():
            flat[path] = variables[path].replace(functools.reduce(operator.getitem, keys, params))
        # The copy keeps this pure: the call writes into variables that are dropped.
        evaluated = nnx.merge(graphdef, nnx.from_flat_state(flat), copy=True)
        with linen.intercept_methods(evaluation):  # for nnx.bridge.ToNNX
            args, kwargs = call_inputs(signature, x)
            return evaluated(*args, **kwargs)

    noted(apply_fn, lambda: counted(described) + evaluation.notes())
    return Model(apply_fn, traverse_util.unflatten_dict(params))


def from_linen(module: Any, variables: Any) -> Model:
    """A Flax Linen module in evaluation mode, as a pure function and its parameters.

    Args:
        module: an instance of ``flax.linen.Module`` whose call takes x (N, ...) and returns (N, C);
            or several inputs, such as ids and a mask, which x holds by name or in order.
        variables: all that ``module.init`` returned or training left, such as
            ``{"params": ..., "batch_stats": ...}``.

    Returns:
        ``Model(apply_fn, params)``. `params` is ``variables["params"]`` as nested dicts, without
        boxes of partitioning metadata; the other collections are frozen in `apply_fn`.

    Raises:
        TypeError: `module` is not an instance of ``flax.linen.Module``, or `variables` no mapping.
        ValueError: `variables` lacks "params", or (by `apply_fn`) a collection that `module` reads.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import linen as nn
        >>> module = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=False)])
        >>> variables = module.init(jax.random.key(0), jnp.ones((1, 3)))
        >>> apply_fn, params = from_linen(module, variables)
        >>> apply_fn(params, jnp.ones((5, 3))).shape
        (5, 4)
    """
    from flax import core, errors, linen

    _check_kind("flax.linen", module)
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"variables must be the dict of collections that module.init returns; got "
            f"{type(variables).__name__}."
        )
    if "params" not in variables:
        raise ValueError(
            f"variables has no collection 'params', only {sorted(map(str, variables))}; give all "
            "that module.init returned, or {'params': params} if there is nothing else."
        )
    module = module.clone(parent=None)
    constants = core.unfreeze(linen.meta.unbox(variables))
    params = constants.pop("params")
    evaluation, signature = Evaluation(), inspect.signature(module.__call__)

    def apply_fn(params: Params, x: Any) -> Any:
        args, kwargs = call_inputs(signature, x)
        with linen.intercept_methods(evaluation):
            try:
                variables = {**constants, "params": params}
                return module.apply(variables, *args, mutable=False, **kwargs)
            except errors.ScopeCollectionNotFound as error:
                raise ValueError(
                    "variables lacks a collection that the network reads (BatchNorm reads its "
                    "running averages from 'batch_stats'); give from_linen all that module.init "
                    f"returned. Flax says: {error}"
                ) from error

    return Model(noted(apply_fn, evaluation.notes), params)


def from_equinox(module: Any, state: Any = None) -> Model:
    """An Equinox module in inference mode, as a pure function and its parameters.

    Equinox modules act on one sample; `apply_fn` is the call under ``jax.vmap`` over x.

    Args:
        module: an instance of ``equinox.Module`` whose call takes one sample (...) and returns
            (C,); or, without `state`, several inputs, which x holds by name or in order. An
            argument `key` without a default receives None.
        state: the ``equinox.nn.State`` of a module with stateful layers such as
            ``equinox.nn.BatchNorm``, whose running averages are read from it; the module is then
            called as ``module(sample, state)``, and the state that it returns is dropped.

    Returns:
        ``Model(apply_fn, params)``. `params` is the module with None for all but its
        floating-point arrays (``equinox.partition(module, equinox.is_inexact_array)``): a pytree
        of arrays for JAX and optax, with the same attributes as the module. Everything else is
        frozen in `apply_fn`. A layer that sits in two attributes is two sets of parameters, as
        everywhere in Equinox; ``equinox.nn.Shared`` ties them.

    Raises:
        TypeError: `module` is not an instance of ``equinox.Module``, or cannot be called; `state`
            is not an ``equinox.nn.State``.
        ValueError: `module` has stateful layers and `state` is missing.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> apply_fn, params = from_equinox(eqx.nn.MLP(3, 2, 8, depth=1, key=jax.random.key(0)))
        >>> apply_fn(params, jnp.ones((5, 3))).shape
        (5, 2)
        >>> params.layers[0].weight.shape
        (8, 3)
    """
    _check_kind("equinox", module)
    if state is not None and not isinstance(state, eqx.nn.State):
        raise TypeError(f"state must be an equinox.nn.State; got {type(state).__name__}.")
    leaves = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, eqx.nn.StateIndex))
    if state is None and any(isinstance(leaf, eqx.nn.StateIndex) for leaf in leaves):
        raise ValueError(
            "module has stateful layers (such as equinox.nn.BatchNorm) and state is missing; make "
            "both with `module, state = equinox.nn.make_with_state(Network)(...)`, and call "
            "from_equinox(module, state) with the state that training left."
        )
    network = eqx.nn.inference_mode(eqx.nn.delete_init_state(module))
    params, constants = eqx.partition(network, eqx.is_inexact_array)
    state = jax.tree.map(jnp.asarray, state)  # a copy: writing to a State makes it unusable
    # The signature of the class, as `equinox.filter_jit` hides that of the instance from Python
    # 3.13 on; without `self`.
    signature = inspect.signature(type(network).__call__)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    layers = jax.tree.leaves(network, is_leaf=lambda node: hasattr(node, "inference"))
    described = tuple(map(describe, layers))

    def apply_fn(params: Params, x: Any) -> Any:
        evaluated = eqx.combine(params, constants)

        def evaluate(sample: Any) -> Any:
            inputs = (sample, jax.tree.map(jnp.asarray, state)), {}
            if state is None:
                inputs = call_inputs(signature, sample)
            args, kwargs = evaluation_arguments(signature, *inputs)
            outputs = evaluated(*args, **kwargs)
            return outputs if state is None else outputs[0]

        return jax.vmap(evaluate)(x)

    return Model(noted(apply_fn, lambda: counted(described)), params)


def _check_kind(library: str, module: Any) -> None:
    """Raise `TypeError` unless `module` is an instance of this library and can be called."""
    kind = module if isinstance(module, type) else type(module)
    actual = library_of(kind)
    if actual is None:
        raise TypeError(
            f"module must be an instance of {library}.Module; got {kind.__name__}. A function of "
            "(params, x) needs no adapter: give it and its parameters as they are."
        )
    if actual != library:
        raise TypeError(f"module {kind.__name__} is of {actual}: {ADAPTERS[actual]}.")
    if kind is module:
        raise TypeError(f"module is the class {kind.__name__}; give an instance of it.")
    if not callable(module):
        raise TypeError(f"module {kind.__name__} has no __call__; give one that maps x to outputs.")
