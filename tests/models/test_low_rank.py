"""Which kernels get adapters, by the names that PEFT knows, and how they are scaled."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxttp import Model, from_linen, from_nnx
from jaxttp.models import head_only, lora, lora_scale, merge_lora

KERNEL = {"kernel": np.ones((4, 3)), "bias": np.ones(3)}
PARAMS = {
    "blocks": [{"attention": {"q_proj": KERNEL, "v_proj": KERNEL}, "up_proj": KERNEL}] * 2,
    "embed": {"embedding": np.ones((5, 4))},
    "head": {"kernel": np.ones((3, 2))},
}
BASE = Model(lambda w, x: x @ w["head"]["kernel"], jax.tree.map(jnp.asarray, PARAMS))


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj", "v_proj"], "0/attention/q_proj 0/attention/v_proj 1/attention/q_proj "
                               "1/attention/v_proj"),
        (["attention.q_proj"], "0/attention/q_proj 1/attention/q_proj"),
        (["blocks.1.up_proj"], "1/up_proj"),
        ("up_proj", "0/up_proj 1/up_proj"),
        (lambda path: path == "blocks/0/up_proj/kernel", "0/up_proj"),
        (None, "0/attention/q_proj 0/attention/v_proj 0/up_proj 1/attention/q_proj "
               "1/attention/v_proj 1/up_proj"),
    ],
)  # fmt: skip
def test_kernels_by_the_names_of_their_modules(targets, expected, key):
    model = lora(BASE, rank=1, key=key, targets=targets)
    assert sorted(model.params) == [f"blocks/{name}/kernel" for name in expected.split()]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ["q_proj", "k_proj"],
            "^targets: 'k_proj' fits no module; they end in embed, head, q_proj",
        ),
        ([], "targets chooses no kernel"),
    ],
)
def test_names_that_fit_nothing(targets, message, key):
    with pytest.raises(ValueError, match=message):
        lora(BASE, rank=1, key=key, targets=targets)


def test_the_scale_of_rslora(key):
    assert lora_scale(9) == 1
    assert lora_scale(9, rslora=True) == 3
    base = Model(lambda w, x: x @ w["kernel"], {"kernel": jnp.zeros((4, 4))})
    model = lora(base, rank=4, key=key, alpha=8, rslora=True)
    moved = {"kernel": {"a": jnp.eye(4), "b": jnp.eye(4)}}
    np.testing.assert_array_equal(model.apply_fn(moved, jnp.eye(4)), 4 * np.eye(4))
    merged = merge_lora(base.params, moved, scale=lora_scale(4, alpha=8, rslora=True))
    np.testing.assert_array_equal(merged["kernel"], 4 * np.eye(4))


def test_a_head_trains_in_full_beside_adapters(key):
    model = lora(BASE, rank=1, key=key, targets=["up_proj"], also=head_only)
    assert sorted(model.params) == ["blocks/0/up_proj/kernel", "blocks/1/up_proj/kernel",
                                    "head/kernel"]  # fmt: skip
    x = jnp.ones((2, 3))
    np.testing.assert_array_equal(model.apply_fn(model.params, x), BASE.apply_fn(BASE.params, x))
    moved = model.params | {"head/kernel": jnp.zeros((3, 2))}
    assert not np.any(model.apply_fn(moved, x))
    with pytest.raises(ValueError, match="also: head/kernel has an adapter; leave it out of one"):
        lora(BASE, rank=1, key=key, targets=["head"], also=head_only)


def attention(kind, use_bias, key):
    """Attention of 4 heads of 8 on sequences (N, 5, 32), with outputs (N, 5 * 32)."""
    x = jax.random.normal(key, (3, 5, 32), jnp.float64)
    options = {"use_bias": use_bias, "param_dtype": jnp.float64, "dtype": jnp.float64}
    if kind == "nnx":
        model = from_nnx(nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0), **options))
    else:
        module = flax.linen.MultiHeadDotProductAttention(4, **options)
        model = from_linen(module, module.init(key, x))
    return Model(lambda w, x: model.apply_fn(w, x).reshape(len(x), -1), model.params), x


@pytest.mark.parametrize(("kind", "use_bias"), [("nnx", True), ("linen", True), ("nnx", False)])
def test_attention_of_flax_gets_updates_of_the_rank(kind, use_bias, key):
    base, x = attention(kind, use_bias, key)
    model = lora(base, rank=12, key=key)  # above the 8 of a head
    assert sorted(model.params) == [f"{name}/kernel" for name in ("key", "out", "query", "value")]
    for parts in model.params.values():
        assert jax.tree.map(jnp.shape, parts) == {"a": (32, 12), "b": (12, 32)}
    moved = jax.tree.map(lambda w: w + 0.1 * jax.random.normal(key, w.shape), model.params)
    merged = merge_lora(base.params, moved)
    for name in ("key", "out", "query", "value"):
        update = np.asarray(merged[name]["kernel"] - base.params[name]["kernel"])
        assert update.shape == ((4, 8, 32) if name == "out" else (32, 4, 8))
        assert np.linalg.matrix_rank(update.reshape(32, 32)) == 12
        expected = moved[f"{name}/kernel"]["a"] @ moved[f"{name}/kernel"]["b"]
        np.testing.assert_allclose(update.reshape(32, 32), expected, atol=1e-12)
    found = model.apply_fn(moved, x)
    np.testing.assert_array_equal(found, base.apply_fn(merged, x))
    assert np.max(np.abs(found - base.apply_fn(base.params, x))) > 0.01
    with pytest.raises(ValueError, match="query/kernel is a 32 by 32 matrix"):
        lora(base, rank=33, key=key, targets=["query"])


def test_what_gets_no_adapter_of_itself(key):
    kernels = ["a", "layers.0.linear.weight", "out/kernel", "token_mixing/kernel", "w", "weights"]
    others = ["b", "b1", "bias", "scale", "embedding/embedding", "Embed_0/table", "wpe.weight",
              "wte.weight", "pos", "encoder/pos_embedding", "positions", "cls_token",
              "attn.in_proj_bias", "tok_emb/w", "head/kernel", "segments"]  # fmt: skip
    base = Model(lambda w, x: x, {path: jnp.ones((3, 3)) for path in kernels + others})
    assert sorted(lora(base, rank=1, key=key).params) == kernels
    chosen = lora(base, rank=1, key=key, targets=lambda path: path == "embedding/embedding")
    assert list(chosen.params) == ["embedding/embedding"]
