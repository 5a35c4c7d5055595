"""Linearized training in weight space, with the optax transformation itself.

    f_t = f_0 + J (w_t - w_0),      w_{t+1} = w_t + update(J^T g(f_t) / N)

Adam, AdamW, RMSProp, Lion and other optimizers are not one linear filter for every weight, so they
have no recursion in function space. Their linearized path costs one product with J and one with
its transpose a step, about as much as training. It is the reference for the other dynamics, and the
only forecast for such optimizers.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxttp._core.checks import check_finite, check_integer, is_concrete
from jaxttp._core.compile import jit
from jaxttp._core.products import with_forward_mode
from jaxttp._core.results import RESULT
from jaxttp._core.traced import Traced, network_of
from jaxttp._core.types import ApplyFn, Params
from jaxttp.adapters.inputs import check_samples, check_trained
from jaxttp.adapters.outputs import check_gradients, output_shape
from jaxttp.dynamics._network import evaluation, promote_all
from jaxttp.dynamics._trajectory import output_limit
from jaxttp.dynamics.batches import batch_indices
from jaxttp.dynamics.optimizers import (
    HeavyBall,
    Optimizer,
    inlined,
    keep_dtypes,
    linear_filter,
    same_program,
)
from jaxttp.losses import Loss, encode_targets

EARLY_ONLY = 0.1
"""Fraction of the predicted change; with a larger mismatch, late times are unreliable."""
CONFIRMED = 1e-3
"""With a mismatch up to this fraction there is no warning."""


class WeightSpaceTrajectory(eqx.Module):
    """Outputs of the linearized network under any optimizer.

    Attributes:
        ts: 0, 1, ..., steps.
        train: outputs on the training samples (steps + 1, N, C), f0 first.
        test: outputs on the test samples (steps + 1, M, C), or None.
        diverged_at: first step whose outputs could not be represented (they are held), or -1.
        displacement: ||w_t - w_0|| / ||w_0||, (steps + 1,).
        mismatch: ||f(w_T) - f_T|| / ||f_T - f_0||: the error of the final outputs as a fraction of
            their predicted change. A linear network has 0; from about 0.3 on take
            training times near the end (thresholds below 10 %) as an order of magnitude only.
        linear: whether the optimizer is one linear filter, so that `recursion` would do as well.
    """

    ts: Float[Array, " t"]
    train: Float[Array, "t n c"]
    test: Float[Array, "t m c"] | None
    diverged_at: Array
    displacement: Float[Array, " t"]
    mismatch: Float[Array, ""]
    linear: bool = eqx.field(static=True)

    plot, _repr_html_, __repr__ = RESULT

    @property
    def warnings(self) -> str | None:
        """The error of the final outputs in words; None where the network's outputs agree."""
        mismatch = float(self.mismatch)
        if mismatch <= CONFIRMED:
            return None
        advice = "" if mismatch <= EARLY_ONLY else ", so take only early times at their word"
        errors = (
            "in 12 real trainings with Adam over 150 steps times were off by at most 3 steps at a "
            "threshold of 40 %, by up to 48 at 10 % and 70 at 1 %; "
        )
        return (
            f"one linearization, whose kernel is not rebuilt; {'' if self.linear else errors}here, "
            "at the last predicted weights, the outputs of the network itself are off by "
            f"{100 * mismatch:.2g} % of their predicted change{advice}"
        )

    @property
    def doubted_from(self) -> int | None:
        """The first step at which times are unreliable; None where all are reliable.

        The error of a linearization is of second order in the displacement, so its fraction of the
        predicted change grows in proportion to the displacement, to `mismatch` at the end.
        """
        moved = np.asarray(self.displacement)
        late = float(self.mismatch) * moved > EARLY_ONLY * moved[-1]
        return int(np.argmax(late)) if np.any(late) else None


def weight_space(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    loss: str | Loss,
    optimizer: optax.GradientTransformation | HeavyBall,
    steps: int,
    batch_size: int | None = None,
    key: Array | None = None,
    protocol: str = "epochs",
    x_test: Any = None,
) -> WeightSpaceTrajectory:
    """Train the linearized network in weight space, with any optimizer.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: the weights before training, where the network is linearized; bfloat16 and float16
            are promoted to float32, with the samples and a warning.
        x: samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.
        optimizer: any optax transformation: Adam, AdamW, RMSProp, Lion, clipping, masks; or a
            `HeavyBall`.
        steps: number of steps.
        batch_size: samples a step; all of them when None.
        key: a `jax.random.key`, needed with `batch_size`.
        protocol: how batches are drawn, see `batch_indices`.
        x_test: test samples (M, ...).

    Returns:
        A `WeightSpaceTrajectory`, whose `warnings` states the error of the last outputs.

    Raises:
        ValueError: bad labels, steps, batch size or protocol; a batch size without a key; an
            optimizer that needs more than gradients and weights; gradients that are not finite.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> path = weight_space(lambda w, x: jnp.tanh(x @ w), jnp.zeros((2, 1)), jnp.eye(2),
        ...                     jnp.ones((2, 1)), loss="squared_error",
        ...                     optimizer=optax.adam(0.1), steps=5)
        >>> path.train.shape, bool(path.train[-1, 0, 0] > 0.4)
        ((6, 2, 1), True)

    Source:
        TTP Section 3 and Figure 9 (gradient descent); other optimizers are derived.
    """
    check_integer("steps", steps, at_least=1)
    x = check_trained(apply_fn, params, x)
    check_stepping(optimizer, params)
    x_test = None if x_test is None else check_samples("x_test", x_test)
    output_shape(apply_fn, params, x)
    params, x, x_test = promote_all(params, x, x_test)
    network = network_of(apply_fn)
    f0 = evaluation(network)(params, x)
    check_finite("apply_fn(params, x)", f0)
    targets, loss = encode_targets(loss, y, f0)
    indices = None
    if batch_size is not None:
        indices = batch_indices(key, f0.shape[0], batch_size, steps, protocol=protocol)
    descent = same_program(optimizer, params)
    linearized = Linearized(*_linearize(network.precise(params, x), params, x))
    if x_test is not None:
        test = _linearize(network.precise(params, x_test), params, x_test)
        linearized = Linearized(linearized.f0, linearized.push, *test)
    step = functools.partial(
        inlined(_step, descent), descent, linearized, params, targets, loss=loss
    )
    # Steps donate displacement and state: both are copies.
    zeros, state = jax.tree.map(jnp.zeros_like, params), optimizer.init(params)
    state = jax.tree.map(lambda a: jnp.array(a, dtype=jnp.asarray(a).dtype, copy=True), state)
    alive, none = jax.device_put(True), jax.device_put(np.zeros((), f0.dtype))
    begin = (zeros, state, linearized.f0, alive), (linearized.f0, linearized.f0_test, none, alive)
    moved, (train, test, displacement, alive) = _walk(step, begin, indices, steps)
    check_gradients(apply_fn, params, x, jnp.where(alive, 0.0, jnp.nan))
    check_gradients(apply_fn, params, x_test, test, name="x_test")
    end = _end(network.precise(params, x), params, moved, x, train, alive)
    ts = jax.device_put(np.arange(steps + 1, dtype=f0.dtype))
    is_linear = isinstance(optimizer, HeavyBall)
    if not isinstance(optimizer, HeavyBall):
        with contextlib.suppress(ValueError):
            is_linear = linear_filter(optimizer, params, steps=steps).weight_decay is not None
    return WeightSpaceTrajectory(ts, train, test, end[0], displacement, end[1], linear=is_linear)


def check_stepping(optimizer: optax.GradientTransformation | HeavyBall, weights: Params) -> None:
    """Raise `ValueError` for an optimizer that cannot step these weights by gradients alone."""

    def step(w: Params) -> Any:
        return optimizer.update(w, optimizer.init(w), w)

    try:
        jax.eval_shape(step, weights)
    except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as problem:
        raise ValueError(
            "optimizer cannot step these weights by their gradients alone, as a forecast does: "
            f"{problem or type(problem).__name__} (line searches and rates that follow the loss "
            "need more than gradients). Give one that can, such as optax.adam(1e-3)."
        ) from problem


class Linearized(NamedTuple):
    """A network linearized at its initial weights: outputs, and the product with the Jacobian.

    Attributes:
        f0: outputs (N, C).
        push: v -> J v (N, C); a pytree.
        f0_test: outputs on the test samples, or None.
        push_test: `push` on the test samples, or None.
    """

    f0: Array
    push: Callable[[Params], Array]
    f0_test: Array | None = None
    push_test: Callable[[Params], Array] | None = None


@jit
def _linearize(network: Traced, params: Params, x: Any) -> tuple[Array, Callable[[Params], Array]]:
    return jax.linearize(with_forward_mode(lambda w: network(w, x), params), params)


def _walk(
    step: Any, begin: tuple[tuple, tuple], indices: Array | None, steps: int
) -> tuple[Params, tuple]:
    """The last displacement, and the reports before the first step and after every one, stacked.

    On CPUs steps are taken one by one: XLA runs a network in a loop on a single core there.
    """
    carry, first = begin
    is_known = all(map(is_concrete, jax.tree.leaves((carry, step.args, indices))))
    if not is_known or jax.default_backend() != "cpu":
        take = lambda carry, batch: step(*carry, batch)  # noqa: E731
        (moved, *_), reports = jax.lax.scan(take, carry, indices, length=steps)
        return moved, jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, reports)
    rows = [first]
    for t in range(steps):
        carry, report = step(*carry, None if indices is None else indices[t])
        rows.append(report)
    return carry[0], jax.tree.map(lambda *leaves: jax.device_put(np.stack(leaves)), *rows)


@functools.partial(jit, static_argnames="loss", donate_argnames=("moved", "state"))
def _step(
    optimizer: Optimizer,
    linearized: Linearized,
    params: Params,
    targets: Array,
    moved: Params,
    state: optax.OptState,
    f: Array,
    alive: Array,
    batch: Array | None,
    *,
    loss: Loss,
) -> tuple[tuple, tuple]:
    """One step, and its report: outputs, test outputs, relative displacement, whether finite."""
    rows = jnp.arange(len(f)) if batch is None else batch
    force = loss.gradient(f[rows], targets[rows]) / len(rows)
    (gradient,) = jax.linear_transpose(linearized.push, params)(
        jnp.zeros_like(f).at[rows].add(force)
    )
    weights = jax.tree.map(jnp.add, params, moved)
    updates, after = optimizer.update(gradient, state, weights)
    new = jax.tree.map(lambda m, u: m + u.astype(m.dtype), moved, updates)
    new_f = linearized.f0 + linearized.push(new)
    alive = alive & jnp.all(jnp.abs(new_f) < output_limit(f))
    moved, f = jax.tree.map(lambda a, b: jnp.where(alive, a, b), (new, new_f), (moved, f))
    test = None
    if linearized.push_test is not None and linearized.f0_test is not None:
        test = linearized.f0_test + linearized.push_test(moved)
    size = _norm(params)
    displacement = _norm(moved) / jnp.where(size > 0, size, 1.0)
    report = f, test, displacement.astype(f.dtype), alive
    return (moved, keep_dtypes(after, state), f, alive), report


@jit
def _end(
    network: Traced, params: Params, moved: Params, x: Any, train: Array, alive: Array
) -> tuple[Array, Array]:
    """The first step that could not be represented, and the relative error of the last outputs."""
    outputs = network(jax.tree.map(jnp.add, params, moved), x)
    change = jnp.linalg.norm(train[-1] - train[0])
    mismatch = jnp.linalg.norm(outputs - train[-1]) / jnp.where(change > 0, change, 1.0)
    return jnp.where(jnp.all(alive), -1, jnp.argmin(alive)), mismatch


def _norm(tree: Params) -> Array:
    total = sum((jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)), start=jnp.zeros(()))
    return jnp.sqrt(total)
