"""What a forecast says of itself: whether the network agrees with it along its own path."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import empirical_ntk, predict_training_time, train
from jaxttp.dynamics import RelinearizedTrajectory
from jaxttp.dynamics._edge import constant_edge
from jaxttp.dynamics.recursion import Coefficients, Course, recursion
from jaxttp.forecast._second_look import POINTS, Look, ask
from jaxttp.forecast._trust import trust_in_look, trust_in_path
from jaxttp.losses import encode_targets

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((7, 3)), RNG.integers(0, 2, 7)
PARAMS = {"w": jnp.asarray(RNG.standard_normal((3, 4))), "v": jnp.asarray(RNG.normal(size=(4, 2)))}
COMMON = {"loss": "cross_entropy", "steps": 12}


def tanh(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def linear(params, x):
    return x @ params


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_answers_are_those_of_the_dense_jacobians(batch_size, decay):
    x = jnp.asarray(X)
    f0 = tanh(PARAMS, x)
    targets, loss = encode_targets("cross_entropy", Y, f0)
    optimizer = optax.chain(optax.add_decayed_weights(decay), optax.sgd(0.5, 0.5))
    tangent = jax.jvp(lambda w: tanh(w, x), (PARAMS,), (PARAMS,))[1] if decay else None
    options = COMMON | {"optimizer": optimizer, "initial_tangent": tangent}
    theta = empirical_ntk(tanh, PARAMS, x)
    path = recursion(theta, f0, Y, **options)
    np.testing.assert_array_equal(path.train[0], f0)
    where = Coefficients(path.dual, path.scale)
    course, passes = ask(tanh, PARAMS, x, targets, loss, theta, path.train, where, batch_size)
    assert passes == 2 * len(POINTS)
    flat, unravel = jax.flatten_util.ravel_pytree(PARAMS)
    j = jax.jacobian(lambda w: tanh(unravel(w), x).ravel())
    first = j(flat)
    way = (
        np.asarray(path.dual).reshape(13, -1)
        @ np.asarray(first)
        @ np.asarray(first.T @ path.dual[-1].ravel())
    )
    share = way / way[-1]
    for k, wanted in enumerate(POINTS, start=1):
        t = 12 if wanted == 1 else int(np.argmax(share >= wanted))
        weights = path.scale[t] * flat + first.T @ path.dual[t].ravel()
        # The weights are those whose linearised outputs are the path's.
        moved = np.asarray(f0.ravel() + first @ (weights - flat))
        np.testing.assert_allclose(moved, np.ravel(path.train[t]), rtol=1e-9, atol=1e-12)
        g = loss.gradient(path.train[t], targets).ravel()
        speed = np.linalg.norm(j(weights).T @ g) / np.linalg.norm(first.T @ g)
        defect = tanh(unravel(weights), x) - path.train[t]
        assert course.shares[k] == pytest.approx(share[t], rel=1e-9)  # other sums, float64
        assert course.speeds[k] == pytest.approx(speed, rel=1e-9)
        np.testing.assert_allclose(course.defects[k] * share[t], defect, rtol=1e-8, atol=1e-11)
        at, there = course(path.dual[t])
        assert at == pytest.approx(speed, rel=1e-9)
        np.testing.assert_allclose(there, defect, rtol=1e-8, atol=1e-11)
    assert abs(course.speeds[-1] - 1) > 0.03


def test_defects_begin_with_the_square_of_the_way():
    course = Course(jnp.ones((1, 1)), jnp.array([0.0, 1.0]), jnp.array([1.0, 3.0]),
                    jnp.array([[[0.0]], [[8.0]]]))  # fmt: skip
    found = [course(jnp.full((1, 1), share)) for share in (-1.0, 0.5, 2.0)]
    assert [float(speed) for speed, _ in found] == [1.0, 2.0, 3.0]
    assert [float(defect[0, 0]) for _, defect in found] == [0.0, 2.0, 8.0]


def test_a_linear_network_leaves_no_doubt():
    forecast = predict_training_time(linear, jnp.zeros((3, 2)), X, Y, learning_rate=1.0, steps=30)
    assert forecast.trust is None


def test_a_network_whose_kernel_grows_says_so():
    """Every kernel vanishes where the last layer is zero, but for that layer's own part."""
    y = (X[:, 0] * X[:, 1] > 0).astype(int)
    start = PARAMS | {"v": jnp.zeros((4, 2))}
    forecast = predict_training_time(tanh, start, X, y, learning_rate=0.5, steps=100)
    real = train(tanh, start, X, y, loss="cross_entropy", optimizer=optax.sgd(0.5), steps=100)
    assert forecast.loss[-1] > 2 * real.loss[-1]
    assert real.loss[-1] < 0.5 * forecast.loss[-1]
    assert forecast.trust is not None
    assert "nearer to step" in forecast.trust
    assert forecast.trust in str(forecast)
    assert forecast.cost.gradient_evaluations == 2 + 2 * len(POINTS)
    flow = predict_training_time(tanh, start, X, y, learning_rate=0.5, steps=100, dynamics="ode")
    assert flow.trust == forecast.trust  # the weights are those of the recursion
    part = predict_training_time(
        tanh, start, X, y, learning_rate=0.5, steps=100, trainable=lambda path: "v" in str(path)
    )
    assert part.trust is None  # the last layer alone is linear


def test_a_network_that_is_not_finite_at_the_predicted_weights():
    def broken(w, x):
        return jnp.where(jnp.sum(w**2) > 0.1, jnp.nan, 1.0) * (x @ w)

    found = predict_training_time(broken, jnp.zeros((3, 2)), X, Y, learning_rate=1.0, steps=12)
    assert "the network is not finite" in (found.trust or "")


def _look(loss, again, finite=True):
    curves = jnp.asarray([loss, again])
    return Look(curves, curves, finite, 0)


def test_words():
    steady = 0.5 ** (np.arange(41) / 8)
    faster = 0.5 ** (np.arange(41) / 5)
    thresholds = (0.1, 0.4)
    assert trust_in_look(_look(steady, steady), thresholds) is None
    found = trust_in_look(_look(steady, faster), (0.1,))
    assert "puts 10 % nearer to step 17 than to 25" in found
    found = trust_in_look(_look(steady, faster), (0.1,), metric="error", rule="absolute")
    assert "puts 0.1 of the error nearer to step 17 than to 27" in found
    late = trust_in_look(_look(faster, steady), (0.04,), rule="absolute")
    assert "puts 0.04 nearer to step 38 than to 24" in late
    assert "nowhere" in trust_in_look(_look(faster, steady), (0.01,), rule="absolute")
    short = 0.5 ** (np.arange(41) / 1.5)
    assert trust_in_look(_look(short, 0.5 ** np.arange(41.0)), (0.4,)) is None  # a step or two
    assert "is not finite" in trust_in_look(_look(steady, steady, finite=False), thresholds)
    swollen = np.concatenate([[1.0, 21.0], steady])
    assert "rises on the way, to 21 times" in trust_in_look(_look(swollen, swollen), thresholds)
    again = np.concatenate([steady, np.linspace(steady[-1], 0.4, 9)])
    assert "rises again from step 40" in trust_in_look(_look(again, again), thresholds)


def _path(loss, uncertainty=0.0, edge_at=-1, held_from=-1):
    loss = jnp.asarray(loss)
    values = dict.fromkeys(RelinearizedTrajectory.__dataclass_fields__) | {
        "loss": loss, "loss_uncertainty": jnp.full(len(loss), uncertainty), "edge_at": edge_at,
        "held_from": held_from,
    }  # fmt: skip
    path = object.__new__(RelinearizedTrajectory)
    for name, value in values.items():
        object.__setattr__(path, name, value)
    return path


def test_a_loss_that_rises_again():
    def said(loss):
        return trust_in_path(_path(loss), ()) or ""

    assert said([1.0, 0.1, 0.05, 0.04]) == ""
    assert said([1.0, 0.1, 0.001, 0.003]) == ""  # of no account beside the drop
    assert "rises again from step 1 on" in said([1.0, 0.1, 0.15, 0.25])
    assert "the loss rises on the way" in said([1.0, 9.0, 0.1])
    assert said([0.0, 0.0, 0.0]) == ""


def test_a_path_says_where_it_is_unsure():
    loss = 0.5 ** (np.arange(41) / 8)
    assert trust_in_path(_path(loss), (0.1, 0.4)) is None
    assert trust_in_path(_path(loss, 0.01, edge_at=3), (0.1, 0.4)) is None
    found = trust_in_path(_path(loss, 0.06), (0.1, 0.4))
    assert "step 25 is known to ±" in found
    assert "tolerance" in found
    assert "crosses the edge" in trust_in_path(_path(loss, 0.06, edge_at=3), (0.1, 0.4))
    assert "kernel of step 7 was held" in trust_in_path(_path(loss, held_from=7), ())
    assert "oscillates there" in trust_in_path(_path(loss, edge_at=9, held_from=7), ())


# --- stability of an optimiser that is given as such ----------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "edge"),
    [
        (optax.sgd(0.1), 2 / 0.1), (optax.sgd(0.1, 0.9), 2 * 1.9 / 0.1),
        (optax.sgd(0.1, 0.9, nesterov=True), 2 * 1.9 / (1 + 1.8) / 0.1),
    ],
)  # fmt: skip
def test_edges_of_constant_optimizers(optimizer, edge):
    found = constant_edge(optimizer)
    # By trial over 64 steps: a mode just beyond the edge grows too slowly to be seen.
    assert found == pytest.approx(edge, rel=0.02)
    assert constant_edge(optax.sgd(optax.linear_schedule(0.1, 0.2, 5))) is None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_both_ways_to_give_a_rate_agree_on_stability(momentum):
    limit = predict_training_time(
        tanh, PARAMS, X, Y, learning_rate=0.1, momentum=momentum, steps=2
    ).max_learning_rate
    for share, stable in ((0.5, True), (2.0, False)):
        rate = share * limit
        given = optax.sgd(rate, momentum or None)
        one, other = (
            predict_training_time(tanh, PARAMS, X, Y, steps=12, **way)
            for way in ({"learning_rate": rate, "momentum": momentum}, {"optimizer": given})
        )
        np.testing.assert_array_equal(one.loss, other.loss)
        assert one.stable is other.stable is stable
        assert one.steps == other.steps
        words = "stable; plain gradient descent" if stable else "diverges; plain gradient descent"
        assert other.message.startswith(words)


def test_a_rate_beyond_the_limit_whose_loss_comes_down_says_so():
    """Cross-entropy flattens on the way, so the limit at the start need not be the end of it."""
    y = (X[:, 0] > 0).astype(int)
    zero = jnp.zeros((3, 2))
    limit = predict_training_time(linear, zero, X, y, learning_rate=0.1).max_learning_rate
    forecast = predict_training_time(linear, zero, X, y, learning_rate=1.5 * limit)
    assert not forecast.stable
    assert forecast.loss[-1] < 0.2 * forecast.loss[0]
    assert "though the predicted loss comes down from" in forecast.message
