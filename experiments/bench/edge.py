"""Forecasts at the edge of stability, where a real training oscillates about its mean path.

    python -m experiments.bench.edge [--tasks PART] [--seed N]

The tasks of `trust_tasks`, full batches at large rates: shares of the largest stable one (that of
the same momentum) at which the curvature of most of them grows to the edge. Forecasts by "auto";
wrong is what `experiments.bench.trust` calls so. The rules were chosen on the runs of that bench,
whose seeds are 0 to 2: other seeds are other draws, not other tasks.
"""

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench.trust import STEPS, THRESHOLDS, WRONG, off
from experiments.bench.trust_tasks import FITTING, HELD_OUT, make
from jaxttp import empirical_ntk, train, training_time
from jaxttp.dynamics.relinearize import relinearized_recursion
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast._trust import trust_in_path
from jaxttp.losses import encode_targets
from jaxttp.losses.rule import Rule


class Way(NamedTuple):
    """How to train; the rate is a share of the largest stable one with this momentum."""

    momentum: float
    share: float


WAYS = (Way(0.0, 0.9), Way(0.0, 0.6), Way(0.9, 0.3))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", default="", help="only those whose name holds this")
    parser.add_argument("--seed", type=int, default=3)
    arguments = parser.parse_args()
    print("| task | momentum, share | real | forecast | off | end, real | end | kernels | said |")
    print("|---|---|---|---|---|---|---|---|---|")
    errors = []
    for task in (*FITTING, *HELD_OUT):
        if arguments.tasks in task:
            jax.clear_caches()
            errors += [_row(task, way, arguments.seed) for way in WAYS]
    errors = np.array([e for e in errors if e is not None])
    mean = np.minimum(errors, 1).mean() if len(errors) else np.nan
    print(f"\n{int((errors > WRONG).sum())} of {len(errors)} wrong; mean largest error {mean:.3f}")


def _row(task: str, way: Way, seed: int) -> float | None:
    """One training and its forecast, printed; the error where the path comes to the edge."""
    job = make(task, seed)
    x, (apply_fn, params) = jnp.asarray(job.x), job.model
    f0 = jax.jit(apply_fn)(params, x)
    targets, loss = encode_targets(job.loss, job.y, f0)
    kernel = empirical_ntk(apply_fn, params, x)
    limit = max_learning_rate(kernel, f0, targets, loss=loss, momentum=way.momentum)
    optimizer = optax.sgd(way.share * float(limit), way.momentum or None)
    path = relinearized_recursion(
        apply_fn, params, x, targets, loss=loss, optimizer=optimizer, steps=STEPS,
        kernel_fn=lambda weights: empirical_ntk(apply_fn, weights, x), rebuilds="auto",
    )  # fmt: skip
    if path.edge_at < 0:
        return None
    real = np.asarray(
        train(apply_fn, params, x, targets, loss=loss, optimizer=optimizer, steps=STEPS).loss
    )
    curve = np.asarray(path.loss)
    error = off(curve, real)
    times = [
        ", ".join(str(int(training_time(each, e))) for e in THRESHOLDS) for each in (real, curve)
    ]
    said = "" if trust_in_path(path, Rule(THRESHOLDS)) is None else "yes"
    print(
        f"| {task} | {way.momentum:g}, {way.share:g} | {times[0]} | {times[1]} | {error:.2f} | "
        f"{real[-1]:.3g} | {curve[-1]:.3g} | {path.kernels} | {said} |",
        flush=True,
    )
    return error


if __name__ == "__main__":
    main()
