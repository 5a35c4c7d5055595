"""One step of a preset on made-up data, to see that it runs and fits before anything is fetched.

Networks, samples a step and shapes are those of the preset; steps, seeds and grids are cut to one
value each, files of weights are left out, and data sets that are not on the machine are replaced by
noise of their shapes and classes.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from experiments import cuts
from experiments.harness import find, load_script
from experiments.store import Store
from jaxttp import pipeline
from jaxttp._core.checks import check_choice
from jaxttp.data import registry, sources
from jaxttp.data.images import ImageSource
from jaxttp.data.sources import LAYOUTS

SHAPES = {"mnist": ((28, 28, 1), 10, 70_000), "cifar10": ((32, 32, 3), 10, 60_000),
          "cifar100": ((32, 32, 3), 100, 60_000), "mit67": ((256, 256, 3), 67, 6_700),
          "minc2500": ((362, 362, 3), 23, 57_500), "fgvc_aircraft": ((256, 256, 3), 100, 10_000),
          "cars196": ((256, 256, 3), 196, 16_185),
          "caltech_birds2011": ((256, 256, 3), 200, 11_788)}  # fmt: skip
"""Images, classes and samples of the data sets of the presets; photographs are of many sizes."""

SAMPLES_PER_CLASS = 2
"""Of a task, in a run of few samples."""


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What one step took.

    Attributes:
        settings: that were run.
        result: of the script.
        seconds: wall time, with compilation.
        peak_bytes: most memory that was in use on the device; None where it does not say.
    """

    settings: Any
    result: Any
    seconds: float
    peak_bytes: int | None


def one_step(settings: Any, *, few: bool = False, image_size: int | None = None) -> Any:
    """The settings with one step, one seed and one value of every grid, the last and largest.

    Args:
        settings: of a script, or a part of them.
        few: also as few samples as make sense, and the first value of every grid.
        image_size: pixels a side of photographs, that of the network's pre-training when None.

    Returns:
        Settings of the same kind.

    Example:
        >>> from experiments.conditioning.along_training import PRESETS
        >>> cut = one_step(PRESETS["paper"])
        >>> cut.width, cut.samples, cut.epochs, cut.seeds
        (500, 1000, 1, 1)
    """
    if isinstance(settings, pipeline.Settings):
        count = settings.samples_per_class
        return dataclasses.replace(
            settings,
            samples_per_class=min(count, SAMPLES_PER_CLASS) if few else count,
            weights=None,
            image_size=image_size or settings.image_size,
        )
    part = functools.partial(one_step, few=few, image_size=image_size)
    changes: dict[str, Any] = {}
    instead: dict[str, str] = {}
    for field in dataclasses.fields(settings):
        value, said = getattr(settings, field.name), field.metadata
        changes[field.name] = said.get("cut", cuts.grid)(value, few, part)
        if value is None and said.get("otherwise"):
            instead[field.name] = said["otherwise"]
    changes |= {name: changes[other] for name, other in instead.items()}
    return dataclasses.replace(settings, **changes)


@contextlib.contextmanager
def made_up_data(samples: int | None = None) -> Iterator[None]:
    """Noise in place of every data set that is not bundled.

    Args:
        samples: of every data set; as many as it has when None. Images are made when they are read.

    Yields:
        Nothing.
    """

    def source(name: str, split: str | None = None) -> ImageSource:
        check_choice("name", name, SHAPES)
        shape, classes, whole = SHAPES[name]
        count = samples or whole
        return ImageSource(
            name,
            "Noise.",
            np.arange(count, dtype=np.int32) % classes,
            tuple(map(str, range(classes))),
            lambda index: np.random.default_rng(index).integers(0, 256, shape, np.uint8),
        )

    def folder(name: str, folder: str | None, split: str | None) -> ImageSource:
        check_choice("name", name, LAYOUTS)
        return source(name)

    with contextlib.ExitStack() as stack:
        from experiments.training_time import datasets

        for module in (registry, datasets):
            stack.enter_context(mock.patch.object(module, "tfds_source", source))
            stack.enter_context(mock.patch.object(module, "folder_source", folder))
        if samples is not None:
            sizes = {name: 6 * samples // 7 for name in sources.TRAIN_SIZES}
            stack.enter_context(mock.patch.dict(sources.TRAIN_SIZES, sizes))
        yield


def dry_run(
    name: str,
    preset: str = "paper",
    *,
    few: bool = False,
    image_size: int | None = None,
    samples: int | None = None,
) -> DryRun:
    """Run one step of a preset on made-up data; nothing is kept.

    Args:
        name: of a script or picture.
        preset: which settings.
        few: see `one_step`.
        image_size: likewise.
        samples: of every made-up data set, see `made_up_data`.

    Returns:
        A `DryRun`.

    Raises:
        ValueError: an unknown name or preset.
    """
    script = load_script(find(name))
    check_choice("preset", preset, script.presets)
    settings = one_step(script.presets[preset], few=few, image_size=image_size)
    begun = time.perf_counter()
    with made_up_data(samples):
        result = script.run(settings, Store())
    stats = jax.devices()[0].memory_stats() or {}
    seconds = time.perf_counter() - begun
    return DryRun(settings, result, seconds, stats.get("peak_bytes_in_use"))
