"""Products of rows, by slices and by halves: against the product as it stands."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxttp.ntk import _products
from jaxttp.ntk._products import PRODUCTS, Sizes, is_halved, rows_product
from tests.draws import normal, split


def close(found, wanted):
    # Sums of some thousand products of standard normal numbers in float64: rounding is below 1e-12.
    np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("rows", "size"), [(256, 512), (301, 1030)])
def test_the_upper_half_of_a_symmetric_product(rows, size):
    a = normal(rows + size, (rows, 8), dtype=float)
    a = jnp.tile(a, (1, -(-size // 8)))[:, :size] * jnp.cos(jnp.arange(size))[None]
    assert is_halved(rows, size)
    found = rows_product(a, None, "float64")
    close(jnp.triu(found), jnp.triu(a @ a.T))
    assert float(jnp.abs(jnp.tril(found, -rows // 2)).max()) == 0.0  # what is saved is not computed


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 40))
def test_slices_and_what_is_left_over_make_the_same_sum(n, m, classes, size):
    a, b = (normal(key, (k, classes, size)) for key, k in zip(split(n, 2), (n, m), strict=True))
    with pytest.MonkeyPatch.context() as small:
        sizes = Sizes(slice=30, strip_slice=7, worth_rows=4, worth_size=2)
        small.setattr(_products, "SIZES", sizes)
        full, own = PRODUCTS["full"](a, b, "float64"), PRODUCTS["full"](a, None, "float64")
        trace = PRODUCTS["trace"](a, b, "float64")
        own_trace = PRODUCTS["trace"](a, None, "float64")
    close(full, jnp.einsum("icd,jed->icje", a, b))
    close(trace, jnp.einsum("icd,jcd->ij", a, b))
    flat = jnp.einsum("icd,jed->icje", a, a).reshape(n * classes, -1)
    close(jnp.triu(own.reshape(n * classes, -1)), jnp.triu(flat))
    close(jnp.triu(own_trace), jnp.triu(jnp.einsum("icd,jcd->ij", a, a)))
    close(PRODUCTS["diagonal"](a, None, "float64"), jnp.einsum("icd,jcd->cij", a, a))
