"""What differs in numbers alone is compiled once: rates, momenta, seeds, times, targets."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import dynamics
from jaxttp.dynamics import HeavyBall
from tests.compiled import compilations


@contextlib.contextmanager
def nothing_is_compiled():
    with compilations() as seen:
        yield
    assert len(seen) == 0


@pytest.fixture(scope="module")
def line(problem):
    return tuple(map(jnp.asarray, (problem.kernel, problem.f0, problem.labels)))


def recursion(line, optimizer, **options):
    return dynamics.recursion(*line, loss="cross_entropy", optimizer=optimizer, **options).train


def flow(line, rate, ts, **options):
    return dynamics.gradient_flow(
        *line, loss="cross_entropy", learning_rate=rate, ts=ts, **options
    ).train


TIMES = np.array([0.0, 1.0, 5.0])
KEYS = [jax.random.key(0), jax.random.key(1)]
INJECTED = optax.inject_hyperparams(optax.sgd)
CASES = {  # how a setting is computed, and two settings
    "recursion": (
        lambda line, problem, ball: recursion(line, ball, steps=4),
        (HeavyBall(0.1, 0.5), HeavyBall(0.2)),  # no momentum is a momentum of 0
    ),
    "recursion, batches": (
        lambda line, problem, key: recursion(line, HeavyBall(0.1), steps=4, batch_size=3, key=key),
        KEYS,
    ),
    "recursion, injected": (
        lambda line, problem, injected: recursion(line, INJECTED(*injected), steps=4),
        ((0.1, 0.5), (0.2, 0.8)),
    ),
    "flow": (
        lambda line, problem, setting: flow(line, *setting),
        ((0.1, TIMES), (0.2, 2 * TIMES)),
    ),
    "closed form": (
        lambda line, problem, rate: dynamics.closed_form(*line, learning_rate=rate, ts=TIMES).train,
        (0.1, 0.2),
    ),
    "diffusion": (
        lambda line, problem, setting: (
            dynamics.diffusion(
                *line,
                loss="cross_entropy",
                learning_rate=setting[0],
                momentum=setting[1],
                key=setting[2],
                batch_size=3,
                steps=4,
                paths=2,
            ).loss
        ),
        ((0.1, 0.0, KEYS[0]), (0.2, 0.9, KEYS[1])),
    ),
    "weight space, Adam": (
        lambda line, problem, rate: (
            dynamics.weight_space(
                problem.apply_fn,
                problem.params,
                problem.x,
                problem.labels,
                loss="cross_entropy",
                optimizer=optax.inject_hyperparams(optax.adam)(rate),
                steps=4,
            ).train
        ),
        (0.1, 0.2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_second_setting_compiles_nothing(problem, line, name):
    compute, (one, other) = CASES[name]
    first = compute(line, problem, one)
    with nothing_is_compiled():
        second = compute(line, problem, other)
    assert not np.array_equal(first, second)  # it is not the first one's result


def test_equal_optimizers_are_one_program(line):
    """Fresh closures of the same code and values: what optax makes of the same call."""
    first = recursion(line, optax.sgd(0.1, 0.9), steps=5)
    with nothing_is_compiled():
        np.testing.assert_array_equal(recursion(line, optax.sgd(0.1, 0.9), steps=5), first)


def test_segments_of_other_lengths_compile_nothing(problem):
    """Re-linearised with the same number of kernels, at another rate and so at other steps."""
    paths = []
    for rate in (0.02, 0.3):
        with contextlib.nullcontext() if not paths else nothing_is_compiled():
            path = dynamics.relinearized_recursion(
                problem.apply_fn, problem.params, problem.x, problem.labels, loss="cross_entropy",
                optimizer=HeavyBall(rate, 0.5 + rate), steps=20, rebuilds=3,
                kernel_fn=lambda _: jnp.asarray(problem.kernel),
            )  # fmt: skip
        paths.append(path)
    assert paths[0].ends != paths[1].ends
    assert paths[0].kernels == paths[1].kernels == 4
