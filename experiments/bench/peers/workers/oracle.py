"""What is right, in float64 by NumPy and SciPy, without a framework: asked, never timed."""

import numpy as np
import scipy.integrate
import scipy.special

from experiments.bench.peers.protocol import Options, Prepared, Problem, serve


def _field(problem: Problem) -> tuple[np.ndarray, np.ndarray, float]:
    f0 = problem["f0"].astype(float)
    kernel = problem["kernel"].astype(float).reshape(f0.size, f0.size)
    return kernel, f0, float(problem["rate"]) / len(f0)


def flow(problem: Problem, options: Options) -> Prepared:
    """Gradient flow of the mean cross-entropy by an explicit method of order 8, rtol 1e-10."""
    kernel, f0, rate = _field(problem)
    targets, steps = problem["targets"].astype(float), int(problem["steps"])

    def slope(_: float, f: np.ndarray) -> np.ndarray:
        g = scipy.special.softmax(f.reshape(f0.shape), axis=1) - targets
        return -rate * (kernel @ g.reshape(-1))

    def call() -> np.ndarray:
        found = scipy.integrate.solve_ivp(
            slope, (0, steps), f0.reshape(-1), "DOP853", np.arange(steps + 1.0), rtol=1e-10,
            atol=1e-10,
        )  # fmt: skip
        return found.y.T.reshape(-1, *f0.shape)

    return Prepared(call, lambda train: {"train": train})


def closed(problem: Problem, options: Options) -> Prepared:
    """Gradient flow of half the squared error: y + exp(-rate Theta t) (f0 - y)."""
    kernel, f0, rate = _field(problem)
    targets = problem["targets"].astype(float)

    def call() -> np.ndarray:
        values, vectors = np.linalg.eigh(kernel)
        start = vectors.T @ (f0 - targets).reshape(-1)
        times = np.arange(int(problem["steps"]) + 1.0)
        left = np.exp(-rate * times[:, None] * values) * start
        return targets + (left @ vectors.T).reshape(-1, *f0.shape)

    return Prepared(call, lambda train: {"train": train})


def momentum(problem: Problem, options: Options) -> Prepared:
    """Gradient descent of the mean cross-entropy with momentum 0.9, step by step."""
    kernel, f0, rate = _field(problem)
    targets, factor = problem["targets"].astype(float), options["factor"]

    def call() -> np.ndarray:
        f, velocity, out = f0, np.zeros_like(f0), [f0]
        for _ in range(int(problem["steps"])):
            g = scipy.special.softmax(f, axis=1) - targets
            velocity = 0.9 * velocity + (kernel @ g.reshape(-1)).reshape(f0.shape)
            f = f - factor * rate * velocity
            out.append(f)
        return np.stack(out)

    return Prepared(call, lambda train: {"train": train})


WORKS = {"flow": flow, "closed": closed, "momentum": momentum}

if __name__ == "__main__":
    serve(WORKS, ("numpy", "scipy"))
