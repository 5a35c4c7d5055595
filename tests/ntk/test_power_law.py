"""Power laws over windows of ranks."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.ntk import (
    fit_power_law,
)


def test_power_law_and_its_goodness():
    ranks = jnp.arange(1.0, 201.0)
    law = fit_power_law(2.0 * ranks**-1.3, window=(5, 150))
    np.testing.assert_allclose([law.exponent, law.coefficient], [1.3, 2.0], rtol=1e-10)  # rounding
    np.testing.assert_allclose(law.r_squared, 1.0, rtol=1e-10)
    assert law.window == (5, 150)
    # An exponential is no power law, and says so.
    assert float(fit_power_law(jnp.exp(-ranks / 10), window=(1, 200)).r_squared) < 0.9


@pytest.mark.parametrize("window", [(0, 5), (5, 5), (3, 300)])
def test_bad_windows(window):
    with pytest.raises(ValueError, match="window"):
        fit_power_law(jnp.ones(200), window=window)
