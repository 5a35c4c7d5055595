"""Figure 4: training with a projected kernel, the projection's error and time, spectra by size.

On embedded data a "data set" is a task: digit splits, tables, image patches.
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Store
from experiments.training_time.comparison import (
    COLORS,
    MIT67,
    Source,
    Way,
    forecast,
    kernel_of,
    load,
    name_of,
    real_curves,
)
from jaxttp import Model, empirical_ntk, sketch_jacobian, training_time
from jaxttp.ntk import eigendecomposition, fit_power_law
from jaxttp.plots import GREY, OTHER, PREDICTED, REAL, tidy

CLAIM = {
    "ttp-4": "A projected Θ describes the training as well as the exact one, at half the time and "
    "a hundredth of the memory; spectra of subsets converge to a common power law. (TTP Figure 4)",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """A task, projections and sizes.

    Attributes:
        task: its name or pipeline settings.
        dim: D', width of the projection of the left and middle panels.
        kind: of random projection, see `jaxttp.sketch_jacobian`.
        sizes: samples N of the middle and right panels.
        draws: projections a size.
        rate: effective learning rate of the left panel.
        relative: whether it is in units of N / lambda_max.
        steps: T.
        repeats: of every timing.
        seed: of everything.
    """

    task: Source = "digits 5-9, MLP"
    dim: int = cuts.few(9, 1000)
    kind: str = "achlioptas"
    sizes: tuple[int, ...] = cuts.few(8, (20, 40, 80, 150))
    draws: int = 3
    rate: float = 1.0
    relative: bool = True
    steps: int = cuts.one(150)
    repeats: int = cuts.one(3)
    seed: int = 0


PRESETS = {
    "smoke": Settings(
        task="wine, MLP", dim=50, sizes=(20, 120), draws=1, steps=10, repeats=1
    ),
    "cpu": Settings(),
    "paper": Settings(
        task=dataclasses.replace(MIT67, samples_per_class=60), dim=10_000,
        sizes=(25, 50, 100, 150, 300), rate=0.001, relative=False,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Curves:
    """Losses (T + 1,): real, by the exact kernel and by the projected one."""

    real: np.ndarray
    exact: np.ndarray
    projected: np.ndarray


@dataclasses.dataclass(frozen=True)
class Size:
    """Kernels of N samples.

    Attributes:
        samples: N.
        error: relative Frobenius error of every projected kernel (draws,).
        exact_seconds: median seconds to build the exact kernel, compilation apart.
        projected_seconds: likewise, projection and product.
        spectrum: eigenvalues of Theta/N in decreasing order (N C,).
        outputs: C.
        parameters: D.
    """

    samples: int
    error: np.ndarray
    exact_seconds: float
    projected_seconds: float
    spectrum: np.ndarray
    outputs: int
    parameters: int


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        settings: how.
        curves: the left panel.
        sizes: the others.
    """

    settings: Settings
    curves: Curves
    sizes: list[Size]


def run(settings: Settings, store: Store | None = None) -> Result:
    """Curves from both kernels, and kernels of all sizes.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where the results are kept.

    Returns:
        A `Result`.
    """
    store = store or Store()

    def project(model: Model, x: np.ndarray, draw: int) -> jax.Array:
        key = jax.random.key(settings.seed + 700 + draw)
        rows = sketch_jacobian(*model, x, key=key, dim=settings.dim, kind=settings.kind)
        return jnp.einsum("ncd,med->ncme", rows, rows, precision="highest")

    def curves() -> Curves:
        job = load(settings.task, settings.seed)
        kernel = kernel_of(job)
        eta = settings.rate * (kernel.unit if settings.relative else 1.0)
        other = dataclasses.replace(kernel, theta=project(job.model, job.x, 0))
        real = real_curves(job, eta, Way(eta), steps=settings.steps)[0]
        exact, projected = (forecast(k, eta, steps=settings.steps)[0] for k in (kernel, other))
        return Curves(real, exact, projected)

    def size(samples: int) -> Size:
        job = load(settings.task, settings.seed, samples)
        theta, exact = _timed(lambda: empirical_ntk(*job.model, job.x), settings.repeats)
        errors, seconds = [], []
        for draw in range(settings.draws):
            other, took = _timed(lambda d=draw: project(job.model, job.x, d), settings.repeats)
            errors.append(float(jnp.linalg.norm(other - theta) / jnp.linalg.norm(theta)))
            seconds.append(took)
        values = np.asarray(eigendecomposition(theta).values) / samples
        parameters = sum(leaf.size for leaf in jax.tree.leaves(job.model.params))
        return Size(
            samples, np.array(errors), exact, float(np.median(seconds)), values,
            theta.shape[1], parameters,
        )  # fmt: skip

    pieces = {f"N = {n}": functools.partial(size, n) for n in settings.sizes}
    return Result(settings, store.get("curves", curves), list(store.all(pieces).values()))


def _timed(make: Callable[[], jax.Array], repeats: int) -> tuple[jax.Array, float]:
    """What `make` returns, and the median of its seconds after a first call that compiles."""
    made, seconds = jax.block_until_ready(make()), []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(make())
        seconds.append(time.perf_counter() - begun)
    return made, float(np.median(seconds))


def plot(result: Result) -> dict[str, Figure]:
    """Curves, error and time by N, spectra."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    settings, curves = result.settings, result.curves
    left.plot(curves.real, color=REAL, lw=2.2, label="real training")
    left.plot(curves.exact, "--", color=PREDICTED, lw=2, label="eq (1), exact Θ")
    label = f"eq (1), Θ of {settings.dim} projections"
    left.plot(curves.projected, ":", color=OTHER, lw=2.5, label=label)
    left.set(xlabel="step", ylabel="training loss", title=f"{name_of(settings.task)}, full batch")
    left.legend(frameon=False, fontsize=9)
    n = [size.samples for size in result.sizes]
    errors = np.array([100 * size.error.mean() for size in result.sizes])
    middle.plot(n, errors, "o-", color=REAL)
    middle.set_ylim(0, 1.25 * errors.max())
    middle.set_ylabel("relative error of Θ, Frobenius (%)", color=REAL)
    middle.set(xlabel="samples N", title=f"{settings.kind.title()} projection, D' = {settings.dim}")
    clock = middle.twinx()
    for values, style, label in (
        ([size.exact_seconds for size in result.sizes], "s--", "exact"),
        ([size.projected_seconds for size in result.sizes], "s-", "projected"),
    ):
        clock.plot(n, values, style, color=PREDICTED, label=f"{label}, seconds")
    clock.set_yscale("log")
    clock.set_ylabel("seconds of a kernel", color=PREDICTED)
    clock.legend(frameon=False, fontsize=9, loc="lower right")
    for size, color in zip(result.sizes, COLORS, strict=False):
        values = size.spectrum[size.spectrum > 1e-9 * size.spectrum[0]]
        ranks = np.arange(1, len(values) + 1)
        right.loglog(ranks, values, color=color, lw=1.6, label=f"N = {size.samples}")
    law = fit_power_law(result.sizes[-1].spectrum)
    ranks = np.geomspace(*law.window, 20)
    line = float(law.coefficient) * ranks ** -float(law.exponent)
    right.loglog(ranks, line, "--", color=GREY, lw=3, alpha=0.7, zorder=0,
                 label=f"$k^{{-{float(law.exponent):.2f}}}$")  # fmt: skip
    right.set(xlabel="rank k", ylabel="eigenvalue of Θ/N", title="spectra of subsets")
    right.legend(frameon=False, fontsize=9)
    for axes in (left, middle, right):
        tidy(axes)
    return {"ttp-4": figure}


def measure(result: Result) -> dict[str, list[str]]:
    """Times, errors, exponents."""
    lines = []
    for name, curve in dataclasses.asdict(result.curves).items():
        times = ", ".join(str(int(training_time(curve, e))) for e in (0.01, 0.1, 0.4))
        lines.append(f"{name}: loss {curve[-1]:.4g} at the end, times at 1, 10, 40 %: {times}")
    for size in result.sizes:
        law = fit_power_law(size.spectrum)
        lines.append(
            f"N = {size.samples}: error of Θ {100 * size.error.mean():.1f} %, exact "
            f"{size.exact_seconds:.3g} s, projected {size.projected_seconds:.3g} s "
            f"({size.projected_seconds / size.exact_seconds:.0f} times), largest eigenvalue of Θ/N "
            f"{size.spectrum[0]:.4g}, exponent {float(law.exponent):.2f} (R² "
            f"{float(law.r_squared):.3f}), D / D' = {size.parameters / result.settings.dim:.1f}"
        )
    last = result.sizes[-1].spectrum
    for size in result.sizes[:-1]:
        k = np.unique(np.geomspace(1, len(size.spectrum) // 2, 20).astype(int)) - 1
        off = np.median(np.abs(np.log(size.spectrum[k] / last[k])))
        lines.append(
            f"N = {size.samples} against {result.sizes[-1].samples}: leading half of the "
            f"eigenvalues off by {100 * (np.exp(off) - 1):.0f} % (median)"
        )
    return {"ttp-4": lines}
