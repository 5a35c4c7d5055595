"""Executes the notebooks and stores what they print and draw, to be read without running them.

    python -m experiments.notebooks              # all of them
    python -m experiments.notebooks 2_ 3_why     # those whose names hold one of these

Every notebook runs from top to bottom in a clean kernel, in an empty folder. What changes from run
to run (counts, times, versions) is left out, pictures are small, and the badge and the cell that
installs the library on Colab are written from the repository's address in pyproject.toml, the one
place that has it. `differences` says where two runs do not agree; tests/test_notebooks.py holds
fresh outputs against the stored ones by it.
"""

import base64
import copy
import io
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"

DPI, COLORS = 72, 256
"""Of stored pictures: one of 6 by 3.5 inches takes 5 to 20 kB."""

RELATIVE = 0.02
"""By how much numbers may differ. Other CPUs, and XLA with or without its optimisation, add in
another order: about 1e-7 in float32, which a hundred steps of training and the choice of where to
rebuild a kernel amplify to some 1e-3."""

STEPS = 2
"""By how much whole numbers may differ: a curve that crosses a target at a shallow angle, or one
kernel more, moves times by a step or two. Other numbers may differ by 1 in their last digit."""

ROUNDING = 1e-10
"""Numbers below are rounding errors of float64, of which only the order is meant: all agree."""

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

INSTALL = """import sys

if "google.colab" in sys.modules:
    %pip install -q git+{address}"""

BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/{where}/blob/main/notebooks/{name})"
)

NUMBER = re.compile(r"(?<![\w.])(?:(?<!\S)-)?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?!\w)")
UNIT = r"(?:ns|µs|ms|s|seconds?|min|minutes?|h|hours?|days?|bytes|[kMGT]i?B)\b"
MACHINE = re.compile(rf"(?:{NUMBER.pattern}\s*{UNIT}[\s,]*)+|(?:\$\s*|\bcosts ){NUMBER.pattern}")
"""What another machine is free to change: times, sizes in bytes, money."""


def address() -> str:
    """Where the repository lies, as pyproject.toml says."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def dressed(notebook: Any, name: str) -> Any:
    """A copy with the badge at the end of its first cell and the cell that installs the library.

    Args:
        notebook: of nbformat 4.
        name: of its file.
    """
    new, where = copy.deepcopy(notebook), address()
    first, install = new.cells[:2]
    words = re.sub(r"\n*\[!\[Open in Colab\][^\n]*", "", first.source).rstrip()
    badge = BADGE.format(where=where.removeprefix("https://github.com/"), name=name)
    first.source = f"{words}\n\n{badge}"
    if install.id != "install":
        raise ValueError(f"{name}: the second cell must have the id 'install'; got {install.id!r}.")
    install.source = INSTALL.format(address=where)
    return new


def executed(notebook: Any, folder: str | os.PathLike[str]) -> Any:
    """A copy that was run from top to bottom in a clean kernel, with what is to be stored of it.

    Args:
        notebook: of nbformat 4.
        folder: where it runs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    new = copy.deepcopy(notebook)
    small = f"--InlineBackend.print_figure_kwargs={{'bbox_inches': 'tight', 'dpi': {DPI}}}"
    client = NotebookClient(
        new, timeout=600, coalesce_streams=True, record_timing=False, extra_arguments=[small],
        resources={"metadata": {"path": str(folder)}},
    )  # fmt: skip
    with _pictures_inline():
        client.execute()
    return _tidied(new)


@contextmanager
def _pictures_inline() -> Iterator[None]:
    """The kernel draws into the notebook, whatever backend this process was told to use."""
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        yield
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend


def _tidied(notebook: Any) -> Any:
    """The notebook without what changes from run to run, and without warnings, which are told."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        cell.execution_count = None
        kept = []
        for output in cell.outputs:
            if output.get("name") == "stderr":
                print(f"left out of {cell.id}: {output.text}", file=sys.stderr)
                continue
            if "execution_count" in output:
                output.execution_count = None
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            if is_picture(output):
                output.data["image/png"] = _in_few_colors(output.data["image/png"])
            kept.append(output)
        cell.outputs = kept
    return notebook


def _in_few_colors(picture: str) -> str:
    """A picture in base64 with a palette: a third of the size, and no marks of who wrote it."""
    written = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        reduced = image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
        reduced.save(written, "png", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def differences(stored: Any, fresh: Any) -> list[str]:
    """Where two runs of a notebook do not say the same; empty where they agree.

    Words have to be equal, and numbers to differ by no more than `RELATIVE`, or by `STEPS` where
    they are whole and by 1 in the last digit where not, unless both are below `ROUNDING`. Times,
    bytes and money are left out. Pictures have to be in the same cells, whatever they show.

    Args:
        stored: a notebook with outputs.
        fresh: the same one, run again.

    Returns:
        A line for every difference.
    """
    pairs = zip_longest(_code(stored), _code(fresh))
    return [
        f"{'?' if one is None else one.id}: {line}"
        for one, other in pairs
        for line in _cell_differences(one, other)
    ]


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _cell_differences(one: Any, other: Any) -> Iterator[str]:
    if one is None or other is None or one.id != other.id:
        yield "there is no such cell in both"
        return
    pictures = [sum(map(is_picture, cell.outputs)) for cell in (one, other)]
    if pictures[0] != pictures[1]:
        yield f"{pictures[0]} pictures stored, {pictures[1]} drawn"
    for old, new in zip_longest(printed(one), printed(other), fillvalue=""):
        yield from text_differences(old, new)


def is_picture(output: Any) -> bool:
    """Whether an output of a cell has a picture."""
    return "image/png" in output.get("data", {})


def printed(cell: Any) -> list[str]:
    """The texts that a cell left, one for each output and form."""
    texts = []
    for output in cell.outputs:
        data = output.get("data", {})
        texts += [output["text"]] if output.output_type == "stream" else []
        texts += [data[form] for form in ("text/plain", "text/html") if form in data]
    return texts


def text_differences(old: str, new: str) -> Iterator[str]:
    """The first words that differ, or all numbers that do; see `differences`."""
    sides = [MACHINE.sub(" … ", text) for text in (old, new)]
    words = [re.findall(r"\w+|[^\w\s]", NUMBER.sub("#", side)) for side in sides]
    for one, other in zip_longest(*words):
        if one != other:
            yield f"{one!r} stored, {other!r} now, in {new.strip()!r}"
            return
    for one, other in zip(*map(NUMBER.findall, sides), strict=True):
        if not agree(one, other):
            yield f"{one} stored, {other} now, in {new.strip()!r}"


def agree(one: str, other: str) -> bool:
    """Whether two printed numbers are the same for our purposes."""
    a, b = float(one), float(other)
    if max(abs(a), abs(b)) < ROUNDING:
        return True
    # Half a unit on top, since both were rounded when they were printed.
    allowed = max(RELATIVE * max(abs(a), abs(b)), *(1.5 * _unit(text) for text in (one, other)))
    if one.lstrip("-").isdigit() and other.lstrip("-").isdigit():
        allowed = max(allowed, STEPS)
    return abs(a - b) <= allowed


def _unit(number: str) -> float:
    """One in the last digit."""
    digits, _, power = number.lower().partition("e")
    return 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))


def unsupported(notebook: Any) -> list[str]:
    """Numbers in **bold** in the text that no output prints: what is quoted has to be there.

    Args:
        notebook: with its outputs.

    Returns:
        The numbers, as they are quoted.
    """
    texts = [text for cell in _code(notebook) for text in printed(cell)]
    shown = {float(number) for text in texts for number in NUMBER.findall(text)}
    words = " ".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    quoted = [n for bold in re.findall(r"\*\*(.+?)\*\*", words) for n in NUMBER.findall(bold)]
    return [number for number in quoted if float(number) not in shown]


def main(names: Iterable[str] = ()) -> None:
    """Runs notebooks and writes them with their outputs."""
    wanted = tuple(names) or ("",)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not any(name in path.stem for name in wanted):
            continue
        old = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            new = executed(dressed(old, path.name), folder)
        nbformat.write(new, path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")
        for number in unsupported(new):
            print(f"  the text says {number}, no output does")


if __name__ == "__main__":
    main(sys.argv[1:])
