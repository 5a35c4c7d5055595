"""Networks by name, for images of a given shape, as on the command line."""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx

from jaxttp._core.checks import check_choice, check_instance, check_integer
from jaxttp.models.convolutional import resnet18, resnet20, resnet32, resnet34, resnet50, vgg5
from jaxttp.models.transformers import vit_base, vit_small, vit_tiny


class Entry(NamedTuple):
    """A network of the catalog.

    Attributes:
        build: ``(num_classes, *, rngs, **options) -> module``.
        image_size: of its pre-training, pixels a side.
        family: "resnet", "vgg" or "vit".
    """

    build: Callable[..., nnx.Module]
    image_size: int
    family: str


MODELS: dict[str, Entry] = {
    "resnet18": Entry(resnet18, 224, "resnet"),
    "resnet34": Entry(resnet34, 224, "resnet"),
    "resnet50": Entry(resnet50, 224, "resnet"),
    "resnet20": Entry(resnet20, 32, "resnet"),
    "resnet32": Entry(resnet32, 32, "resnet"),
    "vgg5": Entry(vgg5, 32, "vgg"),
    "vit_tiny": Entry(vit_tiny, 224, "vit"),
    "vit_small": Entry(vit_small, 224, "vit"),
    "vit_base": Entry(vit_base, 224, "vit"),
}
"""Networks for images of three channels."""


def model_names() -> tuple[str, ...]:
    """The names for `make_model`.

    Example:
        >>> model_names()[0]
        'resnet18'
    """
    return tuple(MODELS)


def make_model(
    name: str, num_classes: int, *, rngs: nnx.Rngs, image_size: int | None = None, **options: Any
) -> nnx.Module:
    """A network of the catalog with random weights.

    Args:
        name: one of `model_names`.
        num_classes: number of outputs.
        rngs: Flax's random streams.
        image_size: pixels a side of the images, which a ViT must know; that of its pre-training
            when None.
        **options: any of the network's class.

    Returns:
        The network.

    Raises:
        ValueError: an unknown name, whatever the network refuses.

    Example:
        >>> build = lambda: make_model("vit_tiny", 5, image_size=32, rngs=nnx.Rngs(0))
        >>> nnx.eval_shape(build).positions.shape
        (1, 5, 192)
    """
    entry = MODELS[check_choice("model", name, MODELS)]
    check_integer("num_classes", num_classes, at_least=1)
    check_instance("rngs", rngs, nnx.Rngs, "flax.nnx, such as nnx.Rngs(0)")
    if entry.family == "vit":
        options = {"image_size": image_size or entry.image_size} | options
    return entry.build(num_classes, rngs=rngs, **options)
