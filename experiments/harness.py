"""What all figure scripts share: finding them, running them into a folder, drawing from it."""

import contextlib
import dataclasses
import datetime
import difflib
import importlib
import importlib.metadata
import json
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure
from PIL import Image

from experiments.scripts import SCRIPTS
from experiments.store import MissingError, Report, Store
from jaxttp._core.checks import check_choice
from jaxttp.plots import save

RESULTS = Path("experiments/results")
GALLERY = Path("docs/gallery")
PACKAGES = ("jaxttp", "jax", "jaxlib", "flax", "optax", "diffrax", "numpy", "scipy", "matplotlib")


@dataclasses.dataclass(frozen=True)
class Script:
    """One computation and its pictures; a module offers the same names in capitals or as functions.

    Attributes:
        claim: CLAIM, picture -> what the paper claims, with its source.
        presets: PRESETS, "smoke", "cpu" and "paper" (or some of them) -> frozen settings, seeds
            among them.
        run: ``run(settings, store) -> result``; every costly piece goes through the store
            (`Store.get`, `Store.all`), so that a run that was killed goes on.
        plot: ``plot(result) -> {picture: figure}``, a figure for every picture of `claim`.
        measure: ``measure(result) -> {picture: lines}``, the numbers that decide whether the claim
            holds.
    """

    claim: Mapping[str, str]
    presets: Mapping[str, Any]
    run: Callable[[Any, Store], Any]
    plot: Callable[[Any], Mapping[str, Figure]]
    measure: Callable[[Any], Mapping[str, list[str]]]


def load_script(name: str) -> Script:
    """A script by its name.

    Args:
        name: a key of `experiments.scripts.SCRIPTS`.

    Returns:
        The `Script`.

    Raises:
        ValueError: an unknown name.
    """
    check_choice("name", name, SCRIPTS)
    path, _, attribute = SCRIPTS[name].partition(":")
    module = importlib.import_module(path)
    if attribute:
        return getattr(module, attribute)
    return Script(module.CLAIM, module.PRESETS, module.run, module.plot, module.measure)


def find(name: str) -> str:
    """The script of this name, or the one that draws the picture of this name.

    Args:
        name: of a script or of a picture.

    Returns:
        The script's name.

    Raises:
        ValueError: neither is known.
    """
    if name in SCRIPTS:
        return name
    pictures = {}
    for script in SCRIPTS:
        pictures |= dict.fromkeys(load_script(script).claim, script)
    if name not in pictures:
        near = difflib.get_close_matches(name, dict.fromkeys((*SCRIPTS, *pictures)), cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ValueError(
            f"{name!r} is neither a script nor a picture{hint} `python -m experiments list` names "
            "them all."
        )
    return pictures[name]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run left behind.

    Attributes:
        folder: records.jsonl, arrays/, settings.json, sessions.json, measured.json and pictures.
        pictures: files.
        measured: picture -> lines.
        seconds: of all pieces, over all sessions.
    """

    folder: Path
    pictures: tuple[Path, ...]
    measured: Mapping[str, list[str]]
    seconds: float


def run_script(
    name: str,
    preset: str = "cpu",
    *,
    results: Path = RESULTS,
    only_plot: bool = False,
    fresh: bool = False,
    report: Report | None = None,
) -> Outcome:
    """Run a script, or go on with it, and draw its pictures from what is saved.

    Args:
        name: of a script or picture.
        preset: which settings.
        results: folder of all results; these go to results/script/preset.
        only_plot: compute nothing.
        fresh: throw away what is there.
        report: see `Store`.

    Returns:
        An `Outcome`.

    Raises:
        ValueError: an unknown name or preset, a folder with the results of other settings.
        MissingError: `only_plot` without saved results.
    """
    name = find(name)
    script = load_script(name)
    check_choice("preset", preset, script.presets)
    settings, folder = script.presets[preset], results / name / preset
    if fresh and not only_plot and folder.exists():
        shutil.rmtree(folder)
    try:
        # A finished run is only read, so that drawing again leaves no mark of a session.
        store = Store(folder, settings=settings, read_only=True)
        result = script.run(settings, store)
    except MissingError:
        if only_plot:
            raise
        store = Store(folder, settings=settings, report=report)
        _note_session(folder / "sessions.json", name, preset)
        with quick_compilation(preset == "smoke"):
            result = script.run(settings, store)
    measured = dict(script.measure(result))
    (folder / "measured.json").write_text(
        json.dumps({"claim": dict(script.claim), "measured": measured}, indent=1) + "\n"
    )
    pictures = []
    for picture, figure in script.plot(result).items():
        check_choice("picture", picture, script.claim)
        pictures.append(folder / f"{picture}.png")
        save(figure, pictures[-1], dpi=110)
    return Outcome(folder, tuple(pictures), measured, store.seconds)


@contextlib.contextmanager
def quick_compilation(wanted: bool = True) -> Iterator[None]:
    """Compile without most optimisations, for programs that run for a moment only.

    Args:
        wanted: False leaves everything as it is.

    Yields:
        Nothing.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", wanted or before)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def add_to_gallery(outcome: Outcome, gallery: Path = GALLERY) -> list[Path]:
    """Copy pictures to the gallery in 256 colors, and the results they are drawn from.

    The results go to gallery/results/script/preset, so that with ``--plot --output`` and that
    folder anybody can draw the pictures again, or others from the same numbers.

    Args:
        outcome: of `run_script`.
        gallery: a folder.

    Returns:
        The pictures.
    """
    folder = gallery / "results" / outcome.folder.parent.name / outcome.folder.name
    if folder.resolve() != outcome.folder.resolve():
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(outcome.folder, folder, ignore=shutil.ignore_patterns("*.png"))
    out = []
    for path in outcome.pictures:
        out.append(gallery / path.name)
        with Image.open(path) as image:
            # Coverage keeps rare colors apart, which the median cut would merge.
            method = Image.Quantize.MAXCOVERAGE
            small = image.convert("RGB").quantize(256, method, kmeans=2, dither=Image.Dither.NONE)
            small.save(out[-1], optimize=True)
    return out


def _note_session(path: Path, name: str, preset: str) -> None:
    """Which versions and device computed here, one entry for every time that something was."""
    sessions = json.loads(path.read_text()) if path.exists() else []
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    device = jax.devices()[0]
    sessions.append({
        "script": name, "preset": preset,
        "begun": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(), "versions": versions,
        "device": f"{device.platform}: {device.device_kind}",
    })  # fmt: skip
    path.write_text(json.dumps(sessions, indent=1) + "\n")
