"""Losses over tokens: outputs (N, T, V) with labels (N, T), and what stands for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import (
    empirical_ntk,
    label_words,
    predict_training_time,
    sample_tokens,
    train,
    weighted,
)
from jaxttp.conditioning import curvature_matrix, curvature_operator
from jaxttp.dynamics import batch_indices
from jaxttp.losses import encode_targets
from jaxttp.losses.functions import token_hessian_product

RANDOM = np.random.default_rng(5)
N, T, V, D = 6, 4, 5, 7
X = jnp.asarray(RANDOM.normal(size=(N, T, D)))
W = jnp.asarray(RANDOM.normal(size=(D, V)) / 5)
Y = RANDOM.integers(0, V, (N, T))
Y[0], Y[1, 2:] = -100, -100  # a whole sequence, and padding of another
COUNTS = Y >= 0
KEY = jax.random.key(1)


def linear(w, x):
    return x @ w


def by_hand(w, rows=slice(None)):
    """Loss, error and gradient of some sequences, divided by what counts in all by hand."""
    f, y, counts = np.asarray(X[rows] @ w), Y[rows], COUNTS[rows]
    p = np.exp(f) / np.exp(f).sum(-1, keepdims=True)
    one = np.eye(V)[np.where(counts, y, 0)]
    loss = -(np.log((p * one).sum(-1)) * counts)
    wrong = (f.argmax(-1) != y) & counts
    gradient = np.einsum("ntd,ntv->dv", X[rows], (p - one) * counts[..., None])
    return loss.sum() / COUNTS.sum(), wrong.sum() / COUNTS.sum(), gradient / COUNTS.sum()


def test_the_mean_is_over_the_tokens_that_count():
    """As cross_entropy of PyTorch with ignore_index for all sequences; sums in another order."""
    f = linear(W, X)
    targets, loss = encode_targets("cross_entropy", Y, f)
    value, error, _ = by_hand(W)
    flat = f.reshape(N, -1)
    np.testing.assert_allclose(loss.value(flat, targets), value, rtol=1e-12)
    np.testing.assert_allclose(loss.error(flat, targets), error, rtol=1e-12)
    assert repr(loss) == "Loss('cross_entropy', 4 tokens)"
    # Weights of sequences, and of tokens, multiply what counts.
    fraction = RANDOM.random((N, T))
    found, weighing = encode_targets("cross_entropy", weighted(Y, sample_weight=fraction), f)
    each = optax.softmax_cross_entropy_with_integer_labels(f, np.where(COUNTS, Y, 0))
    expected = (each * fraction * COUNTS).sum() / (fraction * COUNTS).sum()
    np.testing.assert_allclose(weighing.value(flat, found), expected, rtol=1e-12)
    masked = encode_targets("cross_entropy", weighted(Y, mask=np.arange(N) > 2), f)[0]
    alone = encode_targets("cross_entropy", Y[3:], f[3:])[0]
    np.testing.assert_allclose(masked[3:, T:] * 3 / N, alone[:, T:])


def test_batches_divide_by_the_fraction_of_all():
    """A step on a batch of B: its sum times N / (B M), M what counts in all of y."""
    run = train(linear, W, X, Y, loss="cross_entropy", optimizer=optax.sgd(0.5), steps=2,
                batch_size=2, key=KEY)  # fmt: skip
    w, indices = np.asarray(W), np.asarray(batch_indices(KEY, N, 2, 2))
    for t in range(3):
        loss, error, _ = by_hand(w)
        np.testing.assert_allclose([run.loss[t], run.error[t]], [loss, error], rtol=1e-10)
        w = w - 0.5 * by_hand(w, indices[t])[2] * N / 2 if t < 2 else w
    np.testing.assert_allclose(run.params, w, rtol=1e-10)


def test_a_linear_network_is_forecast_to_rounding():
    """Loss and fraction of wrong tokens step by step, with momentum; test sequences beside."""
    found = predict_training_time(
        linear, W, X, Y, learning_rate=0.3, momentum=0.9, steps=5, relinearize=0, x_test=X[2:],
        y_test=Y[2:],
    )  # fmt: skip
    run = train(linear, W, X, Y, loss="cross_entropy", optimizer=optax.sgd(0.3, 0.9), steps=5)
    np.testing.assert_allclose(found.loss, run.loss, rtol=1e-10)
    np.testing.assert_allclose(found.error, run.error, rtol=1e-10)
    test = np.asarray(jax.vmap(lambda f: encode_targets("cross_entropy", Y[2:], f)[1].value(
        f.reshape(4, -1), encode_targets("cross_entropy", Y[2:], f)[0]))(
            run.outputs[:, 2:].reshape(-1, 4, T, V)))  # fmt: skip
    np.testing.assert_allclose(found.test_loss, test, rtol=1e-10)
    assert found.steps == run.read(tuple(found.steps))
    hessian = jax.hessian(lambda w: _loss(w.reshape(D, V)))(W.reshape(-1))
    limit = 2 * (1 + 0.9) / np.linalg.eigvalsh(hessian)[-1]  # the largest eigenvalue decides
    np.testing.assert_allclose(found.max_learning_rate, limit, rtol=1e-6)


def _loss(w, x=X, y=Y):
    each = optax.softmax_cross_entropy_with_integer_labels(x @ w, np.where(y >= 0, y, 0))
    return jnp.sum(each * (y >= 0)) / (y >= 0).sum()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hessian_products_need_no_blocks(dtype):
    """p∘u - p (p·u), tokens in pieces, against the blocks of `jax.hessian`."""
    f = jnp.asarray(RANDOM.normal(size=(N, T * V)), dtype)
    u = jnp.asarray(RANDOM.normal(size=f.shape), dtype)
    targets, loss = encode_targets("cross_entropy", Y, f.reshape(N, T, V))
    assert targets.dtype == dtype
    blocks = np.asarray(loss.hessian(f, targets))
    expected = np.einsum("nab,nb->na", blocks, u)
    tolerance = 1e-5 if dtype == np.float32 else 1e-12
    for found in (
        loss.hessian_vector_product(f, targets, u),
        token_hessian_product(f, targets, u, at_once=3 * V),
    ):
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected, atol=tolerance)
    across = blocks.reshape(N, T, V, T, V)[:, 0, :, 1]
    assert not across.any()


@pytest.mark.parametrize("kind", ["gauss_newton", "hessian"])
def test_curvature_of_tokens(kind):
    """The operator in batches of any size and the matrix, against derivatives by hand."""

    def network(w, x):
        return jnp.tanh(x["x"]) @ w["a"] @ w["b"]

    w = {"a": jnp.asarray(RANDOM.normal(size=(D, 2))), "b": jnp.asarray(RANDOM.normal(size=(2, V)))}
    flat, restore = jax.flatten_util.ravel_pytree(w)
    x, more = {"x": X}, {"y": Y, "loss": "cross_entropy"} if kind == "hessian" else {}
    outputs = lambda flat: network(restore(flat), x)  # noqa: E731
    jacobian = np.asarray(jax.jacobian(outputs)(flat)).reshape(N * T, V, -1)
    plain = np.einsum("tap,taq->pq", jacobian, jacobian) / N
    whole = np.asarray(jax.hessian(lambda flat: _loss(1.0 * jnp.eye(V), outputs(flat)))(flat))
    expected = {"gauss_newton": plain, "hessian": whole}[kind]
    matrix = curvature_matrix(network, w, x, kind=kind, form="parameters", **more)
    np.testing.assert_allclose(matrix, expected, atol=1e-12)
    for size in (None, 4):
        operator = curvature_operator(network, w, x, kind=kind, batch_size=size, **more)
        found = jax.vmap(operator.mv)(jnp.eye(len(flat)))
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_label_words_are_those_of_the_last_token_there_is():
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0], [1, 1, 0, 0],
                     [0, 0, 0, 0]])  # fmt: skip
    last = [3, 0, 3, 2, 1, 3]
    classify = label_words(lambda w, x: linear(w, x["x"]), [3, 0])
    expected = np.asarray(linear(W, X))[np.arange(N), last][:, [3, 0]]
    np.testing.assert_array_equal(classify(W, {"x": X, "attention_mask": mask}), expected)
    own = label_words(linear, [3, 0], mask=lambda x: mask)
    np.testing.assert_array_equal(own(W, X), expected)
    np.testing.assert_array_equal(label_words(linear, (1, 2))(W, X), linear(W, X)[:, -1, 1:3])


def test_sampled_tokens_have_the_mean_of_all():
    """Over draws, to 4 standard errors; with as many as there are, exactly."""
    whole = sample_tokens(linear, X, Y, tokens=T, key=KEY)
    value = functools.partial(predict_training_time, learning_rate=0.1, steps=1, relinearize=0)
    full = by_hand(W)[0]
    np.testing.assert_allclose(value(whole.apply_fn, W, whole.x, whole.y).loss[0], full, rtol=1e-10)
    losses = []
    for key in jax.random.split(KEY, 100):
        apply_fn, x, y = sample_tokens(linear, X, Y, tokens=1, key=key)
        f = np.asarray(linear(W, x["x"]))[np.arange(N), np.asarray(x["places"])[:, 0]]
        assert (y.y[:, 0] == Y[np.arange(N), np.asarray(x["places"])[:, 0]])[1:].all()
        picked = (f - np.log(np.exp(f).sum(-1, keepdims=True)))[np.arange(1, N), y.y[1:, 0]]
        losses.append(-(picked * y.weight[1:, 0]).sum() / COUNTS.sum())
    assert y.y[0, 0] == -100
    assert abs(np.mean(losses) - full) < 4 * np.std(losses) / np.sqrt(100)
    np.testing.assert_array_equal(apply_fn(W, x)[:, 0], f_of(x))


def f_of(x):
    return linear(W, x["x"])[np.arange(N), np.asarray(x["places"])[:, 0]]


def many(w, x):
    return jnp.tile(linear(w, x), (1, 1, 200))


def wrong(**changed):
    given = {"apply_fn": linear, "y": Y, "loss": "cross_entropy", "x": X} | changed
    return predict_training_time(
        given["apply_fn"], W, given["x"], given["y"], loss=given["loss"], learning_rate=0.1,
        relinearize=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wrong(y=np.full((N, T), -100)), "y leaves no token that counts: all are -100"),
        (lambda: wrong(y=np.where(COUNTS, V, Y)), r"token labels such as 5, .* lie in 0\.\.4"),
        (lambda: wrong(y=Y[:, 0]), r"labels of tokens \(6, 4\).*label_words\(apply_fn, ids\)"),
        (lambda: wrong(y=Y[:, :3]), "outputs have 4 tokens a sample: pad the labels with -100"),
        (lambda: wrong(loss="squared_error"), r"takes no labels of tokens .*flatten_tokens"),
        (lambda: wrong(apply_fn=lambda w, x: (x @ w)[..., None]), r"must return outputs \(N, C\)"),
        (lambda: empirical_ntk(linear, W, X), r"flatten_tokens\(apply_fn\)"),
        (lambda: wrong(apply_fn=many), r"\(6, 4, 1000\) are 24,000 numbers.* 2 GB.*tokens=2,"),
        (lambda: label_words(linear, [1]), "ids must be two or more different"),
        (lambda: label_words(linear, [1, 5])(W, X), r"ids holds 5, but the network has 5 words"),
        (lambda: label_words(linear, [1, 2], mask=lambda x: Y[:, 1:])(W, X), r"mask gives \(6, 3"),
        (lambda: sample_tokens(linear, X, Y[:, 0], tokens=1, key=KEY), r"labels of tokens \(N, T"),
        (lambda: sample_tokens(linear, X, Y, tokens=5, key=KEY), "between 1 and 4"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
