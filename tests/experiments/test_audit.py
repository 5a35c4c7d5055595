"""The audit of bad inputs: every public function is in it, and what has to be refused is."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import audit, audit_calls
from experiments.bench.audit_inputs import REFUSAL, SPOKEN, Bad, bad_values
from jaxttp._core.checks import check_finite, check_number

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_bad_inputs_are_refused_by_the_argument_s_name_and_no_function_is_missing(
    quick_processes,
):
    """In a process of its own, as beartype would refuse before the library does."""
    command = [sys.executable, "-m", "experiments.bench.audit", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def judged(function, value, wanted=SPOKEN, words="bad"):
    return audit.judge(function, {"rate": 1.0}, "rate", Bad(words, value, wanted)).kind


def test_what_is_found_is_called_so():
    refusing = lambda rate: check_number("rate", rate, above=0.0)  # noqa: E731
    # refused within this file: only what jaxttp raises itself counts
    assert judged(refusing, -1.0) == "refused"
    assert judged(refusing, 2.0) == "answer"
    assert judged(refusing, 2.0, REFUSAL) == "not refused"
    assert judged(lambda rate: check_finite("x", rate), np.nan) == "nameless"
    assert judged(lambda rate: [1, 2][rate], 5) == "traceback"
    assert (
        judged(lambda rate: jnp.asarray([rate]) * jnp.nan, 2.0) == "answer"
    )  # so is the valid one
    assert judged(lambda rate: jnp.log(rate), -1.0) == "silent NaN"
    assert judged(refusing, 1.0, words=audit.TRACED) == "answer"
    assert judged(lambda rate: float(rate), 1.0, words=audit.TRACED) == "traceback"


def test_nan_is_found_in_any_result_and_doubt_makes_it_spoken():
    assert audit.holds_nan({"a": [(1.0, np.array([np.nan]))]})
    assert not audit.holds_nan({"a": [(1.0, np.array([np.inf])), "nan", jax.random.key(0)]})

    class Doubted:
        trust = "the loss rises"

    assert audit.doubts(Doubted()) == "the loss rises"
    assert audit.doubts(object()) == ""


@pytest.mark.parametrize(
    ("name", "value", "some"),
    [
        ("rate", 0.1, {"NaN", "negative", audit.TRACED}),
        ("steps", 3, {"a half", "zero"}),
        ("x", jnp.ones((3, 2)), {"an axis more", "a NaN", "complex", "one row", "1e20"}),
        ("y", jnp.arange(3), {"too large", "fractions"}),
        ("key", jax.random.key(0), {"keys", "0"}),
        ("loss", "cross_entropy", {"'nonsense'"}),
        ("weights", [jnp.ones((3, 2))], {"the last: a NaN", "one less"}),
        ("apply_fn", audit_calls.network, {"mixes samples", "dropout of one key"}),
        ("params", {"w": jnp.ones((2, 2))}, {"text leaves", "bfloat16"}),
        ("result", object(), {"None"}),
    ],
)
def test_bad_values_follow_from_a_valid_one(name, value, some):
    words = [bad.words for bad in bad_values(name, value)]
    assert some <= {*words}
    assert len({*words}) == len(words)


def test_the_table_counts_and_says_what_is_left_out():
    found = {
        "f(x: a NaN)": audit.Finding("refused"), "f(x: empty)": audit.Finding("traceback"),
        "g(y: zero)": audit.Finding("answer"),
    }  # fmt: skip
    page = audit.table(found)
    assert "| `f` |  | 1 |" in page
    assert "traceback*: to be mended" in page
    assert f"- `convolution_bound`: {audit_calls.LEFT_OUT['convolution_bound']}" in page


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("predict_training_time", "x"), 
        ("train", "key"), ("data.select", "key"),
        ("conditioning.rank_sensitivity", "result"), ("draw_samples", "batches"),
    ],
)  # fmt: skip
def test_what_looks_at_values_refuses_tracers_by_name(name, argument):
    """JAX's own errors repeat the argument's name, too: they were once taken for refusals."""
    given, function = audit_calls.calls()[name], audit_calls.functions()[name]
    found = audit.judge(function, given, argument, Bad(audit.TRACED, given[argument], SPOKEN))
    assert found.kind == "refused"
    assert found.said.startswith(f"ValueError: {argument} is traced, and its values are looked at")


def test_errors_of_jax_are_no_refusals():
    """Though they name the argument: what counts is who raises."""
    assert judged(lambda rate: jnp.zeros(int(rate)), 1.0, words=audit.TRACED) == "traceback"
