"""ε, H⁺ε and the forecasts against dense pseudo-inverses and a closed form."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.gauss_newton import forecast_steps, output_change
from jaxttp.losses import Loss, cross_entropy, unexplained_variance

pytestmark = pytest.mark.usefixtures("strict_dtypes")

F = np.random.default_rng(0).normal(size=(5, 4))
LABELS = np.array([0, 3, 1, 1, 2])
Y = np.eye(4)[LABELS]
BITS = (F[::-1] > 0).astype(float)


def softmax(f):
    return np.exp(f) / np.exp(f).sum(-1, keepdims=True)


@pytest.mark.parametrize(("damping", "custom"), [(0.0, False), (0.1, True), (0.1, False)])
def test_softmax_hessian_is_pseudo_inverted(damping, custom):
    loss = cross_entropy
    if custom:  # the general route, by eigh
        loss = Loss("mine", lambda f, y: cross_entropy.sample_loss(f, y), unexplained_variance)
    ours = output_change(
        F, Y if custom else LABELS, loss=loss, curvature="hessian", damping=damping
    )
    for row, p, y in zip(ours, softmax(F), Y, strict=True):
        h = np.diag(p) - np.outer(p, p)
        # H + λ on the complement of the all-ones direction.
        q = np.eye(4) - 0.25
        expected = np.linalg.pinv(h + damping * q) @ (p - y)
        np.testing.assert_allclose(row, expected, atol=1e-12)  # 4 by 4, condition below 100


def test_other_losses():
    np.testing.assert_allclose(output_change(F, Y, loss="squared_error"), F - Y)
    exact = output_change(F, Y, loss="squared_error", curvature="hessian")
    np.testing.assert_allclose(exact, F - Y)
    p = 1 / (1 + np.exp(-F))
    bits = output_change(F, BITS, loss="binary_cross_entropy", curvature="hessian", damping=0.01)
    np.testing.assert_allclose(bits, (p - BITS) / (p * (1 - p) + 0.01), atol=1e-13)


def test_damping_bounds_the_step_of_a_hopeless_sample():
    f = np.array([[0.0, 200.0]])
    step = output_change(f, np.array([0]), loss="cross_entropy", curvature="hessian", damping=1e-3)
    assert np.abs(step).max() <= 1e3  # 1/λ
    assert np.isfinite(np.asarray(step)).all()


def test_steps_converge_to_the_flow():
    """Generalised steps on a softmax: p(t) = y + e^{-t} (p_0 - y)."""
    expected = Y + np.exp(-1.0) * (softmax(F) - Y)
    errors = []
    for steps in (20, 40):
        path = forecast_steps(
            F, LABELS, loss="cross_entropy", learning_rate=1 / steps, steps=steps,
            curvature="hessian", damping=0.0,
        )  # fmt: skip
        errors.append(np.abs(softmax(path.outputs[-1]) - expected).max())
    assert 1.7 < errors[0] / errors[1] < 2.3  # first order


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_saturated_outputs_stay_finite(dtype):
    """Probabilities that are 0 in this precision: a wrong class has nothing left to lose."""
    steps = forecast_steps(
        jnp.zeros((1, 3), dtype), np.array([1]), loss="cross_entropy", curvature="hessian",
        damping=0.0, learning_rate=0.9, steps=400,
    )  # fmt: skip
    assert bool(jnp.all(jnp.isfinite(steps.outputs)))
    assert float(steps.loss[-1]) == 0.0


def test_the_softmax_with_identity_has_a_slow_tail():
    path = forecast_steps(F, LABELS, loss="cross_entropy", learning_rate=1.0, steps=2000)
    # loss ~ 1/(c t): doubling the time halves it.
    assert 1.8 < float(path.loss[1000] / path.loss[2000]) < 2.2
    squared = forecast_steps(F, LABELS, loss="squared_error", learning_rate=0.5, steps=20)
    np.testing.assert_allclose(squared.loss, squared.loss[0] * 0.25 ** jnp.arange(21.0))


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        (output_change, {"curvature": "full"}, "curvature='full' is not known"),
        (output_change, {"damping": -1.0}, "damping must be"),
        (output_change, {"outputs": F[0]}, r"outputs must have 2 axes"),
        (output_change, {"outputs": F * np.nan}, "outputs holds 20"),
        (forecast_steps, {"learning_rate": 0.0, "steps": 1}, "learning_rate must be"),
        (forecast_steps, {"learning_rate": 1.0, "steps": 0}, "steps must be"),
    ],
)
def test_bad_input(function, change, message):
    arguments = {"outputs": F, "y": LABELS, "loss": "cross_entropy"} | change
    with pytest.raises(ValueError, match=message):
        function(**arguments)
