"""How a command takes the shared options: all of them, but for those it gives a reason against.

`_vocabulary` declares them, `jaxttp.cli._table` makes a table of who has which.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from jaxttp.cli._shell import Shell
from jaxttp.cli._vocabulary import PANELS, SHARED, Declared, panel_of

if TYPE_CHECKING:
    from jaxttp.pipeline import Settings

T = TypeVar("T")


class Instead(NamedTuple):
    """What a command has in place of an option that others share, and why.

    Attributes:
        reason: why it differs.
        default: its default.
        annotation: its own type and words; the shared ones when None.
    """

    reason: str
    default: Any = None
    annotation: Any = None


@dataclasses.dataclass(frozen=True)
class Given:
    """The shared options as they were given to a command.

    Attributes:
        values: by name, as typer read them.
    """

    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def parsed(self, name: str) -> Any:
        """One of them as a value of `Settings`.

        Raises:
            ValueError: words that are no such value.
        """
        value, parse = self.values[name], SHARED[name].parse
        return value if parse is None else parse(value)

    def settings(self, **own: Any) -> "Settings":
        """What is asked for, as a `jaxttp.pipeline.Settings`; see `make`."""
        from jaxttp.pipeline import Settings

        return self.make(Settings, **own)

    def make(self, kind: Callable[..., T], *, leave: Iterable[str] = (), **own: Any) -> T:
        """Settings from the options that have the names of their fields.

        Args:
            kind: a dataclass.
            leave: fields that stay as they are by default.
            **own: fields that the command says in another way.

        Returns:
            One of them.

        Raises:
            ValueError: words that are no such value.
        """
        fields = [field.name for field in dataclasses.fields(cast("Any", kind))]
        shared = [name for name in fields if name in self.values and name not in {*leave, *own}]
        return kind(**{name: self.parsed(name) for name in shared}, **own)

    @property
    def shell(self) -> Shell:
        """How the command talks."""
        given = {name: self.values[name] for name in ("output", "as_json", "quiet", "verbose")}
        several = self.values.get("distributed")
        return Shell(
            **given, cache=not self.values.get("no_cache", True), distributed=several,
            mesh=functools.partial(self.parsed, "mesh"),
        )  # fmt: skip


def because(reason: str, *names: str | Mapping[str, Declared]) -> dict[str, str]:
    """One reason for several options, or for groups of them."""
    several = [[one] if isinstance(one, str) else list(one) for one in names]
    return {name: reason for group in several for name in group}


class Taken(NamedTuple):
    """What a command takes of the vocabulary.

    Attributes:
        without: options it does not have, and why.
        instead: options that differ, and why.
    """

    without: Mapping[str, str]
    instead: Mapping[str, Instead]


def takes(
    *, without: Mapping[str, str] | None = None, instead: Mapping[str, Instead] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the whole vocabulary, but for what it says it has no use for.

    The command is called with a `Given` of them, and with its own parameters by name. Typer sees
    one signature, in the order of the groups of the help.

    Args:
        without: options that it does not have, with the reason.
        instead: options with another default or another form, with the reason.

    Returns:
        A decorator; what it makes has the attribute `taken`, a `Taken`.
    """
    taken = Taken(without or {}, instead or {})
    unknown = sorted({*taken.without, *taken.instead} - set(SHARED))
    if unknown:
        raise ValueError(f"takes: {', '.join(unknown)} are no shared options.")

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = {
            name: _parameter(name, declared, taken.instead.get(name))
            for name, declared in SHARED.items()
            if name not in taken.without
        }
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        several = sorted(
            (*shared.values(), *own), key=lambda one: PANELS.index(panel_of(one.annotation))
        )

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = Given({name: values.pop(name) for name in shared})
            command(given, **values)

        del run.__wrapped__  # typer would read that signature
        run.__annotations__ = {one.name: one.annotation for one in several}
        signature = inspect.Signature(several)
        setattr(run, "__signature__", signature)  # noqa: B010 - functions have none to type
        setattr(run, "taken", taken)  # noqa: B010
        return run

    return decorate


def _parameter(name: str, declared: Declared, other: Instead | None) -> inspect.Parameter:
    annotation, default = declared.annotation, declared.default
    if other is not None:
        annotation, default = other.annotation or annotation, other.default
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
