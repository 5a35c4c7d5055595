import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.models.activations import ACTIVATIONS, get_activation, kernel_init


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gain_is_the_inverse_second_moment_under_a_standard_normal(name):
    nodes, weights = np.polynomial.hermite_e.hermegauss(150)
    function, gain = get_activation(name)
    second_moment = np.sum(weights * np.asarray(function(jnp.asarray(nodes))) ** 2) / weights.sum()
    # Gains are given to nine decimals; the quadrature is exact to more than that.
    assert gain * second_moment == pytest.approx(1, abs=1e-8)


def test_unknown_activation_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"activation='swish' is not known.*'relu'.*'identity'"):
        get_activation("swish")


@pytest.mark.parametrize(("shape", "fan_in"), [((400, 300), 400), ((3, 3, 40, 50), 360)])
def test_kernels_have_variance_gain_over_fan_in(key, shape, fan_in):
    kernel = kernel_init(2.5)(key, shape, jnp.float64)
    # A sample variance of n normals is off by sqrt(2/n), here below 1.1 %; allow four times that.
    assert float(jnp.var(kernel)) * fan_in == pytest.approx(2.5, rel=4 * (2 / kernel.size) ** 0.5)
    # Not truncated: the largest of 18000 normals or more lies beyond three standard deviations.
    assert float(jnp.max(jnp.abs(kernel))) > 3 * (2.5 / fan_in) ** 0.5


def test_gain_zero_gives_zeros():
    assert not jnp.any(kernel_init(0.0)(jax.random.key(0), (3, 4), jnp.float64))
