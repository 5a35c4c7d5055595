import numpy as np
import optax
import pytest

from jaxttp.dynamics import effective_learning_rate, recursion


def test_long_run_of_the_recursion_is_that_of_the_effective_rate(problem):
    """The accumulator's warm-up is a delay of m/(1 - m) steps; after it, small steps move alike."""
    m, eta, steps = 0.8, 2e-4, 600
    common = {"loss": "squared_error"}
    args = (problem.kernel, problem.f0, problem.labels)
    heavy = recursion(*args, optimizer=optax.sgd(eta, m), steps=steps, **common).train
    rate = effective_learning_rate(eta, m)
    plain = recursion(*args, optimizer=optax.sgd(rate), steps=steps, **common).train
    delay = round(m / (1 - m))
    moved = np.abs(np.asarray(heavy[-1]) - problem.f0).max()
    late = np.abs(np.asarray(heavy[-1]) - np.asarray(plain[steps - delay])).max()
    assert late < 5e-3 * moved  # measured 2.6e-3, of the order of one step


@pytest.mark.parametrize(
    ("rate", "momentum", "name"), [(0.1, 1.0, "momentum"), (-0.1, 0.9, "learning_rate")]
)
def test_numbers_out_of_range(rate, momentum, name):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        effective_learning_rate(rate, momentum)
