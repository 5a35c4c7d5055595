"""The public names, and the section of the reference that documents each of them.

A name is documented once: under its shortest public path, in the section of the module that
defines it, on the page of that module's package. The pages name their packages themselves.
"""

import functools
import importlib
import inspect
import itertools
import re
import types
from pathlib import Path
from typing import Any, NamedTuple

from rst import escape

PAGES = sorted((Path(__file__).parent.parent / "reference").glob("*.rst"))
PACKAGES = [p for page in PAGES for p in re.findall(r"(?m)^\.\. public:: (.+)", page.read_text())]
PACKAGES.sort(key=lambda package: package.count("."))


class Name(NamedTuple):
    """A public name.

    Attributes:
        path: the shortest under which users find it.
        value: of the name.
        package: on whose page it is documented.
        module: in whose section.
        text: the first paragraph of its docstring.
    """

    path: str
    value: Any
    package: str
    module: str
    text: str


def exported(package: str) -> dict[str, Any]:
    """The names of a package: `__all__`, or those that it defines, or those that it imports."""
    module = importlib.import_module(package)
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    public = {n: v for n, v in public.items() if not isinstance(v, types.ModuleType)}
    own = [n for n, v in public.items() if getattr(v, "__module__", None) == package]
    return {n: public[n] for n in getattr(module, "__all__", own or public) if n in public}


@functools.cache
def names() -> dict[tuple[str, int], Name]:
    """Every public name once, by the name and the identity of its value."""
    found: dict[tuple[str, int], Name] = {}
    for package in PACKAGES:
        for name, value in exported(package).items():
            if (name, id(value)) in found:
                continue
            module, text = getattr(value, "__module__", ""), inspect.getdoc(value) or ""
            if not (inspect.isclass(value) or inspect.isroutine(value)):
                text = constant_text(package, name) or f"A {type(value).__name__}."
            text = escape(" ".join(text.strip().split("\n\n")[0].split()))
            owners = [p for p in PACKAGES[1:] if f"{module}.".startswith(f"{p}.")]
            owner, module = (owners[-1], module) if owners else (package, package)
            found[name, id(value)] = Name(f"{package}.{name}", value, owner, module, text)
    return found


def constant_text(package: str, name: str) -> str:
    """The string below the assignment of a constant in one of a package's modules."""
    pattern = rf'(?m)^{name}\b.*\n(?:[ )\]}}].*\n)*"""((?s:.*?))"""'
    sources = Path(inspect.getfile(importlib.import_module(package))).parent.glob("*.py")
    return next((m[1] for file in sources for m in re.finditer(pattern, file.read_text())), "")


def entry(name: Name) -> list[str]:
    """The directive for one name."""
    if inspect.isclass(name.value):
        return [f".. autoclass:: {name.path}", "   :members:", ""]
    if callable(name.value) and hasattr(name.value, "__name__"):
        return [f".. autofunction:: {name.path}", ""]
    kind = f"   :type: {type(name.value).__name__}"
    about = [f".. py:data:: {name.path}", kind, "", f"   {name.text}", ""]
    return [".. py:currentmodule:: None", "", *about]


def docstring(module: str, others: Any) -> list[str]:
    """A module's docstring; a link to its name is one to a function of that name, if any."""
    index = ["   :no-index:"] if module.rpartition(".")[2] in others else []
    return [f".. automodule:: {module}", "   :no-members:", *index, ""]


def page(package: str) -> list[str]:
    """A package as reStructuredText: its docstring, a table of its names, then every module."""
    shown = exported(package)
    lines = [] if package == "jaxttp" else docstring(package, exported("jaxttp"))
    lines += [".. list-table::", "   :widths: 35 65", "   :class: names", ""]
    for name in sorted(shown, key=str.lower):
        one = names()[name, id(shown[name])]
        lines += [f"   * - :py:obj:`{name} <{one.path}>`", f"     - {one.text}"]
    lines.append("")

    def order(name: Name) -> tuple[bool, bool, str, str]:
        last = name.path.rpartition(".")[2].lower()
        return name.module != package, "._" in name.module, name.module, last

    here = sorted((one for one in names().values() if one.package == package), key=order)
    for module, members in itertools.groupby(here, key=lambda name: name.module):
        if module != package:
            title = module.rpartition(".")[2].lstrip("_")
            lines += [title, "-" * max(len(title), 3), "", *docstring(module, shown)]
        lines += [line for one in members for line in entry(one)]
    return lines
