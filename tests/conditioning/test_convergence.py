import jax
import numpy as np
import pytest

from jaxttp import conditioning


@pytest.mark.parametrize("kappa", [1.0, 1.5, 20.0, 1e4])
def test_gradient_descent_needs_so_many_steps(kappa):
    """On a quadratic, from the worst start, at the best rate."""
    values = np.array([1.0, 1 / kappa])
    rate, accuracy = 2 / values.sum(), 1e-3
    error, steps = np.ones(2), 0
    while np.linalg.norm(error) > accuracy * np.sqrt(2) * (1 + 1e-12):
        error, steps = error * (1 - rate * values), steps + 1
    assert float(conditioning.steps_to_accuracy(kappa, accuracy)) == max(steps, 1)
    shrink = float(conditioning.contraction_rate(kappa))
    assert shrink == pytest.approx(np.abs(1 - rate * values).max(), abs=1e-15)


def test_limits_and_transformations():
    kappas = np.array([1.0, 3.0, np.inf])
    np.testing.assert_allclose(conditioning.contraction_rate(kappas), [0.0, 0.5, 1.0])
    steps = jax.jit(lambda k: conditioning.steps_to_accuracy(k, 0.01))(kappas)
    assert steps.tolist() == [1.0, 7.0, np.inf]
    # log((k - 1) / (k + 1)) = -2 / k to first order
    big = float(conditioning.steps_to_accuracy(1e14, 0.5))
    assert big == pytest.approx(0.5e14 * np.log(2), rel=1e-6)


@pytest.mark.parametrize("kappa", [np.nan, 0.5, 2j, np.array([2.0, np.nan])])
def test_what_is_no_condition_number(kappa):
    with pytest.raises(ValueError, match=r"^condition must"):
        conditioning.contraction_rate(kappa)
    assert float(conditioning.contraction_rate(np.inf)) == 1.0
    assert jax.jit(lambda k: conditioning.steps_to_accuracy(3.0, 0.01) + k)(0.0) == 7.0
