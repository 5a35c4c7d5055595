import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics.recursion import recursion
from jaxttp.dynamics.relinearize import relinearized_recursion
from tests import oracles

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.01, 0.9),
    "decay, nesterov, schedule": optax.chain(
        optax.add_decayed_weights(0.01),
        optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 0.03, 10, 80), 0.8, nesterov=True),
    ),
}


def dense_kernel(apply_fn, params, x1, x2):
    rows, columns = (
        [leaf.reshape(len(x), 3, -1) for leaf in jax.tree.leaves(jax.jacrev(apply_fn)(params, x))]
        for x in (x1, x2)
    )
    pairs = zip(rows, columns, strict=True)
    return sum(jnp.einsum("iap,jbp->iajb", left, right) for left, right in pairs)


def forecast(problem, optimizer, steps, **options):
    def kernel_fn(params):
        return dense_kernel(problem.apply_fn, params, problem.x, problem.x)

    return relinearized_recursion(
        problem.apply_fn, problem.params, problem.x, problem.labels, loss="cross_entropy",
        optimizer=optimizer, steps=steps, kernel_fn=jax.jit(kernel_fn), **options,
    )  # fmt: skip


def truth(problem, optimizer, steps, x_test=None):
    return oracles.train_network(
        problem.apply_fn, problem.params, problem.x, problem.targets, "cross_entropy", optimizer,
        steps, x_test=x_test,
    )  # fmt: skip


def cross_fn(problem, x_test):
    return jax.jit(lambda w: dense_kernel(problem.apply_fn, w, x_test, problem.x))


def test_training_samples_followed_beside_are_the_path_itself(problem):
    """Test samples that are training samples go the same way."""
    some = problem.x[:3]
    path = forecast(
        problem, OPTIMIZERS["decay, nesterov, schedule"], 24, rebuilds=3, x_test=some,
        kernel_test_fn=cross_fn(problem, some),
    )  # fmt: skip
    scale = np.abs(np.asarray(path.train)).max()
    np.testing.assert_allclose(path.test, path.train[:, :3], atol=1e-12 * scale)  # rounding


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_kernel_at_every_step_is_training_itself(problem, name):
    """Segments of one step: f is evaluated at weights that made exactly the optimizer's step."""
    path = forecast(
        problem, OPTIMIZERS[name], 6, rebuilds=(1, 2, 3, 4, 5, 6), x_test=problem.x_test,
        kernel_test_fn=cross_fn(problem, problem.x_test),
    )  # fmt: skip
    np.testing.assert_allclose(path.train, truth(problem, OPTIMIZERS[name], 6), atol=1e-10)
    want = truth(problem, OPTIMIZERS[name], 6, x_test=problem.x_test)
    np.testing.assert_allclose(path.test, want, atol=1e-10)  # float64 rounding


@pytest.mark.slow
@pytest.mark.parametrize("name", ["momentum", "decay, nesterov, schedule"])
@pytest.mark.parametrize("where", ["train", "test"])
def test_order_of_convergence(problem, name, where):
    """Halving the segments divides the error by four or so, velocities carried included."""
    x_test = problem.x_test if where == "test" else None
    beside = {} if x_test is None else {
        "x_test": x_test, "kernel_test_fn": cross_fn(problem, x_test)
    }  # fmt: skip
    want = truth(problem, OPTIMIZERS[name], 64, x_test=x_test)
    errors = []
    for segments in (8, 16, 32):
        ends = tuple(range(64 // segments, 65, 64 // segments))
        path = forecast(problem, OPTIMIZERS[name], 64, rebuilds=ends, **beside)
        errors.append(np.sqrt(np.mean((np.asarray(getattr(path, where)) - want) ** 2)))
    # twice in a row: a sweep with the defect is made at 8 and 16 segments, but not at 32; the mean
    # square, since the largest error stands between ends, where the shape of a defect is a guess
    measured = np.log2(errors[0] / errors[2]) / 2
    assert measured > 1.7, (errors, measured)


@pytest.mark.slow
def test_mini_batches_are_carried_across_segments(problem, key):
    linear = problem._replace(apply_fn=lambda w, s: s @ w, params=jnp.zeros((4, 3)))
    kernel = oracles.kernel(linear.apply_fn, linear.params, linear.x)
    common = {"batch_size": 3, "key": key, "protocol": "independent"}
    path = forecast(linear, OPTIMIZERS["momentum"], 20, rebuilds=3, **common)
    want = recursion(
        kernel, np.zeros((7, 3)), linear.labels, loss="cross_entropy",
        optimizer=OPTIMIZERS["momentum"], steps=20, **common,
    )  # fmt: skip
    np.testing.assert_allclose(path.train, want.train, atol=1e-10)


@pytest.mark.slow
def test_costs_are_counted(problem):
    seen = []
    path = forecast(
        problem, OPTIMIZERS["sgd"], 30, rebuilds=3, progress=lambda i, k: seen.append((i, k))
    )
    assert path.kernels == 4
    assert len(path.ends) == 3
    # a segment: one product for the provisional weights, two for those at the end, and two more
    # where it is run again with the defect
    assert 3 * 3 <= path.gradient_evaluations <= 3 * 5
    assert seen[-1] == (4, 4)


@pytest.mark.slow
def test_divergence_is_held_never_nan(problem):
    path = forecast(problem, optax.sgd(1e6), 30, rebuilds=2)
    assert bool(jnp.all(jnp.isfinite(path.train)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rebuilds": 0}, "rebuilds"),
        ({"rebuilds": (3, 9)}, "rebuilds"),
        ({"rebuilds": ()}, "rebuilds"),
        ({"rebuilds": (5, 5, 10)}, "rebuilds"),
        ({"rebuilds": "all"}, "rebuilds"),
        ({"rebuilds": "auto", "tolerance": 0.0}, "tolerance"),
        ({"rebuilds": "auto", "max_rebuilds": 0}, "max_rebuilds"),
        ({"optimizer": optax.lion(0.1)}, "optimizer"),
        ({"batch_size": 3}, "key"),
        ({"x_test": np.ones((2, 4))}, "x_test and kernel_test_fn belong together"),
    ],
)
def test_bad_input_names_the_argument(problem, change, words):
    options = {"rebuilds": 2, "optimizer": optax.sgd(0.1)} | change
    with pytest.raises(ValueError, match=words):
        forecast(problem, options.pop("optimizer"), 10, **options)
