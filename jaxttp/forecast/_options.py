"""The options of a forecast: which go together, checked before anything is computed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxttp._checks import (
    check_choice,
    check_integer,
    check_key,
    check_number,
    check_optimizer,
    check_used,
)
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters import output_shape
from jaxttp.dynamics.diffusion import NOISES
from jaxttp.dynamics.filters import linear_filter
from jaxttp.losses import Loss, get_loss
from jaxttp.ntk._select import leaf_paths, select_leaves

DYNAMICS = ("auto", "recursion", "ode", "closed_form", "sde", "weight_space")


class Modes(NamedTuple):
    """Options that only some dynamics have, with their defaults; see `predict_training_time`."""

    noise: str = "full"
    paths: int = 32
    tolerance: float = 0.02
    level: float = 0.9


def check_model(
    apply_fn: ApplyFn, params: Params, x: Any, trainable: Any = None
) -> tuple[int, int]:
    """The outputs' shape (N, C) of a network that is fit for a forecast, from shapes alone.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: its parameters.
        x: training samples (N, ...).
        trainable: which parameters train, as in `empirical_ntk`.

    Returns:
        ``(N, C)``.

    Raises:
        TypeError: see `output_shape`.
        ValueError: see `output_shape`; parameters that train, or outputs, of less than float32,
            whose losses have two or three digits and their kernels no small eigenvalues.
    """
    shape = output_shape(apply_fn, params, x)
    chosen = select_leaves(params, trainable)
    leaves = zip(leaf_paths(params), jax.tree.leaves(params), chosen, strict=True)
    for path, leaf, counts in leaves:
        dtype = jnp.result_type(leaf)
        if counts and dtype.itemsize < 4:
            raise ValueError(
                f"params{f' at {path}' if path else ''} are {dtype}, too coarse for a forecast; "
                "cast them to float32: params = jax.tree.map(lambda a: a.astype('float32'), "
                "params), and x likewise."
            )
    dtype = jax.eval_shape(apply_fn, params, x).dtype
    if dtype.itemsize < 4:
        raise ValueError(
            f"apply_fn returns {dtype}, too coarse for a forecast; let it return float32: "
            "lambda params, x: apply_fn(params, x).astype('float32')."
        )
    return shape


def check_modes(
    dynamics: str,
    relinearize: int | str,
    sketch_dim: int | None,
    loss: str | Loss,
    noise: str | None,
    paths: int | None,
    tolerance: float | None,
    level: float | None,
    kernel_batch_size: int | None,
    max_bytes: int | None,
) -> Modes:
    """Refuse options out of range or of other dynamics; return them with the defaults filled in.

    Args:
        dynamics: as `choose_dynamics` says.
        relinearize: see `predict_training_time`, as all others.
        sketch_dim: see there.
        loss: see there.
        noise: see there.
        paths: see there.
        tolerance: see there.
        level: see there.
        kernel_batch_size: see there.
        max_bytes: see there.

    Returns:
        The four that have defaults.

    Raises:
        ValueError: an option that is out of range, or that would be ignored.
    """
    known = get_loss(loss)
    if dynamics == "closed_form" and known.name != "squared_error":
        raise ValueError(
            f"loss={loss!r} has no closed form; use 'squared_error', or dynamics='ode'."
        )
    sde = dynamics == "sde"
    check_used("noise", noise, sde, "it is the noise of dynamics='sde'")
    check_used("paths", paths, sde, "it counts the paths of dynamics='sde'")
    remedy = "it is the goal of relinearize='auto'"
    check_used("tolerance", tolerance, relinearize == "auto", remedy)
    sketched = sketch_dim is not None and sketch_dim > 1 and dynamics != "weight_space"
    remedy = (
        "it is the share that bands hold, which are those of dynamics='sde' and, unless in weight "
        "space, of a sketch_dim above 1"
    )
    check_used("level", level, sde or sketched, remedy)
    remedy = "it bounds an exact kernel; with sketch_dim give kernel_batch_size"
    check_used("max_bytes", max_bytes, sketch_dim is None, remedy)
    given = {"noise": noise, "paths": paths, "tolerance": tolerance, "level": level}
    found = Modes(**{name: value for name, value in given.items() if value is not None})
    check_choice("noise", found.noise, NOISES)
    check_integer("paths", found.paths, at_least=1)
    check_number("tolerance", found.tolerance, above=0.0)
    check_number("level", found.level, above=0.0, below=1.0, remedy="90 % is 0.9.")
    check_memory(kernel_batch_size, max_bytes)
    return found


def check_memory(batch_size: int | None, max_bytes: int | None) -> None:
    """Refuse bounds on a kernel's working memory that are out of range."""
    if batch_size is not None:
        check_integer("kernel_batch_size", batch_size, at_least=1)
    if max_bytes is not None:
        check_number("max_bytes", max_bytes, above=0.0)


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
        linear_filter(optimizer, params, steps=steps)  # no other can be re-linearised
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
    if optimizer is not None:
        check_optimizer(optimizer)
    check_key(key)
    check_integer("steps", steps, at_least=1)
    check_choice("dynamics", dynamics, DYNAMICS)
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
