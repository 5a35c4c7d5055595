"""Programs that are compiled quickly: the same numbers, and `jax.jit` where that is called for."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp._core import compile as _jit
from jaxttp._core.compile import is_quick, jit

CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere it is jax.jit")


@pytest.fixture
def ours(monkeypatch):
    """As where nobody chose how programs are compiled; the suite itself does."""
    monkeypatch.setattr(_jit, "_known", [True])
    monkeypatch.setattr(_jit, "_programs", weakref.WeakSet())


def network(weights, x):
    return jax.nn.softmax(jnp.tanh(x @ weights) @ weights.T)


@CPU
def test_the_numbers_are_those_of_jit(ours):
    weights, x = (jax.random.normal(jax.random.key(i), (9, 9)) for i in range(2))
    assert is_quick()
    # Rounding in another order: some hundred operations in float64.
    np.testing.assert_allclose(jit(network)(weights, x), jax.jit(network)(weights, x), rtol=1e-13)
    gradient = jax.grad(lambda w, x: network(w, x)[:, 0].sum())
    np.testing.assert_allclose(
        jit(gradient)(weights, x), jax.jit(gradient)(weights, x), rtol=1e-12, atol=1e-15
    )


def test_the_options_reach_the_compiler(ours, monkeypatch):
    seen = []

    def recorded(fun, compiler_options=None, **options):
        seen.append(compiler_options)
        return fun

    monkeypatch.setattr(jax, "jit", recorded)
    jit(network, static_argnums=())
    assert seen == [None, _jit.QUICKLY, _jit.NEW]
    seen.clear()
    jit(network, has_loops=True)
    assert seen == [None, _jit.NEW, _jit.NEW]


@CPU
def test_programs_of_many_arrays_are_compiled_as_long_ones(ours, monkeypatch):
    chosen = []

    def recorded(fun, compiler_options=None, **options):
        return lambda *args: chosen.append(compiler_options)

    monkeypatch.setattr(jax, "jit", recorded)
    total = jit(lambda leaves: sum(leaves))
    total([jnp.ones(1)] * _jit.MANY)
    total([jnp.ones(1)] * (_jit.MANY + 1))
    assert chosen == [_jit.QUICKLY, _jit.NEW]


def test_options_of_jit_are_kept(ours):
    @jit
    def plain(x):
        return x + 1

    power = jit(lambda x, times, *, more: x**times + more, static_argnums=1, static_argnames="more")
    assert power(3.0, 2, more=1) == 10
    assert plain.__wrapped__(1) == 2
    taken = jnp.ones(4)
    jit(lambda x: x + 1, donate_argnums=0)(taken)
    assert taken.is_deleted()


@CPU
@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.vmap,
        jax.grad,
        lambda f: lambda x: jax.jvp(f, (x,), (x,))[0],
        lambda f: lambda x: jax.linearize(f, x)[0],
        lambda f: lambda x: jax.lax.map(f, x[None]),
        lambda f: lambda x: jax.eval_shape(f, x),
        lambda f: lambda x: jax.make_jaxpr(f)(x),
        jax.checkpoint,
    ],
)
def test_it_can_be_traced(ours, transform):
    inside = []

    @jit
    def double(x):
        return 2 * x

    def traced(x):
        inside.append(is_quick())
        return double(x).sum()

    x = jnp.arange(3.0) if transform is jax.vmap else jnp.asarray(3.0)
    transform(traced)(x)
    assert inside == [False]
    assert is_quick()


@CPU
def test_a_compiler_without_these_options(ours, monkeypatch):
    monkeypatch.setattr(_jit, "QUICKLY", {"xla_cpu_that_never_was": True})
    assert jit(lambda x: 2 * x)(jnp.ones(2)).tolist() == [2.0, 2.0]
    assert _jit._known == [False]


def test_what_fails_inside_is_told(ours):
    def fail(x):
        raise ValueError("of the network")

    with pytest.raises(ValueError, match="of the network"):
        jit(fail)(1.0)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", True),
        ("--xla_force_host_platform_device_count=4", True),
        ("--xla_backend_optimization_level=0", False),
        ("--xla_cpu_use_fusion_emitters=true", False),
    ],
)
def test_flags_of_a_user_stay(monkeypatch, flags, wanted):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(_jit, "_known", [])
    chosen = jax.config.values.get("jax_disable_most_optimizations", False)  # by the suite
    assert is_quick() is (wanted and not chosen)


def test_other_backends_compile_as_they_do(ours, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not is_quick()
