"""Figure 3: gradients and features by t-SNE, and predicted trajectories by class and speed.

On embedded data a "data set" is a task; here three digits that the network was not pre-trained on.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from sklearn.cluster import KMeans
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score

from experiments import cuts
from experiments.store import Store
from experiments.training_time.comparison import (
    CIFAR10,
    COLORS,
    Source,
    kernel_of,
    load,
    name_of,
)
from jaxttp import empirical_ntk
from jaxttp._core.xla_cpu.threads import limited
from jaxttp.dynamics import gradient_flow
from jaxttp.losses import get_loss
from jaxttp.ntk import class_separation, eigendecomposition, gradient_components
from jaxttp.pipeline import Settings as Task
from jaxttp.plots import tidy

LOSS = "cross_entropy"
CLAIM = {
    "ttp-3a": "The first five principal components of the gradients separate the classes better "
    "than those of the features. (TTP Figure 3 a)",
    "ttp-3b": "Predicted trajectories cluster by class and by training time; inside a class there "
    "are clusters of different speed. (TTP Figure 3 b)",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """A task and what is shown of it.

    Attributes:
        task: its name or pipeline settings.
        components: principal components of gradients and features.
        rate: learning rate of the trajectories.
        relative: whether it is in units of N / lambda_max.
        steps: T.
        level: a sample is learnt when its loss is below this fraction of its first one.
        clusters: groups of samples by their losses.
        iterations: of t-SNE.
        seed: of everything.
    """

    task: Source
    components: int = 5
    rate: float = 1.0
    relative: bool = True
    steps: int = cuts.one(150)
    level: float = 0.5
    clusters: int = 3
    iterations: int = 1000
    seed: int = 0


PRESETS = {
    "smoke": Settings("wine, MLP", steps=10, iterations=250),
    "cpu": Settings(Task(data="digits", samples_per_class=50, classes=(5, 7, 9))),
    "paper": Settings(
        task=dataclasses.replace(CIFAR10, classes=3, samples_per_class=50), rate=0.001,
        relative=False,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Points:
    """Samples in the plane, and how well their class can be told in the space before t-SNE.

    Attributes:
        plane: t-SNE (N, 2).
        between: variance between the class means over the whole.
        nearest: fraction of samples whose nearest class mean is their own.
        silhouette: by class, in the plane.
    """

    plane: np.ndarray
    between: float
    nearest: float
    silhouette: float


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        settings: how.
        labels: (N,).
        points: "gradients", "features" and "trajectories".
        times: step at which a sample is learned (N,), T + 1 for never.
        groups: of the samples by their losses (N,).
    """

    settings: Settings
    labels: np.ndarray
    points: dict[str, Points]
    times: np.ndarray
    groups: np.ndarray


def run(settings: Settings, store: Store | None = None) -> Result:
    """Embed gradients, features and trajectories.

    Args:
        settings: one of `PRESETS`, or your own.
        store: where the result is kept.

    Returns:
        A `Result`.
    """
    return (store or Store()).get("points", lambda: _measure(settings))


def _measure(settings: Settings) -> Result:
    job = load(settings.task, settings.seed)
    kernel, labels = kernel_of(job), np.asarray(job.y)
    eta = settings.rate * (kernel.unit if settings.relative else 1.0)
    # The gradient of an output by the head's weights are the features themselves.
    features = empirical_ntk(
        *job.model, job.x, trainable=lambda path: path == "head/kernel", output="trace"
    )
    ts = jnp.arange(settings.steps + 1, dtype=kernel.f0.dtype)
    path = gradient_flow(
        kernel.theta, kernel.f0, kernel.targets, loss=LOSS, learning_rate=eta, ts=ts
    ).train
    of_samples = jax.vmap(get_loss(LOSS).sample_loss)
    losses = np.asarray(jax.vmap(lambda f: of_samples(f, kernel.targets))(path))
    # A sample that is nearly right before training starts from ln 2.
    losses = losses / np.maximum(losses[0], np.log(2.0))
    learnt = losses < settings.level
    times = np.where(learnt.any(axis=0), learnt.argmax(axis=0), settings.steps + 1)
    groups = _groups(losses, settings)
    spaces = {
        "gradients": gradient_components(eigendecomposition(kernel.theta), settings.components),
        "features": gradient_components(eigendecomposition(features), settings.components),
        "trajectories": jnp.swapaxes(path, 0, 1),
    }
    points = {name: _points(space, labels, settings) for name, space in spaces.items()}
    return Result(settings, labels, points, times, groups)


def _groups(losses: np.ndarray, settings: Settings) -> np.ndarray:
    """Samples by k-means of their losses (T + 1, N); group 0 has the largest ones."""
    with limited(len(losses)):
        means = KMeans(settings.clusters, n_init=10, random_state=settings.seed).fit(losses.T)
    rank = np.argsort(np.argsort(-means.cluster_centers_.mean(axis=1)))
    return rank[means.labels_]


def _points(space: jax.Array, labels: np.ndarray, settings: Settings) -> Points:
    flat = np.asarray(space, np.float64).reshape(len(labels), -1)
    perplexity = min(30.0, len(labels) / 4)
    embed = TSNE(
        random_state=settings.seed, perplexity=perplexity, init="pca",
        max_iter=settings.iterations,
    )  # fmt: skip
    with limited(len(flat)):  # on shared cores its threads wait for each other
        plane = embed.fit_transform(flat)
    found = class_separation(jnp.asarray(flat), labels, classes=int(labels.max()) + 1)
    between, nearest = float(found.between_fraction), float(found.nearest_mean)
    return Points(plane, between, nearest, float(silhouette_score(plane, labels)))


def plot(result: Result) -> dict[str, Figure]:
    """Both planes by class; the trajectories by class, by time and by group."""
    settings = result.settings
    first = Figure(figsize=(9, 4.4), layout="constrained")
    for axes, name in zip(first.subplots(1, 2), ("features", "gradients"), strict=True):
        found = result.points[name]
        _classes(axes, found.plane, result.labels, "class")
        axes.set(title=f"{name}: nearest class mean right for {100 * found.nearest:.0f} %")
    second = Figure(figsize=(13, 4.4), layout="constrained")
    left, middle, right = second.subplots(1, 3)
    plane = result.points["trajectories"].plane
    _classes(left, plane, result.labels, "class")
    left.set(title="predicted trajectories, by class")
    dots = middle.scatter(*plane.T, c=result.times, cmap="viridis", s=22)
    second.colorbar(dots, ax=middle, label="step at which a sample is learned")
    middle.set(title="by training time")
    _classes(right, plane, result.groups, "group")
    right.set(title="by k-means of the losses (group 0: last)")
    for axes in (*first.axes, left, middle, right):
        axes.set(xticks=[], yticks=[], xlabel="t-SNE 1", ylabel="t-SNE 2")
        tidy(axes)
    task = name_of(settings.task)
    first.suptitle(f"{task}: {settings.components} components", fontsize=11)
    second.suptitle(task, fontsize=11)
    return {"ttp-3a": first, "ttp-3b": second}


def _classes(axes, plane: np.ndarray, labels: np.ndarray, word: str) -> None:
    for label, color in zip(np.unique(labels), COLORS, strict=False):
        axes.plot(*plane[labels == label].T, "o", color=color, ms=4.5, alpha=0.8, mec="none",
                  label=f"{word} {label}")  # fmt: skip
    axes.legend(frameon=False, fontsize=9)


def measure(result: Result) -> dict[str, list[str]]:
    """Separation of the classes; training times by class, group and neighborhood."""
    lines = []
    for name in ("gradients", "features"):
        found = result.points[name]
        lines.append(
            f"{name}: fraction of variance between classes {found.between:.2f}, nearest class mean "
            f"right {100 * found.nearest:.0f} %, silhouette in the plane {found.silhouette:.2f}"
        )
    found, times = result.points["trajectories"], result.times
    plane = found.plane
    distance = np.linalg.norm(plane[:, None] - plane[None], axis=2)
    np.fill_diagonal(distance, np.inf)
    near = np.argsort(distance, axis=1)[:, :5]
    close = np.abs(times[near] - times[:, None]).mean()
    apart = np.abs(times[:, None] - times[None]).mean()
    second = [
        f"trajectories: silhouette by class {found.silhouette:.2f}; five nearest neighbors of a "
        f"sample have its class in {100 * np.mean(_same(result.labels, near)):.0f} %",
        f"training times differ by {close:.1f} steps between neighbors, by {apart:.1f} between "
        "any two samples",
    ]
    for label in np.unique(result.labels):
        some = times[result.labels == label]
        spread = ", ".join(f"{v:.0f}" for v in np.quantile(some, (0.1, 0.5, 0.9)))
        second.append(f"class {label}: 10 %, median, 90 % of the samples learnt at {spread}")
    for group in np.unique(result.groups):
        inside = result.groups == group
        counts = np.bincount(result.labels[inside], minlength=result.labels.max() + 1)
        second.append(
            f"group {group}: median time {np.median(times[inside]):.0f}, samples of the classes "
            + ", ".join(map(str, counts))
        )
    return {"ttp-3a": lines, "ttp-3b": second}


def _same(labels: np.ndarray, near: np.ndarray) -> np.ndarray:
    return labels[near] == labels[:, None]
