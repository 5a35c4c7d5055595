import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxttp.models import ResidualBlock, ResNet, digits_resnet
from tests.draws import normal


def count(module):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))


def brute_force_conv(x, kernel, bias, stride):
    """The convolution as its definition reads, one output pixel at a time."""
    size = kernel.shape[0]
    x = np.pad(x, ((0, 0), (size // 2, size // 2), (size // 2, size // 2), (0, 0)))
    height, width = ((n - size) // stride + 1 for n in x.shape[1:3])
    out = np.empty((len(x), height, width, kernel.shape[-1]))
    for i in range(height):
        for j in range(width):
            patch = x[:, stride * i : stride * i + size, stride * j : stride * j + size]
            out[:, i, j] = np.einsum("nabc,abcd->nd", patch, kernel) + bias
    return out


def test_the_digits_network_has_77093_parameters():
    model = nnx.eval_shape(lambda: digits_resnet(5, rngs=nnx.Rngs(0)))
    assert count(model) == 77_093
    assert [block.shortcut is None for block in model.blocks] == [True, False, False]


def test_a_block_is_its_formula(key):
    stride = 2
    block = ResidualBlock(
        3, 4, stride=stride, branch_scale=0.7, rngs=nnx.Rngs(0), param_dtype=jnp.float64
    )
    # Biases start at 0, where they would hide a mistake.
    params = nnx.state(block)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    drawn = [normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)]
    nnx.update(block, jax.tree.unflatten(tree, drawn))
    x = np.asarray(normal(key, (2, 5, 6, 3)))

    def conv(layer, x, stride):
        return brute_force_conv(x, np.asarray(layer.kernel), np.asarray(layer.bias), stride)

    branch = conv(block.conv2, np.maximum(conv(block.conv1, x, stride), 0), 1)
    expected = np.maximum(conv(block.shortcut, x, stride) + 0.7 * branch, 0)
    # Sums of a few dozen terms of size ten, in float64.
    np.testing.assert_allclose(block(jnp.asarray(x)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": (8, 16)}, "widths, strides and blocks describe the same stages"),
        ({"blocks": (1, 1)}, "widths, strides and blocks describe the same stages"),
        ({"widths": (), "strides": ()}, "widths, strides and blocks describe the same stages"),
        ({"strides": (1, 0, 2)}, "strides must be an integer of at least 1; got 0"),
        ({"blocks": 0}, "blocks must be an integer of at least 1; got 0"),
        ({"in_channels": 0}, "in_channels must be an integer of at least 1"),
        ({"stem_width": 0}, "stem_width must be an integer of at least 1"),
        ({"activation": "elu"}, "activation='elu' is not known"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        ResNet(5, **options, rngs=nnx.Rngs(0))
