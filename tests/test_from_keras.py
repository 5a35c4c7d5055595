"""Models of Keras 3, where it is installed with the JAX backend; else the refusals.

KERAS_BACKEND=jax python -m pytest -n 0 -s tests/test_from_keras.py
"""

import importlib.util
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import empirical_ntk, from_keras, predict_training_time

X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def keras():
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = "jax"
    import keras

    if keras.backend.backend() != "jax":
        pytest.skip(f"keras was imported with the backend {keras.backend.backend()}")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield keras


def sequential(keras):
    layers = keras.layers
    keras.utils.set_random_seed(0)
    model = keras.Sequential([
        keras.Input((5,)), layers.Dense(8, activation="tanh"), layers.BatchNormalization(),
        layers.Dropout(0.3), layers.Dense(2),
    ])  # fmt: skip
    model(X * 2 + 1, training=True)  # running averages that are not those at the start
    return model


def test_outputs_and_kernel(keras):
    """The kernel against one gradient an output; float32 on both sides."""
    model = sequential(keras)
    before = [np.array(v.value) for v in model.variables]
    apply_fn, params = from_keras(model)
    expected = np.asarray(model(X, training=False))
    np.testing.assert_allclose(apply_fn(params, jnp.asarray(X)), expected, atol=1e-6)
    trained, fixed = model.trainable_variables, [v.value for v in model.non_trainable_variables]
    call = lambda values, i, c: model.stateless_call(values, fixed, X[i : i + 1])[0][0, c]  # noqa: E731
    values = [v.value for v in trained]
    rows = []
    for i in range(6):
        for c in range(2):
            grads = jax.grad(call)(values, i, c)
            rows.append(np.concatenate([np.asarray(g, float).reshape(-1) for g in grads]))
    brute = (np.stack(rows) @ np.stack(rows).T).reshape(6, 2, 6, 2)
    kernel = empirical_ntk(apply_fn, params, jnp.asarray(X))
    off = np.abs(kernel - brute).max() / brute.max()
    print(f"\nkeras {keras.__version__}: kernel off by {off:.1e} of the largest")
    assert off < 1e-5
    for v, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(v.value, value)
    found = predict_training_time(
        apply_fn, params, X, np.arange(6) % 2, learning_rate=0.1, steps=5, relinearize=0
    )
    assert found.stable
    assert set(found.notes) == {"1 BatchNorm on running averages", "1 dropout (0.3) off"}
    trained[0].assign(trained[0] * 0)  # later changes do not matter
    np.testing.assert_allclose(apply_fn(params, jnp.asarray(X)), expected, atol=1e-6)


def test_functional_models_and_refusals(keras):
    layers = keras.layers
    ids, mask = keras.Input((4,), dtype="int32", name="ids"), keras.Input((4,), name="mask")
    h = layers.Embedding(9, 3)(ids) * keras.ops.expand_dims(mask, -1)
    model = keras.Model({"ids": ids, "mask": mask}, layers.Dense(2)(keras.ops.sum(h, 1)))
    x = {"ids": jnp.arange(8).reshape(2, 4), "mask": jnp.ones((2, 4), jnp.float32)}
    apply_fn, params = from_keras(model)
    np.testing.assert_allclose(apply_fn(params, x), model(x), rtol=1e-6)
    with pytest.raises(ValueError, match="model is not built"):
        from_keras(keras.Sequential([layers.Dense(2)]))
    frozen = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    frozen.trainable = False
    with pytest.raises(ValueError, match="no trainable variable"):
        from_keras(frozen)
    with pytest.warns(UserWarning, match="ends in a softmax: cross-entropies here take logits"):
        from_keras(keras.Sequential([keras.Input((3,)), layers.Dense(2, activation="softmax")]))
    with pytest.raises(TypeError, match="got Dense"):
        from_keras(layers.Dense(2))


def test_other_things_are_refused(monkeypatch):
    with pytest.raises(TypeError, match=r"built keras\.Model; got dict"):
        from_keras({})
    monkeypatch.setitem(sys.modules, "keras", None)
    fake = type("Sequential", (), {"__module__": "keras.src.models.sequential"})()
    with pytest.raises(ImportError, match=r"needs Keras 3: pip install 'jaxttp\[keras\]'"):
        from_keras(fake)
