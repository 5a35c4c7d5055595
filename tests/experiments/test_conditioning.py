"""The figures on conditioning: all of them run small, and what they are made of is right."""

import itertools

import jax
import numpy as np
import pytest

from experiments.conditioning import (
    convolution,
    counterexamples,
    depth,
    fine_tuning,
    inputs,
)
from jaxttp import conditioning
from jaxttp.conditioning import sweep

# --- reference rows -------------------------------------------------------------------------------

ROWS = [
    # hidden width, weight matrices, kappa, its deviation over three draws, convex bound
    (500, 2, 6.90, 0.26, 6.90),
    (500, 6, 52.3, 1.7, 79.6),
    (1000, 4, 10.6, 0.4, 13.8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "layers", "kappa", "deviation", "bound"), ROWS)
def test_reference_rows(hidden, layers, kappa, deviation, bound):
    """d = 196, k = 10, Sigma = I, three draws: two means of three differ by 4 deviations at most.

    The deviation of a mean of three is 0.58 of one, that of a difference 0.82; the bound varies
    with kappa.
    """
    found = sweep("depth", (layers,), inputs=196, outputs=10, width=hidden, key=jax.random.key(0))
    assert abs(found.condition.mean() - kappa) < 4 * 0.82 * deviation
    assert abs(found.bound.mean() / bound - 1) < 4 * 0.82 * max(deviation / kappa, 0.05)
    if layers == 2:
        np.testing.assert_allclose(found.condition, found.bound, rtol=1e-6)
    assert np.all(found.condition <= found.bound * (1 + 1e-6))


# --- data -----------------------------------------------------------------------------------------


def test_inputs_are_whitened_and_centred():
    found = inputs.load_inputs("digits", 300, side=4)
    np.testing.assert_allclose(found.x.mean(axis=0), 0, atol=1e-10)
    np.testing.assert_allclose(found.covariance, np.eye(16), atol=1e-8)
    plain = inputs.load_inputs("digits", 300, side=4, whiten=False)
    np.testing.assert_array_equal(plain.labels, found.labels)
    blocks = plain.images.reshape(300, 16) - plain.images.reshape(300, 16).mean(axis=0)
    np.testing.assert_allclose(plain.x, blocks)


def test_downsampling_averages_blocks():
    image = np.arange(16.0).reshape(1, 4, 4, 1)
    np.testing.assert_array_equal(
        inputs.downsample(image, (2, 2))[0, :, :, 0], [[2.5, 4.5], [10.5, 12.5]]
    )
    with pytest.raises(ValueError, match="does not divide"):
        inputs.downsample(image, (3, 2))


def test_patches_are_natural_images():
    found = inputs.load_inputs("patches", 400, whiten=False, seed=1)
    assert found.images.shape == (400, 8, 8, 3)
    assert found.labels is None
    assert 0 <= found.images.min() < found.images.max() <= 1
    values = np.linalg.eigvalsh(found.covariance)[::-1]
    assert values[0] > 0.4 * values.sum()  # the mean brightness varies most
    again = inputs.load_inputs("patches", 400, whiten=False, seed=1)
    np.testing.assert_array_equal(found.x, again.x)


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"name": "cats"}, "name='cats'"), ({"samples": 10**6}, "samples"), ({"side": 3}, "divide")],
)
def test_bad_inputs_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        inputs.load_inputs(**({"name": "digits"} | changes))


# --- pieces of the figures ------------------------------------------------------------------------


def test_convolution_is_the_exact_gauss_newton_matrix():
    filters = convolution.draw((2, 1), 2, jax.random.key(0))
    kappa, rank = convolution.kappa(filters, 4)
    exact = conditioning.condition_number(conditioning.gauss_newton_convolution(filters, (4, 4)))
    np.testing.assert_allclose(kappa, float(exact.value), rtol=1e-8)  # eigenvalues at kappa ~ 1e2
    assert rank == int(exact.rank) == 9  # the 3 x 3 filter that both layers make


def test_toeplitz_matrices_as_free_weights_by_brute_force():
    filters = convolution.draw((2, 1), 2, jax.random.key(1))
    first, second = (np.asarray(w) for w in filters)
    total = []
    for weight, side in ((first, 4), (second, 3)):
        out, channels = weight.shape[:2]
        rows = np.zeros((out, side - 1, side - 1, channels, side, side))
        for o, i, j, c, a, b in itertools.product(
            range(out), range(side - 1), range(side - 1), range(channels), range(2), range(2)
        ):
            rows[o, i, j, c, i + a, j + b] = weight[o, c, a, b]
        total.append(rows.reshape(out * (side - 1) ** 2, channels * side**2))
    a, b = total
    matrix = np.kron(b @ b.T, np.eye(16)) + np.kron(np.eye(4), a.T @ a)
    values = np.linalg.eigvalsh(matrix)
    positive = values[values > 64 * 2e-16 * values[-1]]
    kappa, rank = convolution.unshared_kappa(filters, 4)
    np.testing.assert_allclose(kappa, positive[-1] / positive[0], rtol=1e-8)
    assert rank == len(positive)


def test_gamma_is_in_the_gauss_newton_matrix():
    rng = np.random.default_rng(0)
    v, x = rng.standard_normal((5, 3)), rng.standard_normal((3, 4))
    full = np.asarray(conditioning.leaky_relu_gram(np.zeros((2, 5)), v, x, 0.3))
    np.testing.assert_allclose(
        full, np.kron(counterexamples.gamma(v, x, 0.3), np.eye(2)), atol=1e-12
    )


def test_growth_with_depth_is_a_power():
    values = (2, 4, 8)
    table = 1 + 3 * np.array(values, float)[:, None] ** 2 * np.ones((1, 2))
    one = conditioning.ConditionSweep("depth", values, table, table, table)
    assert depth.exponent(one) == pytest.approx(2.0)


@pytest.mark.slow
def test_condition_of_the_head_by_brute_force():
    """All ways to fine-tune start from one function; the head's kappa is that of its Jacobian."""
    settings = fine_tuning.Settings(classes=(5, 6), per_class=2, ranks=(1,), steps=5)
    x = np.random.default_rng(0).random((4, 8, 8, 1))
    ways = fine_tuning.models(settings, 0)
    assert list(ways) == [("all", 0), ("lora", 1), ("head", 0)]
    outputs = [model.apply_fn(model.params, x) for model in ways.values()]
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-5)  # float32 weights
    np.testing.assert_allclose(outputs[2], outputs[0], atol=1e-5)
    head = ways["head", 0]
    jacobian = jax.jit(jax.jacrev(lambda w: head.apply_fn(w, x)))(head.params)
    flat = np.concatenate([np.reshape(j, (8, -1)) for j in jax.tree.leaves(jacobian)], axis=1)
    values = np.linalg.svd(flat.astype(np.float64), compute_uv=False) ** 2 / 4
    row = fine_tuning._row(head, "head", 0, x, np.array([0, 1, 0, 1]), settings)
    np.testing.assert_allclose(row.eigenvalues, values[: len(row.eigenvalues)], rtol=1e-3)
    assert row.label == "head"
    assert row.size == 8
