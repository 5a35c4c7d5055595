"""The options that several commands have, each declared once, and how a command takes them."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, cast

import typer

from jaxttp.cli._shell import Shell, parse_numbers

if TYPE_CHECKING:
    from jaxttp.pipeline import Settings

T = TypeVar("T")
PANELS = ("Task", "Training", "Targets", "Forecast", "Output")
"""Groups of the help, in their order."""
SEVERAL = list[str] | None


class Option(NamedTuple):
    """An option, shared by all commands.

    Attributes:
        panel: its group in the help.
        help: its help text.
        default: its default.
        type: as typer reads it; when None that of the default.
        parse: from the value that typer read to that of the pipeline.
        flags: the flags of a switch without an opposite.
    """

    panel: str
    help: str
    default: Any = None
    type: Any = None
    parse: Callable[[Any], Any] = lambda value: value
    flags: tuple[str, ...] = ()

    def annotation(self) -> Any:
        """Its annotation for typer."""
        kind = type(self.default) if self.type is None else self.type
        option = typer.Option(*self.flags, help=self.help, rich_help_panel=self.panel)
        return Annotated[kind, option]


# --- values out of text ---------------------------------------------------------------------------


def whole_numbers(name: str, text: str, example: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    numbers = parse_numbers(name, text, example)
    if not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"{name}={text!r} must be whole numbers.")
    return numbers


def _classes(text: str | None) -> tuple[int, ...] | int | None:
    """A number of classes, or labels separated by commas."""
    if text is None:
        return None
    labels = whole_numbers("classes", text, "5 or 0,3,7")
    return labels if "," in text else labels[0]


def _samples(text: str) -> Any:
    return None if text == "all" else _number_or_word(int)(text)


def _number_or_word(kind: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A number, or the text as it is, which the pipeline checks."""

    def parse(text: str | None) -> Any:
        try:
            return text if text is None else kind(text)
        except ValueError:
            return text

    return parse


def numbers(name: str, example: str = "0.3,0.1") -> Callable[[str | None], Any]:
    """Numbers with commas between them; None stays."""
    return lambda text: None if text is None else parse_numbers(name, text, example)


def names(text: str | None) -> list[str] | None:
    """Words with commas between them; None stays."""
    return None if text is None else [name.strip() for name in text.split(",")]


def _lists(name: str) -> Callable[[list[str] | None], tuple[float, ...]]:
    """Numbers with commas between them, or the option several times."""
    return lambda texts: tuple(n for text in texts or () for n in numbers(name)(text))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


# --- the vocabulary -------------------------------------------------------------------------------

TASK = {
    "data": Option(
        "Task",
        "digits, mnist, ...; FILE.csv, label last, or text, label; FILE.npz: x, y; image_folder; "
        "tfds:NAME.",
        "digits",
    ),
    "model": Option("Task", "resnet18/20/32/34/50, vgg5, vit_tiny/_small/_base, FOLDER.", type=str),
    "hidden": Option(
        "Task",
        "Hidden widths of the MLP for tables (64,64).",
        type=str,
        parse=lambda text: None if text is None else whole_numbers("hidden", text, "64,64"),
    ),
    "weights": Option("Task", "Of the model: a safetensors file.", type=Path, parse=_text),
    "classes": Option("Task", "How many at random, or labels as 0,3,7.", type=str, parse=_classes),
    "image_size": Option("Task", "Pixels a side (default: as in pre-training).", type=int),
    "max_length": Option("Task", "Tokens to keep of each text (default: all).", type=int),
    "trainable": Option("Task", "all, head, or lora (low-rank adapters).", "all"),
    "rank": Option("Task", "Of the adapters.", 4),
    "split": Option("Task", "A part of the data, such as train.", type=str),
    "folder": Option("Task", "The unpacked archive of the data.", type=Path, parse=_text),
    "samples_per_class": Option("Task", "Samples of each class, or all.", "30", parse=_samples),
    "label": Option("Task", "Column of a CSV, by name or number (default: last).", type=str),
    "loss": Option("Task", "cross_entropy (or binary_...); of targets squared_error.", type=str),
    "seed": Option("Task", "Draws samples, fresh weights and batches.", 0),
}
TRAINING = {
    "learning_rate": Option("Training", "The schedule's peak.", 0.005),
    "momentum": Option("Training", "Heavy-ball, from 0 to below 1.", 0.0),
    "nesterov": Option("Training", "Make the momentum Nesterov's.", False, flags=("--nesterov",)),
    "optimizer": Option("Training", "sgd (gradient descent), adamw or adam.", "sgd"),
    "weight_decay": Option("Training", "Default: 0 of sgd, 0.01 of adamw.", type=float),
    "schedule": Option("Training", "constant, linear, cosine or warmup_cosine.", "constant"),
    "warmup": Option("Training", "Steps in which the rate rises from 0.", 0),
    "batch_size": Option("Training", "Samples a step (default: all).", type=int),
    "steps": Option("Training", "The horizon T in steps.", 150),
}
GOALS = {
    "thresholds": Option(
        "Targets",
        "Fractions of the loss decrease left.",
        "0.01,0.1,0.4",
        parse=numbers("thresholds"),
    ),
    "target_loss": Option(
        "Targets", "Losses to get below, as 0.3,0.1.", type=SEVERAL, parse=_lists("target_loss")
    ),
    "target_error": Option(
        "Targets", "Errors to get below, as 0.1.", type=SEVERAL, parse=_lists("target_error")
    ),
    "metric": Option("Targets", "What the thresholds are about: loss or error.", "loss"),
}
FORECAST = {
    "relinearize": Option(
        "Forecast", "Kernels rebuilt (0: none), or auto.", "auto", parse=_number_or_word(int)
    ),
    "budget": Option(
        "Forecast", "Fraction of the FLOPs, 0.1, or auto.", "auto", parse=_number_or_word(float)
    ),
    "total_samples": Option("Forecast", "Samples trained on (default: those drawn).", type=int),
    "mesh": Option(
        "Forecast", "Devices that share kernels, or all.", type=str, parse=_number_or_word(int)
    ),
    "seconds": Option("Forecast", "Time a step on this device.", True),
    "verify": Option(
        "Forecast", "Also train for real, after the forecast.", False, flags=("--verify",)
    ),
}
OUTPUT = {
    "output": Option("Output", "Folder for the numbers (JSON) and the figures (PNG).", type=Path),
    "as_json": Option("Output", "Print the result as JSON, no table.", False, flags=("--json",)),
    "quiet": Option(
        "Output", "No progress, no table: files, JSON, errors.", False, flags=("--quiet", "-q")
    ),
    "verbose": Option("Output", "Say what is done.", False, flags=("--verbose", "-v")),
    "no_cache": Option(
        "Output", "Neither use nor keep compiled programs.", False, flags=("--no-cache",)
    ),
}
SHARED: Mapping[str, Option] = {**TASK, **TRAINING, **GOALS, **FORECAST, **OUTPUT}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options as they were given to a command.

    Attributes:
        values: by name, as typer read them.
        options: of the command, by name.
    """

    values: Mapping[str, Any]
    options: Mapping[str, Option]

    def __getitem__(self, name: str) -> Any:
        return self.options[name].parse(self.values[name])

    def settings(self, *, leave: Iterable[str] = ()) -> "Settings":
        """The options as a `jaxttp.pipeline.Settings`; see `make`."""
        from jaxttp.pipeline import Settings

        return self.make(Settings, leave=leave)

    def make(self, kind: Callable[..., T], *, leave: Iterable[str] = (), **own: Any) -> T:
        """Settings from the options that have the names of their fields.

        Args:
            kind: a dataclass.
            leave: fields that keep their defaults.
            **own: fields that the command computes itself.

        Raises:
            ValueError: a text that cannot be parsed.
        """
        fields = {field.name for field in dataclasses.fields(cast("Any", kind))}
        shared = (fields & set(self.values)) - {*leave, *own}
        return kind(**{name: self[name] for name in shared}, **own)

    @property
    def shell(self) -> Shell:
        """The command's output."""
        flags = {name: self.values[name] for name in ("output", "as_json", "quiet", "verbose")}
        return Shell(**flags, cache=not self.values.get("no_cache", True))


def takes(
    *without: str | Iterable[str], **own: Option
) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Give a command the shared options, without some, and options of its own.

    The command is called with an `Options`. Typer sees one signature, in the order of the help's
    groups.

    Args:
        without: options that it does not have, or groups of them.
        own: options of this command, or shared ones with another default or type.
    """
    missing: set[str] = set()
    for names in without:
        missing |= {names} if isinstance(names, str) else {*names}
    options = {name: option for name, option in SHARED.items() if name not in missing} | own

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        parameters = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=option.default,
                annotation=option.annotation(),
            )
            for name, option in sorted(options.items(), key=lambda o: PANELS.index(o[1].panel))
        ]  # fmt: skip

        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(Options(values, options))

        del run.__wrapped__  # typer would read that signature
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        setattr(run, "__signature__", inspect.Signature(parameters))  # noqa: B010
        return run

    return decorate
