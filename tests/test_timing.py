"""The stopwatch: compilation apart, never counted twice, and nothing left behind."""

import jax
import jax.numpy as jnp
import pytest

from jaxttp._core.progress import Stopwatch, stopwatch

X = jnp.arange(12.0)


def fresh():
    """A jitted function that nobody has compiled yet."""
    return jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x))


def test_fresh_jit_compiles_and_a_warm_one_does_not():
    function = fresh()
    with stopwatch() as cold:
        jax.block_until_ready(function(X))
    assert 0 < cold.compile_seconds <= cold.seconds
    assert cold.run_seconds == cold.seconds - cold.compile_seconds
    with stopwatch() as warm:
        jax.block_until_ready(function(X))
    assert warm.compile_seconds == 0
    assert warm.run_seconds == warm.seconds > 0


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0),
        ([(1, 3)], 2),
        ([(1, 9), (2, 5), (3, 4)], 8),  # nested
        ([(1, 4), (3, 6)], 5),  # overlapping
        ([(1, 2), (4, 6), (4, 6)], 3),  # apart, and twice the same
        ([(-5, 1), (9, 10)], 2),  # begun before the watch
    ],
)
def test_length_of_a_union_of_spans(spans, expected):
    watch = Stopwatch()
    watch._spans = spans
    watch._close(0.0, 10.0)
    assert watch.seconds == 10
    assert watch.compile_seconds == expected


def test_listeners_are_removed_after_an_error_too():
    watches = []

    def fail():
        with stopwatch() as watch:
            watches.append(watch)
            fresh().lower(X)
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()
    events = len(watches[0]._spans)
    assert 0 < watches[0].compile_seconds <= watches[0].seconds
    jax.block_until_ready(fresh()(X))
    assert len(watches[0]._spans) == events
