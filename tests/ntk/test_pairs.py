"""Sums over pairs of positions: against einsum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.ntk import _products
from jaxttp.ntk._products import Sizes, sum_over_pairs
from tests.draws import normal, split

ORACLES = {
    "full": "ibsk,jbtk,icbso,jdbto->icjd",
    "trace": "ibsk,jbtk,icbso,jcbto->ij",
    "diagonal": "ibsk,jbtk,icbso,jcbto->cij",
}


def close(found, wanted):
    # float64; each entry is a sum of at most some hundred products of standard normal numbers.
    np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-11)


def features(n, m, classes, groups, positions, fan_in, fan_out):
    keys = split(n + positions, 4)
    return (
        normal(keys[0], (n, groups, positions, fan_in)),
        normal(keys[1], (n, classes, groups, positions, fan_out)),
        normal(keys[2], (m, groups, positions, fan_in)),
        normal(keys[3], (m, classes, groups, positions, fan_out)),
    )


@pytest.mark.parametrize("output", ORACLES)
def test_all_pairs_of_positions(output):
    x1, g1, x2, g2 = features(3, 2, 2, 2, 4, 4, 3)
    both = jnp.einsum(ORACLES[output], x1, x2, g1, g2)
    close(sum_over_pairs(x1, g1, x2, g2, output, "float64"), both)
    own = sum_over_pairs(x1, g1, None, None, output, "float64")
    close(own, jnp.einsum(ORACLES[output], x1, x1, g1, g1))
    turned = {"full": (2, 3, 0, 1), "trace": (1, 0), "diagonal": (0, 2, 1)}[output]
    assert np.array_equal(own, own.transpose(turned))  # not only to rounding


@pytest.fixture
def by_rows(monkeypatch):
    """However few the positions are, in blocks of two rows."""
    monkeypatch.setattr(_products, "SIZES", Sizes(many_positions=1, rows=2))


@pytest.mark.parametrize(("n", "m"), [(1, 1), (5, 7)])
def test_sample_after_sample(n, m, by_rows):
    """Blocks that do not divide the samples; two groups."""
    x1, g1, x2, g2 = features(n, m, 3, 2, 4, 5, 2)
    close(
        sum_over_pairs(x1, g1, x2, g2, "full", "float64"),
        jnp.einsum(ORACLES["full"], x1, x2, g1, g2),
    )
    own = sum_over_pairs(x1, g1, None, None, "full", "float64")
    close(own, jnp.einsum(ORACLES["full"], x1, x1, g1, g1))
    assert np.array_equal(own, own.transpose(2, 3, 0, 1))


def test_tokens_sample_after_sample(by_rows):
    """Of an embedding: positions are alike where they hold the same token."""
    (_, g1, _, g2), tokens = features(5, 3, 2, 1, 4, 1, 2), np.random.default_rng(0)
    x1, x2 = (jnp.asarray(tokens.integers(0, 3, (n, 1, 4))) for n in (5, 3))
    hot = [jax.nn.one_hot(x, 3, dtype=jnp.float64) for x in (x1, x2)]
    found = sum_over_pairs(x1, g1, x2, g2, "full", "float64")
    close(found, jnp.einsum(ORACLES["full"], *hot, g1, g2))
