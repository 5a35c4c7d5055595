"""What moves while Gauss-Newton, Adam and SGD train: batch losses, kernel, features, weights.

XGN figures 3, 4, 9, 10 and 11, from one run of each optimizer at the rate of its search.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments import cuts
from experiments.gauss_newton.training import Phase, load, train
from experiments.gauss_newton.variants import (
    COLORS,
    NAMES,
    Case,
    build,
    search_rate,
    steps_an_epoch,
    training_of,
)
from experiments.gauss_newton.variants import Settings as Variants
from experiments.store import Store
from jaxttp.gauss_newton import revmlp_kernel
from jaxttp.models import with_params
from jaxttp.plots import tidy
from jaxttp.representation import cka_table, kernel_distance, kernel_rate

OPTIMIZERS = ("gn", "adam", "sgd")
PALETTE = dict(zip(OPTIMIZERS, COLORS, strict=False))

CLAIM = {
    "xgn-3": "A Gauss-Newton step lowers the loss of its own mini-batch far more than a step of "
    "Adam or SGD does. (XGN Figure 3)",
    "xgn-4": "The kernel and the features of the blocks hardly move under Gauss-Newton and SGD; "
    "they do under Adam. (XGN Figure 4)",
    "xgn-9": "In weight space Gauss-Newton moves as far as Adam; SGD moves little. (XGN Figure 9)",
    "xgn-10": "Features of all blocks stay similar to their start under Gauss-Newton and SGD; Adam "
    "changes the later blocks first. (XGN Figure 10)",
    "xgn-11": "The features of Gauss-Newton stay closer to those of SGD than to those of Adam. "
    "(XGN Figure 11)",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is trained, and what is looked at.

    Attributes:
        variants: data, network, batches, grid of rates and seeds; its cases are ignored.
        epochs: of training.
        probe: held-out samples for kernel and features.
    """

    variants: Variants
    epochs: int = cuts.one()
    probe: int = cuts.few(8, 60)


PRESETS = {
    "smoke": Settings(
        Variants(
            (), data=("wine",), blocks=(1,), bottleneck=64, batch_size=32, seeds=(0,), rates=(0.1,),
        ),
        epochs=2, probe=6,
    ),
    "cpu": Settings(Variants((), blocks=(4,)), epochs=20),
    "paper": Settings(
        Variants(
            (), data=("cifar10",), blocks=(6,), bottleneck=8000, batch_size=1024, float64=False
        ),
        epochs=80, probe=100,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Path:
    """One optimizer, one seed.

    Attributes:
        optimizer: its key.
        rate: learning rate.
        epochs: of the checkpoints (P,).
        own_change: relative change of a mini-batch's loss by its own step, a mean for each epoch
            (P - 1,).
        distance: of the kernel to its start (P,).
        turning: of the kernel from checkpoint to checkpoint, an epoch (P - 1,).
        features: of the blocks and the head on the probe, P x {name: (N, d)}.
        cka: linear CKA with the start (P, B), blocks first to last.
        cosine: of each half-layer's weights with the start (P, 2 L).
        norm: of each half-layer's weights over the first (P, 2 L).
        train_loss: (P,).
        test_loss: (P,).
    """

    optimizer: str
    rate: float
    epochs: np.ndarray
    own_change: np.ndarray
    distance: np.ndarray
    turning: np.ndarray
    features: list[dict[str, np.ndarray]]
    cka: np.ndarray
    cosine: np.ndarray
    norm: np.ndarray
    train_loss: np.ndarray
    test_loss: np.ndarray


def run(settings: Settings, store: Store | None = None) -> list[Path]:
    """Train, and look at every epoch.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where the paths are kept.

    Returns:
        A `Path` for each optimizer and seed.
    """
    store = store or Store()
    pieces = {
        f"{optimizer}/{seed}": functools.partial(_one, settings, store, optimizer, seed)
        for optimizer in OPTIMIZERS
        for seed in settings.variants.seeds
    }
    return list(store.all(pieces).values())


def _one(settings: Settings, store: Store, optimizer: str, seed: int) -> Path:
    variants = settings.variants
    case = Case(NAMES[optimizer], ((optimizer, settings.epochs),))
    with jax.enable_x64(variants.float64):
        data = load(variants.data[0], key=jax.random.key(0), samples=variants.samples)
        epoch = steps_an_epoch(variants, data)
        steps = settings.epochs * epoch
        rate = store.get(
            f"rate/{optimizer}", lambda: search_rate(variants, case, optimizer, data, steps)
        )
        model = build(variants, case, data, seed)
        history: list[Array] = []
        training = training_of(variants, case, [Phase(optimizer, rate, steps)], own_batch=True)
        record = train(
            model, data, training, key=jax.random.key(seed),
            observe=lambda step, weights: history.append(weights),
        )  # fmt: skip
        probe = data.x_test[: settings.probe]
        kernels, features = [], []
        for weights in history:
            now = with_params(model, {"weights": weights})
            kernels.append(np.asarray(revmlp_kernel(
                weights, model.fixed_bottlenecks, model.embed(probe), readout=model.fixed_readout,
            )))  # fmt: skip
            features.append({k: np.asarray(v) for k, v in now.activations(probe).items()})
        epochs = record.steps / epoch
        halves = np.stack(
            [np.reshape(weights, (2 * variants.blocks[0], -1)) for weights in history]
        )
        halves = halves.astype(np.float64)
        norm = np.linalg.norm(halves, axis=-1)
        cosine = np.sum(halves * halves[0], axis=-1) / (norm * norm[0])
        distance = [float(kernel_distance(kernels[0], kernel)) for kernel in kernels]
        cka = [np.diag(cka_table(features[0], now).values) for now in features]
        change = record.own_batch_loss / record.batch_loss - 1
        return Path(
            optimizer, rate, epochs, change.reshape(settings.epochs, -1).mean(1),
            np.array(distance), np.asarray(kernel_rate(kernels, epochs)), features,
            np.stack(cka)[:, :-1], cosine, norm / norm[0],
            record.train_loss, record.test_loss,
        )  # fmt: skip


def _stack(result: list[Path], optimizer: str, name: str) -> np.ndarray:
    """(P, ..., S)."""
    return np.stack([getattr(p, name) for p in result if p.optimizer == optimizer], axis=-1)


def _draw(axes: Any, x: np.ndarray, values: np.ndarray, color: str, label: str) -> None:
    axes.plot(x, values.mean(-1), color=color, lw=1.8, label=label)
    axes.fill_between(x, values.min(-1), values.max(-1), color=color, alpha=0.18, lw=0)


def _panels(count: int) -> tuple[Figure, Any]:
    columns = min(count, 4)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.6 * columns, 3.1 * rows + 0.2), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for extra in axes[count:]:
        extra.set_visible(False)
    return figure, axes[:count]


def plot(result: list[Path]) -> dict[str, Figure]:
    """The five figures."""
    found = tuple(dict.fromkeys(path.optimizer for path in result))
    epochs = result[0].epochs
    blocks = result[0].cka.shape[1]
    figures = {}

    figure, (axes,) = _panels(1)
    figure.set_size_inches(5.4, 3.8)
    for name in found:
        values = 100 * _stack(result, name, "own_change")
        _draw(axes, epochs[1:], values, PALETTE[name], NAMES[name])
    axes.axhline(0, color="0.5", lw=0.8)
    axes.set(xlabel="epoch", ylabel="change of a batch's loss by its own step (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=9)
    tidy(axes)
    figures["xgn-3"] = figure

    chosen = sorted({0, blocks - 1})
    figure, panels = _panels(2 + len(chosen))
    for name in found:
        color, label = PALETTE[name], NAMES[name]
        _draw(panels[0], epochs[1:], _stack(result, name, "turning"), color, label)
        _draw(panels[1], epochs, 1 - _stack(result, name, "distance"), color, label)
        for axes, block in zip(panels[2:], chosen, strict=True):
            _draw(axes, epochs, _stack(result, name, "cka")[:, block], color, label)
    panels[0].set(yscale="log", ylabel="change of the kernel per epoch")
    panels[1].set(ylabel="similarity to the initial kernel")
    for axes, block in zip(panels[2:], chosen, strict=True):
        axes.set(ylabel=f"CKA with initialization, block {block + 1} of {blocks}")
    figures["xgn-4"] = _finish(figure, panels)

    count = result[0].cosine.shape[1]
    figure, panels = _panels(2 * count)
    for name in found:
        for index in range(count):
            for axes, what in zip(panels[index::count], ("cosine", "norm"), strict=True):
                values = _stack(result, name, what)[:, index]
                _draw(axes, epochs, values, PALETTE[name], NAMES[name])
                half = f"block {index // 2 + 1}, half {index % 2 + 1}"
                words = {"cosine": "cosine with initial", "norm": "norm / initial norm"}[what]
                axes.set(ylabel=f"{words}\n{half}", yscale="log" if what == "norm" else "linear")
    figures["xgn-9"] = _finish(figure, panels)

    figure, panels = _panels(blocks)
    for name in found:
        for block, axes in enumerate(panels):
            _draw(axes, epochs, _stack(result, name, "cka")[:, block], PALETTE[name], NAMES[name])
            axes.set(ylabel=f"CKA with initialization, block {block + 1}")
    figures["xgn-10"] = _finish(figure, panels)

    figure, panels = _panels(blocks)
    for name, values in between(result).items():
        for block, axes in enumerate(panels):
            label = f"Gauss-Newton and {NAMES[name]}"
            _draw(axes, epochs, values[:, block], PALETTE[name], label)
            axes.set(ylabel=f"CKA, block {block + 1}")
    figures["xgn-11"] = _finish(figure, panels)
    return figures


def _finish(figure: Figure, panels: Any) -> Figure:
    for axes in panels:
        axes.set(xlabel="epoch")
        tidy(axes)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def between(result: list[Path]) -> dict[str, np.ndarray]:
    """CKA of Gauss-Newton's blocks with another optimizer's at the same epoch, (P, B, S) each."""
    paths = {name: [p for p in result if p.optimizer == name] for name in OPTIMIZERS}
    out = {}
    for name in OPTIMIZERS[1:]:
        pairs = [
            [np.diag(cka_table(a, b).values)[:-1]
             for a, b in zip(one.features, other.features, strict=True)]
            for one, other in zip(paths["gn"], paths[name], strict=True)
        ]  # fmt: skip
        out[name] = np.moveaxis(np.array(pairs), 0, -1)
    return out


def measure(result: list[Path]) -> dict[str, list[str]]:
    """Means over the seeds."""
    lines: dict[str, list[str]] = {name: [] for name in CLAIM}
    for name in dict.fromkeys(path.optimizer for path in result):
        words = f"{NAMES[name]} (rate {next(p.rate for p in result if p.optimizer == name):g})"
        own = 100 * _stack(result, name, "own_change").mean(-1)
        lines["xgn-3"].append(
            f"{words}: {own[0]:+.0f} % in the first epoch, {own[-1]:+.0f} % in the last"
        )
        distance, cka = (_stack(result, name, what).mean(-1) for what in ("distance", "cka"))
        loss = _stack(result, name, "train_loss").mean(-1)[-1]
        lines["xgn-4"].append(
            f"{words}: at the end the kernel's similarity {1 - distance[-1]:.3f}, CKA of the "
            f"first block {cka[-1, 0]:.3f}, of the last {cka[-1, -1]:.3f}; training loss {loss:.2g}"
        )
        cosine, norm = (_stack(result, name, what).mean(-1)[-1] for what in ("cosine", "norm"))
        lines["xgn-9"].append(
            f"{words}: cosine with the start {cosine.min():.3f} to {cosine.max():.3f}, norm grows "
            f"{norm.min():.1f} to {norm.max():.1f} times"
        )
        lines["xgn-10"].append(f"{words}: " + ", ".join(f"{value:.3f}" for value in cka[-1]))
    for name, values in between(result).items():
        ends = ", ".join(f"{value:.3f}" for value in values.mean(-1)[-1])
        lines["xgn-11"].append(f"Gauss-Newton and {NAMES[name]}: {ends} (blocks, at the end)")
    return lines
