"""What people pass in place of arrays and functions: it works, or one line says what would."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jaxttp import (
    Candidate,
    compare,
    predict_training_time,
    sweep,
    train,
)
from jaxttp.adapters.inputs import check_samples
from jaxttp.forecast import grid

X = np.linspace(-1.0, 1.0, 24).reshape(8, 3)
Y = np.arange(8) % 2
W = jnp.ones((3, 2))
SETTINGS = grid(learning_rate=0.1, steps=3)
SGD = {"loss": "cross_entropy", "optimizer": optax.sgd(0.1)}


def linear(params, x):
    return x @ params


CALLS = {
    "predict": lambda f, w, x, y: predict_training_time(
        f, w, x, y, learning_rate=0.1, steps=3, relinearize=0
    ),
    "sweep": lambda f, w, x, y: sweep(f, w, x, y, SETTINGS, relinearize=0),
    "compare": lambda f, w, x, y: compare(
        {"a": Candidate(f, w)}, x, y, steps=3, time_steps=False, relinearize=0
    ),
    "train": lambda f, w, x, y: train(f, w, x, y, steps=2, **SGD),
}


class TorchLike:
    """Stands for torch.nn.Linear: the class says which package it is of; torch is not needed."""

    def __call__(self, x):
        raise AssertionError("a module of PyTorch was called")

    def forward(self, x):
        raise AssertionError("a module of PyTorch was called")


TorchLike.__module__ = "torch.nn.modules.linear"


class TensorLike:
    """Likewise a parameter of it."""


TensorLike.__module__ = "torch.nn.parameter"


class Strict(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(x)


def wrong_way(x, params):
    return x @ params


RAGGED = [[1.0, 2.0], [3.0]]
WRONG = {
    "PyTorch": ((TorchLike(), W, X), r"is a module of PyTorch .*from_torch.*load_weights"),
    "its method": ((TorchLike().forward, W, X), r"is a module of PyTorch"),
    "its tensors": ((linear, {"w": TensorLike()}, X), "params holds tensors of PyTorch.*numpy"),
    "NNX": ((nnx.Linear(3, 2, rngs=nnx.Rngs(0)), W, X), r"params = jaxttp.from_nnx\(module\)"),
    "Linen": ((Strict(), W, X), r"apply_fn, params = jaxttp.from_linen\(module, variables\)"),
    "swapped": ((wrong_way, W, X), r"called as apply_fn\(params, x\). Give lambda params, x: "),
    "lengths": ((linear, W, {"a": X, "b": X[:7]}), r"x\['b'\] has 7 rows, x\['a'\] 8: every array"),
    "ragged": ((linear, W, RAGGED), "x must be one array .*this list .* pad or crop them"),
    "text": ((linear, W, [["a", "b", "c"]] * 8), "x must hold numbers; got text. Convert it"),
    "no sample": ((linear, W, X[:0]), r"x must hold at least one sample; got x of shape \(0, 3\)"),
    "no sample in a tree": (
        (linear, W, {"a": X[:0]}),
        r"x must hold at least one sample; got x\['a'\] \(0, 3\)",
    ),
    "objects": ((linear, W, np.array([[1, None, 2]] * 8)), "x must hold numbers; got dtype object"),
}


@pytest.mark.parametrize("call", ["predict", "train"])
@pytest.mark.parametrize("name", WRONG)
def test_one_line_with_the_cure(name, call):
    (apply_fn, params, x), message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        CALLS[call](apply_fn, params, x, Y)
    assert "\n" not in str(caught.value)


def test_bytes_and_tokens_are_taken_as_they_are():
    assert CALLS["predict"](linear, W, (X * 9).astype(np.uint8), Y).stable
    tokens = CALLS["predict"](lambda table, t: table[t], jnp.zeros((5, 2)), np.arange(8) % 5, Y)
    assert tokens.stable


class Frame:
    """Stands for a pandas.DataFrame: NumPy knows how to read it."""

    def __array__(self, dtype=None, copy=None):
        return np.asarray(X, dtype)


@pytest.mark.parametrize(
    "x", [X.tolist(), Frame(), jnp.asarray(X), [jnp.asarray(row) for row in X]]
)
def test_whatever_makes_an_array_is_welcome(x):
    np.testing.assert_array_equal(check_samples("x", x), X)


def narrow(dtype):
    return W.astype(dtype), jnp.asarray(X, dtype)


def test_coarse_parameters_are_promoted_and_said():
    """The forecast is that of the same numbers in float32, samples in half precision with them."""
    params, x = narrow("bfloat16")
    with pytest.warns(UserWarning, match="parameters promoted from bfloat16 to float32"):
        found = CALLS["predict"](linear, params, x, Y)
    wide = CALLS["predict"](linear, params.astype("float32"), x.astype("float32"), Y)
    np.testing.assert_array_equal(found.loss, wide.loss)


def test_coarse_outputs_are_refused_by_a_forecast():
    """Two or three digits: no small eigenvalues, and steps of the loss that are not there."""
    dtype = "bfloat16"
    for call in ("predict", "sweep", "compare"):
        with pytest.raises(ValueError, match=f"apply_fn returns {dtype}, too coarse .*float32"):
            CALLS[call](lambda p, x: (x @ p).astype(dtype), W, X, Y)


def test_linen_variables_in_place_of_parameters_are_refused():
    """Running averages would be trained; a choice of what trains is believed."""
    variables = {"params": W, "batch_stats": {"mean": jnp.zeros(W.shape[0])}}

    def whole(v, x):
        return (x - v["batch_stats"]["mean"][None]) @ v["params"]

    options = {"learning_rate": 0.1, "steps": 3, "relinearize": 0}
    with pytest.raises(ValueError, match=r"would be trained like weights; use from_linen"):
        predict_training_time(whole, variables, X, Y, **options)
    chosen = {"params": True, "batch_stats": False}
    assert predict_training_time(whole, variables, X, Y, trainable=chosen, **options).stable
