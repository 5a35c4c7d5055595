"""Additions to Sphinx: docstrings, the directives of reference and commands, notebooks."""

import importlib
import inspect
import itertools
import json
import re
from typing import Any

import inventory
import typer
from docutils import nodes
from docutils.statemachine import StringList
from rst import escape, to_rst
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles

from jaxttp.cli import app as command_line


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Before Napoleon reads a docstring."""
    lines[:] = to_rst(lines)


def plain_attributes(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """After Napoleon, which writes the types of attributes itself."""
    lines[:] = [plain_type(line) if line.startswith(":vartype") else line for line in lines]


def plain_type(text: str) -> str:
    """A type as the code has it: Float[Array, 'n c'], ArrayLike, Callable."""
    text = re.sub(r"~?(?<![\w.])(?!jaxttp\b)[a-z]\w*\.(\w+\.)*(?=[A-Z])", "", text)
    text = re.sub(r"(?<![~\w.])jaxttp\.", "~jaxttp.", text)
    return re.sub(r"Array \| [^|]*ndarray \| .*? \| complex", "ArrayLike", text)


def plain_types(app: Sphinx, domain: str, kind: str, content: nodes.Element) -> None:
    """Before Sphinx merges the types into the list of arguments."""
    for types in app.env.current_document.autodoc_annotations.values():
        types.update({name: plain_type(text) for name, text in types.items()})


def finish(app: Sphinx, tree: nodes.document) -> None:
    """A result has attributes, not variables; Sphinx links pictures that have a scale."""
    for name in tree.findall(nodes.field_name):
        if name.astext() == "Variables":
            name.children = [nodes.Text("Attributes")]
    for image in tree.findall(nodes.image):
        image["scale"] = 100


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Fields of named tuples are listed under Attributes."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


def link(app: Sphinx, env: Any, node: Any, text: nodes.Element) -> nodes.Element | None:
    """A name in backticks is a link to the public object of that name."""
    if node.get("refdomain") != "py" or node.get("reftype") not in ("obj", "class", "func"):
        return None
    domain, target = env.domains["py"], node["reftarget"]
    path = fitting(domain.objects, target) or fitting(domain.objects, target.rpartition(".")[0])
    doc = node.get("refdoc", env.docname)
    return path and domain.resolve_xref(env, doc, app.builder, "obj", path, node, text)


def fitting(objects: Any, target: str) -> str | None:
    """The shortest public path that ends in a name."""
    kinds = {"function", "class", "data", "exception"}
    kinds |= {"module"} if target.startswith("jaxttp.") else set()  # else an argument's name
    name = target.removeprefix("jaxttp.")
    paths = [path for path in objects if name not in ("", "jaxttp") and path.endswith(f".{name}")]
    paths = [path for path in paths if objects[path].objtype in kinds or "." in name]
    return min(paths, key=lambda path: (len(path), path), default=None)


class Generated(SphinxDirective):
    """`.. public:: jaxttp.ntk`, the names of a package; `.. command:: sweep`, its options."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parse generated reStructuredText."""
        generate = inventory.page if self.name == "public" else command_options
        lines = generate(self.arguments[0])
        package = self.arguments[0] if self.name == "public" else "jaxttp.cli"
        source = inspect.getfile(importlib.import_module(package))
        self.env.note_dependency(source)
        parent = nodes.section()
        parent.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, source), parent)
        return parent.children


def command_options(name: str) -> list[str]:
    """The options of a command in the groups of its help.

    Sphinx indexes and links each of them. sphinxcontrib-typer draws the help as a picture, which
    phones scale down; sphinx-click does not read Typer, which has a copy of Click.
    """
    command: Any = typer.main.get_command(command_line).commands[name]
    context = command.make_context(name, [], resilient_parsing=True)
    lines = [f".. program:: jaxttp {name}", ""]
    for panel, options in itertools.groupby(command.params, lambda one: one.rich_help_panel):
        lines += [panel, "-" * len(panel), ""]
        for flags, text in (option.get_help_record(context) for option in options):
            text = re.sub("(--[a-z-]+)", r"``\1``", escape(text))
            lines += [f".. option:: {flags.replace(' / ', ', ')}", "", f"   {text}", ""]
    return lines


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Notebooks without their installation on Colab and its badge, a picture on another host."""
    if docname.startswith("notebooks/"):
        book = json.loads(source[0])
        book["cells"] = [cell for cell in book["cells"] if cell["id"] != "install"]
        source[0] = re.sub(r"\[!\[Open in Colab\]\(.*?\)\]\(.*?\)", "", json.dumps(book))


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("public", Generated)
    app.add_directive("command", Generated)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", process, priority=100)
    app.connect("autodoc-process-docstring", plain_attributes, priority=900)
    app.connect("autodoc-skip-member", skip)
    app.connect("object-description-transform", plain_types, priority=300)
    app.connect("doctree-read", finish)
    app.connect("missing-reference", link)
    return {"parallel_read_safe": True}
