"""The notebooks run from top to bottom, in their fast mode, and keep no outputs."""

import re
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped_and_colab_finds_the_repository(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    where = ADDRESS.removeprefix("https://github.com/")
    badge = f"colab.research.google.com/github/{where}/blob/main/notebooks/{path.name}"
    assert badge in notebook.cells[0].source
    install = code[0].source
    assert f"git+{ADDRESS}" in install
    assert re.search(r'if "google.colab" in sys.modules:\n    %pip', install)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_processes")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXTTP_FAST", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the suite's, not a notebook's
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert pictures or path.stem.startswith("2")  # that one prints
