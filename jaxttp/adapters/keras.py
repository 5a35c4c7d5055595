"""Models of Keras 3 on its JAX backend as `Model`s."""

import importlib
import warnings
from typing import Any

import jax.numpy as jnp

from jaxttp._core.types import Model, Params, noted
from jaxttp.adapters.evaluation import counted, describe


def from_keras(model: Any) -> Model:
    """A Keras 3 model in evaluation mode (``training=False``), as a pure function and parameters.

    The values of its variables are copied: training the model later changes nothing here. Its
    layers are referenced; do not add or freeze any afterwards.

    Args:
        model: a built instance of ``keras.Model`` (``keras.Sequential``, functional or a subclass)
            under the JAX backend, whose call takes x (N, ...): an array, or a dict or tuple of the
            model's inputs. Its outputs should be logits, without a softmax
            or sigmoid at the end.

    Returns:
        ``Model(apply_fn, params)``. `params` is a dict from the paths of the trainable variables,
        such as "dense/kernel", to arrays; everything else (running averages, frozen layers, seeds)
        is constant in `apply_fn`.

    Raises:
        ImportError: Keras 3 is missing.
        TypeError: `model` is no ``keras.Model``.
        ValueError: another backend than JAX; a model that is not built; nothing trainable.

    Example:
        >>> from_keras("model.keras")  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        ...
        TypeError: model must be a built keras.Model; got str...

    Source:
        Keras 3, ``Model.stateless_call``.
    """
    kinds = (f"{kind.__module__}." for kind in type(model).__mro__)
    if not any(kind.startswith(("keras.", "tensorflow.keras.", "tf_keras.")) for kind in kinds):
        raise TypeError(f"model must be a built keras.Model; got {type(model).__name__}.")
    try:
        keras: Any = importlib.import_module("keras")
    except ImportError as problem:
        raise ImportError("from_keras needs Keras 3: pip install 'jaxttp[keras]'.") from problem
    if keras.backend.backend() != "jax":
        raise ValueError(
            f"Keras runs on {keras.backend.backend()}: set the environment variable "
            "KERAS_BACKEND=jax before keras is imported; save an existing model with model.save "
            "and load it again."
        )
    if not isinstance(model, keras.Model):
        raise TypeError(f"model must be a built keras.Model; got {type(model).__name__}.")
    if not model.built:
        raise ValueError("model is not built: call it once, model(x), or give it an Input layer.")
    trained = list(model.trainable_variables)
    if not trained:
        raise ValueError("model has no trainable variable; set trainable=True on some layer.")
    names = [variable.path for variable in trained]
    if len({*names}) != len(names):
        names = [f"{index}/{name}" for index, name in enumerate(names)]
    constants = [jnp.asarray(variable.value) for variable in model.non_trainable_variables]
    _warn_of_probabilities(model)

    def apply_fn(params: Params, x: Any) -> Any:
        values = [params[name] for name in names]
        return model.stateless_call(values, constants, x, training=False)[0]

    described = [describe(layer) for layer in model._flatten_layers(include_self=False)]
    params = {name: jnp.asarray(v.value) for name, v in zip(names, trained, strict=True)}
    return Model(noted(apply_fn, lambda: counted(described)), params)


def _warn_of_probabilities(model: Any) -> None:
    """Warn of a model whose last layer gives probabilities."""
    last = (getattr(model, "layers", None) or [None])[-1]
    activation = getattr(last, "activation", None)
    name = getattr(activation, "__name__", type(last).__name__.lower())
    if name in ("softmax", "sigmoid"):
        warnings.warn(
            f"model ends in a {name}: cross-entropies here take logits, as losses of Keras do with "
            "from_logits=True. Leave that activation out.",
            UserWarning, stacklevel=3,
        )  # fmt: skip
