"""Programs compiled in the background: once, waited for, and never in the way."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp._background import Background
from jaxttp._contrasts import Contrasted
from jaxttp._jit import compile_ahead, jit
from jaxttp._timing import compilations, stopwatch
from jaxttp.dynamics._network import outputs_and_pull, see_ahead
from jaxttp.training import compile_step_ahead, time_step


def test_what_was_compiled_ahead_is_not_compiled_again():
    threads = []

    @jit
    def cubed(x):
        threads.append(threading.current_thread().name)
        return x**3 + 0.123

    x = jnp.arange(5.0)
    with compilations() as seen:
        compile_ahead(cubed, x)
        np.testing.assert_allclose(cubed(x), np.arange(5.0) ** 3 + 0.123, rtol=1e-15)
    assert len(threads) == 1  # traced once, and not here
    assert threads[0].startswith("jaxttp-compiles")
    assert len(seen) == 1


def test_the_same_is_begun_once():
    traced = []

    @jit
    def noted(x):
        traced.append(x.shape)
        return x

    for length in (2, 2, 3, 2):
        compile_ahead(noted, jnp.ones(length))
    noted(jnp.ones(2)).block_until_ready()
    assert sorted(traced) == [(2,), (3,)]


def test_products_of_a_network_are_found_again():
    def network(w, x):
        return jnp.tanh(x["a"] @ w)

    contrasted = Contrasted(network)
    x, w = {"a": np.ones((40, 3), np.float32)}, jnp.ones((3, 4))
    see = outputs_and_pull(contrasted)
    with compilations() as seen:
        see_ahead(contrasted, w, x, contrasted(w, x), 7)
        few = {"a": x["a"][:7]}
        see(w, few, jnp.ones((7, 3)))
    programs = len(seen)
    with compilations() as seen:
        jax.clear_caches()
        see(w, few, jnp.ones((7, 3)))
    assert len(seen) <= programs  # those of contrasts and one of the network, not two


def test_shapes_are_enough():
    double = jit(lambda x: 2 * x)
    compile_ahead(double, jax.ShapeDtypeStruct((3,), jnp.float64))
    assert double(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]


def test_other_arguments_are_compiled_as_ever():
    double = jit(lambda x: 2 * x)
    compile_ahead(double, jnp.ones(3))
    assert double(jnp.ones(4)).tolist() == [2.0] * 4


def test_the_callers_width_of_numbers_counts():
    widths = []

    @jit
    def ones(x):
        widths.append(jnp.ones(2).dtype)
        return x + jnp.ones(2)

    with jax.enable_x64(False):
        compile_ahead(ones, np.ones(2, np.float32))
        assert ones(np.ones(2, np.float32)).dtype == jnp.float32
    assert widths == [jnp.float32]


def test_what_fails_ahead_is_told_where_it_is_called():
    @jit
    def wrong(x):
        raise ValueError("no such thing")

    compile_ahead(wrong, jnp.ones(2))
    with pytest.raises(ValueError, match="no such thing"):
        wrong(jnp.ones(2))


def test_nothing_is_begun_within_a_trace_or_of_other_functions():
    inner = jit(lambda x: x + 1)

    def outer(x):
        compile_ahead(inner, x)
        return inner(x)

    assert jax.jit(outer)(jnp.ones(2)).tolist() == [2.0, 2.0]
    compile_ahead(lambda x: x, jnp.ones(2))


def test_waiting_counts_as_compilation_and_the_background_does_not():
    background, go = Background(), threading.Event()
    with stopwatch() as watch:
        background.begin(lambda: jax.jit(lambda x: x * 0.321).lower(jnp.ones(7)).compile())
        background.begin(lambda: go.wait(10))
        threading.Timer(0.2, go.set).start()
        background.wait()
        background.wait()  # nothing is left
    assert 0.1 < watch.compile_seconds <= watch.seconds


def test_a_step_is_compiled_ahead():
    given = (lambda w, x: x @ w, jnp.zeros((2, 1)), jnp.eye(2), jnp.ones((2, 1)))
    common = {"loss": "squared_error", "optimizer": optax.sgd(0.1)}
    with compilations() as seen:
        compile_step_ahead(*given, **common)
        time_step(*given, **common, repeats=1)
    steps = len(seen)
    with compilations() as seen:
        time_step(*given, **common, repeats=1)
    assert steps >= 1
    assert seen == []
