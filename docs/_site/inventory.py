"""What is public, and on which page of the reference it stands.

A name is documented once: under its shortest public path, in the section of the module that
defines it, on the page of that module's package. `PAGES` says which page has which packages; a
test holds it against the folders.
"""

import ast
import functools
import importlib
import inspect
import pkgutil
import types
from pathlib import Path
from typing import Any

from rst import escape

PAGES = {
    "forecast": ("jaxttp.forecast", "jaxttp.forecast.methods"),
    "adapters": ("jaxttp.adapters",),
    "training": (
        "jaxttp.training",
        "jaxttp.batches",
        "jaxttp.losses",
    ),
    "ntk": ("jaxttp.ntk",),
    "dynamics": ("jaxttp.dynamics", "jaxttp.dynamics.relinearize"),
    "conditioning": ("jaxttp.conditioning",),
    "gauss_newton": ("jaxttp.gauss_newton",),
    "representation": ("jaxttp.representation",),
    "models": ("jaxttp.models", "jaxttp.models.language", "jaxttp.models.pretrained"),
    "data": ("jaxttp.data",),
    "pipeline": ("jaxttp.pipeline",),
    "plots": ("jaxttp.plots",),
}
PACKAGES = tuple(package for packages in PAGES.values() for package in packages)


@functools.cache
def exported(package: str) -> dict[str, Any]:
    """What a package or module shows: `__all__`, or what it imports as such and what it defines."""
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
        names += [n for n, v in vars(module).items() if _is_of(v, package, n) and n not in names]
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
        if other.count(".") <= package.count(".") and exported(other).get(name) is value:
            return f"{other}.{name}"
    return f"{package}.{name}"


@functools.cache
def assigned(module: str) -> dict[str, str]:
    """The names that a module assigns, with the strings that stand below them."""
    tree = ast.parse(Path(inspect.getfile(importlib.import_module(module))).read_text())
    found: dict[str, str] = {}
    for node, below in zip(tree.body, [*tree.body[1:], None], strict=True):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        text = below.value.value if _is_text(below) else ""
        found |= {t.id: text for t in targets if isinstance(t, ast.Name)}
    return found


def _is_text(node: Any) -> bool:
    """A string that stands by itself."""
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def home(package: str, name: str, value: Any) -> str:
    """The module that defines a name."""
    module = getattr(value, "__module__", None)
    if module and module.startswith("jaxttp"):
        return module
    found = [one for one in submodules(package) if name in assigned(one)]
    return found[0] if found else package


@functools.cache
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


def first_line(package: str, name: str, value: Any) -> str:
    """What a docstring begins with."""
    text = inspect.getdoc(value) or ""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        text = assigned(home(package, name, value)).get(name) or f"A {type(value).__name__}."
    return escape(" ".join(text.strip().split("\n\n")[0].split()))


def section(title: str, level: int) -> list[str]:
    """A heading."""
    return [title, "=-~^"[level] * max(len(title), 3), ""]


def documented(path: str, value: Any) -> list[str]:
    """The directive for one name."""
    if inspect.isclass(value):
        return [f".. autoclass:: {path}", "   :members:", ""]
    if callable(value) and hasattr(value, "__name__"):
        return [f".. autofunction:: {path}", ""]
    package, _, name = path.rpartition(".")
    about = ["", f"   {first_line(package, name, value)}", ""]
    kind = f"   :type: {type(value).__name__}"
    return [".. py:currentmodule:: None", "", f".. py:data:: {path}", kind, *about]


def module_docstring(module: str, names: Any) -> list[str]:
    """What a module says of itself; a link to its name is one to a function of that name."""
    index = ["   :no-index:"] if module.rpartition(".")[2] in names else []
    return [f".. automodule:: {module}", "   :no-members:", *index, ""]


def page(package: str) -> list[str]:
    """A package as reStructuredText: its docstring, a table of its names, then every module."""
    names = exported(package)
    lines = [] if package == "jaxttp" else module_docstring(package, exported("jaxttp"))
    lines += [".. list-table::", "   :widths: 35 65", "   :class: names", ""]
    by_home: dict[str, list[tuple[str, Any]]] = {}
    for name, value in sorted(names.items(), key=lambda item: item[0].lower()):
        path = public_path(package, name, value)
        text = first_line(package, name, value)
        lines += [f"   * - :py:obj:`{name} <{path}>`", f"     - {text}"]
        by_home.setdefault(home(package, name, value), []).append((path, value))
    lines.append("")
    here = [*by_home.pop(package, [])]
    modules = [] if package == "jaxttp" else submodules(package)
    for one in [m for m in by_home if m not in modules and page_package(m) is None]:
        here += [(p, v) for p, v in by_home[one] if p.rpartition(".")[0] == package]
    lines += [line for path, value in here for line in documented(path, value)]
    shown = [module for module in modules if module in by_home]
    inside = [module for module in modules if module not in by_home and "._" not in module]
    for module in [*shown, *inside]:
        members = by_home.get(module) or own(module)
        if members:
            lines += section(module.rpartition(".")[2].lstrip("_"), 1)
            lines += module_docstring(module, names)
            lines += [line for path, value in members for line in documented(path, value)]
    return lines


def own(module: str) -> list[tuple[str, Any]]:
    """What a module defines that its package does not show: under its own path."""
    found = vars(importlib.import_module(module))
    return [(f"{module}.{n}", v) for n, v in found.items() if _is_of(v, module, n) and callable(v)]
