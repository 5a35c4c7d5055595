"""Curvature by torch.func, curvlinops and PyHessian."""

from typing import Any

import curvlinops
import numpy as np
import scipy.sparse.linalg
import torch
from pyhessian import hessian
from torch.func import grad, jvp, vjp
from torch.nn.functional import cross_entropy

from experiments.bench.peers import networks_torch
from experiments.bench.peers.protocol import Options, Prepared, Problem, serve


class Module(torch.nn.Module):
    """A row's network as a module, as the packages on PyTorch want it."""

    def __init__(self, network: networks_torch.Network, params: networks_torch.Tensors):
        super().__init__()
        self.network, self.names = network, list(params)
        self.values = torch.nn.ParameterList(torch.nn.Parameter(p) for p in params.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs."""
        return self.network(dict(zip(self.names, self.values, strict=True)), x)


def _load(problem: Problem, options: Options) -> tuple[Any, Any, Any, Any]:
    """Everything in the precision that is asked for, which becomes PyTorch's default."""
    torch.set_default_dtype(getattr(torch, options.get("dtype", "float64")))
    network, params, x = networks_torch.load(problem)
    dtype = torch.get_default_dtype()
    params = {name: tensor.to(dtype) for name, tensor in params.items()}
    x = x.to(dtype) if x.is_floating_point() else x
    return network, params, x, torch.tensor(problem["y"])


def _vector(problem: Problem, params: Any) -> Any:
    """The row's vector by name: convolutions turned as the weights are."""
    out, start = {}, 0
    flat = problem["vector"]
    for name, array in problem.items():
        if name.startswith(networks_torch.PREFIX):
            part = flat[start : start + array.size].reshape(array.shape)
            start += array.size
            turned = part.transpose(3, 2, 0, 1).copy() if part.ndim == 4 else part
            short = name.removeprefix(networks_torch.PREFIX)
            out[short] = torch.tensor(turned).to(params[short].dtype)
    return out


def _numbers(found: Any, vector: Any) -> Problem:
    found, vector = found.double(), vector.double()
    return {"norm": found.norm().numpy(), "form": (found @ vector).numpy()}


def torch_func(problem: Problem, options: Options) -> Prepared:
    """The jvp of grad for the Hessian; jvp, the loss's own, vjp for the GGN. Options: "kind"."""
    network, params, x, y = _load(problem, options)
    vector = _vector(problem, params)
    flat = torch.cat([part.reshape(-1) for part in vector.values()])

    def of_hessian() -> Any:
        slope = grad(lambda p: cross_entropy(network(p, x), y))
        return jvp(slope, (params,), (vector,))[1]

    def of_ggn() -> Any:
        outputs, tangents = jvp(lambda p: network(p, x), (params,), (vector,))
        shares = outputs.softmax(1)
        image = shares * (tangents - (shares * tangents).sum(1, keepdim=True)) / len(x)
        return vjp(lambda p: network(p, x), params)[1](image)[0]

    way = of_hessian if options["kind"] == "hessian" else of_ggn

    def call() -> Any:
        with torch.no_grad():
            return torch.cat([part.reshape(-1) for part in way().values()])

    return Prepared(call, lambda found: _numbers(found, flat))


def _operator(problem: Problem, options: Options) -> tuple[Any, Any]:
    network, params, x, y = _load(problem, options)
    module = Module(network, params)
    kinds = {
        "hessian": curvlinops.HessianLinearOperator, "generalized": curvlinops.GGNLinearOperator,
    }  # fmt: skip
    operator = kinds[options["kind"]](
        module, torch.nn.CrossEntropyLoss(), list(module.parameters()), [(x, y)],
        check_deterministic=False,
    )  # fmt: skip
    return operator, torch.cat([part.reshape(-1) for part in _vector(problem, params).values()])


def linear_operator(problem: Problem, options: Options) -> Prepared:
    """A product with curvlinops' operator. Options: "kind", "dtype"."""
    operator, flat = _operator(problem, options)
    return Prepared(lambda: operator @ flat, lambda found: _numbers(found.detach(), flat))


def eigsh(problem: Problem, options: Options) -> Prepared:
    """The operator of curvlinops in SciPy's Lanczos, as documented. Options: "tol"."""
    operator, _ = _operator(problem, options)
    matrix = operator.to_scipy()
    start = np.random.default_rng(0).standard_normal(matrix.shape[0]).astype(matrix.dtype)

    def call() -> Any:
        return scipy.sparse.linalg.eigsh(
            matrix, k=1, which="LA", tol=options["tol"], v0=start, return_eigenvectors=False
        )

    return Prepared(call, lambda found: {"largest": np.asarray(float(found[0]))})


def pyhessian(problem: Problem, options: Options) -> Prepared:
    """PyHessian's power iteration. Options: "tol", "most" iterations."""
    network, params, x, y = _load(problem, options)
    module = Module(network, params)

    def call() -> Any:
        torch.manual_seed(0)
        module.zero_grad()
        bench = hessian(module, torch.nn.CrossEntropyLoss(), data=(x, y), cuda=False)
        values, _ = bench.eigenvalues(maxIter=options["most"], tol=options["tol"], top_n=1)
        return values

    return Prepared(call, lambda found: {"largest": np.asarray(found[0])})


WORKS = {
    "torch_func": torch_func, "linear_operator": linear_operator, "eigsh": eigsh,
    "pyhessian": pyhessian,
}  # fmt: skip

if __name__ == "__main__":
    serve(WORKS, ("torch", "curvlinops-for-pytorch", "PyHessian"))
