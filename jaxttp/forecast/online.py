"""Closed loop: the first steps of a real training correct its forecast.

What is known after k steps says what the kernel has become, better the more there is:

- losses: the kernel's scale is fitted as 1 + gamma l_t, l_t the length of the predicted path so
  far as a share of the whole, one number gamma to all losses;
- outputs: the kernel is corrected by the secant equations that real steps obey,
  f_{t+1} - f_t = -(eta/N) Theta g_t, by the formula of Broyden, Fletcher, Goldfarb and Shanno,
  which keeps it symmetric and positive, and the recursion goes on from f_k;
- weights: the network is linearised again where it stands, and further on along the predicted path.

`Online` is a callback of a training that remembers what all three need.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import (
    check_array,
    check_choice,
    check_finite,
    check_integer,
    check_known,
    check_used,
)
from jaxttp._core.compile import full_precision, jit
from jaxttp._core.results import RESULT
from jaxttp._core.types import ApplyFn, Params
from jaxttp.dynamics._kernels import check_problem, flatten_kernel
from jaxttp.dynamics._network import compile_network, promote
from jaxttp.dynamics._trajectory import output_limit
from jaxttp.dynamics.relinearize import relinearized_recursion
from jaxttp.forecast.methods.base import Linearizer
from jaxttp.forecast.options import check_tokens, choose_kernel
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.stability import RISE
from jaxttp.forecast.training_setup import Hyperparameters, check_descent
from jaxttp.losses import Loss
from jaxttp.losses.rule import Curves, Rule, Target, Values, goal_words, reach, targets_of
from jaxttp.ntk._select import split_trainable
from jaxttp.ntk.kernels import KernelLike


@dataclasses.dataclass(frozen=True)
class _Fit:
    """Numbers of the corrections, chosen on the tuning tasks of experiments/bench.

    Attributes:
        growths: the gammas that a fit to losses chooses from.
        ridge: weight of gamma^2 beside the misfit as a share of the drop: few losses say little.
        scales: bounds of the kernel's fitted scale.
        secants: windows of the steps, each of which gives one secant equation; means over noise.
        curvature: a secant equation below this share of the kernel's own curvature is left out.
        departure: the linear regime is left when the loss is off by this share of the drop.
        out_of_range: a relinearized forecast is not believed whose loss exceeds all observed ones
            by this factor.
    """

    growths: tuple[float, ...] = (*np.linspace(-1.0, 1.0, 21), *np.linspace(1.25, 8.0, 28))
    ridge: float = 1e-3
    scales: tuple[float, float] = (0.1, 10.0)
    secants: int = 5
    curvature: float = 1e-3
    departure: float = 0.05
    out_of_range: float = 2.0


_FIT = _Fit()
KINDS = ("losses", "outputs", "weights")


@dataclasses.dataclass(frozen=True)
class OnlineForecast:
    """A forecast corrected by the first k real steps; prints itself as a table.

    Attributes:
        steps: training time for every threshold, from the start of training; -1 where the corrected
            forecast diverges or never gets there.
        loss: L_0, ..., L_T: observed up to step k, predicted beyond it.
        open_loop: the loss predicted before training, (T + 1,).
        at: k.
        kind: what the correction used: "losses", "outputs" or "weights".
        time_scale: how many times faster than predicted the outputs move at step k.
        departure: |observed - predicted loss| as a share of the predicted drop, (k + 1,).
        left_at: the step at which the linear regime was left, -1 for not yet.
        stable: False where the corrected forecast diverges, or rises above twice what was seen.
        rule: the definition of training time.
        kernels: kernels built for the correction.
        targets: the step at which every target is reached, -1 as in `steps`.
    """

    steps: Mapping[float, int]
    loss: np.ndarray
    open_loop: np.ndarray
    at: int
    kind: str
    time_scale: float
    departure: np.ndarray
    left_at: int
    stable: bool
    rule: str
    kernels: int = 0
    targets: Mapping[Target, int] = dataclasses.field(default_factory=dict)

    @property
    def message(self) -> str:
        """One line on the linear regime."""
        if self.left_at >= 0:
            worst = float(self.departure.max())
            return (
                f"linear regime left at step {self.left_at}: the loss is off by up to {worst:.0%} "
                "of the predicted drop"
            )
        return f"linear regime so far (off by at most {float(self.departure.max()):.1%})"

    def __str__(self) -> str:
        lines = [f"Forecast after {self.at} of {len(self.loss) - 1} steps, by {self.kind}"]
        goals = [(goal_words(threshold, self.rule), step) for threshold, step in self.steps.items()]
        goals += [(target.words(), step) for target, step in self.targets.items()]
        for goal, step in goals:
            when = f"step {step}" if step >= 0 else ("not reached" if self.stable else "diverges")
            lines.append(f"  {goal:<26} {when:>12}")
        lines.append(
            f"  loss   {self.loss[0]:.4g} -> {self.loss[-1]:.4g} "
            f"(before training: {self.open_loop[-1]:.4g})"
        )
        lines.append(f"  outputs move {self.time_scale:.2f} times as fast as predicted")
        lines.append(f"  {self.message}")
        return "\n".join(lines)

    plot, _repr_html_, __repr__ = RESULT


def online(
    kernel: KernelLike,
    f0: ArrayLike,
    y: Any,
    setting: Hyperparameters,
    *,
    losses: Any = None,
    outputs: Any = None,
    thresholds: Sequence[float] | None = None,
    target_loss: Values = None,
    rule: str | Rule = "relative",
    smooth: int = 1,
    window: int | None = None,
) -> OnlineForecast:
    """Correct a forecast by the losses, or by the outputs, of the first k real steps.

    With mini-batches the rest is forecast by the expected gradient.

    Args:
        kernel: Theta before training (N, C, N, C), or (N, N) for K ⊗ I_C.
        f0: outputs before training (N, C).
        y: integer labels (N,) or targets (N, C).
        setting: rate, momentum, schedule, loss and horizon T.
        losses: L_0, ..., L_k on all samples, (k + 1,). Give either these or `outputs`.
        outputs: f_0, ..., f_k on all samples, (k + 1, N, C).
        thresholds: the epsilons, shares in (0, 1) for the rule "relative"; 0.01, 0.1 and 0.4 when
            None.
        target_loss: losses on the training samples to get below, one or several, each above 0; the
            error is not corrected.
        rule: the definition of training time, see `training_time`; or a `Rule` of the loss, which
            takes the place of thresholds, smooth and window.
        smooth: steps over which the curve is averaged first, see `smooth_curve`.
        window: steps of the rule "plateau".

    Returns:
        An `OnlineForecast`.

    Raises:
        ValueError: both or none of losses and outputs, fewer than one step or more than T, values
            that are not finite, bad shapes or options.

    Example:
        >>> import jax.numpy as jnp
        >>> kernel = jnp.eye(2).reshape(2, 1, 2, 1)
        >>> setting = Hyperparameters(0.2, loss="squared_error", steps=40)
        >>> real = 0.5 * 0.85 ** (2 * jnp.arange(9))  # a kernel of 1.5 instead of 1
        >>> found = online(kernel, jnp.zeros((2, 1)), jnp.ones((2, 1)), setting, losses=real)
        >>> found.at, len(found.loss), found.time_scale > 1.1
        (8, 41, True)

    Source:
        Ours; measured in experiments/bench.
    """
    if (losses is None) == (outputs is None):
        given = "neither" if losses is None else "both"
        raise ValueError(f"give exactly one of losses and outputs; got {given}.")
    check_descent("setting", setting)
    check_known(kernel=kernel, f0=f0, y=y, losses=losses)
    if losses is not None:
        losses = check_array("losses", losses)
    reading = loss_rule(thresholds, rule, smooth, window, setting.steps)
    wanted = targets_of(target_loss)
    theta, f0, targets, loss, _, _ = check_problem(kernel, f0, y, setting.loss)
    matrix = flatten_kernel(theta, f0.shape[1])
    rates = jnp.asarray(setting.rates(), f0.dtype)
    begin = functools.partial(_run, targets=targets, momentum=setting.momentum, loss=loss)
    still, none = jnp.zeros_like(f0), jnp.zeros(1, f0.dtype)
    first = begin(matrix, f0, still, rates=rates, growths=none, whole=jnp.ones((), f0.dtype))
    open_loop, whole = first[0][:, 0], first[1][0]
    if outputs is not None:
        path = jnp.asarray(outputs, f0.dtype)
        if path.ndim != 3 or path.shape[1:] != f0.shape:
            raise ValueError(
                f"outputs must be (k + 1, {f0.shape[0]}, {f0.shape[1]}), one row a step from "
                f"step 0 on; got {path.shape}."
            )
        losses = jax.vmap(lambda f: loss.value(f, targets))(path)
        seen = _observed("outputs", losses, setting.steps)
        check_finite("outputs", path)
        k = len(seen) - 1
        mended, scale = _secants(matrix, path, targets, loss, setting)
        moved = last_move(setting, k)
        before = path[moved - 1] - path[moved] if moved else still
        here = loss.gradient(path[k], targets).reshape(-1) / len(f0)
        force = jnp.dot(mended, here, precision="highest").reshape(f0.shape)
        velocity = carried_on(before, force, setting, k)
        found = begin(mended, path[k], velocity, rates=rates[k:], growths=none, whole=whole)
        rest, stable, kind = found[0][1:, 0], found[2][0], "outputs"
    else:
        seen = _observed("losses", losses, setting.steps)
        k = len(seen) - 1
        growths = jnp.asarray(_FIT.growths, f0.dtype)
        curves, _, alive, scales = begin(
            matrix, f0, still, rates=rates, growths=growths, whole=whole
        )  # fmt: skip
        curves = np.asarray(curves, np.float64)
        best = _best_growth(curves[: k + 1], seen, abs(float(open_loop[0] - open_loop[k])) or 1.0)
        rest, stable, kind = curves[k + 1 :, best], alive[best], "losses"
        scale = float(scales[k - 1, best])
    return corrected(reading, wanted, open_loop, seen, rest, bool(stable), kind, scale)


def _best_growth(curves: np.ndarray, seen: np.ndarray, come: float) -> int:
    """Which of the growths fits the losses seen, with a ridge on its square."""
    misfit = np.mean(((curves - seen[:, None]) / come) ** 2, axis=0)
    misfit = misfit + _FIT.ridge * np.square(_FIT.growths)
    misfit = np.where(np.isfinite(misfit), misfit, np.inf)
    return int(np.lexsort((np.abs(_FIT.growths), misfit))[0])  # ties: the smallest correction


def _observed(name: str, losses: Any, steps: int) -> np.ndarray:
    seen = np.asarray(losses, np.float64)
    if seen.ndim != 1:
        raise ValueError(f"{name} must be a vector L_0, ..., L_k; got shape {seen.shape}.")
    remedy = "Give step 0 and at least one more, none beyond the horizon."
    check_integer(f"len({name})", len(seen), at_least=2, at_most=steps + 1, remedy=remedy)
    check_finite(name, seen)
    return seen


def loss_rule(
    thresholds: Sequence[float] | None,
    rule: str | Rule,
    smooth: int,
    window: int | None,
    steps: int,
) -> Rule:
    """A rule of the loss; the error of what has not been seen is not corrected."""
    found = Rule.of(thresholds, rule, smooth=smooth, window=window, steps=steps)
    if found.metric != "loss":
        raise ValueError("rule: only the loss is corrected by what was seen; read the loss.")
    return found


def corrected(
    rule: Rule,
    targets: tuple[Target, ...],
    open_loop: Any,
    seen: np.ndarray,
    rest: Any,
    stable: bool,
    kind: str,
    scale: float,
    kernels: int = 0,
) -> OnlineForecast:
    """The forecast of a curve whose first part was observed and whose rest is predicted."""
    open_loop = np.asarray(open_loop, np.float64)
    curve = np.concatenate([seen, np.asarray(rest, np.float64)])
    highest = RISE * seen.max()  # a training under way has survived what was seen
    stable = stable and bool(np.max(curve) <= highest and curve[-1] <= RISE * curve[0])
    drop = abs(float(open_loop[0] - open_loop[-1])) or 1.0
    off = np.abs(seen - open_loop[: len(seen)]) / drop
    beyond = np.flatnonzero(off > _FIT.departure)
    left = int(beyond[0]) if beyond.size else -1
    times = rule.read(curve, None, reached=stable)
    below = reach(Curves(curve), targets, smooth=rule.smooth, reached=stable)
    return OnlineForecast(
        times, curve, open_loop, len(seen) - 1, kind, scale, off, left, stable, rule.kind, kernels,
        below,
    )  # fmt: skip


@functools.partial(jit, static_argnames="loss")
def _run(
    matrix: Array,
    start: Array,
    velocity: Array,
    *,
    targets: Array,
    rates: Array,
    momentum: Any,
    growths: Array,
    whole: Array,
    loss: Loss,
) -> tuple[Array, Array, Array, Array]:
    """Heavy-ball descent with a kernel that grows along the path, for S growths at once.

    Returns loss curves (t + 1, S), path lengths (S,), who stayed representable (S,), and the
    kernel's scale at every step (t, S).
    """
    n, c = start.shape
    limit = output_limit(start)
    count = growths.shape[0]
    gradient = jax.vmap(loss.gradient, (2, None), 2)
    value = jax.vmap(loss.value, (2, None))
    momentum = jnp.asarray(momentum, start.dtype)

    def step(carry: tuple, rate: Array) -> tuple[tuple, tuple]:
        f, speed, come, alive = carry
        scale = jnp.clip(1.0 + growths * come / whole, *_FIT.scales)
        flat = gradient(f, targets).reshape(n * c, count) / n
        force = jnp.dot(matrix, flat, precision="highest").reshape(n, c, count)
        speed = momentum * speed + scale[None, None] * force
        new = f - rate * speed
        alive = alive & jnp.all(jnp.abs(new) < limit, axis=(0, 1))
        new = jnp.where(alive[None, None], new, f)
        come = come + jnp.sqrt(jnp.sum((new - f) ** 2, axis=(0, 1)))
        return (new, speed, come, alive), (value(new, targets), scale)

    def spread(array: Array) -> Array:
        return jnp.broadcast_to(array[..., None], (n, c, count))

    first = (spread(start), spread(velocity), jnp.zeros(count, start.dtype), jnp.ones(count, bool))
    (_, _, come, alive), (losses, scales) = jax.lax.scan(step, first, rates)
    losses = jnp.concatenate([value(first[0], targets)[None], losses])
    return losses, jnp.where(come > 0, come, 1.0), alive, scales


def last_move(setting: Hyperparameters, k: int) -> int:
    """The last of the first k steps whose rate is not zero, counted from 1; 0 for none."""
    moving = np.flatnonzero(setting.rates()[:k] > 0)
    return int(moving[-1]) + 1 if moving.size else 0


def carried_on(move: Any, gradient: Any, setting: Hyperparameters, k: int) -> Any:
    """The velocity after k steps from the last move; steps of no rate go on accumulating.

    Args:
        move: what the last step that moved took off (a pytree), zeros where there is none.
        gradient: the force at the present place, shaped like `move`.
        setting: rates and momentum.
        k: steps seen.
    """
    moved, m = last_move(setting, k), setting.momentum
    rate = float(setting.rates()[moved - 1]) if moved else 1.0
    kept = m ** (k - moved)
    gained = (1 - kept) / (1 - m)
    return jax.tree.map(lambda a, g: kept / rate * a + gained * g, move, gradient)


def _secants(
    matrix: Array, path: Array, targets: Array, loss: Loss, setting: Hyperparameters
) -> tuple[Array, float]:
    """The kernel that the steps seen so far obey, and how much larger it is than Theta for them."""
    k = len(path) - 1
    gradient: Callable[[Array], Array] = lambda f: loss.gradient(f, targets)  # noqa: E731
    g = np.asarray(jax.vmap(gradient)(path[:-1]), np.float64).reshape(k, -1)
    rates = setting.rates()[:k, None]
    moves = rates[:, 0] > 0  # a step of no rate says nothing of the kernel
    known = moves if not setting.momentum else moves & np.append(True, moves[:-1])
    speed = -np.diff(np.asarray(path, np.float64), axis=0).reshape(k, -1)
    speed = speed / np.where(moves[:, None], rates, 1.0)
    earlier = np.concatenate([np.zeros_like(speed[:1]), speed[:-1]])
    image = path.shape[1] * (speed - setting.momentum * earlier)  # Theta g, as it really was
    theta = np.asarray(matrix, np.float64)
    mended = theta.copy()
    scale = 1.0
    steps = np.flatnonzero(known)
    for window in np.array_split(steps, max(1, min(_FIT.secants, len(steps)))):
        along, wanted = g[window].sum(axis=0), image[window].sum(axis=0)
        have = mended @ along
        curvature, real = float(along @ have), float(along @ wanted)
        before = float(along @ theta @ along)
        if real <= _FIT.curvature * before or curvature <= 0:
            continue
        mended += np.outer(wanted, wanted) / real - np.outer(have, have) / curvature
        scale = real / before
    return jnp.asarray(mended, path.dtype), scale


class Online:
    """A callback for `train` (or any loop) that corrects the forecast whenever it is asked.

    Before the first step it builds one kernel. Called with (step, params, loss on all samples) it
    only remembers; `forecast` does the work.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode.
        params: the weights before training.
        x: training samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        setting: rate, momentum, schedule, batch size, loss and horizon.
        thresholds: see `online`.
        target_loss: see `online`.
        rule: see `online`.
        smooth: see `online`.
        window: see `online`.
        trainable: which parameters train, as in `empirical_ntk`.
        sketch_dim: width of a random projection of the Jacobian that stands for exact kernels.
        key: a `jax.random.key`, needed with `sketch_dim`.
        max_bytes: bound on an exact kernel's working memory.

    Raises:
        ValueError: whatever `predict_training_time` refuses of model and data.

    Example:
        >>> import jax, jax.numpy as jnp, jaxttp
        >>> x = jax.random.normal(jax.random.key(0), (20, 3))
        >>> y = (x[:, 0] > 0).astype(int)
        >>> model, setting = (lambda w, x: jnp.tanh(x @ w), jnp.zeros((3, 2))), Hyperparameters(1.0)
        >>> watch = Online(*model, x, y, setting)
        >>> run = jaxttp.train(*model, x, y, loss="cross_entropy", optimizer=setting.optimizer(),
        ...                    steps=15, callback=watch)
        >>> found = watch.forecast("weights")
        >>> found.at, sorted(found.steps)
        (15, [0.01, 0.1, 0.4])

    Source:
        See `online`.
    """

    def __init__(
        self,
        apply_fn: ApplyFn,
        params: Params,
        x: Any,
        y: Any,
        setting: Hyperparameters,
        *,
        thresholds: Sequence[float] | None = None,
        target_loss: Values = None,
        rule: str | Rule = "relative",
        smooth: int = 1,
        window: int | None = None,
        trainable: Any = None,
        sketch_dim: int | None = None,
        key: Array | None = None,
        max_bytes: int | None = None,
    ) -> None:
        check_descent("setting", setting)
        self._rule = loss_rule(thresholds, rule, smooth, window, setting.steps)
        self._targets = targets_of(target_loss)
        estimator = choose_kernel(sketch_dim, key, None, max_bytes)
        self._problem = Problem.of(apply_fn, params, x, y, loss=setting.loss, trainable=trainable)
        check_tokens(self._problem, estimator)
        self._lines = Linearizer(self._problem.contrasted(), estimator)
        self._y, self._setting = self._problem.labels, setting
        self._outputs = compile_network(self._problem.apply_fn)[0]
        self.kernel = Linearizer(self._problem, estimator).first
        self._losses: list[float] = []
        self._path: list[Array] = []
        self._weights: list[Params] = []

    plot, _repr_html_, __repr__ = RESULT

    def __str__(self) -> str:
        return f"Online forecast of {self._setting.steps} steps: {len(self._losses)} seen"

    def __call__(self, step: int, params: Params, loss: float) -> None:
        """Remember one step: its number, the weights after it, and the loss on all samples."""
        if step != len(self._losses):
            raise ValueError(
                f"step must be {len(self._losses)}, the one after the last seen; got {step}."
            )
        self._losses.append(float(loss))
        params, _ = promote(params, self._problem.trainable)  # as those of the forecast were
        self._path.append(self._outputs(params, self._problem.x))
        # The last two that differ, for the velocity. A step may write into the arrays it was given,
        # so keep copies.
        moved = step == 0 or last_move(self._setting, step) == step
        kept = self._weights[-1:] if moved else self._weights[:-1]
        self._weights = [*kept, jax.tree.map(jnp.array, params)]

    def forecast(
        self, kind: str = "weights", *, rebuilds: int | str | None = None
    ) -> OnlineForecast:
        """The forecast as it stands after the steps seen so far.

        Args:
            kind: "losses", "outputs" or "weights", what to correct by.
            rebuilds: for "weights", kernels built along the rest of the path besides the one at the
                present weights; "auto" (when None) for as many as its error asks for.

        Returns:
            An `OnlineForecast`. By weights it is the forecast of `relinearized_recursion` from the
            present weights on, at the edge of stability the mean path. One that leaves the range
            of the losses seen gives way to the one by outputs, as its `kind` says.

        Raises:
            ValueError: an unknown kind, rebuilds for another than "weights", no step seen yet, or
                all of them.
        """
        check_choice("kind", kind, KINDS)
        check_used("rebuilds", rebuilds, kind == "weights", "it is for kind='weights'")
        f0 = self._path[0] if self._path else None
        if f0 is None:
            raise ValueError("no step was seen yet; pass this object as callback to train.")
        known: dict[str, Any] = {"losses": np.array(self._losses)}
        if kind == "outputs":
            known = {"outputs": jnp.stack(self._path)}
        base = online(
            self.kernel, f0, self._y, self._setting, **known, rule=self._rule,
            target_loss=[target.value for target in self._targets],
        )  # fmt: skip
        if kind != "weights":
            return base
        found = self._relinearized(base, "auto" if rebuilds is None else rebuilds)
        highest = _FIT.out_of_range * float(found.loss[: found.at + 1].max())
        if found.stable and found.loss.max() <= highest:
            return found
        return self.forecast("outputs")

    @full_precision
    def _relinearized(self, base: OnlineForecast, rebuilds: int | str) -> OnlineForecast:
        setting, k = self._setting, base.at
        if k == setting.steps:
            return dataclasses.replace(base, kind="weights")
        lines, rates = self._lines, setting.rates()
        problem = lines.problem
        before, now = (split_trainable(self._weights[i], problem.trainable)[0] for i in (0, -1))
        velocity = move = jax.tree.map(jnp.subtract, before, now)
        if setting.momentum:
            outputs, pull = jax.vjp(lambda w: problem.network(w, problem.x), now)
            force = problem.loss.gradient(outputs, problem.targets) / len(outputs)
            velocity = carried_on(move, pull(force)[0], setting, k)
        rest = jnp.asarray(rates[k:])
        rate = float(rates[k]) if np.all(rates[k:] == rates[k]) else lambda t: rest[t]
        path = relinearized_recursion(
            problem.network, now, problem.x, problem.targets, loss=problem.loss,
            optimizer=optax.sgd(rate, setting.momentum or None), steps=setting.steps - k,
            kernel_fn=lines.at, rebuilds=rebuilds,
            accumulators=(velocity,) if setting.momentum else (),
            # A training run in progress may be at the edge, and has not diverged.
            damp=not problem.is_linear,
        )  # fmt: skip
        return corrected(
            self._rule, self._targets, base.open_loop, base.loss[: k + 1],
            path.loss[1:], bool(path.diverged_at < 0), "weights", base.time_scale, path.kernels,
        )  # fmt: skip
