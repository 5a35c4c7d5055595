"""Figure 9: how well the linearized network predicts the weights, and how well the outputs.

On embedded data a "data set" is a task: digit splits, tables, image patches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Pieces, runner
from experiments.training_time.comparison import (
    CIFAR10,
    COLORS,
    Source,
    kernel_of,
    load,
    name_of,
)
from jaxttp import train
from jaxttp.dynamics import gradient_flow
from jaxttp.dynamics.flow import solve_ode
from jaxttp.losses import Loss, encode_targets
from jaxttp.plots import tidy

LOSS = "cross_entropy"
CLAIM = {
    "ttp-9": "The relative error in predicting the outputs is much smaller than that in predicting "
    "the weights, at all times. (TTP Figure 9)",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Tasks and rates.

    Attributes:
        tasks: names or pipeline settings.
        rate: learning rate.
        relative: whether it is in units of N / lambda_max.
        steps: T.
        every: steps between two comparisons.
        seed: of everything.
    """

    tasks: tuple[Source, ...] = ("digits 5-9, MLP", "digits even, ResNet")
    rate: float = 1.0
    relative: bool = True
    steps: int = cuts.one(150)
    every: int = cuts.one(5)
    seed: int = 0


PRESETS = {
    "smoke": Settings(tasks=("wine, MLP",), steps=10),
    "cpu": Settings(),
    "paper": Settings(tasks=(CIFAR10,), rate=0.001, relative=False),
}


@dataclasses.dataclass(frozen=True)
class Errors:
    """Distances of the linearized flow from real training at some steps.

    Attributes:
        ts: steps (K,).
        weights: ||w_lin - w|| (K,).
        outputs: ||f_lin - f|| (K,).
        weight_sizes: ||w|| and ||w - w_0|| (2, K).
        output_sizes: ||f|| and ||f - f_0|| (2, K).
        spaces: largest distance of the linearized flow in weight space from the one in function
            space, over the largest output.
        flow: ||f_flow - f|| (K,), the flow of the network itself in weight space.
    """

    ts: np.ndarray
    weights: np.ndarray
    outputs: np.ndarray
    weight_sizes: np.ndarray
    output_sizes: np.ndarray
    spaces: float
    flow: np.ndarray


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        settings: how.
        errors: task -> distances.
    """

    settings: Settings
    errors: dict[str, Errors]


def pieces(settings: Settings) -> Pieces:
    """Train, and predict outputs and weights by the linearized flow."""
    return {name_of(task): functools.partial(_measure, task, settings) for task in settings.tasks}


run = runner(pieces, Result)


def _measure(task: Source, settings: Settings) -> Errors:
    job = load(task, settings.seed)
    kernel = kernel_of(job)
    x, (apply_fn, params) = jnp.asarray(job.x), job.model
    eta = settings.rate * (kernel.unit if settings.relative else 1.0)
    targets, loss = encode_targets(LOSS, job.y, kernel.f0)
    every = settings.every
    kept = []

    def keep(t: int, weights, value: float) -> None:
        if t % every == 0:
            kept.append(np.asarray(ravel_pytree(weights)[0]))

    real = train(
        apply_fn, params, x, job.y, loss=LOSS, optimizer=optax.sgd(eta), steps=settings.steps,
        callback=keep,
    )  # fmt: skip
    start = kept[0]
    weights, outputs = np.stack(kept), np.asarray(real.outputs)[::every]
    ts = np.arange(settings.steps + 1)
    common = {"loss": loss, "learning_rate": eta}
    path = gradient_flow(kernel.theta, kernel.f0, targets, ts=jnp.asarray(ts, x.dtype), **common)
    # The flow's weights: w_t - w_0 = -(eta/N) J^T times the integral of g(f), by trapezoids.
    forces = jax.vmap(lambda f: loss.gradient(f, targets))(path.train)
    sums = jnp.cumsum(0.5 * (forces[1:] + forces[:-1]), axis=0)
    sums = jnp.concatenate([jnp.zeros_like(forces[:1]), sums])[::every]
    pull = jax.jit(lambda w, x, s: jax.vjp(lambda v: apply_fn(v, x), w)[1](s)[0])
    moved = np.stack([np.asarray(ravel_pytree(pull(params, x, s))[0]) for s in sums])
    linear = start - eta / len(x) * moved
    at = jnp.asarray(ts[::every], x.dtype)
    f0, push = jax.linearize(lambda w: apply_fn(w, x), params)
    linearized = lambda w: f0 + push(jax.tree.map(jnp.subtract, w, params))  # noqa: E731
    other = _flow(linearized, params, loss, targets, eta, at)
    own = _flow(lambda w: apply_fn(w, x), params, loss, targets, eta, at)
    predicted = np.asarray(path.train)[::every]
    size = lambda a: np.linalg.norm(a.reshape(len(a), -1), axis=1)  # noqa: E731
    return Errors(
        ts[::every], size(linear - weights), size(predicted - outputs),
        np.stack([size(weights), size(weights - start)]),
        np.stack([size(outputs), size(outputs - outputs[0])]),
        float(np.abs(np.asarray(other) - predicted).max() / np.abs(predicted).max()),
        size(np.asarray(own) - outputs),
    )  # fmt: skip


def _flow(
    network: Callable, params: Any, loss: Loss, targets: jax.Array, rate: float, ts: jax.Array
) -> jax.Array:
    """Outputs (T, N, C) under gradient flow in weight space, dw/dt = -(eta/N) J^T g."""

    def field(t, w, args):
        f, pull = jax.vjp(network, w)
        return pull(-rate / len(f) * loss.gradient(f, targets))[0]

    @jax.jit
    def solve(w):
        return solve_ode(field, w, ts, save=lambda t, state, args: network(state))[0]

    return solve(params)


def plot(result: Result) -> dict[str, Figure]:
    """Relative errors over training, by both normalisations."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    titles = ("relative to the size, ‖w‖ and ‖f‖", "relative to the motion, ‖w − w₀‖ and ‖f − f₀‖")
    for row, (axes, title) in enumerate(zip(figure.subplots(1, 2), titles, strict=True)):
        for (task, found), color in zip(result.errors.items(), COLORS, strict=False):
            t = found.ts[1:]
            weights = found.weights[1:] / found.weight_sizes[row, 1:]
            outputs = found.outputs[1:] / found.output_sizes[row, 1:]
            axes.semilogy(t, weights, "--", color=color, lw=2, label=f"weights, {task}")
            axes.semilogy(t, outputs, color=color, lw=2, label=f"outputs, {task}")
        axes.set(xlabel="step", ylabel="relative error", title=title)
        axes.legend(frameon=False, fontsize=8)
        tidy(axes)
    return {"ttp-9": figure}


def measure(result: Result) -> dict[str, list[str]]:
    """Errors at the end and in the middle."""
    lines = []
    for task, found in result.errors.items():
        parts = []
        for row, word in enumerate(("size", "motion")):
            weights = found.weights[1:] / found.weight_sizes[row, 1:]
            outputs = found.outputs[1:] / found.output_sizes[row, 1:]
            parts.append(
                f"by {word}: weights {weights[-1]:.3f}, outputs {outputs[-1]:.3f} at the end; "
                f"outputs better at {100 * np.mean(outputs < weights):.0f} % of the steps"
            )
        own = found.flow[-1] / found.output_sizes[1, -1]
        parts.append(
            f"flow of the network itself: outputs {own:.3f} of the motion off at the end; "
            f"linearized flows of both spaces agree to {found.spaces:.1e}"
        )
        lines.append(f"{task}: " + "; ".join(parts))
    return {"ttp-9": lines}
