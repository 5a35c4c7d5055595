"""One segment at a time: what a step makes of the path, and where segments are placed."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.dynamics import HeavyBall, _confirm
from jaxttp.dynamics._placement import GROW, REJECT, AtSteps, ByError, ByLength, PathView
from jaxttp.dynamics._walk import Outcome, look_ahead, set_out, step
from tests.dynamics.test_edge import PARAMS, X, Y, kernel_of, product

STEPS = 30


@pytest.fixture(scope="module")
def begun():
    return set_out(
        product, PARAMS, X, Y, loss="squared_error", optimizer=HeavyBall(0.02), steps=STEPS,
        kernel_fn=kernel_of, draw=lambda samples: None,
    )  # fmt: skip


def take(begun, end, factor=1.0, **options):
    """A step whose second kernel is a multiple of the true one."""
    course, state = begun
    course = dataclasses.replace(course, kernel_fn=lambda w: factor * kernel_of(w))
    state, ahead = look_ahead(course, state, end)
    return step(course, state, ahead, **options)[:3]


def test_an_accepted_segment_ends_where_the_network_is(begun):
    _, before = begun
    after, outcome, _ = take(begun, 10)
    assert outcome is Outcome.ACCEPTED
    assert (after.ends, after.start, after.kernels) == ((10,), 10, 2)
    np.testing.assert_allclose(after.train[10], product(after.here.vectors[0], X), rtol=1e-12)
    np.testing.assert_array_equal(after.train[0], before.train[0])
    assert (before.ends, before.kernels) == ((), 1)  # a state is a value


def test_a_rejected_segment_costs_a_kernel_and_nothing_else(begun):
    _, before = begun
    after, outcome, error = take(begun, 10, limit=0.0)
    assert outcome is Outcome.REJECTED
    assert error > 0
    assert (after.ends, after.kernels, after.rejected) == ((), 2, 1)
    np.testing.assert_array_equal(after.train, before.train)


def test_a_kernel_that_the_network_denies_is_not_followed(begun, monkeypatch):
    monkeypatch.setattr(_confirm, "SWEEPS", 0)
    after, outcome, _ = take(begun, 10, factor=20.0)
    assert outcome is Outcome.HELD
    assert (after.ends, after.held_from) == ((STEPS,), 0)


def test_a_kernel_that_is_not_finite_holds_the_last_outputs(begun):
    after, outcome, _ = take(begun, 10, factor=jnp.nan)
    assert outcome is Outcome.DIVERGED
    assert (after.ends, int(after.diverged_at)) == ((STEPS,), 1)
    np.testing.assert_array_equal(after.train, np.broadcast_to(after.here.f, after.train.shape))


PATH = np.linspace(0.0, 1.0, 11)


def test_given_ends_are_taken_in_turn():
    placement = AtSteps((2, 5, 10))
    assert placement.propose(PathView(0, 10, 1, None), None).end == 2
    assert placement.propose(PathView(5, 10, 3, None), None).end == 10


def test_segments_by_length_are_early_and_dense():
    placement, memory, ends, start = ByLength(3), (0, 0.0), [], 0
    while start < 10:
        view = PathView(start, 10, 1 + len(ends), np.maximum(PATH - PATH[start], 0.0))
        proposal = placement.propose(view, memory)
        memory, start = placement.learn(view, proposal, 0.0, True), proposal.end
        ends.append(start)
    # (k/3)^1.8 of the length is 0.14 and 0.48, reached by steps 2 and 5
    assert ends == [2, 5, 10]


def test_segments_by_error_shrink_with_it():
    placement = ByError(0.02, 8)
    view = PathView(0, 10, 1, PATH)
    first = placement.propose(view, placement.begin())
    assert first.limit == float("inf")  # one step cannot be divided
    quick = placement.learn(view, first, 0.0, True)
    assert quick.length == pytest.approx(GROW * 0.1)  # as fast as it may
    second = placement.propose(PathView(1, 10, 2, PATH), quick)
    assert (second.end, second.limit) == (5, REJECT * 0.02)
    again = placement.learn(view, second, 1.0, False)
    assert placement.propose(PathView(1, 10, 3, PATH), again).end < 5
    assert placement.propose(PathView(1, 10, 8, PATH), again).end == 10  # the last kernel
