"""What Sphinx is told beside `conf.py`: docstrings, the directive of the reference, notebooks."""

import importlib
import inspect
import re
from typing import Any

import inventory
from docutils import nodes
from docutils.statemachine import StringList
from notebook import plain_notebook
from rst import to_rst
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Before Napoleon sees them."""
    lines[:] = to_rst(lines)


def plain_attributes(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """After Napoleon, which writes the types of attributes itself."""
    lines[:] = [plain_type(line) if line.startswith(":vartype") else line for line in lines]


_ARRAY_LIKE = re.compile(
    r"Array \| ~?(numpy\.)?ndarray \| ~?(numpy\.)?bool \| ~?(numpy\.)?number"
    r" \| bool \| int \| float \| complex"
)


def plain_type(text: str) -> str:
    """A type as the code has it: Float[Array, 'n c'], ArrayLike, Callable."""
    text = re.sub(r"~?(jax\.)?jaxlib\._jax\.Array", "Array", text)
    text = re.sub(r"~?(jaxtyping|collections\.abc|typing|optax\._src\.base|pathlib)\.", "", text)
    text = re.sub(r"(?<![~\w.])jaxttp\.", "~jaxttp.", text)
    return _ARRAY_LIKE.sub("ArrayLike", text)


def plain_types(app: Sphinx, domain: str, kind: str, content: nodes.Element) -> None:
    """Before Sphinx merges the types into the list of arguments."""
    for found in app.env.current_document.autodoc_annotations.values():
        found.update({name: plain_type(text) for name, text in found.items()})


def say_attributes(app: Sphinx, tree: nodes.document) -> None:
    """A result has attributes, not variables."""
    for name in tree.findall(nodes.field_name):
        if name.astext() == "Variables":
            name.children = [nodes.Text("Attributes")]


COLUMN = 736
"""Pixels that the text is wide: larger pictures are links to themselves."""


def link_pictures(app: Sphinx, tree: nodes.document) -> None:
    """Sphinx links what is scaled, so what is wider than the text is scaled to it."""
    for image in tree.findall(nodes.image):
        path = app.srcdir / image["uri"]
        if path.suffix == ".png" and path.is_file():
            if int.from_bytes(path.read_bytes()[16:20], "big") > COLUMN:
                image["width"] = "100%"


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Fields of named tuples are told under Attributes."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


def link(app: Sphinx, env: Any, node: Any, text: nodes.Element) -> nodes.Element | None:
    """A name in backticks is a link to what is public under it, wherever it lives."""
    if node.get("refdomain") != "py" or node.get("reftype") not in ("obj", "class", "func"):
        return None
    full = fitting(env.domains["py"].objects, node["reftarget"])
    if full is None:
        return None
    doc = node.get("refdoc", env.docname)
    return env.domains["py"].resolve_xref(env, doc, app.builder, "obj", full, node, text)


def fitting(objects: Any, target: str) -> str | None:
    """The shortest public path that ends in a name; of a field of a result the result's."""
    kinds = {"function", "class", "data", "exception"}
    kinds |= {"module"} if target.startswith("jaxttp.") else set()  # else an argument's name
    name = target.removeprefix("jaxttp.")
    found = [
        (len(path), path)
        for path, entry in objects.items()
        if path.endswith("." + name) and (entry.objtype in kinds or "." in name)
    ]
    if found:
        return min(found)[1]
    owner = target.rpartition(".")[0]
    return fitting(objects, owner) if owner and owner != "jaxttp" else None


class Public(SphinxDirective):
    """`.. public:: jaxttp.ntk`: everything that is public there, module by module."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parses what the inventory writes."""
        package = self.arguments[0]
        lines = inventory.page(package)
        source = inspect.getfile(importlib.import_module(package))
        self.env.note_dependency(source)
        parent = nodes.section()
        parent.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, source), parent)
        return parent.children


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Before a page is parsed."""
    if docname.startswith("notebooks/"):
        source[0] = plain_notebook(source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls."""
    app.add_directive("public", Public)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", process, priority=100)
    app.connect("autodoc-process-docstring", plain_attributes, priority=900)
    app.connect("autodoc-skip-member", skip)
    app.connect("object-description-transform", plain_types, priority=300)
    app.connect("doctree-read", say_attributes)
    app.connect("doctree-read", link_pictures)
    app.connect("missing-reference", link)
    return {"parallel_read_safe": True}
