import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxttp.models import MLP
from jaxttp.models.activations import get_activation
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


@pytest.mark.parametrize("shape", [(6, 64), (6, 8, 8), (6, 8, 8, 1)])
def test_inputs_of_any_shape_are_flattened(key, shape):
    model = MLP((64, 10, 3), rngs=nnx.Rngs(0))
    x = normal(key, shape, dtype=jnp.float32)
    outputs = model(x)
    assert outputs.shape == (6, 3)
    assert outputs.dtype == jnp.float32
    np.testing.assert_array_equal(outputs, model(x.reshape(6, 64)))


def test_without_hidden_layers_it_is_linear(key):
    model = MLP((4, 2), rngs=nnx.Rngs(0), use_bias=False, param_dtype=jnp.float64)
    x = normal(key, (5, 4))
    np.testing.assert_allclose(model(x), x @ model.head.kernel[...], rtol=0, atol=1e-15)
    assert len(jax.tree.leaves(nnx.state(model))) == 1


def test_a_sample_does_not_depend_on_its_batch(key):
    model = MLP((4, 16, 3), activation="gelu", rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    x = normal(key, (5, 4))
    single = jnp.concatenate([model(row[None]) for row in x])
    # BLAS may sum in another order for other batch sizes.
    np.testing.assert_allclose(single, model(x), rtol=0, atol=1e-14)


def test_parameters_are_named_counted_and_typed():
    model = MLP((4, 16, 8, 3), rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert set(params) == {"hidden", "head"}
    assert set(params["hidden"]) == {0, 1}
    leaves = jax.tree.leaves(params)
    assert sum(leaf.size for leaf in leaves) == 5 * 16 + 17 * 8 + 9 * 3
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}


def test_the_same_seed_gives_the_same_weights_and_another_one_others():
    first, second, third = (
        jax.tree.leaves(nnx.state(MLP((4, 6, 3), rngs=nnx.Rngs(seed)))) for seed in (0, 0, 1)
    )
    assert all(bool(jnp.all(a == b)) for a, b in zip(first, second, strict=True))
    assert any(bool(jnp.any(a != b)) for a, b in zip(first, third, strict=True))


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu", "softplus", "identity"])
def test_depth_keeps_the_size_of_the_signal(key, activation):
    model = MLP((50,) + (300,) * 10 + (50,), activation=activation, rngs=nnx.Rngs(0))
    x = normal(key, (50, 50), dtype=jnp.float32)
    # Features have second moment 1/gain at infinite width, and a head of scale 1 keeps it; widths
    # of 300 and ten layers leave a few 10 % of fluctuation.
    assert 0.5 < float(jnp.mean(model(x) ** 2)) * get_activation(activation).gain < 2


def test_head_scale_is_the_standard_deviation_of_the_outputs(key):
    x = normal(key, (20, 30), dtype=jnp.float32)
    small, large = (
        MLP((30, 40, 10), head_scale=scale, rngs=nnx.Rngs(0))(x) for scale in (0.5, 1.0)
    )
    # Halving is exact in floating point: the same draws, times a power of two.
    np.testing.assert_array_equal(2 * small, large)
    assert not np.any(MLP((30, 40, 10), head_scale=0.0, rngs=nnx.Rngs(0))(x))


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


@pytest.mark.parametrize("sizes", [(4, 2), (4, 6, 2)])
def test_a_wrong_number_of_features(sizes):
    with pytest.raises(ValueError, match="flattens to 9 features a sample; this MLP takes 4"):
        MLP(sizes, rngs=nnx.Rngs(0))(jnp.zeros((5, 3, 3)))
