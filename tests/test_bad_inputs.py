"""Every public function refuses bad input by the argument's name, and so tracers of values.

    python -m tests.test_bad_inputs [NAME ...]

tries, for every argument of the valid calls in `tests.public_calls`, a tracer and two values that
no answer could be right for, and prints what is neither answered nor refused. In a process of its
own, as beartype would refuse before the library does. Whole ranges of bad values (rank, length,
NaN, scale) are in each function's own tests.
"""

import contextlib
import inspect
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxttp
from tests.public_calls import calls, functions

ROOT, PACKAGE = Path(__file__).parents[1], Path(jaxttp.__file__).parent
TRACED = "traced"
ALLOWED = {
    ("flatten_tokens", "apply_fn"): "the network is checked where the wrapped one is used",
    ("label_words", "apply_fn"): "likewise", ("sample_tokens", "apply_fn"): "likewise",
    ("dynamics.relinearized_recursion", "apply_fn"): "the message names the outputs",
    ("grid", "learning_rate"): "one value in place of several",
    ("grid", "steps"): "a tracer is no iterable of values",
    ("models.last_blocks", "params"): "paths alone are looked at",
}  # fmt: skip
"""(function, argument) that are not tried, and why."""


def bad_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What no answer could be right for, by what a valid value is; two of each kind."""
    if name in ("params", "reference"):
        yield from (("text", "nonsense"), ("text leaves", jax.tree.map(lambda _: "a", value)))
    elif callable(value):
        yield ("no function", 3)
        if name == "apply_fn":
            yield ("None from it", lambda *_: None)
    elif isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        yield from (("0", 0), ("text", "seed"))
    elif isinstance(value, jax.Array | np.ndarray):
        yield from (("a word", "nonsense"), ("an object", object()))
    elif type(value) in (list, tuple) and value and hasattr(value[0], "ndim"):
        yield from (("a word", "nonsense"), ("none", type(value)()))
    elif isinstance(value, bool):
        yield ("text", "yes please")
    elif isinstance(value, int):
        yield from (("negative", -1), ("a half", 1.5))
    elif isinstance(value, float):
        yield from (("NaN", np.nan), ("text", "0.5"))
    elif isinstance(value, str):
        if name not in ("path", "folder", "name"):
            yield from (("nonsense", "nonsense"), ("3", 3))
    else:
        yield from (("nonsense", "nonsense"), ("3", 3))
    if isinstance(value, jax.Array | np.ndarray | float | int) and not isinstance(value, bool):
        yield (TRACED, value)


def attempt(function: Any, given: dict[str, Any], name: str, words: str, value: Any) -> str | None:
    """What is wrong with what came of one bad value; None where nothing is."""
    try:
        if words == TRACED:
            jax.make_jaxpr(lambda value: (function(**(given | {name: value})), 0)[1])(value)
            return None  # an answer made of tracers
        function(**(given | {name: value}))
    except (ValueError, TypeError, FileNotFoundError) as problem:
        text, last = str(problem), traceback.extract_tb(problem.__traceback__)[-1]
        names = {*inspect.signature(function).parameters, *given}
        named = any(re.search(rf"(^|[\s`'(\[]){re.escape(one)}\b", text) for one in names)
        ours = Path(last.filename).is_relative_to(PACKAGE)
        return None if named and ours else f"{text[:200]!r} [{last.filename}:{last.lineno}]"
    except Exception as problem:  # any other kind is no refusal
        return f"{type(problem).__name__}: {str(problem)[:200]!r}"
    return "an answer"


def main(only: list[str]) -> int:
    """Print what is wrong; 1 where anything is."""
    jax.config.update("jax_traceback_filtering", "off")  # JAX's own frames count
    known, valid, wrong = functions(), calls(), 0
    for name in [name for name in valid if not only or name in only]:
        for argument, value in valid[name].items():
            for words, bad in bad_values(argument, value):
                if (name, argument) in ALLOWED:
                    continue
                found = attempt(known[name], valid[name], argument, words, bad)
                if found is not None:
                    wrong += 1
                    print(f"{name}({argument}: {words}): {found}", flush=True)
    return int(wrong > 0)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_processes")
def test_bad_inputs_are_refused_and_no_function_is_missing():
    command = [sys.executable, "-m", "tests.test_bad_inputs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.exit(main(sys.argv[1:]))
