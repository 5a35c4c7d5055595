"""A task from its name: the network before training, its samples and its loss."""

import dataclasses
from pathlib import Path
from typing import Any, TypeGuard

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_integer
from jaxttp._core.types import Model
from jaxttp.adapters import from_nnx
from jaxttp.data import (
    Dataset,
    Preprocessing,
    dataset_names,
    has_texts,
    imagenet_preprocessing,
    is_table,
    load_dataset,
    load_table,
    load_texts,
    load_tokenizer,
    preprocess,
    select,
    vit_preprocessing,
)
from jaxttp.losses import get_loss
from jaxttp.models import (
    MLP,
    calibrate_batch_norm,
    freeze,
    fresh_head,
    head_only,
    load_pretrained,
    load_transformer,
    load_weights,
    lora,
    make_model,
    model_names,
)
from jaxttp.models.catalog import MODELS
from jaxttp.pipeline.settings import TRAINABLE, Settings, check_training, check_unused

HIDDEN = (64, 64)
"""Widths of the MLP that learns data without a model of their own."""
SHIPPED_SIZES = {8: "digits-resnet", 32: "digits-resnet-32"}
"""The shipped network by the side of its images."""
_FOR_IMAGES = ("weights", "image_size", "hidden", "split", "folder", "label")
_TARGETS = {"squared_error": True, "cross_entropy": False, "binary_cross_entropy": False}
"""Whether a loss that is asked for takes a table's labels for numbers."""
REGRESSION = "a regression has no classes and takes all samples"


@dataclasses.dataclass(frozen=True)
class Task:
    """A network before training, its data, and its loss.

    Attributes:
        model: the network, and what of it is trained.
        x: samples (N, ...); tokens as a dict of "ids" and "mask" (N, T).
        y: integer labels (N,) or targets (N, C).
        loss: its name.
        description: all of it in words.
        note: of a table, which column holds the labels; None of other data.
    """

    model: Model
    x: Any
    y: np.ndarray
    loss: str
    description: str
    note: str | None = None

    def __repr__(self) -> str:
        return "\n".join(filter(None, (self.description, self.note)))


def build_task(settings: Settings) -> Task:
    """The network before training and its samples, from their names.

    Args:
        settings: data, samples a class, loss, network, scale of the head, seed; how they say to
            train is looked at too (`check_training`), so that nothing is loaded for what is wrong.

    Returns:
        A `Task`.

    Raises:
        ValueError: unknown names, too few samples or classes, a loss that does not fit the data,
            weights that do not fit, options of a `model` without one.
        FileNotFoundError: no such weights, or a folder that lacks a file.
        ImportError: the data need the extra `datasets`.

    Example:
        >>> task = build_task(Settings(samples_per_class=2))
        >>> task.x.shape, task.y.max().item()
        ((10, 8, 8, 1), 4)
    """
    _check_names(settings)
    check_training(settings)
    check_choice("trainable", settings.trainable, TRAINABLE)
    if settings.trainable != "lora":
        check_unused(settings, ("rank",), "it is that of the adapters of trainable='lora'")
    samples_key, weights_key = jax.random.split(jax.random.key(settings.seed))
    dataset, note = _samples(settings, samples_key)
    loss, outputs = _loss_and_outputs(settings, dataset)
    network, label = _untrained_network(settings, dataset, outputs, weights_key)
    model = from_nnx(network)
    if settings.trainable == "head":
        model, label = freeze(model, head_only), f"{label}, head alone trained"
    elif settings.trainable == "lora":
        model = lora(model, rank=settings.rank, key=jax.random.fold_in(weights_key, 1))
        label += f", adapters of rank {settings.rank} alone trained"
    description = f"{label}, {len(dataset)} samples, {loss}"
    return Task(model, dataset.x, dataset.y, loss, description, note)


def _check_names(settings: Settings) -> None:
    """Refuse unknown names, and options without the model that they are for."""
    if not (settings.data.startswith("tfds:") or is_table(settings.data)):
        check_choice("data", settings.data, dataset_names())
    for width in settings.hidden or ():
        check_integer("hidden", width, at_least=1)
    if is_language_folder(settings.model):
        check_unused(settings, _FOR_IMAGES, f"{settings.model} is a language model")
        return
    hint = "it cuts texts for a language model, model=FOLDER (--model)"
    check_unused(settings, ("max_length",), hint)
    if settings.model is not None or settings.data == "digits":
        check_unused(settings, ("hidden",), "it is that of the MLP for data without a model")
    if settings.model is not None:
        hint = "Or a folder on this machine with a language model."
        check_choice("model", settings.model, model_names(), hint=hint)
        return
    hint = f"it needs a model, one of {', '.join(model_names())}"
    check_unused(settings, ("weights",), hint)
    if settings.data == "digits" and settings.image_size is not None:
        check_choice("image_size", settings.image_size, tuple(SHIPPED_SIZES))
    else:
        check_unused(settings, ("image_size",), hint)
    if has_texts(settings.data):
        raise ValueError(
            f"data={settings.data!r} has a column of texts, which needs a language model: "
            "model=FOLDER (--model on the command line), a Hugging Face folder on this machine."
        )


def is_language_folder(model: str | None) -> TypeGuard[str]:
    """Whether a model's name is that of a folder, and no network's.

    Example:
        >>> is_language_folder("resnet18"), is_language_folder(None)
        (False, False)
    """
    return model is not None and model not in MODELS and Path(model).is_dir()


def _samples(settings: Settings, key: Array) -> tuple[Dataset, str | None]:
    """The samples, and a note on the columns of a table and its omitted rows."""
    preprocessing = _preprocessing(settings)
    if is_language_folder(settings.model):
        tokenizer = load_tokenizer(settings.model)
        whole = load_texts(settings.data, tokenizer, max_length=settings.max_length)
        return _selected(settings, whole, key)
    if is_table(settings.data):
        hint = f"it is for images, and {settings.data} is a table"
        check_unused(settings, ("split", "folder"), hint)
        targets = _TARGETS.get(settings.loss or "")
        whole = load_table(settings.data, targets=targets, label=settings.label)
        dataset, note = _selected(settings, whole, key)
        return (dataset if preprocessing is None else _images(dataset, preprocessing)), note
    check_unused(settings, ("label",), "it is for a CSV of your own")
    options: dict[str, Any] = settings.pick("split", "folder") | {"preprocessing": preprocessing}
    if settings.data == "diabetes":
        return _selected(settings, load_dataset("diabetes", **options), key)[0], None
    options |= {"classes": settings.classes, "per_class": settings.samples_per_class, "key": key}
    if settings.data == "digits" and settings.model is None and settings.classes is None:
        options["classes"] = (5, 6, 7, 8, 9)  # the others pre-trained the network
    return load_dataset(settings.data, **options), None


def _images(dataset: Dataset, preprocessing: Preprocessing) -> Dataset:
    """A table of images, preprocessed like those of the data sets."""
    x = dataset.x[..., None] if dataset.x.ndim == 3 else dataset.x
    if x.ndim != 4 or x.shape[3] not in (1, 3) or x.min() < 0 or x.max() > 1:
        raise ValueError(
            "model takes images: an NPZ with x (N, H, W) or (N, H, W, C), of 1 or 3 channels, in "
            "[0, 1] or uint8. Of other data leave the model out (an MLP); "
            f"{dataset.name} has x {dataset.x.shape} from {x.min():g} to {x.max():g}."
        )
    return preprocess(dataclasses.replace(dataset, x=x), preprocessing)


def _selected(settings: Settings, dataset: Dataset, key: Array) -> tuple[Dataset, str]:
    """Rows of a whole data set, and a note on the omitted ones."""
    note = dataset.description
    if dataset.num_classes is None:
        if settings.classes is not None:
            raise ValueError(f"classes={settings.classes!r}: {dataset.name} is a regression.")
        check_unused(settings, ("samples_per_class",), REGRESSION)
        return dataset, note
    per_class, options = settings.samples_per_class, {"classes": settings.classes, "key": key}
    selected = select(dataset, per_class=per_class, fewer=True, **options)
    whole = len(dataset) if settings.classes is None else len(select(dataset, **options))
    if len(selected) < whole:
        note += f" {len(selected)} of {whole} rows: at most {per_class} a class; "
        note += "--samples-per-class all keeps them"
    return selected, note


def _preprocessing(settings: Settings) -> Preprocessing | None:
    if settings.model is None and settings.image_size is not None:
        return Preprocessing(settings.image_size)  # of digits
    if settings.model is None or is_language_folder(settings.model):
        return None
    entry = MODELS[settings.model]
    size = entry.image_size if settings.image_size is None else settings.image_size
    check_integer("image_size", size, at_least=1)
    return (vit_preprocessing if entry.family == "vit" else imagenet_preprocessing)(size)


def _loss_and_outputs(settings: Settings, dataset: Dataset) -> tuple[str, int]:
    """The name of the loss, and the number of outputs."""
    if settings.loss is not None:
        get_loss(settings.loss)
    if dataset.num_classes is None:
        loss = settings.loss or "squared_error"
        if loss != "squared_error":
            raise ValueError(f"loss={loss!r} needs classes, and {dataset.name} is a regression.")
        return loss, dataset.y.shape[1]
    if dataset.num_classes == 1:
        raise ValueError(
            f"{dataset.name} has a single class, {dataset.class_names[0]!r}; a network learns to "
            "tell two or more apart."
        )
    loss = settings.loss or "cross_entropy"
    if loss == "binary_cross_entropy":
        if (classes := dataset.num_classes) != 2:
            raise ValueError(f"loss={loss!r} needs two classes; {dataset.name} has {classes}.")
        return loss, 1
    return loss, dataset.num_classes


def _untrained_network(
    settings: Settings, dataset: Dataset, outputs: int, key: Array
) -> tuple[nnx.Module, str]:
    """The network before training, and its description."""
    name = settings.model
    if is_language_folder(name):
        network = load_transformer(name, outputs=outputs, key=key)
        # The network checks tokens by value, before it is traced.
        jax.eval_shape(lambda: network(dataset.x["ids"], dataset.x["mask"]))
        length = dataset.x["ids"].shape[1]
        label = f"{Path(name).resolve().name} ({network.shape.family}) with a fresh head"
        return network, f"{label} on {dataset.name}, up to {length} tokens"
    if name is not None:
        rngs, size = nnx.Rngs(params=key), dataset.x.shape[1]
        network = make_model(name, outputs, image_size=size, rngs=rngs)
        if settings.weights is not None:
            network = load_weights(network, settings.weights, head=False)
            origin = f"with the weights of {Path(settings.weights).name} and a fresh head"
        else:
            if MODELS[name].family != "vit":
                network = calibrate_batch_norm(network, dataset.x)
            origin = "from random weights"
        source = dataset.name if is_table(settings.data) else settings.data
        return network, f"{name} {origin} on {source} at {size}x{size}"
    if settings.data == "digits":
        digits = "5-9" if settings.classes is None else ", ".join(dataset.class_names)
        size = dataset.x.shape[1]
        label = f"ResNet pre-trained on digits 0-4, fine-tuned on digits {digits}"
        label += f" at {size}x{size}" if settings.image_size else ""
        return fresh_head(load_pretrained(SHIPPED_SIZES[size]), outputs, key=key), label
    hidden = HIDDEN if settings.hidden is None else settings.hidden
    sizes = (int(np.prod(dataset.x.shape[1:])), *hidden, outputs)
    network = MLP(sizes, rngs=nnx.Rngs(params=key))
    return network, f"MLP {'-'.join(map(str, sizes))} from random weights on {dataset.name}"
