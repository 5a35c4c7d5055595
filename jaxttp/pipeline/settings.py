"""What is asked for, by names and numbers: one vocabulary for every pipeline and command."""

import dataclasses

from jaxttp._core.checks import check_choice, check_integer, check_number
from jaxttp.forecast.training_setup import SCHEDULES
from jaxttp.ntk.sharded import mesh_of
from jaxttp.pipeline._unused import check_unused
from jaxttp.pipeline.goals import aims

TRAINABLE = ("all", "head", "lora")
OPTIMIZERS = ("sgd", "adamw", "adam")
IN_WEIGHTS = "followed in the weights, on one device, and a mesh is one of kernels"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to forecast, by names and numbers.

    Attributes:
        data: a data set of `jaxttp.data.dataset_names`, "tfds:NAME", or a file for
            `jaxttp.data.load_table` (of a class all samples where it has fewer). Without a `model`,
            "digits" fine-tunes the shipped ResNet, pre-trained on the digits 0-4, on the digits
            5-9; the others train a small MLP from random weights.
        samples_per_class: images of each class; None for all. Regression takes all samples.
        loss: "cross_entropy", "squared_error" or "binary_cross_entropy"; None chooses cross-entropy
            for classes and squared error for regression. "squared_error" takes whole numbers of a
            table of one's own for targets, the others one-hot rows of an NPZ for classes.
        learning_rate: eta > 0, the schedule's largest value.
        momentum: heavy-ball, in [0, 1); of "sgd".
        batch_size: samples a step; None for all of them.
        steps: the horizon T.
        thresholds: shares of the loss's drop that define training times.
        relinearize: kernels built after the first, or "auto" for as many as it takes.
        budget: what a forecast may cost, as a share of the training by count; "auto" for a tenth,
            and a minute or two in any case.
        total_samples: how many samples training will see, of which those drawn are a part; None for
            those drawn.
        sketch_dim: width of a random projection of the Jacobian; None for the exact kernel.
        head_scale: size of the fresh head's initial outputs.
        seed: draws the samples, the fresh weights and the batches.
        classes: the labels to keep, or a number of random ones; None for all, and for 5-9 of the
            digits without a `model`.
        model: a network for images of `jaxttp.models.model_names`, or a Hugging Face folder on disk
            with a language model, whose `data` is a CSV of texts (`jaxttp.data.load_texts`); None
            as under `data`.
        hidden: widths of the hidden layers of that MLP; None for two of 64.
        weights: a safetensors file with the weights of `model`, but for its last layer, which is
            fresh; None for random weights, with batch norm at the averages of the samples.
        image_size: pixels a side that images are resized to for `model`; that of its pre-training
            when None.
        max_length: tokens to keep of each text for a language model; None for all.
        trainable: "all" weights, the "head" alone, or "lora": low-rank adapters alone.
        rank: of the adapters.
        split: a part of the data set, see `jaxttp.data.load_dataset`.
        folder: of the image files, likewise.
        optimizer: "sgd" (gradient descent), "adamw" or "adam", as `make_optimizer` makes them.
        weight_decay: of "sgd" (added to the gradient) and of "adamw" (decoupled); None for 0 and
            0.01, as in PyTorch.
        nesterov: whether the momentum of "sgd" is Nesterov's.
        schedule: of the learning rate, by a name of `jaxttp.forecast.training_setup.SCHEDULES`.
        warmup: first steps in which the rate rises linearly from 0, and the schedule begins after
            them; 0 for none, or for a tenth of the horizon with "warmup_cosine".
        target_loss: losses to get below, beside the thresholds.
        target_error: likewise errors (shares misclassified).
        metric: which curve the thresholds are about, "loss" or "error".
        label: the column of labels or targets in a CSV, by name or by number from 1; None for the
            last.
        fill: what stands in missing features of a CSV, the column's "median", "mean" or
            "most_frequent" value (of words always that); None refuses them.
        drop_missing: whether rows of a CSV in which a value is missing are left out.
        one_hot: whether columns of words in a CSV become indicators.
        drop: columns of a CSV to leave out, such as an id, by name or by number from 1.
        mesh: devices over which the rows of kernels are computed, a number or "all"; None for one.
            It changes where numbers are computed, and them by rounding alone.
    """

    data: str = "digits"
    samples_per_class: int | None = 30
    loss: str | None = None
    learning_rate: float = 0.005
    momentum: float = 0.0
    batch_size: int | None = None
    steps: int = 150
    thresholds: tuple[float, ...] = (0.01, 0.1, 0.4)
    relinearize: int | str = "auto"
    budget: float | str = "auto"
    total_samples: int | None = None
    sketch_dim: int | None = None
    head_scale: float = 1.0
    seed: int = 0
    classes: tuple[int, ...] | int | None = None
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
    target_loss: tuple[float, ...] = ()
    target_error: tuple[float, ...] = ()
    metric: str = "loss"
    label: str | int | None = None
    fill: str | None = None
    drop_missing: bool = False
    one_hot: bool = False
    drop: tuple[str | int, ...] = ()
    mesh: int | str | None = None


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
    check_number("learning_rate", settings.learning_rate, above=0.0)
    check_number("momentum", settings.momentum, at_least=0.0, below=1.0)
    check_integer("steps", settings.steps, at_least=1)
    if settings.batch_size is not None:
        check_integer("batch_size", settings.batch_size, at_least=1)
    if settings.optimizer != "sgd":
        check_unused(settings, ("momentum", "nesterov"), "it is that of optimizer='sgd'")
    elif not settings.momentum:
        check_unused(settings, ("nesterov",), "it is about momentum, which is 0")
    if settings.weight_decay is not None:
        if settings.optimizer == "adam":
            check_unused(settings, ("weight_decay",), "choose optimizer='adamw' or 'sgd' for it")
        check_number("weight_decay", settings.weight_decay, at_least=0.0)
    check_choice("schedule", settings.schedule, SCHEDULES)
    remedy = f"It is a part of the horizon of {settings.steps} steps."
    check_integer("warmup", settings.warmup, at_least=0, at_most=settings.steps - 1, remedy=remedy)
    check_choice("metric", settings.metric, ("loss", "error"))
    if mesh_of(settings.mesh) is not None and settings.optimizer != "sgd":
        check_unused(settings, ("mesh",), f"optimizer={settings.optimizer!r} is {IN_WEIGHTS}")
    aims(settings)  # refuses what nothing can be below
