"""`experiments.bench.precision`: what is relied on is float32 on every device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import precision
from experiments.bench.precision import ROUNDED, ROUNDING, differences, main, rounded_products
from jaxttp._core.compile import full_precision

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="a CPU is made to round its products"
)
# One for each way in which the library asks for precision; all 171 take minutes (`main`).
SOME = [
    "empirical_ntk", "gauss_newton.gauss_newton_direction", "gauss_newton.apply_pseudoinverse",
    "gauss_newton.revmlp_inverse", "gauss_newton.revmlp_kernel",
    "ntk.label_alignment", "ntk.class_separation", "ntk.sketch_error", "dynamics.recursion",
    "dynamics.weight_space", "dynamics.diagonal_noise",
]  # fmt: skip


@pytest.fixture(autouse=True)
def as_users_run():
    with jax.enable_x64(False):
        yield


def test_what_is_relied_on_does_not_depend_on_the_device():
    found = differences(SOME)
    assert [*found] == SOME
    assert max(found.values()) < ROUNDING, found


def test_products_are_rounded_as_tf32_unless_somebody_asks():
    """Against NumPy: operands cut to eleven bits, their product in float32."""
    draw = np.random.default_rng(0)
    a, b = (draw.normal(size=(30, 30)).astype(np.float32) for _ in range(2))
    ulp = 2.0 ** (np.floor(np.log2(np.abs([a, b]))) - 10)
    cut = np.round(np.stack([a, b]) / ulp) * ulp
    known, whole = cut[0].astype(np.float64) @ cut[1], a.astype(np.float64) @ b
    size = np.max(np.abs(whole))
    assert np.max(np.abs(known - whole)) > 1e-4 * size
    image, filters = a.reshape(1, 30, 30), b.reshape(1, 30, 30)
    with rounded_products():
        np.testing.assert_allclose(jnp.matmul(a, b), known, atol=1e-6 * size)
        np.testing.assert_allclose(
            jax.jit(full_precision(jnp.matmul))(a, b), whole, atol=1e-6 * size
        )
        # A convolution with windows of one is the same product.
        found = jax.lax.conv_general_dilated(
            image, filters, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        )
        np.testing.assert_allclose(found[0], known, atol=1e-6 * size)
    np.testing.assert_allclose(jnp.matmul(a, b), whole, atol=1e-6 * size)


def test_gradients_of_a_reversible_network_are_whole_where_they_are_taken_later():
    """Its rules of differentiation run outside of the call that asked for precision."""
    from jaxttp.gauss_newton import revmlp_forward

    draw = np.random.default_rng(1)
    w = jnp.asarray(0.3 * draw.normal(size=(2, 2, 5, 16)), jnp.float32)
    v = jnp.asarray(draw.normal(size=(2, 2, 16, 5)), jnp.float32)
    x = jnp.asarray(draw.normal(size=(7, 10)), jnp.float32)

    def slope(reversible):
        value = lambda w: jnp.sum(revmlp_forward(w, v, x, reversible=reversible) ** 2)  # noqa: E731
        return np.asarray(jax.grad(value)(w))

    plain = slope(False)
    with rounded_products():
        for reversible in (True, False):
            np.testing.assert_allclose(slope(reversible), plain, atol=1e-5 * np.max(np.abs(plain)))


def test_what_depends_on_it_is_found_out(monkeypatch, capsys):
    rounding = lambda a: a @ a  # noqa: E731
    training = lambda a: 2 * a @ a  # noqa: E731
    given = {"a": jnp.asarray(np.random.default_rng(0).normal(size=(20, 20)), jnp.float32)}
    known = {"rounding": rounding, "train": training, "whole": full_precision(rounding)}
    monkeypatch.setattr(precision, "functions", lambda: known)
    monkeypatch.setattr(precision, "calls", lambda: dict.fromkeys(known, given))
    assert main([]) == 1
    out = capsys.readouterr().out
    assert "rounding: NOT EXPECTED" in out
    assert f"train: {ROUNDED['train']}" in out
    assert "whole:" not in out
    assert "3 functions, 1 that" in out
    assert main(["whole", "train"]) == 0


def test_other_shapes_are_infinitely_far():
    assert precision.difference(np.ones(3), np.ones(2)) == np.inf
    assert precision.difference([np.ones(3), np.nan], [np.full(3, 1.5), 2.0]) == 0.5
