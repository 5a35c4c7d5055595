"""What is relied on is float32 on every device: products never fall back to a GPU's TF32."""

import contextlib
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.lax import convolution
from jax._src.lax import lax as products
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo

from tests.public_calls import calls, functions

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="a CPU is made to round its products"
)
MANTISSA = 10
ROUNDING = 1e-5
"""Some hundred roundings of float32; TF32 makes 1e-4 to 1e-3."""
# One for each way in which the library asks for precision; all of them take minutes.
SOME = [
    "empirical_ntk", "gauss_newton.gauss_newton_direction", "gauss_newton.revmlp_kernel",
    "ntk.label_alignment", "ntk.class_separation", "dynamics.recursion",
    "dynamics.diagonal_noise",
]  # fmt: skip


@contextlib.contextmanager
def rounded_products():
    """Within it a CPU computes float32 products as an NVIDIA GPU does by default."""
    primitives = (products.dot_general_p, convolution.conv_general_dilated_p)
    rules = mlir._platform_specific_lowerings["cpu"]
    before = {primitive: rules[primitive].rule for primitive in primitives}

    def to_tf32(value, kind):
        if kind.dtype != np.float32:
            return value
        bits = ir.IntegerType.get_signless(32)
        sizes = (ir.IntegerAttr.get(bits, size) for size in (8, MANTISSA))
        return hlo.reduce_precision(value, *sizes)

    def rounded(rule, ctx, left, right, **params):
        precision = params["precision"]
        both = precision if isinstance(precision, tuple) else (precision,)
        if all(one in (None, jax.lax.Precision.DEFAULT) for one in both):
            left, right = map(to_tf32, (left, right), ctx.avals_in[:2])
        return rule(ctx, left, right, **params)

    try:
        for primitive, rule in before.items():
            mlir.register_lowering(primitive, functools.partial(rounded, rule), platform="cpu")
        jax.clear_caches()
        yield
    finally:
        for primitive, rule in before.items():
            mlir.register_lowering(primitive, rule, platform="cpu")
        jax.clear_caches()


def test_products_are_rounded_as_tf32_unless_somebody_asks():
    """Against NumPy: operands cut to eleven bits, their product in float32."""
    a, b = np.random.default_rng(0).normal(size=(2, 30, 30)).astype(np.float32)
    ulp = 2.0 ** (np.floor(np.log2(np.abs([a, b]))) - MANTISSA)
    cut = np.round(np.stack([a, b]) / ulp) * ulp
    known, whole = cut[0].astype(np.float64) @ cut[1], a.astype(np.float64) @ b
    size = np.max(np.abs(whole))
    assert np.max(np.abs(known - whole)) > 1e-4 * size
    with rounded_products():
        np.testing.assert_allclose(jnp.matmul(a, b), known, atol=1e-6 * size)
        asked = jnp.matmul(a, b, precision="highest")
        np.testing.assert_allclose(asked, whole, atol=1e-6 * size)


def test_public_functions_do_not_depend_on_the_device():
    def numbers(name):
        found = jax.tree.leaves(functions()[name](**calls()[name]))
        found = [one.as_matrix() if hasattr(one, "as_matrix") else one for one in found]
        return [
            np.asarray(one, np.float64) for one in found if jnp.issubdtype(one.dtype, jnp.floating)
        ]

    with jax.enable_x64(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = {name: numbers(name) for name in SOME}
        with rounded_products():
            tf32 = {name: numbers(name) for name in SOME}
    for name in SOME:
        for one, other in zip(plain[name], tf32[name], strict=True):
            size = np.max(np.abs(one), initial=1e-30)
            assert np.max(np.abs(one - other), initial=0.0) < ROUNDING * size, name


def test_gradients_of_a_reversible_network_are_whole_where_they_are_taken_later():
    """Its rules of differentiation run outside of the call that asked for precision."""
    from jaxttp.gauss_newton import revmlp_forward

    draw = np.random.default_rng(1)
    shapes = ((2, 2, 5, 16), (2, 2, 16, 5), (7, 10))
    w, v, x = (jnp.asarray(0.5 * draw.normal(size=shape), jnp.float32) for shape in shapes)

    def slope(reversible):
        value = lambda w: jnp.sum(revmlp_forward(w, v, x, reversible=reversible) ** 2)  # noqa: E731
        return np.asarray(jax.grad(value)(w))

    with jax.enable_x64(False):
        plain = slope(False)
        with rounded_products():
            for reversible in (True, False):
                found = slope(reversible)
                np.testing.assert_allclose(found, plain, atol=1e-5 * np.max(np.abs(plain)))
