import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxttp.models import MLP
from jaxttp.models.layers import get_activation
from tests.draws import normal


def test_outputs_are_the_layers_written_out(key):
    model = MLP((3, 5, 4, 2), activation="tanh", rngs=nnx.Rngs(1), param_dtype=jnp.float64)
    x = np.asarray(normal(key, (7, 3)))
    h = x
    for layer in model.hidden:
        h = np.tanh(h @ np.asarray(layer.kernel) + np.asarray(layer.bias))
    expected = h @ np.asarray(model.head.kernel) + np.asarray(model.head.bias)
    # The same sums of at most five float64 terms, in another order.
    np.testing.assert_allclose(model(x), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu", "identity"])
def test_the_gain_keeps_the_second_moment(activation):
    z, weights = np.polynomial.hermite_e.hermegauss(100)
    function, gain = get_activation(activation)
    moment = weights @ np.asarray(function(jnp.asarray(z))) ** 2 / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(gain * moment, 1, rtol=1e-6)  # smooth but for the ReLU's kink at 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": (3,)}, "sizes=.*at least the number of inputs and of outputs"),
        ({"sizes": (3, 0, 2)}, "sizes must be an integer of at least 1; got 0"),
        ({"sizes": (3, 2), "activation": "sin"}, "activation='sin' is not known"),
        ({"sizes": (3, 2), "head_scale": -1.0}, "scale must be at least 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        MLP(**arguments, rngs=nnx.Rngs(0))
