"""Settings by names and numbers, shared by all pipelines and commands."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import optax

from jaxttp._core.checks import check_choice, check_integer, check_number, check_used
from jaxttp.forecast.training_setup import SCHEDULES, Hyperparameters
from jaxttp.losses.rule import Target, targets_of
from jaxttp.ntk.sharded import mesh_of

TRAINABLE = ("all", "head", "lora")
OPTIMIZERS = ("sgd", "adamw", "adam")
IN_WEIGHTS = "followed in the weights, on one device, and a mesh is one of kernels"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which data, by names and numbers: what every pipeline has.

    Attributes:
        data: a data set of `jaxttp.data.dataset_names`, "tfds:NAME" for a forecast, or a file for
            `jaxttp.data.load_table` (of a class all samples where it has fewer).
        seed: draws samples and fresh weights, and batches where there are any.
        label: the column of labels or targets in a CSV, by name or by number from 1; None for the
            last.

    Raises:
        ValueError: a seed that is none.
    """

    data: str = "digits"
    seed: int = 0
    label: str | int | None = None

    def __post_init__(self) -> None:
        check_integer("seed", self.seed, at_least=0, at_most=2**32 - 1)

    def pick(self, *names: str) -> dict[str, Any]:
        """Some of the settings as keywords."""
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(DataSettings):
    """What to forecast, by names and numbers; data as in `DataSettings`.

    Without a `model`, "digits" fine-tunes the shipped ResNet, pre-trained on the digits 0-4, on the
    digits 5-9 (unless `classes` says others); other data train a small MLP from random weights. The
    loss is "cross_entropy", "squared_error" or "binary_cross_entropy"; "squared_error" takes whole
    numbers of a table of one's own for targets, the others one-hot rows of an NPZ for classes.

    Attributes:
        samples_per_class: samples of each class; None for all. Regression takes all samples.
        classes: the labels to keep, or a number of random ones; None for all.
        loss: its name; None chooses cross-entropy for classes and squared error for regression.
        steps: the horizon T.
        thresholds: fractions of the loss's decrease that define training times.
        target_loss: losses to get below, besides the thresholds.
        target_error: likewise errors (fractions misclassified).
        learning_rate: eta > 0, the schedule's largest value.
        momentum: heavy-ball, in [0, 1); of "sgd".
        batch_size: samples a step; None for all of them.
        relinearize: kernels built after the first, or "auto" for as many as it takes.
        budget: what a forecast may cost, as a fraction of the training's FLOPs; "auto" for as many.
        total_samples: how many samples training will see, of which those drawn are a part; None for
            those drawn.
        sketch_dim: width of a random projection of the Jacobian; None for the exact kernel.
        model: a network for images of `jaxttp.models.model_names`, or a Hugging Face folder on disk
            with a language model, whose `data` is a CSV of texts (`jaxttp.data.load_texts`); None
            as above.
        hidden: widths of the hidden layers of that MLP; None for two of 64.
        weights: a safetensors file with the weights of `model`, but for its last layer, which is
            fresh; None for random weights, with batch norm at the averages of the samples.
        image_size: pixels a side that images are resized to for `model`; that of its pre-training
            when None. Without a `model` "digits" have 8, or 32 for a network pre-trained at 32.
        max_length: tokens to keep of each text for a language model; None for all.
        trainable: "all" weights, the "head" alone, or "lora": low-rank adapters alone.
        rank: of the adapters.
        split: a part of the data set, see `jaxttp.data.load_dataset`.
        folder: of the image files, likewise.
        optimizer: "sgd" (gradient descent), "adamw" or "adam", see `hyperparameters`.
        weight_decay: of "sgd" (added to the gradient) and of "adamw" (decoupled); None for 0 and
            0.01, as in PyTorch.
        nesterov: whether the momentum of "sgd" is Nesterov's.
        schedule: of the learning rate, by a name of `jaxttp.forecast.training_setup.SCHEDULES`.
        warmup: first steps in which the rate rises linearly from 0, and the schedule begins after
            them; 0 for none, or for 10 % of the horizon with "warmup_cosine".
        metric: which curve the thresholds are about, "loss" or "error".
        mesh: devices over which the rows of kernels are computed, a number or "all"; None for one.
            It changes where numbers are computed, and them by rounding alone.

    Raises:
        ValueError: no samples, no steps, a target that nothing can be below.
    """

    samples_per_class: int | None = 30
    classes: tuple[int, ...] | int | None = None
    loss: str | None = None
    steps: int = 150
    thresholds: tuple[float, ...] = (0.01, 0.1, 0.4)
    target_loss: tuple[float, ...] = ()
    target_error: tuple[float, ...] = ()
    learning_rate: float = 0.005
    momentum: float = 0.0
    batch_size: int | None = None
    relinearize: int | str = "auto"
    budget: float | str = "auto"
    total_samples: int | None = None
    sketch_dim: int | None = None
    model: str | None = None
    hidden: tuple[int, ...] | None = None
    weights: str | None = None
    image_size: int | None = None
    max_length: int | None = None
    trainable: str = "all"
    rank: int = 4
    split: str | None = None
    folder: str | None = None
    optimizer: str = "sgd"
    weight_decay: float | None = None
    nesterov: bool = False
    schedule: str = "constant"
    warmup: int = 0
    metric: str = "loss"
    mesh: int | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("steps", self.steps, at_least=1)
        if self.samples_per_class is not None:
            check_integer("samples_per_class", self.samples_per_class, at_least=1)
        self.targets()  # refuses what nothing can be below

    def targets(self) -> tuple[Target, ...]:
        """The losses and errors aimed at, losses first."""
        return targets_of(self.target_loss, self.target_error)


def check_training(settings: Settings) -> None:
    """Refuse how to train, and until when, where it is out of range or would do nothing.

    Args:
        settings: whose rate, momentum, optimiser, schedule, batches, horizon and targets are
            looked at, without the data.

    Raises:
        ValueError: a number out of range, an unknown name, or an option that would do nothing.

    Example:
        >>> check_training(Settings(optimizer="adamw", momentum=0.9))
        Traceback (most recent call last):
        ...
        ValueError: momentum=0.9 does nothing here: it is that of optimizer='sgd'. Leave it out.
    """
    check_choice("optimizer", settings.optimizer, OPTIMIZERS)
    if settings.optimizer != "sgd":
        check_unused(settings, ("momentum", "nesterov"), "it is that of optimizer='sgd'")
    elif not settings.momentum:
        check_unused(settings, ("nesterov",), "it is about momentum, which is 0")
    if settings.optimizer == "adam":
        check_unused(settings, ("weight_decay",), "choose optimizer='adamw' or 'sgd' for it")
    check_choice("schedule", settings.schedule, SCHEDULES)
    hint = f"It is a part of the horizon of {settings.steps} steps."
    check_integer("warmup", settings.warmup, at_least=0, at_most=settings.steps - 1, hint=hint)
    check_choice("metric", settings.metric, ("loss", "error"))
    if mesh_of(settings.mesh) is not None and settings.optimizer != "sgd":
        check_unused(settings, ("mesh",), f"optimizer={settings.optimizer!r} is {IN_WEIGHTS}")
    hyperparameters(settings)  # refuses what is out of range


def check_unused(settings: Any, names: Iterable[str], why: str) -> None:
    """Raise `ValueError` for settings that were changed and that nothing would read.

    Args:
        settings: a dataclass whose fields have defaults.
        names: fields that are not read.
        why: the reason, in words.

    Raises:
        ValueError: one of them is not its default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in names:
        value = getattr(settings, name)
        check_used(name, value, value == defaults[name], why)


KEYS = ("r", "alpha", "modules", "rslora")
ALL = "all-linear"
"""Every kernel of the blocks, by PEFT's word."""


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """Which adapters.

    Example:
        >>> print(LoraSettings(8, 16.0))
        LoRA r=8, α=16 on all-linear

    Attributes:
        rank: r.
        alpha: α; the rank when None.
        modules: ends of the names that Hugging Face gives the modules, or `ALL`.
        rslora: whether the scale is α/√r, in place of α/r.
    """

    rank: int = 8
    alpha: float | None = None
    modules: tuple[str, ...] | str = ALL
    rslora: bool = False

    def __post_init__(self) -> None:
        check_integer("lora: r", self.rank, at_least=1)
        if self.alpha is not None:
            check_number("lora: alpha", self.alpha, above=0.0)

    @classmethod
    def read(cls, text: str) -> "LoraSettings":
        """Adapters out of words.

        Args:
            text: ``key=value`` with commas between them, of `KEYS`; modules with + between them.

        Raises:
            ValueError: an unknown key, a key twice, or what is no value of it.

        Example:
            >>> LoraSettings.read("r=8,alpha=16,modules=q_proj+v_proj")
            LoraSettings(rank=8, alpha=16.0, modules=('q_proj', 'v_proj'), rslora=False)
        """
        pairs = [part.replace(" ", "").split("=") for part in text.split(",")]
        values = {key: value for key, value in (pair for pair in pairs if len(pair) == 2) if value}
        if len(values) < len(pairs) or not set(values) <= set(KEYS):
            raise ValueError(
                f"lora={text!r} must give each of {', '.join(KEYS)} at most once, with = and a "
                "value, such as r=8,alpha=16,modules=q_proj+v_proj."
            )
        try:
            rank = int(values.get("r", cls.rank))
            alpha = float(values["alpha"]) if "alpha" in values else None
        except ValueError as problem:
            raise ValueError(f"lora={text!r}: {problem}.") from problem
        rslora = check_choice("rslora", values.get("rslora", "no"), ("yes", "no")) == "yes"
        modules = values.get("modules", ALL)
        return cls(rank, alpha, modules if modules == ALL else tuple(modules.split("+")), rslora)

    def __str__(self) -> str:
        alpha = self.rank if self.alpha is None else self.alpha
        modules = self.modules if isinstance(self.modules, str) else ", ".join(self.modules)
        root = ", α/√r" if self.rslora else ""
        return f"LoRA r={self.rank}, α={alpha:g}{root} on {modules}"


def hyperparameters(settings: Settings) -> Hyperparameters:
    """Algorithm, rate, momentum, schedule, batches and horizon of settings, as sweeps have them.

    Its `optimizer()` is the optax transformation that forecast, training and timing take.

    Args:
        settings: which; their loss is left out, since it may depend on the data.

    Returns:
        A `Hyperparameters`.

    Raises:
        ValueError: numbers out of range, an unknown schedule.

    Example:
        >>> hyperparameters(Settings(learning_rate=0.1, warmup=2, steps=4)).rates().round(3)
        array([0.  , 0.05, 0.1 , 0.1 ])

    Source:
        "sgd" as in PyTorch: the decay is added to the gradient, before the momentum. AdamW as in
        Loshchilov and Hutter 2019.
    """
    schedule = warmed(settings.schedule, settings.warmup, settings.steps)
    return Hyperparameters(
        settings.learning_rate, settings.momentum, settings.batch_size, schedule,
        steps=settings.steps, algorithm="nesterov" if settings.nesterov else settings.optimizer,
        weight_decay=settings.weight_decay,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def warmed(name: str, warmup: int, steps: int) -> Any:
    """A schedule of `Hyperparameters` that begins after some steps of warm-up.

    Args:
        name: of `SCHEDULES`; "warmup_cosine" is "cosine" with a warm-up of its own.
        warmup: steps in which the rate rises linearly from 0; 0 leaves the schedule as it is.
        steps: the horizon, which the schedule's rest fills.

    Returns:
        The name, or a function from the step to the factor of the rate.

    Example:
        >>> [round(float(warmed("linear", 2, 6)(t)), 3) for t in range(6)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    """
    if not warmup:
        return name
    name = name.removeprefix("warmup_")
    parts = [optax.linear_schedule(0.0, 1.0, warmup), SCHEDULES[name](steps - warmup)]
    schedule = optax.join_schedules(parts, [warmup])
    schedule.__name__ = f"{name}, warm-up {warmup}"  # type: ignore[attr-defined]
    return schedule
