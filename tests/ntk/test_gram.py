import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import empirical_ntk
from tests import oracles

KEYS = jax.random.split(jax.random.key(5), 4)
PARAMS = {"a": jax.random.normal(KEYS[0], (4, 6)), "b": jax.random.normal(KEYS[1], (6, 3))}
X1, X2 = jax.random.normal(KEYS[2], (7, 4)), jax.random.normal(KEYS[3], (5, 4))


def network(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


@pytest.mark.parametrize("method", ["auto", "jacobian", "vector_product"])
@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
@pytest.mark.parametrize("cross", [False, True])
def test_equals_brute_force(method, batch_size, cross):
    x2 = X2 if cross else None
    want = oracles.kernel(network, PARAMS, X1, x2)
    options = {"method": method, "batch_size": batch_size}
    got = empirical_ntk(network, PARAMS, X1, x2, **options)
    np.testing.assert_allclose(got, want, atol=1e-10)
    trace = empirical_ntk(network, PARAMS, X1, x2, output="trace", **options)
    np.testing.assert_allclose(trace, np.einsum("ncmc->nm", want) / 3, atol=1e-10)
    diagonal = empirical_ntk(network, PARAMS, X1, x2, output="diagonal", **options)
    np.testing.assert_allclose(diagonal, np.einsum("ncmc->nmc", want), atol=1e-10)


def test_symmetric_to_the_bit():
    kernel = np.asarray(empirical_ntk(network, PARAMS, X1, batch_size=3))
    np.testing.assert_array_equal(kernel, kernel.transpose(2, 3, 0, 1))


@pytest.mark.parametrize(
    "trainable",
    [{"a": False, "b": True}, lambda path: "b" in path, {"a": False, "b": np.bool_(True)}],
)
def test_frozen_parameters_add_nothing(trainable):
    features = jnp.tanh(X1 @ PARAMS["a"])
    want = oracles.kernel(lambda w, x: x @ w, PARAMS["b"], features)
    got = empirical_ntk(network, PARAMS, X1, trainable=trainable)
    np.testing.assert_allclose(got, want, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"output": "sum"}, "output"),
        ({"method": "guess"}, "method"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_bytes": 10}, "max_bytes"),
        ({"trainable": {"a": False, "b": False}}, "trainable"),
        ({"trainable": {"c": True}}, "trainable"),
        ({"x2": X2[:, :2]}, "x2"),
        ({"x1": X1.at[0].set(jnp.nan)}, "x1"),
        ({"x1": X1[:0]}, "x1"),
    ],
)
def test_bad_input_names_the_argument(change, words):
    options = {"x1": X1} | change
    with pytest.raises(ValueError, match=words):
        empirical_ntk(network, PARAMS, options.pop("x1"), options.pop("x2", None), **options)
