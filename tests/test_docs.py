"""What the documentation shows runs, and what it links to is there."""

import functools
import importlib
import json
import pkgutil
import re
import sys
from pathlib import Path

import pytest
import typer

import jaxttp
from experiments.bench import records
from jaxttp.cli import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.S | re.M)

# Pages whose blocks other tests run: they need an extra, or a folder with a network.
ELSEWHERE = {"pytorch.md": "test_from_torch.py", "transformers.md": "test_readme.py"}
SLOW = ("compare.md", "compose.md", "exact-steps.md", "stopping.md")
PAGES = [
    pytest.param(str(path.relative_to(DOCS)), marks=[pytest.mark.slow] if path.name in SLOW else [])
    for path in sorted(DOCS.rglob("*.md"))
    if BLOCK.search(path.read_text()) and path.name not in ELSEWHERE
]


@pytest.fixture(scope="module")
def inventory():
    """What the reference is made of; it needs no Sphinx."""
    sys.path.insert(0, str(DOCS / "_site"))
    yield importlib.import_module("inventory")
    sys.path.remove(str(DOCS / "_site"))


def run(page: str) -> dict:
    """The blocks of a page, one after the other, in one scope."""
    scope: dict = {}
    for i, code in enumerate(BLOCK.findall((DOCS / page).read_text())):
        exec(compile(code, f"{page}, block {i}", "exec"), scope)
    return scope


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, monkeypatch, tmp_path):
    """With one kernel where a block does not say how many: the rest is compilation."""
    monkeypatch.chdir(tmp_path)
    for name in ("predict_training_time", "sweep", "compare"):
        quick = functools.partial(getattr(jaxttp, name), relinearize=0)
        monkeypatch.setattr(jaxttp, name, quick)
    assert run(page)


def test_commands_have_the_options_that_pages_give_them():
    commands = typer.main.get_command(app).commands
    assert {path.stem for path in DOCS.glob("commands/*.rst")} == set(commands)
    seen = 0
    for path in (*DOCS.rglob("*.md"), *DOCS.rglob("*.rst")):
        for name, rest in re.findall(r"\bjaxttp ([a-z-]+)((?: [^`\n#]+)?)", path.read_text()):
            if name not in commands and " --" not in rest:
                continue  # prose
            known = {flag for option in commands[name].params for flag in option.opts}
            given = re.findall(r"(?<=\s)--[a-z-]+", rest)
            assert set(given) <= known, f"{path.name}: jaxttp {name}{rest}"
            seen += len(given)
    assert seen > 15


LINK = re.compile(r"(!?)\[(?:[^\]\[]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", flags=re.S | re.M)


def prose(path: Path) -> str:
    """The text of a page without its code; of a notebook that of its cells of text."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return FENCE.sub("", text)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as MyST and others make them."""
    heads = re.findall(r"^#{1,6} +(.*?)\s*$", prose(path), flags=re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


SITE = [
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
    *(ROOT / name for name in ("experiments/README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]


@pytest.mark.parametrize("path", [*SITE, ROOT / "README.md"], ids=lambda p: p.name)
def test_no_link_is_dead(path):
    for picture, target in LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            assert not picture or path.suffix == ".ipynb", f"{target}: pages need no network"
            continue
        name, _, anchor = target.partition("#")
        found = path if not name else path.parent / name
        assert found.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{path.name}: {target}"


@pytest.mark.parametrize("page", records.PAGES, ids=lambda page: page.name)
def test_measured_numbers_come_from_records(page):
    text = page.read_text()
    assert records.render(text) == text, "python -m experiments.bench.records render"
    assert not records.unrecorded(text)


def test_a_number_without_a_record_is_found():
    text = "It takes 3 s.\n\n<!-- numbers: accuracy -->\nOff by 2.6 % in 24 of 38.\n\n"
    text += "| 7.25 s | `8 s` |\n"
    assert records.unrecorded(text) == ["3 in 'It takes 3 s.'", "7.25 in '| 7.25 s |   |'"]


def test_the_reference_has_every_public_package(inventory):
    def public(prefix, path):
        for one in pkgutil.iter_modules(path, f"{prefix}."):
            name = one.name.rpartition(".")[2]
            if name.startswith("_") or name == "cli":
                continue
            if one.ispkg or prefix == "jaxttp":
                yield one.name
            if one.ispkg:
                yield from public(one.name, importlib.import_module(one.name).__path__)

    packages = ["jaxttp", *public("jaxttp", jaxttp.__path__)]
    assert sorted(packages) == sorted(inventory.PACKAGES)


def test_the_reference_has_every_public_name_once(inventory):
    made = [line for one in inventory.PACKAGES for line in inventory.page(one)]
    entry = re.compile(r"\.\. (?:auto(?:class|function)|py:data):: (\S+)")
    found = [m.group(1) for m in map(entry.match, made) if m]
    assert sorted(found) == sorted({name.path for name in inventory.names().values()})
    for package in inventory.PACKAGES:
        for name, value in inventory.exported(package).items():
            assert inventory.names()[name, id(value)].value is value
    assert len(found) > 250
