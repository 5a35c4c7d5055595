"""From the name of a task to a comparison of starting points."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxttp._core.checks import check_choice
from jaxttp._core.types import Progress, leaf_paths
from jaxttp.forecast import Candidate, Comparison, compare
from jaxttp.models import lora
from jaxttp.pipeline.settings import ALL, LoraSettings, Settings, check_unused
from jaxttp.pipeline.sweeping import ALIKE
from jaxttp.pipeline.tasks import Task, build_task

STARTS = "every start is trained by heavy-ball descent at a constant rate"
ADAPTERS = "lora"
START_NAMES = ("all", "head", "last", "bias", ADAPTERS)
"""What can be trained: all weights, the head, the head and the last block, the biases, low-rank
adapters."""
NamedNetwork = tuple[str | None, str | None]
"""A model's name and a file of weights, as in `Settings`."""


def starting_points(
    task: Task, names: Sequence[str] = START_NAMES, *, rank: int = Settings.rank
) -> dict[str, Candidate]:
    """Choices of what to train, by name, for the network of a task.

    Args:
        task: a `Task` whose network has a "head".
        names: of `START_NAMES`; other adapters than "lora" by their settings, with colons between
            them, as "lora:r=8:alpha=16" (see `LoraSettings`).
        rank: of the adapters of "lora".

    Returns:
        Candidates for `jaxttp.compare`.

    Raises:
        ValueError: an unknown name, or settings of adapters that do not fit.

    Example:
        >>> task = build_task(Settings(data="wine", samples_per_class=2))
        >>> sorted(starting_points(task, ("all", "head")))
        ['all', 'head']
    """
    matches = (re.match(r"(\w+/\d+)/", path) for path in leaf_paths(task.model.params))
    blocks = [match.group(1) for match in matches if match]
    last = max(blocks, key=lambda name: int(name.split("/")[1])) + "/" if blocks else "head"
    masks: dict[str, Any] = {
        "all": None,
        "head": lambda path: path.startswith("head"),
        "last": lambda path: path.startswith(("head", last)),
        "bias": lambda path: path.endswith("bias"),
    }
    candidates = {}
    for name in names:
        kind, colon, adapters = name.partition(":")
        if kind == ADAPTERS:
            setting = LoraSettings.read(adapters.replace(":", ",")) if colon else LoraSettings(rank)
            adapted = lora(
                task.model, rank=setting.rank, key=jax.random.key(0), alpha=setting.alpha,
                rslora=setting.rslora, targets=None if setting.modules == ALL else setting.modules,
            )  # fmt: skip
            candidates[name] = Candidate(*adapted, x=task.x)
        else:
            trainable = masks[check_choice("start", name, START_NAMES)]
            candidates[name] = Candidate(*task.model, trainable=trainable, x=task.x)
    return candidates


def pair_networks(models: Sequence[str], weights: Sequence[str]) -> tuple[NamedNetwork, ...]:
    """Names of models and files of weights that belong together.

    Args:
        models: names, as in `Settings`.
        weights: files; "random" stands for none. One model may have several, several models have
            one each or none at all.

    Returns:
        Pairs (model, weights), at least one.

    Raises:
        ValueError: several models with another number of weights.

    Example:
        >>> pair_networks(("vgg5",), ("random", "trained.safetensors"))
        (('vgg5', None), ('vgg5', 'trained.safetensors'))
    """
    files = [None if name == "random" else name for name in weights]
    if len(models) > 1 and len(files) not in (0, len(models)):
        raise ValueError(
            f"weights: {len(models)} models need as many, or none ('random' for those without a "
            f"file); got {len(files)}."
        )
    names = list(models) or [None]
    if len(names) == 1:
        names *= max(1, len(files))
    return tuple(zip(names, files or [None] * len(names), strict=True))


def compare_task(
    settings: Settings,
    names: Sequence[str] | None = None,
    *,
    networks: Sequence[NamedNetwork] = (),
    learning_rate: float | None = None,
    time_steps: bool = True,
    progress: Progress | None = None,
) -> tuple[Task, Comparison]:
    """Which network, and what of it, to train: forecasts for a named task, ranked and explained.

    Args:
        settings: data, samples, loss, momentum, batch size, horizon, metric, rank of adapters,
            width of a sketch and seed; target losses and errors, without which the targets are the
            defaults of `compare`.
        names: as in `starting_points`; when None "all" of several networks, all but "lora" of one.
        networks: models and weights to compare; that of the settings when empty.
        learning_rate: of all; each gets its own best when None.
        time_steps: also measure the seconds of a step.
        progress: called with (stage, done, total).

    Returns:
        ``(task, comparison)``; of several networks the first one's task.

    Raises:
        ValueError: whatever `build_task` and `compare` refuse.

    Example:
        >>> small = Settings(data="wine", samples_per_class=4, steps=20, relinearize=0)
        >>> _, result = compare_task(small, ("all", "head"), time_steps=False)
        >>> len(result.names)
        2
    """
    targets = "starting points are compared by the same loss, target_loss, for all"
    check_unused(settings, ("thresholds",), targets)
    check_unused(settings, ("mesh",), "kernels are compared by decomposing them on one device")
    task, candidates = _candidates(settings, names, networks)
    if progress is not None:
        progress("comparing", 0, 1)
    options = settings.pick(
        "momentum", "batch_size", "steps", "relinearize", "sketch_dim", "metric", "target_loss",
        "target_error",
    )  # fmt: skip
    return task, compare(
        candidates, task.x, task.y, loss=task.loss, learning_rate=learning_rate,
        key=jax.random.key(settings.seed), time_steps=time_steps, **options,
    )  # fmt: skip


def _candidates(
    settings: Settings, names: Sequence[str] | None, networks: Sequence[NamedNetwork]
) -> tuple[Task, dict[str, Candidate]]:
    """The first network's task, and all starting points by name."""
    check_unused(settings, ("optimizer", "weight_decay", "nesterov", "schedule", "warmup"), STARTS)
    check_unused(settings, ("budget", "total_samples"), ALIKE)
    check_unused(settings, ("trainable",), "names say what is trained")
    several = len(networks) > 1
    names = names or (("all",) if several else START_NAMES[:-1])
    tasks: dict[str, Task] = {}
    for model, weights in networks or ((settings.model, settings.weights),):
        label = ", ".join(filter(None, (model, weights and Path(weights).stem))) or "default"
        own = dataclasses.replace(settings, model=model, weights=weights, rank=Settings.rank)
        tasks[label if label not in tasks else f"{label} ({len(tasks) + 1})"] = build_task(own)
    if "lora" not in names:
        check_unused(settings, ("rank",), "it is that of the adapters of 'lora'")
    candidates = {}
    for label, task in tasks.items():
        for name, start in starting_points(task, names, rank=settings.rank).items():
            labels = (label, name) if several and len(names) > 1 else (label if several else name,)
            candidates[", ".join(labels)] = start
    task = next(iter(tasks.values()))
    if several:
        text = f"{len(tasks)} networks on {settings.data}, {len(task.y)} samples, {task.loss}"
        task = dataclasses.replace(task, description=text)
    return task, candidates
