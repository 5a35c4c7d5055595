"""The statements on two-factor cross-entropy dynamics, one panel each, predicted and measured.

In float64; f (b, h) and W (h, V) start balanced, f^T f = W W^T, save where a panel says otherwise.
Panels:

    A  f^T f - W W^T is conserved by the flow; gradient descent drifts
    B  that drift after a fixed time falls with the learning rate as eta^1
    C  Theorem B.2: balanced factors share singular values; others do not
    D  Lemma B.1 and Theorem B.3: predicted rates of singular values against finite differences
    E  at uniform prediction max |g_i| <= ||A||_2 <= sqrt(N_max); the printed O(N_max) is loose
    F  class imbalance: the effective rank of f along the flow
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Store
from jaxttp.dynamics.two_factor import (
    TwoFactorObservables,
    TwoFactorTrajectory,
    balanced_features,
    power_law_labels,
    two_factor_descent,
    two_factor_flow,
    two_factor_observables,
)
from jaxttp.plots import PREDICTED, REAL, tidy
from jaxttp.representation import rankme

CLAIM = {
    "two-factor-theorems": "Lemma B.1, Theorems B.2 and B.3: balanced factors share their singular "
    "values, whose rates are known; the bounds at uniform prediction. (TFD Appendix B)"
}

GREY, GREEN = "0.45", "#009E73"
COLORS = (GREY, REAL, "#E69F00", PREDICTED, "#CC79A7")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes and times; one unit of time is one step at learning rate `rate`.

    Attributes:
        samples: b.
        width: h.
        classes: V.
        scale: standard deviation of W's entries.
        rate: eta of the flow.
        end: last time of the flow.
        points: recorded times.
        rates: learning rates of gradient descent, in falling order.
        span: eta * steps of gradient descent, the same for all rates.
        exponents: of the power laws of class sizes.
        seed: of W and of the rotation of f.
    """

    samples: int = cuts.few(32, 240)
    width: int = 8
    classes: int = 24
    scale: float = 0.05
    rate: float = 0.02
    end: float = 400.0
    points: int = cuts.points(81)
    rates: tuple[float, ...] = cuts.first((0.04, 0.02, 0.01, 0.005, 0.0025))
    span: float = 4.0
    exponents: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    seed: int = 0


PRESETS = {
    "cpu": Settings(),
    "smoke": Settings(
        samples=24, width=3, classes=6, end=100.0, points=21, rates=(0.04, 0.01), span=2.0,
        exponents=(0.0, 1.0),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    """What the panels show; all arrays NumPy, float64.

    Attributes:
        settings: the sizes.
        ts: times (T,).
        flow_drift: max |f^T f - W W^T - its start| along the flow (T,).
        descent_drift: the same along gradient descent, eta -> (steps + 1,).
        drift_slope: of log drift over log eta at the end.
        balanced: (S_1, S_2) along the balanced flow, (T, r) each.
        unbalanced: the same from a start that is not balanced.
        alignment: |v_1i . u_2i| along the balanced flow, (T, r).
        measured: finite differences of S_1 along the balanced flow (T - 2, r).
        lemma: Lemma B.1 there.
        theorem: Theorem B.3 there.
        unbalanced_measured: as `measured`, from the start that is not balanced.
        unbalanced_lemma: Lemma B.1, which needs no balance.
        unbalanced_theorem: Theorem B.3, whose premise fails there.
        bounds: exponent -> (max |g|, ||A||_2, sqrt(N_max), N_max) at uniform prediction.
        rank: exponent -> RankMe of f along the flow (T,).
        loss: exponent -> mean loss (T,).
        seconds: wall time of everything.
    """

    settings: Settings
    ts: np.ndarray
    flow_drift: np.ndarray
    descent_drift: dict[float, np.ndarray]
    drift_slope: float
    balanced: tuple[np.ndarray, np.ndarray]
    unbalanced: tuple[np.ndarray, np.ndarray]
    alignment: np.ndarray
    measured: np.ndarray
    lemma: np.ndarray
    theorem: np.ndarray
    unbalanced_measured: np.ndarray
    unbalanced_lemma: np.ndarray
    unbalanced_theorem: np.ndarray
    bounds: dict[float, tuple[float, float, float, float]]
    rank: dict[float, np.ndarray]
    loss: dict[float, np.ndarray]
    seconds: float

    def worst(self) -> dict[str, float]:
        """One number a statement: how far it is from what was measured."""
        size = np.abs(self.measured).max()
        other = np.abs(self.unbalanced_measured).max()
        return {
            "drift of the invariant, flow": float(self.flow_drift.max()),
            "slope of the drift in eta, descent": self.drift_slope,
            "Theorem B.2: |S_1 - S_2|": float(np.abs(self.balanced[0] - self.balanced[1]).max()),
            "Theorem B.2: 1 - alignment": float(1 - self.alignment.min()),
            "Lemma B.1, relative": float(np.abs(self.lemma - self.measured).max() / size),
            "Theorem B.3, relative": float(np.abs(self.theorem - self.measured).max() / size),
            "Lemma B.1 off balance, relative": float(
                np.abs(self.unbalanced_lemma - self.unbalanced_measured).max() / other
            ),
            "Theorem B.3 off balance, relative": float(
                np.abs(self.unbalanced_theorem - self.unbalanced_measured).max() / other
            ),
            "||A||_2 / sqrt(N_max), largest": max(b / c for _, b, c, _ in self.bounds.values()),
            "max |g| / N_max, largest": max(a / d for a, _, _, d in self.bounds.values()),
        }


def run(settings: Settings, store: Store | None = None) -> Result:
    """Compute every panel.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where the result is kept.

    Returns:
        A `Result`.
    """
    store = store or Store()
    with jax.enable_x64(True):
        return store.get("result", lambda: _run(settings))


def _run(settings: Settings) -> Result:
    begun = time.perf_counter()
    keys = jax.random.split(jax.random.key(settings.seed), 3)
    w = settings.scale * jax.random.normal(keys[0], (settings.width, settings.classes))
    f = balanced_features(w, settings.samples, key=keys[1])
    other = settings.scale * jax.random.normal(keys[2], f.shape)
    ts = jnp.geomspace(1e-3 * settings.end, settings.end, settings.points - 1)
    ts = jnp.concatenate([jnp.zeros(1), ts])
    # Every time between the ends three times over, for central differences.
    step = 1e-4 * ts[1:-1]
    times = (ts[1:-1, None] + step[:, None] * jnp.array([[-1.0, 0.0, 1.0]])).reshape(-1)
    times = jnp.concatenate([ts[:1], times, ts[-1:]])
    whole = np.r_[0, 2 : len(times) - 1 : 3, len(times) - 1]  # where `ts` is in `times`
    rate = settings.rate

    # Compiled once for all starts and class sizes.
    @jax.jit
    def solve(f: Any, w: Any, labels: Any) -> TwoFactorTrajectory:
        return two_factor_flow(f, w, labels, learning_rate=rate, ts=times, rtol=1e-12, atol=1e-14)

    @jax.jit
    def observe(path: TwoFactorTrajectory, labels: Any) -> TwoFactorObservables:
        return jax.vmap(lambda f, w: two_factor_observables(f, w, labels, learning_rate=rate))(
            path.f, path.w
        )

    def flow(f: Any, w: Any, labels: Any) -> tuple[TwoFactorTrajectory, TwoFactorObservables]:
        path = jax.block_until_ready(solve(f, w, labels))
        return path, jax.block_until_ready(observe(path, labels))

    def measured(seen: TwoFactorObservables) -> np.ndarray:
        inner = np.asarray(seen.singular_f)[1:-1].reshape(len(ts) - 2, 3, -1)
        return (inner[:, 2] - inner[:, 0]) / (2 * np.asarray(step)[:, None])

    labels = power_law_labels(settings.samples, settings.classes, exponent=1.0)
    path, seen = flow(f, w, labels)
    _, off = flow(other, w, labels)
    drifts = {
        eta: _drift(
            two_factor_descent(f, w, labels, learning_rate=eta, steps=round(settings.span / eta))
        )
        for eta in settings.rates
    }
    last = [drift[-1] for drift in drifts.values()]
    slope = np.polyfit(np.log(settings.rates), np.log(last), 1)[0]
    bounds, rank, loss = {}, {}, {}
    for exponent in settings.exponents:
        classes = power_law_labels(settings.samples, settings.classes, exponent=exponent)
        start = two_factor_observables(1e-9 * f, 1e-9 * w, classes, learning_rate=rate)
        largest = float(np.bincount(np.asarray(classes)).max())
        bounds[exponent] = (
            float(jnp.max(jnp.abs(start.g))), float(start.residual_norm), largest**0.5, largest,
        )  # fmt: skip
        curve, moments = flow(f, w, classes)
        rank[exponent] = np.asarray(jax.vmap(rankme)(curve.f[whole]))
        loss[exponent] = np.asarray(moments.loss[whole]) / settings.samples
    return Result(
        settings=settings,
        ts=np.asarray(ts),
        flow_drift=_drift(path)[whole],
        descent_drift=drifts,
        drift_slope=float(slope),
        balanced=(np.asarray(seen.singular_f), np.asarray(seen.singular_w)),
        unbalanced=(np.asarray(off.singular_f), np.asarray(off.singular_w)),
        alignment=np.asarray(seen.alignment),
        measured=measured(seen),
        lemma=np.asarray(seen.rate_f)[2:-1:3],
        theorem=np.asarray(seen.theorem_f)[2:-1:3],
        unbalanced_measured=measured(off),
        unbalanced_lemma=np.asarray(off.rate_f)[2:-1:3],
        unbalanced_theorem=np.asarray(off.theorem_f)[2:-1:3],
        bounds=bounds,
        rank=rank,
        loss=loss,
        seconds=time.perf_counter() - begun,
    )


def _drift(path: TwoFactorTrajectory) -> np.ndarray:
    """Max |f^T f - W W^T - its start| over time."""
    f, w = np.asarray(path.f), np.asarray(path.w)
    imbalance = np.swapaxes(f, 1, 2) @ f - w @ np.swapaxes(w, 1, 2)
    return np.abs(imbalance - imbalance[:1]).max(axis=(1, 2))


def figure(result: Result) -> Figure:
    """The six panels.

    Args:
        result: of `run`.

    Returns:
        A matplotlib figure.
    """
    out = Figure(figsize=(14, 8.2), layout="constrained")
    a, b, c, d, e, f = out.subplots(2, 3).ravel()
    settings, worst = result.settings, result.worst()
    shades = np.linspace(0.35, 1.0, len(result.descent_drift))

    for (eta, drift), shade in zip(result.descent_drift.items(), shades, strict=True):
        a.loglog(eta * np.arange(1, len(drift)), drift[1:], color=REAL, alpha=shade)
    a.annotate("gradient descent, η falling", (0.97, 0.66), xycoords="axes fraction", color=REAL,
               ha="right")  # fmt: skip
    a.loglog(settings.rate * result.ts[1:], result.flow_drift[1:], color=PREDICTED)
    a.annotate("flow", (0.97, 0.24), xycoords="axes fraction", color=PREDICTED, ha="right")
    a.set(title="A  fᵀf − WWᵀ is conserved by the flow", xlabel="η × time",
          ylabel="max |change of fᵀf − WWᵀ|")  # fmt: skip

    etas = np.array(list(result.descent_drift))
    last = np.array([drift[-1] for drift in result.descent_drift.values()])
    b.loglog(etas, last, "o", color=REAL, label="gradient descent")
    b.loglog(etas, last[0] * etas / etas[0], "--", color=GREY, label="slope 1")
    b.set(title=f"B  Its drift is O(η): slope {result.drift_slope:.3f}", xlabel="learning rate η",
          ylabel=f"drift at η × steps = {settings.span:g}")  # fmt: skip
    b.legend(frameon=False)

    for pair, color, label in (
        (result.unbalanced, REAL, "unbalanced"),
        (result.balanced, PREDICTED, "balanced"),
    ):
        c.loglog(pair[1].ravel(), pair[0].ravel(), ".", ms=3, color=color, label=label)
    low, high = c.get_xlim()
    c.loglog([low, high], [low, high], color=GREY, lw=0.8, zorder=0)
    c.set(title="C  Theorem B.2: balanced factors share S", xlabel="singular values of W",
          ylabel="singular values of f")  # fmt: skip
    c.legend(frameon=False, markerscale=3)

    for predicted, real, mark, color, label in (
        (
            result.unbalanced_theorem,
            result.unbalanced_measured,
            ".",
            REAL,
            "Theorem B.3, unbalanced",
        ),
        (result.unbalanced_lemma, result.unbalanced_measured, "+", GREEN, "Lemma B.1, unbalanced"),
        (result.theorem, result.measured, ".", PREDICTED, "Theorem B.3, balanced"),
    ):
        error = np.abs(predicted - real) / np.abs(real).max()
        d.loglog(np.abs(real).ravel(), error.ravel(), mark, ms=4, color=color, label=label)
    d.set(title=f"D  Rates of S₁: B.3 within {worst['Theorem B.3, relative']:.0e} if balanced",
          xlabel="|finite difference of σ₁ᵢ|",
          ylabel="|prediction − finite difference| / largest")  # fmt: skip
    d.legend(frameon=False, fontsize=8)

    values = np.array(list(result.bounds.values()))
    exponents = np.array(list(result.bounds))
    for column, style, color, label in (
        (3, "--", GREY, "N_max (printed)"),
        (2, "--", PREDICTED, "√N_max"),
        (1, "o", PREDICTED, "‖A‖₂"),
        (0, "o", REAL, "max |gᵢ|"),
    ):
        e.semilogy(exponents, values[:, column], style, color=color, label=label)
    e.set(title="E  At uniform prediction ‖A‖₂ ≤ √N_max", xlabel="exponent of the class sizes",
          ylabel="norm, or largest |gᵢ|")  # fmt: skip
    e.legend(frameon=False, fontsize=8)

    for (exponent, rank), color in zip(result.rank.items(), COLORS, strict=False):
        label = f"exponent {exponent:g}"
        f.semilogx(settings.rate * result.ts[1:], rank[1:], color=color, label=label)
    f.set(title="F  Class imbalance: effective rank of f", xlabel="η × time",
          ylabel=f"RankMe (singular values), of {settings.width}")  # fmt: skip
    f.legend(frameon=False, fontsize=8)
    for axes in (a, b, c, d, e, f):
        tidy(axes)
    b.set_xticks(etas, [f"{eta:g}" for eta in etas])
    b.xaxis.minorticks_off()
    out.suptitle(
        f"Two-factor cross-entropy dynamics: b = {settings.samples}, h = {settings.width}, "
        f"V = {settings.classes}, summed loss, float64"
    )
    return out


def plot(result: Result) -> dict[str, Figure]:
    """The one picture."""
    return {"two-factor-theorems": figure(result)}


def measure(result: Result) -> dict[str, list[str]]:
    """How far every statement is from what was measured."""
    lines = [f"{name}: {value:.3g}" for name, value in result.worst().items()]
    for exponent, rank in result.rank.items():
        lines.append(
            f"RankMe of f, exponent {exponent:g}: least {rank[1:].min():.2f}, at the end "
            f"{rank[-1]:.2f}"
        )
    return {"two-factor-theorems": lines}
