"""Kappa of a pre-trained network by what is trained of it: all weights, adapters, the head.

The network is the ResNet that comes with the library, pre-trained on the digits 0-4, with a fresh
head for other digits. kappa is that of the Gauss-Newton matrix J^T J / n in the weights that train;
its non-zero eigenvalues are those of J J^T / n, (n C, n C), which has full rank where enough of
them train: for the head, whose inputs have `width` features, as long as n <= width + 1.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from experiments import cuts
from experiments.conditioning.training_time import first_below
from experiments.store import Pieces, runner
from jaxttp import Model, conditioning, from_nnx, train
from jaxttp.data import load_dataset
from jaxttp.dynamics import recursion
from jaxttp.losses import encode_targets
from jaxttp.models import freeze, fresh_head, head_only, load_pretrained, lora
from jaxttp.plots import GREY, OTHER, PREDICTED, REAL, tidy

CLAIM = {
    "ours-lora": "Low-rank adapters are worse conditioned than all weights, and the better the "
    "higher their rank; training is as much slower. (ours)"
}
LOSS = "squared_error"
COLORS = {"all": PREDICTED, "lora": REAL, "head": OTHER}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Data and what is trained.

    Attributes:
        classes: digits.
        per_class: samples of each.
        ranks: of the adapters.
        whole: whether all weights and the head are measured beside the adapters.
        fraction: of the first loss that ends a training.
        steps: of gradient descent at most.
        seeds: of samples, heads and adapters.
    """

    classes: tuple[int, ...] = cuts.whole((5, 6, 7, 8, 9))
    per_class: int = cuts.few(2, 12)
    ranks: tuple[int, ...] = (1, 2, 4, 8)
    whole: bool = True
    fraction: float = 0.1
    steps: int = cuts.one(600)
    seeds: tuple[int, ...] = cuts.one((0, 1, 2))


PRESETS = {
    "smoke": Settings(classes=(5, 6), per_class=3, ranks=(1,), whole=False, steps=10, seeds=(0,)),
    "cpu": Settings(),
    "paper": Settings(per_class=100, ranks=(1, 2, 4, 8, 16), steps=5000, seeds=(0, 1, 2, 3, 4)),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to fine-tune; times in steps, inf where it takes longer.

    Attributes:
        kind: "all", "lora" or "head".
        rank: of the adapters, 0 without.
        weights: that are trained.
        eigenvalues: of the Gauss-Newton matrix that are not zero, descending.
        size: n C.
        rate: eta = 1 / lambda_max of gradient descent.
        forecast: from the kernel.
        real: of gradient descent.
    """

    kind: str
    rank: int
    weights: int
    eigenvalues: np.ndarray
    size: int
    rate: float
    forecast: float
    real: float

    @property
    def condition(self) -> float:
        """Kappa."""
        return float(self.eigenvalues[0] / self.eigenvalues[-1])

    @property
    def label(self) -> str:
        """As in the picture."""
        return {"all": "all weights", "head": "head"}.get(self.kind, f"rank {self.rank}")


def models(settings: Settings, seed: int) -> dict[tuple[str, int], Model]:
    """(kind, rank) -> the same function, with other weights to train."""
    keys = jax.random.split(jax.random.key(seed), 2)
    whole = from_nnx(fresh_head(load_pretrained(), len(settings.classes), key=keys[0]))
    adapted = {("lora", rank): lora(whole, rank=rank, key=keys[1]) for rank in settings.ranks}
    if not settings.whole:
        return adapted
    return {("all", 0): whole} | adapted | {("head", 0): freeze(whole, head_only)}


def pieces(settings: Settings) -> Pieces:
    """Measure every way, for every seed."""

    def one(seed: int) -> list[Row]:
        data = load_dataset(
            "digits", classes=settings.classes, per_class=settings.per_class,
            key=jax.random.key(seed),
        )  # fmt: skip
        return [
            _row(model, kind, rank, data.x, data.y, settings)
            for (kind, rank), model in models(settings, seed).items()
        ]

    return {f"seed {seed}": functools.partial(one, seed) for seed in settings.seeds}


run = runner(pieces, lambda settings, found: dict(zip(settings.seeds, found.values(), strict=True)))
"""Seed -> a `Row` for all weights, for adapters of every rank, and for the head."""


def _row(
    model: Model, kind: str, rank: int, x: np.ndarray, y: np.ndarray, settings: Settings
) -> Row:
    matrix = conditioning.curvature_matrix(*model, x, form="outputs")
    found = conditioning.condition_number(matrix, spectrum=True)
    assert found.eigenvalues is not None
    rate = 1 / float(found.largest)
    f0 = model.apply_fn(model.params, x)
    theta = jnp.asarray(len(x) * np.asarray(matrix, f0.dtype)).reshape(*f0.shape, *f0.shape)
    path = recursion(theta, f0, y, loss=LOSS, optimizer=optax.sgd(rate), steps=settings.steps)
    targets, loss = encode_targets(LOSS, y, f0)
    ahead = jax.vmap(lambda f: loss.value(f, targets))(path.train)
    real = train(*model, x, y, loss=LOSS, optimizer=optax.sgd(rate), steps=settings.steps)
    return Row(
        kind, rank, sum(leaf.size for leaf in jax.tree.leaves(model.params)),
        np.asarray(found.eigenvalues)[: int(found.rank)], len(matrix), rate,
        first_below(np.asarray(ahead), settings.fraction),
        first_below(np.asarray(real.loss), settings.fraction),
    )  # fmt: skip


def _by_way(result: dict[int, list[Row]]) -> dict[str, list[Row]]:
    """Label -> a row for each seed."""
    ways: dict[str, list[Row]] = {}
    for rows in result.values():
        for row in rows:
            ways.setdefault(row.label, []).append(row)
    return ways


def plot(result: dict[int, list[Row]]) -> dict[str, Figure]:
    """Spectra of the first seed, kappa by rank, steps by way."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    ways = _by_way(result)
    ranks = sorted({rows[0].rank for rows in ways.values() if rows[0].kind == "lora"})
    dashes = dict(zip(ranks, ("-", "--", "-.", ":", (0, (1, 4))), strict=False))
    for label, rows in ways.items():
        row = rows[0]
        dash = "-" if row.kind != "lora" else dashes[row.rank]
        left.loglog(np.arange(1, len(row.eigenvalues) + 1), row.eigenvalues, ls=dash,
                    color=COLORS[row.kind], label=f"{label} ({row.weights})")  # fmt: skip
    left.set(xlabel="rank k", ylabel="eigenvalue of the Gauss-Newton matrix")
    left.set_title("spectra, first seed (trained weights)", fontsize=10)
    left.legend(frameon=False, fontsize=8)
    at = np.arange(len(ways))
    colors = [COLORS[rows[0].kind] for rows in ways.values()]
    for place, (rows, color) in enumerate(zip(ways.values(), colors, strict=True)):
        middle.semilogy([place] * len(rows), [row.condition for row in rows], "o", color=color,
                        alpha=0.8)  # fmt: skip
    middle.set_ylabel("condition number, each seed")
    for shift, name, color in ((-0.2, "forecast", GREY), (0.2, "real", PREDICTED)):
        values = np.array([
            np.median([getattr(row, name) for row in rows]) for rows in ways.values()
        ])  # fmt: skip
        known = np.isfinite(values)
        bars = right.bar((at + shift)[known], values[known], 0.38, color=color, label=name)
        right.bar_label(bars, fmt="%g", fontsize=8)
    right.set_ylabel("steps at η = 1/λmax, median of the seeds")
    right.legend(frameon=False, fontsize=9)
    for axes in (middle, right):
        axes.set_xticks(at, list(ways), rotation=30, ha="right")
    for axes in (left, middle, right):
        tidy(axes)
    return {"ours-lora": figure}


def measure(result: dict[int, list[Row]]) -> dict[str, list[str]]:
    """Medians by way; in how many seeds adapters are worse; the rank correlation with the steps."""
    lines = []
    for label, rows in _by_way(result).items():
        kappa, largest, smallest, forecast, real = (
            float(np.median(values))
            for values in (
                [row.condition for row in rows],
                [row.eigenvalues[0] for row in rows],
                [row.eigenvalues[-1] for row in rows],
                [row.forecast for row in rows],
                [row.real for row in rows],
            )
        )
        worse = sum(
            row.condition > first[0].condition
            for row, first in zip(rows, result.values(), strict=True)
        )
        lines.append(
            f"{label}: {rows[0].weights} weights, κ {kappa:.3g} (λmax {largest:.3g}, λmin "
            f"{smallest:.3g}; rank {len(rows[0].eigenvalues)} of {rows[0].size}), above the "
            f"first of these in {worse} of {len(rows)} seeds; steps forecast {forecast:g}, real "
            f"{real:g}"
        )
    rows = [row for rows in result.values() for row in rows if np.isfinite(row.real)]
    if len(rows) > 2:
        found = spearmanr([row.condition for row in rows], [row.real for row in rows])
        lines.append(
            f"rank correlation of κ with the real steps {found[0]:.2f} ({len(rows)} trainings)"
        )
    return {"ours-lora": lines}
