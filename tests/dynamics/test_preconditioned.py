import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.dynamics.preconditioned import preconditioned_filter
from jaxttp.dynamics.relinearize import _mean_squares, relinearized_recursion
from jaxttp.forecast import Problem
from jaxttp.forecast.methods.base import Linearizer
from jaxttp.losses import encode_targets
from jaxttp.ntk import Sketched
from jaxttp.ntk.kernels import Factored
from tests import oracles

RATES = optax.warmup_cosine_decay_schedule(0.0, 0.01, 3, 6)  # 0 in the first step and after 6
MATRICES = optax.adamw(
    RATES, weight_decay=0.3, mask=lambda w: jax.tree.map(lambda a: a.ndim > 1, w)
)
FOLLOWED = {
    "adamw, schedule, mask": (MATRICES, (True, False)),
    "nadam": (optax.nadam(0.01), (True, False)),
    "amsgrad": (optax.amsgrad(0.01), (True, False, False)),
    "rmsprop": (optax.rmsprop(0.01), (False,)),
    "adagrad": (optax.adagrad(0.1), (False,)),
    "clipped adam": (optax.chain(optax.clip_by_global_norm(0.3), optax.adam(0.01)), (True, False)),
    "clipped momentum": (
        optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.3, momentum=0.9)),
        (True,),
    ),
    "injected": (optax.inject_hyperparams(optax.adamw)(0.01), (True, False)),
}
REFUSED = {
    "lion": optax.lion(0.01),
    "clipping by value": optax.chain(optax.clip(0.1), optax.adam(0.01)),
    "clipping of some leaves": optax.chain(
        optax.masked(optax.clip_by_global_norm(0.1), lambda w: {k: k == "in" for k in w}),
        optax.adam(0.01),
    ),
    "clipped updates": optax.chain(optax.adam(0.01), optax.clip_by_global_norm(0.05)),
    "decay before the diagonal": optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.01)),
    "momentum behind the diagonal": optax.rmsprop(0.01, momentum=0.9),
    "signs": optax.sign_sgd(0.01),
}


def scaled_kernel(problem, x1, x2):
    def kernel(params, diagonal=None):
        if diagonal is None:  # clipped momentum
            diagonal = jax.tree.map(np.ones_like, params)
        q = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(diagonal)])
        roots = (oracles.jacobian(problem.apply_fn, params, x) * np.sqrt(q) for x in (x1, x2))
        return Factored.of(*map(jnp.asarray, roots))

    return kernel


def truth(problem, optimizer, steps, x_test=None):
    """Outputs (T + 1, N, C) of the network itself, on x or on x_test."""

    def step(carry, _):
        w, state = carry
        f, pull = jax.vjp(lambda v: problem.apply_fn(v, problem.x), w)
        (gradient,) = pull((jax.nn.softmax(f) - problem.targets) / 7)
        updates, state = optimizer.update(gradient, state, w)
        return (optax.apply_updates(w, updates), state), w

    first = problem.params, optimizer.init(problem.params)
    (last, _), weights = jax.lax.scan(step, first, length=steps)
    x = problem.x if x_test is None else x_test
    path = jax.vmap(lambda w: problem.apply_fn(w, x))(weights)
    return np.concatenate([path, problem.apply_fn(last, x)[None]])


def forecast(problem, optimizer, steps, ends, **options):
    return relinearized_recursion(
        problem.apply_fn, problem.params, problem.x, problem.labels, loss="cross_entropy",
        optimizer=optimizer, steps=steps, rebuilds=ends,
        kernel_fn=scaled_kernel(problem, problem.x, problem.x), **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_filters_are_recognized_by_their_updates(problem, name):
    optimizer, linear = FOLLOWED[name]
    found = preconditioned_filter(optimizer, problem.params, 20)
    assert found.linear == linear
    np.testing.assert_allclose(found.max_norm, 0.3 if "clipped" in name else np.inf)
    assert found.decays == ((False, True, True) if "mask" in name else found.decays)


@pytest.mark.parametrize("name", REFUSED)
def test_other_optimizers_are_refused(problem, name):
    with pytest.raises(ValueError, match="not one linear filter behind a diagonal"):
        preconditioned_filter(REFUSED[name], problem.params, 20)


def test_equal_programs_keep_their_own_numbers(problem):
    """Rates that only the initial state holds: one compiled program, two filters."""
    first, second = (
        preconditioned_filter(optax.inject_hyperparams(optax.adamw)(rate), problem.params, 3)
        for rate in (0.01, 0.02)
    )
    np.testing.assert_allclose(2 * first.scales, second.scales, rtol=1e-6)


def test_masks_that_look_at_sizes_are_followed_or_refused(problem):
    optimizer = optax.adamw(
        0.01, weight_decay=1.0, mask=lambda w: jax.tree.map(lambda a: a.size > 40, w)
    )
    try:
        path = forecast(problem, optimizer, 4, (1, 2, 3, 4))
    except ValueError:
        return
    np.testing.assert_allclose(path.train, truth(problem, optimizer, 4), atol=1e-7)


def test_a_first_rate_that_is_too_large_ends(problem):
    """After a step at rate zero the sign step is taken whatever its error."""
    optimizer = optax.adam(lambda count: jnp.where(count == 0, 0.0, 3.0))
    path = forecast(problem, optimizer, 6, "auto", tolerance=0.01)
    assert path.ends[0] == 2


def test_the_filter_of_adam_by_hand(problem):
    """u = eta (b1 m + (1 - b1) g) / (1 - b1^t) where all past gradients are 1."""
    found = preconditioned_filter(optax.adam(0.01, eps=0.0), problem.params, 3)
    t = np.arange(1, 4)[:, None]
    want = 0.01 * np.array([[0.1, 0.9]]) / (1 - 0.9**t)
    np.testing.assert_allclose(found.matrices[:, 0], want, rtol=1e-6)  # rates are float32
    np.testing.assert_allclose(found.matrices[:, 1], [[0.1, 0.9]] * 3, rtol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["adamw, schedule, mask", "nadam", "rmsprop", "clipped adam", "clipped momentum"],
)
def test_a_kernel_at_every_step_is_training_itself(problem, name):
    """Segments of one step: the diagonal, the filter and the decay are the optimizer's own."""
    optimizer, _ = FOLLOWED[name]
    path = forecast(
        problem, optimizer, 6, (1, 2, 3, 4, 5, 6), x_test=problem.x_test, damp=False,
        kernel_test_fn=scaled_kernel(problem, problem.x_test, problem.x),
    )  # fmt: skip
    # in float64; the filter's rates are float32 in optax's schedules
    np.testing.assert_allclose(path.train, truth(problem, optimizer, 6), atol=1e-7)
    want = truth(problem, optimizer, 6, x_test=problem.x_test)
    np.testing.assert_allclose(path.test, want, atol=1e-7)


def test_a_rate_that_falls_to_zero(problem):
    path = forecast(problem, MATRICES, 6, (2, 4, 6), damp=False)
    np.testing.assert_allclose(path.train, truth(problem, MATRICES, 6), atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adagrad", "clipped momentum"])
def test_order_of_convergence(problem, name):
    """Halving the segments divides the error by four or so, beyond the first steps."""
    optimizer, _ = FOLLOWED[name]
    want, errors = truth(problem, optimizer, 48), []
    for length in (8, 2):
        ends = tuple(dict.fromkeys((1, 2, 3, 4, *range(4 + length, 49, length), 48)))
        path = forecast(problem, optimizer, 48, ends, damp=False)
        errors.append(np.sqrt(np.mean((np.asarray(path.train) - want) ** 2)))
    assert np.log2(errors[0] / errors[1]) / 2 > 1.6, errors


def test_squares_are_their_mean_over_all_batches(problem):
    targets, loss = encode_targets("cross_entropy", problem.labels, jnp.asarray(problem.f0))
    pull = lambda w, x, a: jax.vjp(lambda v: problem.apply_fn(v, x), w)[1](a)[0]  # noqa: E731
    squares = _mean_squares(problem.apply_fn, pull, problem.x, targets, loss, 3)
    found = squares(problem.params, jnp.asarray(problem.f0))
    residual = loss.gradient(jnp.asarray(problem.f0), targets)
    batches = [np.array(rows) for rows in itertools.combinations(range(len(targets)), 3)]
    gradients = [pull(problem.params, problem.x[rows], residual[rows] / 3) for rows in batches]
    want = jax.tree.map(lambda *leaves: np.mean(np.square(leaves), axis=0), *gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), found, want)


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
def test_kernels_of_forecasts_are_those_behind_the_diagonal(problem, loss):
    y = problem.labels if loss == "cross_entropy" else jnp.asarray(problem.targets)
    whole = Problem.of(problem.apply_fn, problem.params, problem.x, y, loss=loss)
    view = whole.centered()
    diagonal = jax.tree.map(lambda w: w**2 + 0.1, problem.params)
    want = np.asarray(scaled_kernel(problem, problem.x, problem.x)(problem.params, diagonal))
    if loss == "cross_entropy":  # in centered logits, orthonormal contrasts of outputs
        basis = np.asarray(jax.jacrev(lambda f: view_of(view, f))(jnp.zeros(3)))
        want = np.einsum("ca,iajb,db->icjd", basis, want, basis)
    # In a sketch as wide as there are weights no two of them collide.
    size = sum(leaf.size for leaf in jax.tree.leaves(view.weights))
    sketch = Sketched(size, jax.random.key(0), factored=True)
    found = Linearizer(view, sketch).scaled(view.weights, diagonal)
    np.testing.assert_allclose(found.dense(), want, atol=1e-10)
    with pytest.raises(TypeError, match="kernel must be a Sketched"):
        Linearizer(view).scaled(view.weights, diagonal)


def view_of(view, f):
    from jaxttp.losses.centered_logits import centered_logits

    return centered_logits(f[None])[0]


def test_adam_needs_factors_and_no_accumulators(problem):
    with pytest.raises(ValueError, match="accumulators cannot be given"):
        forecast(problem, optax.adam(0.1), 4, (4,), accumulators=(problem.params,))
    with pytest.raises(TypeError, match=r"kernel_fn must return .*Factored"):
        relinearized_recursion(
            problem.apply_fn, problem.params, problem.x, problem.labels, loss="cross_entropy",
            optimizer=optax.adam(0.1), steps=4, rebuilds=1, kernel_fn=lambda w, q: jnp.eye(7),
        )  # fmt: skip
