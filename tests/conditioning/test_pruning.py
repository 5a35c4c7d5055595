import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import conditioning


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    return {"a": {"w": jnp.asarray(rng.standard_normal((10, 10))), "b": jnp.zeros(10)},
            "c": jnp.asarray(rng.standard_normal((3, 3, 2, 4)))}  # fmt: skip


@pytest.mark.parametrize("rate", [0.0, 0.29, 0.5, 0.9])
def test_the_smallest_of_every_layer_go(params, rate):
    masks = jax.tree.map(np.asarray, conditioning.magnitude_masks(params, rate))
    for leaf, mask in ((params["a"]["w"], masks["a"]["w"]), (params["c"], masks["c"])):
        assert np.sum(~mask) == int(rate * leaf.size + 1e-9)
        if rate > 0:
            size = np.abs(leaf)
            assert np.max(size[~mask]) <= np.min(size[mask])
    assert np.all(masks["a"]["b"])


def test_ties_and_selection():
    masks = conditioning.magnitude_masks({"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, 0.25)
    assert int(jnp.sum(~masks["w"])) == 4
    masks = conditioning.magnitude_masks(
        {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}, 0.5, prune=lambda path, leaf: "b" in path
    )
    assert bool(jnp.all(masks["w"]))
    assert int(jnp.sum(~masks["b"])) == 2


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1, momentum=0.9), optax.adamw(1e-2), optax.noisy_sgd(0.1, key=jax.random.key(0))],
    ids=["momentum", "adamw", "noise"],
)
def test_pruned_entries_stay_zero(params, optimizer):
    masks = conditioning.magnitude_masks(params, 0.5)
    weights = conditioning.apply_masks(params, masks)
    tx = conditioning.keep_pruned(optimizer, masks)
    state = tx.init(weights)
    for step in range(3):
        grads = jax.tree.map(lambda leaf, step=step: jnp.cos(leaf + step), weights)
        updates, state = tx.update(grads, state, weights)
        weights = optax.apply_updates(weights, updates)
    for leaf, mask, old in zip(*map(jax.tree.leaves, (weights, masks, params)), strict=True):
        assert np.all(np.asarray(leaf)[~np.asarray(mask)] == 0)
        assert np.all(np.asarray(leaf != old)[np.asarray(mask)])


@pytest.mark.parametrize(
    ("params", "masks", "message"),
    [
        ({"w": jnp.ones(3)}, {"w": jnp.ones(2, bool)}, "masks must be the tree of params"),
        ({"w": jnp.ones(3)}, {"v": jnp.ones(3, bool)}, "masks must be the tree of params"),
        ({"w": jnp.ones(3)}, {"w": jnp.ones(3)}, "masks must hold an array of bools"),
        ({"w": jnp.ones(3)}, {}, "masks must hold an array of bools"),
        ({}, {"w": jnp.ones(3, bool)}, "params holds no array"),
    ],
)
def test_masks_that_do_not_fit(params, masks, message):
    with pytest.raises(ValueError, match=message):
        conditioning.apply_masks(params, masks)
