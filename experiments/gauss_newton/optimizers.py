"""Gauss-Newton against Adam and SGD with tuned learning rates: figures 1 and 2 of the XGN paper.

The learning rates come from one grid for all optimisers. With
the full batch the paper takes the largest rate that does not diverge (search="largest"); kinder to
Adam and SGD is the one with the least training loss at the end of the first seed's run ("best"). A
run diverges that exceeds a hundred times its first loss or ends above it: Adam's first steps may
overshoot and recover. With mini-batches it is the largest progress in the first epoch that is
stable for all seeds to the end: the loss never doubles its first value nor grows to three times its
least (the paper gives no numbers).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import cuts
from experiments.gauss_newton.figures import plot, table
from experiments.gauss_newton.search import RATES, best_first, first_stable, largest_first
from experiments.gauss_newton.training import Phase, Record, Training, load, train
from experiments.harness import Script
from experiments.store import Store
from jaxttp.models import RevMLP

OVERSHOOT = 100.0  # of the loss over its first value: divergence with the full batch
RISE = 3.0  # of the training loss over its least so far: an instability of mini-batches


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What to compare.

    Attributes:
        data: names of data sets.
        blocks: L, one number for each of them.
        bottleneck: m.
        loss: see `Training`.
        samples: training samples; None for all (mini-batches).
        batch_size: None for the full batch.
        steps: of each optimiser; epochs with mini-batches.
        evaluate_every: steps between evaluations on all the data; None for once an epoch.
        pseudoinverse: see `gauss_newton_direction`.
        float64: whether everything is in double precision.
        seeds: of weights and batches; the samples are the same for all.
        rates: the grid.
        search: "best" or "largest", with the full batch.
    """

    data: tuple[str, ...]
    blocks: tuple[int, ...]
    bottleneck: int
    loss: str
    samples: int | None = cuts.few(32, otherwise="batch_size")
    batch_size: int | None = cuts.few(4)
    steps: dict[str, int] = cuts.one()  # noqa: RUF009
    evaluate_every: int | None = None
    pseudoinverse: str = "truncate"
    float64: bool = False
    seeds: tuple[int, ...] = cuts.one((0, 1, 2))
    rates: tuple[float, ...] = cuts.first(RATES)
    search: str = "best"


FULL_BATCH = {
    "smoke": Comparison(
        ("digits",), (2,), 256, "squared_error", 64, None, {"gn": 10, "adam": 40, "sgd": 40},
        evaluate_every=20, pseudoinverse="exact", float64=True, seeds=(0, 1),
        rates=(1e-2, 0.1, 1.0), search="largest",
    ),
    "cpu": Comparison(
        ("digits",), (3,), 2048, "squared_error", 1024, None, {"gn": 12, "adam": 100, "sgd": 100},
        evaluate_every=50, pseudoinverse="exact", float64=True,
    ),
    "paper": Comparison(
        ("mnist", "cifar10"), (2, 6), 8000, "cross_entropy", 1024, None,
        {"gn": 200, "ggn": 200, "adam": 200, "sgd": 200}, evaluate_every=20, search="largest",
    ),
}  # fmt: skip

MINI_BATCH = {
    "smoke": Comparison(
        ("wine",), (1,), 64, "cross_entropy", None, 32, {"gn": 3, "adam": 3, "sgd": 3},
        float64=True, seeds=(0, 1), rates=(1e-2, 0.1, 1.0),
    ),
    "cpu": Comparison(
        ("digits",), (3,), 512, "cross_entropy", None, 128,
        {"gn": 20, "ggn": 20, "adam": 20, "sgd": 20}, float64=True,
    ),
    "paper": Comparison(
        ("mnist", "cifar10"), (2, 6), 8000, "cross_entropy", None, 1024,
        {"gn": 80, "ggn": 80, "adam": 80, "sgd": 80},
    ),
}  # fmt: skip


def run(settings: Comparison, store: Store | None = None) -> dict[str, Any]:
    """Tune and train every optimiser on every data set.

    Args:
        settings: what to compare.
        store: where the runs are kept, those of the search for a rate too.

    Returns:
        ``{"settings": ..., "runs": [...]}``, plain values: one run for every data set, optimiser
        and seed.
    """
    store = store or Store()

    def one(index: int, optimizer: str) -> list[dict[str, Any]]:
        with jax.enable_x64(settings.float64):
            rate, records = _tuned(settings, index, optimizer, store)
        return [
            {"data": settings.data[index], "optimizer": optimizer, "learning_rate": rate,
             "seed": seed, **_plain(record)}
            for seed, record in zip(settings.seeds, records, strict=True)
        ]  # fmt: skip

    pieces = {
        f"{name}/{optimizer}": functools.partial(one, index, optimizer)
        for index, name in enumerate(settings.data)
        for optimizer in settings.steps
    }
    runs = [run for runs in store.all(pieces).values() for run in runs]
    return {"settings": dataclasses.asdict(settings), "runs": runs}


def _tuned(
    settings: Comparison, index: int, optimizer: str, store: Store
) -> tuple[float, list[Record]]:
    data = load(settings.data[index], key=jax.random.key(0), samples=settings.samples)
    epoch = 1 if settings.batch_size is None else len(data.x) // settings.batch_size
    dtype = jnp.float64 if settings.float64 else jnp.float32

    def once(rate: float, seed: int, steps: int) -> Record:
        model = RevMLP(
            int(np.prod(data.x.shape[1:])), data.outputs, rngs=nnx.Rngs(seed),
            blocks=settings.blocks[index], bottleneck=settings.bottleneck, readout="orthonormal",
            param_dtype=dtype,
        )  # fmt: skip
        training = Training(
            (Phase(optimizer, rate, steps),), settings.loss, settings.batch_size,
            settings.evaluate_every, settings.pseudoinverse,
            limit=OVERSHOOT if settings.batch_size is None else Training.limit,
        )  # fmt: skip
        name = f"{settings.data[index]}/{optimizer}/{rate:g}/{seed}/{steps} steps"

        def make() -> Record:
            record = train(model, data, training, key=jax.random.key(seed))
            return dataclasses.replace(record, weights=jnp.zeros(0))  # nobody looks at them

        return store.get(name, make)

    def whole(rate: float) -> Sequence[Callable[[], Record]]:
        steps = settings.steps[optimizer] * epoch
        return [functools.partial(once, rate, seed, steps) for seed in settings.seeds]

    rise = float("inf") if settings.batch_size is None else RISE
    if settings.batch_size is None and settings.search == "largest":
        order = largest_first(settings.rates)
    else:
        probe = epoch if settings.batch_size is not None else settings.steps[optimizer]
        order = best_first(settings.rates, lambda rate: once(rate, settings.seeds[0], probe))
    return first_stable(order, whole, rise=rise)


def _plain(record: Record) -> dict[str, Any]:
    fields = {name.name for name in dataclasses.fields(record)} - {"weights"}
    values = {name: np.asarray(getattr(record, name)).tolist() for name in sorted(fields)}
    return {name: _without_nan(value) for name, value in values.items()}


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return value if np.isfinite(value) else None


def _script(kind: str, presets: dict[str, Comparison], claim: str) -> Script:
    picture = f"xgn-{kind}"
    return Script(
        {picture: claim},
        presets,
        run,
        lambda results: {picture: plot(results)},
        lambda results: {picture: table(results).splitlines()},
    )


FULL_BATCH_SCRIPT = _script(
    "full-batch", FULL_BATCH,
    "With the full batch, exact Gauss-Newton needs far fewer steps than tuned Adam and SGD. "
    "(XGN Figure 1)",
)  # fmt: skip
MINI_BATCH_SCRIPT = _script(
    "mini-batch", MINI_BATCH,
    "With mini-batches exact Gauss-Newton overfits each batch and stalls: its features hardly "
    "move. (XGN Figure 2)",
)  # fmt: skip
