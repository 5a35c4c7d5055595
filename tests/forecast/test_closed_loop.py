"""Forecasts corrected by the first real steps.

A network that is linear in its weights obeys its forecast exactly, so that every correction must
leave it as it is (float64: 1e-9 after 40 steps); one whose kernel is wrong by a factor, or that
bends, must be forecast better than before.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxttp
from jaxttp.dynamics import recursion
from jaxttp.forecast import Hyperparameters, Online, online, training_time
from tests import oracles
from tests.draws import normal, split

KEYS = split(5, 4)
X = normal(KEYS[0], (14, 5))
Y = np.argmax(np.asarray(X) @ np.asarray(normal(KEYS[1], (5, 3))), axis=1)
PARAMS = {
    "in": normal(KEYS[2], (5, 10), 1 / 2),
    "out": normal(KEYS[3], (10, 3), 1 / 3),
}
SETTING = Hyperparameters(0.3, momentum=0.7, schedule="cosine", steps=40)


def bent(w, x):
    return jnp.tanh(x @ w["in"]) @ w["out"]


def linear(w, x):
    tangent = jax.tree.map(jnp.subtract, w, PARAMS)
    return sum(jax.jvp(lambda v: bent(v, x), (PARAMS,), (tangent,)))


KERNEL = oracles.kernel(bent, PARAMS, X)
F0 = np.asarray(bent(PARAMS, X))


def watched(network, setting, k, **options):
    """A real training, and what watched its first k steps."""
    watch = Online(network, PARAMS, X, Y, setting, **options)
    jaxttp.train(
        network, PARAMS, X, Y, loss=setting.loss, optimizer=setting.optimizer(), steps=k,
        callback=watch,
    )  # fmt: skip
    whole = jaxttp.train(
        network, PARAMS, X, Y, loss=setting.loss, optimizer=setting.optimizer(),
        steps=setting.steps,
    )  # fmt: skip
    return watch, whole


@pytest.fixture(scope="module")
def linear_run():
    return watched(linear, SETTING, 12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["losses", "outputs", "weights"])
def test_a_linear_network_needs_no_correction(linear_run, kind):
    watch, whole = linear_run
    found = watch.forecast(kind)
    np.testing.assert_allclose(found.loss, whole.loss, atol=1e-9)
    np.testing.assert_allclose(found.open_loop, whole.loss, atol=1e-9)
    assert found.steps == {e: int(training_time(whole.loss, e)) for e in found.steps}
    assert (found.at, found.left_at, found.stable, found.kind) == (12, -1, True, kind)
    assert found.time_scale == pytest.approx(1.0, abs=1e-6)
    assert found.departure.shape == (13,)
    assert "linear regime so far" in str(found)


def path_of(kernel, setting):
    return recursion(
        kernel, F0, Y, loss=setting.loss, optimizer=setting.optimizer(), steps=setting.steps
    ).train


@pytest.mark.slow
def test_outputs_repair_a_kernel_that_is_wrong():
    setting = Hyperparameters(0.3, steps=60)
    real = path_of(1.5 * KERNEL, setting)
    losses = np.array([oracle_loss(f) for f in real])
    found = online(KERNEL, F0, Y, setting, outputs=real[:10])
    assert found.time_scale == pytest.approx(1.5, rel=0.02)  # averaged over windows of two steps
    assert found.left_at > 0
    assert "linear regime left at step" in found.message
    before, after = (np.abs(c - losses).max() for c in (found.open_loop, found.loss))
    assert after < 0.1 * before


def test_losses_find_the_growth_of_the_kernel():
    """A kernel that grows by 1 + l_t, l_t the share of the predicted path, as the model has it."""
    setting, targets = Hyperparameters(0.3, steps=40), np.eye(3)[Y]
    open_loop = np.asarray(path_of(KERNEL, setting)).reshape(41, -1)
    whole = np.sum(np.linalg.norm(np.diff(open_loop, axis=0), axis=1))
    f, come, losses = F0, 0.0, [oracle_loss(F0)]
    for _ in range(40):
        force = np.einsum("iajb,jb->ia", KERNEL, oracles.softmax(f) - targets) / len(Y)
        moved = -0.3 * (1 + come / whole) * force
        f, come = f + moved, come + np.linalg.norm(moved)
        losses.append(oracle_loss(f))
    found = online(KERNEL, F0, Y, setting, losses=losses[:13])
    # The ridge draws gamma from 1 towards 0, less the more losses there are.
    before, after = (np.abs(c - np.array(losses)).max() for c in (found.open_loop, found.loss))
    assert after < 0.5 * before
    assert found.time_scale > 1.1


def oracle_loss(f):
    return float(np.mean(-np.log(oracles.softmax(np.asarray(f))[np.arange(len(Y)), Y])))


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_weights_halve_the_error_of_a_network_that_bends(momentum):
    setting = Hyperparameters(0.6 * (1 - momentum), momentum=momentum, steps=80)
    watch, whole = watched(bent, setting, 8)
    real = np.asarray(whole.loss)
    found = watch.forecast("weights", rebuilds=2)
    before, after = (np.abs(c - real).mean() for c in (found.open_loop, found.loss))
    assert after < 0.2 * before
    np.testing.assert_allclose(found.loss[:9], real[:9], atol=1e-12)
    assert found.kernels == 3
    assert np.abs(watch.forecast("outputs").loss - real).mean() < before


@pytest.mark.slow
def test_only_what_trains_is_linearised():
    setting = Hyperparameters(0.5, momentum=0.5, steps=20)
    chosen = {"in": False, "out": True}
    watch = Online(bent, PARAMS, X, Y, setting, trainable=chosen)
    part = lambda w, x: bent(PARAMS | w, x)  # noqa: E731
    head = {"out": PARAMS["out"]}
    run = jaxttp.train(
        part, head, X, Y, loss=setting.loss, optimizer=setting.optimizer(), steps=20,
        callback=lambda t, w, loss: watch(t, PARAMS | w, loss) if t <= 5 else None,
    )  # fmt: skip
    for kind in ("outputs", "weights"):  # the head alone is linear
        np.testing.assert_allclose(watch.forecast(kind).loss, run.loss, atol=1e-9)


def test_divergence_is_no_exception():
    setting = Hyperparameters(1e4, loss="squared_error", steps=20)
    found = online(KERNEL, F0, Y, setting, losses=[1.1, 40.0])
    assert not found.stable
    assert set(found.steps.values()) == {-1}
    assert "diverges" in str(found)


def test_bad_input():
    good = {"losses": [1.0, 0.9]}
    cases = [
        ({}, "exactly one of losses and outputs; got neither"),
        ({"losses": [1.0, 0.9], "outputs": np.zeros((2, 14, 3))}, "got both"),
        ({"losses": [1.0]}, r"len\(losses\) must be an integer between 2 and 41"),
        ({"losses": np.ones(42)}, r"len\(losses\)"),
        ({"losses": [1.0, np.nan]}, "losses holds 1 value"),
        ({"losses": np.ones((2, 2))}, "vector"),
        ({"outputs": np.zeros((2, 13, 3))}, r"outputs must be \(k \+ 1, 14, 3\)"),
        ({**good, "rule": "soon"}, "rule='soon' is not known"),
        ({**good, "thresholds": (2.0,)}, "thresholds must be"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            online(KERNEL, F0, Y, SETTING, **options)
    watch = Online(bent, PARAMS, X, Y, SETTING)
    with pytest.raises(ValueError, match="no step was seen yet"):
        watch.forecast()
    with pytest.raises(ValueError, match="step must be 0"):
        watch(1, PARAMS, 1.0)
    watch(0, PARAMS, 1.0)
    with pytest.raises(ValueError, match=r"len\(losses\)"):
        watch.forecast("losses")
    with pytest.raises(ValueError, match="kind='gradients' is not known"):
        watch.forecast("gradients")


@pytest.mark.slow
def test_steps_of_no_rate_leave_no_nan():
    """Weights stay, but momentum gathers; for a linear network the rest is known exactly."""
    schedule = lambda t: jnp.where((t < 2) | (t == 6), 0.0, 1.0)  # noqa: E731
    setting = Hyperparameters(0.3, momentum=0.7, schedule=schedule, steps=12)
    watch = Online(linear, PARAMS, X, Y, setting)
    run = jaxttp.train(
        linear, PARAMS, X, Y, loss=setting.loss, optimizer=setting.optimizer(), steps=12,
    )  # fmt: skip
    jaxttp.train(
        linear, PARAMS, X, Y, loss=setting.loss, optimizer=setting.optimizer(), steps=7,
        callback=watch,
    )  # fmt: skip
    for kind in ("outputs", "weights"):
        found = watch.forecast(kind)
        np.testing.assert_allclose(found.loss, run.loss, atol=1e-9)  # float64, 12 steps
        assert np.isfinite(found.time_scale)


def test_accumulators_must_match_the_optimizer():
    with pytest.raises(ValueError, match="accumulators must hold one pytree for each"):
        jaxttp.dynamics.relinearized_recursion(
            bent, PARAMS, X, Y, loss="cross_entropy", steps=5, rebuilds=1,
            optimizer=dataclasses.replace(SETTING, schedule="constant").optimizer(),
            kernel_fn=lambda w: KERNEL, accumulators=(PARAMS, PARAMS),
        )  # fmt: skip
