"""The change of the outputs by a Gauss-Newton step: the loss's gradient, or H⁺ times it.

A Gauss-Newton step with H = 1 moves the outputs against ε = ∂ℓ/∂f; a generalized one against H⁺ε,
H being the loss's Hessian in the outputs. Both act on each sample by itself, so the outputs under
such steps can be forecast without the network.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_array, check_choice, check_finite, check_integer, check_number
from jaxttp._core.compile import full_precision
from jaxttp._core.results import RESULT
from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.losses import Loss, binary_cross_entropy, cross_entropy, encode_targets, squared_error

CURVATURES = ("identity", "hessian")


@full_precision
def output_change(
    outputs: ArrayLike,
    y: Any,
    *,
    loss: str | Loss,
    curvature: str = "identity",
    damping: ArrayLike = 1e-3,
) -> Float[Array, "n c"]:
    """The ε that `gauss_newton_direction` takes: ∂ℓ/∂f, or (H + λ)⁺ ∂ℓ/∂f for the generalized step.

        softmax: H⁺ε = mean_c(y/p) − y/p;  with λ: ε/(p+λ) minus the multiple of p/(p+λ) that
        leaves no change along the all-ones direction, in which H is singular

    Args:
        outputs: f (N, C).
        y: integer labels (N,) or targets (N, C).
        loss: "cross_entropy", "squared_error", "binary_cross_entropy" or a `Loss`.
        curvature: "identity" (Gauss-Newton, H = 1) or "hessian" (generalized Gauss-Newton).
        damping: λ, added to H. H⁺ε grows like 1/p as the probability of the right class goes to
            zero; λ bounds it by about 1/λ. The squared error has H = 1 and ignores it.

    Returns:
        One row a sample (N, C), of the SUMMED loss: not divided by N.

    Raises:
        ValueError: unknown names, a negative damping, bad targets, outputs that are not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> f, y = jnp.zeros((1, 2)), jnp.array([0])
        >>> output_change(f, y, loss="cross_entropy").tolist()
        [[-0.5, 0.5]]
        >>> output_change(f, y, loss="cross_entropy", curvature="hessian", damping=0.0).tolist()
        [[-1.0, 1.0]]

    Source:
        XGN section 3, GGN; the closed form of the softmax is derived.
    """
    f, targets, loss = _check_problem(outputs, y, loss, curvature, damping)
    return change_of(loss, f, targets, curvature, damping)


def _check_problem(
    outputs: ArrayLike, y: Any, loss: str | Loss, curvature: str, damping: ArrayLike
) -> tuple[Array, Array, Loss]:
    check_finite("outputs", outputs)
    check_choice("curvature", curvature, CURVATURES)
    check_number("damping", damping, at_least=0)
    f = check_array("outputs", outputs, ndim=2, floating=True)
    return f, *encode_targets(loss, y, f)


def change_of(
    loss: Loss, f: Array, targets: Array, curvature: str, damping: ArrayLike
) -> Float[Array, "n c"]:
    """`output_change` of encoded targets, without its checks."""
    gradient = loss.gradient(f, targets)
    if curvature == "identity" or loss.sample_loss is squared_error.sample_loss:
        return gradient
    lam = jnp.asarray(damping, f.dtype)
    tiny = jnp.finfo(f.dtype).tiny  # where a probability is 0 the change is 0, not 0/0
    if loss.sample_loss is cross_entropy.sample_loss:
        p = jax.nn.softmax(f, axis=1)
        spread = p / jnp.maximum(p + lam, tiny)
        change = gradient / jnp.maximum(p + lam, tiny)
        shift = jnp.sum(change, axis=1) / jnp.sum(spread, axis=1)
        return change - shift[:, None] * spread
    if loss.sample_loss is binary_cross_entropy.sample_loss:
        p = jax.nn.sigmoid(f)
        return gradient / jnp.maximum(p * jax.nn.sigmoid(-f) + lam, tiny)
    values, vectors = decompose(jnp.linalg.eigh, loss.hessian(f, targets))  # (N, C), (N, C, C)
    # Curvature below the rounding of the largest counts as zero, negative curvature as well.
    floor = 10 * float(jnp.finfo(f.dtype).eps) * jnp.max(jnp.abs(values), axis=1, keepdims=True)
    inverse = jnp.where(values > floor, 1 / jnp.where(values > floor, values + lam, 1), 0)
    return jnp.einsum("nab,nb,ncb,nc->na", vectors, inverse, vectors, gradient)


class StepForecast(NamedTuple):
    """The outputs under exact steps.

    Attributes:
        ts: steps 0..T.
        outputs: f (T + 1, N, C).
        loss: the mean loss (T + 1,).
        error: the loss's error (T + 1,), see `Loss.error`.
    """

    ts: Array
    outputs: Array
    loss: Array
    error: Array

    plot, _repr_html_, __repr__ = RESULT


@full_precision
def forecast_steps(
    outputs: ArrayLike,
    y: Any,
    *,
    loss: str | Loss,
    learning_rate: ArrayLike,
    steps: int,
    curvature: str = "identity",
    damping: ArrayLike = 1e-3,
) -> StepForecast:
    """Training by exact full-rank Gauss-Newton steps, forecast from the outputs alone.

        f_{k+1} = f_k − α ε(f_k),  or f_k − α (H + λ)⁺ ε(f_k)

    A network whose J J^⊣ is the identity follows this up to O(α) in the curvature of f. Neither
    kernel nor network is needed, unlike for gradient descent, whose forecast needs Θ.

    Args:
        outputs: f_0 (N, C).
        y: integer labels (N,) or targets (N, C).
        loss: as in `output_change`.
        learning_rate: α.
        steps: how many.
        curvature: as in `output_change`.
        damping: as in `output_change`.

    Returns:
        A `StepForecast`; `jaxttp.training_time(forecast.loss, threshold)` reads the time off it.

    Raises:
        ValueError: as `output_change`; a learning rate that is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> path = forecast_steps(jnp.ones((1, 1)), jnp.zeros((1, 1)), loss="squared_error",
        ...                       learning_rate=0.5, steps=2)
        >>> path.loss.tolist()
        [0.5, 0.125, 0.03125]

    Source:
        XGN eq (8), in discrete time.
    """
    check_integer("steps", steps, at_least=1)
    check_number("learning_rate", learning_rate, above=0)
    f0, targets, loss = _check_problem(outputs, y, loss, curvature, damping)
    rates = jnp.asarray(learning_rate, f0.dtype), jnp.asarray(damping, f0.dtype)
    return _follow(loss, curvature, steps, f0, targets, *rates)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _follow(
    loss: Loss, curvature: str, steps: int, f0: Array, targets: Array, rate: Array, damping: Array
) -> StepForecast:
    def step(f: Array, _: None) -> tuple[Array, Array]:
        f = f - rate * change_of(loss, f, targets, curvature, damping)
        return f, f

    path = jnp.concatenate([f0[None], jax.lax.scan(step, f0, None, length=steps)[1]])
    values = jax.vmap(lambda f: loss.value(f, targets))(path)
    errors = jax.vmap(lambda f: loss.error(f, targets))(path)
    return StepForecast(jnp.arange(steps + 1, dtype=f0.dtype), path, values, errors)
