"""The optax transformation: the direction, its chains, and training on digits."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import predict_training_time, train
from jaxttp.gauss_newton import (
    gauss_newton,
    gauss_newton_direction,
    orthonormal_readout,
    output_change,
    revmlp_forward,
)
from tests.compiled import compilations
from tests.gauss_newton.networks import network


def test_a_step_is_exact_by_default_and_says_where_it_is_not():
    # ReLU features of 3 inputs: a spectrum that falls by far more than 100 from first to last.
    w, v, x = network(blocks=2, width=48, samples=24, dtype=jnp.float32)
    y, p = x[:, :1] ** 2, np.eye(1, 6, dtype=np.float32)
    found = {}
    for rtol, options in ((1e-6, {}), (0.01, {"rtol": 0.01})):
        optimizer = gauss_newton(1.0, readout=p, **options)
        first = optimizer.init(w)
        assert float(first[0].residual) == 1
        _, (found[rtol], _) = optimizer.update(w, first, w, x=x, y=y, bottlenecks=v)
    assert found[1e-6].ranks.tolist() == [[24, 24], [24, 24]]
    assert float(found[1e-6].residual) < 1e-3  # 3e-5 seen: float32, features that spread over 1e3
    assert int(found[0.01].ranks.max()) < 24
    assert float(found[0.01].residual) > 0.1


def test_functions_that_know_gradients_only_name_what_takes_exact_steps():
    w, v, x = network()
    network_of = lambda p, x: revmlp_forward(p, v, x)  # noqa: E731
    dense = lambda p, x: x @ p  # noqa: E731
    for apply_fn, params in ((network_of, w), (dense, jnp.eye(6))):
        with pytest.raises(ValueError, match=r"jaxttp.train, .*forecast_steps.*gauss_newton_task"):
            predict_training_time(apply_fn, params, x, 0 * x, relinearize=0, loss="squared_error",
                                  optimizer=gauss_newton(1.0), steps=2)  # fmt: skip
    with pytest.raises(ValueError, match=r"the weights .* of one RevMLP"):
        train(dense, jnp.eye(6), x, 0 * x, loss="squared_error", optimizer=gauss_newton(1.0),
              steps=2)  # fmt: skip


def test_bad_updates():
    w, v, x = network()
    optimizer = gauss_newton(1.0, pseudoinverse="exact")
    with pytest.raises(ValueError, match="one RevMLP"):
        optimizer.init({"a": w, "b": w})
    state = optimizer.init(w)
    for data in ({}, {"x": x}, {"y": x}):
        with pytest.raises(ValueError, match="needs the weights and the batch"):
            optimizer.update(w, state, w, bottlenecks=v, **data)
    with pytest.raises(ValueError, match="needs the weights and the batch"):
        optimizer.update(w, state, x=x, y=x, bottlenecks=v)
    with pytest.raises(ValueError, match="N = 21"):
        optimizer.update(w, state, w, x=np.ones((21, 6)), y=np.ones((21, 6)), bottlenecks=v)


SMALL = {"blocks": 1, "half": 3, "width": 30, "samples": 5}
LABELS = np.arange(5) % 3


def small_problem():
    w, v, x = network(**SMALL)
    p = orthonormal_readout(jax.random.key(1), 3, 6)
    return w, v, x, p, lambda w, x: revmlp_forward(w, v, x, activation="tanh") @ p.T


def last_step(state):
    """What `gauss_newton` reports, of its chain within `inject_hyperparams`."""
    return state.inner_state[0]


def test_training_is_the_loop_that_was_written_out():
    """Step for step; and another rate and tolerance, in the state, compile nothing."""
    w, v, x, p, apply_fn = small_problem()
    optimizer = optax.inject_hyperparams(gauss_newton, static_args=("readout", "bottlenecks"))(
        0.5,
        readout=p,
        bottlenecks=v,
        activation="tanh",
        curvature="hessian",
        damping=0.1,
        rtol=1e-6,
    )

    def trained(rate, rtol):
        state = optimizer.init(w)
        state.hyperparams["learning_rate"] = jnp.asarray(rate)
        state.hyperparams["rtol"] = jnp.asarray(rtol)
        return train(apply_fn, w, x, LABELS, loss="cross_entropy", optimizer=optimizer, steps=3,
                     state=state, record=last_step)  # fmt: skip

    def looped(rate, rtol):
        weights, outputs, infos = w, [apply_fn(w, x)], []
        for _ in range(3):
            change = output_change(
                outputs[-1], LABELS, loss="cross_entropy", curvature="hessian", damping=0.1
            )
            direction, info = gauss_newton_direction(
                weights, v, x, change, readout=p, activation="tanh", rtol=rtol,
                return_info=True,
            )  # fmt: skip
            weights = weights - rate * direction
            outputs.append(apply_fn(weights, x))
            infos.append(info)
        return weights, jnp.stack(outputs), infos

    runs = [trained(0.5, 1e-6)]
    with compilations() as compiled:
        runs.append(trained(0.25, 0.3))
    assert not compiled
    for run, setting in zip(runs, ((0.5, 1e-6), (0.25, 0.3)), strict=True):
        weights, outputs, infos = looped(*setting)
        # The same sums in one program; solves of condition 100 repeat rounding to 1e-14 a step.
        np.testing.assert_allclose(run.outputs, outputs, rtol=0, atol=1e-12)
        np.testing.assert_allclose(run.params, weights, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(run.recorded.ranks, [info.ranks for info in infos])
        residuals = [info.residual for info in infos]
        np.testing.assert_allclose(run.recorded.residual, residuals, atol=1e-12)
        assert int(last_step(run.state).steps) == 3
    assert run.recorded.ranks.max() < 5  # rtol = 0.3 is felt


def test_training_with_the_wrong_network_or_loss_is_refused():
    w, v, x, p, apply_fn = small_problem()

    def run(trained="squared_error", x=x, **options):
        optimizer = gauss_newton(
            0.5, **({"readout": p, "bottlenecks": v, "activation": "tanh"} | options)
        )
        return train(apply_fn, w, x, LABELS, loss=trained, optimizer=optimizer, steps=1)

    with pytest.raises(ValueError, match=r"loss='cross_entropy' is trained, but gauss_newton was"):
        run("cross_entropy", loss="squared_error")
    with pytest.raises(ValueError, match="bottlenecks must be"):
        run(bottlenecks=None)
    with pytest.raises(ValueError, match=r"the trained outputs have shape \(5, 3\)"):
        run(readout=p[:2])
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"^the trained outputs are not"):
        run(activation="gelu")
    repeated = x.at[1].set(x[0])
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"^pseudoinverse='exact': a half-") as said:
        run(x=repeated, pseudoinverse="exact")
    assert "Traceback" not in str(said.value)  # XLA's own words hold the whole stack


def test_noise_draws_anew_in_every_step(key):
    """By a key derived from the optimizer's own and the step."""
    w, v, x = network(**SMALL)
    data = {"x": x, "y": 0 * x, "bottlenecks": v}
    keyless = gauss_newton(1.0, activation="tanh", pseudoinverse="noise")
    with pytest.raises(ValueError, match="needs key"):
        keyless.update(w, keyless.init(w), w, **data)
    optimizer = gauss_newton(1.0, activation="tanh", pseudoinverse="noise", key=key)
    first, state = optimizer.update(w, optimizer.init(w), w, **data)
    expected = gauss_newton_direction(
        w, v, x, revmlp_forward(w, v, x, activation="tanh"), activation="tanh",
        pseudoinverse="noise", key=jax.random.fold_in(key, 0),
    )  # fmt: skip
    np.testing.assert_allclose(first, -expected, atol=1e-12)  # the same sums
    second, _ = optimizer.update(w, state, w, **data)
    assert np.abs(first - second).max() > 0.01 * np.abs(first).max()
