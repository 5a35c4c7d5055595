"""Losses of outputs against NumPy formulas written out, and the encoding of every form of target.

Tolerances: both sides are the same smooth formula in float64, so they agree to rounding; rtol and
atol 1e-12 leave room for sums in another order.
"""

import dataclasses
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import losses
from jaxttp.losses import Loss, cross_entropy, encode_targets, get_loss

NAMES = ["cross_entropy", "squared_error", "binary_cross_entropy"]
SHAPE = (5, 3)


def assert_close(left, right):
    np.testing.assert_allclose(left, right, rtol=1e-12, atol=1e-12)


# --- value, gradient, Hessian ---------------------------------------------------------------------


def softmax(f):
    e = np.exp(f - f.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def sigmoid(f):
    return 1 / (1 + np.exp(-f))


def value_by_hand(name, f, y):
    if name == "cross_entropy":
        return -np.sum(y * np.log(softmax(f))) / len(f)
    if name == "squared_error":
        return np.sum((f - y) ** 2) / (2 * len(f))
    return -np.sum(y * np.log(sigmoid(f)) + (1 - y) * np.log(sigmoid(-f))) / len(f)


def gradient_by_hand(name, f, y):
    if name == "squared_error":
        return f - y
    return (softmax if name == "cross_entropy" else sigmoid)(f) - y


def hessian_by_hand(name, f):
    n, c = f.shape
    out = np.zeros((n, c, c))
    for i in range(n):
        if name == "cross_entropy":
            p = softmax(f[i : i + 1])[0]
            out[i] = np.diag(p) - np.outer(p, p)
        elif name == "squared_error":
            out[i] = np.eye(c)
        else:
            p = sigmoid(f[i])
            out[i] = np.diag(p * (1 - p))
    return out


def problem(name, shape, seed=0):
    """Outputs of size 3 and soft targets: probabilities, or for regression any numbers."""
    rng = np.random.default_rng(seed)
    f = 3 * rng.normal(size=shape)
    if name == "cross_entropy":
        return f, rng.dirichlet(np.ones(shape[1]), size=shape[0])
    if name == "squared_error":
        return f, rng.normal(size=shape)
    return f, rng.uniform(size=shape)


@pytest.mark.parametrize("name", NAMES)
def test_value_gradient_hessian_and_products_with_it(name):
    """The loss is the mean over samples, the derivatives those of a single sample."""
    (f, y), loss = problem(name, SHAPE), get_loss(name)
    outputs, targets = jnp.asarray(f), jnp.asarray(y)
    assert_close(loss.value(outputs, targets), value_by_hand(name, f, y))
    assert_close(loss.gradient(outputs, targets), gradient_by_hand(name, f, y))
    hessian = hessian_by_hand(name, f)
    assert_close(loss.hessian(outputs, targets), hessian)
    v = np.random.default_rng(1).normal(size=SHAPE)
    product = loss.hessian_vector_product(outputs, targets, jnp.asarray(v))
    assert_close(product, np.einsum("nab,nb->na", hessian, v))


@pytest.mark.parametrize("name", ["cross_entropy", "binary_cross_entropy"])
def test_outputs_of_any_size_give_finite_losses(name):
    """The naive formulas overflow at 710: log(exp(1000))."""
    f, y = jnp.array([[1000.0, -1000.0]]), jnp.array([[0.0, 1.0]])
    loss = get_loss(name)
    assert loss.value(f, y) == 2000  # both losses are 2000 + log(1 + exp(-2000)) or the like
    assert_close(loss.gradient(f, y), [[1.0, -1.0]])
    assert_close(loss.hessian(f, y), np.zeros((1, 2, 2)))


# --- errors ---------------------------------------------------------------------------------------


def test_misclassified_counts_samples():
    f = jnp.array([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 0.0, -1.0], [1.0, 0.0, 2.0]])
    y = jnp.eye(3)[jnp.array([0, 2, 0, 2])]
    # Only row 1 is wrong; of the equal outputs in row 2 the first counts.
    assert losses.misclassified(f, y) == 0.25
    assert losses.misclassified(-f, y) == 1


def test_wrong_bits_counts_pairs():
    f = jnp.array([[1.0, -1.0], [-2.0, 0.5]])
    assert losses.wrong_bits(f, jnp.array([[1.0, 0.0], [0.0, 1.0]])) == 0
    assert losses.wrong_bits(f, jnp.array([[1.0, 1.0], [0.0, 0.0]])) == 0.5
    assert losses.wrong_bits(f, jnp.array([[0.0, 1.0], [1.0, 0.0]])) == 1


def test_unexplained_variance_is_one_minus_r_squared():
    rng = np.random.default_rng(0)
    f, y = rng.normal(size=(6, 2)), rng.normal([3.0, -1.0], size=(6, 2))
    residual = sum((f[i, c] - y[i, c]) ** 2 for i in range(6) for c in range(2))
    total = sum(np.var(y[:, c]) * 6 for c in range(2))
    assert_close(losses.unexplained_variance(jnp.asarray(f), jnp.asarray(y)), residual / total)
    assert losses.unexplained_variance(jnp.asarray(y), jnp.asarray(y)) == 0
    mean = np.broadcast_to(y.mean(axis=0), y.shape)
    assert_close(losses.unexplained_variance(jnp.asarray(mean), jnp.asarray(y)), 1.0)


@pytest.mark.parametrize("level", [1.0, 0.1, -0.7, 1e6 / 3])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (7, 2)])
def test_unexplained_variance_of_constant_targets_is_relative_to_their_size(level, shape):
    """The mean of 0.1, 0.1, 0.1 is not 0.1 after rounding: a spread of 1e-34 is none."""
    y = jnp.full(shape, level)
    assert_close(losses.unexplained_variance(jnp.zeros(shape), y), 1.0)
    assert losses.unexplained_variance(y, y) == 0


# --- encode_targets -------------------------------------------------------------------------------


def outputs(n, c, dtype=jnp.float64):
    return jnp.zeros((n, c), dtype)


FORMS = {
    "list": [2, 0],
    "int64": np.array([2, 0]),
    "uint8": np.array([2, 0], np.uint8),
    "int32 of jax": jnp.array([2, 0], jnp.int32),
    "one-hot float32": np.array([[0, 0, 1], [1, 0, 0]], np.float32),
    "one-hot integers": np.array([[0, 0, 1], [1, 0, 0]]),
    "one-hot booleans": np.array([[False, False, True], [True, False, False]]),
    "one-hot of jax": jnp.eye(3)[jnp.array([2, 0])],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_every_form_of_class_target(name, form):
    dtype = jnp.float32
    targets, loss = encode_targets(name, FORMS[form], outputs(2, 3, dtype))
    assert targets.dtype == dtype
    np.testing.assert_array_equal(targets, [[0, 0, 1], [1, 0, 0]])
    assert loss.name == name
    assert loss.sample_loss is get_loss(name).sample_loss


def test_squared_error_counts_misclassified_with_labels_and_variance_with_targets():
    _, with_labels = encode_targets("squared_error", [2, 0], outputs(2, 3))
    assert with_labels.error is losses.misclassified
    targets, with_targets = encode_targets("squared_error", np.eye(3)[:2], outputs(2, 3))
    assert with_targets is losses.squared_error
    # Encoding what was encoded changes nothing: the error stays the one that was chosen.
    again, loss = encode_targets(with_labels, targets, outputs(2, 3))
    np.testing.assert_array_equal(again, targets)
    assert loss == with_labels


def test_regression_targets_of_any_size():
    y = np.array([-3.0, 7.5])
    for form in (y, y[:, None], jnp.asarray(y), y.tolist()):
        targets, loss = encode_targets("squared_error", form, outputs(2, 1))
        np.testing.assert_array_equal(targets, y[:, None])
        assert loss is losses.squared_error
    # Chosen for its error, it is a squared error still: its targets are no probabilities.
    chosen = dataclasses.replace(losses.squared_error, error=losses.misclassified)
    np.testing.assert_array_equal(encode_targets(chosen, y, outputs(2, 1))[0], y[:, None])


@pytest.mark.parametrize("y", [[1, 0], [True, False], [1.0, 0.0], [[1], [0]]])
def test_binary_targets_of_one_output(y):
    targets, loss = encode_targets("binary_cross_entropy", y, outputs(2, 1))
    np.testing.assert_array_equal(targets, [[1.0], [0.0]])
    assert loss is losses.binary_cross_entropy


def test_soft_and_multi_label_targets():
    soft = np.array([[0.2, 0.8], [0.5, 0.5]])
    np.testing.assert_array_equal(encode_targets("cross_entropy", soft, outputs(2, 2))[0], soft)
    several = np.array([[1.0, 1.0], [0.0, 0.25]])
    multi, _ = encode_targets("binary_cross_entropy", several, outputs(2, 2))
    np.testing.assert_array_equal(multi, several)


def test_own_losses_take_any_targets():
    own = Loss("own", lambda f, y: jnp.sum(jnp.cosh(f - y)), losses.unexplained_variance)
    y = np.array([[5.0, -2.0]])
    targets, loss = encode_targets(own, y, outputs(1, 2))
    np.testing.assert_array_equal(targets, y)
    assert loss.value(outputs(1, 2), targets) == own.value(outputs(1, 2), targets)
    np.testing.assert_array_equal(encode_targets(own, [1], outputs(1, 2))[0], [[0.0, 1.0]])


BAD = {
    "label too large": ("cross_entropy", [0, 3], (2, 3), r"labels from 0 to 3, .* 0\.\.2"),
    "label negative": ("squared_error", [-1, 0], (2, 3), r"labels from -1 to 0, .* 3 output"),
    "label too large, binary": ("binary_cross_entropy", [0, 2], (2, 1), r"0 to 2.* 0\.\.1"),
    "too few": ("cross_entropy", [0], (2, 3), r"shape \(1,\) but the network gives 2 rows"),
    "a column": ("squared_error", np.ones((2, 1)), (2, 3), r"\(2, 1\) .*integer labels"),
    "float labels": ("cross_entropy", [0.0, 2.0], (2, 3), r"integer labels \(N,\) or targets"),
    "words": ("cross_entropy", ["cat", "dog"], (2, 3), "floating-point.*got text.*np.unique"),
    "complex": ("squared_error", np.ones((2, 3), complex), (2, 3), "floating-point.*complex128"),
    "ragged": ("cross_entropy", [[0, 1], [1]], (2, 2), "differ in length"),
    "NaN": ("squared_error", [[1.0], [np.nan]], (2, 1), r"1 value\(s\) that are NaN"),
    "negative probability": ("cross_entropy", [[-0.5, 1.5]], (1, 2), r"probabilities, in \[0, 1\]"),
    "beyond 1": ("binary_cross_entropy", [[0.5, 2.0]], (1, 2), "must be probabilities, in"),
    "one output": ("cross_entropy", [0, 1], (2, 1), "with one output is constant"),
}


def test_losses_by_name():
    for name in NAMES:
        assert get_loss(name) is get_loss(get_loss(name)) is getattr(losses, name)
    with pytest.raises(ValueError, match=r"^loss='hinge' is not known; choose one of 'cross_entr"):
        get_loss("hinge")
    with pytest.raises(ValueError, match="Its name here is 'squared_error'"):
        get_loss("MSE")
    with pytest.raises(TypeError, match=r"^loss must be a name \(cross_entropy, .* got 3"):
        inspect.unwrap(get_loss)(3)  # without the type checks that only the tests switch on


@pytest.mark.parametrize("case", BAD)
def test_bad_targets_are_refused(case):
    name, y, shape, message = BAD[case]
    with pytest.raises(ValueError, match=rf"^(y|loss)\b.*{message}"):
        encode_targets(name, y, outputs(*shape))


TRACED = {
    "label too large": ("cross_entropy", jnp.array([0, 3]), (2, 3), r"labels must lie in 0\.\.2"),
    "NaN": ("squared_error", jnp.array([[jnp.nan]]), (1, 1), "y holds NaN or infinity"),
    "probability": ("cross_entropy", jnp.array([[0.3, 0.3]]), (1, 2), "rows that sum to 1"),
}


@pytest.mark.parametrize("case", TRACED)
def test_bad_traced_targets_are_an_error_at_run_time(case):
    name, y, shape, message = TRACED[case]
    # filter_jit, because under jax.jit the same error comes wrapped in a long traceback.
    encode = eqx.filter_jit(lambda y: encode_targets(name, y, outputs(*shape))[0])
    with pytest.raises(RuntimeError, match=message):
        encode(y)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_long_paths_have_the_losses_of_their_points(name, dtype):
    """340 x 100 rows: beyond 32,768 jaxlib 0.10.2 gets some sums wrong (`xla_cpu`).

    The reference sums in float64; 1e-5 is float32's rounding of a mean of 100.
    """
    f = np.random.default_rng(0).normal(size=(340, 100, 3))
    y = np.eye(3)[np.arange(100) % 3]
    loss = get_loss(name)
    found = jax.jit(jax.vmap(lambda one: loss.value(one, jnp.asarray(y, dtype))))(
        jnp.asarray(f, dtype)
    )
    expected = [value_by_hand(name, one, y) for one in f]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_labels_of_few_bits_for_many_classes(dtype):
    """In 8 bits class 256 is class 0: every label would hit two columns."""
    y = np.array([0, 1, 11, 100], dtype)
    targets, _ = encode_targets("cross_entropy", y, jnp.zeros((4, 300)))
    np.testing.assert_array_equal(np.argwhere(targets), np.stack([np.arange(4), y], axis=1))
    traced = jax.jit(lambda y: encode_targets("cross_entropy", y, jnp.zeros((4, 256)))[0])(y)
    np.testing.assert_array_equal(traced, targets[:, :256])


@pytest.mark.parametrize("size", [1.0, 1e4, 1e9, 1e13, 1e17])
def test_a_cross_entropy_of_outputs_however_large_is_a_number(size):
    """XLA may round an output otherwise for the maximum and for what is below it.

    Seen with outputs that a multiplication makes within the same program.
    """
    draw = np.random.default_rng(0).normal(size=(40, 1))
    sides = jnp.asarray([[0.7071067811865476, -0.7071067811865476]], jnp.float32)
    y = jnp.asarray(np.eye(2)[np.arange(40) % 2], jnp.float32)

    @jax.jit
    def of(f):
        return cross_entropy.value(f @ sides, y), cross_entropy.gradient(f @ sides, y)

    value, gradient = of(jnp.asarray(size * draw, jnp.float32))
    wide = size * draw @ np.asarray(sides, np.float64)
    each = np.logaddexp(wide[:, 0], wide[:, 1]) - np.sum(np.asarray(y) * wide, axis=1)
    assert float(value) == pytest.approx(each.mean(), rel=1e-5)
    assert bool(jnp.all(jnp.isfinite(gradient)))
    if size < 1e5:
        with np.errstate(over="ignore"):
            right = 1 / (1 + np.exp(wide[:, ::-1] - wide)) - np.asarray(y)
        np.testing.assert_allclose(gradient, right, atol=3e-3 if size > 1 else 1e-6)


def test_the_gradient_of_a_sure_output_is_none():
    """The sum of exponentials is then one, exactly; no bound on it may take part."""
    f, y = jnp.array([[50.0, 0.0], [0.0, 800.0]]), jnp.eye(2)
    np.testing.assert_array_equal(cross_entropy.gradient(f, 1 - y), [[1.0, -1.0], [-1.0, 1.0]])
    assert np.all(np.abs(cross_entropy.gradient(f, y)) < 1e-20)
