"""The rows' weights and data as arrays by name, made once in the harness's process."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.conditioning import _power_law, _weights
from experiments.bench.gauss_newton import network as reversible_network
from experiments.bench.peers.networks import load, make_problem
from experiments.bench.peers.protocol import Problem
from jaxttp import empirical_ntk

DENSITY_KEY = 7


def trained(network: str, samples: int, classes: int) -> Problem:
    """A network with labels, for losses and their curvature."""
    labels = np.random.default_rng(2).integers(0, classes, samples)
    vector = np.random.default_rng(3).standard_normal(parameters(network))
    return make_problem(network, samples) | {"y": labels, "vector": vector}


def parameters(network: str) -> int:
    """The number of weights."""
    problem = make_problem(network, 1)
    return sum(array.size for name, array in problem.items() if name.startswith("params/"))


def density(network: str, samples: int, classes: int, probes: int) -> Problem:
    """The same with the probes that `spectral_density` draws from `DENSITY_KEY`."""
    problem = trained(network, samples, classes)
    with jax.enable_x64(True):
        key = jax.random.key(DENSITY_KEY)
        signs = jax.random.rademacher(key, (probes, problem["vector"].size), jnp.float64)
        return problem | {"probes": np.asarray(signs)}


def motion(network: str, samples: int, steps: int, rate: float) -> Problem:
    """A kernel, outputs and labels; `rate` is eta lambda_max / N."""
    case = load(make_problem(network, samples))
    kernel = np.asarray(empirical_ntk(*case))
    f0 = np.asarray(case.apply_fn(case.params, case.x))
    n, c = f0.shape
    largest = np.linalg.eigvalsh(kernel.reshape(n * c, n * c).astype(float))[-1]
    labels = np.random.default_rng(2).integers(0, c, n)
    return {
        "kernel": kernel, "f0": f0, "y": labels, "targets": np.eye(c, dtype=f0.dtype)[labels],
        "rate": np.asarray(rate * n / largest), "steps": np.asarray(steps),
    }  # fmt: skip


def linear(widths: tuple[int, ...]) -> Problem:
    """Weights of a deep linear network, and a covariance as of images, float64."""
    weights = {f"w{index}": w.astype(float) for index, w in enumerate(_weights(widths))}
    return weights | {"covariance": _power_law(widths[0])}


def linear_weights(problem: Problem) -> list[np.ndarray]:
    """The weights of `linear` in order."""
    names = (f"w{index}" for index in itertools.count())
    return [problem[name] for name in itertools.takewhile(problem.__contains__, names)]


def reversible(blocks: int, half: int, width: int, samples: int, outputs: int) -> Problem:
    """A reversible MLP with a readout of orthonormal rows, inputs and labels."""
    w, v, x = reversible_network(blocks, half, width, samples)
    draw = np.random.default_rng(4)
    basis, _ = np.linalg.qr(draw.standard_normal((2 * half, outputs)))
    labels = draw.integers(0, outputs, samples)
    return {
        "w": np.asarray(w), "v": np.asarray(v), "x": np.asarray(x), "y": labels,
        "targets": np.eye(outputs, dtype=np.float32)[labels],
        "readout": np.ascontiguousarray(basis.T.astype(np.float32)),
    }  # fmt: skip


def frobenius(_: Problem, answer: Problem, exact: Problem) -> float:
    """How far a sketched kernel is from the exact one, in the Frobenius norm."""
    wanted = exact["kernel"].astype(float)
    return float(np.linalg.norm(answer["kernel"] - wanted) / np.linalg.norm(wanted))


def reached(problem: Problem, answer: Problem, _: Problem) -> float:
    """The loss that was reached."""
    return float(answer["loss"])
