"""How much is compiled, and how long a first and a second forecast take.

    python -m experiments.bench.compilation [--only ROW]

README's first example, then one that differs in rate and momentum, for every dynamics; then the
main job (`jaxttp predict`'s own task), with one kernel and re-linearised. Everything in one process
that has compiled nothing before, each dynamics after the ones above it; with ``--only`` one row
alone. "programs" are those that XLA compiles, "compiling" its seconds, "first" and "second" those
of the whole forecasts. A busy machine makes the seconds worthless; the counts are the same
everywhere.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.harness import Row, clock, parser, publish, store_of
from jaxttp import predict_training_time
from jaxttp._core.progress import compilations
from jaxttp.pipeline import Settings, build_task

MODULE = "experiments.bench.compilation"
COLUMNS = ("forecast", "programs", "compiling", "first", "programs of the second", "second")


def example() -> tuple:
    """README's first example: network, weights, samples, labels."""
    x = jax.random.normal(jax.random.key(0), (60, 5))
    params = {"w": jax.random.normal(jax.random.key(1), (5, 32)), "v": jnp.zeros((32, 2))}
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    return (lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"]), params, x, y


def measured(job: tuple, **options: Any) -> tuple[int, float, float]:
    """Programs, their seconds, and seconds in all of one forecast."""
    with compilations() as seen:
        seconds = clock(lambda: predict_training_time(*job, **options).loss)[0]
    return len(seen), sum(seen), seconds


WAYS: dict[str, dict[str, Any]] = {
    "recursion": {"relinearize": 0},
    "gradient flow": {"dynamics": "ode"},
    "4 kernels": {"relinearize": 4},
    "SDE": {"dynamics": "sde", "batch_size": 20, "relinearize": 0, "momentum": 0.0},
    "weight space": {"dynamics": "weight_space"},
    "auto": {},
}
MAIN_JOBS: dict[str, dict[str, Any]] = {"main job, one kernel": {"relinearize": 0}, "main job": {}}


def rows(only: str | None) -> Iterator[Row]:
    """Every dynamics, then the main jobs."""
    apply_fn, *data = example()
    job = (apply_fn, *jax.block_until_ready(data))
    for name in (name for name in WAYS if only in (None, name)):
        twice = []
        for i, (rate, momentum) in enumerate(((0.5, 0.9), (0.4, 0.8))):
            key = {"key": jax.random.key(i)} if "batch_size" in WAYS[name] else {}
            common = {"learning_rate": rate, "momentum": momentum, "steps": 200, **key}
            twice.append(measured(job, **(common | WAYS[name])))
        (programs, compiling, first), (again, _, second) = twice
        yield dict(zip(COLUMNS, (name, programs, compiling, first, again, second), strict=True))
    settings = Settings()
    task = build_task(settings)
    for name in (name for name in MAIN_JOBS if only in (None, name)):
        found = measured(
            (*task.model, task.x, task.y), loss=task.loss, learning_rate=settings.learning_rate,
            momentum=settings.momentum, steps=settings.steps, **MAIN_JOBS[name],
        )  # fmt: skip
        yield dict(zip(COLUMNS, (name, *found), strict=False))
        jax.clear_caches()


def main() -> None:
    """Print the table."""
    command = parser(MODULE, __doc__)
    command.add_argument("--only", choices=[*WAYS, *MAIN_JOBS])
    options = command.parse_args()
    publish(rows(options.only), COLUMNS, store_of(MODULE, options))


if __name__ == "__main__":
    main()
