"""Which kernels get adapters, by the names that PEFT knows, and how they are scaled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import Model
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
        (r".*\.1\..*_proj", "1/attention/q_proj 1/attention/v_proj 1/up_proj"),
        (r"blocks\.\d\.up_proj", "0/up_proj 1/up_proj"),
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
        ("q_proj", "^targets: 'q_proj' fits no module"),
        ("*_proj", "is no regular expression: .*; give ends of names as a list"),
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
