"""What is measured: every row, its sides, and what is the same work in it."""

import functools

from experiments.bench.peers import networks
from experiments.bench.peers.environments import OURS
from experiments.bench.peers.harness import Row, Side

NT_WAYS = tuple(
    {"implementation": name}
    for name in ("JACOBIAN_CONTRACTION", "NTK_VECTOR_PRODUCTS", "STRUCTURED_DERIVATIVES")
)
PRODUCT = Side("product", OURS, "ours", "product")


def kernel_row(network: str, samples: int, words: str, batch: int) -> Row:
    """The whole kernel of a network."""
    nt_ways = (*NT_WAYS, *({**way, "batch": batch} for way in NT_WAYS[::2]))
    return Row(
        name=f"kernel-{network}", group="kernels",
        same=f"{words}, N = {samples}, the whole kernel (N, C, N, C), float32.",
        problem=functools.partial(networks.make_problem, network, samples),
        sides=(
            Side("jaxttp", OURS, "ours", "kernel"),
            Side("neural-tangents", "neural-tangents", "neural_tangents", "kernel", nt_ways),
            Side("torch.func", "torch", "pytorch", "kernel",
                 ({"way": "jacobian"}, {"way": "products"})),
            PRODUCT,
        ),
        tolerance=1e-4,
    )  # fmt: skip


KERNELS = (
    kernel_row("digits", 150, "ResNet on 8 x 8 pixels, 77k weights, C = 5", 25),
    kernel_row("mlp", 200, "MLP 784-512-512-512-10", 20),
    kernel_row("resnet20", 200, "ResNet20 without normalisation, 270k weights, C = 10", 20),
    kernel_row("vit", 100, "ViT, 4 blocks of width 64 on 64 patches, C = 10", 20),
    kernel_row("transformer", 64, "decoder, 4 blocks of width 128 on 32 tokens, C = 4", 16),
)

ROWS = KERNELS
