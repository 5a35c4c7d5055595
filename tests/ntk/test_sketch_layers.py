"""Sketches of whole networks: every form of a layer, and what they cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.ntk import empirical_ntk, sketch_jacobian
from jaxttp.ntk._countsketch import SketchLayers
from jaxttp.ntk.gram import workload
from jaxttp.ntk.sketch import sketch_of
from tests.draws import normal


def _network(n=4):
    """Tokens from a table, layers with many positions and with few, and small ones."""
    params = {
        "table": normal(1, (4000, 16)),
        "wide": normal(2, (16, 1100)) / 4,
        "bias": normal(3, (1100,)) / 10,
        "narrow": normal(4, (1100, 16)) / 33,
        "deep": normal(5, (256, 640)) / 16,
        "last": normal(6, (640, 3)) / 25,
    }

    def apply_fn(params, tokens):
        h = params["table"][tokens]  # (n, 16, 16)
        h = jnp.tanh(h @ params["wide"] + params["bias"][None, None])
        h = jnp.tanh(h @ params["narrow"])
        h = jnp.tanh(h.reshape(len(h), -1) @ params["deep"])
        return h @ params["last"]

    return apply_fn, params, jax.random.randint(jax.random.key(7), (n, 16), 0, 4000)


def _layers(apply_fn, params, x, dim):
    work = workload(apply_fn, params, x)
    return SketchLayers.of(work.program, work.sites, work.trainable, dim)


def test_all_forms_of_layers_make_one_sketch():
    dim = 500
    apply_fn, params, x = _network()
    layers = _layers(apply_fn, params, x, dim).layers
    # Leaves by name: bias, deep, last, narrow, table, wide.
    assert {site.leaf: site.kind for site in layers.activation} == {1: "dense", 4: "embedding"}
    assert {site.leaf for site in layers.late} == {3, 5}
    assert {site.leaf for site in layers.gradient} == {2}
    assert layers.direct == (0,)

    exact, keys = empirical_ntk(apply_fn, params, x), jax.random.split(jax.random.key(0), 6)
    sketches = [sketch_jacobian(apply_fn, params, x, key=key, dim=dim) for key in keys]
    found = [jnp.einsum("ncd,med->ncme", s, s) for s in sketches]
    whole = jnp.linalg.norm(exact.ravel())
    errors = [float(jnp.linalg.norm((one - exact).ravel()) / whole) for one in found]
    told = float(jnp.sqrt((jnp.einsum("ncnc->", exact) ** 2 + whole**2) / dim) / whole)
    # Each is off by what is foreseen (a bound, and a mean of 6), and their mean by 1/sqrt(6).
    assert 0.5 * told < np.sqrt(np.mean(np.square(errors))) < 1.25 * told
    mean = jnp.mean(jnp.stack(found), 0)
    assert float(jnp.linalg.norm((mean - exact).ravel()) / whole) < 2 * told / 6**0.5


def _convolutions():
    """A convolution, and one of groups with strides, after each other."""
    params = {"plain": normal(1, (3, 3, 2, 48)) / 4, "grouped": normal(2, (3, 2, 12, 96)) / 8}

    def apply_fn(params, x):
        for leaf, groups in (("plain", 1), ("grouped", 4)):
            x = jnp.tanh(jax.lax.conv_general_dilated(
                x, params[leaf], (groups, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
            ))  # fmt: skip
        return x.reshape(len(x), -1, 3).mean(1)

    return apply_fn, params, normal(3, (4, 6, 5, 2))


@pytest.mark.parametrize("leaf", ["table", "wide", "deep", "bias", "plain", "grouped"])
def test_every_layer_alone_behind_a_diagonal(leaf):
    """J diag(q)^(1/2) by the gradients' own forms, and by differentiating w + q^(1/2) u."""
    apply_fn, params, x = _convolutions() if leaf in ("plain", "grouped") else _network()
    diagonal = jax.tree.map(lambda w: normal(5, w.shape) ** 2, params)

    def scaled(u, x):
        moved = params[leaf] + jnp.sqrt(diagonal[leaf]) * u
        return apply_fn({**params, leaf: moved}, x)

    exact = empirical_ntk(scaled, jnp.zeros_like(params[leaf]), x)
    found = sketch_of(
        apply_fn, params, x, key=jax.random.key(1), dim=4096, trainable=lambda path: path == leaf,
        diagonal=diagonal,
    )  # fmt: skip
    off = jnp.einsum("ncd,med->ncme", found, found) - exact
    # Entries in another order, or without their factors, would be off by more than a half.
    assert float(jnp.linalg.norm(off.ravel()) / jnp.linalg.norm(exact.ravel())) < 0.12


@pytest.mark.parametrize("leaf", ["table", "wide", "deep", "bias"])
def test_every_layer_alone(leaf):
    apply_fn, params, x = _network()
    options = {"trainable": lambda path: path == leaf}
    exact = empirical_ntk(apply_fn, params, x, **options)
    found = sketch_jacobian(apply_fn, params, x, key=jax.random.key(1), dim=4096, **options)
    # An error of 3 per cent (of a table 5, of few coordinates none) would be more, were any factor
    # left out.
    off = jnp.einsum("ncd,med->ncme", found, found) - exact
    assert float(jnp.linalg.norm(off.ravel()) / jnp.linalg.norm(exact.ravel())) < 0.12


def test_batches_and_float32_change_nothing_but_rounding():
    apply_fn, params, x = _network()
    options = {"key": jax.random.key(2), "dim": 300}
    whole = sketch_jacobian(apply_fn, params, x, **options)
    parts = sketch_jacobian(apply_fn, params, x, batch_size=3, **options)
    np.testing.assert_allclose(parts, whole, rtol=1e-10, atol=1e-10)
    half = sketch_jacobian(
        apply_fn, jax.tree.map(lambda a: a.astype("float32"), params), x, **options
    )
    assert half.dtype == jnp.float32
    size = float(jnp.max(jnp.abs(whole)))
    np.testing.assert_allclose(half, whole, atol=1e-5 * size)  # float32
