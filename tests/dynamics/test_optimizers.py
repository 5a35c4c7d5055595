import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics import HeavyBall, recursion, weight_space
from jaxttp.dynamics.optimizers import same_program

INJECTED = optax.inject_hyperparams(optax.sgd)
RATE = 0.1


def own_schedule(_):
    return RATE


def decayed(rate, decay=0.01):
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 3, 10)
    return optax.chain(optax.add_decayed_weights(decay), optax.sgd(schedule, 0.8, nesterov=True))


EQUAL = {  # two fresh ones are one program
    "sgd": lambda: optax.sgd(0.1, 0.9),
    "adam": lambda: optax.adam(0.1),
    "injected": lambda: INJECTED(0.1, momentum=0.5),
    "a schedule of the user's": lambda: optax.sgd(own_schedule),
    "fresh functions of the user's": lambda: optax.sgd(lambda _: RATE),
    "masked by names": lambda: optax.masked(
        optax.sgd(0.1), {"kernel": True, "bias": False, "scale": True}
    ),
    "schedule-free": lambda: optax.contrib.schedule_free_sgd(0.1),
}
DIFFERENT = {
    "rate": (optax.sgd(0.1), optax.sgd(0.2)),
    "sign of zero": (optax.sgd(0.0), optax.sgd(-0.0)),
    "rule": (optax.sgd(0.1, 0.9), optax.sgd(0.1, 0.9, nesterov=True)),
    "in a schedule": (decayed(0.03), decayed(0.04)),
    "what is not injected": (INJECTED(0.1, 0.9, nesterov=True), INJECTED(0.1, 0.9, nesterov=False)),
    "which are injected": (INJECTED(0.1), INJECTED(0.1, momentum=0.9)),
    "injected schedule": (
        INJECTED(optax.constant_schedule(0.1)), INJECTED(optax.constant_schedule(0.2)),
    ),
    "Adam's": (optax.adam(0.1), optax.adam(0.1, b1=0.8)),
    "functions of the user's": (optax.sgd(lambda _: RATE), optax.sgd(lambda _: 2 * RATE)),
    "masks": tuple(
        optax.masked(optax.sgd(0.1), {"kernel": True, "bias": bias, "scale": True})
        for bias in (True, False)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_fresh_optimizers_of_the_same_call_are_equal(name):
    make = EQUAL[name]
    assert same_program(make()) == same_program(make())
    assert hash(same_program(make())) == hash(same_program(make()))


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_optimizers_are_different_programs(name):
    one, other = DIFFERENT[name]
    assert same_program(one) != same_program(other)


def test_injected_numbers_are_no_part_of_the_program():
    assert same_program(INJECTED(0.1, 0.9)) == same_program(INJECTED(0.2, 0.8))


def test_a_global_of_the_user_is_read_anew(problem):
    """The same code that reads another global value must not get the other's numbers."""
    paths = []
    for rate in (0.1, 0.2):
        space = {"rate": rate}
        exec("schedule = lambda _: rate", space)
        optimizer = optax.sgd(space["schedule"])
        paths.append(_train(problem, optimizer))
        np.testing.assert_allclose(paths[-1], _train(problem, optax.sgd(rate)), atol=1e-14)
    assert not np.allclose(paths[0], paths[1])


def test_an_array_that_is_changed_in_place_is_seen(problem):
    rate = np.array(0.1)
    first = _train(problem, optax.sgd(rate))
    rate[...] = 0.2
    np.testing.assert_allclose(_train(problem, optax.sgd(rate)), _train(problem, optax.sgd(0.2)))
    assert not np.allclose(first, _train(problem, optax.sgd(rate)))


def test_traced_numbers_are_found_and_nothing_is_kept_for_them():
    seen = []

    @jax.jit
    def look(rate):
        for optimizer in (optax.sgd(rate), optax.sgd(lambda t: rate * t)):
            seen.append(same_program(optimizer).code.is_traced)
        return rate

    look(0.1)
    assert seen == [True, True]
    assert not same_program(optax.sgd(0.1)).code.is_traced


@pytest.mark.parametrize(
    ("ball", "optimizer"),
    [
        (HeavyBall(0.1), optax.sgd(0.1)),
        (HeavyBall(0.1, 0.9), optax.sgd(0.1, 0.9)),
        (HeavyBall(0.1, 0.9, nesterov=True), optax.sgd(0.1, 0.9, nesterov=True)),
        (
            HeavyBall(jnp.linspace(0.0, 0.1, 6), 0.5),
            optax.sgd(lambda t: jnp.linspace(0.0, 0.1, 6)[t], 0.5),
        ),
    ],
)
def test_heavy_ball_is_sgd(problem, ball, optimizer):
    np.testing.assert_allclose(_train(problem, ball), _train(problem, optimizer), rtol=1e-13)
    paths = [
        weight_space(
            problem.apply_fn, problem.params, problem.x, problem.labels, loss="cross_entropy",
            optimizer=each, steps=6,
        ).train
        for each in (ball, optimizer)
    ]  # fmt: skip
    np.testing.assert_allclose(*paths, rtol=1e-13)


def test_many_rates_by_vmap(problem):
    """And they can be differentiated: the numbers are leaves."""
    rates = jnp.array([0.1, 0.2])
    paths = jax.vmap(lambda rate: _train(problem, HeavyBall(rate, 0.5)))(rates)
    for rate, path in zip(rates, paths, strict=True):
        np.testing.assert_allclose(path, _train(problem, HeavyBall(float(rate), 0.5)), rtol=1e-12)
    slope = jax.grad(lambda rate: _train(problem, HeavyBall(rate))[-1, 0, 0])(0.1)
    up, down = (float(_train(problem, HeavyBall(0.1 + d))[-1, 0, 0]) for d in (1e-5, -1e-5))
    assert float(slope) == pytest.approx((up - down) / 2e-5, rel=1e-6)


def _train(problem, optimizer):
    return recursion(
        problem.kernel, problem.f0, problem.labels, loss="cross_entropy", optimizer=optimizer,
        steps=6,
    ).train  # fmt: skip
