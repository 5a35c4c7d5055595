"""Samples that are several arrays: everything agrees with the same network of one packed array."""

import functools
from collections import UserDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import (
    empirical_ntk,
    predict_training_time,
    train,
)
from jaxttp._core.types import concatenate, count, shape_words, take
from jaxttp.adapters import check_per_sample, output_shape
from jaxttp.adapters.inputs import check_samples

N, LENGTH, WORDS, WIDTH, CLASSES = 12, 5, 7, 8, 2
RANDOM = np.random.default_rng(0)
LENGTHS = RANDOM.integers(2, LENGTH + 1, N)
MASK = (np.arange(LENGTH) < LENGTHS[:, None]).astype(int)
TOKENS = {"input_ids": RANDOM.integers(1, WORDS, (N, LENGTH)) * MASK, "attention_mask": MASK}
PACKED = np.stack([TOKENS["input_ids"], MASK], axis=1)
Y = np.arange(N) % CLASSES
SHAPES = {
    "table": (WORDS, WIDTH), "query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH),
    "value": (WIDTH, WIDTH), "in": (WIDTH, WIDTH), "out": (WIDTH, WIDTH), "head": (WIDTH, CLASSES),
}  # fmt: skip
PARAMS = {name: jnp.asarray(RANDOM.normal(size=s) / s[0] ** 0.5) for name, s in SHAPES.items()}


def transformer(params, tokens):
    """One block of masked attention and an MLP, and the mean over the words of each sentence."""
    mask = tokens["attention_mask"].astype(params["table"].dtype)
    h = params["table"][tokens["input_ids"]]
    q, k, v = (h @ params[name] for name in ("query", "key", "value"))
    scores = jnp.einsum("nqd,nkd->nqk", q, k) / WIDTH**0.5 - 30.0 * (1.0 - mask[:, None, :])
    h = h + jax.nn.softmax(scores) @ v
    h = h + jnp.tanh(h @ params["in"]) @ params["out"]
    pooled = jnp.einsum("ntd,nt->nd", h, mask) / jnp.sum(mask, axis=1)[:, None]
    return pooled @ params["head"]


def unpacked(x):
    return {"input_ids": x[:, 0], "attention_mask": x[:, 1]}


def packed(params, x):
    """The same network of one array, which it takes apart: the oracle."""
    return transformer(params, unpacked(x))


@functools.cache
def jacobian():
    """Brute force, of the packed array: (N, C, P)."""
    rows = jax.jit(jax.jacrev(lambda w: packed(w, jnp.asarray(PACKED))))(PARAMS)
    return jnp.concatenate([a.reshape(N, CLASSES, -1) for a in jax.tree.leaves(rows)], axis=-1)


def kernel():
    return np.einsum("ncp,mdp->ncmd", jacobian(), jacobian())


@pytest.mark.parametrize("method", ["layerwise", "vector_product"])
def test_kernels_of_every_method_in_tiles_too(method):
    """In one piece, and x1 against x2 in tiles of 5; rounding of float64."""
    whole = empirical_ntk(transformer, PARAMS, TOKENS, method=method)
    np.testing.assert_allclose(whole, kernel(), atol=1e-10)
    other = take(TOKENS, slice(7))
    tiles = empirical_ntk(transformer, PARAMS, TOKENS, other, method=method, batch_size=5)
    np.testing.assert_allclose(tiles, kernel()[:, :, :7], atol=1e-10)


def test_samples_that_mix_are_refused():
    """The check looks at all arrays of the samples: here only the masks of others matter."""
    check_per_sample(transformer, PARAMS, check_samples("x", TOKENS))

    def mixing(params, tokens):
        return transformer(params, tokens) + jnp.mean(tokens["attention_mask"])

    with pytest.raises(ValueError, match="depends on the other samples"):
        check_per_sample(mixing, PARAMS, check_samples("x", TOKENS))
    with pytest.raises(ValueError, match=r"for x\['attention_mask'\] \(12, 5\), x\['input_ids'\]"):
        output_shape(lambda p, x: transformer(p, x)[0], PARAMS, TOKENS)


class Batch(NamedTuple):
    ids: list
    mask: object = None


def test_what_is_a_pytree_and_what_is_data():
    ids, mask = TOKENS["input_ids"], TOKENS["attention_mask"]
    encoding = check_samples("x", UserDict({"ids": ids.tolist(), "mask": mask}))
    assert type(encoding) is dict
    np.testing.assert_array_equal(encoding["ids"], ids)
    batch = check_samples("x", Batch(ids.tolist()))
    assert isinstance(batch, Batch)
    assert batch.ids.shape == (N, LENGTH)
    assert batch.mask is None
    assert isinstance(check_samples("x", (ids, mask)), tuple)
    for data in (((1.0, 2.0), (3.0, 4.0)), [(1, 2), (3, 4)], [ids, mask], [[ids[0]], [ids[1]]]):
        np.testing.assert_array_equal(check_samples("x", data), np.asarray(data))
    nested = check_samples("x", {"text": {"ids": ids}, "more": (mask, mask)})
    assert count(nested) == N
    assert shape_words(nested).startswith("x['more'][0] (12, 5), ")
    assert count(concatenate([nested, take(nested, slice(3))])) == N + 3


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ({"ids": [[1, 2], [3]]}, r"x\['ids'\] must be one array .*this list .* pad or crop them"),
        ({"ids": np.ones((3, 2)), "scale": 2.0}, r"x\['scale'\] must have a row .*; got a scalar"),
        ({"ids": np.ones((3, 2)), "mask": np.ones(2)}, r"x\['mask'\] has 2 rows, x\['ids'\] 3"),
        (Batch([[1.0]], [[1.0], [2.0]]), "x.mask has 2 rows, x.ids 1"),
    ],
)
def test_samples_that_are_none(x, message):
    for call in (
        lambda: train(transformer, PARAMS, x, Y, loss="cross_entropy", optimizer=optax.sgd(1.0),
                      steps=1),
        lambda: predict_training_time(transformer, PARAMS, x, Y, learning_rate=1.0, relinearize=0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
