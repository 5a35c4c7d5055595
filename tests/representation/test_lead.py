"""LEAD against brute force: gradients sample by sample, and the flow of logits written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.svm import LinearSVC

from jaxttp.representation import lead, lead_speeds

KEY = jax.random.key(3)
WIDTHS = (5, 4)
Z = np.random.default_rng(0).standard_normal((12, 3))
Y = np.arange(12) % 3


def brute_speeds(features, labels, samples):
    """The same draws; the gradients by `jax.grad`, biases among the weights."""
    draw, head = jax.random.split(KEY)
    sizes = (features.shape[1], *WIDTHS, labels.max() + 1)
    keys = jax.random.split(head, len(sizes) - 1)
    layers = [
        (jax.random.normal(k, (h, w), jnp.float64) * np.sqrt(2 / h), jnp.zeros(w))
        for k, h, w in zip(keys, sizes, sizes[1:], strict=False)
    ]

    def total(layers, x):
        for weight, bias in layers[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        return jnp.sum(x @ layers[-1][0] + layers[-1][1])

    gradients = [jax.grad(total)(layers, x) for x in jnp.asarray(features)]
    flat = np.stack([jax.flatten_util.ravel_pytree(g)[0] for g in gradients])
    order, out = np.asarray(jax.random.permutation(draw, len(features))), []
    for k in range(labels.max() + 1):
        some = order[labels[order] == k][:samples]
        out.append(np.linalg.eigvalsh(flat[some] @ flat[some].T).mean())
    return np.array(out)


@pytest.mark.parametrize("samples", [64, 2])
def test_speeds_are_mean_eigenvalues(samples):
    found = lead_speeds(Z, Y, key=KEY, samples=samples, widths=WIDTHS)
    np.testing.assert_allclose(found, brute_speeds(Z, Y, samples), rtol=1e-10)


def test_the_score_is_the_likelihood_after_the_flow():
    """Three classes: machines one by one, the softmax of their values, a number a class."""
    speeds, time = lead_speeds(Z, Y, key=KEY, widths=WIDTHS), 0.07
    scaled = (Z - Z.mean(axis=0)) / Z.std(axis=0)
    values = np.stack([
        LinearSVC(random_state=0, max_iter=10000).fit(scaled, Y == k).decision_function(scaled)
        for k in range(3)
    ], axis=1)  # fmt: skip
    first = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
    left = np.exp(-time * speeds[Y])[:, None]
    moved = (1 - left) * np.eye(3)[Y] + left * first
    want = np.mean(np.log(moved[np.arange(12), Y]))
    assert lead(Z, Y, key=KEY, time=time, widths=WIDTHS) == pytest.approx(want, rel=1e-10)
    own = lead(Z, Y, key=KEY, time=1 / speeds.mean(), widths=WIDTHS)
    assert lead(Z, Y, key=KEY, widths=WIDTHS) == own


def test_features_that_tell_classes_apart_score_higher():
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((3, 4))
    found = [
        lead(share * centres[Y] + rng.standard_normal((12, 4)), Y, key=KEY) for share in (0.0, 3.0)
    ]
    assert found[0] < found[1] < 0


@given(st.floats(0.01, 2.0), st.integers(2, 4))
def test_more_time_is_never_worse(time, classes):
    labels = np.arange(12) % classes
    early, late = (lead(Z, labels, key=KEY, time=t, widths=WIDTHS) for t in (time, 2 * time))
    assert early <= late <= 0


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"y": np.zeros(12, int)}, "two different labels"),
        ({"y": Y[:5]}, "y must be integer labels"),
        ({"features": Z * np.nan}, "features"),
        ({"time": 0.0}, "time"),
        ({"samples": 0}, "samples"),
        ({"widths": (5, 0)}, "widths"),
        ({"widths": None}, "widths"),
        ({"key": None}, "key"),
    ],
)
def test_bad_input(given_, words):
    common = {"features": Z, "y": Y, "key": KEY, "widths": WIDTHS} | given_
    with pytest.raises((ValueError, TypeError), match=words):
        lead(common.pop("features"), common.pop("y"), **common)
