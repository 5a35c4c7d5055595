"""Gradients that are not finite behind finite outputs: the sample and the parameter are named."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxttp
from jaxttp.adapters.outputs import check_gradients

BAD = 3
X = jax.random.normal(jax.random.key(0), (6, 4), jnp.float64).at[BAD].set(0.0)
Y = (X[:, 0] > 0).astype(int)
PARAMS = {
    "body": jax.random.normal(jax.random.key(1), (4, 5), jnp.float64),
    "head": jax.random.normal(jax.random.key(2), (6, 2), jnp.float64),
}
KEY = jax.random.key(0)
GOOD = np.delete(np.arange(6), BAD)


def network(params: Any, x: Any) -> Any:
    """Features and their norm, which has no derivative where all of them are 0."""
    h = x @ params["body"]
    return jnp.concatenate([h, jnp.linalg.norm(h, axis=-1, keepdims=True)], -1) @ params["head"]


ON = (network, PARAMS, X)


def _forecast(**how: Any) -> Callable[[], Any]:
    return lambda: jaxttp.predict_training_time(*ON, Y, steps=3, **how)


def _kernel(**how: Any) -> Callable[[], Any]:
    return lambda: jaxttp.empirical_ntk(*ON, **how)


def _curvature(kind: str, **how: Any) -> Callable[[], Any]:
    more = {} if kind == "gauss_newton" else {"y": Y, "loss": "cross_entropy"}
    return lambda: jaxttp.conditioning.curvature_matrix(*ON, kind=kind, **more, **how)


def _spectral(function: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: function(jaxttp.ntk_operator(*ON), key=KEY, depth=2)


def _curvature_product() -> Any:
    operator = jaxttp.conditioning.curvature_operator(*ON)
    return operator.mv(jnp.ones(operator.in_size()))


RATES = jaxttp.grid(learning_rate=(0.1, 0.2), steps=3)
TRAINING: dict[str, Any] = {"loss": "cross_entropy", "optimizer": optax.sgd(0.1), "steps": 3}
ENTRANCES = {
    "kernel, full": _kernel(),
    "sketch": lambda: jaxttp.sketch_jacobian(*ON, key=KEY, dim=4),
    "class sketch": lambda: jaxttp.class_sketch(*ON, key=KEY),
    "operator": lambda: jaxttp.ntk_operator(*ON).mv(jnp.ones((6, 2))),
    "density": _spectral(jaxttp.ntk.spectral_density),
    "momentum": _forecast(learning_rate=0.1, momentum=0.9, relinearize=0),
    "Adam": _forecast(optimizer=optax.adam(0.1)),
    "sweep": lambda: jaxttp.sweep(*ON, Y, RATES),
    "race": lambda: jaxttp.race(*ON, Y, RATES),
    "train": lambda: jaxttp.train(*ON, Y, **TRAINING),
    "diagonal noise": lambda: jaxttp.dynamics.diagonal_noise(*ON, Y, loss="cross_entropy"),
    "Gauss-Newton, parameters": _curvature("gauss_newton", form="parameters"),
    "functional Hessian": _curvature("functional_hessian"),
    "Gauss-Newton, product": _curvature_product,
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_the_sample_and_the_parameter_are_named(entrance: str) -> None:
    said = rf"gradient of sample {BAD} of x1? with respect to params\['body'\] is not finite"
    with pytest.raises(ValueError, match=said):
        ENTRANCES[entrance]()


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.1)])
def test_test_samples_are_named_as_such(optimizer: Any) -> None:
    with pytest.raises(ValueError, match=f"gradient of sample {BAD} of x_test "):
        jaxttp.predict_training_time(
            network, PARAMS, X[GOOD], Y[GOOD], optimizer=optimizer, steps=3, relinearize=0,
            x_test=X, y_test=Y,
        )  # fmt: skip


def test_second_derivatives_are_called_that() -> None:
    """|h|^1.5 has the gradient 0 at 0, and no second derivative."""
    with pytest.raises(ValueError, match=f"second derivative of sample {BAD} of x "):
        jaxttp.conditioning.curvature_matrix(
            lambda w, x: (jnp.abs(x @ w) + 0 * x[:, :1]) ** 1.5, PARAMS["body"], X, Y,
            kind="hessian", loss="cross_entropy",
        )  # fmt: skip


def test_frozen_parameters_do_not_count() -> None:
    """The head is linear on top of the norm: its kernel is that of the features (NumPy)."""
    kernel = jaxttp.empirical_ntk(*ON, output="trace", trainable={"body": False, "head": True})
    h = np.asarray(X) @ np.asarray(PARAMS["body"])
    features = np.concatenate([h, np.linalg.norm(h, axis=1, keepdims=True)], axis=1)
    np.testing.assert_allclose(kernel, features @ features.T, rtol=1e-12)  # rounding


def test_a_finite_result_asks_nothing_of_the_network() -> None:
    def never(params: Any, x: Any) -> Any:
        raise AssertionError

    check_gradients(never, PARAMS, X, jnp.ones(3))


def test_traced_values_pass() -> None:
    kernel = jax.jit(lambda params: jaxttp.empirical_ntk(network, params, X, output="trace"))
    assert not bool(jnp.all(jnp.isfinite(kernel(PARAMS))))


@pytest.mark.parametrize("count", [1, 8, 9, 17])
@pytest.mark.parametrize("last", [False, True])
def test_the_first_sample_is_found_wherever_it_is(count: int, last: bool) -> None:
    """Also where the last samples do not fill a batch of 8."""
    bad = count - 1 if last else count // 2
    x = jnp.ones((count, 2)).at[bad:].set(0.0)
    norm = lambda w, x: jnp.linalg.norm(x * w[None], axis=1, keepdims=True)  # noqa: E731
    with pytest.raises(ValueError, match=f"sample {bad} of x with respect to params is"):
        check_gradients(norm, jnp.ones(2), x, jnp.nan)
