"""The options that several commands have: each declared once, with its name, words and default."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from jaxttp.cli._shell import parse_numbers

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


def option(panel: str, words: str, *names: str, **more: Any) -> Any:
    """An option of a group of the help."""
    return typer.Option(*names, help=words, rich_help_panel=panel, **more)


def flag(panel: str, words: str, *names: str) -> Any:
    """A switch of a group of the help, which needs no word for its type."""
    return option(panel, words, *names, metavar="")


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


def parse_widths(text: str | None) -> tuple[int, ...] | None:
    """Whole numbers separated by commas."""
    if text is None:
        return None
    numbers = parse_numbers("hidden", text, "64,64")
    if any(number % 1 != 0 for number in numbers):
        raise ValueError(f"hidden={text!r} must be whole numbers.")
    return tuple(int(number) for number in numbers)


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


def parse_mesh(text: str | None) -> int | str | None:
    """A number of devices, or all of them."""
    if text is None or text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"mesh={text!r} must be a number of devices, or all.") from None


def _parse_budget(text: str) -> float | str:
    """A number, or a word for the forecast to judge."""
    try:
        return float(text)
    except ValueError:
        return text


def _parse_thresholds(text: str) -> tuple[float, ...]:
    return parse_numbers("thresholds", text, THRESHOLDS)


def _parse_targets(name: str) -> Callable[[list[str] | None], tuple[float, ...]]:
    """Numbers with commas between them, or the option several times."""

    def parse(texts: list[str] | None) -> tuple[float, ...]:
        return tuple(n for text in texts or () for n in parse_numbers(name, text, "0.3,0.1"))

    return parse


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

MODELS = "resnet18/20/32/34/50, vgg5, vit_tiny/_small/_base, FOLDER."

TASK: dict[str, Declared] = {
    "data": Declared(
        Annotated[
            str,
            option(
                "Task",
                "digits, mnist, ...; FILE.csv, label last, or text, label; FILE.npz: x, y; "
                "image_folder; tfds:NAME \\[default: digits]",
                show_default=False,
                autocompletion=_data_names,
            ),
        ],
        "digits",
    ),
    "model": Declared(Annotated[str | None, option("Task", MODELS, autocompletion=model_choices)]),
    "hidden": Declared(
        Annotated[
            str | None,
            option("Task", "Hidden widths of the MLP for tables (default: 64,64)."),
        ],
        parse=parse_widths,
    ),
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
    "max_length": Declared(
        Annotated[int | None, option("Task", "Tokens to keep of each text (default: all).")]
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
    "samples_per_class": Declared(
        Annotated[str, option("Task", "Samples of each class, or all.", metavar="<int|all>")],
        "30",
        parse_samples,
    ),
    "label": Declared(
        Annotated[str | None, option("Task", "Column of a CSV, by name or number (default: last).")]
    ),
    "fill": Declared(
        Annotated[
            str | None,
            option(
                "Task",
                "Fill empty cells of a CSV: median, mean, most_frequent.",
                autocompletion=_names("median", "mean", "most_frequent"),
            ),
        ]
    ),
    "drop_missing": Declared(
        Annotated[
            bool, flag("Task", "Leave out rows of a CSV with empty cells.", "--drop-missing")
        ],
        False,
    ),
    "one_hot": Declared(
        Annotated[bool, flag("Task", "Make indicators of words in a CSV.", "--one-hot")], False
    ),
    "drop": Declared(
        Annotated[
            list[str] | None,
            option("Task", "Column of a CSV to leave out; several times.", metavar="<str>"),
        ],
        parse=lambda names: tuple(names or ()),
    ),
    "loss": Declared(
        Annotated[
            str | None,
            option(
                "Task",
                "cross_entropy (or binary_...); of targets squared_error.",
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
        Annotated[bool, flag("Training", "Make the momentum Nesterov's.", "--nesterov")], False
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
        Annotated[
            list[str] | None, option("Goals", "Losses to get below, as 0.3,0.1.", metavar="<str>")
        ],
        parse=_parse_targets("target_loss"),
    ),
    "target_error": Declared(
        Annotated[
            list[str] | None,
            option("Goals", "Errors (misclassified shares) to get below.", metavar="<str>"),
        ],
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
            option("Forecast", "Kernels rebuilt (0: none), or auto."),
        ],
        "auto",
        parse_kernels,
    ),
    "budget": Declared(
        Annotated[str, option("Forecast", "Share of a training's cost, 0.1, or auto.")],
        "auto",
        _parse_budget,
    ),
    "total_samples": Declared(
        Annotated[int | None, option("Forecast", "Samples trained on (default: those drawn).")]
    ),
    "seconds": Declared(Annotated[bool, flag("Forecast", "Time a step on this device.")], True),
    "verify": Declared(
        Annotated[
            bool,
            flag("Forecast", "Also train for real, beside the forecast.", "--verify"),
        ],
        False,
    ),
}

DEVICES: dict[str, Declared] = {
    "mesh": Declared(
        Annotated[
            str | None,
            option("Forecast", "Devices that share kernels' rows.", metavar="<int|all>"),
        ],
        parse=parse_mesh,
    ),
    "distributed": Declared(
        Annotated[
            str | None,
            option("Forecast", "Join processes: auto, or HOST:PORT,COUNT,INDEX.", metavar="<str>"),
        ],
    ),
}

OUTPUT: dict[str, Declared] = {
    "output": Declared(
        Annotated[
            Path | None, option("Output", "Folder for the numbers (JSON) and the figures (PNG).")
        ]
    ),
    "as_json": Declared(
        Annotated[bool, flag("Output", "Print the result as JSON, no table.", "--json")], False
    ),
    "quiet": Declared(
        Annotated[
            bool,
            flag("Output", "No progress, no table: files, JSON, errors.", "--quiet", "-q"),
        ],
        False,
    ),
    "verbose": Declared(
        Annotated[
            bool, flag("Output", "Say what is done and how long it takes.", "--verbose", "-v")
        ],
        False,
    ),
    "no_cache": Declared(
        Annotated[
            bool,
            flag("Output", "Compile anew: neither use nor keep programs.", "--no-cache"),
        ],
        False,
    ),
}

SHARED = {**TASK, **TRAINING, **GOALS, **FORECAST, **DEVICES, **OUTPUT}
