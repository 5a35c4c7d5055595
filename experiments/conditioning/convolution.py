"""A linear CNN of two layers at initialization: number of filters, and kernel size.

With whitened inputs Sigma = I, and the exact Gauss-Newton matrix in the filters, weight sharing
included. The paper does not say how many filters its second layer has; both readings are drawn:
one, and as many as the first. The third panel is not of a CNN: it takes the Toeplitz matrices for
free weights, as Appendix B does, and so forgets that their entries are shared.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Store
from jaxttp.conditioning import condition_number, curvature_matrix, linear_point, toeplitz
from jaxttp.plots import PREDICTED, plot_draws, tidy

CLAIM = {
    "gnc-8": "More filters increase κ (as depth does in MLPs), larger kernels improve it (as width "
    "does). (GNC Figure 8)",
}

READINGS = (
    "one filter in the second layer",
    "as many filters in the second layer",
    "Toeplitz matrices as free weights, one filter",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes.

    Attributes:
        side: of the images, one channel; Sigma = I.
        filters: of the first layer.
        sizes: of the kernels.
        seeds: draws.
        seed: of all draws.
    """

    side: int = 8
    filters: tuple[int, ...] = (1, 2, 4, 8, 12)
    sizes: tuple[int, ...] = cuts.few(8, (2, 3, 4))
    seeds: int = cuts.one(5)
    seed: int = 0


PRESETS = {
    "smoke": Settings(side=4, filters=(1,), sizes=(2,), seeds=1),
    "cpu": Settings(),
    "paper": Settings(side=28, filters=(1, 2, 4, 8, 16), sizes=(2, 3, 5, 7)),
}


def network(filters: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Valid cross-correlations of images (N, side, side), outputs flattened (N, C)."""
    h = x[:, None]
    for layer in filters:
        h = jax.lax.conv_general_dilated(h, layer, (1, 1), "VALID", precision="highest")
    return h.reshape(len(x), -1)


def draw(filters: Sequence[int], size: int, key: jax.Array) -> list[jax.Array]:
    """Kaiming-normal filters [(out, in, size, size), ...] for 1, filters[0], filters[1] ... ."""
    out, channels = [], 1
    for layer, count in enumerate(filters):
        shape = (count, channels, size, size)
        scale = np.sqrt(2 / (channels * size**2))
        out.append(scale * jax.random.normal(jax.random.fold_in(key, layer), shape, jnp.float64))
        channels = count
    return out


def kappa(filters: Sequence[jax.Array], side: int) -> tuple[float, int]:
    """Condition number and rank at Sigma = I.

    The pixels' unit vectors, scaled, are samples whose covariance is the identity.
    """
    x = side * jnp.eye(side**2, dtype=jnp.float64).reshape(-1, side, side)
    found = condition_number(curvature_matrix(network, list(filters), x))
    return float(found.value), int(found.rank)


def unshared_kappa(filters: Sequence[jax.Array], side: int) -> tuple[float, int]:
    """Condition number and rank of a linear network whose weights are the Toeplitz matrices."""
    chain, shape = [], (side, side)
    for layer in filters:
        chain.append(toeplitz(layer, shape))
        shape = (shape[0] - layer.shape[2] + 1, shape[1] - layer.shape[3] + 1)
    found = linear_point(chain).condition
    return float(found.value), int(found.rank)


def run(settings: Settings, store: Store | None = None) -> dict[tuple[str, int], np.ndarray]:
    """Condition numbers for every reading, kernel size and number of filters.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where they are kept.

    Returns:
        (reading, kernel size) -> (filters, seeds, 2), kappa and rank; with the numbers of filters
        under ("filters", 0).
    """
    store = store or Store()

    def one(reading: str, size: int) -> np.ndarray:
        rows = []
        with jax.enable_x64(True):
            for count in settings.filters:
                for seed in range(settings.seeds):
                    key = jax.random.fold_in(jax.random.key(settings.seed), seed)
                    last = count if reading == READINGS[1] else 1
                    of = unshared_kappa if reading == READINGS[2] else kappa
                    rows.append(of(draw((count, last), size, key), settings.side))
        return np.array(rows).reshape(len(settings.filters), settings.seeds, 2)

    pieces = {
        (reading, size): functools.partial(one, reading, size)
        for reading in READINGS
        for size in settings.sizes
    }
    found = store.all({f"{reading}, size {size}": make for (reading, size), make in pieces.items()})
    out = dict(zip(pieces, found.values(), strict=True))
    return out | {("filters", 0): np.array(settings.filters)}


def plot(result: dict[tuple[str, int], np.ndarray]) -> dict[str, Figure]:
    """A panel for each reading."""
    figure = Figure(figsize=(13.5, 4.0), layout="constrained")
    count = result["filters", 0]
    for axes, reading in zip(figure.subplots(1, len(READINGS)), READINGS, strict=True):
        sizes = [size for name, size in result if name == reading]
        for size, color in zip(sizes, (PREDICTED, "#D55E00", "#009E73", "#CC79A7"), strict=False):
            table = result[reading, size][..., 0]
            plot_draws(axes, count, table, label=f"κ, kernels {size} x {size}", color=color)
        axes.set_yscale("log")
        axes.set(title=reading, xlabel="filters of the first layer", ylabel="condition number")
        axes.legend(frameon=False, fontsize=9)
        tidy(axes)
    return {"gnc-8": figure}


def measure(result: dict[tuple[str, int], np.ndarray]) -> dict[str, list[str]]:
    """Medians by filters and kernel size."""
    lines, count = [], result["filters", 0]
    for (reading, size), table in result.items():
        if reading == "filters":
            continue
        each = [
            f"{f} filters {np.median(row[:, 0]):.3g} (rank {int(np.median(row[:, 1]))})"
            for f, row in zip(count, table, strict=True)
        ]
        lines.append(f"{reading}, kernels {size} x {size}: {'; '.join(each)}")
    return {"gnc-8": lines}
