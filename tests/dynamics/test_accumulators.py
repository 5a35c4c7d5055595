"""A velocity goes on as J^T of coefficients at a segment's end: nobody asks the network for it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics import _accumulators, _course
from jaxttp.dynamics._course import run_to, survey
from jaxttp.dynamics._features import run_batches
from jaxttp.dynamics._network import compile_network
from jaxttp.dynamics._segment import Chord, Knot, gathered, run_segment
from jaxttp.dynamics._walk import look_ahead, set_out, step
from jaxttp.dynamics.relinearize import relinearized_recursion
from jaxttp.ntk import empirical_ntk, sketch_jacobian
from jaxttp.ntk.kernels import Factored
from tests import oracles

N, C, STEPS = 9, 2, 120
X = jax.random.normal(jax.random.key(0), (N, 4))
Y = jnp.arange(N) % C


def network(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def weights():
    a, b = jax.random.split(jax.random.key(1))
    return {"a": 0.7 * jax.random.normal(a, (4, 6)), "b": 0.5 * jax.random.normal(b, (6, C))}


def kernel_at(w):
    return empirical_ntk(network, w, X)


def path(optimizer=None, share=None, monkeypatch=None, apply_fn=network, **options):
    if share is not None:
        monkeypatch.setattr(_accumulators, "GATHERED", share)
    options = {"rebuilds": 4, "steps": STEPS, "kernel_fn": kernel_at, **options}
    return relinearized_recursion(
        apply_fn, weights(), X, Y, loss="cross_entropy",
        optimizer=optax.sgd(0.05, 0.8) if optimizer is None else optimizer, **options,
    )  # fmt: skip


def state_at(end, optimizer, **options):
    """The path after one segment, and what it started from."""
    course, state = set_out(
        network, weights(), X, Y, loss="cross_entropy", optimizer=optimizer, steps=STEPS,
        kernel_fn=kernel_at, draw=lambda _: None, **options,
    )  # fmt: skip
    before, ahead = look_ahead(course, state, end)
    return course, before, step(course, before, ahead)


def test_what_is_beside_by_brute_force():
    """The length of each part, by vectors of weight space."""
    rng = np.random.default_rng(2)
    row = jnp.asarray(rng.standard_normal(2 * N * C + 2))
    points = [weights(), jax.tree.map(lambda leaf: 1.2 * leaf, weights())]
    vectors = [weights(), jax.tree.map(jnp.cos, weights())]
    push, pull = (compile_network(network)[k] for k in (2, 1))
    knots = [
        Knot(kernel_at(point), jnp.stack([push(point, X, v) for v in vectors])) for point in points
    ]
    flat = [jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(v)]) for v in vectors]
    products = jnp.stack([jnp.stack([a @ b for b in flat]) for a in flat])
    dual, beside = gathered(knots, products, row)
    first, last = row[: N * C].reshape(N, C), row[N * C : 2 * N * C].reshape(N, C)
    np.testing.assert_allclose(dual, first + last)

    def length(tree):
        return np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(tree)))

    near, far = pull(points[0], X, first), pull(points[1], X, last)
    want = [
        length(near),
        *(abs(float(c)) * length(v) for c, v in zip(row[-2:], vectors, strict=True)),
    ]
    np.testing.assert_allclose(beside, np.array(want) / length(far), rtol=1e-9)
    nothing = gathered(knots, products, row.at[N * C : 2 * N * C].set(0.0))[1]
    assert np.all(np.isinf(nothing))  # of nothing there is no share: the network is asked


def test_a_velocity_is_what_the_network_would_have_said():
    """After a segment of 60 steps little of it was met before the end."""
    _, _, taken = state_at(60, optax.sgd(0.05, 0.8))
    here, passes = taken.state.here, taken.state.passes
    assert taken.state.gathered == (True,)  # 0.8^60 of a vector of nothing is left
    pull = compile_network(network)[1]
    velocity = pull(here.point, X, here.duals[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_accumulators, "GATHERED", -1.0)
        other = state_at(60, optax.sgd(0.05, 0.8))[-1].state
    assert other.gathered == (False,)
    assert other.passes == passes + 2  # one way for each end
    np.testing.assert_allclose(other.here.duals[0], 0.0)
    for one, two in zip(
        jax.tree.leaves(velocity), jax.tree.leaves(other.here.vectors[1]), strict=True
    ):
        # What was met near the start is at the end, too: kernels differ by a tenth in between.
        np.testing.assert_allclose(one, two, atol=0.05 * float(jnp.max(jnp.abs(two))))


@pytest.mark.parametrize("batches", [{}, {"batch_size": 3, "key": jax.random.key(5)}])
def test_the_same_path_with_fewer_ways_through_the_network(batches, monkeypatch):
    options = {"rebuilds": "auto", "tolerance": 0.01, **batches}
    asked = path(share=-1.0, monkeypatch=monkeypatch, **options)
    found = path(share=0.5, monkeypatch=monkeypatch, **options)
    assert len(found.ends) == len(asked.ends)  # by an error that differs as their weights do
    drop = float(asked.loss[0] - asked.loss[-1])
    # Below the tolerance of 0.01 that the path itself has.
    np.testing.assert_allclose(found.loss, asked.loss, atol=5e-3 * drop)
    assert found.gradient_evaluations < 0.8 * asked.gradient_evaluations


def test_a_linear_network_is_followed_exactly():
    """Its Jacobian is the same everywhere, so that nothing is lost but what is left out."""

    def linear(w, x):
        return jnp.tanh(x @ weights()["a"]) @ w["b"]

    def kernel(w):
        return empirical_ntk(linear, w, X)

    found = path(apply_fn=linear, kernel_fn=kernel)
    want = oracles.train_network(
        linear, weights(), X, jax.nn.one_hot(Y, C), "cross_entropy", optax.sgd(0.05, 0.8), STEPS
    )
    # A hundredth of a velocity may be left out at the end of a segment, some millionths here.
    np.testing.assert_allclose(found.train, want, atol=1e-5)


def test_what_is_left_of_a_vector_stays_one():
    """Of a large velocity 0.9^40 is left: it goes on as it was, pushed once a segment."""
    optimizer = optax.sgd(0.02, 0.9)
    velocity = jax.tree.map(lambda leaf: jnp.sin(leaf), weights())
    course, before, taken = state_at(40, optimizer, accumulators=[velocity])
    here = taken.state.here
    assert taken.state.gathered == (False,)
    assert here.vectors[1] is before.here.vectors[1]
    np.testing.assert_allclose(here.shares, 0.9**40, rtol=1e-9)
    known = taken.state.surveyed
    assert known is not None
    pushed, products = survey(course, here, here.point, course.in_use(taken.state))
    np.testing.assert_allclose(known.pushed[1], pushed[1], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(known.products[1, 1], products[1, 1], rtol=1e-9)
    later, _ = look_ahead(course, taken.state, 80)
    assert later.passes == taken.state.passes  # nobody is asked what is known


def test_weights_that_decay_are_in_every_velocity():
    """Its coefficient of the weights is no part of it that could be left out: a vector is made."""
    optimizer = optax.chain(optax.add_decayed_weights(0.3), optax.sgd(0.05, 0.8))
    taken = state_at(60, optimizer)[-1]
    assert taken.state.gathered == (False,)
    assert float(taken.state.here.shares[0]) == 1.0
    np.testing.assert_allclose(taken.state.here.duals[0], 0.0)


def test_factors_begin_with_what_is_gathered():
    """Steps of mini-batches in the kernel's factors, from a velocity of coefficients."""

    def sketched(w):
        parts = sketch_jacobian(network, w, X, key=jax.random.key(3), dim=16)
        return Factored.of(parts, parts)

    course, before = set_out(
        network, weights(), X, Y, loss="cross_entropy", optimizer=optax.sgd(0.05, 0.8),
        steps=STEPS, kernel_fn=sketched, draw=lambda _: jnp.arange(3 * STEPS).reshape(-1, 3) % N,
    )  # fmt: skip
    here = before.here._replace(
        duals=[jax.random.normal(jax.random.key(8), (N, C))], shares=jnp.zeros(1)
    )
    state = before._replace(here=here)
    pushed, products = survey(course, here, here.point, course.in_use(state))
    far = sketched(jax.tree.map(lambda leaf: 1.1 * leaf, weights()))
    knots = [Knot(here.kernel, pushed), Knot(far, 1.1 * pushed)]
    line = Chord(jnp.ones((N, C)), jnp.zeros(2), jnp.asarray(30.0))
    for ends in (knots[:1], knots):
        way = None if len(ends) == 1 else line
        found, want = (
            _run_with(runner, course, state, ends, products, way)
            for runner in (run_batches, run_segment)
        )
        # The same products in another order.
        np.testing.assert_allclose(found.train, want.train, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found.rows[1], want.rows[1], rtol=1e-9, atol=1e-9)


def _run_with(runner, course, state, knots, products, line):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_course, "run_batches", runner)
        return run_to(course, state, knots, products, line, 25)[1]
