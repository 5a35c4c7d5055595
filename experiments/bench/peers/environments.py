"""The peers' environments: a folder each, made from a file of requirements, outside the package."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
OURS = "ours"
"""The environment of the Python that runs the harness."""
PYTHONS = {"neural-tangents": ("3.11", "3.12", "3.10")}
"""Where the newest Python is too new: versions to look for, the first that is found is taken."""
MARK = "installed.txt"


def known() -> list[str]:
    """The names of the environments, ours not among them."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def check_names(names: Sequence[str]) -> list[str]:
    """Names of environments, all of them where none is given.

    Raises:
        ValueError: an unknown name.
    """
    for name in names:
        if name not in known():
            raise ValueError(f"NAME must be one of {', '.join(known())}; got {name!r}.")
    return list(names) or known()


def cache_folder(given: str | Path | None = None) -> Path:
    """Where environments lie: what the user names, or ~/.cache/jaxttp-peers."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given).expanduser().resolve() if given else Path(home) / "jaxttp-peers"


def interpreter(name: str, cache: Path) -> Path | None:
    """The Python of an environment, None where it has not been made (whole)."""
    if name == OURS:
        return Path(sys.executable)
    folder = cache / name
    wanted = (REQUIREMENTS / f"{name}.txt").read_text()
    mark = folder / MARK
    if not mark.exists() or mark.read_text() != wanted:
        return None
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def base_python(name: str) -> str:
    """The Python from which an environment is made.

    Raises:
        RuntimeError: none of the versions that would do is on the path.
    """
    versions = PYTHONS.get(name)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if versions is None or here in versions:
        return getattr(sys, "_base_executable", None) or sys.executable
    for version in versions:
        if found := shutil.which(f"python{version}"):
            return found
    raise RuntimeError(f"{name} needs Python {' or '.join(versions)}; none is on the path.")


def make(name: str, cache: Path) -> Path:
    """Make an environment, or leave it if it is there and its requirements are what they were.

    Returns:
        Its Python.

    Raises:
        RuntimeError: pip could not install it; the message has pip's last line.
    """
    if (found := interpreter(name, cache)) is not None:
        return found
    folder = cache / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([base_python(name), "-m", "venv", "--clear", str(folder)], name)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    file = REQUIREMENTS / f"{name}.txt"
    _run([str(python), "-m", "pip", "install", "-q", "-r", str(file)], name)
    (folder / MARK).write_text(file.read_text())
    return python


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or [
            "no reason given"
        ]
        raise RuntimeError(f"the environment {name} could not be made: {lines[0].strip()[:300]}")
