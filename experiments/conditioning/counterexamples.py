"""Three statements of the paper that are false, each with the example that shows it.

- Eq (8) "skips always improve": true of symmetric PSD layers, not of others.
- (25) and (26), behind the second bound of Lemma 4: the slopes cannot be pulled out of the sum.
- Appendix B, the bound for fully-connected layers on Toeplitz matrices: weight sharing changes the
  Jacobian.
"""

import dataclasses
import functools

import jax
import numpy as np
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Store
from jaxttp.conditioning import (
    condition_number,
    gauss_newton_convolution,
    gauss_newton_linear,
    gaussian_weights,
    linear_bound,
    toeplitz,
)
from jaxttp.plots import GREY, OTHER, PREDICTED, REAL, tidy

CLAIM = {
    "ours-skip": "False: a skip improves κ of every layer, (σmax + β)/(σmin + β) < σmax/σmin. "
    "(GNC eq (8))",
    "ours-slopes": "False: α² λ(XᵀVᵀVX) ≤ λ(Γ) ≤ λ(XᵀVᵀVX) for the smallest and the largest "
    "eigenvalue. (GNC (25) and (26))",
    "ours-convolution": "False: the bounds transfer to convolutions by their Toeplitz matrices. "
    "(GNC Appendix B)",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How finely to look.

    Attributes:
        skips: beta.
        depth: layers of the linear networks with skips.
        sizes: d = m = k of random square networks.
        draws: of those, and of the random layers for (25) and (26).
        slopes: alpha.
        length: of the inputs of the convolution.
        gaps: differences of its two filters.
        seed: of all draws.
    """

    skips: tuple[float, ...] = tuple(np.round(np.arange(0, 2.01, 0.05), 2).tolist())
    depth: int = 3
    sizes: tuple[int, ...] = cuts.few(8, (2, 4, 8, 16))
    draws: int = 200
    slopes: tuple[float, ...] = (0.0, 0.1, 0.5)
    length: int = 12
    gaps: tuple[float, ...] = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
    seed: int = 0


PRESETS = {
    "smoke": Settings(skips=(0.0, 0.45, 0.9), sizes=(2,), draws=4, gaps=(0.001,)),
    "cpu": Settings(),
    "paper": Settings(),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything that is drawn.

    Attributes:
        settings: as given.
        layers: name -> kappa^2(W + beta I), (beta,).
        networks: name -> kappa of the network of these layers, (beta,).
        gain: size -> kappa with beta = 1 over kappa without, (draws,).
        slopes: alpha -> (draws, 2): smallest and largest eigenvalue of Gamma over what (25) and
            (26) say; the first below 1 or the second above 1 contradicts them.
        named: what the two named examples give: (l_min(Gamma), (25), l_max(Gamma), (26)).
        convolution: (gaps, 2): exact kappa, the fully-connected bound.
    """

    settings: Settings
    layers: dict[str, np.ndarray]
    networks: dict[str, np.ndarray]
    gain: dict[int, np.ndarray]
    slopes: dict[float, np.ndarray]
    named: np.ndarray
    convolution: np.ndarray


LAYERS = {
    "PSD: diag(1, 1.2)": np.diag([1.0, 1.2]),
    "diag(−1, −1.2)": np.diag([-1.0, -1.2]),
}


def gamma(v: np.ndarray, x: np.ndarray, alpha: float) -> np.ndarray:
    """Gamma = sigma(V X)^T sigma(V X), (n, n)."""
    hidden = v @ x
    active = np.where(hidden > 0, hidden, alpha * hidden)
    return active.T @ active


def slope_ratios(v: np.ndarray, x: np.ndarray, alpha: float) -> tuple[float, float, float, float]:
    """Smallest eigenvalue of Gamma and (25), largest and (26)."""
    true = np.linalg.eigvalsh(gamma(v, x, alpha))
    linear = np.linalg.eigvalsh(x.T @ v.T @ v @ x)
    return true[0], alpha**2 * linear[0], true[-1], linear[-1]


def run(settings: Settings, store: Store | None = None) -> Result:
    """The three examples.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where they are kept.

    Returns:
        A `Result`.
    """
    store = store or Store()

    def skip() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        layers, networks = {}, {}
        for name, w in LAYERS.items():
            one = [np.linalg.cond(w + beta * np.eye(2)) ** 2 for beta in settings.skips]
            layers[name] = np.array(one)
            networks[name] = np.array([
                _kappa([w] * settings.depth, beta) for beta in settings.skips
            ])  # fmt: skip
        return layers, networks

    def gain(size: int) -> np.ndarray:
        out = []
        for draw in range(settings.draws):
            key = jax.random.fold_in(jax.random.key(settings.seed), draw)
            weights = gaussian_weights((size,) * (settings.depth + 1), key=key)
            out.append(_kappa(weights, 1.0) / _kappa(weights, 0.0))
        return np.array(out)

    def slopes(alpha: float) -> np.ndarray:
        rng = np.random.default_rng(settings.seed)
        rows = []
        for _ in range(settings.draws):
            v, x = rng.standard_normal((4, 4)), rng.standard_normal((4, 4))
            low, low_said, high, high_said = slope_ratios(v, x, alpha)
            rows.append((low / low_said if alpha else np.inf, high / high_said))
        return np.array(rows)

    def convolution() -> np.ndarray:
        rows = []
        for gap in settings.gaps:
            filters = [np.array([[[1.0, -0.5]]]), np.array([[[1.0, -0.5 + gap]]])]
            matrix = gauss_newton_convolution(filters, (settings.length,))
            exact = float(condition_number(matrix).value)
            chain, length = [], settings.length
            for one in filters:
                chain.append(toeplitz(one, (length,)))
                length -= 1
            rows.append((exact, float(linear_bound(chain).convex)))
        return np.array(rows)

    def named() -> np.ndarray:
        first = np.array([[1.0, -1.0], [-1.0, 0.01]])
        second = np.array([[1.0, 1.0], [1.0, -1.0]])
        x = np.eye(2)
        return np.array([*slope_ratios(first, x, 0.1)[:2], *slope_ratios(second, x, 0.0)[2:]])

    pieces = {"skip": skip, "named": named, "convolution": convolution}
    pieces |= {f"gain {size}": functools.partial(gain, size) for size in settings.sizes}
    pieces |= {f"slope {alpha}": functools.partial(slopes, alpha) for alpha in settings.slopes}
    found = store.all(pieces)
    return Result(
        settings,
        *found["skip"],
        {size: found[f"gain {size}"] for size in settings.sizes},
        {alpha: found[f"slope {alpha}"] for alpha in settings.slopes},
        found["named"],
        found["convolution"],
    )


def _kappa(weights: list, beta: float) -> float:
    return float(condition_number(gauss_newton_linear(weights, skip=beta)).value)


def plot(result: Result) -> dict[str, Figure]:
    """The three pictures."""
    settings = result.settings
    first = Figure(figsize=(10.5, 4.2), layout="constrained")
    left, right = first.subplots(1, 2)
    for (name, values), color in zip(result.layers.items(), (PREDICTED, REAL), strict=True):
        left.semilogy(settings.skips, values, color=color, label=f"κ²(W + βI), {name}")
        left.semilogy(
            settings.skips, result.networks[name], color=color, ls="--",
            label=f"κ of {settings.depth} layers, {name}",
        )  # fmt: skip
    left.set(
        title="W + βI is singular at β = 1 and 1.2",
        xlabel="skip weight β",
        ylabel="condition number",
        ylim=(0.8, 1e5),
    )
    left.legend(frameon=False, fontsize=8)
    sizes = list(result.gain)
    right.boxplot(
        [np.log10(result.gain[size]) for size in sizes], tick_labels=list(map(str, sizes))
    )
    right.axhline(0.0, color=GREY, ls=":")
    for place, size in enumerate(sizes, start=1):
        fraction = np.mean(result.gain[size] > 1)
        worse = f"worse in {fraction:.0%}"
        right.annotate(worse, (place, right.get_ylim()[1]), ha="center", va="top",
                       fontsize=8)  # fmt: skip
    right.set(title=f"Random square networks, {settings.depth} layers", xlabel="d = m = k",
              ylabel="log₁₀ of κ with β = 1 over κ without")  # fmt: skip
    second = Figure(figsize=(10.5, 4.2), layout="constrained")
    left_, right_ = second.subplots(1, 2)
    # 0 is the edge of a bin in both panels
    for axes, column, bins in (
        (left_, 0, np.linspace(-2, 2, 41)), (right_, 1, np.linspace(-0.8, 0.4, 25))
    ):  # fmt: skip
        for (alpha, table), color in zip(
            result.slopes.items(), (GREY, PREDICTED, OTHER), strict=False
        ):
            values = table[:, column]
            if np.all(np.isfinite(values)):
                values = np.log10(np.maximum(values, 1e-300)).clip(bins[0], bins[-1])
                label = f"α = {alpha:g}"
                axes.hist(values, bins, histtype="step", color=color, lw=1.8, label=label)
    left_.set(title="bound (25): violated left of 0", xlabel="log₁₀ λmin(Γ) / (25), cut at ±2")
    right_.set(title="bound (26): violated right of 0", xlabel="log₁₀ λmax(Γ) / (26)")
    for axes in (left_, right_):
        axes.axvline(0.0, color=REAL, ls=":")
        axes.set_ylabel("random layers (d = m = n = 4)")
        axes.legend(frameon=False, fontsize=9)
    third = Figure(figsize=(6.8, 4.4), layout="constrained")
    axes = third.subplots()
    axes.loglog(settings.gaps, result.convolution[:, 0], "o-", color=PREDICTED, label="κ, exact")
    axes.loglog(settings.gaps, result.convolution[:, 1], "o--", color=REAL,
                label="convex bound of the Toeplitz matrices")  # fmt: skip
    axes.set(title=f"Filters (1, −0.5) and (1, −0.5 + δ), inputs of length {settings.length}",
             xlabel="δ", ylabel="condition number")  # fmt: skip
    axes.legend(frameon=False, fontsize=9)
    for one in (left, right, left_, right_, axes):
        tidy(one)
    return {"ours-skip": first, "ours-slopes": second, "ours-convolution": third}


def measure(result: Result) -> dict[str, list[str]]:
    """The numbers of each counter-example."""
    skips = np.array(result.settings.skips)
    layer = result.layers["diag(−1, −1.2)"]
    at = int(np.argmin(np.abs(skips - 0.9)))
    fractions = [f"{size}: {np.mean(gain > 1):.0%}" for size, gain in result.gain.items()]
    low, low_said, high, high_said = result.named
    broken = [
        f"α = {alpha:g}: (25) violated in {np.mean(table[:, 0] < 1 - 1e-9):.0%}, (26) in "
        f"{np.mean(table[:, 1] > 1 + 1e-9):.0%} of the draws"
        for alpha, table in result.slopes.items()
    ]
    gaps = [
        f"δ = {gap:g}: κ {exact:.3g}, 'bound' {bound:.3g}"
        for gap, (exact, bound) in zip(result.settings.gaps, result.convolution, strict=True)
    ]
    return {
        "ours-skip": [
            f"diag(−1, −1.2): κ² {layer[0]:.3g} without, {layer[at]:.3g} at β = {skips[at]:g}",
            f"random square networks that β = 1 makes worse, by size: {'; '.join(fractions)}",
        ],
        "ours-slopes": [
            f"V = [[1, −1], [−1, .01]], α = .1: λmin(Γ) = {low:.2g}, (25) says ≥ {low_said:.2g}",
            f"V = [[1, 1], [1, −1]], α = 0: λmax(Γ) = {high:.4g}, (26) says ≤ {high_said:.4g}",
            *broken,
        ],
        "ours-convolution": gaps,
    }
