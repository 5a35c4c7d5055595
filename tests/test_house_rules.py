"""No function of the library is too long, has too many parameters, or branches too often."""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

LIMITS = {"lines": 80, "parameters": 15, "branches": 20}

# Doors for newcomers: they turn keywords into values, so they may have any number of parameters.
# The commands (jaxttp/cli/x.py: x) may, too.
FRONT_DOORS = {
    "jaxttp/dynamics/diffusion.py: diffusion",
    "jaxttp/dynamics/relinearize.py: relinearized_recursion",
    "jaxttp/forecast/comparison.py: compare",
    "jaxttp/forecast/extrapolation.py: extrapolate",
    "jaxttp/forecast/predict.py: predict_training_time",
    "jaxttp/forecast/sweeps.py: sweep",
    "jaxttp/forecast/watch.py: __init__",
}

# A class name has one meaning in the whole library, with and without an underscore in front.
TWO_MEANINGS = {
    "Exact",  # a whole kernel, an inverse without a filter: public, each in its module
}

SHARED = {"Progress"}  # how work in progress is told: the same in every module

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DECISIONS = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


class Measured(NamedTuple):
    name: str
    line: int
    lines: int
    parameters: int
    branches: int


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From the `def` to the last line, functions inside included, its own docstring not."""
    assert function.end_lineno is not None
    total = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is None:
        return total
    assert first.end_lineno is not None
    return total - (first.end_lineno - first.lineno + 1)


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    named = given.posonlyargs + given.args + given.kwonlyargs
    return len(named) + (given.vararg is not None) + (given.kwarg is not None)


def branches_of(function: ast.AST) -> int:
    """Decisions: if, elif, conditional expressions, loops, except, case, each `and` and `or`."""
    total = 0
    for node in ast.walk(function):
        if isinstance(node, DECISIONS):
            total += 1
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
    return total


def measured(tree: ast.Module, file: str) -> list[Measured]:
    return [
        Measured(
            f"{file}: {node.name}", node.lineno, lines_of(node), parameters_of(node),
            branches_of(node),
        )
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    ]  # fmt: skip


def excess(function: Measured) -> list[str]:
    """What a function has too much of."""
    file, name = function.name.split(": ")
    is_door = function.name in FRONT_DOORS or file == f"jaxttp/cli/{name}.py"
    return [
        what
        for what, limit in LIMITS.items()
        if getattr(function, what) > limit and not (what == "parameters" and is_door)
    ]


@pytest.fixture(scope="module")
def trees():
    paths = sorted(ROOT.glob("jaxttp/**/*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


@pytest.fixture(scope="module")
def functions(trees):
    return [one for file, tree in trees.items() for one in measured(tree, file)]


def test_functions_are_short_and_plain(functions):
    assert len(functions) > 1000  # they are found
    lines = [
        f"{one.name} (line {one.line}) has {getattr(one, what)} {what}, {LIMITS[what]} may be: "
        "give a part of it a name of its own, or make values of what belongs together."
        for one in functions
        for what in excess(one)
    ]
    assert not lines, "\n" + "\n".join(lines)


def test_front_doors_are_where_they_were(functions):
    gone = FRONT_DOORS - {one.name for one in functions}
    assert not gone, "moved or renamed; take it out of FRONT_DOORS"


def names_of_types(tree: ast.Module) -> set[str]:
    """Classes of a module, and other names for types such as ``Network = Callable[...]``."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name.strip("_"))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            given = [one.id.strip("_") for one in node.targets if isinstance(one, ast.Name)]
            found |= {name for name in given if name[:1].isupper() and not name.isupper()}
    return found


def test_a_name_means_one_thing(trees):
    where: dict[str, list[str]] = {}
    for file, tree in trees.items():
        if file != "jaxttp/cli/_options.py":  # options, named after what they give
            for name in names_of_types(tree) - SHARED - TWO_MEANINGS:
                where.setdefault(name, []).append(file)
    lines = [
        f"{name} stands in {', '.join(files)}: let each name say what it is."
        for name, files in where.items()
        if len(files) > 1
    ]
    assert not lines, "\n" + "\n".join(lines)


# A simulation of thousands of small steps, which run half as fast when they are compiled quickly.
AS_USUAL = {"jaxttp/dynamics/diffusion.py"}


def test_programs_of_a_forecast_are_compiled_quickly(trees):
    found = {
        file
        for file, tree in trees.items()
        if file.startswith(("jaxttp/dynamics/", "jaxttp/forecast/", "jaxttp/ntk/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.jit"
    }
    assert found == AS_USUAL, "use jaxttp._jit.jit"


def test_the_measures():
    tree = ast.parse(
        '''
def one(a, /, b, *rest, c=1, **more):
    """Two lines,

    and a third."""
    for x in rest:
        if x and b or c:
            def inside(y):
                return [z for z in y if z] if a else None
        elif x:
            pass
    try:
        match a:
            case 1:
                pass
    except ValueError:
        while b:
            pass
'''
    )
    one, inside = measured(tree, "one.py")
    # for, if, and, or, comprehension, its if, conditional expression, elif, case, except, while
    assert (one.lines, one.parameters, one.branches) == (14, 5, 11)
    assert (inside.name, inside.lines, inside.parameters, inside.branches) == (
        "one.py: inside", 2, 1, 3,
    )  # fmt: skip
