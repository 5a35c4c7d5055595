"""Networks of Flax NNX, Flax Linen and Equinox as pure functions ``(params, x) -> outputs``.

Everything in this library rests on the Jacobian of single outputs, so row i of the outputs may
depend on row i of `x` alone. A network in training mode breaks that: BatchNorm mixes the samples of
its batch and dropout draws. Hence every adapter makes a copy in *evaluation* mode, by one rule:
an attribute of a module, or an argument of a call, that has one of the names below receives the
evaluation value, whatever was hard-coded there.

    True:  deterministic, use_running_average, inference
    False: train, training, is_training, update_stats

In Flax this holds for every submodule and its calls; in Equinox `inference` is set everywhere, as
by ``equinox.nn.inference_mode``, and the arguments are those of the outermost call. What still
mixes samples after that (statistics written by hand) is refused, with the reason, by
`check_per_sample`. Flax is imported when an adapter for it is called, not with this module.
"""

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._checks import is_concrete
from jaxttp._types import ApplyFn, Model, Params

_SWITCHES = {
    "deterministic": True,
    "use_running_average": True,
    "inference": True,
    "train": False,
    "training": False,
    "is_training": False,
    "update_stats": False,
}
_RANDOMNESS = ("rngs", "rng", "key")

_ADAPTERS = {
    "from_nnx(module)": ("flax.nnx", "Module"),
    "from_linen(module, variables)": ("flax.linen", "Module"),
    "from_equinox(module)": ("equinox", "Module"),
}


def from_nnx(module: Any) -> Model:
    """A Flax NNX module in evaluation mode, as a pure function and its parameters.

    The module is copied, neither mutated nor referred to: training it later changes nothing here.

    Args:
        module: an instance of ``flax.nnx.Module`` whose call takes x (N, ...) and returns (N, C).

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

    _check_kind("from_nnx(module)", module)
    network = nnx.view(
        nnx.clone(module), deterministic=True, use_running_average=True, raise_if_not_found=False
    )
    for _, part in list(nnx.iter_modules(network)):
        _switch_attributes(part)
        # NNX has no interceptors: an argument written into a parent's call, such as
        # self.norm(x, use_running_average=False), is only reachable from the class of the part.
        object.__setattr__(part, "__class__", _evaluation_class(type(part)))
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
        # The copy keeps this pure: what the call writes into its variables is lost with them.
        evaluated = nnx.merge(graphdef, nnx.from_flat_state(flat), copy=True)
        with linen.intercept_methods(_evaluation_interceptor):  # for nnx.bridge.ToNNX
            return evaluated(x)

    return Model(apply_fn, traverse_util.unflatten_dict(params))


def from_linen(module: Any, variables: Any) -> Model:
    """A Flax Linen module in evaluation mode, as a pure function and its parameters.

    Args:
        module: an instance of ``flax.linen.Module`` whose call takes x (N, ...) and returns (N, C).
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

    _check_kind("from_linen(module, variables)", module)
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

    def apply_fn(params: Params, x: Any) -> Any:
        with linen.intercept_methods(_evaluation_interceptor):
            try:
                return module.apply({**constants, "params": params}, x, mutable=False)
            except errors.ScopeCollectionNotFound as error:
                raise ValueError(
                    "variables lacks a collection that the network reads (BatchNorm reads its "
                    "running averages from 'batch_stats'); give from_linen all that module.init "
                    f"returned. Flax says: {error}"
                ) from error

    return Model(apply_fn, params)


def from_equinox(module: Any, state: Any = None) -> Model:
    """An Equinox module in inference mode, as a pure function and its parameters.

    Equinox modules act on one sample; `apply_fn` is the call under ``jax.vmap`` over x.

    Args:
        module: an instance of ``equinox.Module`` whose call takes one sample (...) and returns
            (C,). An argument `key` without a default receives None.
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
        ValueError: `module` has stateful layers and `state` was not given.

    Example:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> apply_fn, params = from_equinox(eqx.nn.MLP(3, 2, 8, depth=1, key=jax.random.key(0)))
        >>> apply_fn(params, jnp.ones((5, 3))).shape
        (5, 2)
        >>> params.layers[0].weight.shape
        (8, 3)
    """
    _check_kind("from_equinox(module)", module)
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
    signature = inspect.signature(network)

    def apply_fn(params: Params, x: Any) -> Any:
        evaluated = eqx.combine(params, constants)

        def evaluate(sample: Array) -> Any:
            given = (sample,) if state is None else (sample, jax.tree.map(jnp.asarray, state))
            args, kwargs = _evaluation_arguments(signature, given, {})
            outputs = evaluated(*args, **kwargs)
            return outputs if state is None else outputs[0]

        return jax.vmap(evaluate)(x)

    return Model(apply_fn, params)


def output_shape(
    apply_fn: ApplyFn, params: Params, x: Any, name: str = "apply_fn"
) -> tuple[int, int]:
    """The outputs' shape (N, C), from shapes alone: nothing is computed.

    Args:
        apply_fn: ``(params, x) -> outputs``.
        params: its parameters.
        x: inputs (N, ...), an array or a ``jax.ShapeDtypeStruct``; may be traced.
        name: what the messages call `apply_fn`.

    Returns:
        ``(N, C)``.

    Raises:
        TypeError: `x` is not an array.
        ValueError: `x` is a scalar, or the outputs are not one floating-point array (N, C).

    Example:
        >>> import jax.numpy as jnp
        >>> output_shape(lambda params, x: x @ params, jnp.ones((3, 2)), jnp.ones((5, 3)))
        (5, 2)
    """
    if not hasattr(x, "shape"):
        raise TypeError(f"x must be an array (N, ...); got {type(x).__name__}.")
    if len(x.shape) == 0:
        raise ValueError("x must have a row for every sample, (N, ...); got a scalar.")
    outputs = jax.eval_shape(apply_fn, params, x)
    if not isinstance(outputs, jax.ShapeDtypeStruct):
        raise ValueError(
            f"{name} must return one array (N, C); it returned a {type(outputs).__name__}. Select "
            f"the outputs, for instance with lambda params, x: {name}(params, x)[0]."
        )
    shape = outputs.shape
    if len(shape) != 2 or shape[0] != x.shape[0]:
        raise ValueError(
            f"{name} must return outputs (N, C), one row for every row of x; for x of shape "
            f"{x.shape} it returned {shape}. Flatten to (N, C), add an axis with "
            "outputs[:, None], or select outputs."
        )
    if not jnp.issubdtype(outputs.dtype, jnp.floating):
        raise ValueError(
            f"{name} must return floating-point outputs, such as logits; it returned "
            f"{outputs.dtype} of shape {shape}. Return what comes before the argmax or the cast."
        )
    return shape


def check_per_sample(apply_fn: ApplyFn, params: Params, x: Any, name: str = "apply_fn") -> None:
    """Raise `ValueError` unless outputs are (N, C) and each depends on its own sample alone.

    The network sees two batches of k = min(N, 8) rows with the same first row: ``x[:k]``, and k
    copies of ``x[0]``. One compiled program computes both, in the same order, so that row 0 agrees
    to the last bit unless it depends on its companions; the tolerance, sqrt(machine epsilon) and
    at most 1% of the largest output, is there for hardware that does not repeat itself. Where all
    rows of outputs are equal (a last layer that starts at zero) they tell nothing, and the
    gradients of row 0 are compared in their place.

    Shapes are always checked. There is nothing more to check, or no way to, for a single sample,
    traced values, arrays spread over several processes, and rows of `x` that are all equal.

    Args:
        apply_fn: ``(params, x) -> outputs``.
        params: its parameters.
        x: inputs (N, ...).
        name: what the messages call `apply_fn`.

    Raises:
        TypeError: see `output_shape`.
        ValueError: see `output_shape`; an output depends on the other samples of its batch.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.array([[1.0], [4.0]])
        >>> check_per_sample(lambda params, x: x * params, jnp.ones((1, 1)), x)
        >>> check_per_sample(lambda params, x: x - x.mean(0, keepdims=True), None, x)
        Traceback (most recent call last):
        ...
        ValueError: apply_fn: an output depends on the other samples of its batch...
    """
    rows, _ = output_shape(apply_fn, params, x, name)
    if rows < 2 or not all(map(_is_at_hand, jax.tree.leaves((params, x)))):
        return
    with jax.ensure_compile_time_eval():  # the values are known, also inside somebody's jit
        batch = jnp.asarray(x[:8])
        copies = jnp.broadcast_to(batch[:1], batch.shape)
        if bool(jnp.all(batch == copies)):
            return
        forward = jax.jit(apply_fn)
        outputs = forward(params, batch)
        if not is_concrete(outputs):  # `apply_fn` itself closes over traced values
            return
        mixed = _differ(outputs[0], forward(params, copies)[0])
        if not mixed and bool(jnp.all(outputs == outputs[:1])):
            gradient = eqx.filter_jit(eqx.filter_grad(functools.partial(_first_row, apply_fn)))
            mixed = _differ(gradient(params, batch), gradient(params, copies))
    if mixed:
        raise ValueError(
            f"{name}: an output depends on the other samples of its batch, as with BatchNorm in "
            "training mode; such a network has no per-example kernel. Put the normalisation into "
            "evaluation mode (running averages): jaxttp.from_nnx, from_linen and from_equinox do. "
            "Statistics over the batch that are computed by hand need a stored value instead."
        )


def _first_row(apply_fn: ApplyFn, params: Params, x: Array) -> Array:
    """A scalar of row 0 with a different weight on every output, so that none cancel."""
    outputs = apply_fn(params, x)[0]
    return jnp.sum(outputs * jnp.cos(jnp.arange(outputs.size, dtype=outputs.dtype)))


def _differ(batch: Any, copies: Any) -> bool:
    """Whether results for row 0 differ by more than rounding.

    NaN among copies of a row (a standard deviation of zero) where the batch is finite is a
    difference; NaN in the batch may come from another row's data, and is another check's business.
    """
    pairs = zip(jax.tree.leaves(batch), jax.tree.leaves(copies), strict=True)
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in pairs]
    size = max((np.where(np.isfinite(a), abs(a), 0).max(initial=0) for a, _ in pairs), default=0)
    for a, b in pairs:
        tolerance = min(float(jnp.finfo(a.dtype).eps) ** 0.5, 0.01)
        with np.errstate(invalid="ignore"):
            near = abs(a - b) <= tolerance * size
        if np.any(np.isfinite(a) & ~near):
            return True
    return False


def _is_at_hand(leaf: Any) -> bool:
    return is_concrete(leaf) and getattr(leaf, "is_fully_addressable", True)


def _check_kind(adapter: str, module: Any) -> None:
    """Raise `TypeError` unless `module` is an instance that `adapter` takes and can be called."""
    kind = module if isinstance(module, type) else type(module)
    found = None
    for other, (library, base) in _ADAPTERS.items():
        # An object of a library that was never imported does not exist.
        if library in sys.modules and issubclass(kind, getattr(sys.modules[library], base)):
            found = other
    library, base = _ADAPTERS[found or adapter]
    if found is None:
        raise TypeError(
            f"{adapter} takes an instance of {library}.{base}; got {kind.__name__}. A function of "
            "(params, x) needs no adapter: give it and its parameters as they are."
        )
    if isinstance(module, type):
        raise TypeError(f"module is the class {kind.__name__}; give an instance of it to {found}.")
    if found != adapter:
        raise TypeError(f"module {kind.__name__} is an instance of {library}.{base}: use {found}.")
    if not callable(module):
        raise TypeError(f"module {kind.__name__} has no __call__; give one that maps x to outputs.")


def _switch_attributes(module: Any) -> set[str]:
    """Set the switches among a module's own attributes to evaluation; return their names."""
    decided = {name for name in _SWITCHES if isinstance(vars(module).get(name), bool)}
    for name in decided:
        object.__setattr__(module, name, _SWITCHES[name])
    return decided


def _evaluation_arguments(
    signature: inspect.Signature,
    args: tuple,
    kwargs: dict[str, Any],
    decided: frozenset[str] | set[str] = frozenset(),
) -> tuple[list, dict[str, Any]]:
    """The arguments of a call, with every switch between training and evaluation on evaluation.

    A switch that is None stays None where an attribute of the module has `decided` it: Linen
    accepts one of the two, not both. A source of randomness is None unless it was given.
    """
    new_args, new_kwargs = list(args), dict(kwargs)
    for place, parameter in enumerate(signature.parameters.values()):
        name = parameter.name
        is_positional = place < len(args) and parameter.kind is not parameter.KEYWORD_ONLY
        given = args[place] if is_positional else kwargs.get(name, parameter.default)
        value = _SWITCHES.get(name)
        if name in _SWITCHES:
            undecided = given is None and name not in decided
            is_training = isinstance(given, bool | np.bool_) and bool(given) is not value
            replace = given is parameter.empty or undecided or is_training
        else:
            replace = name in _RANDOMNESS and given is parameter.empty
        if replace and is_positional:
            new_args[place] = value
        elif replace:
            new_kwargs[name] = value
    return new_args, new_kwargs


def _evaluation_interceptor(
    next_call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], context: Any
) -> Any:
    """Linen: every method of every submodule on its way, in evaluation mode.

    The module here is one that ``apply`` made for this call, not the user's.
    """
    decided = _switch_attributes(context.module)
    signature = inspect.signature(context.orig_method)
    new_args, new_kwargs = _evaluation_arguments(signature, args, kwargs, decided)
    return next_call(*new_args, **new_kwargs)


@functools.cache
def _evaluation_class(cls: type) -> type:
    """NNX: a subclass whose call overrides its caller's switches; `cls` if the call has none."""
    signature = inspect.signature(cls.__call__)
    if not {*_SWITCHES, *_RANDOMNESS} & {*signature.parameters}:
        return cls

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        new_args, new_kwargs = _evaluation_arguments(signature, (self, *args), kwargs)
        return cls.__call__(*new_args, **new_kwargs)

    # Flax is told again whether the class is a pytree: a subclass does not inherit that.
    is_pytree = getattr(cls, "_pytree__is_pytree", True)
    return type(cls)(cls.__name__, (cls,), {"__call__": call}, pytree=is_pytree)
