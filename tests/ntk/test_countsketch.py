"""Where coordinates go: each into one bucket under a sign, whatever a row is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.ntk import _countsketch as sketches
from tests.draws import normal

DIM = 16


def _by_products(x, g, key, dim=DIM):
    """x (s, k), g (o, s)."""
    count = sketches.product_blocks(1, x.shape[1], len(g), dim)
    return sketches.of_products(x[None], g[None, None], sketches.draw_blocks(key, count, dim))[0, 0]


def _by_convolution(x, g, key, dim=DIM):
    drawn = sketches.draw_convolution(key, x.shape[1], len(g), dim)
    return jnp.fft.irfft(sketches.spectrum_of_products(x[None], g.T[None, None], drawn)[0, 0], dim)


WAYS = {"products": _by_products, "convolution": _by_convolution}


def _projection(way, k, o, key):
    """R (k o, dim), which takes every gradient to its sketch, from one coordinate at a time."""
    one, two = jnp.meshgrid(jnp.arange(k), jnp.arange(o), indexing="ij")
    run = jax.vmap(lambda x, g: way(x[None], g[:, None], key))
    return run(jnp.eye(k)[one.ravel()], jnp.eye(o)[two.ravel()])


# Wider inputs and outputs than the sketch, and columns of which some are left over.
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("k", "o"), [(70, 5), (17, 33)])
def test_every_coordinate_goes_into_one_bucket_under_a_sign(way, k, o):
    key = jax.random.key(k * o)
    projection = _projection(WAYS[way], k, o, key)
    size = jnp.sort(jnp.abs(projection), axis=1)
    np.testing.assert_allclose(size[:, -1], 1, rtol=1e-12)  # rounding of the transform
    np.testing.assert_allclose(size[:, :-1], 0, atol=1e-12)
    assert 0 < float(jnp.mean(jnp.max(projection, 1) > 0.5)) < 1  # signs of both kinds
    # And it is linear: of three positions at once, the projection of the formed gradient.
    x, g = normal(1, (3, k)), normal(2, (o, 3))
    wanted = jnp.einsum("sk,os->ko", x, g).ravel() @ projection
    np.testing.assert_allclose(WAYS[way](x, g, key), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("way", "k", "o"), [("products", 40, 6), ("convolution", 12, 10)])
def test_products_of_sketches_are_unbiased_within_the_bound(way, k, o):
    x, y = normal(3, (2, k)), normal(4, (2, k)) + normal(3, (2, k))
    g, h = normal(5, (o, 2)), normal(6, (o, 2)) + normal(5, (o, 2))
    one, two = (jnp.einsum("sk,os->ko", *pair).ravel() for pair in ((x, g), (y, h)))
    exact, many = one @ two, 1000
    found = jax.vmap(lambda key: WAYS[way](x, g, key) @ WAYS[way](y, h, key))(
        jax.random.split(jax.random.key(7), many)
    )
    bound = ((one @ one) * (two @ two) + exact**2) / (DIM - 1)
    assert abs(float(jnp.mean(found) - exact)) < 4 * float(jnp.sqrt(bound / many))
    # A variance's own spread over 1,000 draws is a few per cent.
    assert 0.5 < float(jnp.mean((found - exact) ** 2) / bound) < 1.1


def test_blocks_are_added_with_signs_and_rolled():
    rows, shifts = np.arange(1.0, 15.0).reshape(2, 7), np.array([0, 2, 1])
    signs = np.array([[1, -1, 1], [-1, -1, 1], [1, 1, -1]], np.int8)
    wanted = sum(
        np.roll(np.pad(rows, ((0, 0), (0, 2)))[:, 3 * i : 3 * i + 3] * signs[i], -shifts[i], 1)
        for i in range(3)
    )
    blocks = sketches.RolledBlocks(jnp.asarray(signs), jnp.asarray(shifts))
    np.testing.assert_array_equal(sketches.of_rows(jnp.asarray(rows), blocks), wanted)  # integers


def test_rows_of_a_table_go_where_their_token_says():
    key, tokens = jax.random.key(0), jnp.array([[3, 3, 900], [900, 2, 3]])
    g = normal(8, (2, 2, 3, 5))
    sketch = jax.jit(lambda tokens, g: sketches.of_tokens(tokens, g, key, DIM))
    found = sketch(tokens, g)

    def row(token):  # the sketch (5, dim) of a row of the table
        return sketch(jnp.full((1, 1), token), jnp.eye(5)[None, :, None])[0]

    rows = {token: row(token) for token in (2, 3, 900)}
    for token, one in rows.items():
        assert sorted(jnp.abs(one).ravel().tolist())[-5:] == [1.0] * 5, token
        assert float(jnp.sum(jnp.abs(one))) == 5.0
        assert len(set(jnp.argmax(jnp.abs(one), 1).tolist())) == 5
    assert not np.array_equal(rows[2], rows[3])
    wanted = [sum(g[n, :, s] @ rows[int(tokens[n, s])] for s in range(3)) for n in range(2)]
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)  # order of the sums
