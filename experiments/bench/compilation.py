"""How much is compiled, and how long a first and a second forecast take.

    python -m experiments.bench.compilation [--only ROW]

README's first example, then one that differs in rate and momentum, for every dynamics; then the
main job (`jaxttp predict`'s own task), with one kernel and re-linearised. Everything in one process
that has compiled nothing before, each dynamics after the ones above it; with ``--only`` one row
alone. A busy machine makes the
seconds worthless; the counts are the same everywhere.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxttp import predict_training_time
from jaxttp._core.timing import compilations
from jaxttp.pipeline import Settings, build_task


def example() -> tuple:
    """README's first example: network, weights, samples, labels."""
    x = jax.random.normal(jax.random.key(0), (60, 5))
    params = {"w": jax.random.normal(jax.random.key(1), (5, 32)), "v": jnp.zeros((32, 2))}
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    return (lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"]), params, x, y


def measured(job: tuple, **options: Any) -> tuple[int, float, float]:
    """Programs, their seconds, and seconds in all of one forecast."""
    begun = time.perf_counter()
    with compilations() as seen:
        found = predict_training_time(*job, **options)
        jax.block_until_ready(found.loss)
    return len(seen), sum(seen), time.perf_counter() - begun


WAYS: dict[str, dict[str, Any]] = {
    "recursion": {"relinearize": 0},
    "gradient flow": {"dynamics": "ode"},
    "4 kernels": {"relinearize": 4},
    "SDE": {"dynamics": "sde", "batch_size": 20, "relinearize": 0, "momentum": 0.0},
    "weight space": {"dynamics": "weight_space"},
    "auto": {},
}
MAIN_JOBS: dict[str, dict[str, Any]] = {
    "main job, one kernel": {"relinearize": 0},
    "main job": {},
}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=[*WAYS, *MAIN_JOBS])
    only = parser.parse_args().only
    ways, jobs = (
        {name: options for name, options in rows.items() if only in (None, name)}
        for rows in (WAYS, MAIN_JOBS)
    )
    print("| forecast | programs | compiling | in all | the second: programs | in all |")
    print("|---|---|---|---|---|---|")
    job = jax.block_until_ready(example()[1:])
    job = (example()[0], *job)
    for name, options in ways.items():
        lines = []
        for i, (rate, momentum) in enumerate(((0.5, 0.9), (0.4, 0.8))):
            key = {"key": jax.random.key(i)} if "batch_size" in options else {}
            common = {"learning_rate": rate, "momentum": momentum, "steps": 200, **key}
            lines.append(measured(job, **(common | options)))
        (count, compiling, whole), (again, _, second) = lines
        print(
            f"| {name} | {count} | {compiling:.2f} s | {whole:.2f} s | {again} | {second:.3f} s |"
        )
    settings = Settings()
    task = build_task(settings)
    main_job = (*task.model, task.x, task.y)
    for name, options in jobs.items():
        common = {"loss": task.loss, "learning_rate": settings.learning_rate}
        found = measured(main_job, momentum=settings.momentum, steps=settings.steps, **common,
                         **options)  # fmt: skip
        print(f"| {name} | {found[0]} | {found[1]:.2f} s | {found[2]:.2f} s | | |")
        jax.clear_caches()


if __name__ == "__main__":
    main()
