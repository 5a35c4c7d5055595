"""Exact Gauss-Newton as an optax transformation."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_number
from jaxttp._core.compile import full_precision
from jaxttp.gauss_newton._network import Activation, check_inputs, check_readout
from jaxttp.gauss_newton.output_space import CURVATURES, change_of
from jaxttp.gauss_newton.pseudoinverse import FINEST_RTOL, as_pseudoinverse
from jaxttp.gauss_newton.update import direction_of
from jaxttp.losses import Loss, encode_targets, get_loss

INSTEAD = (
    "Train with it by jaxttp.train, which passes the batch, or in a loop of your own, "
    "optimizer.update(gradients, state, weights, x=x, y=y, bottlenecks=bottlenecks); forecast it "
    "by jaxttp.gauss_newton.forecast_steps(outputs, y, ...). jaxttp.pipeline.gauss_newton_task "
    "does both. What passes gradients alone (jaxttp.predict_training_time) cannot take its steps."
)
"""Functions to call in place of one that passes gradients only."""

PARTS = (
    "give gauss_newton the bottlenecks, readout, activation and embed of the network that is "
    "trained; those of a RevMLP are gauss_newton(learning_rate, **model.parts)."
)
"""How to pass the trained network to `gauss_newton`."""


class GaussNewtonState(NamedTuple):
    """The report of the last step.

    Attributes:
        steps: steps taken.
        ranks: directions kept in the last step (L, 2), N of them in an exact one; zeros before
            the first.
        residual: ‖J·Δ − P⁺ε‖/‖P⁺ε‖, the relative error of the step: rounding for an exact one, 1
            before the first. None with `measure=False`.
    """

    steps: Array
    ranks: Array
    residual: Array | None


def gauss_newton(
    learning_rate: optax.ScalarOrSchedule,
    *,
    loss: str | Loss | None = None,
    activation: Activation = "relu",
    readout: ArrayLike | None = None,
    bottlenecks: ArrayLike | None = None,
    embed: Callable[[Any], Array] | None = None,
    curvature: str = "identity",
    damping: ArrayLike = 1e-3,
    pseudoinverse: str = "truncate",
    rtol: ArrayLike = FINEST_RTOL,
    atol: ArrayLike = 1e-5,
    key: Array | None = None,
    measure: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Gauss-Newton descent for a RevMLP: W ← W − α J^⊣ ε, exact where nothing is truncated.

    A step is exact where every half-layer keeps all N directions: a bottleneck m >= 2 N (more where
    d/2 is 2 or 3: ReLU features of so few inputs are dependent), no repeated samples, and the
    default `pseudoinverse` and `rtol` (or "exact", which raises an error otherwise).
    `state[0].residual` is the relative error of the last step (below 1e-3 in float32, 1e-9 in
    float64, it is rounding), `state[0].ranks` the number of directions it kept.

    The parameters are the weights (L, 2, d/2, m), alone or as the only leaf of a pytree (such as
    the `nnx.Param` state of a `RevMLP`). The direction needs the batch,
    `update(gradients, state, weights, x=, y=, bottlenecks=)`, which `jaxttp.train` passes: `x`
    (N, d) and `y`, the targets, `bottlenecks` in place of those passed here, and `loss` and
    `outputs`, the trained loss and the trained network's outputs, which are checked against this
    optimizer's own. The gradients are not used (pass the weights or zeros), except by
    transformations before it in a chain. Another rate or tolerance compiles nothing through
    `optax.inject_hyperparams(gauss_newton, static_args=("readout", "bottlenecks"))`.

    Args:
        learning_rate: α, or an optax schedule. 1 takes the whole step, which converges
            quadratically where the network is close to linear along it (standardized inputs, small
            weights) and can diverge elsewhere: then lower it.
        loss: "squared_error", "cross_entropy", "binary_cross_entropy" or a `Loss`; None for the
            one passed to `update`, or else the squared error.
        activation: as in `gauss_newton_direction`.
        readout: as there.
        bottlenecks: V (L, 2, m, d/2), or None for those passed to `update`, or else the identity.
        embed: makes x_0 (N, d) of the `x` of `update`, such as `RevMLP.embed`; None for `x` itself.
            A `RevMLP` gives these four: `gauss_newton(0.5, **model.parts)`.
        curvature: "identity" (GN) or "hessian" (generalized GN), see `output_change`.
        damping: of the Hessian, see `output_change`.
        pseudoinverse: as in `gauss_newton_direction`. The literature truncates at rtol = 0.01,
            which keeps a part of the directions only.
        rtol: as there, but 1e-6 by default, which keeps all that float32 resolves; damping and
            Tikhonov need one like 0.01.
        atol: as there.
        key: of "noise", from which every step derives its own.
        measure: whether the state reports the residual at x_L (one more forward tangent pass); it
            is None otherwise.

    Returns:
        A chain of the Gauss-Newton direction, with a `GaussNewtonState`, and
        `optax.scale_by_learning_rate(learning_rate)`.

    Raises:
        ValueError: options that are not known or out of range; in `update`, missing data,
            parameters that are not the weights of one RevMLP, or another loss than the trained one.
        equinox.EquinoxRuntimeError: in `update`, `outputs` that are not those of this network;
            run-time errors of `gauss_newton_direction`.

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
    if not callable(learning_rate):
        check_number("learning_rate", learning_rate)
    own_loss = None if loss is None else get_loss(loss)
    check_choice("curvature", curvature, CURVATURES)
    check_number("damping", damping, at_least=0)
    inverse = as_pseudoinverse(pseudoinverse, rtol=rtol, atol=atol, key=key)

    def init(params: Any) -> GaussNewtonState:
        weights = _single_leaf(params)[0]
        ranks = jnp.zeros(weights.shape[:2], jnp.int32)
        residual = jnp.ones((), weights.dtype) if measure else None
        return GaussNewtonState(jnp.zeros((), jnp.int32), ranks, residual)

    @full_precision
    def update(
        updates: Any,
        state: GaussNewtonState,
        params: Any = None,
        *,
        x: Any = None,
        y: Any = None,
        bottlenecks: ArrayLike | None = bottlenecks,
        loss: Loss | None = None,
        outputs: Array | None = None,
        **extra: Any,
    ) -> tuple[Any, GaussNewtonState]:
        del updates, extra
        if params is None or x is None or y is None:
            raise ValueError(f"gauss_newton needs the weights and the batch, x and y. {INSTEAD}")
        trained = _agreed(own_loss, loss)
        leaf, structure = _single_leaf(params)
        now = inverse.at_step(state.steps)
        x = x if embed is None else embed(x)
        network, states, function = check_inputs(leaf, bottlenecks, x, activation)
        now.check(len(states), network.width)
        p = check_readout(readout, 2 * network.half, network.weights.dtype)
        classes = states.shape[1] if p is None else p.shape[0]
        shape = jax.ShapeDtypeStruct((len(states), classes), network.weights.dtype)
        if outputs is not None and outputs.shape != shape.shape:
            raise ValueError(
                f"the trained outputs have shape {outputs.shape}, those of gauss_newton's network "
                f"{shape.shape}; {PARTS}"
            )
        targets, trained = encode_targets(trained, y, shape)

        def epsilon(outputs: Array) -> Array:
            return change_of(trained, outputs, targets.astype(outputs.dtype), curvature, damping)

        direction, info, own = direction_of(
            network, states, epsilon, function, p, now, measure=measure
        )
        direction = _check_outputs(direction, own, outputs, states)
        steps = jnp.asarray(optax.safe_increment(state.steps))
        direction = jax.tree.unflatten(structure, [direction.astype(leaf.dtype)])
        return direction, GaussNewtonState(steps, info.ranks, info.residual)

    direction = optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))
    return optax.chain(direction, optax.scale_by_learning_rate(learning_rate))


def _agreed(own: Loss | None, trained: Loss | None) -> Loss:
    """The loss of the steps: the trained one, which the optimizer's own must equal."""
    if trained is None:
        return get_loss("squared_error") if own is None else own
    if own is not None and own.name != trained.name:
        raise ValueError(
            f"loss={trained.name!r} is trained, but gauss_newton was made for loss={own.name!r}; "
            "give both the same, or none to gauss_newton."
        )
    return trained


def _check_outputs(direction: Array, own: Array, trained: Array | None, x: Array) -> Array:
    """`direction`; it is an error if the optimizer's network is not the trained one."""
    if trained is None:
        return direction
    error = jnp.max(jnp.abs(own - trained.astype(own.dtype)))
    # Both are the same sums: outputs that differ in more than half the digits are of two networks.
    size = jnp.maximum(jnp.max(jnp.abs(own)), jnp.max(jnp.abs(x)))
    tolerance = float(jnp.finfo(trained.dtype).eps) ** 0.5 * size
    message = f"the trained outputs are not those of gauss_newton's network; {PARTS}"
    return eqx.error_if(direction, error > tolerance, message)


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
