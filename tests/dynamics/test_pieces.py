"""The compiled pieces of a walk, where what they are given is about to diverge."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.dynamics._pieces import better
from jaxttp.dynamics._segment import Run
from jaxttp.losses import cross_entropy, squared_error


def confirmed(missed):
    """A run whose end, at step 1, is off by `missed` from a network of outputs 0, in float32."""
    path = np.stack([np.zeros((2, 3)), np.full((2, 3), missed) * [1, 2, 3]])
    path, none = jnp.asarray(path, jnp.float32), jnp.zeros((2, 3), jnp.float32)
    run = Run(path, [], (), jnp.int32(-1), path[:, 0, 0], path[:, 0, 0])
    return run, {}, none, none


@pytest.mark.parametrize("loss", [cross_entropy, squared_error])
def test_runs_that_nearly_diverged_are_compared_without_a_warning(loss):
    """Squares of 1e30 overflow in float32, and what has diverged has no difference at all."""
    worse, good = confirmed(2e30), confirmed(1e30)
    with warnings.catch_warnings(), np.errstate(all="warn"):
        warnings.simplefilter("error")
        found, is_second = better(worse, good, 1, loss)
        assert found is good
        assert is_second
        found, is_second = better(good, worse, 1, loss)
        assert found is good
        assert not is_second
        for broken in (np.inf, np.nan):
            found, is_second = better(good, confirmed(broken), 1, loss)
            assert found is good
            assert not is_second
