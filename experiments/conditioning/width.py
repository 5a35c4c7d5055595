"""One hidden ReLU layer of several widths while it trains, and the spectrum for a narrow one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import jaxttp
from experiments import cuts
from experiments.conditioning.inputs import load_inputs
from experiments.store import Store
from jaxttp.conditioning import condition_number, curvature_matrix, rank_sensitivity
from jaxttp.plots import plot_draws, tidy
from jaxttp.plots.conditioning import plot_rank_sensitivity, plot_spectrum

CLAIM = {
    "gnc-9": "κ may be robust against the numerical rank (initialization) or very sensitive to it "
    "(epoch 100). (GNC Figure 9, Appendix C)",
    "gnc-18": "Wider is better conditioned, converges faster, and κ is more stable along training. "
    "(GNC Figure 18)",
}

LOSS = 0.1
SHADES = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2", "#000000")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Appendix I.2, on centered images that are not whitened.

    Attributes:
        data: images by name.
        samples: n.
        widths: m.
        rates: learning rate of each.
        epochs: of SGD.
        batch_size: a step.
        points: epochs of the checkpoints, the last one is the end.
        spectrum_width: m of Figure 9.
        spectrum_samples: n of Figure 9.
        seeds: of weights and batches.
        seed: of samples.
    """

    data: str = "digits"
    samples: int = cuts.few(32, 100)
    widths: tuple[int, ...] = (15, 20, 30, 60, 120)
    rates: tuple[float, ...] = cuts.first((0.3, 0.3, 0.5, 0.5, 0.5))
    epochs: int = cuts.one(100)
    batch_size: int = cuts.few(4, 20)
    points: tuple[int, ...] = cuts.points((0, 2, 5, 10, 20, 40, 70, 100))
    spectrum_width: int = 20
    spectrum_samples: int = cuts.few(32, 200)
    seeds: int = cuts.one(3)
    seed: int = 0


PRESETS = {
    "smoke": Settings(samples=20, widths=(5,), rates=(0.3,), epochs=4, batch_size=10,
                      points=(0, 4), spectrum_width=5, spectrum_samples=20, seeds=2),
    "cpu": Settings(),
    "paper": Settings(
        data="mnist", samples=1000, widths=(15, 20, 50, 100, 200), batch_size=64,
        points=tuple(range(0, 101, 10)), spectrum_samples=1000,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    """One width and seed.

    Attributes:
        loss: at every step (T + 1,).
        epochs: of the checkpoints (P,).
        condition: kappa (P,).
        rank: what counted as non-zero (P,).
        size: of the matrix: the smaller of parameters and samples times outputs.
    """

    loss: np.ndarray
    epochs: np.ndarray
    condition: np.ndarray
    rank: np.ndarray
    size: int


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything.

    Attributes:
        runs: width -> a run for each seed.
        spectra: epoch -> the Gauss-Newton matrix's eigenvalues, descending.
    """

    runs: dict[int, list[Run]]
    spectra: dict[int, np.ndarray]


def network(params: dict[str, Any], x: Any) -> Any:
    """f(x) = W relu(V x + b) + c, a sample a row."""
    hidden = jax.nn.relu(x @ params["V"].T + params["b"][None])
    return hidden @ params["W"].T + params["c"][None]


def xavier(d: int, m: int, k: int, key: Any) -> dict[str, Any]:
    """Weights ~ N(0, 2 / (fan-in + fan-out)), biases 0."""
    keys = jax.random.split(key)
    return {
        "V": jax.random.normal(keys[0], (m, d), jnp.float32) * (2 / (d + m)) ** 0.5,
        "W": jax.random.normal(keys[1], (k, m), jnp.float32) * (2 / (m + k)) ** 0.5,
        "b": jnp.zeros(m, jnp.float32),
        "c": jnp.zeros(k, jnp.float32),
    }


def run(settings: Settings, store: Store | None = None) -> Result:
    """Train every width and seed, and measure.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where the runs are kept.

    Returns:
        A `Result`.
    """
    store = store or Store()
    inputs = load_inputs(settings.data, whiten=False, seed=settings.seed)
    x = inputs.x.astype(np.float32)
    assert inputs.labels is not None
    rows = np.random.default_rng(settings.seed).permutation(len(x))
    classes = int(inputs.labels.max()) + 1
    labels = inputs.labels

    def train(width: int, rate: float, seed: int, samples: int, points: Any) -> Any:
        chosen = rows[:samples]
        batches = samples // settings.batch_size
        due = {epoch * batches for epoch in points}
        spectra: list[Any] = []

        def kappa(step: int, params: Any, loss: float) -> None:
            if step in due:
                matrix = curvature_matrix(network, params, x[chosen])
                spectra.append(condition_number(matrix, spectrum=True))

        run = jaxttp.train(
            network, xavier(x.shape[1], width, classes, jax.random.key(seed)), x[chosen],
            labels[chosen], loss="cross_entropy", optimizer=optax.sgd(rate),
            steps=settings.epochs * batches, batch_size=settings.batch_size,
            key=jax.random.key(seed), callback=kappa,
        )  # fmt: skip
        return np.asarray(run.loss), spectra

    def one(width: int, rate: float, seed: int) -> Run:
        loss, spectra = train(width, rate, seed, settings.samples, settings.points)
        return Run(
            loss, np.array(settings.points),
            np.array([float(found.value) for found in spectra]),
            np.array([int(found.rank) for found in spectra]),
            len(spectra[0].eigenvalues),
        )  # fmt: skip

    def spectrum() -> dict[int, np.ndarray]:
        ends = (0, settings.epochs)
        _, spectra = train(
            settings.spectrum_width, settings.rates[0], 0, settings.spectrum_samples, ends
        )
        return {
            epoch: np.asarray(found.eigenvalues)
            for epoch, found in zip(ends, spectra, strict=True)
        }  # fmt: skip

    pieces: dict[str, Any] = {
        f"m = {width}, seed {seed}": functools.partial(one, width, rate, seed)
        for width, rate in zip(settings.widths, settings.rates, strict=True)
        for seed in range(settings.seeds)
    }
    found = store.all(pieces | {"spectrum": spectrum})
    runs = {
        width: [found[f"m = {width}, seed {seed}"] for seed in range(settings.seeds)]
        for width in settings.widths
    }
    return Result(runs, found["spectrum"])


def plot(result: Result) -> dict[str, Figure]:
    """The two pictures."""
    first = Figure(figsize=(10.5, 7.2), layout="constrained")
    for (left, right), (epoch, values) in zip(
        first.subplots(2, 2), result.spectra.items(), strict=True
    ):
        found = condition_number(np.diag(values))
        plot_spectrum(left, found)
        plot_rank_sensitivity(right, rank_sensitivity(found))
        left.set_title(f"epoch {epoch}: spectrum")
        right.set_title(f"epoch {epoch}: κ by rank")
        for axes in (left, right):
            axes.legend(frameon=False)
            tidy(axes)
    second = Figure(figsize=(10.5, 4.2), layout="constrained")
    left, right = second.subplots(1, 2)
    for (width, runs), color in zip(result.runs.items(), SHADES, strict=False):
        epochs = np.linspace(0, runs[0].epochs[-1], len(runs[0].loss))
        loss = np.stack([one.loss for one in runs], axis=1)
        left.semilogy(epochs, np.median(loss, axis=1), color=color, label=f"m = {width}")
        kappa = np.stack([one.condition for one in runs], axis=1)
        plot_draws(right, runs[0].epochs, kappa, label=f"m = {width}", color=color)
    left.set(xlabel="epoch", ylabel="training loss, median of the seeds")
    right.set_yscale("log")
    right.set(xlabel="epoch", ylabel="condition number")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
        tidy(axes)
    return {"gnc-9": first, "gnc-18": second}


def _epoch_below(runs: list[Run]) -> float:
    """Epoch at which the median loss of the seeds first falls below `LOSS`, inf if never."""
    loss = np.median(np.stack([one.loss for one in runs], axis=1), axis=1)
    below = np.flatnonzero(loss < LOSS)
    return runs[0].epochs[-1] * below[0] / (len(loss) - 1) if below.size else np.inf


def measure(result: Result) -> dict[str, list[str]]:
    """Kappa by width and epoch, the loss at the end; kappa at neighboring ranks."""
    lines = []
    for width, runs in result.runs.items():
        kappa = np.stack([one.condition for one in runs], axis=1)
        spread = np.median(kappa.max(axis=0) / kappa.min(axis=0))
        lines.append(
            f"m = {width}: κ {np.median(kappa[0]):.3g} at the start, {np.median(kappa[-1]):.3g} at "
            f"the end, largest over smallest {spread:.3g}; rank {runs[0].rank[0]} of "
            f"{runs[0].size}; loss at the end {np.median([one.loss[-1] for one in runs]):.3g}, "
            f"below {LOSS:g} from epoch {_epoch_below(runs):.1f} on"
        )
    near = []
    for epoch, values in result.spectra.items():
        found = rank_sensitivity(condition_number(np.diag(values)))
        place = int(np.flatnonzero(found.ranks == found.rank)[0])
        around = {
            move: found.values[place + move]
            for move in (-50, -10, -1, 0, 1, 10)
            if 0 <= place + move < len(found.values)
        }
        text = ", ".join(f"{move:+d}: {value:.3g}" for move, value in around.items())
        near.append(
            f"epoch {epoch}: rank {found.rank} of {len(values)}; κ at the rank {text}; one "
            f"eigenvalue fewer reduces it {around[0] / around[-1]:.2g} times"
        )
        if found.rank < len(values) and values[found.rank] > 0:
            gap = np.log10(values[found.rank - 1] / values[found.rank])
            near[-1] += f"; gap below the smallest {gap:.1f} orders of magnitude"
    return {"gnc-9": near, "gnc-18": lines}
