"""Subsets trained on alone, beside a path of all samples and with its kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import training_time
from jaxttp.dynamics import _confirm, relinearized_recursion
from jaxttp.losses import cross_entropy, encode_targets, get_loss, weighted
from jaxttp.ntk import empirical_ntk
from jaxttp.ntk.kernels import Factored
from tests import oracles
from tests.draws import normal, split
from tests.dynamics import test_edge
from tests.dynamics.test_relinearize import OPTIMIZERS

STEPS = 30
KEYS = split(11, 4)
X, WIDE = normal(KEYS[0], (9, 4)), normal(KEYS[1], (4, 40), 0.7)
W = normal(KEYS[2], (40, 3), 0.3)
LABELS = np.arange(9) % 3
ROWS = np.array([6, 1, 4, 0])
OTHERS = np.setdiff1d(np.arange(9), ROWS)


def linear(w, x):
    """Linear in its weights: its kernel is the same all along."""
    return jnp.tanh(x @ WIDE) @ w


def along(optimizer, *, y=LABELS, loss="cross_entropy", network=linear, params=W, x=X, subsets=(),
          steps=STEPS, kernel_fn=None, **options):  # fmt: skip
    def exact(w):
        return empirical_ntk(network, w, x)

    options = {"rebuilds": 3} | options
    return relinearized_recursion(
        network, params, x, y, loss=loss, optimizer=optimizer, steps=steps,
        kernel_fn=kernel_fn or exact, subsets=subsets, **options,
    )  # fmt: skip


def alone(optimizer, rows, others, y, loss):
    """Losses on both by training the network itself, weight by weight."""
    outputs = [
        oracles.train_network(linear, W, X[rows], y[rows], loss, optimizer, STEPS, x_test=X[seen])
        for seen in (rows, others)
    ]
    return [
        np.array([float(get_loss(loss).value(jnp.asarray(f), jnp.asarray(y[seen]))) for f in path])
        for path, seen in zip(outputs, (rows, others), strict=True)
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_a_linear_network_is_trained_on_a_subset_alone(name, loss):
    found = along(OPTIMIZERS[name], loss=loss, subsets=[ROWS]).subsets
    assert len(found) == 1
    want = alone(OPTIMIZERS[name], ROWS, OTHERS, np.eye(3)[LABELS], loss)
    # The same steps in another order of sums, in float64.
    np.testing.assert_allclose(found[0].loss, want[0], rtol=1e-9)
    np.testing.assert_allclose(found[0].unseen, want[1], rtol=1e-9)
    assert int(found[0].diverged_at) == -1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_samples_are_a_subset(name):
    path = along(OPTIMIZERS[name], subsets=[np.arange(9)])
    # With decay the path leaves out what is less than a hundredth of its velocities.
    np.testing.assert_allclose(path.subsets[0].loss, path.loss, rtol=1e-4)
    assert path.subsets[0].unseen is None


def test_a_path_is_what_it_is_without_subsets():
    plain, beside = (along(optax.sgd(0.1), subsets=each) for each in ((), [ROWS, OTHERS]))
    np.testing.assert_array_equal(plain.train, beside.train)
    assert plain.gradient_evaluations == beside.gradient_evaluations
    decaying = [along(OPTIMIZERS["decay, nesterov, schedule"], subsets=each).gradient_evaluations
                for each in ((), [ROWS, OTHERS])]  # fmt: skip
    assert decaying[1] == decaying[0] + 1 + len(plain.ends)  # J w_0 at every knot, once for all
    assert plain.kernels == beside.kernels
    assert plain.subsets == ()
    assert [each.steps_run for each in beside.subsets] == [STEPS, STEPS]


def test_mini_batches_have_subsets_of_full_ones():
    options = {"subsets": [ROWS], "rebuilds": "auto"}
    full = along(optax.sgd(0.1), **options).subsets[0]
    batches = along(optax.sgd(0.1), batch_size=3, key=jax.random.key(0), **options).subsets[0]
    np.testing.assert_allclose(batches.loss, full.loss, rtol=1e-9)


def test_weights_and_tokens_have_subsets():
    """Targets that carry weights already carry one more."""
    weights = np.linspace(0.2, 2.0, 9)
    found = along(optax.sgd(0.1), y=weighted(LABELS, sample_weight=weights), subsets=[ROWS])
    targets, loss = encode_targets(
        "cross_entropy", weighted(LABELS, sample_weight=weights), jnp.zeros((9, 3))
    )

    def gradient(f, rows):
        return loss.gradient(f, targets[rows]) / len(rows)

    w, want = W, []
    for _ in range(STEPS + 1):
        want.append(float(loss.value(linear(w, X[ROWS]), targets[ROWS])))
        f, pull = jax.vjp(lambda w: linear(w, X[ROWS]), w)
        w = w - 0.1 * pull(gradient(f, ROWS))[0]
    np.testing.assert_allclose(found.subsets[0].loss, want, rtol=1e-9)

    def tokens(w, x):
        return linear(w, x).reshape(-1, 1, 3)

    labels = LABELS[:, None]
    outputs = jax.eval_shape(tokens, W, X)
    encoded, of_tokens = encode_targets("cross_entropy", labels, outputs)
    one = along(optax.sgd(0.1), subsets=[ROWS]).subsets[0]
    other = along(optax.sgd(0.1), y=encoded, loss=of_tokens, subsets=[ROWS]).subsets[0]
    np.testing.assert_allclose(other.loss, one.loss, rtol=1e-9)


def test_kernels_in_factors_have_subsets():
    jacobian = np.asarray(jax.jacrev(lambda w: linear(w, X))(W)).reshape(9, 3, -1)
    factored = Factored.of(jnp.asarray(jacobian), jnp.asarray(jacobian))
    for name in ("sgd", "momentum"):
        dense, found = (
            along(OPTIMIZERS[name], subsets=[ROWS], kernel_fn=kernel).subsets[0]
            for kernel in (None, lambda w: factored)
        )
        np.testing.assert_allclose(found.loss, dense.loss, rtol=1e-8)
        np.testing.assert_allclose(found.unseen, dense.unseen, rtol=1e-8)


def curved(w, x):
    return jnp.tanh(x @ w["in"]) @ w["out"]


@pytest.mark.slow
def test_what_a_half_is_sooner_by_is_what_it_is_for_real():
    """The kernel moves, and with it both alike: of their ratio less is off than of either time."""
    keys = split(3, 4)
    x = normal(keys[0], (60, 20))
    y = np.asarray(x[:, 0] + 0.5 * x[:, 1] ** 2 + normal(keys[1], (60,), 0.7) > 0.3).astype(int)
    params = {"in": normal(keys[2], (20, 40), 0.1), "out": normal(keys[3], (40, 2), 0.2)}
    optimizer, steps, goal = optax.sgd(0.02, 0.9), 400, 0.15
    rows = [np.arange(60), np.arange(30), np.arange(30, 60)]
    path = along(
        optimizer, network=curved, params=params, x=x, y=y, subsets=rows, steps=steps,
        rebuilds="auto",
    )  # fmt: skip
    found = [training_time(each.loss, goal, rule="absolute") for each in path.subsets]
    real = []
    for some in rows:
        outputs = oracles.train_network(
            curved, params, x[some], np.eye(2)[y[some]], "cross_entropy", optimizer, steps
        )
        each = [float(cross_entropy.value(jnp.asarray(f), jnp.eye(2)[y[some]])) for f in outputs]
        real.append(training_time(np.array(each), goal, rule="absolute"))
    assert min(*real, *found) > 0
    predicted, true = (2 * times[0] / (times[1] + times[2]) for times in (found, real))
    assert true > 1.15  # there is something to foresee
    assert abs(np.log(predicted / true)) < 0.35 * np.log(true)


def test_where_a_kernel_is_held_subsets_go_on_with_it(monkeypatch):
    """Kernels that promise what the network denies, as in `test_edge`."""
    monkeypatch.setattr(_confirm, "SWEEPS", 0)
    built = []

    def lying(w):
        built.append(w)
        return test_edge.kernel_of(w) * (1.0 if len(built) == 1 else 20.0)

    every = np.arange(len(test_edge.X))
    path = test_edge.forecast(rate=0.02, kernel_fn=lying, subsets=[every])
    assert path.held_from == 0
    np.testing.assert_allclose(path.subsets[0].loss, path.loss, rtol=1e-9)


def test_beyond_the_edge_of_stability_subsets_are_held_there():
    """Two modes of one sample: alone it is twice as curved as in the mean of two."""
    x = jnp.eye(2)
    params = {"in": jnp.diag(jnp.array([3.0, 2.0])), "out": jnp.ones((2, 1)) * 0.5}

    def product(w, x):
        return (x @ w["in"]) @ w["out"]

    path = along(
        optax.sgd(0.12), network=product, params=params, x=x, y=jnp.zeros((2, 1)),
        loss="squared_error", subsets=[np.array([0]), np.array([1])], steps=60, rebuilds="auto",
    )  # fmt: skip
    for each in path.subsets:
        assert np.all(np.isfinite(each.loss))
        assert float(each.loss[-1]) < float(each.loss[0])


@pytest.mark.parametrize(
    "rows",
    [np.array([0, 9]), np.array([-1]), np.array([2, 2]), np.array([0.5]), np.zeros((2, 2), int),
     np.array([], int)],
    ids=["beyond", "negative", "twice", "no integers", "a matrix", "none"],
)  # fmt: skip
def test_bad_subsets(rows):
    with pytest.raises(ValueError, match=r"subsets must hold numbers of samples, 0\.\.8, each"):
        along(optax.sgd(0.1), subsets=[rows])


def test_subsets_begin_at_rest():
    with pytest.raises(ValueError, match="subsets are trained on from the start"):
        along(optax.sgd(0.1, 0.9), subsets=[ROWS], accumulators=[W])
