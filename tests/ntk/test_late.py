"""Gradients that are formed when they are multiplied, against the brute-force Jacobian."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.ntk import _plan, empirical_ntk, ntk_plan
from jaxttp.ntk._plan import Blocks
from jaxttp.ntk._products import Outer, product_of_outer
from jaxttp.ntk.layerwise import PRODUCTS
from tests import oracles
from tests.draws import normal

# Both sides sum the same float64 products in another order: a few hundred roundings of 1e-16.
TOLERANCE = 1e-12
LATE = {"up", "down", "kernel"}


def network(params, x):
    """Tokens (N, 3): a tied table, two dense layers over tokens, a bias, a convolution of pairs."""
    h = params["table"][x]
    h = h + jnp.tanh(h @ params["up"] + params["bias"].reshape(1, 1, -1)) @ params["down"]
    numbers = ("NWC", "WIO", "NWC")
    h = jax.lax.conv_general_dilated(h, params["kernel"], (1,), "SAME", dimension_numbers=numbers)
    return jnp.sin(h)[:, -1] @ params["table"].T[:, :3]


@functools.cache
def made():
    shapes = {"table": (5, 6), "up": (6, 9), "bias": (9,), "down": (9, 6), "kernel": (2, 6, 6)}
    params = {name: normal(seed, shape) for seed, (name, shape) in enumerate(shapes.items())}
    tokens = jax.random.randint(jax.random.key(7), (7, 3), 0, 5)
    return params, tokens, oracles.kernel(network, params, tokens)


@pytest.fixture
def blocks(monkeypatch):
    """No kernel is computed without blocks; the blocks are those that are set here."""
    monkeypatch.setattr(_plan, "RATES", _plan.Rates(unblocked=0, few=1))

    def use(*given):
        monkeypatch.setattr(_plan.Memory, "features_in_blocks", lambda *_: Blocks(*given))

    return use


def close(got, wanted):
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * np.max(np.abs(wanted)))


def as_output(kernel, output):
    """What "trace" and "diagonal" give of a full kernel."""
    diagonal = np.einsum("ncmc->nmc", kernel)
    return {"full": kernel, "diagonal": diagonal, "trace": diagonal.mean(-1)}[output]


@pytest.mark.parametrize(
    ("cut", "output"),
    [
        ((7, 7, 2, True), "full"),  # one block
        ((3, 3, 2, True), "full"),  # all features kept
        ((3, 3, 2, True), "trace"),
        ((3, 2, 2, False), "full"),  # features anew
        ((3, 2, 2, False), "diagonal"),
    ],
)
def test_blocks_of_late_gradients_agree_with_the_jacobian(cut, output, blocks):
    params, tokens, wanted = made()
    blocks(*cut)
    plan = ntk_plan(network, params, tokens, method="layerwise")
    assert {name for name, form in plan.forms.items() if form == "late gradient"} == LATE
    kernel = empirical_ntk(network, params, tokens, method="layerwise", output=output)
    close(kernel, as_output(np.asarray(wanted), output))
    mirrored = kernel.transpose(2, 3, 0, 1) if output == "full" else kernel.swapaxes(0, 1)
    assert bool(jnp.all(kernel == mirrored))


def test_between_two_sets_by_layer_and_of_some_parameters(blocks):
    params, tokens, wanted = made()
    blocks(3, 2, 1)
    both = empirical_ntk(network, params, tokens, tokens[:4], method="layerwise")
    close(both, np.asarray(wanted)[:, :, :4])


@pytest.mark.parametrize(
    ("chunk", "k", "o", "output"),
    [(1, 5, 4, "full"), (400, 3, 70, "trace"), (400, 3, 70, "full"), (1 << 20, 5, 4, "diagonal")],
)
def test_chunks_of_any_size_are_the_same_sum(chunk, k, o, output):
    """Columns are cut where there are more of them, else rows; 400 numbers are 16 of the 70."""
    pairs = [Outer(normal(n, (n, 3, k)), normal(9 - n, (n, 2, o, 3))) for n in (2, 3)]
    one, two = (np.einsum("nsk,ncos->ncok", *pair).reshape(-1, 2, k * o) for pair in pairs)
    product = PRODUCTS[output]
    shapes = {"full": "ncx,mdx->ncmd", "trace": "ncx,mcx->nm", "diagonal": "ncx,mcx->cnm"}
    got = product_of_outer(*pairs, product, "float64", chunk)
    close(got, np.einsum(shapes[output], one, two))
    got = product_of_outer(pairs[0], None, product, "float64", chunk)
    close(got, np.einsum(shapes[output], one, one))


def test_gradients_are_deferred_where_a_transformer_needs_blocks():
    """Shapes alone: what fits decides; several devices and little memory go the other way."""

    def deep(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x[:, -1, :4]

    params = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 24
    x = jax.ShapeDtypeStruct((64, 64, 256), jnp.float32)
    plan = ntk_plan(deep, params, x)
    assert set(plan.forms.values()) == {"late gradient"}
    assert plan.kept
    assert plan.bytes < 4 << 30
    small = ntk_plan(deep, params, x, batch_size=4)
    assert set(small.forms.values()) == {"gradient"}
    small = ntk_plan(deep, params, x, max_bytes=plan.bytes // 2)
    assert small.bytes <= plan.bytes // 2
