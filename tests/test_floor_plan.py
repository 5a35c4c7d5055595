"""Every package imports from lower floors only, imports inside functions included."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# The ground first. A package, or a module directly in jaxttp/, imports from itself and from lower
# floors; "jaxttp" is jaxttp/__init__.py, which nothing imports.
FLOORS = (
    ("_checks", "_jit", "_quick", "_types"),
    (
        "_backend",
        "_bounded",
        "_html",
        "_interrupt",
        "_products",
        "_roots",
        "_samples",
        "_timing",
        "_tokens",
        "_traced",
        "_versions",
    ),
    (
        "_double",
        "_error_rates",
        "_files",
        "_programs",
        "_progress",
        "_result",
        "_sequence",
        "_threads",
        "_weights",
        "adapters",
        "batches",
        "crossing",
    ),
    ("_covariance", "_machine", "early_stopping", "losses", "rule", "tokens"),
    ("_contrasts", "data", "ntk"),
    ("_known_answers", "conditioning", "dynamics", "gauss_newton", "representation"),
    ("models", "training"),
    ("forecast",),
    ("pipeline", "jaxttp"),
    ("plots",),
    ("cli",),
    ("__main__",),
)

# A result draws itself: `.plot()` imports the figures when it is called, and not before.
DECLARED = {("jaxttp._result", "jaxttp.plots")}

LEVEL = {package: level for level, floor in enumerate(FLOORS) for package in floor}


class Import(NamedTuple):
    file: str
    line: int
    source: str
    target: str
    late: bool  # inside a function, or for the type checker alone


def module_of(file: Path) -> str:
    """jaxttp/ntk/gram.py -> jaxttp.ntk.gram, jaxttp/ntk/__init__.py -> jaxttp.ntk."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def imports_of(root: Path) -> list[Import]:
    """Every import of jaxttp within jaxttp, wherever in a file it stands."""
    files = {module_of(path.relative_to(root)): path for path in root.rglob("jaxttp/**/*.py")}
    found = []
    for source, path in sorted(files.items()):
        package = source if path.name == "__init__.py" else source.rpartition(".")[0]
        file, tree = str(path.relative_to(root)), ast.parse(path.read_text())
        late = {id(inner) for node in ast.walk(tree) if waits(node) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            for target in targets(node, package, files):
                if target.split(".")[0] == "jaxttp" and target != source:
                    found.append(Import(file, node.lineno, source, target, id(node) in late))
    return found


def waits(node: ast.AST) -> bool:
    """Whether what stands inside is not run when the module is imported."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def targets(node: ast.AST, package: str, files: dict[str, Path]) -> Iterator[str]:
    """The modules that a statement or a call of importlib loads; "jaxttp.?" where it hides them."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = package.split(".")
            base = ".".join(filter(None, [*parts[: len(parts) - node.level + 1], base]))
        for alias in node.names:
            inside = f"{base}.{alias.name}"
            yield inside if inside in files else base
    elif isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in ("import_module", "__import__"):
            given = node.args[0] if node.args else None
            known = isinstance(given, ast.Constant) and isinstance(given.value, str)
            yield given.value if known and given.value[:1] != "." else "jaxttp.?"


def complaints(imports: list[Import]) -> list[str]:
    """One line for every import that the plan does not allow: where, what, and what to do."""
    lines = []
    for one in imports:
        source, target = package_of(one.source), package_of(one.target)
        where = f"{one.file}:{one.line} imports {one.target}"
        if source == target or (one.source, one.target) in DECLARED:
            continue
        missing = [name for name in (source, target) if name not in LEVEL]
        if target == "?":
            lines.append(f"{where}: give importlib a constant name, so that the plan can be read.")
        elif missing:
            lines.append(
                f"{where}: put {missing[0]!r} on a floor of FLOORS and of CONTRIBUTING.md."
            )
        elif LEVEL[target] >= LEVEL[source]:
            relation = "beside" if LEVEL[target] == LEVEL[source] else "above"
            lines.append(
                f"{where}, but {target} stands {relation} {source}: move what both need to a floor "
                f"below {source}, or let a caller above {target} call both."
            )
    return lines


@pytest.fixture(scope="module")
def imports():
    return imports_of(ROOT)


def test_imports_go_down(imports):
    assert len(imports) > 500  # the files are found and read
    assert not complaints(imports), "\n" + "\n".join(complaints(imports))


def test_every_package_stands_on_one_floor():
    there = {package_of(module_of(path.relative_to(ROOT))) for path in ROOT.glob("jaxttp/**/*.py")}
    assert sorted(name for floor in FLOORS for name in floor) == sorted(there)


def test_what_is_declared_is_there_and_waits(imports):
    """The exception is an import inside a function; one that is no longer needed goes."""
    late = {(one.source, one.target): one.late for one in imports}
    for edge in DECLARED:
        assert late[edge], f"{edge[0]} imports {edge[1]} at once, not when it is needed"


@pytest.mark.parametrize("start", ["jaxttp", "jaxttp.cli"])
def test_what_takes_long_is_imported_when_it_is_needed(imports, start):
    """Neither `import jaxttp` nor the shell's completions load networks, data or figures."""
    seen, queue = {}, [(start, start)]
    while queue:
        module, by = queue.pop()
        if module not in seen:
            seen[module] = by
            queue += [(one.target, one.source) for one in imports
                      if one.source == module and not one.late]  # fmt: skip
            queue.append((module.rpartition(".")[0] or module, module))
    assert len(seen) > 80
    loaded = {f"{module} by {by}" for module, by in seen.items()
              if package_of(module) in ("data", "models", "pipeline", "plots")}  # fmt: skip
    assert not loaded, f"import these inside the functions that need them: {sorted(loaded)}"


def test_modules_form_no_circle(imports):
    """Finer than packages: within a package, too, one module can be read before another."""
    graph: dict[str, set[str]] = {}
    for one in imports:
        if (one.source, one.target) not in DECLARED:
            graph.setdefault(one.source, set()).add(one.target)
    graphlib.TopologicalSorter(graph).prepare()  # names the circle where there is one


def test_contributing_shows_the_plan():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    picture = re.search(r"## The shape of the house\n\n```\n(.*?)```", text, re.DOTALL)
    assert picture, "CONTRIBUTING.md has no floor plan"
    shown = tuple(tuple(line.split()) for line in picture[1].splitlines())
    assert shown[::-1] == FLOORS


@pytest.mark.parametrize(
    ("statement", "target"),
    [
        ("import jaxttp.forecast.problem", "jaxttp.forecast.problem"),
        ("from jaxttp.forecast import problem", "jaxttp.forecast.problem"),
        ("from jaxttp.forecast.problem import Problem", "jaxttp.forecast.problem"),
        ("from ..forecast import problem", "jaxttp.forecast.problem"),
        ("from .. import forecast", "jaxttp.forecast"),
        ("def late():\n    import jaxttp.forecast.problem", "jaxttp.forecast.problem"),
        ("def late():\n    return importlib.import_module('jaxttp.plots')", "jaxttp.plots"),
        ("def late():\n    return __import__('jaxttp.plots')", "jaxttp.plots"),
        (
            "if TYPE_CHECKING:\n    from jaxttp.forecast.problem import Problem",
            "jaxttp.forecast.problem",
        ),
        ("def late(name):\n    return import_module(name)", "jaxttp.?"),
        (
            "def late():\n    return importlib.import_module('.problem', 'jaxttp.forecast')",
            "jaxttp.?",
        ),
        ("from jaxttp import sweep", "jaxttp"),
        ("from jaxttp.later import more", "jaxttp.later"),
        ("from jaxttp.dynamics import flow", "jaxttp.dynamics"),
    ],
)
def test_an_import_that_goes_up_is_found(tmp_path, statement, target):
    for name in ("__init__", "ntk/__init__", "ntk/one", "forecast/__init__", "forecast/problem"):
        path = tmp_path / "jaxttp" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("from jaxttp._checks import check_integer\n")
    path = tmp_path / "jaxttp" / "ntk" / "one.py"
    path.write_text(f"{statement}\nfrom jaxttp.ntk.two import other\nimport numpy\n")
    (found,) = complaints([one for one in imports_of(tmp_path) if one.source == "jaxttp.ntk.one"])
    line = 2 if statement.startswith(("def", "if")) else 1
    assert found.startswith(f"jaxttp/ntk/one.py:{line} imports {target}")
