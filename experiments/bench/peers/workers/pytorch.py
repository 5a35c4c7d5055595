"""What torch.func and the packages on it do, as their documentation recommends."""

from typing import Any

import torch
from torch.func import jacrev, jvp, vjp, vmap

from experiments.bench.peers import networks_torch
from experiments.bench.peers.protocol import Options, Prepared, Problem, serve


def kernel(problem: Problem, options: Options) -> Prepared:
    """The whole kernel as in PyTorch's tutorial on neural tangent kernels.

    Options: "way", "jacobian" (`vmap(jacrev)`, then one contraction a parameter) or "products"
    (`vjp` and `jvp` of the identity). The tutorial makes the Jacobian of both arguments; here,
    where they are the same, once. No graph is kept.
    """
    network, params, x = networks_torch.load(problem)

    def single(params: Any, row: Any) -> Any:
        return network(params, row[None])[0]

    def by_jacobian() -> Any:
        jacobian = vmap(jacrev(single), (None, 0))(params, x)
        parts = [part.flatten(2) for part in jacobian.values()]
        return sum(torch.einsum("naf,mbf->namb", part, part) for part in parts)

    def by_products() -> Any:
        def pair(row: Any, other: Any) -> Any:
            output, pull = vjp(lambda p: single(p, row), params)

            def column(vector: Any) -> Any:
                (tangents,) = pull(vector)
                return jvp(lambda p: single(p, other), (params,), (tangents,))[1]

            return vmap(column)(torch.eye(output.numel()))

        rows = vmap(vmap(pair, (None, 0)), (0, None))(x, x)  # (N, N, C of row, C of other)
        return rows.transpose(1, 2)

    way = {"jacobian": by_jacobian, "products": by_products}[options["way"]]

    def call() -> Any:
        with torch.no_grad():
            return way()

    return Prepared(call, lambda found: {"kernel": found.numpy()})


def projection(problem: Problem, options: Options) -> Prepared:
    """TRAK's `BasicProjector` (in plain PyTorch, the one for CPUs) on `torch.func`'s gradients.

    Options: "dim", "block", columns of its random matrix that are drawn at a time.
    """
    from trak.projectors import BasicProjector, ProjectionType

    network, params, x = networks_torch.load(problem)
    size = sum(tensor.numel() for tensor in params.values())
    dim = options["dim"]
    projector = BasicProjector(
        size, dim, 0, ProjectionType.rademacher, torch.device("cpu"), block_size=options["block"]
    )

    def call() -> Any:
        with torch.no_grad():
            single = lambda p, row: network(p, row[None])[0]  # noqa: E731
            jacobian = vmap(jacrev(single), (None, 0))(params, x)
            rows = torch.cat([part.flatten(2) for part in jacobian.values()], 2)
            n, c, _ = rows.shape
            return projector.project(rows.flatten(0, 1), model_id=0).reshape(n, c, dim)

    def answer(found: Any) -> Problem:
        s = found.double() / dim**0.5
        return {"kernel": torch.einsum("nak,mbk->namb", s, s).numpy()}

    return Prepared(call, answer)


WORKS = {"kernel": kernel, "projection": projection}

if __name__ == "__main__":
    serve(WORKS, ("torch",))
