"""What compiled functions remember of a user's functions: their equations, and nothing they read.

The oracle of a public function that was called before with another value of a global is the same
public function, called with a network that holds that value by itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxttp
from jaxttp import conditioning, dynamics, forecast
from jaxttp._core.traced import Keyed, Network, trace_network
from jaxttp.losses import Loss, unexplained_variance
from tests.draws import normal

X = normal(0, (6, 4))
Y = np.asarray(X[:, 0] > 0).astype(int)
W = normal(1, (3, 2), 1 / 2)
BACKBONE = normal(2, (4, 3))


def network_with(factor):
    """A head on a frozen backbone times a factor."""
    return lambda w, x: jnp.tanh(x @ (factor * BACKBONE)) @ w


class Stateful:
    """The same in the ways of notebooks: a global, an array changed in place, an attribute."""

    def __init__(self):
        self.array = np.ones(())
        self.change(1.0)

    def change(self, factor):
        global FACTOR
        FACTOR = factor ** (1 / 3)  # cube roots: each of the three has to be seen
        self.array[...] = FACTOR
        self.factor = BACKBONE * FACTOR

    def __call__(self, w, x):
        return jnp.tanh(x @ (FACTOR * self.array * self.factor)) @ w


def predicted(f, x, **options):
    return jaxttp.predict_training_time(f, W, x, Y, steps=5, **options).loss


SGD = {"loss": "cross_entropy", "optimizer": optax.sgd(0.5), "steps": 5}
KEY = jax.random.key(0)
RATES = forecast.grid(learning_rate=(0.1, 0.5), steps=5)
DOORS = {
    "empirical_ntk": lambda f, x: jaxttp.empirical_ntk(f, W, x),
    "vector products": lambda f, x: jaxttp.empirical_ntk(f, W, x, method="vector_product"),
    "sketch_jacobian": lambda f, x: jaxttp.sketch_jacobian(f, W, x, key=KEY, dim=8),
    "ntk_operator": lambda f, x: jaxttp.ntk_operator(f, W, x).mv(jnp.ones((6, 2))),
    "class_sketch": lambda f, x: jaxttp.ntk.class_sketch(f, W, x, key=KEY).kernel,
    "rebuilt kernels": lambda f, x: predicted(
        lambda w, x: f(jnp.tanh(w), x), x, learning_rate=0.5, momentum=0.5, relinearize=1
    ),
    "Adam": lambda f, x: predicted(f, x, optimizer=optax.adam(0.1)),
    "flow": lambda f, x: predicted(f, x, learning_rate=0.5, dynamics="ode", relinearize=0),
    "sweep": lambda f, x: jaxttp.sweep(f, W, x, Y, RATES, relinearize=0).loss,
    "race": lambda f, x: jaxttp.race(f, W, x, Y, RATES, target_loss=0.01).losses[0],
    "compare": lambda f, x: jaxttp.compare(
        {"a": jaxttp.Candidate(f, W)}, x, Y, learning_rate=0.5, steps=5, time_steps=False,
        relinearize=0,
    ).sweep.loss,
    "stale gradients": lambda f, x: forecast.stale_gradient_forecast(
        f, W, x, Y, x_watched=x, y_watched=Y, loss="cross_entropy", optimizer=optax.sgd(0.5),
        steps=40, batch_size=3, key=KEY, fraction=0.9,
    ).loss,
    "train": lambda f, x: jaxttp.train(f, W, x, Y, **SGD).loss,
    "curvature_matrix": lambda f, x: conditioning.curvature_matrix(f, W, x),
    "curvature_operator": lambda f, x: conditioning.curvature_operator(f, W, x).mv(jnp.ones(6)),
    "diagonal_noise": lambda f, x: dynamics.diagonal_noise(f, W, x, Y, loss="cross_entropy"),
}  # fmt: skip


@pytest.mark.parametrize("name", DOORS)
def test_what_a_network_reads_is_read_at_every_call(name):
    """A factor on the backbone is one on the samples, of which each call is told."""
    stateful = Stateful()
    before, expected = (np.asarray(DOORS[name](stateful, x)) for x in (X, 0.5 * X))
    stateful.change(0.5)
    found = np.asarray(DOORS[name](stateful, X))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)  # rounding, along a path
    assert not np.allclose(before, found, rtol=1e-3)


def test_what_a_schedule_reads_is_read_at_every_call():
    """The network is linear in its weights: all three are exact."""

    def schedule(step):
        return rate * 0.9**step

    f, curves = network_with(1.0), []
    for rate in (0.1, 1.0):  # noqa: B007  (the schedule reads it)
        given = {"loss": "cross_entropy", "optimizer": optax.sgd(schedule), "steps": 5}
        curves.append(np.asarray(jaxttp.train(f, W, X, Y, **given).loss))
        path = dynamics.weight_space(f, W, X, Y, **given).train
        for found in (
            predicted(f, X, optimizer=optax.sgd(schedule), relinearize=0),
            [dynamics_loss(outputs) for outputs in path],
        ):
            np.testing.assert_allclose(found, curves[-1], rtol=1e-6)  # rates in float32
    assert not np.allclose(*curves, rtol=1e-2)


def dynamics_loss(outputs):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, Y).mean()


def test_what_a_loss_reads_is_read_at_every_call():
    def sample_loss(outputs, targets):
        return weight * 0.5 * jnp.sum((outputs - targets) ** 2)

    own = Loss("own", sample_loss, unexplained_variance)
    y = normal(3, (6, 2))
    for weight in (1.0, 3.0):
        path = jaxttp.predict_training_time(
            network_with(1.0), W, X, y, steps=5, loss=own, learning_rate=0.2, relinearize=0
        ).loss
        run = jaxttp.train(
            network_with(1.0), W, X, y, loss=own, optimizer=optax.sgd(0.2), steps=5
        ).loss
        np.testing.assert_allclose(path, run, rtol=1e-9)  # a network linear in w: exact
        plain = own.value(jnp.zeros((6, 2)), y)
        np.testing.assert_allclose(plain, weight * 0.5 * np.sum(y**2) / 6, rtol=1e-12)


def surrogate(slope):
    """A step function with a derivative of its own, as networks of spikes have it."""

    @jax.custom_jvp
    def spike(x):
        return (x > 0).astype(x.dtype)

    @spike.defjvp
    def rule(primals, tangents):
        return spike(*primals), tangents[0] * slope / (1 + jnp.abs(primals[0]))

    return spike


def reverse_surrogate(slope):
    @jax.custom_vjp
    def spike(x):
        return (x > 0).astype(x.dtype)

    spike.defvjp(lambda x: (spike(x), x), lambda x, g: (g * slope / (1 + jnp.abs(x)),))
    return spike


def program(function):
    return trace_network(function, W, X[:, :3]).program


@pytest.mark.parametrize("make", [surrogate, reverse_surrogate])
def test_rules_of_derivatives_belong_to_the_program(make):
    same, again, other = (program(lambda w, x, s=s: make(s)(x @ w)) for s in (1.0, 1.0, 2.0))
    assert same is again
    assert same is not other
    kernels = [
        jaxttp.empirical_ntk(lambda w, x, s=s: make(s)(x @ w), W, X[:, :3]) for s in (1.0, 2.0)
    ]
    np.testing.assert_allclose(kernels[1], 4 * kernels[0], rtol=1e-12)


def noticing(factor):
    """A rule that does something else for inputs that do not move."""

    @jax.custom_jvp
    def product(w, x):
        return x @ w

    def rule(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        zero = jax.custom_derivatives.SymbolicZero
        slope = factor if type(dx) is zero else 1.0
        moved = jnp.zeros((len(x), 2)) if type(dx) is zero else dx @ w
        return x @ w, moved if type(dw) is zero else moved + slope * (x @ dw)

    product.defjvp(rule, symbolic_zeros=True)
    return product


def nested(factor):
    """Two functions of the same values, of which one is within the rule of the other."""

    @jax.custom_jvp
    def inner(x):
        return x * x

    @jax.custom_jvp
    def outer(x):
        return x * x

    inner.defjvp(lambda p, t: (p[0] ** 2, t[0] * 2 * factor * p[0]))
    outer.defjvp(lambda p, t: (p[0] ** 2, t[0] * inner(p[0])))
    return lambda w, x: outer(x @ w)


@pytest.mark.parametrize("make", [noticing, nested])
def test_rules_of_rules_and_of_what_does_not_move_belong_to_the_program(make):
    same, again, other = (program(make(factor)) for factor in (2.0, 2.0, 3.0))
    assert same is again
    assert same is not other


def test_a_keyed_loss_stays_what_it_was():
    def sample_loss(outputs, targets):
        return weight * jnp.sum((outputs - targets) ** 2)

    own, f, y = Loss("own", sample_loss, unexplained_variance), jnp.zeros((2, 1)), jnp.ones((2, 1))
    weight = 1.0
    targets, first = jaxttp.losses.encode_targets(own, y, f)
    weight = 2.0
    assert first.value(f, targets) == 1.0
    assert own.value(f, targets) == 2.0


def test_an_activation_is_read_at_every_call():
    def activation(z):
        return jnp.tanh(slope * z)

    weights, x = normal(3, (2, 2, 2, 4), 1 / 2), normal(4, (3, 4))
    bottlenecks = normal(5, (2, 2, 4, 2), 1 / 2)
    for slope in (1.0, 2.0):
        run = jaxttp.gauss_newton.revmlp_forward
        found = run(weights, bottlenecks, x, activation=activation)
        expected = run(
            weights, bottlenecks, x, activation=lambda z, s=slope: jnp.tanh(jnp.asarray(s) * z)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-12)


DIFFERENT = {
    "a number": (lambda w, x: x @ w * 2.0, lambda w, x: x @ w * 3.0),
    "a sign of zero": (lambda w, x: x @ w + 0.0, lambda w, x: x @ w + -0.0),
    "a kind of number": (lambda w, x: x @ w * 2, lambda w, x: x @ w * np.float64(2.5)),
    "an operation": (lambda w, x: jnp.tanh(x @ w), lambda w, x: jnp.sin(x @ w)),
    "within a loop": tuple(
        lambda w, x, s=s: jax.lax.scan(lambda c, _: (s * c, None), x @ w, length=2)[0]
        for s in (2.0, 3.0)
    ),
    "within a branch": tuple(
        lambda w, x, s=s: jax.lax.cond(x[0, 0] > 0, lambda f: s * f, lambda f: f, x @ w)
        for s in (2.0, 3.0)
    ),
    "rematerialized": tuple(
        lambda w, x, s=s: jax.checkpoint(lambda f: jnp.sin(s * f))(x @ w) for s in (2.0, 3.0)
    ),
    "a callback": tuple(
        lambda w, x, s=s: jax.pure_callback(lambda f: s * f, jax.typeof(x @ w), x @ w)
        for s in (2.0, 3.0)
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_networks_are_different_programs(name):
    one, other = DIFFERENT[name]
    assert program(one) is not program(other)


def test_arrays_of_a_closure_are_no_part_of_the_program():
    one, other = (
        trace_network(lambda w, x, c=c: x @ (w * c), W, X[:, :3])
        for c in (jnp.ones((3, 2)), jnp.zeros((3, 2)))
    )
    assert one.program is other.program
    assert [len(traced.constants) for traced in (one, other)] == [1, 1]
    assert not np.any(other(W, X[:, :3]))


def test_arrays_within_a_jit_are_arguments_too():
    table = jnp.arange(12.0).reshape(6, 2)
    inner = jax.jit(lambda f: f + table)
    traced = trace_network(lambda w, x: inner(x @ w), W, X[:, :3])
    assert len(traced.constants) == 1
    np.testing.assert_allclose(traced(W, X[:, :3]), X[:, :3] @ W + table, rtol=1e-14)


def test_a_network_is_traced_once_for_a_shape():
    shapes = []

    def counted(w, x):
        shapes.append(x.shape)
        return x @ w

    network = Network(counted)
    for rows in (6, 6, 3, 6):
        network.run(W, X[:rows, :3])
    assert shapes == [(6, 3), (3, 3)]


def test_what_closes_over_traced_values_equals_itself_alone():
    seen = []

    @jax.jit
    def look(rate):
        one, other = (Keyed(lambda x: rate * x, jnp.ones(2)) for _ in range(2))
        seen.extend([one == one, one == other, one.is_traced])
        return rate

    look(1.0)
    assert seen == [True, False, True]


def test_a_network_under_jit_may_close_over_traced_values():
    def trace_of(factor):
        return jnp.trace(jaxttp.empirical_ntk(network_with(factor), W, X, output="trace"))

    expected = [trace_of(1.0), trace_of(0.5)]
    np.testing.assert_allclose(
        [jax.jit(trace_of)(1.0), jax.jit(trace_of)(0.5)], expected, rtol=1e-12
    )
    np.testing.assert_allclose(jax.vmap(trace_of)(jnp.array([1.0, 0.5])), expected, rtol=1e-12)
