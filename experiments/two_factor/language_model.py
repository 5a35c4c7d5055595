"""The geometry of a language model's features while it trains, beside the two-factor prediction.

A small transformer is trained on characters (or Zipf tokens: preset zipf), and the last-position
features f (b, h) of a fixed set of training contexts, and the unembedding W, are measured at
checkpoints. Beside it stand two predictions by the two-factor flow, in which the features are free
to move: from the network's own f and W at step 0, and from the small balanced start of Theorem B.2
(that W shrunk, features to match), with the same labels. Network and flows are compared at equal
training loss: there is no time to fit. "Phases" are read off RankMe by `phases`, which says
"absent" where they are.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Store
from experiments.two_factor.text import Corpus, load_text, windows
from experiments.two_factor.transformer import Transformer
from jaxttp import from_nnx
from jaxttp.dynamics.two_factor import balanced_features, two_factor_flow
from jaxttp.models import LayerOutput
from jaxttp.plots import PREDICTED, REAL, tidy
from jaxttp.representation import (
    linear_cka,
    participation_ratio,
    rankme,
    representation_geometry,
    singular_values,
)

CLAIM = {
    "two-factor-language-model": "The features of a language model collapse, expand and are "
    "compressed while it trains, as the two-factor dynamics predict. (TFD)"
}

GREY = "0.45"
STARTS = {"its start": "network's weights", "small balanced start": "small balanced weights"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is trained and what is measured.

    Attributes:
        text: "license" or "zipf".
        context: tokens a sample.
        width: h.
        depth: transformer blocks.
        heads: of the attention.
        batch_size: sequences a step; the loss is the mean over all their positions.
        steps: of AdamW.
        learning_rate: after a linear warm-up over 2 % of the steps; constant.
        weight_decay: AdamW's.
        probes: contexts b that are measured.
        checkpoints: about as many, spaced evenly in log(step), and step 0.
        shrink: factor on W for the small balanced start.
        flow_end: last time of the two-factor flow (learning rate 1, mean loss).
        flow_points: recorded times, evenly spaced in their logarithm.
        seed: of weights, batches and probes.
    """

    text: str = "license"
    context: int = 32
    width: int = 48
    depth: int = 2
    heads: int = 4
    batch_size: int = cuts.few(4, 32)
    steps: int = cuts.one(4000)
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    probes: int = 512
    checkpoints: int = 40
    shrink: float = 0.1
    flow_end: float = 3e4
    flow_points: int = 120
    seed: int = 0


PRESETS = {
    "cpu": Settings(),
    "zipf": Settings(text="zipf"),
    "smoke": Settings(
        context=8, width=8, depth=1, heads=2, batch_size=8, steps=30, probes=40, checkpoints=5,
        flow_end=300.0, flow_points=20,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Curves:
    """Measures along a path, all (T,) save the singular values (T, r).

    Attributes:
        clock: step, or time of the flow.
        loss: mean cross-entropy of the probes.
        rankme: of the features, p = sigma / sum(sigma), not centered.
        entropy_rank: the same with p = sigma^2 / sum(sigma^2).
        participation: participation ratio, centered.
        singular_f: singular values of the features, not centered.
        singular_w: of the unembedding.
    """

    clock: np.ndarray
    loss: np.ndarray
    rankme: np.ndarray
    entropy_rank: np.ndarray
    participation: np.ndarray
    singular_f: np.ndarray
    singular_w: np.ndarray


@dataclasses.dataclass(frozen=True)
class Result:
    """What happened and what the theory says.

    Attributes:
        settings: what was trained.
        corpus: its description.
        network: measured along training.
        flows: predicted by the two-factor flow, by start.
        alpha: alpha-ReQ of the centered features (T,), with its window and goodness.
        alpha_window: first and last rank.
        alpha_goodness: R^2 (T,).
        held_out_loss: (T,).
        cka: of the features with those at step 0 (T,).
        weight_cosine: of all weights with those at step 0 (T,).
        imbalance: ||f^T f/b - W W^T|| / (||f^T f/b|| + ||W W^T||) along training (T,), after the
            best factor between the two: 0 if balanced up to scale.
        phases: of network and flow, by `phases`.
        seconds: wall time.
    """

    settings: Settings
    corpus: str
    network: Curves
    flows: dict[str, Curves]
    alpha: np.ndarray
    alpha_window: tuple[int, int]
    alpha_goodness: np.ndarray
    held_out_loss: np.ndarray
    cka: np.ndarray
    weight_cosine: np.ndarray
    imbalance: np.ndarray
    phases: dict[str, dict[str, str]]
    seconds: float


def phases(clock: np.ndarray, rank: np.ndarray, *, fraction: float = 0.1) -> dict[str, str]:
    """Collapse, expansion and compression, where RankMe moves by at least `fraction` of its value.

    Collapse: a fall from the start to a minimum before the highest later value. Expansion: a rise
    from there to a maximum. Compression: a fall from the maximum to the end.

    Args:
        clock: steps or times (T,).
        rank: RankMe (T,).
        fraction: what counts as a move.

    Returns:
        For each phase a sentence, or "absent (...)" with what was seen instead.
    """
    peak = int(np.argmax(rank[1:]) + 1)
    if np.argmin(rank) > peak:  # highest near the start: look for a second rise behind the minimum
        low = int(np.argmin(rank))
        peak = int(low + np.argmax(rank[low:]))
    low = int(np.argmin(rank[: peak + 1]))

    def one(begin: int, end: int, sign: int) -> str:
        change = rank[end] / rank[begin] - 1
        text = f"{rank[begin]:.1f} to {rank[end]:.1f} over {clock[begin]:.3g}-{clock[end]:.3g}"
        return text if sign * change >= fraction else f"absent ({text})"

    return {
        "collapse": one(0, low, -1),
        "expansion": one(low, peak, 1),
        "compression": one(peak, len(rank) - 1, -1),
    }


def run(settings: Settings, store: Store | None = None) -> Result:
    """Train, measure and predict.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where the result is kept.

    Returns:
        A `Result`.
    """
    store = store or Store()
    return store.get("result", lambda: _run(settings))


def _run(settings: Settings) -> Result:
    begun = time.perf_counter()
    corpus = load_text(settings.text, seed=settings.seed)
    rng = np.random.default_rng(settings.seed)
    places = len(corpus.train) - settings.context - 1
    x, y = windows(corpus.train, settings.context, rng.choice(places, settings.probes))
    held_out = windows(
        corpus.held_out,
        settings.context,
        rng.choice(len(corpus.held_out) - settings.context - 1, settings.probes),
    )
    with jax.enable_x64(False):
        steps, weights, extract = _train(settings, corpus, rng)
        layers = [jax.tree.map(np.asarray, extract(w, x)) for w in weights]
        outside = [float(_mean_loss(extract(w, held_out[0])[1], held_out[1][:, -1]))
                   for w in weights]  # fmt: skip
    labels = y[:, -1]
    features = [part[0].astype(np.float64) for part in layers]
    heads = [np.asarray(w["module"]["head"]["kernel"], np.float64) for w in weights]
    loss = np.array([float(_mean_loss(part[1], labels)) for part in layers])
    network = _curves(np.array(steps), loss, features, heads)
    seen = [representation_geometry(f).alpha for f in features]
    flows = _flows(settings, features[0], heads[0], labels)
    flat = np.stack([ravel_pytree(tree)[0] for tree in weights]).astype(np.float64)
    return Result(
        settings=settings,
        corpus=corpus.description,
        network=network,
        flows=flows,
        alpha=np.array([float(law.exponent) for law in seen]),
        alpha_window=seen[0].window,
        alpha_goodness=np.array([float(law.r_squared) for law in seen]),
        held_out_loss=np.array(outside),
        cka=np.array([float(linear_cka(features[0], f)) for f in features]),
        weight_cosine=flat @ flat[0] / (np.linalg.norm(flat, axis=1) * np.linalg.norm(flat[0])),
        imbalance=np.array([_imbalance(f, w) for f, w in zip(features, heads, strict=True)]),
        phases={"network": phases(network.clock, network.rankme)}
        | {f"flow, {name}": phases(flow.clock, flow.rankme) for name, flow in flows.items()},
        seconds=time.perf_counter() - begun,
    )


def _mean_loss(logits: Any, labels: Any) -> Any:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def _train(
    settings: Settings, corpus: Corpus, rng: np.random.Generator
) -> tuple[list[int], list[Any], Any]:
    """Steps and weights of the checkpoints, and (weights, x) -> (features, logits)."""
    model = Transformer(
        corpus.vocabulary, context=settings.context, width=settings.width, depth=settings.depth,
        heads=settings.heads, rngs=nnx.Rngs(settings.seed),
    )  # fmt: skip
    features, params = from_nnx(LayerOutput(model, "features"))
    logits, _ = from_nnx(LayerOutput(model, "head"))
    graph, state = nnx.split(model)
    schedule = optax.linear_schedule(0.0, settings.learning_rate, max(1, settings.steps // 50))
    optimizer = optax.adamw(schedule, weight_decay=settings.weight_decay)

    @jax.jit
    def step(state: Any, moments: Any, x: Any, y: Any) -> tuple[Any, Any]:
        def objective(state: Any) -> Any:
            return _mean_loss(nnx.merge(graph, state).states(x)["head"], y)

        updates, moments = optimizer.update(jax.grad(objective)(state), moments, state)
        return optax.apply_updates(state, updates), moments

    extract = jax.jit(lambda params, x: (features(params, x), logits(params, x)))
    due = np.unique(np.geomspace(1, settings.steps, settings.checkpoints).round().astype(int))
    moments, steps, weights = optimizer.init(state), [0], [params]
    for t in range(1, settings.steps + 1):
        starts = rng.choice(len(corpus.train) - settings.context - 1, settings.batch_size)
        state, moments = step(state, moments, *windows(corpus.train, settings.context, starts))
        if t in due:
            steps.append(t)
            weights.append(from_nnx(LayerOutput(nnx.merge(graph, state), "features")).params)
    return steps, weights, extract


def _curves(
    clock: np.ndarray, loss: np.ndarray, features: Sequence[Any], heads: Sequence[Any]
) -> Curves:
    return Curves(
        clock=clock,
        loss=loss,
        rankme=np.array([float(rankme(f)) for f in features]),
        entropy_rank=np.array([float(rankme(f, normalization="eigenvalues")) for f in features]),
        participation=np.array([float(participation_ratio(f)) for f in features]),
        singular_f=np.stack([np.asarray(singular_values(f)) for f in features]),
        singular_w=np.stack([np.asarray(singular_values(w)) for w in heads]),
    )


def _flows(settings: Settings, f: Any, w: Any, labels: np.ndarray) -> dict[str, Curves]:
    """The two-factor flow from both starts; one unit of time is one step at rate 1."""
    with jax.enable_x64(True):
        ts = np.geomspace(1e-2, settings.flow_end, settings.flow_points - 1)
        ts = np.concatenate([[0.0], ts])

        @jax.jit
        def solve(f: Any, w: Any) -> tuple[Any, Any]:
            path = two_factor_flow(f, w, labels, learning_rate=1.0 / len(f), ts=ts,
                                   rtol=1e-6, atol=1e-8)  # fmt: skip
            logits = jnp.einsum("tbh,thv->tbv", path.f, path.w)
            return path, jax.vmap(lambda z: _mean_loss(z, labels))(logits)

        small = settings.shrink * w
        matched = balanced_features(small, len(f), key=jax.random.key(settings.seed))
        out = {}
        for name, start in (("its start", (f, w)), ("small balanced start", (matched, small))):
            path, loss = jax.block_until_ready(solve(*(jnp.asarray(part) for part in start)))
            out[name] = _curves(ts, np.asarray(loss), list(path.f), list(path.w))
        return out


def _imbalance(f: np.ndarray, w: np.ndarray) -> float:
    """Distance between f^T f and W W^T after the best factor, as the sine of their angle."""
    a, b = f.T @ f, w @ w.T
    cosine = np.vdot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b))
    return float(np.sqrt(max(0.0, 1 - cosine**2)))


def figure(result: Result) -> Figure:
    """Six panels: loss, RankMe, spectrum, RankMe against loss, slopes, what else moved.

    Args:
        result: of `run`.

    Returns:
        A matplotlib figure.
    """
    out = Figure(figsize=(14, 8.2), layout="constrained")
    axes = out.subplots(2, 3).ravel()
    a, b, c, d, e, f = axes
    network, flows = result.network, result.flows
    step = np.maximum(network.clock, 0.5)  # step 0 at the left edge of the logarithmic axis

    a.semilogx(step, network.loss, color=REAL, label="probes (training text)")
    a.semilogx(step, result.held_out_loss, color=REAL, ls=":", label="held-out text")
    a.set(title="A  Loss of the network", xlabel="step", ylabel="cross-entropy (nats)")
    b.semilogx(step, network.rankme, color=REAL, label="RankMe (singular values)")
    b.semilogx(step, network.entropy_rank, color=REAL, ls="--", label="RankMe (eigenvalues)")
    b.semilogx(step, network.participation, color=REAL, ls=":", label="participation ratio")
    b.set(title=f"B  Network: effective rank of f, at most {result.settings.width}", xlabel="step",
          ylabel="effective rank")  # fmt: skip
    c.loglog(step, network.singular_f, color=REAL, lw=0.7, alpha=0.7)
    c.set(title="C  Network: singular values", xlabel="step", ylabel="singular values of f")
    d.plot(network.loss, network.rankme, color=REAL, marker=".", label="network")
    for (name, flow), style in zip(flows.items(), ("--", "-"), strict=True):
        d.plot(flow.loss, flow.rankme, color=PREDICTED, ls=style, label=f"flow, {STARTS[name]}")
    d.set_xlim(network.loss.max() * 1.03, 0)
    d.set(title="D  RankMe of f at equal loss", xlabel="loss of the probes (falling)",
          ylabel="RankMe (singular values)")  # fmt: skip
    small = flows["small balanced start"]
    e.loglog(small.clock[1:], small.singular_f[1:], color=PREDICTED, lw=0.7, alpha=0.7)
    e.set(title="E  Flow from small balanced weights", xlabel="time (steps at rate 1)",
          ylabel="singular values of f")  # fmt: skip
    first, last = result.alpha_window
    f.semilogx(step, result.alpha, color=REAL, label=f"α-ReQ, ranks {first}-{last}")
    f.semilogx(step, result.cka, color=PREDICTED, label="CKA with step 0")
    f.semilogx(step, result.weight_cosine, color=GREY, label="weights' cosine with step 0")
    f.semilogx(step, result.imbalance, color="#009E73", label="sin∠(fᵀf, WWᵀ)")
    f.set(
        title="F  Network: spectral slope and similarities",
        xlabel="step",
        ylabel="exponent, cosine or sine",
    )
    for panel in (a, b, d, f):
        panel.legend(frameon=False, fontsize=8)
    for panel in axes:
        tidy(panel)
    settings = result.settings
    out.suptitle(
        f"Transformer ({settings.depth} blocks, h = {settings.width}) on {result.corpus}; "
        f"RankMe of {settings.probes} contexts"
    )
    return out


def plot(result: Result) -> dict[str, Figure]:
    """The one picture."""
    return {"two-factor-language-model": figure(result)}


def measure(result: Result) -> dict[str, list[str]]:
    """The phases of network and flows, in words."""
    network = result.network
    curves = {"network": network} | {f"flow, {name}": flow for name, flow in result.flows.items()}
    lines = [
        f"{who}: "
        + "; ".join(f"{phase} {text}" for phase, text in found.items())
        + f"; loss {curves[who].loss[curves[who].rankme.argmin()]:.2f} at the least RankMe"
        for who, found in result.phases.items()
    ]
    lines.append(
        f"{result.corpus}; held-out loss least at step "
        f"{network.clock[result.held_out_loss.argmin()]}; "
        f"sine of the angle of fᵀf and WWᵀ at least {result.imbalance.min():.2f}"
    )
    return {"two-factor-language-model": lines}
