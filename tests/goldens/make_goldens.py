"""Golden outputs of the reference implementations in PyTorch, on tiny random networks.

The test suite needs no PyTorch: it reads what this script wrote. It computes all outputs again from
the stored weights and prints how far they are from the stored ones:

    python -m venv torch-environment
    torch-environment/bin/pip install torch torchvision timm transformers peft safetensors
    torch-environment/bin/python tests/goldens/make_goldens.py

The stored numbers are those of torch 2.15.0, torchvision 0.29.2, timm 1.0.31, transformers 5.24.0
and peft 0.21.2 on a CPU. `NAME.safetensors` holds an image network's weights as its library names
them, and `outputs.safetensors` inputs (N, H, W, C) and outputs in float32 and float64. Below
``transformers/`` each language model is a folder as ``save_pretrained`` writes it, and
`outputs.safetensors` holds ids and masks (N, T), padded on either side, and outputs in float64.
``preprocessing.safetensors`` holds images and what torchvision's transforms make of them,
``positions.safetensors`` the positions of timm-vit for images of other sizes, by timm. All
parameters and running averages were drawn at random, so that none can be left out unnoticed.

transformers computes RMSNorm and rotary angles in float32 whatever the dtype of the weights. For
the float64 outputs its float32 is float64 while a network is built and called.
"""

import contextlib
import pathlib
from unittest import mock

import numpy as np
import peft
import timm
import torch
import torchvision
import transformers
from PIL import Image
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

FOLDER = pathlib.Path(__file__).parent
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class TorchvisionResNet(torchvision.models.ResNet):
    """torchvision's network (its blocks, `_make_layer` and forward) with narrow stages."""

    def __init__(self, block, layers, planes, num_classes):
        torch.nn.Module.__init__(self)
        self._norm_layer = torch.nn.BatchNorm2d
        self.inplanes, self.dilation, self.groups, self.base_width = 8, 1, 1, 64
        self.conv1 = torch.nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(8)
        self.relu = torch.nn.ReLU()
        self.maxpool = torch.nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._make_layer(block, planes[0], layers[0])
        self.layer2 = self._make_layer(block, planes[1], layers[1], stride=2)
        self.layer3 = self._make_layer(block, planes[2], layers[2], stride=2)
        self.layer4 = self._make_layer(block, planes[3], layers[3], stride=2)
        self.avgpool = torch.nn.AdaptiveAvgPool2d((1, 1))
        self.fc = torch.nn.Linear(planes[3] * block.expansion, num_classes)


def image_networks():
    """The networks by the names of their files."""
    resnet, depths = torchvision.models.resnet, (1, 2, 1, 1)
    return {
        "torchvision-basic": TorchvisionResNet(resnet.BasicBlock, depths, (8, 12, 16, 20), 5),
        "torchvision-bottleneck": TorchvisionResNet(resnet.Bottleneck, depths, (4, 6, 8, 10), 5),
        "timm-basic": timm.models.ResNet(
            timm.models.resnet.BasicBlock, depths, 5, stem_width=8, channels=(8, 12, 16, 20)
        ),
        "timm-vit": timm.models.VisionTransformer(
            img_size=32, patch_size=8, embed_dim=12, depth=2, num_heads=3, mlp_ratio=20 / 12,
            num_classes=5,
        ),
    }  # fmt: skip


def image_outputs(inputs):
    """Outputs of every network in both precisions."""
    x, arrays = torch.tensor(inputs).permute(0, 3, 1, 2), {}
    for name, model in image_networks().items():
        weights = load_tensors(FOLDER / f"{name}.safetensors")
        if hasattr(model, "from_pretrained"):  # knows the names that its weights once had
            model = model.from_pretrained(None, config=model.config, state_dict=weights)
        else:
            model.load_state_dict(weights)
        model.eval()
        for dtype in (torch.float32, torch.float64):
            with torch.no_grad():
                outputs = model.to(dtype)(x.to(dtype))
            suffix = str(dtype).removeprefix("torch.")
            arrays[f"{name}.{suffix}"] = getattr(outputs, "logits", outputs).numpy()
    return arrays


def preprocessed(images):
    """What torchvision's transforms make of an image, (H, W, C), by the names of both."""
    modes, transforms = torchvision.transforms.InterpolationMode, torchvision.transforms
    pipelines = {
        "imagenet": (32, modes.BILINEAR, *IMAGENET),
        "vit": (31, modes.BICUBIC, (0.5,) * 3, (0.5,) * 3),
        "grey": (30, modes.BILINEAR, (0.1,), (0.5,)),
    }
    arrays = {}
    for shape in ("wide", "tall"):
        for name, (size, mode, mean, std) in pipelines.items():
            picture = Image.fromarray(images[shape]).convert("L" if name == "grey" else "RGB")
            steps = (
                transforms.Resize(size, mode),
                transforms.CenterCrop(28),
                transforms.ToTensor(),
                transforms.Normalize(mean, std),
            )
            arrays[f"{name}.{shape}"] = transforms.Compose(steps)(picture).permute(1, 2, 0).numpy()
    return arrays


def positions():
    """Positions of timm-vit (a grid of 4 x 4) on smaller and larger grids."""
    embedding = load_tensors(FOLDER / "timm-vit.safetensors")["pos_embed"]
    resample = timm.layers.resample_abs_pos_embed
    return {f"{side}": resample(embedding, [side, side]).numpy() for side in (2, 3, 7)}


@contextlib.contextmanager
def double_precision():
    """What transformers writes as float32 is float64."""
    single, double = torch.float32, torch.float64
    tensors = mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
    with mock.patch.multiple(torch, float32=double, float=double), tensors:
        torch.set_default_dtype(double)
        try:
            yield
        finally:
            torch.set_default_dtype(single)


def logits(model, samples, side):
    """Logits; of a decoder at the positions that the tokens have without padding."""
    ids, mask = (torch.tensor(samples[f"{side}.{part}"]).long() for part in ("ids", "mask"))
    arguments = {"input_ids": ids, "attention_mask": mask}
    if model.config.model_type not in ("bert", "roberta"):
        arguments["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(**arguments).logits.numpy()


def language_outputs(samples):
    """Outputs of the network of every folder, padded on either side, and with its adapter."""
    arrays = {}
    for folder in sorted(path.parent for path in FOLDER.glob("transformers/*/config.json")):
        config = transformers.AutoConfig.from_pretrained(folder)
        network = getattr(transformers, config.architectures[0])
        single = network.from_pretrained(folder, dtype=torch.float32)
        with double_precision():
            model = network(single.config).double().eval()
            model.load_state_dict(single.state_dict())
            for side in ("right", "left"):
                if f"{folder.name}.{side}" in samples:
                    arrays[f"{folder.name}.{side}"] = logits(model, samples, side)
            if (folder / "adapter").exists():
                adapted = peft.PeftModel.from_pretrained(model, folder / "adapter").double().eval()
                arrays[f"{folder.name}.adapter"] = logits(adapted, samples, "right")
    return arrays


def main():
    """Print the largest difference from each stored array."""
    for path, compute in (
        ("outputs", lambda stored: image_outputs(stored["x"])),
        ("preprocessing", preprocessed),
        ("positions", lambda _: positions()),
        ("transformers/outputs", language_outputs),
    ):
        stored = load_file(FOLDER / f"{path}.safetensors")
        for name, array in compute(stored).items():
            print(f"{path} {name}: {np.abs(array - stored[name]).max():.1e}")


if __name__ == "__main__":
    main()
