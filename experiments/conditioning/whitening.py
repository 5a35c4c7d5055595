"""A deep linear network on images, whitened or only centered."""

import dataclasses
import functools

import jax
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments import cuts
from experiments.conditioning.inputs import load_inputs
from experiments.store import Store
from jaxttp.conditioning import ConditionSweep, sweep
from jaxttp.plots import PREDICTED, REAL, plot_draws, tidy

CLAIM = {
    "gnc-19": "Whitening the inputs improves the condition number by orders of magnitude: κ(Σ) "
    "multiplies the bound. (GNC Figure 19)"
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Data and sizes.

    Attributes:
        data: name, side of the images, hidden width for each panel.
        samples: n.
        outputs: k.
        depths: L.
        seeds: draws.
        seed: of samples and draws.
    """

    data: tuple[tuple[str, int, int], ...] = (("digits", 8, 70), ("patches", 8, 200))
    samples: int = cuts.few(32, 1500)
    outputs: int = 10
    depths: tuple[int, ...] = (2, 3, 4, 5)
    seeds: int = cuts.one(3)
    seed: int = 0


PRESETS = {
    "smoke": Settings(data=(("digits", 4, 20),), samples=200, outputs=3, depths=(2,), seeds=2),
    "cpu": Settings(),
    "paper": Settings(
        data=(("cifar10", 32, 3100),), samples=50_000, depths=(2, 3, 4, 5, 6, 7, 8, 9, 10)
    ),
}


@dataclasses.dataclass(frozen=True)
class Panel:
    """One data set.

    Attributes:
        covariance_condition: kappa(Sigma), centered only.
        rank: of Sigma.
        whitened: curve with whitening.
        plain: curve without.
    """

    covariance_condition: float
    rank: int
    whitened: ConditionSweep
    plain: ConditionSweep


def run(settings: Settings, store: Store | None = None) -> dict[str, Panel]:
    """Two sweeps over depth for each data set.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where the sweeps are kept.

    Returns:
        Name of the data -> `Panel`.
    """
    store = store or Store()

    def one(name: str, side: int, width: int, whiten: bool) -> tuple[ConditionSweep, float, int]:
        inputs = load_inputs(name, settings.samples, side=side, whiten=whiten, seed=settings.seed)
        sigma = inputs.covariance
        values = np.linalg.eigvalsh(sigma)[::-1]
        rank = int(np.sum(values > len(values) * 2.0**-52 * values[0]))
        found = sweep(
            "depth", settings.depths, outputs=settings.outputs, width=width, covariance=sigma,
            seeds=settings.seeds, key=jax.random.key(settings.seed),
        )  # fmt: skip
        return found, float(values[0] / values[rank - 1]), rank

    pieces = {
        f"{name}/{kind}": functools.partial(one, name, side, width, kind == "whitened")
        for name, side, width in settings.data
        for kind in ("whitened", "plain")
    }
    found = store.all(pieces)
    return {
        name: Panel(
            found[f"{name}/plain"][1], found[f"{name}/plain"][2],
            found[f"{name}/whitened"][0], found[f"{name}/plain"][0],
        )
        for name, _, _ in settings.data
    }  # fmt: skip


def plot(result: dict[str, Panel]) -> dict[str, Figure]:
    """A panel for each data set."""
    figure = Figure(figsize=(5.4 * len(result), 4.2), layout="constrained")
    for axes, (name, panel) in zip(
        figure.subplots(1, len(result), squeeze=False)[0], result.items(), strict=True
    ):
        for kind, one, color in (
            ("centered only", panel.plain, REAL), ("whitened", panel.whitened, PREDICTED)
        ):  # fmt: skip
            plot_draws(axes, one.values, one.condition, label=f"κ, {kind}", color=color)
            plot_draws(
                axes, one.values, one.bound, label=f"bound, {kind}", color=color, style="--"
            )  # fmt: skip
        axes.axhline(panel.covariance_condition, color="0.45", ls=":", label="κ(Σ), centered only")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(title=f"{name}, rank {panel.rank}", xlabel="depth L", ylabel="condition number")
        axes.legend(frameon=False, fontsize=8)
        tidy(axes)
    return {"gnc-19": figure}


def measure(result: dict[str, Panel]) -> dict[str, list[str]]:
    """The factor that whitening gains, beside kappa(Sigma)."""
    lines = []
    for name, panel in result.items():
        gain = np.median(panel.plain.condition / panel.whitened.condition, axis=1)
        each = [
            f"L = {depth}: {white.mean():.3g} whitened, {plain.mean():.3g} not (factor "
            f"{factor:.3g})"
            for depth, white, plain, factor in zip(
                panel.plain.values, panel.whitened.condition, panel.plain.condition, gain,
                strict=True,
            )
        ]  # fmt: skip
        lines.append(f"{name}: κ(Σ) = {panel.covariance_condition:.3g}, rank {panel.rank}")
        lines += each
    return {"gnc-19": lines}
