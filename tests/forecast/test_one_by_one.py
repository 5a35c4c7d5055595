"""Settings of other algorithms: sweeps and races of them against what follows and trains them."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxttp import from_nnx, predict_training_time, train
from jaxttp.dynamics import recursion, weight_space
from jaxttp.forecast import (
    Hyperparameters,
    Online,
    grid,
    race,
    sweep,
    sweep_kernel,
)
from jaxttp.forecast.sweep_result import SIMULATED
from jaxttp.losses import get_loss
from jaxttp.ntk import Exact, empirical_ntk

STEPS = 8
LION = functools.partial(optax.lion, b1=0.8)
OTHERS = (
    Hyperparameters(0.3, momentum=0.9, steps=STEPS, algorithm="nesterov"),
    Hyperparameters(0.2, momentum=0.5, steps=STEPS, weight_decay=0.1),
    Hyperparameters(0.05, steps=STEPS, algorithm="adam"),
    Hyperparameters(0.05, steps=STEPS, algorithm="adamw", schedule="cosine"),
    Hyperparameters(0.05, steps=STEPS, algorithm="adamw", weight_decay=0.3),
    Hyperparameters(0.01, steps=STEPS, algorithm=LION),
)
PLAIN = Hyperparameters(0.3, momentum=0.9, steps=STEPS)


def network(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def problem():
    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (10, 4), jnp.float64)
    params = {
        "in": jax.random.normal(keys[1], (4, 6), jnp.float64) / 2,
        "out": jax.random.normal(keys[2], (6, 2), jnp.float64) / 3,
    }
    return params, x, (x[:, 0] * x[:, 1] > 0).astype(int)


def transformation(one):
    """The same by hand."""
    rates = jnp.asarray(one.rates())
    rate = lambda t: rates[t]  # noqa: E731
    if one.algorithm == "nesterov":
        return optax.sgd(rate, one.momentum, nesterov=True)
    if one.algorithm == "sgd":
        return optax.chain(
            optax.add_decayed_weights(one.weight_decay), optax.sgd(rate, one.momentum)
        )
    if one.algorithm == "adam":
        return optax.adam(rate)
    if one.algorithm == "adamw":
        return optax.adamw(rate, weight_decay=0.01 if one.weight_decay is None else 0.3)
    return optax.lion(rate, b1=0.8)


@pytest.mark.parametrize(
    ("one", "batch"), [*((one, None) for one in OTHERS), (OTHERS[0], 3), (OTHERS[3], 3)], ids=str
)
def test_a_race_trains_what_the_setting_says(one, batch):
    params, x, y = problem()
    key = None if batch is None else jax.random.key(5)
    found = race(network, params, x, y, [dataclasses.replace(one, batch_size=batch)], key=key)
    real = train(network, params, x, y, loss="cross_entropy", optimizer=transformation(one),
                 steps=STEPS, batch_size=batch, key=key)  # fmt: skip
    # The numbers stand in the state rather than in the program: rounding of float64 over 8 steps.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found.params,
                 real.params)  # fmt: skip


def test_one_program_serves_all_settings_of_an_algorithm():
    steppers = [one.stepper()[0] for one in grid(
        learning_rate=(0.1, 0.2), momentum=(0.0, 0.9), algorithm="nesterov")]  # fmt: skip
    assert len(set(map(id, steppers))) == 1
    one, other = (Hyperparameters(0.1, algorithm="adamw", weight_decay=w) for w in (0.0, 0.2))
    assert one.stepper()[0] is other.stepper()[0]
    assert [o.stepper()[1] for o in (one, other)] == [{"weight_decay": 0.0}, {"weight_decay": 0.2}]
    assert PLAIN.stepper()[0] is not OTHERS[1].stepper()[0]  # without decay, and with
    assert [o.is_heavy_ball for o in (PLAIN, *OTHERS)] == [True] + [False] * len(OTHERS)
    assert Hyperparameters(0.1, algorithm="nesterov").is_heavy_ball


def followed(one, params, x, y):
    """The loss along the linearised network, as its own dynamics have it."""
    loss = get_loss(one.loss)
    common = {"loss": one.loss, "optimizer": transformation(one), "steps": STEPS}
    if one.algorithm in ("sgd", "nesterov"):
        theta = empirical_ntk(network, params, x)
        tangent = jax.jvp(lambda w: network(w, x), (params,), (params,))[1]
        path = recursion(theta, network(params, x), y, initial_tangent=tangent, **common).train
    else:
        path = weight_space(network, params, x, y, **common).train
    return np.array([loss.value(f, jax.nn.one_hot(y, 2)) for f in path])


def test_a_sweep_follows_each_by_itself():
    params, x, y = problem()
    chosen = (OTHERS[0], OTHERS[1], OTHERS[3], OTHERS[5])
    found = sweep(network, params, x, y, (*chosen, PLAIN), relinearize=0)
    for i, one in enumerate(chosen):
        # The same sums in another order, over 8 steps.
        np.testing.assert_allclose(found.loss[i], followed(one, params, x, y), rtol=1e-9)
        assert found.stable[i]
        assert i in found.warnings
    alone = sweep(network, params, x, y, [PLAIN], relinearize=0)
    np.testing.assert_allclose(found.loss[4], alone.loss[0], rtol=1e-12)
    assert [i for i in range(5) if found.method(i) == SIMULATED] == [2, 3]
    assert np.isfinite(found.max_learning_rate).tolist() == [True, True, False, False, True]
    # Each of the two takes two products with J and its transpose a step, so about a training.
    assert found.trainings > 2
    assert "2 by training the linearized network" in found.depth
    rows = json.loads(json.dumps(found.rows(), allow_nan=False))
    assert [row["algorithm"] for row in rows][:3] == ["nesterov", "sgd", "adamw"]
    assert rows[2]["max_learning_rate"] is None
    assert "no largest learning rate is known" in rows[2]["message"]
    assert found.shared
    (line,) = [line for line in str(found).splitlines() if line.startswith("  adamw, rate 0.05")]
    assert line.endswith(f", {SIMULATED}")


class NoKernel(Exact):
    """A kernel that must not be asked for."""

    def estimate(self, *_, **__):
        raise AssertionError("no kernel is needed")


def test_lion_needs_no_kernel():
    params, x, y = problem()
    found = sweep(network, params, x, y, OTHERS[5:], kernel=NoKernel(), target_loss=1e-9)
    assert found.relinearized == ()
    assert found.depth.startswith("1 by training the linearized network; cost: the FLOPs of")
    assert all(found.warnings.values())  # how far the network is from its linearisation
    with pytest.raises(ValueError, match=r"ends nearest, at loss .*; try more steps"):
        found.best()


def test_leaders_are_followed_along_rebuilt_kernels():
    params, x, y = problem()
    found = sweep(network, params, x, y, (*OTHERS[:3], OTHERS[5]), relinearize=2)
    assert set(found.relinearized) == {0, 1, 2}
    real = train(network, params, x, y, loss="cross_entropy", optimizer=transformation(OTHERS[0]),
                 steps=STEPS)  # fmt: skip
    first = sweep(network, params, x, y, OTHERS[:3], relinearize=0)
    off = [abs(float(one.loss[0, -1] - real.loss[-1])) for one in (found, first)]
    assert off[0] < off[1]
    alone = predict_training_time(
        network, params, x, y, optimizer=OTHERS[2].optimizer(), steps=STEPS, relinearize=2
    )
    np.testing.assert_allclose(found.loss[2], alone.loss, rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "problem_", "message"),
    [
        ({"algorithm": "adan"}, ValueError, "'adan' is not known; choose one of"),
        ({"algorithm": optax.adam(0.1)}, TypeError, "algorithm must be a name"),
        ({"algorithm": LION, "momentum": 0.5}, ValueError, "put it into the function"),
        ({"algorithm": "adamw", "momentum": 0.5}, ValueError, "momentum=0.5 does nothing here"),
        ({"algorithm": "adam", "weight_decay": 0.5}, ValueError, "does nothing here"),
        ({"algorithm": LION, "weight_decay": 0.5}, ValueError, "put it into the function"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay"),
        ({"weight_decay": float("nan")}, ValueError, "weight_decay"),
    ],
)
def test_bad_settings(options, problem_, message):
    with pytest.raises(problem_, match=message):
        Hyperparameters(0.1, **options)


def test_what_knows_gradient_descent_alone_says_so():
    params, x, y = problem()
    adam = Hyperparameters(0.1, algorithm="adam", loss="squared_error", steps=4)
    kernel, f0, target = jnp.eye(4).reshape(2, 2, 2, 2), jnp.zeros((2, 2)), jnp.ones((2, 2))
    for call in (
        lambda: Online(network, params, x, y, adam),
        lambda: sweep_kernel(kernel, f0, target, [adam]),
    ):
        with pytest.raises(ValueError, match="must be gradient descent, with momentum or without"):
            call()


def test_races_and_sweeps_say_how_the_network_is_evaluated():
    _, x, y = problem()
    with jax.numpy_rank_promotion("allow"):
        rngs = nnx.Rngs(0)
        layers = nnx.Linear(4, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs)
        model = from_nnx(nnx.Sequential(*layers))
        chosen = grid(learning_rate=(0.1, 0.3), steps=6)
        raced = race(*model, x, y, chosen, target_loss=0.6)
        result = sweep(*model, x, y, chosen, relinearize=0)
    assert raced.notes == result.notes
    assert "1 BatchNorm on running averages" in " ".join(str(raced).split())
    assert "evaluated with: " in str(result)
