"""Factors J S of two kernels: the network is linearized at every point between both."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics.optimizers import same_program
from jaxttp.dynamics.recursion import Linearization, Motion, follow
from jaxttp.losses import encode_targets
from jaxttp.ntk.kernels import Factored

N, C, WIDTH, STEPS = 10, 3, 8, 24


@pytest.mark.parametrize("batch", [None, 4])
def test_factors_follow_the_mean_of_two_jacobians(batch):
    rng = np.random.default_rng(0)
    near, far = (rng.standard_normal((N * C, WIDTH)) for _ in range(2))
    f, tau = rng.standard_normal((N, C)), np.linspace(0, 1, STEPS + 1) ** 0.7
    targets, loss = encode_targets("cross_entropy", jnp.arange(N) % C, jnp.asarray(f))
    indices = None if batch is None else rng.integers(0, N, (STEPS, batch))
    factors = [Factored(j, j, C) for j in map(jnp.asarray, (near, far))]
    ends = [Linearization(kernel, jnp.zeros((1, N, C))) for kernel in factors]
    motion = Motion(ends, jnp.asarray(f), jnp.asarray(tau))
    optimizer = optax.sgd(0.1, momentum=0.8)
    start = motion.unit(0)
    run = follow(
        same_program(optimizer, start), loss, motion, (start, optimizer.init(start)), targets,
        None if indices is None else jnp.asarray(indices), 0, STEPS,
        records=jnp.zeros((STEPS + 1, N, C)),
    )  # fmt: skip
    velocity, want = np.zeros(WIDTH), [f]
    for t in range(STEPS):
        jacobian = (1 - tau[t]) * near + tau[t] * far
        gradient = np.zeros((N, C))
        rows = np.arange(N) if indices is None else indices[t]
        residual = np.asarray(jax.nn.softmax(want[-1]) - targets)
        np.add.at(gradient, rows, residual[rows] / len(rows))
        velocity = 0.8 * velocity + jacobian.T @ gradient.reshape(-1)
        want.append(want[-1] - 0.1 * (jacobian @ velocity).reshape(N, C))
    np.testing.assert_allclose(run.records, want, atol=1e-10)
