"""Every public function with every bad input: an answer, a refusal or a warning, never silence.

    python -m experiments.bench.audit [--only NAME ...] [--folder F] [--table PAGE] [--quick]

`audit_calls` has a valid call of every public function; `audit_inputs` makes bad values for each of
its arguments, one at a time. A refusal is a ValueError or TypeError, raised here, that names an
argument. An answer has no NaN which the valid call does not have, unless the result says that it
diverged or doubts itself, or a warning was given. All else is printed, and the exit status is 1.
``--quick`` tries, of every kind of argument, a tracer and two values that have to be refused. What
is in the folder is not tried again.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import inspect
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxttp
from experiments.bench.audit_calls import LEFT_OUT, calls, functions
from experiments.bench.audit_inputs import REFUSAL, TRACED, Bad, bad_values
from experiments.store import Store

PACKAGE = Path(jaxttp.__file__).parent
GOOD = ("answer", "refused", "refused at run time", "warned", "said", "its own error")
WORDS = {
    "answer": "a finite answer", "refused": "`ValueError` or `TypeError` that names the argument",
    "refused at run time": "the same, from within a compiled program",
    "its own error": "what the network raises in its own line",
    "warned": "an answer with a warning", "said": "an answer that says it is not to be trusted",
}  # fmt: skip
LONG = {("ts", "1e20"), ("horizon", "1e20"), ("learning_rate", "1e20")}
"""Arguments of flows that would be integrated for `max_steps` steps, a million: not tried."""
_WRAPPED = "the network is looked at where the wrapped one is used"
_REAL = "any network can be trained, batch statistics and dropout too"
_OVERFLOW = "the network itself overflows float32, and its evaluation gives what it gives"
_COPIED = "values are passed on as they are"
_SHOWN = "NaN outputs give a NaN kernel; forecasts, dynamics and spectra refuse it"
_SHAPES = "shapes alone are looked at, empirical_ntk refuses it"
ALLOWED: dict[tuple[str, str, str], str] = {
    ("flatten_tokens", "apply_fn", ""): _WRAPPED, ("label_words", "apply_fn", ""): _WRAPPED,
    ("sample_tokens", "apply_fn", ""): _WRAPPED, ("sample_tokens", "x", "complex"): _WRAPPED,
    ("ntk_plan", "apply_fn", ""): _SHAPES, ("ntk_plan", "x1", "complex"): _SHAPES,
    ("train", "apply_fn", ""): _REAL, ("time_step", "apply_fn", ""): _REAL,
    ("wall_clock", "apply_fn", ""): _REAL,
    ("ntk_operator", "apply_fn", "mixes samples"): "products with J of the batch as a whole",
    ("ntk_operator", "apply_fn", "dropout of one key"): "products with J of the batch as a whole",
    ("ntk_operator", "apply_fn", "dropout of NumPy"): "products with J of the batch as a whole",
    ("empirical_ntk", "apply_fn", "NaN outputs"): _SHOWN,
    ("sketch_jacobian", "apply_fn", "NaN outputs"): _SHOWN,
    ("class_sketch", "apply_fn", "NaN outputs"): _SHOWN,
    ("conditioning.curvature_matrix", "apply_fn", "NaN outputs"): _SHOWN,
    ("conditioning.layer_terms", "apply_fn", "NaN outputs"): _SHOWN,
    ("class_sketch", "x", "1e20"): _OVERFLOW,
    ("compare", "x", "complex"): "the message names the candidate's network",
    ("race_starts", "x", "complex"): "the message names the candidate's network",
    ("dynamics.two_factor_observables", "f", "1e20"): "squares of features overflow float32",
    ("dynamics.weight_space", "apply_fn", ""): "follows the outputs of the batch as a whole",
    ("dynamics.weight_space_flow", "apply_fn", ""): "follows the outputs of the batch as a whole",
    ("gauss_newton.flow_error", "", "1e20"): "the message names epsilon, which overflows",
    ("dynamics.diagonal_noise", "apply_fn", "NaN outputs"): _SHOWN,
    ("dynamics.relinearized_recursion", "apply_fn", ""): "kernel_fn refuses it; outputs are named",
    ("dynamics.relinearized_recursion", "params", "complex"): "the message names the outputs",
    ("dynamics.relinearized_recursion", "x", ""): "the message names the outputs",
    ("dynamics.sample_losses", "train", ""): "losses of outputs that diverged are not finite",
    ("grid", "learning_rate", "3"): "one value in place of several",
    ("grid", "steps", TRACED): "a field of Hyperparameters: a tracer is no iterable of values",
    ("conditioning.contraction_rate", "condition", ""): "any shape, infinity for singular ones",
    ("conditioning.steps_to_accuracy", "condition", ""): "any shape, infinity for singular ones",
    ("conditioning.leaky_relu_bound", "X", "zeros"): "documented: nan for a zero network",
    ("conditioning.layer_spectra", "weights", "the last: zeros"): "documented: nan for zeros",
    ("conditioning.apply_masks", "params", ""): _COPIED,
    ("conditioning.magnitude_masks", "params", "complex"): "sizes of complex numbers are known",
    ("conditioning.layer_terms", "params", "complex"): "leaves that are not floating are left out",
    ("gauss_newton.revmlp_forward", "", "1e20"): _OVERFLOW,
    ("gauss_newton.revmlp_inverse", "", "1e20"): _OVERFLOW,
    ("gauss_newton.revmlp_kernel", "", "1e20"): _OVERFLOW,
    ("losses.unexplained_variance", "", ""): "a measure of what diverges is not finite, either",
    ("forecast.smooth_curve", "curve", "a NaN"): "a mean of NaN; what reads curves refuses it",
    ("ntk.as_matrix", "kernel", "a NaN"): _COPIED,
    ("representation.weight_cosine", "", "zeros"): "documented: nan where one of them is zero",
    ("data.load_table", "path", ""): "the message says data=, as the command line does",
    ("data.load_whole", "name", ""): "the message says data=, as the command line does",
    ("models.make_model", "name", ""): "the message says model=, as the command line does",
    ("models.head_only", "path", ""): "a predicate of a path",
    ("models.freeze", "trainable", "None"): "None is all of them",
    ("models.last_blocks", "params", ""): "paths alone are looked at",
    ("models.merge_lora", "params", ""): _COPIED, ("models.save_params", "params", ""): _COPIED,
    ("models.with_params", "params", "complex"): _COPIED,
    ("models.layer_names", "x", "complex"): "shapes alone are looked at",
}  # fmt: skip
"""(function, argument, bad value), parts of which may be "": why it is right nevertheless."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What came of one bad value.

    Attributes:
        kind: one of `GOOD`, or what is wrong.
        said: the message, or what was NaN.
    """

    kind: str
    said: str = ""


def attempt(function: Callable[..., Any], given: dict[str, Any], name: str, bad: Bad) -> Any:
    """The result of a call with one bad value."""
    if bad.words != TRACED:
        return function(**(given | {name: bad.value}))
    found = []

    def inside(value: Any) -> Any:
        found.append(function(**(given | {name: value})))
        return 0

    jax.jit(inside)(bad.value)
    return None  # its values are tracers


def judge(function: Callable[..., Any], given: dict[str, Any], name: str, bad: Bad) -> Finding:
    """Call, and say what came of it; JAX's own frames count, which it hides else."""
    with warnings.catch_warnings(record=True) as heard, _unfiltered():
        warnings.simplefilter("always")
        try:
            result = attempt(function, given, name, bad)
        except Exception as problem:  # whatever it is, it is found
            return refusal(problem, set(inspect.signature(function).parameters) | set(given), name)
    if bad.wanted == REFUSAL:
        return Finding("not refused", type(result).__name__)
    if not is_silent(result, lambda: function(**given)):
        return Finding("answer")
    ours = [str(each.message) for each in heard if is_ours(each.filename)]
    if ours:
        return Finding("warned", ours[0])
    doubt = doubts(result)
    return Finding("said", doubt) if doubt else Finding("silent NaN", type(result).__name__)


@contextlib.contextmanager
def _unfiltered() -> Iterator[None]:
    before = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def is_ours(file: str) -> bool:
    """Whether code is the library's: a clone and its environment lie in a "jaxttp", too."""
    return Path(file).is_relative_to(PACKAGE)


def refusal(problem: Exception, names: set[str], name: str) -> Finding:
    """What an exception is worth to who gave the argument."""
    frames = traceback.extract_tb(problem.__traceback__)
    last, text = frames[-1], str(problem)
    said = f"{type(problem).__name__}: {text[:300]}"
    plain = text if "EquinoxRuntimeError" not in type(problem).__name__ + text else told(text)
    named = any(re.search(rf"(^|[\s`'(\[]){re.escape(one)}\b", plain) for one in names)
    if plain is not text:
        return Finding("refused at run time" if named else "nameless at run time", said)
    where = f"{Path(last.filename).name}:{last.lineno}"
    own = [i for i, frame in enumerate(frames) if frame.name == "network"]
    ours = [i for i, frame in enumerate(frames) if is_ours(frame.filename)]
    if own and ours and own[-1] > ours[-1]:
        return Finding("its own error", said)
    if isinstance(problem, OSError) and problem.filename is not None:
        return Finding("refused", said)  # it names the file
    kinds = (ValueError, TypeError, FileNotFoundError)
    if not isinstance(problem, kinds) or not is_ours(last.filename):
        return Finding("traceback", f"{said} [{where}]")
    return Finding("refused" if named else "nameless", said)


def told(text: str) -> str:
    """The message in what Equinox raises, behind its stacks."""
    blocks = [block.strip() for block in text.split("\n\n") if block.strip()]
    stacks = ("File ", "Above is", "----", "An error occurred during the runtime")
    return "\n".join(
        line
        for block in blocks
        for line in block.splitlines()
        if not line.startswith((" ", *stacks)) or "Error: " in line
    )


def leaves(result: Any, depth: int = 4) -> list[Any]:
    """Arrays and numbers of any result: pytrees, dataclasses, tuples and dictionaries."""
    if depth == 0 or isinstance(result, str | bytes | type(None)) or callable(result):
        return []
    if isinstance(result, jax.Array | np.ndarray | float | np.number):
        return [result]
    if dataclasses.is_dataclass(result):
        parts = [getattr(result, field.name) for field in dataclasses.fields(result)]
    elif isinstance(result, dict):
        parts = list(result.values())
    elif isinstance(result, list | tuple):
        parts = list(result)
    else:
        parts = [leaf for leaf in jax.tree.leaves(result) if leaf is not result]
    return [leaf for part in parts for leaf in leaves(part, depth - 1)]


def holds_nan(result: Any) -> bool:
    """Whether there is a NaN anywhere in a result."""
    for leaf in leaves(result):
        if isinstance(leaf, jax.core.Tracer):
            continue
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and not jax.numpy.issubdtype(dtype, jax.numpy.inexact):
            continue
        if np.isnan(np.asarray(leaf)).any():
            return True
    return False


def is_silent(result: Any, valid: Callable[[], Any]) -> bool:
    """Whether there is a NaN in a result that a valid call has not."""
    return holds_nan(result) and not holds_nan(valid())


def doubts(result: Any) -> str:
    """What a result says of itself: it diverged, is unstable, or not to be trusted."""
    said = []
    for field in ("stable", "is_psd", "converged"):
        if getattr(result, field, True) is False:
            said.append(f"{field}=False")
    where = getattr(result, "diverged_at", None)
    if where is not None and np.any(np.asarray(where) >= 0):
        said.append("diverged_at")
    for one in (result, getattr(result, "spectrum", None)):
        for field in ("trust", "message"):
            if getattr(one, field, None):
                said.append(str(getattr(one, field)))
    return "; ".join(said)


def pieces(only: Sequence[str] = (), *, quick: bool = False) -> dict[str, Callable[[], Any]]:
    """Every bad input: "function(argument: what)" -> what finds out."""
    known, found = functions(), {}
    for name, given in calls().items():
        if only and not any(name.startswith(one) for one in only):
            continue
        for argument, value in given.items():
            seen: set[str] = set()
            for bad in bad_values(argument, value):
                some = bad.words == TRACED or (bad.wanted == REFUSAL and len(seen) < 2)
                if quick and not some:
                    continue
                if "flow" in name + argument and (argument, bad.words) in LONG:
                    continue
                seen.add(bad.words)
                found[f"{name}({argument}: {bad.words})"] = functools.partial(
                    try_one, known[name], name, given, argument, bad
                )
    return found


def try_one(function: Any, name: str, given: dict[str, Any], argument: str, bad: Bad) -> Finding:
    """One finding; what is allowed is an answer with its reason."""
    found = judge(function, given, argument, bad)
    if found.kind in GOOD:
        return found
    for allowed, reason in ALLOWED.items():
        if all(
            not part or part == is_so
            for part, is_so in zip(allowed, (name, argument, bad.words), strict=True)
        ):
            return Finding("answer", reason)
    return found


def missing() -> list[str]:
    """Public functions that are neither called nor left out with a reason."""
    return [
        name
        for name in functions()
        if name not in calls() and name.rpartition(".")[2] not in LEFT_OUT
    ]


def table(found: dict[str, Finding]) -> str:
    """The page of the documentation."""
    rows: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for name, finding in found.items():
        rows[name.partition("(")[0]][finding.kind] += 1
    kinds = [*GOOD, *sorted({finding.kind for finding in found.values()} - set(GOOD))]
    lines = [
        "# Bad inputs", "",
        "Written by `python -m experiments.bench.audit --table docs/audit.md`. Every public "
        "function was called with bad values, one argument at a time: wrong rank, length and type, "
        "empty, one row, rows alike, NaN and infinity, scales of 1e±20, integers and complex "
        "numbers, what is no key, tracers, and networks that mix samples, draw, or return "
        "something else.", "",
        *(f"- *{kind}*: {WORDS.get(kind, 'to be mended')}" for kind in kinds), "",
        "| function | " + " | ".join(kinds) + " |", "|---|" + "---|" * len(kinds),
    ]  # fmt: skip
    for name, counts in sorted(rows.items()):
        cells = " | ".join(str(counts[kind] or "") for kind in kinds)
        lines.append(f"| `{name}` | {cells} |")
    total = collections.Counter(finding.kind for finding in found.values())
    lines.append("| **all** | " + " | ".join(f"**{total[kind]}**" for kind in kinds) + " |")
    lines += ["", "Answers that were looked at, and may be given:", ""]
    for (name, argument, words), reason in sorted(ALLOWED.items()):
        what = ": ".join(part for part in (argument, words) if part)
        lines.append(f"- `{name}`{f' ({what})' if what else ''}: {reason}")
    lines += ["", "Not called:", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in sorted(LEFT_OUT.items())]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Try what was not tried, print what is wrong, and leave with 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="*", default=(), help="functions whose names begin so")
    parser.add_argument("--folder", type=Path, help="where to keep what came of them")
    parser.add_argument("--table", type=Path, help="the page to write")
    parser.add_argument("--quick", action="store_true", help="what has to be refused, and few")
    options = parser.parse_args(arguments)
    places = {name: getattr(options, name) for name in ("folder", "table")}
    folder, page = (place and place.resolve() for place in places.values())
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):  # names become files
        return report(options, folder, page)


def report(options: argparse.Namespace, folder: Path | None, page: Path | None) -> int:
    """What was found, on the screen and on a page."""
    found = Store(folder, settings={}).all(pieces(options.only, quick=options.quick))
    bad = {name: finding for name, finding in found.items() if finding.kind not in GOOD}
    for name, finding in bad.items():
        print(f"{finding.kind}: {name}\n    {finding.said}")
    counts = collections.Counter(finding.kind for finding in found.values())
    print(", ".join(f"{kind} {count}" for kind, count in counts.most_common()))
    for name in missing():
        print(f"{name} is not called: add it to audit_calls.py")
    if page:
        page.write_text(table(found))
    return int(bool(bad or missing()))


if __name__ == "__main__":
    from experiments.bench import audit  # what is kept names its classes by their module

    raise SystemExit(audit.main())
