"""Other outputs, fewer parameters, low-rank adapters: kernels against brute force."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxttp import empirical_ntk, from_equinox, from_nnx
from jaxttp._core.types import leaf_paths
from jaxttp.models import (
    MLP,
    ResNet,
    Transformer,
    freeze,
    head_only,
    lora,
    merge_lora,
)
from tests.draws import normal
from tests.models.filled import filled


def resnet():
    return filled(
        lambda: ResNet(
            3, in_channels=2, stem_width=3, widths=(3, 4), strides=(1, 2), norm="batch",
            param_dtype=jnp.float64, rngs=nnx.Rngs(0),
        )
    )  # fmt: skip


def images(n=4):
    return jnp.asarray(np.random.default_rng(1).standard_normal((n, 5, 5, 2)))


def mlp():
    return from_nnx(filled(lambda: MLP((4, 6, 6, 3), param_dtype=jnp.float64, rngs=nnx.Rngs(0))))


def shaken(params, key):
    """B starts at zero, which hides mistakes in A: move everything."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    drawn = [w + normal(k, w.shape, 0.3) for k, w in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, drawn)


# --- low-rank adapters ----------------------------------------------------------------------------


def test_adapters_on_convolutions_are_convolutions(key):
    module = resnet()
    base = from_nnx(module)
    model = lora(base, rank=2, alpha=3.0, key=key)
    params = shaken(model.params, key)
    x = images()

    def brute_force(adapters, x):
        """A convolution to `rank` channels and a 1x1 convolution of it, added to the first."""
        network = nnx.clone(module)
        for path, parts in adapters.items():
            layer = network
            for name in path.split("/")[:-1]:
                layer = layer[int(name)] if name.isdigit() else getattr(layer, name)
            height, width, inputs = layer.kernel.shape[:3]
            update = jnp.zeros(layer.kernel.shape)
            for r in range(2):
                patch = parts["a"][:, r].reshape(height, width, inputs)
                update += 1.5 * patch[..., None] * parts["b"][r][None, None, None]
            layer.kernel = nnx.Param(layer.kernel[...] + update)
        return network(x)

    assert sorted(params) == sorted(
        path for path in leaf_paths(base.params) if path.endswith("kernel") and "head" not in path
    )
    # float64; hundreds of products a sum.
    np.testing.assert_allclose(model.apply_fn(params, x), brute_force(params, x), rtol=1e-11)


def test_adapters_start_as_the_models_own_function_and_merge_into_it(key):
    base, x = mlp(), np.eye(4)
    model = lora(base, rank=2, alpha=5.0, key=key, targets=lambda path: path.endswith("kernel"))
    assert sorted(model.params) == ["head/kernel", "hidden/0/kernel", "hidden/1/kernel"]
    np.testing.assert_array_equal(model.apply_fn(model.params, x), base.apply_fn(base.params, x))
    moved = shaken(model.params, key)
    merged = merge_lora(base.params, moved, scale=2.5)
    np.testing.assert_array_equal(base.apply_fn(merged, x), model.apply_fn(moved, x))
    a, b = (np.asarray(moved["hidden/1/kernel"][name]) for name in "ab")
    expected = base.params["hidden"]["1"]["kernel"] + 2.5 * a @ b
    np.testing.assert_allclose(merged["hidden"]["1"]["kernel"], expected, atol=1e-14)


def test_output_axis_of_equinox(key):
    base = from_equinox(eqx.nn.Linear(4, 3, key=key))
    model = lora(base, rank=2, key=key, output_axis=0)
    (parts,) = model.params.values()
    assert jax.tree.map(jnp.shape, parts) == {"a": (4, 2), "b": (2, 3)}
    moved = shaken(model.params, key)
    (parts,) = moved.values()
    x = np.asarray(normal(key, (5, 4)))
    expected = base.apply_fn(base.params, x) + x @ np.asarray(parts["a"]) @ np.asarray(parts["b"])
    np.testing.assert_allclose(model.apply_fn(moved, x), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be an integer of at least 1"),
        ({"rank": 5}, "rank must be an integer between 1 and 4.*hidden/0/kernel is a 4 by 6"),
        ({"rank": 1, "alpha": 0.0}, "alpha must be greater than 0"),
        ({"rank": 1, "targets": lambda path: False}, "targets chooses no kernel; params has head"),
        ({"rank": 1, "targets": lambda path: "bias" in path}, r"head/bias is float64 \(3,\), not"),
    ],
)
def test_adapters_that_cannot_be(options, message, key):
    with pytest.raises(ValueError, match=message):
        lora(mlp(), key=key, **options)


# --- fewer parameters -----------------------------------------------------------------------------


def test_the_kernel_of_the_head_alone():
    module = resnet()
    x = images()
    model = freeze(from_nnx(module), head_only)
    features = np.asarray(module.activations(x)["pool"])
    # Kernel and bias of the last layer: the features' products, plus one, for every output.
    expected = np.einsum("nm,cd->ncmd", features @ features.T + 1, np.eye(3))
    np.testing.assert_allclose(empirical_ntk(*model, x), expected, rtol=1e-11, atol=1e-11)


# --- other outputs --------------------------------------------------------------------------------


def transformer(**options):
    return filled(
        lambda: Transformer(
            8, 20, length=8, width=8, depth=2, heads=2, param_dtype=jnp.float64, rngs=nnx.Rngs(0),
            **options,
        )
    )  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
def test_a_position_sees_what_is_before_it(causal, key):
    module = transformer(causal=causal)
    x = np.array(normal(key, (1, 6, 8)))
    before = module(jnp.asarray(x))
    x[0, 3] += 1
    moved = np.abs(module(jnp.asarray(x)) - before).max(axis=-1)[0] > 1e-9
    assert moved.tolist() == [not causal] * 3 + [True] * 3
