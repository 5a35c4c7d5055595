"""Networks pruned at initialization: training loss and kappa along training.

Every layer loses the given fraction of its smallest weights, which stay at zero; kappa is that of
the Gauss-Newton matrix in the weights that are left. For the deep networks its Jacobian is taken in
float32 and summed in float64, right to 1 % up to about 1e8, and full rank is assumed, which holds
for almost all weights as long as many more of them are left than there are outputs. For the
feed-forward network everything is in float64 and the rank is counted.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

from experiments import cuts
from experiments.harness import Script
from experiments.store import Store
from jaxttp import conditioning, from_nnx, models
from jaxttp._core.checks import check_choice
from jaxttp.data import load_dataset, select
from jaxttp.plots import OTHER, PREDICTED, REAL, plot_draws, tidy
from jaxttp.training import train

NETWORKS = ("resnet20", "resnet32", "vgg5", "vit", "mlp")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Network, data, training, measurements.

    Attributes:
        network: one of `NETWORKS`.
        depth: blocks a stage (ResNets), blocks (VGG, ViT) or hidden layers; None for the network's.
        width: channels of the first block, tokens or hidden layers; None for the network's.
        data: images by name.
        classes: how many, the first ones.
        per_class: samples of each.
        enlarge: every pixel becomes so many by so many.
        rates: fractions of every layer to remove.
        optimizer: "sgd" (momentum 0.9) or "adamw".
        momentum: of SGD.
        learning_rate: at the start.
        decay_epoch: a tenth of the rate from here on; None for a constant rate.
        weight_decay: of all weights.
        batch_size: a step.
        epochs: in all.
        points: epochs of the checkpoints.
        promote: differentiate in float64 and count the rank.
        seeds: of weights and batches.
    """

    network: str
    depth: int | None = None
    width: int | None = None
    data: str = "digits"
    classes: int = 5
    per_class: int = cuts.few(2, 20)
    enlarge: int = 1
    rates: tuple[float, ...] = cuts.first((0.0, 0.6, 0.9))
    optimizer: str = "sgd"
    momentum: float = 0.9
    learning_rate: float = 0.1
    decay_epoch: int | None = None
    weight_decay: float = 1e-4
    batch_size: int = cuts.few(4, 50)
    epochs: int = cuts.one(60)
    points: tuple[int, ...] = cuts.points((0, 5, 15, 30, 60))
    promote: bool = False
    seeds: tuple[int, ...] = cuts.one((0, 1, 2))


def build(settings: Settings, size: int, channels: int, rngs: nnx.Rngs) -> nnx.Module:
    """The network for images of this size; none has batch statistics."""
    check_choice("network", settings.network, NETWORKS)
    name, classes, depth, width = (
        settings.network, settings.classes, settings.depth, settings.width
    )  # fmt: skip
    if name.startswith("resnet"):
        blocks, first = depth or {"resnet20": 3, "resnet32": 5}[name], width or 16
        return models.ResNet(
            classes, in_channels=channels, blocks=blocks, stem_width=first,
            widths=(first, 2 * first, 4 * first), rngs=rngs,
        )  # fmt: skip
    if name == "vgg5":
        widths = [(width or 64) * 2**block for block in range(depth or 4)]
        return models.VGG(classes, in_channels=channels, widths=widths, norm=None, rngs=rngs)
    if name == "vit":
        return models.ViT(
            classes, image_size=size, patch_size=max(2, size // 8), in_channels=channels,
            width=width or 48, depth=depth or 4, heads=4, rngs=rngs,
        )  # fmt: skip
    hidden = (width or 100,) * (depth or 2)
    return models.MLP((size**2 * channels, *hidden, classes), rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Run:
    """One rate and seed.

    Attributes:
        loss: on all samples at every step (T + 1,).
        epochs: of the checkpoints (P,).
        condition: kappa (P,).
        rank: what counted as non-zero (P,).
        size: samples times outputs.
        kept: weights that are left.
    """

    loss: np.ndarray
    epochs: np.ndarray
    condition: np.ndarray
    rank: np.ndarray
    size: int
    kept: int


def images(settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, size, size, channels), of mean 0 and standard deviation 1 over all; labels."""
    data = select(
        load_dataset(settings.data), classes=tuple(range(settings.classes)),
        per_class=settings.per_class, key=jax.random.key(0),
    )  # fmt: skip
    x = np.repeat(np.repeat(data.x, settings.enlarge, axis=1), settings.enlarge, axis=2)
    return (x - x.mean()) / x.std(), data.y


def optimizer(settings: Settings, batches: int) -> optax.GradientTransformation:
    """SGD with momentum and weight decay, or AdamW, with one step of the rate."""
    rate: Any = settings.learning_rate
    if settings.decay_epoch is not None:
        rate = optax.piecewise_constant_schedule(rate, {settings.decay_epoch * batches: 0.1})
    check_choice("optimizer", settings.optimizer, ("sgd", "adamw"))
    if settings.optimizer == "adamw":
        return optax.adamw(rate, weight_decay=settings.weight_decay)
    return optax.chain(
        optax.add_decayed_weights(settings.weight_decay),
        optax.sgd(rate, settings.momentum or None),
    )


@functools.cache
def _functions(settings: Settings, size: int, channels: int) -> tuple[Any, Any]:
    """The network, and the network with masks on its weights.

    One object each for all rates and seeds, which then share what is compiled.
    """
    apply_fn, _ = from_nnx(build(settings, size, channels, nnx.Rngs(0)))

    def masked(parts: Any, x: Any) -> Any:
        return apply_fn(conditioning.apply_masks(parts["weights"], parts["masks"]), x)

    return apply_fn, masked


def one_run(settings: Settings, rate: float, seed: int) -> Run:
    """Prune, train, and measure at the checkpoints."""
    x, y = images(settings)
    shape = x.shape[1], x.shape[3]
    _, params = from_nnx(build(settings, *shape, nnx.Rngs(seed)))
    apply_fn, masked = _functions(settings, *shape)
    masks = conditioning.magnitude_masks(params, rate)
    start = conditioning.apply_masks(params, masks)
    batches = len(x) // settings.batch_size
    due = {epoch * batches for epoch in settings.points}
    seen: list[Any] = []

    def kappa(step: int, weights: Any, loss: float) -> None:
        if step not in due:
            return
        matrix = conditioning.curvature_matrix(
            masked, {"weights": weights, "masks": masks}, x, form="outputs",
            promote=settings.promote,
        )  # fmt: skip
        rank = None if settings.promote else len(matrix)
        seen.append(conditioning.condition_number(matrix, rank=rank))

    run = train(
        apply_fn, start, x, y, loss="cross_entropy",
        optimizer=conditioning.keep_pruned(optimizer(settings, batches), masks),
        steps=settings.epochs * batches, batch_size=settings.batch_size,
        key=jax.random.key(seed), callback=kappa,
    )  # fmt: skip
    kept = sum(int(np.sum(mask)) for mask in jax.tree.leaves(masks))
    return Run(
        np.asarray(run.loss), np.array(settings.points),
        np.array([float(one.value) for one in seen]), np.array([int(one.rank) for one in seen]),
        len(x) * settings.classes, kept,
    )  # fmt: skip


def run(settings: Settings, store: Store | None = None) -> dict[float, list[Run]]:
    """Every rate and seed.

    Args:
        settings: one of the presets, or your own.
        store: where the runs are kept.

    Returns:
        Rate -> a `Run` for each seed.
    """
    store = store or Store()
    pieces = {
        f"rate {rate:g}, seed {seed}": functools.partial(one_run, settings, rate, seed)
        for rate in settings.rates
        for seed in settings.seeds
    }
    found = store.all(pieces)
    return {
        rate: [found[f"rate {rate:g}, seed {seed}"] for seed in settings.seeds]
        for rate in settings.rates
    }


def draw(result: dict[float, list[Run]]) -> Figure:
    """Training loss, and condition number along training."""
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (rate, runs), color in zip(result.items(), (PREDICTED, OTHER, REAL, "0.3"), strict=False):
        label = f"{rate:.0%} pruned"
        loss = np.stack([one.loss for one in runs], axis=1)
        epochs = np.linspace(0, runs[0].epochs[-1], len(loss))
        left.semilogy(epochs, np.median(loss, axis=1), color=color, label=label)
        left.fill_between(epochs, loss.min(axis=1), loss.max(axis=1), color=color, alpha=0.18, lw=0)
        kappa = np.stack([one.condition for one in runs], axis=1)
        plot_draws(right, runs[0].epochs, kappa, label=label, color=color)
    left.set(xlabel="epoch", ylabel="training loss")
    right.set_yscale("log")
    right.set(xlabel="epoch", ylabel="condition number")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
        tidy(axes)
    return figure


def lines(result: dict[float, list[Run]]) -> list[str]:
    """Kappa by rate and epoch, and the loss on the way."""
    out = []
    for rate, runs in result.items():
        kappa = np.median(np.stack([one.condition for one in runs], axis=1), axis=1)
        along = ", ".join(
            f"{epoch}: {value:.3g}" for epoch, value in zip(runs[0].epochs, kappa, strict=True)
        )
        last = runs[0].epochs[-1]
        reached = [int(np.argmax(one.loss < 0.5 * one.loss[0])) for one in runs]
        steps = (len(runs[0].loss) - 1) / last
        half = np.median(reached) / steps if min(reached) > 0 else np.nan
        end = np.median([one.loss[-1] for one in runs])
        out.append(
            f"{rate:.0%} pruned ({runs[0].kept} weights left): median κ at epoch {along}; loss "
            f"halved after {half:.2g} epochs, at the end {end:.3g}; rank {runs[0].rank.min()} to "
            f"{runs[0].rank.max()} of {runs[0].size}"
        )
    return out


def _script(
    network: str, pictures: dict[str, str], cpu: dict[str, Any], paper: dict[str, Any]
) -> Script:
    small = {"per_class": 2, "classes": 2, "batch_size": 4, "epochs": 1, "points": (0, 1),
             "rates": (0.5,), "seeds": (0,), "depth": 4 if network == "vgg5" else 1,
             "width": 8 if network == "vit" else 4, "decay_epoch": None}  # fmt: skip
    cifar = {"data": "cifar10", "classes": 10, "per_class": 100, "batch_size": 64}
    presets = {
        "smoke": Settings(network, **(cpu | small)),
        "cpu": Settings(network, **cpu),
        "paper": Settings(network, **(cifar | paper)),
    }
    return Script(
        {picture: f"Pruning at initialization slows training down and increases κ. ({source})"
         for picture, source in pictures.items()},
        presets,
        run,
        lambda result: {picture: draw(result) for picture in pictures},
        lambda result: {picture: lines(result) for picture in pictures},
    )  # fmt: skip


_DECAYED = {"decay_epoch": 91, "epochs": 200, "points": (0, 10, 25, 50, 100, 200)}
RESNET20 = _script(
    "resnet20", {"gnc-1": "GNC Figures 1 and 14"},
    {"decay_epoch": 45, "learning_rate": 0.02}, _DECAYED,
)  # fmt: skip
RESNET32 = _script(
    "resnet32", {"gnc-15": "GNC Figure 15"},
    {"per_class": 10, "epochs": 120, "points": (0, 10, 30, 60, 120), "decay_epoch": 90,
     "learning_rate": 0.02, "seeds": (0, 1)},
    _DECAYED,
)  # fmt: skip
VGG5 = _script(
    "vgg5", {"gnc-16": "GNC Figure 16"},
    {"decay_epoch": 50, "learning_rate": 0.02, "enlarge": 2, "width": 16, "per_class": 10,
     "batch_size": 25}, _DECAYED | {"decay_epoch": 100},
)  # fmt: skip
VIT = _script(
    "vit", {"gnc-13": "GNC Figure 13"},
    {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 1e-2, "per_class": 10,
     "batch_size": 25},
    {"optimizer": "adamw", "learning_rate": 1e-2, "weight_decay": 1e-2,
     "epochs": 200, "points": (0, 10, 25, 50, 100, 200)},
)  # fmt: skip
MLP = _script(
    "mlp", {"gnc-17": "GNC Figure 17"},
    {"learning_rate": 0.01, "momentum": 0.0, "weight_decay": 0.0, "epochs": 150,
     "points": (0, 10, 30, 70, 150), "promote": True},
    {"learning_rate": 0.01, "momentum": 0.0, "weight_decay": 0.0, "epochs": 200,
     "points": (0, 10, 25, 50, 100, 200), "promote": True},
)  # fmt: skip
