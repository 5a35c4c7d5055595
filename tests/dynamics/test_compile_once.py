"""What differs in numbers alone is compiled once: rates, momenta, seeds, times, goals."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import dynamics
from jaxttp._core.progress import compilations
from jaxttp.dynamics import HeavyBall
from jaxttp.dynamics.stability import max_learning_rate
from tests.draws import normal


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
    "recursion, a rate a step": (
        lambda line, problem, rates: recursion(line, HeavyBall(rates, 0.9), steps=4),
        (jnp.array([0.1, 0.2, 0.3, 0.4]), jnp.array([0.4, 0.3, 0.2, 0.1])),
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
    "flow, eigenbasis": (
        lambda line, problem, rate: flow(line, rate, TIMES, basis="eigen", solver="dopri8"),
        (0.1, 0.2),
    ),
    "flow, tolerance": (
        lambda line, problem, rtol: flow(line, 0.1, TIMES, rtol=rtol, solver="tsit5"),
        (1e-3, 1e-9),
    ),
    "curves": (
        lambda line, problem, rate: (
            dynamics.flow_curves(*line, loss="cross_entropy", learning_rate=rate, ts=TIMES).loss
        ),
        (0.1, 0.2),
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
    "diffusion, fixed noise": (
        lambda line, problem, size: (
            dynamics.diffusion(
                *line,
                loss="cross_entropy",
                learning_rate=0.1,
                key=KEYS[0],
                batch_size=3,
                steps=4,
                noise="diagonal",
                noise_kernel=size * problem.kernel,
            ).loss
        ),
        (0.1, 0.2),
    ),
    "weight space": (
        lambda line, problem, ball: (
            dynamics.weight_space(
                problem.apply_fn,
                problem.params,
                problem.x,
                problem.labels,
                loss="cross_entropy",
                optimizer=ball,
                steps=4,
            ).train
        ),
        (HeavyBall(0.1, 0.5), HeavyBall(0.2, 0.6)),
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
    "weight-space flow": (
        lambda line, problem, rate: (
            dynamics.weight_space_flow(
                problem.apply_fn,
                problem.params,
                problem.x,
                problem.labels,
                loss="cross_entropy",
                learning_rate=rate,
                ts=TIMES,
            ).train
        ),
        (0.1, 0.2),
    ),
    "largest rate": (
        lambda line, problem, momentum: max_learning_rate(
            *line, loss="cross_entropy", momentum=momentum
        ),
        (0.1, 0.2),
    ),
    "filter": (
        lambda line, problem, rate: dynamics.linear_filter(INJECTED(rate)).impulse,
        (0.1, 0.2),
    ),
    "clusters": (
        lambda line, problem, key: dynamics.cluster_samples(normal(key, (5, 9)), 2, key=key),
        KEYS,
    ),
    "two factors": (
        lambda line, problem, rate: (
            dynamics.two_factor_flow(
                jnp.ones((4, 2)), jnp.eye(2), np.array([0, 0, 0, 1]), learning_rate=rate, ts=TIMES
            ).f
        ),
        (0.1, 0.2),
    ),
    "two factors, steps": (
        lambda line, problem, rate: (
            dynamics.two_factor_descent(
                jnp.ones((4, 2)), jnp.eye(2), np.array([0, 0, 0, 1]), learning_rate=rate, steps=3
            ).f
        ),
        (0.1, 0.2),
    ),
}


LONG = ("diffusion", "diffusion, fixed noise")  # forecasts with noise are counted in any case


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in CASES]
)
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
