"""The options of a forecast: which go together, checked before anything is computed."""

from typing import Any

import optax
from jaxtyping import Array

from jaxttp._checks import check_choice, check_integer, check_key, check_number
from jaxttp._types import Params
from jaxttp.dynamics.filters import linear_filter
from jaxttp.forecast.crossing import METRICS, RULES

DYNAMICS = ("auto", "recursion", "ode", "closed_form", "sde", "weight_space")


def choose_dynamics(
    dynamics: str,
    optimizer: optax.GradientTransformation | None,
    params: Params,
    relinearize: int | str,
    steps: int,
) -> str:
    """What "auto" means for this optimiser; None is gradient descent, which is linear."""
    if optimizer is None or dynamics not in ("auto", "recursion"):
        return "recursion" if dynamics == "auto" else dynamics
    if relinearize:
        return "recursion"
    try:
        linear_filter(optimizer, params, steps=steps)
    except ValueError:
        if dynamics == "recursion":
            raise
        return "weight_space"
    return "recursion"


def check_options(
    learning_rate: Any,
    momentum: Any,
    batch_size: int | None,
    optimizer: Any,
    steps: int,
    dynamics: str,
    relinearize: int | str,
    sketch_dim: int | None,
    key: Array | None,
    rule: str,
    metric: str,
) -> dict[str, Any]:
    """Refuse options out of range or that contradict each other; return them as plain values."""
    if (learning_rate is None) == (optimizer is None):
        given = "neither" if learning_rate is None else "both"
        raise ValueError(
            f"give exactly one of learning_rate and optimizer; got {given}. "
            "learning_rate=0.1 is optimizer=optax.sgd(0.1)."
        )
    check_number("momentum", momentum, at_least=0.0, below=1.0)
    if optimizer is not None and momentum:
        raise ValueError(
            f"momentum={momentum} goes with learning_rate; put it into the optimizer: "
            "optax.sgd(rate, momentum)."
        )
    if learning_rate is not None:
        check_number("learning_rate", learning_rate, above=0.0)
    check_key(key)
    check_integer("steps", steps, at_least=1)
    check_choice("dynamics", dynamics, DYNAMICS)
    check_choice("rule", rule, RULES)
    check_choice("metric", metric, METRICS)
    if relinearize != "auto":
        remedy = "It counts kernels after the first; 'auto' chooses."
        check_integer("relinearize", relinearize, at_least=0, remedy=remedy)
    if batch_size is not None and key is None:
        raise ValueError(
            f"batch_size={batch_size} needs key: batches are drawn at random; pass "
            "key=jax.random.key(0)."
        )
    if sketch_dim is not None:
        check_integer("sketch_dim", sketch_dim, at_least=1)
        if key is None:
            raise ValueError(
                f"sketch_dim={sketch_dim} needs key: the projection is drawn at random; pass "
                "key=jax.random.key(0)."
            )
    if dynamics in ("ode", "closed_form"):
        for name, value in (("optimizer", optimizer), ("batch_size", batch_size)):
            if value is not None:
                raise ValueError(
                    f"{name} cannot be used with dynamics={dynamics!r}; use 'recursion'."
                )
    if dynamics == "sde" and (optimizer is not None or batch_size is None):
        raise ValueError(
            "dynamics='sde' is for learning_rate (and momentum) with batch_size; use 'recursion' "
            "for other optimisers and for full batches."
        )
    if relinearize and dynamics not in ("auto", "recursion", "sde"):
        raise ValueError(f"relinearize needs dynamics='recursion' or 'sde'; got {dynamics!r}.")
    return {
        "learning_rate": None if learning_rate is None else float(learning_rate),
        "momentum": float(momentum),
        "batch_size": batch_size,
        "optimizer": None if optimizer is None else "optax",
        "steps": steps,
        "relinearize": relinearize,
        "sketch_dim": sketch_dim,
    }
