"""RevMLP: shapes, initialisation, padding, and training by Gauss-Newton through NNX."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxttp import train
from jaxttp.adapters import from_nnx
from jaxttp.gauss_newton import gauss_newton
from jaxttp.models import RevMLP
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def make(inputs=5, outputs=3, **options):
    defaults = {"blocks": 2, "bottleneck": 16, "param_dtype": jnp.float64, "scale": "xavier"}
    return RevMLP(inputs, outputs, rngs=nnx.Rngs(0), **(defaults | options))


def inputs(samples=4, features=5):
    return normal(1, (samples, features))


@pytest.mark.parametrize("readout", ["selection", "orthonormal"])
def test_odd_inputs_are_padded_by_one_zero_and_read_out(readout):
    model = make(readout=readout)
    assert model.width == 6
    np.testing.assert_array_equal(model.embed(inputs())[:, 5], 0)
    p = model.fixed_readout
    np.testing.assert_allclose(p @ p.T, np.eye(3), atol=1e-6)  # drawn in float64, or exact
    assert model(inputs()).shape == (4, 3)
    assert model(np.ones((4, 5, 1))).dtype == jnp.float64


@pytest.mark.parametrize(
    ("scale", "std"), [("xavier", (2 / 600) ** 0.5), ("he", (2 / 400) ** 0.5), (1e-3, 1e-3)]
)
def test_initialisation(scale, std):
    model = make(400, 3, bottleneck=400, scale=scale, use_bias=True)
    weights = np.asarray(model.weights[...])
    assert weights.shape == (2, 2, 200, 401)
    # 320,000 draws: a standard deviation is known to 0.13 %.
    assert abs(weights[..., :-1].std() / std - 1) < 0.01
    assert not weights[..., -1].any()
    assert abs(np.asarray(model.fixed_bottlenecks).std() * 20 - 1) < 0.01  # N(0, 1/m), as above


def test_train_takes_exact_steps_on_its_own_inputs():
    """Of an odd number of features, which the network pads; what it is made of comes with it."""
    model, x = make(readout="orthonormal", scale=1e-3), inputs()
    y = jnp.ones((4, 3))
    optimizer = gauss_newton(0.5, pseudoinverse="exact", **model.parts)
    run = train(*from_nnx(model), x, y, loss="squared_error", optimizer=optimizer, steps=3,
                record=lambda state: state[0].residual)  # fmt: skip
    # Each would quarter the error if the network were linear: 1/64 in all; 0.024 seen.
    assert run.loss[-1] < 0.05 * run.loss[0]
    assert max(run.recorded) < 1e-6  # Gram of ReLU features of 3 inputs, in float64; exact


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": 0}, "inputs must be"),
        ({"width": 7}, "width must be even"),
        ({"width": 4}, "at least inputs=5"),
        ({"outputs": 7}, "outputs must be an integer between 1 and 6"),
        ({"outputs": None}, "give outputs with a readout"),
        ({"readout": None}, "none without"),
        ({"readout": "dense"}, "readout='dense' is not known"),
        ({"scale": "lecun"}, "scale='lecun' is not known"),
        ({"scale": -1.0}, "scale must be"),
        ({"blocks": 0}, "blocks must be"),
        ({"bottleneck": 0}, "bottleneck must be"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        make(**change)
