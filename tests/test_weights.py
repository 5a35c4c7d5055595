"""Weights, masks and multi-label targets, in losses: the same float64 sums in another order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import losses, weighted
from jaxttp.losses import Loss, encode_targets
from tests.draws import normal, split

N, C = 9, 3
KEYS = split(3, 6)
X = normal(KEYS[0], (N, 4))
PARAMS = {
    "in": normal(KEYS[1], (4, 14)),
    "out": normal(KEYS[2], (14, C), 1 / 3),
}
LABELS = np.array([0, 1, 2, 0, 1, 0, 0, 2, 1])
BITS = np.asarray(jax.random.bernoulli(KEYS[3], 0.4, (N, C)), float)
REAL = np.asarray(normal(KEYS[4], (N, C)))
WEIGHT = np.array([0.5, 2.0, 0.0, 1.0, 3.0, 0.0, 1.5, 0.2, 1.0])
WEIGHTS = np.asarray(jax.random.uniform(KEYS[5], (N, C))) * (BITS + 0.5)


def apply_fn(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


F0 = np.asarray(apply_fn(PARAMS, X))

CASES = {
    "cross-entropy, samples": ("cross_entropy", LABELS, {"sample_weight": WEIGHT}),
    "cross-entropy, classes": ("cross_entropy", LABELS, {"class_weight": [1.0, 4.0, 0.3]}),
    "squared error, outputs": ("squared_error", REAL, {"sample_weight": WEIGHTS}),
    "multi-label, classes": ("binary_cross_entropy", BITS, {"class_weight": [1.0, 0.0, 5.0]}),
    "multi-label, all": (
        "binary_cross_entropy", BITS,
        {"sample_weight": WEIGHT, "mask": WEIGHTS > 0.2, "class_weight": [1.0, 2.0, 5.0]},
    ),
}  # fmt: skip


def weight_of(options):
    """Weights (N, C) or (N,), by hand, not normalised."""
    w = np.ones(N)
    for name in ("sample_weight", "mask"):
        if name in options:
            part = np.asarray(options[name], float)
            w = w[:, None] * part if part.ndim == 2 and w.ndim == 1 else w * part
    if "class_weight" in options:
        given = np.asarray(options["class_weight"])
        w = w * given[LABELS] if len(options) == 1 and given[1] == 4.0 else _by_column(w, given)
    return w


def _by_column(w, given):
    return (w[:, None] if w.ndim == 1 else w) * given[None]


def value_by_hand(name, y, w, f):
    """The weighted mean loss, written out."""
    if name == "cross_entropy":
        each = jax.nn.logsumexp(f, axis=1) - f[jnp.arange(N), y]
        return jnp.sum(w * each) / jnp.sum(w)
    w = jnp.asarray(np.broadcast_to(w if w.ndim == 2 else w[:, None], (N, C)))
    each = 0.5 * (f - y) ** 2 if name == "squared_error" else jnp.logaddexp(0.0, f) - y * f
    return C * jnp.sum(w * each) / jnp.sum(w)


def problem(case):
    name, y, options = CASES[case]
    given = weighted(y, **options) if options else y
    return name, given, lambda f: value_by_hand(name, y, weight_of(options), f)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_value_gradient_and_hessian(case):
    name, y, by_hand = problem(case)
    f = jnp.asarray(F0)
    targets, loss = encode_targets(name, y, f)
    np.testing.assert_allclose(loss.value(f, targets), by_hand(f), rtol=1e-12)
    np.testing.assert_allclose(loss.gradient(f, targets) / N, jax.grad(by_hand)(f), atol=1e-14)
    hessian = jax.jit(jax.hessian(by_hand))(f)[np.arange(N), :, np.arange(N)]
    np.testing.assert_allclose(loss.hessian(f, targets) / N, hessian, atol=1e-14)
    again, same = encode_targets(loss, targets, f)
    assert same is loss
    np.testing.assert_array_equal(again, targets)


def test_errors_count_by_weight():
    f, y = jnp.asarray(F0), jnp.asarray(REAL)
    targets, loss = encode_targets("cross_entropy", weighted(LABELS, sample_weight=WEIGHT), f)
    wrong = np.argmax(F0, axis=1) != LABELS
    np.testing.assert_allclose(loss.error(f, targets), np.sum(WEIGHT * wrong) / np.sum(WEIGHT))
    targets, loss = encode_targets("binary_cross_entropy", weighted(BITS, mask=WEIGHTS > 0.3), f)
    wrong = ((F0 > 0) != (BITS > 0.5))[WEIGHTS > 0.3]
    np.testing.assert_allclose(loss.error(f, targets), np.mean(wrong))
    targets, loss = encode_targets("squared_error", weighted(y, mask=WEIGHT > 0), f)
    part = losses.unexplained_variance(f[WEIGHT > 0], y[WEIGHT > 0])
    np.testing.assert_allclose(loss.error(f, targets), part)


def test_balanced_classes_weigh_alike():
    y = weighted(LABELS, class_weight="balanced")
    sums = [np.sum(y.weight[k == LABELS]) for k in range(C)]
    np.testing.assert_allclose(sums, N / C)
    named = weighted(LABELS, class_weight={0: 0.75, 1: 1.0, 2: 1.5})
    np.testing.assert_allclose(named.weight, np.array([0.75, 1.0, 1.5])[LABELS])


def test_own_losses_take_weights_of_samples():
    own = Loss("own", lambda f, y: jnp.sum(jnp.cosh(f - y)), losses.unexplained_variance)
    f = jnp.asarray(F0)
    targets, loss = encode_targets(own, weighted(REAL, sample_weight=WEIGHT), f)
    each = np.sum(np.cosh(F0 - REAL), axis=1)
    np.testing.assert_allclose(loss.value(f, targets), np.sum(WEIGHT * each) / np.sum(WEIGHT))
    with pytest.raises(ValueError, match="no sum over outputs"):
        encode_targets(own, weighted(REAL, sample_weight=WEIGHTS), f)


BAD = {
    "nothing": ({}, "give at least one of"),
    "length": ({"sample_weight": np.ones(8)}, r"sample_weight must have shape \(9,\), as y has"),
    "negative": ({"sample_weight": -WEIGHT}, "sample_weight must be finite and not negative"),
    "NaN": ({"sample_weight": np.full(N, np.nan)}, "sample_weight must be finite"),
    "nothing left": ({"mask": np.zeros(N)}, "leave no sample that counts"),
    "a class too few": ({"class_weight": [1.0, 2.0]}, "a weight for every class"),
    "a class missing": ({"class_weight": {0: 1.0, 2: 1.0}}, "a weight for every class"),
    "another name": ({"class_weight": "equal"}, "the only name is 'balanced'"),
    "negative class": ({"class_weight": [1.0, -1.0, 1.0]}, "none of them negative"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_are_refused(case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        weighted(LABELS, **options)


def test_bad_combinations_are_refused():
    with pytest.raises(ValueError, match="one weight an output"):
        weighted(BITS, class_weight=[1.0, 2.0])
    with pytest.raises(ValueError, match="'balanced', for integer labels"):
        weighted(BITS, class_weight="balanced")
    f = jnp.asarray(F0)
    _, loss = encode_targets("cross_entropy", weighted(LABELS, sample_weight=WEIGHT), f)
    with pytest.raises(ValueError, match="takes what encode_targets made"):
        encode_targets(loss, LABELS, f)
    with pytest.raises(ValueError, match="labels from"):
        encode_targets("cross_entropy", weighted(LABELS + 1, sample_weight=WEIGHT), f)
