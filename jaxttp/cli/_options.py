"""The options that several commands have, each declared once."""

from pathlib import Path
from typing import Annotated

import typer

LOSSES = ("cross_entropy", "squared_error", "binary_cross_entropy")


def _data_names() -> list[str]:
    from jaxttp.data import dataset_names

    return list(dataset_names())


def _model_names() -> list[str]:
    from jaxttp.models import model_names

    return list(model_names())


Data = Annotated[
    str,
    typer.Option(
        help="digits (pre-trained ResNet); wine, breast_cancer, diabetes (MLP); a file of your own "
        "(MLP): CSV with the label last, NPZ with x and y; with the extra "
        "`datasets`: mnist, cifar10, cifar100, caltech_birds2011, cars196, stanford_dogs, "
        "oxford_flowers102, dtd, food101, tfds:NAME; from a folder: mit67, fgvc_aircraft, "
        "minc2500, image_folder.",
        autocompletion=_data_names,
    ),
]
BundledData = Annotated[
    str,
    typer.Option(
        help="digits, wine, breast_cancer, diabetes; a file of your own: CSV with the label last, "
        "NPZ with x and y.",
        autocompletion=lambda: ["digits", "wine", "breast_cancer", "diabetes"],
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="resnet18, resnet34, resnet50, resnet20, resnet32, vgg5, vit_tiny, vit_small, "
        "vit_base (default: by the data).",
        autocompletion=_model_names,
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(help="A safetensors file for the model (torchvision, timm, Hugging Face)."),
]
SamplesPerClass = Annotated[int, typer.Option(help="Samples a class.")]
Loss = Annotated[
    str | None,
    typer.Option(
        help="cross_entropy, squared_error or binary_cross_entropy (default: by the data).",
        autocompletion=lambda: list(LOSSES),
    ),
]
LearningRate = Annotated[float, typer.Option(help="Of gradient descent.")]
Momentum = Annotated[float, typer.Option(help="Heavy-ball momentum in [0, 1).")]
BatchSize = Annotated[int | None, typer.Option(help="Samples a step (default: all).")]
Steps = Annotated[int, typer.Option(help="The horizon T in steps.")]
Thresholds = Annotated[
    str, typer.Option(help="Shares of the loss's drop that define training times.")
]
Seed = Annotated[int, typer.Option(help="Draws samples, fresh weights and batches.")]
Seconds = Annotated[bool, typer.Option(help="Time a step on this device.")]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="Also train for real, and put it beside the forecast."),
]
Output = Annotated[
    Path | None, typer.Option(help="Folder for the numbers (JSON) and the figures (PNG).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, no table.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress and no table: files, JSON, errors alone.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say what is done and how long it takes.")
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", help="Compile anew: neither use nor keep compiled programs.")
]

THRESHOLDS = "0.01,0.1,0.4"
