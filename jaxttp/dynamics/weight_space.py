"""Linearised training in weight space, with the optax transformation itself.

    f_t = f_0 + J (w_t - w_0),      w_{t+1} = w_t + update(J^T g(f_t) / N)

Adam, AdamW, RMSProp, Lion and other optimisers are not one linear filter for every weight, so they
have no recursion in function space. Their linearised path costs one product with J and one with its
transpose a step, about as much as training: it is the reference for everything else here, and the
only forecast for such optimisers.
"""

import functools
from collections.abc import Callable
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxttp._core.checks import check_finite, check_floating, check_integer, is_concrete
from jaxttp._core.compile import jit
from jaxttp._core.products import with_forward_mode
from jaxttp._core.results import RESULT
from jaxttp._core.traced import Traced, network_of
from jaxttp._core.types import ApplyFn, Params, count
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.adapters.outputs import check_gradients, output_shape
from jaxttp.dynamics._kernels import check_rate, check_times
from jaxttp.dynamics._network import compile_network
from jaxttp.dynamics._promoted import promote_all
from jaxttp.dynamics._trajectory import Trajectory, output_limit
from jaxttp.dynamics.batches import batch_indices
from jaxttp.dynamics.filters import linear_filter
from jaxttp.dynamics.flow import tolerances
from jaxttp.dynamics.optimizers import HeavyBall, Optimizer, inlined, keep_dtypes, same_program
from jaxttp.losses import Loss, encode_targets

EARLY_ONLY = 0.1
"""Where the network misses more than this share of the predicted change, late times are doubted."""
CONFIRMED = 1e-3
"""Where it misses no more than this share, nothing is."""


class WeightSpaceTrajectory(eqx.Module):
    """Outputs of the linearised network under any optimiser.

    Attributes:
        ts: 0, 1, ..., steps.
        train: outputs on the training samples (steps + 1, N, C), f0 first.
        test: outputs on the test samples (steps + 1, M, C), or None.
        diverged_at: first step whose outputs could not be represented (they are held), or -1.
        displacement: ||w_t - w_0|| / ||w_0||, (steps + 1,).
        end_outputs: what the NETWORK says at the predicted last weights (N, C).
        mismatch: ||f(w_T) - f_T|| / ||f_T - f_0||: how much of the predicted motion of the outputs
            the network itself does not confirm. A linear network has 0; from about 0.3 on take
            training times near the end (thresholds below 10 %) as an order of magnitude only.
        linear: whether the optimiser is one linear filter, so that `recursion` would do as well.
    """

    ts: Float[Array, " t"]
    train: Float[Array, "t n c"]
    test: Float[Array, "t m c"] | None
    diverged_at: Array
    displacement: Float[Array, " t"]
    end_outputs: Float[Array, "n c"]
    mismatch: Float[Array, ""]
    linear: bool = eqx.field(static=True)

    plot, _repr_html_, __repr__ = RESULT

    @property
    def trust(self) -> str | None:
        """In words, how far to trust the forecast; None where the network confirms its end."""
        mismatch = float(self.mismatch)
        if mismatch <= CONFIRMED:
            return None
        advice = "" if mismatch <= EARLY_ONLY else ", so take only early times at their word"
        known = (
            "in 12 real trainings with Adam over 150 steps times were off by at most 3 steps at a "
            "threshold of 40 %, by up to 48 at 10 % and 70 at 1 %; "
        )
        return (
            f"one linearization, whose kernel is not rebuilt; {'' if self.linear else known}here, "
            "at the last predicted weights, the outputs of the network itself are off by "
            f"{100 * mismatch:.2g} % of their predicted change{advice}"
        )

    @property
    def doubted_from(self) -> int | None:
        """The step from which on times are not early any more; None where all may be taken.

        What a linearization misses is of second order in the displacement, so that its share of the
        predicted change grows in proportion to it, to `mismatch` at the end.
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
    """Train the linearised network in weight space, with any optimiser.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: the weights before training, where the network is linearised; bfloat16 and float16
            are promoted to float32, samples with them, and a warning says so.
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
        A `WeightSpaceTrajectory`, whose `trust` says how far to believe it.

    Raises:
        ValueError: bad labels, steps, batch size or protocol; a batch size without a key; an
            optimiser that needs more than gradients and weights; gradients that are not finite.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> path = weight_space(lambda w, x: jnp.tanh(x @ w), jnp.zeros((2, 1)), jnp.eye(2),
        ...                     jnp.ones((2, 1)), loss="squared_error",
        ...                     optimizer=optax.adam(0.1), steps=5)
        >>> path.train.shape, bool(path.train[-1, 0, 0] > 0.4)
        ((6, 2, 1), True)

    Source:
        TTP Section 3 and Figure 9 (gradient descent); other optimisers are derived.
    """
    check_integer("steps", steps, at_least=1)
    check_network(apply_fn, params)
    check_stepping(optimizer, params)
    x = check_samples("x", x)
    check_rows(apply_fn, params, x)
    x_test = None if x_test is None else check_samples("x_test", x_test)
    params, x, x_test = promote_all(params, x, x_test)
    network = network_of(apply_fn)
    f0 = compile_network(network)[0](params, x)
    check_finite("apply_fn(params, x)", f0)
    targets, loss = encode_targets(loss, y, f0)
    indices = None
    if batch_size is not None:
        indices = batch_indices(key, f0.shape[0], batch_size, steps, protocol=protocol)
    descent = same_program(optimizer, params)
    state = optimizer.init(params)
    step = functools.partial(inlined(_step, descent), descent, loss=loss)
    f0, push = _linearized(network.precise(params, x), params, x)
    f0_test, push_test = None, None
    if x_test is not None:
        f0_test, push_test = _linearized(network.precise(params, x_test), params, x_test)
    given = (push, push_test, params, f0, targets)
    moved, reports = _walk(step, given, _first(params, state), indices, steps)
    _, test, _, alive = reports
    check_gradients(apply_fn, params, x, jnp.where(alive, 0.0, jnp.nan))
    check_gradients(apply_fn, params, x_test, test, name="x_test")
    *curves, last = _collect(params, f0, f0_test, *reports)
    end = _end(network.precise(params, x), params, moved, x, f0, last)
    return WeightSpaceTrajectory(*curves, *end, linear=_is_linear(optimizer, params, steps))


def check_rows(apply_fn: ApplyFn, params: Params, x: Any) -> None:
    """Refuse values that are not finite, no samples, outputs that are not (N, C)."""
    check_floating("params", params)
    check_finite("params", params)
    check_finite("x", x)
    if count(x) == 0:
        raise ValueError("x must hold at least one sample; it is empty.")
    output_shape(apply_fn, params, x)


def check_stepping(optimizer: optax.GradientTransformation | HeavyBall, weights: Params) -> None:
    """Raise `ValueError` for an optimiser that cannot step these weights by gradients alone."""

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


@jit
def _collect(
    params: Params,
    f0: Array,
    f0_test: Array | None,
    train: Array,
    test: Array | None,
    norms: Array,
    alive: Array,
) -> tuple[Array, Array, Array | None, Array, Array, Array]:
    """What the reports of all steps come to, and the outputs after the last one."""
    path = jnp.concatenate([f0[None], train])
    if f0_test is not None and test is not None:
        test = f0_test[None] + jnp.concatenate([jnp.zeros_like(test[:1]), test])
    size, start = _norm(params), jnp.zeros(1, norms.dtype)
    displacement = jnp.concatenate([start, norms]) / jnp.where(size > 0, size, 1.0)
    diverged_at = jnp.where(jnp.all(alive), -1, 1 + jnp.argmin(alive))
    ts = jnp.arange(len(path), dtype=f0.dtype)
    return ts, path, test, diverged_at, displacement.astype(f0.dtype), path[-1]


def _first(params: Params, state: optax.OptState) -> tuple:
    """Displacement and state before the first step, in memory of their own: a step reuses it."""
    moved = jax.tree.map(jnp.zeros_like, params)
    return moved, jax.tree.map(lambda a: jnp.array(a, dtype=jnp.asarray(a).dtype, copy=True), state)


def _walk(step: Any, given: tuple, first: tuple, indices: Array | None, steps: int) -> tuple:
    """All steps; on CPUs one by one, as XLA runs a network in a loop on a single core there.

    Args:
        step: (*given, moved, state, f, alive, batch) -> (moved, state, f, alive), report.
        given: what all steps share; f0 is the fourth.
        first: moved, state.
        indices: of the samples of each batch, or None.
        steps: how many.

    Returns:
        moved; reports, stacked.
    """

    def one(carry: tuple, batch: Array | None) -> tuple:
        return step(*given, *carry, batch)

    carry = (*first, given[3], jax.device_put(True))
    concrete = all(is_concrete(leaf) for leaf in jax.tree.leaves((given, first, indices)))
    if not concrete or jax.default_backend() != "cpu":
        (moved, *_), reports = jax.lax.scan(one, carry, indices, length=steps)
        return moved, reports
    found = []
    for t in range(steps):
        carry, report = one(carry, None if indices is None else indices[t])
        found.append(report)
    return carry[0], jax.tree.map(lambda *rows: jax.device_put(np.stack(rows)), *found)


@jit
def _linearized(network: Traced, params: Params, x: Any) -> tuple[Array, Callable[[Params], Array]]:
    """The outputs, and the product with the Jacobian as a function that is a pytree."""
    return jax.linearize(with_forward_mode(lambda w: network(w, x), params), params)


@functools.partial(jit, static_argnames="loss", donate_argnames=("moved", "state"))
def _step(
    optimizer: Optimizer,
    push: Callable[[Params], Array],
    push_test: Callable[[Params], Array] | None,
    params: Params,
    f0: Array,
    targets: Array,
    moved: Params,
    state: optax.OptState,
    f: Array,
    alive: Array,
    batch: Array | None,
    *,
    loss: Loss,
) -> tuple[tuple, tuple]:
    pull = jax.linear_transpose(push, params)
    picked = (lambda rows: rows) if batch is None else (lambda rows: rows[batch])
    seen = loss.gradient(picked(f), picked(targets)) / len(picked(f))
    seen = seen if batch is None else jnp.zeros_like(f).at[batch].add(seen)
    (gradient,) = pull(seen)
    weights = jax.tree.map(jnp.add, params, moved)
    updates, after = optimizer.update(gradient, state, weights)
    state = keep_dtypes(after, state)
    new = jax.tree.map(lambda m, u: m + u.astype(m.dtype), moved, updates)
    new_f = f0 + push(new)
    alive = alive & jnp.all(jnp.abs(new_f) < output_limit(f))
    moved, f = jax.tree.map(lambda a, b: jnp.where(alive, a, b), (new, new_f), (moved, f))
    test = None if push_test is None else push_test(moved)
    return (moved, state, f, alive), (f, test, _norm(moved), alive)


@jit
def _end(
    network: Traced, params: Params, moved: Params, x: Any, f0: Array, f: Array
) -> tuple[Array, Array]:
    """The network's outputs at the last weights, and how far the predicted ones are off."""
    outputs = network(jax.tree.map(jnp.add, params, moved), x)
    gone = jnp.linalg.norm(f - f0)
    return outputs, jnp.linalg.norm(outputs - f) / jnp.where(gone > 0, gone, 1.0)


def weight_space_flow(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    loss: str | Loss,
    learning_rate: Any,
    ts: Any,
    linearized: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
    max_steps: int = 1_000_000,
) -> Trajectory:
    """Gradient flow in weight space, of the linearised network or of the network itself.

    dw/dt = -(eta/N) J^T g(f), with J and f those at w_0 (f = f_0 + J (w - w_0)), or those at w.
    The first equals `gradient_flow`; the distance of the second from it is what linearising costs.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: the weights before training; bfloat16 and float16 are promoted to float32, samples
            with them, and a warning says so.
        x: samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.
        learning_rate: eta > 0; one unit of time is one step of that size.
        ts: times (T,), non-negative and increasing; the flow starts at t = 0.
        linearized: whether the network is linearised at `params`.
        rtol: relative tolerance; by the dtype when None (1e-5 for float32, 1e-8 for float64).
        atol: absolute tolerance, likewise (1e-6 and 1e-9).
        max_steps: bound on the solver's steps.

    Returns:
        A `Trajectory`: train (T, N, C), and the solver's step counts.

    Raises:
        ValueError: bad labels, rate or times; gradients that are not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> path = weight_space_flow(lambda w, x: x @ w, jnp.zeros((2, 1)), jnp.eye(2),
        ...                          jnp.ones((2, 1)), loss="squared_error", learning_rate=0.1,
        ...                          ts=jnp.array([0.0, 10.0]))
        >>> [round(float(f), 4) for f in path.train[:, 0, 0]]
        [0.0, 0.3935]

    Source:
        TTP Figure 9, which compares ODEs in weight space and in function space.
    """
    check_network(apply_fn, params)
    x = check_samples("x", x)
    check_rows(apply_fn, params, x)
    params, x = promote_all(params, x)
    network = network_of(apply_fn)
    f0 = compile_network(network)[0](params, x)
    check_finite("apply_fn(params, x)", f0)
    targets, loss = encode_targets(loss, y, f0)
    ts = check_times(ts, f0.dtype)
    rate = jnp.asarray(check_rate(learning_rate), f0.dtype) / f0.shape[0]
    accuracy = tolerances(f0.dtype, rtol, atol)
    try:
        path = _flow(
            network.precise(params, x), params, x, f0, targets, ts, rate, accuracy, loss=loss,
            max_steps=max_steps, linearized=linearized,
        )  # fmt: skip
        return jax.block_until_ready(path)
    except Exception:  # the solver's, which does not know why no step is small enough
        check_gradients(apply_fn, params, x, jnp.nan)
        raise


@functools.partial(jit, static_argnames=("loss", "max_steps", "linearized"))
def _flow(
    network: Traced,
    params: Params,
    x: Any,
    f0: Array,
    targets: Array,
    ts: Array,
    rate: Array,
    accuracy: tuple[Array, Array],
    *,
    loss: Loss,
    max_steps: int,
    linearized: bool,
) -> Trajectory:
    _, push = jax.linearize(with_forward_mode(lambda w: network(w, x), params), params)

    def outputs(moved: Params) -> Array:
        if linearized:
            return f0 + push(moved)
        return network(jax.tree.map(jnp.add, params, moved), x)

    def field(t: Any, moved: Params, args: Any) -> Params:
        f, pull = jax.vjp(outputs, moved)
        (gradient,) = pull(loss.gradient(f, targets))
        return jax.tree.map(lambda g: (-rate * g).astype(g.dtype), gradient)

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=jnp.zeros((), f0.dtype),
        t1=ts[-1],
        dt0=None,
        y0=jax.tree.map(jnp.zeros_like, params),
        saveat=diffrax.SaveAt(ts=ts, fn=lambda t, moved, args: outputs(moved)),
        stepsize_controller=diffrax.PIDController(*accuracy),
        max_steps=max_steps,
    )
    stats = solution.stats
    assert solution.ys is not None
    return Trajectory(
        ts, solution.ys, None, stats["num_accepted_steps"], stats["num_rejected_steps"]
    )


def _norm(tree: Params) -> Array:
    total = sum((jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)), start=jnp.zeros(()))
    return jnp.sqrt(total)


def _is_linear(optimizer: Any, params: Params, steps: int) -> bool:
    if isinstance(optimizer, HeavyBall):
        return True
    try:
        return linear_filter(optimizer, params, steps=steps).weight_decay is not None
    except ValueError:
        return False
