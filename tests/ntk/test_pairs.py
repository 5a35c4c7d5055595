"""Sums over pairs of positions, with patches and with pixels: against einsum over patches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxttp import empirical_ntk
from jaxttp.ntk import _products
from jaxttp.ntk._products import Sizes, sum_over_pairs
from jaxttp.ntk._program import trace
from jaxttp.ntk._sites import by_pixels, find_sites
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
@pytest.mark.parametrize("numbers", [1, 40, 1 << 21])
def test_all_pairs_of_positions(output, numbers, monkeypatch):
    """However many positions a turn of the loop takes."""
    monkeypatch.setattr(_products, "SIZES", Sizes(turn=numbers, own_turn=numbers))
    x1, g1, x2, g2 = features(3, 2, 2, 2, 6, 4, 3)
    both = jnp.einsum(ORACLES[output], x1, x2, g1, g2)
    close(sum_over_pairs(x1, g1, x2, g2, output, "float64"), both)
    own = sum_over_pairs(x1, g1, None, None, output, "float64")
    close(own, jnp.einsum(ORACLES[output], x1, x1, g1, g1))
    turned = {"full": (2, 3, 0, 1), "trace": (1, 0), "diagonal": (0, 2, 1)}[output]
    assert np.array_equal(own, own.transpose(turned))  # not only to rounding


@pytest.fixture(params=[2, 16])
def by_rows(request, monkeypatch):
    """However few the positions are, in blocks of so many rows."""
    monkeypatch.setattr(_products, "SIZES", Sizes(many_positions=1, rows=request.param))


@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 2), (5, 7), (17, 4)])
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


def test_sample_after_sample_under_grad_vmap_and_in_single_precision(by_rows):
    x1, g1, x2, g2 = features(3, 2, 2, 1, 4, 3, 2)
    weight = normal(9, (3, 2, 3, 2))

    def value(way, x, g):
        return jnp.sum(weight * way(x, g))

    def ours(x, g):
        return sum_over_pairs(x, g, None, None, "full", "float64")

    def plain(x, g):
        return jnp.einsum(ORACLES["full"], x, x, g, g)

    found, wanted = (jax.grad(functools.partial(value, f), (0, 1))(x1, g1) for f in (ours, plain))
    jax.tree.map(close, found, wanted)
    several = [jnp.stack([a, 2 * a]) for a in (x1, g1)]
    close(jax.vmap(ours)(*several), jax.vmap(plain)(*several))
    halves = [a.astype(jnp.float32) for a in (x1, g1, x2, g2)]
    assert sum_over_pairs(*halves, "full", "float64").dtype == jnp.float64


GEOMETRIES = st.tuples(
    st.lists(st.integers(1, 4), min_size=1, max_size=2),  # size, of one or two axes
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(1, 2), st.integers(0, 2),
    st.integers(0, 1), st.integers(1, 2),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("least", [1, 16])
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(GEOMETRIES)
def test_patches_are_sums_of_pixels(least, monkeypatch, geometry):
    """Of any convolution: sizes, taps, strides, dilations, margins, groups; in both orders."""
    monkeypatch.setattr(_products, "SIZES", Sizes(many_positions=least))
    size, taps, stride, dilation, gaps, low, high, groups = geometry
    axes = len(size)
    names = "HW"[:axes]
    spread = [(n - 1) * gaps + 1 + low + high for n in size]
    if min(spread) < (taps - 1) * dilation + 1:
        return  # nothing is left of the image

    def network(params, x):
        out = jax.lax.conv_general_dilated(
            x, params, (stride,) * axes, [(low, high)] * axes, lhs_dilation=(gaps,) * axes,
            rhs_dilation=(dilation,) * axes, feature_group_count=groups,
            dimension_numbers=(f"N{names}C", f"{names}IO", f"N{names}C"),
        )  # fmt: skip
        return out.reshape(len(x), -1)

    channels = 2 * groups
    params = normal(0, ((taps,) * axes) + (2, channels))
    x = normal(1, (3, *size, channels))
    (site,) = find_sites(trace(network, params, x[0]).program, (True,))
    assert site.windows is not None
    patches, pixels = (jax.vmap(f)(x[:, None]) for f in (site.inputs, site.pixels))
    assert pixels.shape == (3, groups, site.n_pixels, 2)
    cotangents = normal(2, (3, 2, groups, site.positions, 2))
    wanted = jnp.einsum(ORACLES["full"], patches, patches, cotangents, cotangents)
    own = sum_over_pairs(pixels, cotangents, None, None, "full", "float64", site.windows)
    two = sum_over_pairs(
        pixels, cotangents, pixels[:2], cotangents[:2], "full", "float64", site.windows
    )
    close(own, wanted)
    close(two, wanted[:, :, :2])


@pytest.mark.parametrize("output", ["full", "trace", "diagonal"])
def test_a_kernel_by_pixels(output):
    """3 x 3 patches of 3 x 3 pixels of many channels: 81 products of pixels, 729 under patches."""

    def network(params, x):
        h = jax.nn.relu(conv(x, params["first"]))
        return conv(h, params["second"]).mean((1, 2)) @ params["out"]

    conv = functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    keys = split(5, 4)
    params = {
        "first": normal(keys[0], (3, 3, 8, 16)), "second": normal(keys[1], (3, 3, 16, 16)),
        "out": normal(keys[2], (16, 2)),
    }  # fmt: skip
    x = normal(keys[3], (5, 3, 3, 8))
    program = trace(network, params, x[0]).program
    assert [by_pixels(site) for site in find_sites(program, (True,) * 3)] == [True, True, False]
    found = empirical_ntk(network, params, x, output=output, method="layerwise")
    wanted = empirical_ntk(network, params, x, output=output, method="jacobian")
    close(found, wanted)
    others = empirical_ntk(network, params, x[:2], x, output=output, method="layerwise")
    close(others, wanted[:2])
