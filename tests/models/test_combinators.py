"""Other outputs, fewer parameters, low-rank adapters: kernels against brute force."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxttp import Model, empirical_ntk, from_equinox, from_nnx, predict_training_time, train
from jaxttp.data import load_dataset, select
from jaxttp.models import (
    MLP,
    ResNet,
    Transformer,
    freeze,
    head_only,
    last_blocks,
    lora,
    map_outputs,
    merge_lora,
    with_params,
)
from jaxttp.ntk._select import leaf_paths
from tests import oracles
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


@pytest.mark.slow
def test_the_kernel_of_adapters_on_convolutions(key):
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
    expected = oracles.kernel(brute_force, params, x)
    found = empirical_ntk(model.apply_fn, params, x)
    # float64; hundreds of products a sum.
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)


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


def test_the_initial_factors(key):
    wide = Model(lambda w, x: x @ w, jnp.zeros((10_000, 50), jnp.float64))
    part = lora(wide, rank=8, key=key).params[""]
    # 80,000 normals: their variance is off by 0.5 %, three times that is allowed.
    np.testing.assert_allclose(np.var(part["a"]) * 10_000, 1, rtol=0.015)
    assert not np.any(part["b"])


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


def test_an_adapter_for_nothing():
    with pytest.raises(ValueError, match="adapters: params has no hidden"):
        merge_lora(mlp().params, {"hidden": {"a": jnp.ones((4, 1)), "b": jnp.ones((1, 6))}})


# --- fewer parameters -----------------------------------------------------------------------------


def test_the_kernel_of_the_head_alone():
    module = resnet()
    base, x = from_nnx(module), images()
    model = freeze(base, head_only)
    features = np.asarray(module.features(x))
    # Kernel and bias of the last layer: the features' products, plus one, for every output.
    expected = np.einsum("nm,cd->ncmd", features @ features.T + 1, np.eye(3))
    for found in (empirical_ntk(*model, x), empirical_ntk(*base, x, trainable=head_only)):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_the_kernel_of_the_last_block():
    module = resnet()
    base, x = from_nnx(module), images(3)
    chosen = last_blocks(base.params, 1)
    model = freeze(base, chosen)
    assert {path.split("/")[0] for path in model.params} == {"blocks", "head"}
    assert all(path.startswith(("blocks/1", "head")) for path in model.params)
    before = module.blocks[0](nnx.relu(module.stem_norm(module.stem(x))))
    part = {"block": nnx.state(module.blocks[1], nnx.Param), "head": nnx.state(module.head)}

    def brute_force(part, h):
        block, head = nnx.clone(module.blocks[1]), nnx.clone(module.head)
        nnx.update(block, part["block"])
        nnx.update(head, part["head"])
        return head(jnp.mean(block(h), axis=(1, 2)))

    expected = oracles.kernel(brute_force, part, before)
    np.testing.assert_allclose(empirical_ntk(*model, x), expected, rtol=1e-10, atol=1e-10)
    found = empirical_ntk(*base, x, trainable=chosen)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


def test_last_blocks_of_other_lists():
    params = mlp().params
    chosen = [p for p in leaf_paths(params) if last_blocks(params, 1, name="hidden")(p)]
    assert chosen == ["head/bias", "head/kernel", "hidden/1/bias", "hidden/1/kernel"]
    assert not any(last_blocks(params, 0, name="hidden", after=())(p) for p in leaf_paths(params))
    with pytest.raises(ValueError, match=r"name='blocks' is no list of blocks.*has head, hidden"):
        last_blocks(params, 1)
    with pytest.raises(ValueError, match=r"count must be an integer between 0 and 2.*2 blocks"):
        last_blocks(params, 3, name="hidden")


def test_freezing_nothing_is_the_whole_model():
    base = mlp()
    model = freeze(base, lambda path: True)
    assert tuple(model.params) == leaf_paths(base.params)
    x = np.eye(4)
    np.testing.assert_array_equal(model.apply_fn(model.params, x), base.apply_fn(*base[1:], x))


def test_freezing_everything():
    with pytest.raises(ValueError, match="trainable leaves no floating-point parameter"):
        freeze(mlp(), lambda path: False)


@pytest.mark.parametrize(("separator", "kind"), [(".", "weight"), ("/", "kernel")])
def test_a_last_layer_of_another_name_is_in_the_refusal(separator, kind):
    """Models of `from_torch` and `from_keras` have their layers in order, not by the alphabet."""
    names = [f"{layer}{separator}{kind}" for layer in ("stem", "head_norm", "fc")]
    model = Model(lambda w, x: x, {name: jnp.ones(2) for name in names})
    message = rf"layer 'fc': trainable=lambda path: path\.startswith\('fc{separator}'\)\."
    with pytest.raises(ValueError, match=message):
        freeze(model, head_only)
    head = Model(lambda w, x: x, {name: jnp.ones(2) for name in [*names, f"head{separator}{kind}"]})
    assert {*freeze(head, head_only).params} == {f"head{separator}{kind}"}


# --- other outputs --------------------------------------------------------------------------------


def transformer(**options):
    return filled(
        lambda: Transformer(
            8, 20, length=8, width=8, depth=2, heads=2, param_dtype=jnp.float64, rngs=nnx.Rngs(0),
            **options,
        )
    )  # fmt: skip


@pytest.mark.slow
def test_label_words_at_the_last_token(key):
    module = transformer()
    words = jnp.array([3, 7])
    model = map_outputs(from_nnx(module), lambda f: f[:, -1, words])
    x = normal(key, (3, 5, 8))
    found = model.apply_fn(model.params, x)
    np.testing.assert_allclose(found, module(x)[:, 4][:, words], rtol=1e-12, atol=1e-13)
    every = from_nnx(module)
    whole = oracles.kernel(jax.jit(lambda w, x: every.apply_fn(w, x)[:, -1]), every.params, x)
    found = empirical_ntk(*model, x)
    np.testing.assert_allclose(found, whole[:, [3, 7]][..., [3, 7]], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_a_position_sees_what_is_before_it(causal, key):
    module = transformer(causal=causal)
    x = np.array(normal(key, (1, 6, 8)))
    before = module(jnp.asarray(x))
    x[0, 3] += 1
    moved = np.abs(module(jnp.asarray(x)) - before).max(axis=-1)[0] > 1e-9
    assert moved.tolist() == [not causal] * 3 + [True] * 3


@pytest.mark.slow
def test_a_classifier_of_digits_as_sequences_of_rows(key):
    """Fours against sevens, a row of pixels at a time, by the logits of two words."""
    data = select(load_dataset("digits"), classes=(4, 7), per_class=12, key=key)
    module = nnx.jit(lambda: Transformer(8, 20, length=8, width=16, rngs=nnx.Rngs(0)))()
    words = jnp.array([4, 7])
    model = map_outputs(from_nnx(module), lambda f: f[:, -1, words])
    x = data.x[..., 0]
    options = {"loss": "cross_entropy", "steps": 20}
    forecast = predict_training_time(
        *model, x, data.y, learning_rate=0.005, relinearize=2, **options
    )
    run = train(*model, x, data.y, optimizer=optax.sgd(0.005), **options)
    assert forecast.stable
    # From scratch the kernel moves at once, hence the two kernels on the way.
    drop = float(run.loss[0] - run.loss[-1])
    assert drop > 0.1
    np.testing.assert_allclose(forecast.loss, run.loss, atol=0.05 * drop)


def test_sequences_that_do_not_fit():
    for shape in ((2, 9, 8), (2, 5, 7)):
        with pytest.raises(ValueError, match=r"not a batch of sequences \(N, T, 8\) with T at mos"):
            transformer()(jnp.zeros(shape))


@pytest.mark.slow
def test_trained_adapters_go_back_into_the_module(key):
    module = resnet()
    base, x = from_nnx(module), images()
    moved = shaken(lora(base, rank=1, key=key).params, key)
    network = with_params(module, merge_lora(base.params, moved))
    found = lora(base, rank=1, key=key).apply_fn(moved, x)
    np.testing.assert_allclose(network(x), found, rtol=1e-12, atol=1e-12)
