"""Every model shows what its layers give, and a layer is a model again."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxttp import empirical_ntk, from_nnx
from jaxttp.models import MLP, LayerOutput, ResNet, RevMLP
from tests.draws import normal

X = normal(0, (6, 6, 6, 1))
MODELS = {
    "mlp": (
        MLP((36, 8, 5, 3), rngs=nnx.Rngs(0), param_dtype=jnp.float64),
        {"hidden.0": (6, 8), "hidden.1": (6, 5), "head": (6, 3)},
    ),
    "resnet": (
        ResNet(
            3, stem_width=4, widths=(4, 8), strides=(1, 2), rngs=nnx.Rngs(0),
            param_dtype=jnp.float64,
        ),
        {
            "stem": (6, 6, 6, 4),
            "blocks.0": (6, 6, 6, 4),
            "blocks.1": (6, 3, 3, 8),
            "pool": (6, 8),
            "head": (6, 3),
        },
    ),
    "revmlp": (
        RevMLP(36, 3, blocks=2, bottleneck=10, activation="gelu", scale=0.3,
               rngs=nnx.Rngs(0), param_dtype=jnp.float64),
        {"blocks.0": (6, 36), "blocks.1": (6, 36), "head": (6, 3)},
    ),
    "revmlp without bottleneck and readout": (
        RevMLP(36, blocks=2, bottleneck=None, readout=None, use_bias=True, rngs=nnx.Rngs(0)),
        {"blocks.0": (6, 36), "blocks.1": (6, 36), "head": (6, 36)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_activations_are_named_in_order_and_end_with_the_outputs(name):
    model, shapes = MODELS[name]
    layers = model.activations(X)
    assert {key: value.shape for key, value in layers.items()} == shapes
    assert list(layers) == list(shapes)
    np.testing.assert_allclose(layers["head"], model(X), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_a_model(name):
    model, shapes = MODELS[name]
    layer = next(iter(shapes))
    apply_fn, params = from_nnx(LayerOutput(model, layer))
    expected = model.activations(X)[layer].reshape(6, -1)
    np.testing.assert_allclose(apply_fn(params, X), expected, rtol=0, atol=1e-13)
    if name == "mlp":
        theta = empirical_ntk(apply_fn, params, X, output="trace")
        assert theta.shape == (6, 6)


def test_unknown_layers_and_modules_are_refused():
    model, _ = MODELS["mlp"]
    with pytest.raises(ValueError, match=r"layer='stem' .* 'hidden.0'"):
        LayerOutput(model, "stem")(X)
    with pytest.raises(TypeError, match="activations"):
        LayerOutput(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "head")
