"""Exact Gauss-Newton as an optax transformation."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._checks import check_choice, check_finite, check_number
from jaxttp.gauss_newton._network import Activation
from jaxttp.gauss_newton.output_space import CURVATURES, change_of
from jaxttp.gauss_newton.pseudoinverse import FULL_RANK_RTOL, MODES
from jaxttp.gauss_newton.readout import check_readout
from jaxttp.gauss_newton.update import (
    StepInfo,
    check_key,
    check_options,
    check_problem,
    direction_of,
)
from jaxttp.losses import Loss, encode_targets, get_loss

INSTEAD = (
    "Take exact steps in a loop of your own, optimizer.update(gradients, state, weights, x=x, y=y, "
    "bottlenecks=bottlenecks), and forecast them by jaxttp.gauss_newton.forecast_steps(outputs, y, "
    "...); jaxttp.pipeline.gauss_newton_task does both. What passes gradients alone (jaxttp.train, "
    "jaxttp.predict_training_time) cannot take them."
)
"""What to call in place of a function that knows gradients only."""


class GaussNewtonState(NamedTuple):
    """What the last step reports.

    Attributes:
        steps: steps taken.
        ranks: directions kept in the last step (L, 2), N of them in an exact one; zeros before
            the first.
        half_residuals: ‖Δ s − δ‖/‖δ‖ of every half-layer (L, 2), see `StepInfo`; ones before the
            first step.
        residual: ‖J·Δ − P⁺ε‖/‖P⁺ε‖, the share of the wanted step that was missed: rounding for
            an exact one, 1 before the first. None with `measure=False`.
    """

    steps: Array
    ranks: Array
    half_residuals: Array
    residual: Array | None


def gauss_newton(
    learning_rate: optax.ScalarOrSchedule, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Gauss-Newton descent for a RevMLP: W ← W − α J^⊣ ε, exact where nothing is truncated.

    A step is exact where every half-layer keeps all N directions: a bottleneck m >= 2 N (more where
    d/2 is 2 or 3: ReLU features of so few inputs are dependent), no repeated samples, and the
    default `pseudoinverse` and `rtol` (or "exact", which refuses what it cannot do).
    `state[0].residual` says how much of the last step was missed (below 1e-3 in float32, 1e-9 in
    float64, is rounding), `state[0].ranks` how many directions it kept.

    `update(gradients, state, weights, x=, y=, bottlenecks=)` computes the direction from the data;
    the gradients are not used (pass the weights or zeros) unless they are wanted by what precedes
    it in a chain.

    Args:
        learning_rate: α, or an optax schedule. 1 takes the whole step, which converges
            quadratically where the network is close to linear along it (standardised inputs, small
            weights) and can diverge elsewhere: then lower it, or set `max_output_change`.
        **options: those of `scale_by_gauss_newton`: loss, activation, readout, curvature, damping,
            pseudoinverse, rtol, atol, method, noise, max_output_change, measure. The literature
            truncates at rtol=0.01, which keeps a part of the directions only.

    Returns:
        `optax.chain(scale_by_gauss_newton(...), optax.scale_by_learning_rate(learning_rate))`.

    Raises:
        ValueError: options that are not known.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> weights = 0.1 * jax.random.normal(keys[0], (2, 2, 2, 16))
        >>> bottlenecks = jax.random.normal(keys[1], (2, 2, 16, 2)) / 4
        >>> x = jax.random.normal(keys[2], (3, 4))
        >>> optimizer = gauss_newton(1.0, loss="squared_error")
        >>> state = optimizer.init(weights)
        >>> updates, state = optimizer.update(weights, state, weights, x=x, y=0 * x,
        ...                                   bottlenecks=bottlenecks)
        >>> weights = optax.apply_updates(weights, updates)
        >>> state[0].ranks.tolist(), float(state[0].residual) < 1e-3
        ([[3, 3], [3, 3]], True)

    Source:
        XGN Algorithm 1, eqs (16)-(17); section 5 truncates at 1 %, the default here does not.
    """
    return optax.chain(
        scale_by_gauss_newton(**options), optax.scale_by_learning_rate(learning_rate)
    )


def scale_by_gauss_newton(
    *,
    loss: str | Loss = "squared_error",
    activation: Activation | Sequence[Activation] = "relu",
    readout: ArrayLike | None = None,
    curvature: str = "identity",
    damping: ArrayLike = 1e-3,
    pseudoinverse: str = "truncate",
    rtol: ArrayLike = FULL_RANK_RTOL,
    atol: ArrayLike = 1e-5,
    method: str = "auto",
    noise: ArrayLike | None = None,
    max_output_change: float | None = None,
    measure: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Replaces the updates by the Gauss-Newton direction; chain it with what should follow.

    The parameters are the weights (L, 2, d/2, m), alone or as the only leaf of a pytree (such as
    the `nnx.Param` state of a `RevMLP`). The data are extra arguments of `update`: `x` (N, d), the
    batch; `bottlenecks` (L, 2, m, d/2); and `y`, the targets, or `epsilon` (N, C) in their place.

    Args:
        loss: "squared_error", "cross_entropy", "binary_cross_entropy" or a `Loss`.
        activation: as in `gauss_newton_direction`.
        readout: as there.
        curvature: "identity" (GN) or "hessian" (generalised GN), see `output_change`.
        damping: of the Hessian, see `output_change`.
        pseudoinverse: as in `gauss_newton_direction`; "noise" takes a fresh `key` as an extra
            argument of every `update`.
        rtol: as there, but 1e-6 by default, which keeps all that float32 resolves; the literature's
            truncation is 0.01, damping and Tikhonov want one like it.
        atol: as there.
        method: as there.
        noise: as there.
        max_output_change: if given, ε is scaled down so that no output is asked to change by more
            than this per unit of learning rate: step control without a line search.
        measure: whether the state reports the residual at x_L (one more forward tangent pass); it
            is None otherwise.

    Returns:
        An optax transformation with a `GaussNewtonState`.

    Raises:
        ValueError: options that are not known or out of range; in `update`, missing data or
            parameters that are not the weights of one RevMLP.

    Example:
        >>> import optax
        >>> optimizer = optax.chain(scale_by_gauss_newton(loss="cross_entropy"),
        ...                         optax.clip_by_global_norm(1.0),
        ...                         optax.add_decayed_weights(1e-4),
        ...                         optax.scale_by_learning_rate(0.1))

    Source:
        XGN Algorithm 1; the step control is ours.
    """
    loss = get_loss(loss)
    check_choice("curvature", curvature, CURVATURES)
    check_number("damping", damping, at_least=0)
    check_choice("pseudoinverse", pseudoinverse, MODES)
    spread = check_options(pseudoinverse, rtol, atol, method, noise)
    if max_output_change is not None:
        check_number("max_output_change", max_output_change, above=0)

    def init(params: Any) -> GaussNewtonState:
        weights = _single_leaf(params)[0]
        shape = weights.shape[:2]
        missed = jnp.ones((), weights.dtype) if measure else None
        return GaussNewtonState(
            jnp.zeros((), jnp.int32),
            jnp.zeros(shape, jnp.int32),
            jnp.ones(shape, weights.dtype),
            missed,
        )

    def update(
        updates: Any,
        state: GaussNewtonState,
        params: Any = None,
        *,
        x: ArrayLike | None = None,
        y: Any = None,
        epsilon: ArrayLike | None = None,
        bottlenecks: ArrayLike | None = None,
        key: Array | None = None,
        **extra: Any,
    ) -> tuple[Any, GaussNewtonState]:
        del updates, extra
        if x is None and y is None and epsilon is None:
            raise ValueError(f"gauss_newton needs the batch beside the gradients. {INSTEAD}")
        if params is None or x is None or (y is None) == (epsilon is None):
            raise ValueError(
                "gauss_newton needs the weights, the batch and exactly one of its targets and its "
                "epsilon: optimizer.update(gradients, state, weights, x=x, y=y, "
                "bottlenecks=bottlenecks)."
            )
        check_key(pseudoinverse, key)
        leaf, structure = _single_leaf(params)
        network, states, names = check_problem(leaf, bottlenecks, x, activation, pseudoinverse)
        p = check_readout(readout, 2 * network.half, network.weights.dtype)
        classes = states.shape[1] if p is None else p.shape[0]
        shape = jax.ShapeDtypeStruct((states.shape[0], classes), network.weights.dtype)
        if y is not None:
            targets, used = encode_targets(loss, y, shape)
        else:
            check_finite("epsilon", epsilon)
            targets, used = jnp.asarray(epsilon, shape.dtype), loss
            if targets.shape != shape.shape:
                raise ValueError(
                    f"epsilon must have the shape of the outputs, {shape.shape}; got "
                    f"{targets.shape}."
                )

        def wanted(outputs: Array) -> Array:
            change = targets.astype(outputs.dtype)
            if y is not None:
                change = change_of(used, outputs, change, curvature, damping)
            if max_output_change is None:
                return change
            largest = jnp.max(jnp.abs(change))
            limit = jnp.asarray(max_output_change, change.dtype)
            return change * jnp.where(largest > limit, limit / largest, 1)

        direction, info, _outputs = direction_of(
            network, states, wanted, names, p, pseudoinverse, rtol, atol, method, key, spread,
            measure,
        )  # fmt: skip
        return jax.tree.unflatten(structure, [direction.astype(leaf.dtype)]), _next(state, info)

    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))


def _next(state: GaussNewtonState, info: StepInfo) -> GaussNewtonState:
    return GaussNewtonState(
        jnp.asarray(optax.safe_increment(state.steps)),
        info.ranks,
        info.half_residuals,
        info.residual,
    )


def _single_leaf(params: Any) -> tuple[Array, Any]:
    leaves, structure = jax.tree.flatten(params)
    if len(leaves) != 1 or jnp.ndim(leaves[0]) != 4:
        shapes = [jnp.shape(leaf) for leaf in leaves]
        raise ValueError(
            "gauss_newton trains the weights (L, 2, d/2, m) of one RevMLP, alone or as the only "
            f"leaf of a pytree; got leaves of shapes {shapes}. Use optax.masked or optax.partition "
            f"for the others. {INSTEAD}"
        )
    return leaves[0], structure
