"""Golden outputs of the reference implementations in PyTorch, on tiny random networks.

The test suite needs no PyTorch: it reads the files that this script wrote. To write them again:

    python -m venv torch-environment
    torch-environment/bin/pip install torch torchvision timm safetensors
    torch-environment/bin/python tests/goldens/make_goldens.py

Written with torch 2.15.0, torchvision 0.29.2, timm 1.0.31 on a CPU. Each
network's weights go to NAME.safetensors as that library names them; ``outputs.safetensors`` holds
the inputs (N, H, W, C) and, for every network, its outputs computed in float32 and in float64;
``preprocessing.safetensors`` holds images and what torchvision's transforms make of them;
``positions.safetensors`` the positions of timm-vit for images of other sizes, by timm.
All parameters and running averages are random, so that none can be left out unnoticed.
"""

import pathlib

import numpy as np
import timm
import torch
import torchvision
from PIL import Image
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

FOLDER = pathlib.Path(__file__).parent


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


def networks():
    """The networks by the names of their files."""
    resnet = torchvision.models.resnet
    return {
        "torchvision-basic": TorchvisionResNet(resnet.BasicBlock, (1, 2, 1, 1), (8, 12, 16, 20), 5),
        "torchvision-bottleneck": TorchvisionResNet(
            resnet.Bottleneck, (1, 2, 1, 1), (4, 6, 8, 10), 5
        ),
        "timm-basic": timm.models.ResNet(
            timm.models.resnet.BasicBlock, (1, 2, 1, 1), 5, stem_width=8, channels=(8, 12, 16, 20)
        ),
        "timm-vit": timm.models.VisionTransformer(
            img_size=32, patch_size=8, embed_dim=12, depth=2, num_heads=3, mlp_ratio=20 / 12,
            num_classes=5,
        ),
    }  # fmt: skip


def randomise(model):
    """Every parameter and running average at random, of a size that keeps outputs of order one."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if not value.dtype.is_floating_point:
            continue
        with torch.no_grad():
            if value.ndim > 1:
                value.normal_(0, (1.5 / value[0].numel()) ** 0.5)
            elif name.endswith("running_var"):
                value.uniform_(0.5, 1.5)
            elif name.endswith("weight"):
                value.uniform_(0.7, 1.3)
            else:
                value.normal_(0, 0.2)


def write_preprocessing():
    """Images of two shapes, and what torchvision's transforms make of them, (H, W, C)."""
    modes = torchvision.transforms.InterpolationMode
    pipelines = {
        "imagenet": (32, modes.BILINEAR, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        "vit": (31, modes.BICUBIC, (0.5,) * 3, (0.5,) * 3),
        "grey": (30, modes.BILINEAR, (0.1,), (0.5,)),
    }
    draw, arrays = np.random.default_rng(0), {}
    for shape, size in (("wide", (37, 53)), ("tall", (61, 40))):
        arrays[shape] = draw.integers(0, 256, (*size, 3), np.uint8)
        for name, (resize, mode, mean, std) in pipelines.items():
            picture = Image.fromarray(arrays[shape])
            steps = [
                torchvision.transforms.Resize(resize, mode),
                torchvision.transforms.CenterCrop(28),
                torchvision.transforms.ToTensor(),
                torchvision.transforms.Normalize(mean, std),
            ]
            pixels = torchvision.transforms.Compose(steps)(
                picture.convert("L") if name == "grey" else picture
            )
            arrays[f"{name}.{shape}"] = np.ascontiguousarray(pixels.numpy().transpose(1, 2, 0))
    save_arrays(arrays, FOLDER / "preprocessing.safetensors")


def write_positions():
    """Positions of timm-vit (a grid of 4 x 4) on smaller and larger grids."""
    positions = load_file(FOLDER / "timm-vit.safetensors")["pos_embed"]
    resample = timm.layers.resample_abs_pos_embed
    arrays = {f"{side}": resample(positions, [side, side]).numpy() for side in (2, 3, 7)}
    save_arrays(arrays, FOLDER / "positions.safetensors")


def main():
    """Write all files."""
    write_preprocessing()
    torch.manual_seed(0)
    x = torch.randn(3, 3, 32, 32)
    arrays = {"x": np.ascontiguousarray(x.numpy().transpose(0, 2, 3, 1))}
    for name, model in networks().items():
        randomise(model)
        model.eval()
        save_file(model.state_dict(), FOLDER / f"{name}.safetensors")
        for suffix, dtype in (("float32", torch.float32), ("float64", torch.float64)):
            with torch.no_grad():
                arrays[f"{name}.{suffix}"] = model.to(dtype)(x.to(dtype)).numpy()
        print(name, arrays[f"{name}.float64"].std())
    save_arrays(arrays, FOLDER / "outputs.safetensors")
    write_positions()


if __name__ == "__main__":
    main()
