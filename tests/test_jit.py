"""Programs that are compiled quickly: the same numbers, and `jax.jit` where that is called for."""

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
    monkeypatch.setattr(_jit, "_unknown_options", [])
    monkeypatch.setattr(_jit, "_users_chose", lambda: False)


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


@CPU
@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        jax.vmap,
        jax.grad,
        lambda f: lambda x: jax.jvp(f, (x,), (x,))[0],
        lambda f: lambda x: jax.make_jaxpr(f)(x),
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
    monkeypatch.setattr(_jit, "SHORT", {"xla_cpu_that_never_was": True})
    assert jit(lambda x: 2 * x)(jnp.ones(2)).tolist() == [2.0, 2.0]
    assert not is_quick()


def test_what_fails_inside_is_told(ours):
    def fail(x):
        raise ValueError("of the network")

    with pytest.raises(ValueError, match="of the network"):
        jit(fail)(1.0)


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ("--xla_force_host_platform_device_count=4", False),
        ("--xla_backend_optimization_level=0", True),
        ("--xla_cpu_use_fusion_emitters=true", True),
    ],
)
def test_flags_of_a_user_stay(monkeypatch, flags, chosen):
    monkeypatch.setenv("XLA_FLAGS", flags)
    by_the_suite = jax.config.values.get("jax_disable_most_optimizations", False)
    assert _jit._users_chose() is (chosen or by_the_suite)


def test_other_backends_compile_as_they_do(ours, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not is_quick()


def test_programs_are_dropped_before_the_process_may_map_no_more_memory(monkeypatch):
    texts = {"max_map_count": "10\n", "maps": "one\n" * 4}
    monkeypatch.setattr(_jit.Path, "read_text", lambda path: texts[path.name])
    monkeypatch.setattr(_jit.Path, "read_bytes", lambda path: texts[path.name].encode())
    dropped = []
    monkeypatch.setattr(_jit, "give_back", lambda: dropped.append(1))
    double = jax.jit(lambda x: 2 * x)
    monkeypatch.setattr(_jit, "_compiled", [double])
    double(1.0)
    _jit.bound_programs()  # 4 of 10
    assert (double._cache_size(), dropped) == (1, [])
    texts["maps"] += "one\n"
    _jit.bound_programs()
    assert (double._cache_size(), dropped) == (0, [1])
