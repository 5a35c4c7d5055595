"""One rule that puts modules into evaluation mode: what a switch is called decides its value."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

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


def switch_attributes(module: Any) -> set[str]:
    """Set the switches among a module's own attributes to evaluation; return their names."""
    decided = {name for name in _SWITCHES if isinstance(vars(module).get(name), bool)}
    for name in decided:
        object.__setattr__(module, name, _SWITCHES[name])
    return decided


def evaluation_arguments(
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


def evaluation_interceptor(
    next_call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], context: Any
) -> Any:
    """Linen: every method of every submodule on its way, in evaluation mode.

    The module here is one that ``apply`` made for this call, not the user's.
    """
    decided = switch_attributes(context.module)
    signature = inspect.signature(context.orig_method)
    new_args, new_kwargs = evaluation_arguments(signature, args, kwargs, decided)
    return next_call(*new_args, **new_kwargs)


@functools.cache
def evaluation_class(cls: type) -> type:
    """NNX: a subclass whose call overrides its caller's switches; `cls` if the call has none."""
    signature = inspect.signature(cls.__call__)
    if not {*_SWITCHES, *_RANDOMNESS} & {*signature.parameters}:
        return cls

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        new_args, new_kwargs = evaluation_arguments(signature, (self, *args), kwargs)
        return cls.__call__(*new_args, **new_kwargs)

    # Flax is told again whether the class is a pytree: a subclass does not inherit that.
    is_pytree = getattr(cls, "_pytree__is_pytree", True)
    return type(cls)(cls.__name__, (cls,), {"__call__": call}, pytree=is_pytree)
