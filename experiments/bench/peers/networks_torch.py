"""The rows' networks in PyTorch, functions of a dict of tensors in PyTorch's own layout.

`load` turns weights of convolutions from (height, width, in, out) to (out, in, height, width) and
images to (N, channels, height, width) before anything is timed; kernels, curvature products and
spectra are then those of the networks in JAX, up to the order of the parameters.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from experiments.bench.peers.protocol import Problem

PREFIX = "params/"
Tensors = dict[str, torch.Tensor]
Network = Callable[[Tensors, torch.Tensor], torch.Tensor]


def _conv(params: Tensors, name: str, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
    """A convolution padded as XLA's "SAME": what is odd goes to the end."""
    w = params[f"{name}/w"]
    size, window = x.shape[-1], w.shape[-1]
    total = max((math.ceil(size / stride) - 1) * stride + window - size, 0)
    low = total // 2
    if total == 2 * low:
        return F.conv2d(x, w, params[f"{name}/b"], stride, padding=low)
    ends = (low, total - low, low, total - low)
    return F.conv2d(F.pad(x, ends), w, params[f"{name}/b"], stride)


def _dense(params: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ params[f"{name}/w"] + params[f"{name}/b"]


def _resnet(blocks: int) -> Network:
    def forward(params: Tensors, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(_conv(params, "stem", x))
        for stage in range(3):
            for block in range(blocks):
                name = f"stage{stage}_{block}"
                stride = 2 if stage and not block else 1
                inner = torch.relu(_conv(params, f"{name}/one", h, stride))
                short = _conv(params, f"{name}/short", h, stride) if stride > 1 else h
                h = torch.relu(short + 0.5 * _conv(params, f"{name}/two", inner))
        return _dense(params, "head", h.mean((2, 3)))

    return forward


def _mlp(params: Tensors, x: torch.Tensor) -> torch.Tensor:
    last = max(int(name.split("/")[0]) for name in params)
    for layer in range(last):
        x = torch.relu(_dense(params, str(layer), x))
    return _dense(params, str(last), x)


def _norm(scale: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(h, h.shape[-1:], scale, None, 1e-6)


def _block(params: Tensors, name: str, h: torch.Tensor, heads: int, causal: bool) -> torch.Tensor:
    n, tokens, width = h.shape
    qkv = _dense(params, f"{name}/qkv", _norm(params[f"{name}/norm1"], h))
    q, k, v = qkv.reshape(n, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / math.sqrt(width // heads)
    if causal:
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        scores = torch.where(mask, scores, -1e9)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, tokens, width)
    h = h + _dense(params, f"{name}/out", mixed)
    up = F.gelu(_dense(params, f"{name}/up", _norm(params[f"{name}/norm2"], h)), approximate="tanh")
    return h + _dense(params, f"{name}/down", up)


def _blocks(params: Tensors, h: torch.Tensor, causal: bool) -> torch.Tensor:
    depth = len({name.split("/")[0] for name in params if name.startswith("block")})
    for index in range(depth):
        h = _block(params, f"block{index}", h, 4, causal)
    return h


def _vit(params: Tensors, x: torch.Tensor, patch: int = 4) -> torch.Tensor:
    n, channels, size, _ = x.shape
    grid = size // patch
    x = x.reshape(n, channels, grid, patch, grid, patch).permute(0, 2, 4, 3, 5, 1)
    h = _dense(params, "embed", x.reshape(n, grid * grid, -1)) + params["position"]
    return _dense(params, "head", _blocks(params, h, False).mean(1))


def _transformer(params: Tensors, ids: torch.Tensor, words: int = 4) -> torch.Tensor:
    h = _blocks(params, params["embed"][ids] + params["position"], True)
    return h[:, -1] @ params["embed"][:words].T


NETWORKS: dict[str, Network] = {
    "digits": _resnet(1),
    "mlp": _mlp,
    "mlp-small": _mlp,
    "resnet20": _resnet(3),
    "vit": _vit,
    "transformer": _transformer,
    "tiny": _mlp,
}


def load(problem: Problem) -> tuple[Network, Tensors, torch.Tensor]:
    """The network of a problem, its parameters and its inputs."""
    params = {}
    for name, array in problem.items():
        if name.startswith(PREFIX):
            tensor = torch.tensor(array)
            turned = tensor.permute(3, 2, 0, 1).contiguous() if tensor.ndim == 4 else tensor
            params[name.removeprefix(PREFIX)] = turned
    x = torch.tensor(problem["x"])
    if x.ndim == 4:
        x = x.permute(0, 3, 1, 2).contiguous()
    return NETWORKS[str(problem["network"])], params, x.long() if x.dtype == torch.int32 else x
