"""What a forecast says of itself: whether the network agrees with it along its own path."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import empirical_ntk, predict_training_time, train
from jaxttp.dynamics import RelinearizedTrajectory
from jaxttp.dynamics.recursion import recursion
from jaxttp.forecast.uncertainty import trust_in_path, trust_in_speeds
from jaxttp.forecast.witness import NOBODY, Subset, Witness, ask_network, sampled
from jaxttp.losses import encode_targets
from jaxttp.losses.rule import Rule, Target, training_time

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((7, 3)), RNG.integers(0, 2, 7)
PARAMS = {"w": jnp.asarray(RNG.standard_normal((3, 4))), "v": jnp.asarray(RNG.normal(size=(4, 2)))}
COMMON = {"loss": "cross_entropy", "steps": 12}


def tanh(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def linear(params, x):
    return x @ params


@pytest.mark.parametrize(("batch_size", "decay"), [(None, 0.0), (3, 0.1)])
@pytest.mark.parametrize("samples", [7, 40])
def test_what_the_network_says_is_what_dense_jacobians_say(batch_size, decay, samples):
    """On all of few samples and on a part of many, trained by itself."""
    x, y = RNG.standard_normal((samples, 3)), RNG.integers(0, 2, samples)
    whole_f0 = tanh(PARAMS, jnp.asarray(x))
    targets, loss = encode_targets("cross_entropy", y, whole_f0)
    optimizer = optax.chain(optax.add_decayed_weights(decay), optax.sgd(0.5, 0.5))
    whole = Subset(empirical_ntk(tanh, PARAMS, x), jnp.asarray(x), targets, whole_f0)
    asked = []

    def follow(part):
        tangent = jax.jvp(lambda w: tanh(w, part.x), (PARAMS,), (PARAMS,))[1] if decay else None
        options = COMMON | {"loss": loss, "optimizer": optimizer, "initial_tangent": tangent}
        asked.append((part, recursion(part.kernel, part.start, part.targets, **options)))
        return asked[-1][1]

    witness = ask_network(tanh, PARAMS, whole, loss, follow, batch_size)
    ((part, path),) = asked
    assert witness.samples == part.size == sampled(samples) == min(samples, 32)
    assert witness.share == part.size / samples
    rows = slice(None) if part.rows is None else part.rows
    np.testing.assert_array_equal(part.x, x[rows])
    np.testing.assert_array_equal(path.train[0], tanh(PARAMS, part.x))
    curve = jnp.stack([loss.value(f, part.targets) for f in path.train])
    t = int(training_time(curve, 0.1))
    assert witness.step == t > 0
    flat, unravel = jax.flatten_util.ravel_pytree(PARAMS)
    network = jax.jit(lambda w: tanh(unravel(w), part.x).ravel())
    j = jax.jacobian(network)
    first = j(flat)
    end = path.scale[t] * flat + first.T @ path.dual[t].ravel()

    def linearised(way):
        return part.start + way * (path.train[t] - part.start)

    # The first of 64 places on the way to these weights with a fifth of the drop left, or less.
    low = float(curve.min()) + 0.2 * float(curve[0] - curve.min())
    ways = np.arange(1, 65) / 64
    way = next(s for s in ways if float(loss.value(linearised(s), part.targets)) <= low)
    assert 1 / 64 < way < 1
    weights = flat + way * (end - flat)
    # The weights are those whose linearised outputs these are.
    moved = np.asarray(part.start.ravel() + first @ (weights - flat))
    np.testing.assert_allclose(moved, np.ravel(linearised(way)), rtol=1e-9, atol=1e-12)
    g = loss.gradient(linearised(way), part.targets).ravel()
    want = np.sum((j(weights).T @ g) ** 2) / np.sum((first.T @ g) ** 2)
    assert witness.speed == pytest.approx(float(want), rel=1e-9)  # other sums, float64
    assert abs(witness.speed - 1) > 0.05
    real = loss.value(network(weights).reshape(part.start.shape), part.targets)
    predicted = loss.value(linearised(way), part.targets)
    # A millionth of the first loss is added to both, so that two zeros are alike.
    assert witness.loss == pytest.approx(float(real / predicted), rel=3e-6)


def test_a_part_that_diverges_is_given_up_for_the_whole():
    x, y = RNG.standard_normal((40, 3)), RNG.integers(0, 2, 40)
    f0 = tanh(PARAMS, jnp.asarray(x))
    targets, loss = encode_targets("squared_error", y, f0)
    whole = Subset(empirical_ntk(tanh, PARAMS, x), jnp.asarray(x), targets, f0)

    def follow(part, lost=(32,)):
        rate = 1e60 if part.size in lost else 0.1
        return recursion(
            part.kernel, part.start, part.targets, loss=loss, steps=12, optimizer=optax.sgd(rate)
        )

    witness = ask_network(tanh, PARAMS, whole, loss, follow, None)
    assert (witness.samples, witness.share) == (40, 1.0)
    assert witness.step > 0
    nobody = ask_network(tanh, PARAMS, whole, loss, lambda part: follow(part, (32, 40)), None)
    assert nobody.step == -1
    assert nobody.passes == 0


def test_a_linear_network_leaves_no_doubt():
    forecast = predict_training_time(
        linear, jnp.zeros((3, 2)), X, Y, relinearize=0, learning_rate=1.0, steps=30
    )
    assert forecast.trust is None


def test_a_network_whose_kernel_grows_says_so():
    """Every kernel vanishes where the last layer is zero, but for that layer's own part."""
    y = (X[:, 0] * X[:, 1] > 0).astype(int)
    start = PARAMS | {"v": jnp.zeros((4, 2))}
    forecast = predict_training_time(tanh, start, X, y, relinearize=0, learning_rate=0.5, steps=100)
    real = train(tanh, start, X, y, loss="cross_entropy", optimizer=optax.sgd(0.5), steps=100)
    assert forecast.loss[-1] > 2 * real.loss[-1]
    assert real.loss[-1] < 0.5 * forecast.loss[-1]
    assert forecast.trust is not None
    assert "times as fast" in forecast.trust
    assert forecast.trust in " ".join(str(forecast).split())
    assert forecast.cost.gradient_evaluations == 1 + 2  # to the place, and there
    flow = predict_training_time(
        tanh, start, X, y, relinearize=0, learning_rate=0.5, steps=100, dynamics="ode"
    )
    assert flow.trust == forecast.trust  # the weights are those of the recursion
    part = predict_training_time(
        tanh,
        start,
        X,
        y,
        relinearize=0,
        learning_rate=0.5,
        steps=100,
        trainable=lambda path: "v" in str(path),
    )
    assert part.trust is None  # the last layer alone is linear


def test_a_network_that_is_not_finite_at_the_predicted_weights():
    def broken(w, x):
        return jnp.where(jnp.sum(w**2) > 0.1, jnp.nan, 1.0) * (x @ w)

    found = predict_training_time(
        broken, jnp.zeros((3, 2)), X, Y, relinearize=0, learning_rate=1.0, steps=12
    )
    assert "the network is not finite" in (found.trust or "")


STEADY = 0.5 ** (np.arange(41) / 8)


@pytest.mark.parametrize(
    ("speed", "loss", "words"),
    [
        (1.0, 1.0, None), (1.45, 1.0, None), (0.7, 1.2, None),
        (1.6, 1.0, "for step 9 the network learns 1.6 times as fast .* a third"),
        (0.55, 1.0, "1.8 times as slowly .* a third"), (2.0, 1.0, "2 times as fast .* half"),
        (7.0, 1.0, "two thirds"), (1.0, 1.4, "loss is 1.4 times what .* a third"),
        (1.1, 0.4, "loss is 2.5 times below what .* half"),
        (0.0, 1.0, "learns over 100 times as slowly .* two thirds"),
        (1.0, np.inf, "is not finite"), (np.inf, 1.0, "is not finite"),
    ],
)  # fmt: skip
def test_words(speed, loss, words):
    found = trust_in_speeds(Witness(9, speed, loss), STEADY)
    if words is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=words):
            raise ValueError(found)


def test_words_say_of_which_samples_they_are():
    heard = Witness(9, 3.0, 1.0, samples=38, share=38 / 150)
    found = trust_in_speeds(heard, STEADY)
    assert "for step 9 of 38 samples alone the network learns" in found
    assert heard.passes == pytest.approx(2 * 38 / 150)


def test_one_kernel_says_that_the_loss_rises():
    swollen = np.concatenate([[1.0, 21.0], STEADY])
    assert "rises on the way, to 21 times" in (trust_in_speeds(NOBODY, swollen) or "")
    again = np.concatenate([STEADY, np.linspace(STEADY[-1], 0.4, 9)])
    steady = Witness(9, 1.0, 1.0)
    assert "rises again from step 40" in (trust_in_speeds(steady, again) or "")


def path_of(loss, uncertainty=0.0, edge_at=-1, held_from=-1, diverged_at=-1):
    loss = jnp.asarray(loss)
    values = dict.fromkeys(RelinearizedTrajectory.__dataclass_fields__) | {
        "loss": loss, "loss_uncertainty": jnp.linspace(0.0, uncertainty, len(loss)),
        "edge_at": edge_at, "held_from": held_from, "diverged_at": diverged_at,
    }  # fmt: skip
    path = object.__new__(RelinearizedTrajectory)
    for name, value in values.items():
        object.__setattr__(path, name, value)
    return path


def test_a_loss_that_rises_again():
    def said(loss):
        return trust_in_path(path_of(loss), Rule()) or ""

    assert said([1.0, 0.1, 0.05, 0.04]) == ""
    assert said([1.0, 0.1, 0.001, 0.003]) == ""  # of no account beside the drop
    assert "rises again from step 1 on" in said([1.0, 0.1, 0.15, 0.25])
    assert "the loss rises on the way" in said([1.0, 9.0, 0.1])
    assert said([0.0, 0.0, 0.0]) == ""


def test_a_path_says_where_it_is_unsure():
    loss = STEADY
    assert trust_in_path(path_of(loss), Rule((0.1, 0.4))) is None
    assert trust_in_path(path_of(loss, 0.01, edge_at=3), Rule((0.1, 0.4))) is None
    found = trust_in_path(path_of(loss, 0.2), Rule((0.1, 0.4)))
    assert "step 24 (10 % of the loss's drop) is known to ±" in found
    assert "tolerance" in found
    asked = Rule((0.1, 0.4)).about([Target(0.1), Target(0.2, "error")])
    assert "(loss below 0.1) is known to ±" in trust_in_path(path_of(loss, 0.06), asked)
    assert "(loss below 0.1) may as well never come" in trust_in_path(path_of(loss, 0.2), asked)
    assert "crosses the edge" in trust_in_path(path_of(loss, 0.2, edge_at=3), Rule((0.1, 0.4)))
    assert "oscillates there" in trust_in_path(path_of(loss, edge_at=9, held_from=7), Rule())
