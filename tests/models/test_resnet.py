import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxttp.models import ResidualBlock, ResNet, digits_resnet
from tests.draws import normal


def count(module):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))


def small(seed=0, **options):
    """A network whose kernels have three shapes only: each takes its time to compile."""
    options = {"in_channels": 4, "stem_width": 4, "widths": (4,), "strides": (1,)} | options
    return ResNet(3, **options, rngs=nnx.Rngs(seed))


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
    assert count(model.stem) == 9 * 16 + 16
    assert [count(block) for block in model.blocks] == [
        2 * (9 * 16 * 16 + 16),
        9 * 16 * 32 + 32 + 9 * 32 * 32 + 32 + 16 * 32 + 32,
        9 * 32 * 64 + 64 + 9 * 64 * 64 + 64 + 32 * 64 + 64,
    ]
    assert count(model.head) == 64 * 5 + 5
    assert [block.shortcut is None for block in model.blocks] == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 2])
def test_a_block_is_its_formula(key, stride):
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
    ("options", "shape"),
    [
        ({}, (3, 8, 8, 1)),
        ({}, (3, 7, 5, 1)),
        ({"in_channels": 3, "widths": (8,), "strides": (2,), "blocks": 3}, (3, 9, 9, 3)),
        ({"widths": (8, 12), "strides": (1, 2), "blocks": (1, 2)}, (3, 4, 4, 1)),
        ({"activation": "softplus"}, (3, 8, 8, 1)),
    ],
)
def test_shapes(options, shape):
    def evaluate():
        model = ResNet(6, **options, rngs=nnx.Rngs(0))
        x = jnp.ones(shape, jnp.float32)
        return model(x), model.features(x)

    outputs, features = jax.eval_shape(evaluate)
    assert outputs.shape == (3, 6)
    assert outputs.dtype == features.dtype == jnp.float32
    assert features.shape == (3, options.get("widths", (64,))[-1])


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [2, 10])
def test_the_signal_stays_in_bounds_whatever_the_depth(key, blocks):
    @jax.jit
    def second_moments(x):
        model = ResNet(
            10, in_channels=8, stem_width=32, widths=(32, 48), strides=(1, 2), blocks=blocks,
            rngs=nnx.Rngs(0),
        )  # fmt: skip
        features = [jax.nn.relu(model.stem(x))]
        for block in model.blocks:
            features.append(block(features[-1]))
        return jnp.stack([jnp.mean(h**2) for h in features])

    sizes = second_moments(normal(key, (8, 12, 12, 8), dtype=jnp.float32))
    # The bound of the module's docstring, and the padding (zeros around the image) takes some away.
    assert np.all((0.2 < sizes / sizes[0]) & (sizes / sizes[0] < np.e**2))


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
        ({"branch_scale": -0.5}, "branch_scale must be at least 0"),
        ({"activation": "elu"}, "activation='elu' is not known"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        ResNet(5, **options, rngs=nnx.Rngs(0))


def test_a_wrong_number_of_channels():
    with pytest.raises(ValueError, match=r"not a batch of images \(N, H, W, 4\)"):
        small()(jnp.zeros((2, 8, 8, 3), jnp.float32))
