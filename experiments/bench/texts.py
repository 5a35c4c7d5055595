"""Text that is at hand: what Python files say, and what they do."""

import ast
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def docs_and_code(paths: Iterable[Path]) -> tuple[list[str], list[str]]:
    """Docstrings of Python files, and each file's code without them.

    Args:
        paths: of the files.

    Returns:
        As many texts as there are places for a docstring, and one a file.
    """
    docs, code = [], []
    for path in paths:
        tree = ast.parse(path.read_text(errors="ignore"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docs.append(ast.get_docstring(node) or "")
                if docs[-1]:
                    node.body = node.body[1:] or [ast.Pass()]
        code.append(ast.unparse(tree))
    return docs, code


def as_bytes(text: str) -> np.ndarray:
    """A text's bytes below 128 as integers (L,).

    Example:
        >>> as_bytes("ab").tolist()
        [97, 98]
    """
    return np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int32)
