"""One hidden linear layer on images that are not whitened, with and without batch normalization.

The batch norm is frozen: its factors are those of the data at initialization and are not
differentiated.
"""

import dataclasses
import functools

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments import cuts
from experiments.conditioning.inputs import load_inputs
from experiments.store import Store
from jaxttp.conditioning import ConditionSweep, sweep
from jaxttp.plots import PREDICTED, REAL, plot_draws, tidy

CLAIM = {
    "gnc-7": "Batch normalization improves κ clearly, and κ still falls with width. (GNC Figure 7)"
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Data and sizes.

    Attributes:
        data: images by name, a panel each; gray, 8 x 8 pixels, centered, not whitened.
        samples: n.
        outputs: k.
        widths: m.
        seeds: draws.
        seed: of samples and draws.
    """

    data: tuple[str, ...] = ("patches", "digits")
    samples: int = cuts.few(32, 1000)
    outputs: int = 10
    widths: tuple[int, ...] = (80, 120, 200, 400, 800, 1600)
    seeds: int = cuts.one(5)
    seed: int = 0


PRESETS = {
    "smoke": Settings(data=("patches",), samples=200, outputs=3, widths=(80,), seeds=2),
    "cpu": Settings(),
    "paper": Settings(data=("cifar10",)),
}


def run(settings: Settings, store: Store | None = None) -> dict[str, dict[str, ConditionSweep]]:
    """Two sweeps over the width for each data set.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where the sweeps are kept.

    Returns:
        Name of the data -> "without" and "with" -> `ConditionSweep`.
    """
    store = store or Store()

    def one(name: str, batch_norm: bool) -> ConditionSweep:
        inputs = load_inputs(
            name, settings.samples, side=8, gray=True, whiten=False, seed=settings.seed
        )
        return sweep(
            "width", settings.widths, outputs=settings.outputs, depth=2, batch_norm=batch_norm,
            covariance=inputs.covariance, seeds=settings.seeds, key=jax.random.key(settings.seed),
        )  # fmt: skip

    kinds = {"without": False, "with": True}
    found = store.all({
        f"{name}/{kind}": functools.partial(one, name, batch_norm)
        for name in settings.data
        for kind, batch_norm in kinds.items()
    })  # fmt: skip
    return {name: {kind: found[f"{name}/{kind}"] for kind in kinds} for name in settings.data}


def plot(result: dict[str, dict[str, ConditionSweep]]) -> dict[str, Figure]:
    """A panel for each data set."""
    figure = Figure(figsize=(5.4 * len(result), 4.2), layout="constrained")
    panels = figure.subplots(1, len(result), squeeze=False)[0]
    for axes, (name, curves) in zip(panels, result.items(), strict=True):
        for (kind, one), color in zip(curves.items(), (REAL, PREDICTED), strict=True):
            label = f"κ, {kind} batch norm"
            plot_draws(axes, one.values, one.condition, label=label, color=color)
            plot_draws(
                axes, one.values, one.bound, label=f"bound, {kind} batch norm",
                color=color, style="--",
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set(title=name, xlabel="hidden width m", ylabel="condition number")
        axes.legend(frameon=False, fontsize=8)
        tidy(axes)
    return {"gnc-7": figure}


def measure(result: dict[str, dict[str, ConditionSweep]]) -> dict[str, list[str]]:
    """Means by width and the factor that batch norm gains."""
    lines = []
    for name, curves in result.items():
        plain, normed = curves["without"], curves["with"]
        for m, a, b in zip(plain.values, plain.condition, normed.condition, strict=True):
            lines.append(
                f"{name}, m = {m}: without {a.mean():.3g} ± {a.std():.2g}, with {b.mean():.3g} ± "
                f"{b.std():.2g} (factor {np.median(a / b):.3g}, better in {int(np.sum(b < a))} of "
                f"{len(a)} draws)"
            )
    return {"gnc-7": lines}
