"""jit, vmap and derivatives of every public function of arrays, and the precision of its numbers.

Generated from the valid calls of `tests.public_calls`: their floating-point arrays move,
all else stays. A function is in one of the tables below or is tested; what looks at values refuses
tracers by name, which `tests.test_bad_inputs` holds.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.public_calls import calls, functions

REFUSES = {
    "compare", "early_stopping", "predict_training_time", "race",
    "race_starts", "sweep",
    "time_step", "train", "wall_clock", "weighted", "forecast.stale_gradient_forecast",
    "dynamics.relinearized_recursion",
    "forecast.sweep_kernel", "ntk_plan", "from_nnx",
}  # fmt: skip
"""Answers are made of Python's numbers, or of functions, or are about shapes alone."""
KINKED = {
    "training_time": "a whole number",
    "conditioning.magnitude_masks": "zeros and ones",
    "losses.misclassified": "a fraction of samples", "losses.wrong_bits": "a fraction of bits",
    "losses.encode_targets": "made of labels alone",
    "ntk.eigendecomposition": "vectors of eigenvalues that differ by little",
    "ntk.spectral_density": "a loop until it converged: forward mode alone",
    "dynamics.two_factor_flow": "by the solver of gradient_flow",
    "ntk.extreme_eigenvalues": "a loop until it converged: forward mode alone",
    
    "representation.alpha_req": "the range of a fit",
    "representation.representation_geometry": "the range of a fit",
    "dynamics.diffusion": "random paths",
}  # fmt: skip
"""Not differentiated, and why."""
SLOW = {
    "dynamics.diffusion", "dynamics.gradient_flow",
    "dynamics.two_factor_flow",
    "gauss_newton.forecast_steps", "gauss_newton.revmlp_kernel",
    "conditioning.gauss_newton_convolution", "conditioning.linear_point",
    "conditioning.batch_norm_scales", "class_sketch",
    "dynamics.diagonal_noise", "dynamics.weight_space", "dynamics.two_factor_observables",
    "dynamics.two_factor_descent", "ntk.class_separation",
    "ntk.spectral_density", "ntk.extreme_eigenvalues",
    "representation.kernel_rate", "representation.cka_table",
    "representation.representation_geometry",
    "losses.unexplained_variance",
}  # fmt: skip
"""What compiles long."""
DRAWN = np.random.default_rng(0)
LAYERS = {"filters": [DRAWN.normal(size=(2, 1, 2, 2)), DRAWN.normal(size=(2, 2, 2, 2))]}
LEAKY = {name: DRAWN.normal(size=size) for name, size in (("W", (2, 12)), ("V", (12, 3)),
                                                          ("X", (3, 2)))}  # fmt: skip
CHANGED = {
    # of one layer the matrix does not depend on the weights, and the bound is infinite
    "conditioning.gauss_newton_convolution": LAYERS,
    "conditioning.leaky_relu_bound": LEAKY,
}  # fmt: skip


def moves(value):
    """Whether an argument is made of floating-point arrays."""
    found = jax.tree.leaves(value)
    return bool(found) and all(
        isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating)
        for leaf in found
    )


def in_dtype(tree, dtype):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


@functools.cache
def given(name):
    """What moves and what stays, of a call in float64."""
    arguments = calls()[name] | CHANGED.get(name, {})
    moving = {key: value for key, value in arguments.items() if moves(value) and key != "ts"}
    return in_dtype(moving, jnp.float64), {k: v for k, v in arguments.items() if k not in moving}


def numbers(name, moving):
    """All arrays of an answer; of an operator its product with ones."""
    function, fixed = functions()[name], given(name)[1]
    answer = function(**fixed, **moving)
    if callable(getattr(answer, "mv", None)):
        ones = jax.tree.map(lambda one: jnp.ones(one.shape, one.dtype), answer.in_structure())
        answer = answer.mv(ones)
    found = [leaf for leaf in jax.tree.leaves(answer) if isinstance(leaf, jax.Array)]
    return [one for one in found if not jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key)]


NAMES = sorted(
    name for name, arguments in calls().items()
    if not name.startswith(("data.", "models."))  # files, modules, and data sets
    and name not in REFUSES and any(map(moves, arguments.values()))
)  # fmt: skip
EVERY = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in NAMES]


def near(got, wanted, fraction):
    """Each array to a fraction of its largest number."""
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        other = np.asarray(other, float)
        size = np.max(np.abs(other[np.isfinite(other)]), initial=1e-3)
        np.testing.assert_allclose(np.asarray(one, float), other, rtol=0, atol=fraction * size)


def direction(leaf, seed):
    """A random change; symmetric for what is symmetric, as matrices and kernels have to stay."""
    change = np.random.default_rng(seed).normal(size=leaf.shape) * np.max(np.abs(leaf))
    for axes in ((*range(leaf.ndim // 2, leaf.ndim), *range(leaf.ndim // 2)), (0, 2, 1)):
        fits = len(axes) == leaf.ndim and leaf.transpose(axes).shape == leaf.shape
        if leaf.ndim > 1 and fits and np.array_equal(leaf.transpose(axes), leaf):
            change = change + change.transpose(axes)
    return jnp.asarray(change)


def weighted(found, like):
    """A number that all floating-point arrays of an answer enter."""
    return sum(
        jnp.vdot(jnp.asarray(np.random.default_rng(i).normal(size=one.shape)), one)
        for i, (one, is_so) in enumerate(zip(found, like, strict=True))
        if jnp.issubdtype(one.dtype, jnp.floating) and is_so
    )


STEP = 1e-6
"""Of the largest number: central differences are off by its square, and by 1e-16 / STEP."""


@pytest.mark.parametrize("name", EVERY)
def test_jit_and_vmap_are_eager_and_the_gradient_a_difference(name):
    """Compiled programs sum in another order, so to 1e-9; differences are good to 1e-6."""
    moving = given(name)[0]
    call = functools.partial(numbers, name)
    leaves, tree = jax.tree.flatten(moving)
    ways = tree.unflatten([direction(np.asarray(leaf), i) for i, leaf in enumerate(leaves)])
    eager = call(moving)
    points = [
        jax.tree.map(lambda a, d, s=s: a + s * STEP * d, moving, ways) for s in (0.0, -1.0, 1.0)
    ]
    batch = jax.tree.map(lambda *rows: jnp.stack(rows), *points)
    rows = jax.jit(jax.vmap(call))(batch)
    near([one[0] for one in rows], eager, 1e-9)
    if name in KINKED:
        return
    smooth = [bool(np.all(np.isfinite(one))) for one in eager]

    def value(moving):
        return weighted(call(moving), smooth)

    slope = jax.jit(jax.grad(value))(moving)
    got = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, slope, ways)))
    sums = [weighted([one[i] for one in rows], smooth) for i in (1, 2)]
    size = sum(float(jnp.sum(jnp.abs(one[0]))) for one, is_so in zip(rows, smooth, strict=True)
               if is_so)  # fmt: skip
    np.testing.assert_allclose(got, (sums[1] - sums[0]) / (2 * STEP), rtol=1e-4, atol=1e-5 * size)
    assert any(np.any(np.asarray(one) != 0) for one in jax.tree.leaves(slope))


RANDOM = {
    "class_sketch", "sketch_jacobian", "dynamics.diffusion", "dynamics.balanced_features",
}  # fmt: skip
"""Draws differ between precisions."""
SMALL = {"ntk.extreme_eigenvalues", "ntk.eigendecomposition", "ntk.spectral_density"}
"""Small eigenvalues, residuals, and estimates of errors, which rounding makes."""
OWN = {
    "gauss_newton.revmlp_forward", "gauss_newton.revmlp_inverse", 
    "gauss_newton.gauss_newton_direction",
    "gauss_newton.revmlp_kernel", "sketch_jacobian", "ntk_operator", "conditioning.apply_masks",
    "losses.encode_targets",
    
}  # fmt: skip
"""Half precision in, half precision out: networks compute as their parameters are."""
SUMMED = {
    "empirical_ntk", "class_sketch", "dynamics.diagonal_noise",
}  # fmt: skip
"""Networks in half precision, whose products are summed in more."""
PROMOTED = {
    "training_time", "conditioning.linear_bound", "dynamics.recursion", "dynamics.closed_form",
    "gauss_newton.output_change", "ntk.eigendecomposition", "representation.rankme",
}  # fmt: skip
"""Of every package one or two that compute in float32, whatever is narrower."""
WIDE = ("conditioning.", "representation.")
"""Float64, whatever is given."""


def floating(found):
    return [one for one in found if jnp.issubdtype(one.dtype, jnp.floating)]


def narrow(name, *dtypes):
    """The floating-point arrays of an answer, with arguments cast, without x64."""
    with jax.enable_x64(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is promoted is said, see below
        moving = calls()[name] | CHANGED.get(name, {})
        moving = {key: moving[key] for key in given(name)[0]}
        for dtype in dtypes:
            moving = in_dtype(moving, dtype)
        return floating(numbers(name, moving))


@pytest.mark.parametrize("name", EVERY)
def test_precision_is_what_the_documentation_says(name):
    """docs/guides/devices.md; float32 has 7 digits, of which no more than four are lost here."""
    wide, single = floating(numbers(name, given(name)[0])), narrow(name, jnp.float32)
    expected = jnp.float64 if name.startswith(WIDE) and name not in OWN else jnp.float32
    assert all(one.dtype in (expected, jnp.float64) for one in single)
    assert all(one.dtype == jnp.float64 for one in wide)
    if name not in RANDOM | SMALL:
        near(single, wide, 1e-3)
    if name not in OWN | SUMMED | PROMOTED:
        return
    half = jnp.bfloat16
    got, wanted = narrow(name, half), narrow(name, half, jnp.float32)
    if name in OWN:
        assert any(one.dtype == half for one in got) or not got
    else:
        assert [one.dtype for one in got] == [one.dtype for one in wanted]
    if name not in OWN | SUMMED:
        near(got, wanted, 0.0)
    elif name in SUMMED:
        near(got, wanted, 0.02)  # 8 bits of every factor
