"""The options that several commands have: each declared once, with its name, words and default.

A command says which groups it takes, and gives a reason for every option of theirs that it does not
have (`takes`). `jaxttp.cli._table` makes a table of that.
"""

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
PANELS = ("Task", "Training", "Goals", "Forecast", "Output")
"""Groups of the help, in their order."""
THRESHOLDS = "0.01,0.1,0.4"


class Declared(NamedTuple):
    """One option, as every command has it.

    Attributes:
        annotation: its type and its words, as typer reads them.
        default: what it is when it is not given.
        parse: what makes a value of `jaxttp.pipeline.Settings` of it; as it is when None.
    """

    annotation: Any
    default: Any = None
    parse: Callable[[Any], Any] | None = None

    @property
    def panel(self) -> str:
        """The group of the help that it stands in."""
        return panel_of(self.annotation)


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


def option(panel: str, words: str, *names: str, **more: Any) -> Any:
    """An option of a group of the help."""
    return typer.Option(*names, help=words, rich_help_panel=panel, **more)


def panel_of(annotation: Any) -> str:
    """The group that an annotated option stands in."""
    return annotation.__metadata__[0].rich_help_panel


# --- values out of words --------------------------------------------------------------------------


def parse_classes(text: str | None) -> tuple[int, ...] | int | None:
    """A number of classes, or labels separated by commas."""
    if text is None:
        return None
    numbers = parse_numbers("classes", text, "5 or 0,3,7")
    if any(number % 1 != 0 for number in numbers):
        raise ValueError(f"classes={text!r} must be whole numbers.")
    labels = tuple(int(number) for number in numbers)
    return labels if "," in text else labels[0]


def parse_samples(text: str) -> int | None:
    """A number of samples; None for all."""
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"samples_per_class={text!r} must be a whole number, or all.") from None


def parse_kernels(text: str) -> int | str:
    """A number, or a word for the forecast to judge."""
    try:
        return int(text)
    except ValueError:
        return text


def _parse_thresholds(text: str) -> tuple[float, ...]:
    return parse_numbers("thresholds", text, THRESHOLDS)


def _parse_targets(name: str) -> Callable[[str | None], tuple[float, ...]]:
    return lambda text: () if text is None else parse_numbers(name, text, "0.3,0.1")


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


# --- names for the shell to complete --------------------------------------------------------------


def _data_names() -> list[str]:
    from jaxttp.data import dataset_names

    return list(dataset_names())


def model_choices() -> list[str]:
    from jaxttp.models import model_names

    return list(model_names())


def _names(*names: str) -> Callable[[], list[str]]:
    return lambda: list(names)


# --- the vocabulary -------------------------------------------------------------------------------

MODELS = (
    "resnet18, resnet34, resnet50, resnet20, resnet32, vgg5, vit_tiny, vit_small, vit_base "
    "(default: by the data)."
)

TASK: dict[str, Declared] = {
    "data": Declared(
        Annotated[
            str,
            option(
                "Task",
                "digits (pre-trained ResNet); wine, breast_cancer, diabetes (MLP); FILE.csv with "
                "the label last, FILE.npz with x, y; mnist, cifar10, ..., tfds:NAME (needs the "
                "extra datasets); image_folder, ...",
                autocompletion=_data_names,
            ),
        ],
        "digits",
    ),
    "model": Declared(Annotated[str | None, option("Task", MODELS, autocompletion=model_choices)]),
    "weights": Declared(
        Annotated[
            Path | None,
            option("Task", "Of the model: a safetensors file (torchvision, timm, ...)."),
        ],
        parse=_text,
    ),
    "classes": Declared(
        Annotated[
            str | None, option("Task", "How many at random, or labels as 0,3,7 (default: all).")
        ],
        parse=parse_classes,
    ),
    "image_size": Declared(
        Annotated[int | None, option("Task", "Pixels a side (default: as in pre-training).")]
    ),
    "trainable": Declared(
        Annotated[
            str,
            option(
                "Task",
                "all, head, or lora (low-rank adapters).",
                autocompletion=_names("all", "head", "lora"),
            ),
        ],
        "all",
    ),
    "rank": Declared(Annotated[int, option("Task", "Of the adapters.")], 4),
    "split": Declared(Annotated[str | None, option("Task", "A part of the data, such as train.")]),
    "folder": Declared(
        Annotated[Path | None, option("Task", "The unpacked archive of the data.")], parse=_text
    ),
    "cache": Declared(
        Annotated[Path | None, option("Task", "Folder that keeps prepared samples.")], parse=_text
    ),
    "samples_per_class": Declared(
        Annotated[str, option("Task", "Samples of each class, or all.", metavar="<int|all>")],
        "30",
        parse_samples,
    ),
    "drop_missing": Declared(
        Annotated[
            bool, option("Task", "Leave out rows of a CSV with empty cells.", "--drop-missing")
        ],
        False,
    ),
    "one_hot": Declared(
        Annotated[bool, option("Task", "Make indicators of words in a CSV.", "--one-hot")], False
    ),
    "loss": Declared(
        Annotated[
            str | None,
            option(
                "Task",
                "cross_entropy (default for classes), squared_error (default for regression), "
                "binary_cross_entropy.",
                autocompletion=_names("cross_entropy", "squared_error", "binary_cross_entropy"),
            ),
        ]
    ),
    "seed": Declared(
        Annotated[int, option("Task", "Draws samples, fresh weights and batches.")], 0
    ),
}

TRAINING: dict[str, Declared] = {
    "learning_rate": Declared(Annotated[float, option("Training", "The schedule's peak.")], 0.005),
    "momentum": Declared(
        Annotated[float, option("Training", "Heavy-ball, from 0 to below 1.")], 0.0
    ),
    "nesterov": Declared(
        Annotated[bool, option("Training", "Make the momentum Nesterov's.", "--nesterov")], False
    ),
    "optimizer": Declared(
        Annotated[
            str,
            option(
                "Training",
                "sgd (gradient descent), adamw or adam.",
                autocompletion=_names("sgd", "adamw", "adam"),
            ),
        ],
        "sgd",
    ),
    "weight_decay": Declared(
        Annotated[float | None, option("Training", "Default: 0 of sgd, 0.01 of adamw.")]
    ),
    "schedule": Declared(
        Annotated[
            str,
            option(
                "Training",
                "constant, linear, cosine or warmup_cosine.",
                autocompletion=_names("constant", "linear", "cosine", "warmup_cosine"),
            ),
        ],
        "constant",
    ),
    "warmup": Declared(
        Annotated[int, option("Training", "Steps in which the rate rises from 0.")], 0
    ),
    "batch_size": Declared(
        Annotated[int | None, option("Training", "Samples a step (default: all).")]
    ),
    "steps": Declared(Annotated[int, option("Training", "The horizon T in steps.")], 150),
}

GOALS: dict[str, Declared] = {
    "thresholds": Declared(
        Annotated[str, option("Goals", "Shares of the drop that count as done.")],
        THRESHOLDS,
        _parse_thresholds,
    ),
    "target_loss": Declared(
        Annotated[str | None, option("Goals", "Losses to get below, as 0.3,0.1.")],
        parse=_parse_targets("target_loss"),
    ),
    "target_error": Declared(
        Annotated[str | None, option("Goals", "Errors (misclassified shares) to get below.")],
        parse=_parse_targets("target_error"),
    ),
    "metric": Declared(
        Annotated[
            str,
            option(
                "Goals",
                "What the thresholds are about: loss or error.",
                autocompletion=_names("loss", "error"),
            ),
        ],
        "loss",
    ),
}

FORECAST: dict[str, Declared] = {
    "relinearize": Declared(
        Annotated[
            str,
            option("Forecast", "Kernels rebuilt along the path (0: none), or auto."),
        ],
        "auto",
        parse_kernels,
    ),
    "seconds": Declared(Annotated[bool, option("Forecast", "Time a step on this device.")], True),
    "verify": Declared(
        Annotated[
            bool,
            option("Forecast", "Also train for real, beside the forecast.", "--verify"),
        ],
        False,
    ),
}

OUTPUT: dict[str, Declared] = {
    "output": Declared(
        Annotated[
            Path | None, option("Output", "Folder for the numbers (JSON) and the figures (PNG).")
        ]
    ),
    "as_json": Declared(
        Annotated[bool, option("Output", "Print the result as JSON, no table.", "--json")], False
    ),
    "quiet": Declared(
        Annotated[
            bool,
            option("Output", "No progress, no table: files, JSON, errors.", "--quiet", "-q"),
        ],
        False,
    ),
    "verbose": Declared(
        Annotated[
            bool, option("Output", "Say what is done and how long it takes.", "--verbose", "-v")
        ],
        False,
    ),
    "no_cache": Declared(
        Annotated[
            bool,
            option("Output", "Compile anew: neither use nor keep programs.", "--no-cache"),
        ],
        False,
    ),
}

SHARED = {**TASK, **TRAINING, **GOALS, **FORECAST, **OUTPUT}


# --- commands that take them ----------------------------------------------------------------------


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
        return Shell(**given, cache=not self.values.get("no_cache", True))


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
