"""The kernel against a brute-force float64 Jacobian, on networks of every kind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxttp.ntk import (
    _plan,
    empirical_ntk,
    gram,
    ntk_operator,
    ntk_plan,
    sketch_jacobian,
)
from tests import oracles
from tests.draws import normal
from tests.ntk.networks import NETWORKS, conv_channels_first, mlp

# Both sides sum the same float64 products in another order: a few hundred roundings of 1e-16.
TOLERANCE = 1e-12


def close(got, wanted, tolerance=TOLERANCE):
    wanted = np.asarray(wanted)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * np.max(np.abs(wanted)))


def symmetric(kernel):
    return bool(jnp.all(kernel == kernel.transpose(2, 3, 0, 1)))


# Networks that take several seconds to compile.
LARGE = ("conv_net", "attention")


@functools.cache
def made(name):
    """A network and its kernel by brute force, once for all methods."""
    apply_fn, params, x = NETWORKS[name]()
    return apply_fn, params, x, oracles.kernel(apply_fn, params, x)


# What plain differentiation does is the same for most networks.
PLAIN = ("mlp", "conv_channels_first", "embedding_bag", "scanned", "custom_derivatives", "odd_uses")


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(pytest.param(n, "layerwise", marks=[pytest.mark.slow] * (n in LARGE)) for n in NETWORKS),
        *((n, m) for n in PLAIN for m in ("jacobian", "vector_product")),
    ],
)
def test_agrees_with_the_brute_force_jacobian(name, method):
    apply_fn, params, x, wanted = made(name)
    kernel = empirical_ntk(apply_fn, params, x, method=method)
    close(kernel, wanted)
    assert symmetric(kernel)


@pytest.mark.parametrize("method", ["layerwise", "vector_product"])
@pytest.mark.parametrize("name", ["conv_channels_first", "embedding_bag"])
def test_ragged_blocks_change_nothing(name, method):
    apply_fn, params, x, wanted = made(name)
    blocks = empirical_ntk(apply_fn, params, x, method=method, batch_size=2)
    close(blocks, wanted)
    assert symmetric(blocks)


@functools.cache
def twelve():
    apply_fn, params, x = mlp(12)
    return apply_fn, params, x, oracles.kernel(apply_fn, params, x)


@pytest.mark.slow
@settings(max_examples=5)
@given(
    n1=st.integers(1, 6), n2=st.integers(1, 6), batch_size=st.integers(1, 7), cross=st.booleans()
)
def test_any_shape_and_batch_size(n1, n2, batch_size, cross):
    apply_fn, params, x, full = twelve()
    x1, x2 = x[:n1], x[6 : 6 + n2] if cross else None
    kernel = empirical_ntk(apply_fn, params, x1, x2, method="layerwise", batch_size=batch_size)
    close(kernel, full[:n1, :, 6 : 6 + n2] if cross else full[:n1, :, :n1])


@pytest.mark.parametrize(
    ("name", "method", "batch_size"),
    [
        ("embedding_bag", "jacobian", 2),
        ("embedding_bag", "vector_product", None),
        ("embedding_bag", "layerwise", None),
        pytest.param("conv_channels_first", "layerwise", 2, marks=pytest.mark.slow),
    ],
)
def test_trace_and_diagonal(name, method, batch_size):
    apply_fn, params, x, wanted = made(name)
    full = wanted[:, :, :3]
    options = {"method": method, "batch_size": batch_size}
    diagonal = empirical_ntk(apply_fn, params, x, x[:3], output="diagonal", **options)
    close(diagonal, jnp.einsum("ncmc->nmc", full))
    trace = empirical_ntk(apply_fn, params, x, x[:3], output="trace", **options)
    close(trace, jnp.einsum("ncmc->nm", full) / full.shape[1])
    square = empirical_ntk(apply_fn, params, x, output="trace", **options)
    assert bool(jnp.all(square == square.T))


def wide_net(classes, n=5):
    params = {"a": normal(1, (4, 6)), "w": normal(2, (6, classes)), "b": normal(3, (1, classes))}
    return lambda p, x: jnp.tanh(x @ p["a"]) @ p["w"] + p["b"], params, normal(0, (n, 4))


@pytest.mark.parametrize(
    "head",
    [
        lambda p, h: h @ p["w"] + p["b"],
        lambda p, h: 0.5 * (h @ (2.0 * p["w"]))[:, ::-1] + h[:, :1],  # no unit vectors
        lambda p, h: ((h @ (-2.0 * p["w"])).reshape(-1, 5, 2) + h[:, :1, None]).reshape(-1, 10),
        lambda p, h: h @ p["w"] + (h @ p["w"]) ** 2,
        lambda p, h: jnp.einsum("ko,nk->no", p["w"], h) + p["b"] + h @ p["v"],
        lambda p, h: (lambda f: f - jax.nn.logsumexp(f, 1, keepdims=True))(h @ p["w"]),
    ],
)
def test_last_layers_of_every_kind(head):
    """Their cotangents are not computed where they are unit vectors."""
    shapes = {"a": (4, 6), "w": (6, 10), "b": (10,), "v": (6, 10)}
    params = {name: normal(i, shape) for i, (name, shape) in enumerate(shapes.items())}
    x = normal(9, (5, 4))

    def apply_fn(p, x):
        with jax.numpy_rank_promotion("allow"):
            return head(p, jnp.tanh(x @ p["a"]))

    wanted = oracles.kernel(apply_fn, params, x)
    close(empirical_ntk(apply_fn, params, x), wanted)
    trace = empirical_ntk(apply_fn, params, x, output="trace")
    close(trace, jnp.einsum("ncmc->nm", wanted) / wanted.shape[1])


def _scan(table, tokens):
    return jax.lax.scan(lambda h, t: (h + table[t], None), 0.0 * table[tokens[:, 0]], tokens.T)[0]


LOOKUPS = {
    "index": lambda table, tokens: table[tokens].sum(1),
    "take": lambda table, tokens: jnp.take(table, tokens, axis=0, fill_value=0.5).sum(1),
    "clip": lambda table, tokens: jnp.take(table, tokens, axis=0, mode="clip").sum(1),
    "wrap": lambda table, tokens: jnp.take(table, tokens, axis=0, mode="wrap").sum(1),
    "fill": lambda table, tokens: table.at[tokens].get(mode="fill", fill_value=0.0).sum(1),
    "promise": lambda table, tokens: table.at[tokens].get(mode="promise_in_bounds").sum(1),
    "scan": _scan,
    "slice": jax.vmap(lambda t, x: jax.lax.dynamic_slice(t, (x[0], 0), (2, 4)).sum(0), (None, 0)),
}


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_tokens_outside_the_table_are_as_in_reverse_mode(lookup):
    """Dropped, clipped or wrapped; the layerwise trace once clipped what `table[tokens]` drops."""
    table, head = (normal(i, s) for i, s in ((0, (30, 4)), (1, (4, 3))))
    tokens = jnp.array([[0, 3, 35], [29, -1, -45], [30, 2, 29]])

    def apply_fn(table, tokens):
        return jnp.tanh(LOOKUPS[lookup](table, tokens)) @ head

    jacobian = jax.jit(jax.jacrev(apply_fn))(table, tokens).reshape(9, -1)
    full = (jacobian @ jacobian.T).reshape(3, 3, 3, 3)
    for method in ("layerwise", "vector_product"):
        close(empirical_ntk(apply_fn, table, tokens, method=method), full)
    trace = empirical_ntk(apply_fn, table, tokens, method="layerwise", output="trace")
    close(trace, jnp.einsum("ncmc->nm", full) / 3)
    products = ntk_operator(apply_fn, table, tokens).mv(full[0, 0])
    close(products, jnp.einsum("ncmd,md->nc", full, full[0, 0]))


@pytest.mark.parametrize(
    ("name", "leaf", "form"),
    [
        ("mlp", "0/w", "activation"),
        ("mlp", "0/b", "with weight"),
        ("rematerialised", "c", "direct"),
        ("custom_derivatives", "b", "direct"),
    ],
)
def test_forms_are_recognised(name, leaf, form):
    assert ntk_plan(*NETWORKS[name](), method="layerwise").forms[leaf] == form


def test_trainable_by_prefix_mask_and_predicate():
    apply_fn, params, x = mlp()
    frozen = params[:2]
    wanted = oracles.kernel(lambda last, x: apply_fn([*frozen, last], x), params[2], x)
    mask = [False, False, True]
    full_mask = [False, False, {"w": True, "b": True}]
    for trainable in (mask, full_mask, lambda path: path.startswith("2/")):
        close(empirical_ntk(apply_fn, params, x, trainable=trainable), wanted)
    by_products = empirical_ntk(apply_fn, params, x, trainable=mask, method="vector_product")
    close(by_products, wanted)


def test_integer_parameters_are_constants():
    params = {"w": jnp.ones((3, 2)), "shift": jnp.array(2)}
    x = jnp.arange(6.0).reshape(2, 3)
    kernel = empirical_ntk(lambda p, x: x @ p["w"] + p["shift"], params, x)
    close(kernel[:, 0, :, 0], x @ x.T)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "batch_size"), [("layerwise", 2), ("vector_product", None)])
def test_under_jit_and_vmap(method, batch_size):
    apply_fn, params, x = conv_channels_first()
    options = {"method": method, "batch_size": batch_size}

    def kernel(params, x):
        return empirical_ntk(apply_fn, params, x, **options)

    wanted = kernel(params, x)
    close(jax.jit(kernel)(params, x), wanted)
    stacked = jnp.stack([x[:3], x[2:]])
    both = jax.vmap(kernel, (None, 0))(params, stacked)
    close(both[1], wanted[2:, :, 2:])


@pytest.mark.parametrize("batch_size", [None, 2])
def test_float64_sums_without_the_global_switch(batch_size):
    apply_fn, params, x = conv_channels_first()
    params, x = jax.tree.map(lambda a: a.astype(jnp.float32), (params, x))
    with jax.enable_x64(False):
        narrow, wide = (
            gram.kernel_of(apply_fn, params, x, batch_size=batch_size, sums=sums)
            for sums in ("float32", "float64")
        )
    assert narrow.dtype == jnp.float32
    assert wide.dtype == jnp.float64
    # The float32 features err by some 1e-7 in either case.
    close(wide, narrow.astype(jnp.float64), 1e-5)
    # In float64 the Gram matrix of float32 gradients is positive semi-definite to float64 rounding.
    values = np.linalg.eigvalsh(np.asarray(wide).reshape(15, 15))
    assert values[0] > -1e-14 * values[-1]


def test_the_plan_is_kept_and_explains_itself():
    apply_fn, params, x = conv_channels_first()
    plan = ntk_plan(apply_fn, params, x)
    assert plan.bytes >= plan.kernel_bytes
    assert "fewest operations" in str(plan)
    assert plan.flops[plan.method] == min(plan.flops.values())
    bounded = ntk_plan(apply_fn, params, x, max_bytes=plan.bytes // 2)
    assert bounded.bytes <= plan.bytes // 2
    assert bounded.rows < plan.rows or bounded.chunk < plan.chunk
    close(
        empirical_ntk(apply_fn, params, x, max_bytes=plan.bytes // 2),
        oracles.kernel(apply_fn, params, x),
    )


def test_a_bound_that_cannot_be_kept_names_a_sketch_that_fits():
    apply_fn, params, x = mlp()
    x = jnp.tile(x, (40, 1))
    bound = ntk_plan(apply_fn, params, x).kernel_bytes // 2
    with pytest.raises(ValueError, match=r"with dim=\d+: .*ntk_operator") as caught:
        empirical_ntk(apply_fn, params, x, max_bytes=bound)
    dim = int(str(caught.value).split("dim=")[1].split(":")[0])
    sketch = sketch_jacobian(apply_fn, params, x, key=jax.random.key(0), dim=dim)
    # The widest power of two of which two copies and one sample's work (few bytes here) fit.
    assert 2 * sketch.nbytes < bound < 4 * sketch.nbytes + 10_000
    with pytest.raises(ValueError, match="is too little") as caught:  # no sketch does either
        ntk_plan(apply_fn, params, x, max_bytes=1000)
    assert "dim=" not in str(caught.value)


def _bad(error, match, **changes):
    return pytest.param(changes, error, match, id=match)


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        _bad(ValueError, "output='rows' is not known", output="rows"),
        _bad(ValueError, "method='fast' is not known", method="fast"),
        _bad(ValueError, "batch_size must be", batch_size=0),
        _bad(ValueError, "x1 must be", x1=jnp.zeros((0, 4))),
        _bad(ValueError, "x1 must be", x1=jnp.array(1.0)),
        _bad(ValueError, "x2 must look like x1", x2=jnp.zeros((2, 3))),
        _bad(ValueError, "trainable leaves no", trainable=lambda path: False),
        _bad(ValueError, "trainable must", trainable=[True]),
        _bad(ValueError, "trainable must hold True or False", trainable=0.5),
        _bad(ValueError, "must return outputs", apply_fn=lambda p, x: (x @ p[0]["w"])[:, 0]),
        _bad(ValueError, "does not hold batch_size", batch_size=4, max_bytes=10),
    ],
)
def test_bad_input(changes, error, match):
    apply_fn, params, x = mlp()
    arguments = {"apply_fn": apply_fn, "params": params, "x1": x, **changes}
    with pytest.raises(error, match=match):
        empirical_ntk(**arguments)


@pytest.mark.parametrize("other", [None, 3])
def test_progress_counts_pairs_of_samples(other):
    apply_fn, params, x = mlp()
    seen = []
    x2 = None if other is None else x[:other]
    tiled = empirical_ntk(
        apply_fn, params, x, x2, batch_size=2, progress=lambda i, n: seen.append((i, n))
    )
    np.testing.assert_allclose(tiled, empirical_ntk(apply_fn, params, x, x2), rtol=1e-9, atol=1e-12)
    done, total = zip(*seen, strict=True)
    assert len(seen) > 2
    assert len(set(total)) == 1
    assert list(done) == sorted(done)
    assert done[-1] == total[0]


def test_less_memory_than_the_working_space_makes_blocks_smaller(monkeypatch):
    apply_fn, params, x = wide_net(53)
    whole = ntk_plan(apply_fn, params, x)
    room = (whole.bytes + whole.kernel_bytes) // 2
    blocks = []
    monkeypatch.setattr(gram, "room_on", lambda devices: room)
    compute = gram._compute

    def noted(job, plan, *rest):
        blocks.append(plan)
        return compute(job, plan, *rest)

    monkeypatch.setattr(gram, "_compute", noted)
    close(empirical_ntk(apply_fn, params, x), oracles.kernel(apply_fn, params, x))
    assert blocks[0].bytes <= room < whole.bytes
    monkeypatch.setattr(gram, "room_on", lambda devices: whole.kernel_bytes // 2)
    with pytest.raises(ValueError, match=r"too little: output='full' .*output='trace'"):
        empirical_ntk(apply_fn, params, x)


class Device:
    """One with memory of its own, one that counts none, one that cannot say."""

    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


def test_memory_is_the_devices_own_or_the_hosts(monkeypatch):
    gpu, other, cpu = Device({"bytes_limit": 5}), Device({"bytes_limit": 7}), Device(None)
    remote = Device(RuntimeError("not addressable"))
    monkeypatch.setattr(_plan, "host_memory", lambda: {"MemTotal": 2.0})
    assert _plan.room_on([gpu]) == 5
    assert _plan.room_on([gpu, other]) == 12
    assert _plan.room_on([cpu, remote]) == 2 << 30
    monkeypatch.setattr(_plan, "host_memory", dict)
    assert _plan.room_on([gpu]) == 5
    assert _plan.room_on([cpu]) is None
    assert _plan.devices_of([np.ones(1), jnp.ones(1)]) == set(jax.devices()[:1])
