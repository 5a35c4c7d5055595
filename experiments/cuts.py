"""What a dry run makes of a script's settings, said where each field is declared.

    steps: int = cuts.one(150)                       # one step
    rates: tuple[float, ...] = cuts.first((0.1, 1))  # only 0.1
    samples: int = cuts.few(32, 1000)                # at most 32 in a run of few samples
    widths: tuple[int, ...] = (10, 100)              # nothing is said: 100, the last of a grid

What is not said: of a grid (a tuple) the last and largest value remains, in a run of few samples
the first; settings in settings are cut as theirs say; everything else stays.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

Cut = Callable[[Any, bool, Callable[[Any], Any]], Any]
"""(value, whether of few samples, what cuts settings in settings) -> value."""

NONE: Any = dataclasses.MISSING


def _field(cut: Cut, default: Any, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"cut": cut, **more})


def grid(value: Any, small: bool, part: Callable[[Any], Any]) -> Any:
    """What becomes of a field of which nothing is said."""
    if isinstance(value, tuple) and value:
        value = value[0] if small else value[-1]
        return (part(value) if dataclasses.is_dataclass(value) else value,)
    return part(value) if dataclasses.is_dataclass(value) else value


def one(default: Any = NONE) -> Any:
    """One of them: a number becomes 1, those of a dictionary too, of a tuple the first remains."""

    def cut(value: Any, _small: bool, _part: Any) -> Any:
        if isinstance(value, dict):
            return dict.fromkeys(value, 1)
        return value[:1] if isinstance(value, tuple) else 1

    return _field(cut, default)


def first(default: Any = NONE) -> Any:
    """The first value of a grid, where the last would be extreme."""
    return _field(lambda value, _small, _part: value[:1], default)


def few(most: int, default: Any = NONE, *, otherwise: str | None = None) -> Any:
    """At most so many in a run of few samples; of a grid one value, as ever.

    Args:
        most: samples, or what else.
        default: of the field.
        otherwise: the field whose value stands in for None: an epoch of one step.
    """

    def cut(value: Any, small: bool, _part: Any) -> Any:
        if isinstance(value, tuple):
            return (min(value[0], most),) if small else value[-1:]
        return min(value, most) if small and value is not None else value

    return _field(cut, default, otherwise=otherwise)


def whole(default: Any = NONE, *, small: Any = None) -> Any:
    """No grid: it stays; in a run of few samples `small` stands for it, where that is given."""
    return _field(lambda value, is_small, _part: small if is_small and small else value, default)


def each(default: Any = NONE) -> Any:
    """Settings of which all are run, each cut; in a run of few samples the first."""

    def cut(value: Any, small: bool, part: Any) -> Any:
        return tuple(part(case) for case in (value[:1] if small else value))

    return _field(cut, default)


def points(default: Any = NONE) -> Any:
    """When to measure: at the start and after the one step; or how often: once."""
    return _field(lambda value, _small, _part: (0, 1) if isinstance(value, tuple) else 1, default)


def phases(default: Any = NONE) -> Any:
    """Pairs of an optimizer and its epochs: one each."""
    return _field(lambda value, _small, _part: tuple((name, 1) for name, _ in value), default)
