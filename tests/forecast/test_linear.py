"""Networks that are linear in their trained weights: one kernel, K (N, N) of last layers alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import predict_training_time, train
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast import Problem, Relinearized, grid, sweep, sweep_kernel
from jaxttp.ntk._program import is_linear, trace
from jaxttp.ntk.estimators import Exact
from tests import oracles
from tests.draws import normal

N, D, H = 12, 4, 6


def head(classes, n=N):
    """A network with a frozen trunk, its parameters, which train, samples and labels."""
    params = {
        "trunk": normal(1, (D, H)),
        "head": {"w": normal(2, (H, classes), 0.3), "b": normal(3, (1, classes), 0.1)},
    }
    x = normal(4, (n, D))
    y = jax.random.randint(jax.random.key(5), (n,), 0, classes)

    def apply_fn(p, x):
        return jnp.tanh(x @ p["trunk"]) @ p["head"]["w"] + p["head"]["b"]

    return apply_fn, params, {"trunk": False, "head": True}, x, y


def trained(apply_fn, params, x, y, optimizer, steps=20, **options):
    """Real training of the head alone."""
    alone = lambda w, x: apply_fn({**params, "head": w}, x)  # noqa: E731
    options = {"loss": "cross_entropy", "steps": steps, **options}
    return train(alone, params["head"], x, y, optimizer=optimizer, **options).loss


def close(got, wanted, tolerance=1e-10):
    """Sums of a hundred products in another order, over twenty steps."""
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("classes", [3, 70])  # of centered logits, and of all outputs
def test_the_kernel_of_a_head_is_k_times_one(classes):
    apply_fn, params, trainable, x, y = head(classes)
    problem = Problem.of(apply_fn, params, x, y, trainable=trainable)
    problem = problem.centered()
    kernel = Exact().estimate(problem, problem.weights).kernel
    cross = Exact().cross(problem, problem.weights, x[:5])
    assert (kernel.shape, cross.shape) == ((N, N), (5, N))
    alone = lambda w, x: apply_fn({**params, "head": w}, x)  # noqa: E731
    wanted = oracles.kernel(alone, params["head"], x)
    close(np.einsum("nm,cd->ncmd", kernel, np.eye(classes)), wanted)
    close(cross, kernel[:5])


@pytest.mark.parametrize("classes", [3, 70])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (optax.sgd(0.5, momentum=0.9), {}),
        (optax.sgd(0.5), {"batch_size": 4, "key": jax.random.key(6)}),
        (optax.chain(optax.add_decayed_weights(0.01), optax.sgd(0.3)), {}),
    ],
    ids=["momentum", "batches", "decay"],
)
def test_one_kernel_forecasts_the_training_itself(classes, optimizer, options):
    apply_fn, params, trainable, x, y = head(classes)
    found = predict_training_time(
        apply_fn, params, x, y, optimizer=optimizer, steps=20, trainable=trainable, **options
    )
    assert found.cost.kernels == 1
    assert found.cost.gradient_evaluations <= 1
    assert found.warnings is None
    assert found.plan is None  # nothing was left out
    close(found.loss, trained(apply_fn, params, x, y, optimizer, **options))


@pytest.mark.parametrize("options", [{"relinearize": 3}, {"dynamics": Relinearized(2)}])
def test_nothing_is_rebuilt_where_it_is_asked_for_either(options):
    apply_fn, params, trainable, x, y = head(3)
    found = predict_training_time(
        apply_fn, params, x, y, learning_rate=0.5, steps=20, trainable=trainable, x_test=x[:5],
        y_test=y[:5], **options,
    )  # fmt: skip
    assert found.cost.kernels == 2  # one to the test samples
    close(found.loss, trained(apply_fn, params, x, y, optax.sgd(0.5)))


def test_a_kernel_that_never_changes_but_mixes_outputs():
    """A layer beneath a frozen last one."""
    params = {"w": normal(1, (D, H)), "out": normal(2, (H, 3))}
    x, y = normal(3, (N, D)), jnp.arange(N) % 3
    apply_fn = lambda p, x: (x @ p["w"]) @ p["out"]  # noqa: E731
    trainable = {"w": True, "out": False}
    problem = Problem.of(apply_fn, params, x, y, trainable=trainable)
    assert (problem.is_linear, problem.is_repeated) == (True, False)
    found = predict_training_time(
        apply_fn, params, x, y, learning_rate=0.02, steps=20, trainable=trainable
    )
    assert found.cost.kernels == 1
    alone = lambda w, x: apply_fn({**params, "w": w}, x)  # noqa: E731
    real = train(
        alone, params["w"], x, y, loss="cross_entropy", optimizer=optax.sgd(0.02), steps=20
    )
    close(found.loss, real.loss)


def test_the_loss_judges_rates_beyond_the_first_limit():
    """Cross-entropy is flatter where it is small: the real training comes down as well."""
    apply_fn, params, trainable, x, y = head(3)
    common = {"steps": 60, "trainable": trainable}
    limit = predict_training_time(
        apply_fn, params, x, y, learning_rate=0.1, **common
    ).max_learning_rate
    found = predict_training_time(apply_fn, params, x, y, learning_rate=1.2 * limit, **common)
    assert found.stable
    close(found.loss, trained(apply_fn, params, x, y, optax.sgd(1.2 * limit), 60), 1e-8)


def test_sweeps_of_a_head():
    apply_fn, params, trainable, x, y = head(3)
    settings = grid(learning_rate=(0.1, 0.5), momentum=(0.0, 0.9), steps=20, batch_size=4)
    options = {"key": jax.random.key(2)}
    found = sweep(apply_fn, params, x, y, settings, trainable=trainable, **options)
    alone = lambda w, x: apply_fn({**params, "head": w}, x)  # noqa: E731
    full = jnp.asarray(oracles.kernel(alone, params["head"], x))
    wanted = sweep_kernel(full, apply_fn(params, x), y, settings, **options)
    close(found.loss, wanted.loss)
    close(found.max_learning_rate, wanted.max_learning_rate)
    assert all(one is None for one in found.warnings.values())


def test_the_largest_rate_of_k_times_one():
    """More outputs than are decomposed densely, against LAPACK."""
    apply_fn, params, _, x, y = head(30)
    f0 = apply_fn(params, x)
    features = jnp.tanh(x @ params["trunk"])
    kernel = features @ features.T + 1.0
    p = np.asarray(jax.nn.softmax(f0))
    hessian = np.zeros((N, 30, N, 30))
    for n in range(N):
        hessian[n, :, n] = np.diag(p[n]) - np.outer(p[n], p[n])
    whole = np.kron(kernel, np.eye(30)) @ hessian.reshape(N * 30, -1) / N
    wanted = 2.0 / np.linalg.eigvals(whole).real.max()
    close(max_learning_rate(kernel, f0, y, loss="cross_entropy"), wanted, 1e-9)


W, X = normal(1, (D, 3)), normal(2, (D,))
LINEAR = {
    "dense": lambda w, x: x @ w + 1.0,
    "einsum": lambda w, x: jnp.einsum("ko,nk->no", w, x),
    "jit": lambda w, x: jax.jit(lambda w: (2.0 * w - 1.0).T)(w)[None, :, 0] * x[:, :1],
    "remat": lambda w, x: jax.checkpoint(lambda w: x @ w)(w),
    "features": lambda w, x: jax.nn.relu(jnp.tanh(x)) @ w / (1.0 + x[:, :1] ** 2),
    "where": lambda w, x: jnp.where(x[:, :1] > 0, x @ w, 0.5 * (x @ w)),
    "mean": lambda w, x: (x[:, :, None] * w[None]).mean(1),
}
NOT_LINEAR = {
    "relu": lambda w, x: jax.nn.relu(x @ w),
    "tanh": lambda w, x: jnp.tanh(x @ w),
    "square": lambda w, x: (x @ w) * (x @ w),
    "twice": lambda w, x: x @ w @ w.T,
    "divided": lambda w, x: x[:, :3] / w[:1],
    "softmax": lambda w, x: x @ jax.nn.softmax(w),
    "stop": lambda w, x: x @ w + jax.lax.stop_gradient(x @ w) ** 2,
    "round": lambda w, x: x @ jnp.round(w),
    "straight through": lambda w, x: x @ (w + jax.lax.stop_gradient(jnp.round(w) - w)),
    "where": lambda w, x: jnp.where(x @ w > 0, 1.0, 0.0),
    "index": lambda w, x: x[:, jnp.argmax(w, axis=0)],
    "scan": lambda w, x: jax.lax.scan(lambda h, _: (h @ w @ w.T, None), x, None, 2)[0],
}


@pytest.mark.parametrize("name", [*LINEAR, *(f"not {name}" for name in NOT_LINEAR)])
def test_which_networks_are_linear_in_their_weights(name):
    wanted = name in LINEAR
    apply_fn = LINEAR[name] if wanted else NOT_LINEAR[name.removeprefix("not ")]
    with jax.numpy_rank_promotion("allow"):
        assert is_linear(trace(apply_fn, W, X).program, (True,)) == wanted
        if wanted:  # f(w + v) - f(w) does not depend on w
            v, x = normal(3, W.shape), X[None]
            moved = [apply_fn(w + v, x) - apply_fn(w, x) for w in (W, 3.0 * W)]
            close(*moved, 1e-12)
