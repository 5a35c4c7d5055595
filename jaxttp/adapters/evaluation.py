"""One rule that puts modules into evaluation mode: the name of a switch decides its value."""

import collections
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
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


def call_inputs(signature: inspect.Signature, x: Any) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a module's call on samples: one input as it is, several by order or name.

    A tuple or list goes to the inputs of a call that needs more than one; a mapping goes by its
    keys where all of them are names of inputs. Switches and sources of randomness are no inputs.

    Args:
        signature: of the call, without `self`.
        x: samples, a pytree.

    Returns:
        Positional arguments, and those by name.

    Raises:
        TypeError: a call that needs several inputs, and something that does not hold so many.

    Example:
        >>> signature = inspect.signature(lambda ids, mask, train: ids)
        >>> call_inputs(signature, {"ids": 1, "mask": 2}), call_inputs(signature, (1, 2))
        (((), {'ids': 1, 'mask': 2}), ((1, 2), {}))
        >>> call_inputs(inspect.signature(lambda x: x), (1, 2))
        (((1, 2),), {})
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    inputs = [
        parameter
        for name, parameter in signature.parameters.items()
        if name not in {*_SWITCHES, *_RANDOMNESS} and parameter.kind in positional
    ]
    needed = [item.name for item in inputs if item.default is item.empty]
    names = {item.name for item in inputs if item.kind is not item.POSITIONAL_ONLY}
    if isinstance(x, Mapping) and x and {*needed} <= {*x} <= names:
        return (), dict(x)
    if len(needed) < 2:
        return (x,), {}
    if isinstance(x, tuple | list) and len(needed) <= len(x) <= len(inputs):
        return tuple(x), {}
    kind = f"one {type(x).__name__}"
    if isinstance(x, Mapping):
        kind = f"a mapping with {sorted(map(str, x))}"
    elif isinstance(x, tuple | list):
        kind = f"a {type(x).__name__} of {len(x)}"
    raise TypeError(
        f"x must hold the inputs of the module's call, {', '.join(needed)}: a dict with these "
        f"keys, or a tuple in this order; got {kind}."
    )


def evaluation_arguments(
    signature: inspect.Signature,
    args: tuple,
    kwargs: dict[str, Any],
    decided: frozenset[str] | set[str] = frozenset(),
) -> tuple[list, dict[str, Any]]:
    """The arguments of a call, with every switch between training and evaluation on evaluation.

    A switch that is None stays None where an attribute of the module has `decided` it: Linen
    accepts one of the two, not both. A source of randomness is None unless the caller passes it.
    """
    new_args, new_kwargs = list(args), dict(kwargs)
    for index, (name, parameter) in enumerate(signature.parameters.items()):
        is_positional = index < len(args) and parameter.kind is not parameter.KEYWORD_ONLY
        argument = args[index] if is_positional else kwargs.get(name, parameter.default)
        value = _SWITCHES.get(name)
        if name in _SWITCHES:
            undecided = argument is None and name not in decided
            is_training = isinstance(argument, bool | np.bool_) and bool(argument) is not value
            replace = argument is parameter.empty or undecided or is_training
        else:
            replace = name in _RANDOMNESS and argument is parameter.empty
        if replace and is_positional:
            new_args[index] = value
        elif replace:
            new_kwargs[name] = value
    return new_args, new_kwargs


class Evaluation:
    """Linen's interceptor: it runs every method of every submodule in evaluation mode.

    It records the layers by their paths in the network.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, str | None] = {}

    def __call__(
        self, next_call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], context: Any
    ) -> Any:
        """A call, with its switches on evaluation.

        The module of the context is made by ``apply`` for this call; it is not the user's.
        """
        decided = switch_attributes(context.module)
        self._seen[type(context.module), context.module.path] = describe(context.module)
        signature = inspect.signature(context.orig_method)
        new_args, new_kwargs = evaluation_arguments(signature, args, kwargs, decided)
        return next_call(*new_args, **new_kwargs)

    def notes(self) -> tuple[str, ...]:
        """The layers recorded so far: all of them, once the network is traced."""
        return counted(self._seen.values())


def describe(module: Any) -> str | None:
    """The effect of evaluation mode on one layer, in words; None where it changes nothing.

    Args:
        module: of any framework, its switches on evaluation.

    Example:
        >>> class Dropout:
        ...     rate, deterministic = 0.2, True
        >>> describe(Dropout())
        'dropout (0.2) off'
    """
    names = " ".join(kind.__name__ for kind in type(module).__mro__)
    if "BatchNorm" in names:
        return "BatchNorm on running averages"
    rate = getattr(module, "rate", getattr(module, "p", None))  # Flax and Keras; Equinox, PyTorch
    is_dropout = "Dropout" in names and isinstance(rate, int | float) and rate > 0
    return f"dropout ({rate:g}) off" if is_dropout else None


def counted(descriptions: Iterable[str | None]) -> tuple[str, ...]:
    """Descriptions with how often each occurs, the most frequent first.

    Example:
        >>> counted(["dropout (0.2) off", None, "dropout (0.2) off"])
        ('2 dropout (0.2) off',)
    """
    counts = collections.Counter(text for text in descriptions if text is not None)
    return tuple(f"{count} {text}" for text, count in counts.most_common())


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

    # A subclass does not inherit whether the class is a pytree.
    is_pytree = getattr(cls, "_pytree__is_pytree", True)
    return type(cls)(cls.__name__, (cls,), {"__call__": call}, pytree=is_pytree)
