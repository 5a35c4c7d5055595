"""`.. public:: jaxttp.ntk`: everything that is public there, module by module, from docstrings.

A name is documented once: under its shortest public path, in the section of the module that
defines it, on the page of that module's package. `PAGES` says which page has which packages; a
test holds it against the folders.
"""

import ast
import importlib
import inspect
import pkgutil
import types
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles

PAGES = {
    "forecast": ("jaxttp.forecast", "jaxttp.forecast.paths"),
    "adapters": ("jaxttp.adapters",),
    "training": (
        "jaxttp.training",
        "jaxttp.crossing",
        "jaxttp.rule",
        "jaxttp.early_stopping",
        "jaxttp.batches",
        "jaxttp.tokens",
        "jaxttp.losses",
    ),
    "ntk": ("jaxttp.ntk",),
    "dynamics": ("jaxttp.dynamics",),
    "conditioning": ("jaxttp.conditioning",),
    "gauss_newton": ("jaxttp.gauss_newton",),
    "representation": ("jaxttp.representation",),
    "models": ("jaxttp.models", "jaxttp.models.language", "jaxttp.models.pretrained"),
    "data": ("jaxttp.data",),
    "pipeline": ("jaxttp.pipeline",),
    "plots": ("jaxttp.plots",),
}
PACKAGES = tuple(package for packages in PAGES.values() for package in packages)


def exported(package: str) -> dict[str, Any]:
    """What a package shows to users: `__all__`, or what it imports under its own name."""
    module = importlib.import_module(package)
    if hasattr(module, "__all__"):
        names = list(module.__all__)
    else:
        tree = ast.parse(Path(inspect.getfile(module)).read_text())
        names = [
            alias.asname
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.asname == alias.name and not alias.name.startswith("_")
        ]
        names = names or [n for n, v in vars(module).items() if _is_of(v, package, n)]
    found = {name: getattr(module, name) for name in names}
    return {name: v for name, v in found.items() if not isinstance(v, types.ModuleType)}


def _is_of(value: Any, package: str, name: str) -> bool:
    """Defined in a module, and public."""
    return getattr(value, "__module__", None) == package and not name.startswith("_")


def public_path(package: str, name: str, value: Any) -> str:
    """The shortest path under which users find it."""
    if exported("jaxttp").get(name) is value:
        return f"jaxttp.{name}"
    for other in sorted(PACKAGES, key=lambda one: one.count(".")):
        if other.count(".") < package.count(".") and exported(other).get(name) is value:
            return f"{other}.{name}"
    return f"{package}.{name}"


def home(package: str, name: str, value: Any) -> str:
    """The module that defines a name."""
    module = getattr(value, "__module__", None)
    if module and module.startswith("jaxttp"):
        return module
    for one in submodules(package):
        tree = ast.parse(Path(inspect.getfile(importlib.import_module(one))).read_text())
        targets = [t for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
        targets += [n.target for n in tree.body if isinstance(n, ast.AnnAssign)]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return one
    return package


def submodules(package: str) -> list[str]:
    """The modules of a package, but not those of its packages, the private ones last."""
    module = importlib.import_module(package)
    found = [
        f"{package}.{one.name}"
        for one in pkgutil.iter_modules(getattr(module, "__path__", []))
        if not one.ispkg
    ]
    return sorted(found, key=lambda name: name.rpartition(".")[2].startswith("_"))


def page_package(module: str) -> str | None:
    """The package on whose page a module's names are documented."""
    return max((p for p in PACKAGES if f"{module}.".startswith(f"{p}.")), key=len, default=None)


def first_line(value: Any) -> str:
    """What a docstring begins with."""
    from docstrings import escape

    text = (inspect.getdoc(value) or "").strip().split("\n\n")[0]
    return escape(" ".join(text.split())) if callable(value) else ""


def section(title: str, level: int) -> list[str]:
    """A heading."""
    return [title, "=-~^"[level] * max(len(title), 3), ""]


def documented(path: str, value: Any) -> list[str]:
    """The directive for one name."""
    if inspect.isclass(value):
        return [f".. autoclass:: {path}", "   :members:", ""]
    if callable(value) and hasattr(value, "__name__"):
        return [f".. autofunction:: {path}", ""]
    return [f".. py:data:: {path}", f"   :type: {type(value).__name__}", ""]


def page(package: str) -> list[str]:
    """A package as reStructuredText: its docstring, a table of its names, then every module."""
    names = exported(package)
    lines = [f".. automodule:: {package}", "   :no-members:", ""]
    if package.removeprefix("jaxttp.") in exported("jaxttp"):  # a function of the same name
        lines.insert(2, "   :no-index:")
    lines += [".. list-table::", "   :widths: 35 65", "   :class: names", ""]
    by_home: dict[str, list[tuple[str, Any]]] = {}
    for name, value in names.items():
        path = public_path(package, name, value)
        lines += [f"   * - :py:obj:`{name} <{path}>`", f"     - {first_line(value) or 'Data.'}"]
        by_home.setdefault(home(package, name, value), []).append((path, value))
    lines.append("")
    modules = [m for m in submodules(package) if "._" not in m or m in by_home]
    for module in [package, *modules]:
        members = by_home.get(module, [])
        if module == package:
            lines += [line for path, value in members for line in documented(path, value)]
            continue
        if not members:
            members = _own(module)
        title = module.rpartition(".")[2].lstrip("_")
        lines += section(title, 1)
        lines += [f".. automodule:: {module}", "   :no-members:", "   :no-index:", ""]
        lines += [line for path, value in members for line in documented(path, value)]
    return lines


def _own(module: str) -> list[tuple[str, Any]]:
    """What a module defines that its package does not show: under its own path."""
    found = vars(importlib.import_module(module))
    return [(f"{module}.{n}", v) for n, v in found.items() if _is_of(v, module, n) and callable(v)]


class Public(SphinxDirective):
    """The directive."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Parses what `page` writes."""
        package = self.arguments[0]
        lines = page(package)
        source = inspect.getfile(importlib.import_module(package))
        self.env.note_dependency(source)
        parent = nodes.section()
        parent.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, source), parent)
        return parent.children


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls."""
    app.add_directive("public", Public)
    return {"parallel_read_safe": True}
