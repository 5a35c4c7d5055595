"""Real training runs, to compare forecasts with: a compiled step in a Python loop, timed.

Optimizers with more inputs than gradients receive the batch, the loss and the outputs (optax's
extra arguments), so exact Gauss-Newton steps and line searches work as well.
"""

import functools
import inspect
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxttp._core.checks import check_integer, check_known, check_optimizer
from jaxttp._core.compile import bound_programs, give_back, registered
from jaxttp._core.progress import stopwatch
from jaxttp._core.results import RESULT
from jaxttp._core.traced import Keyed, Traced, network_of
from jaxttp._core.types import ApplyFn, Params, count, take
from jaxttp.adapters import as_rows
from jaxttp.adapters.inputs import check_trained
from jaxttp.adapters.outputs import check_gradients
from jaxttp.dynamics._network import evaluation
from jaxttp.dynamics.batches import batch_indices, check_batches
from jaxttp.losses import Loss, encode_targets
from jaxttp.losses.rule import Rule, Target, reach


class TrainingRun(NamedTuple):
    """The record of a real training run.

    Attributes:
        loss: on all training samples before every step and after the last, (steps + 1,).
        error: likewise.
        outputs: likewise, (steps + 1, N, C).
        params: the trained weights.
        seconds: wall-clock time of the steps alone (no compilation, no evaluation).
        compile_seconds: time to trace and compile; near zero where the step of the same optimizer,
            network and loss was compiled before.
        state: the optimizer's last state.
        recorded: results of `record` for its state after every step, (steps, ...); None without.
    """

    loss: Float[Array, " t"]
    error: Float[Array, " t"]
    outputs: Float[Array, "t n c"]
    params: Params
    seconds: float
    compile_seconds: float
    state: Any = None
    recorded: Any = None

    def read(
        self,
        thresholds: float | Sequence[float],
        *,
        metric: str = "loss",
        rule: str = "relative",
        smooth: int = 1,
        window: int | None = None,
    ) -> dict[float, int]:
        """Training times of this run, as `Prediction.read` gives those of a forecast.

        Args:
            thresholds: the epsilons.
            metric: "loss", or "error" for the time that the error rate takes.
            rule: see `jaxttp.training_time`.
            smooth: steps over which the curve is averaged first.
            window: steps of the rule "plateau".

        Returns:
            Steps for every threshold, -1 where the run never gets there, or diverged: its loss is
            not finite at some step.

        Raises:
            ValueError: an unknown metric or rule, a threshold, a smoothing or a window that does
                not fit it.
        """
        checked = Rule.of(thresholds, rule, metric, smooth, window, steps=len(self.loss) - 1)
        return checked.read(self.loss, self.error, reached=self.finite)

    def reach(self, targets: Iterable[Target | float], *, smooth: int = 1) -> dict[Target, int]:
        """The steps at which this run is below targets, as in `Prediction.targets`.

        Args:
            targets: of the training samples, numbers for losses; or `Prediction.targets`.
            smooth: steps over which the curves are averaged first.

        Returns:
            Steps for every target, -1 where the run never gets there, or diverged.

        Raises:
            ValueError: a target of the test samples, which are not recorded; a smoothing that does
                not fit.
        """
        return reach(self, targets, smooth=smooth, reached=self.finite)

    @property
    def finite(self) -> bool:
        """Whether every loss is finite: the run did not diverge."""
        return bool(np.all(np.isfinite(self.loss)))

    plot, _repr_html_, __repr__ = RESULT


class StepTime(NamedTuple):
    """The measured time of one training step.

    Attributes:
        seconds: median over the repeats, without compilation.
        compile_seconds: time to trace and compile the step; near zero if it was compiled before.
    """

    seconds: float
    compile_seconds: float

    plot, _repr_html_, __repr__ = RESULT


class TrainingStep:
    """One step of training: ``(params, state, x, targets) -> (params, state, f, record)``.

    f are the outputs before the step. It is compiled once for all steps with the same equations (of
    network, loss, optimizer and record).

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        loss: its mean over the batch is minimized.
        optimizer: any optax transformation. One with extra arguments receives `x`, `y` (the encoded
            targets), `loss` (the `Loss`), `outputs` (N, C), and, by optax's own names, `value`,
            `grad` and `value_fn`.
        record: from the optimizer's new state to the values to return.
    """

    def __init__(
        self,
        apply_fn: ApplyFn,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        record: Callable[[Any], Any] | None = None,
    ) -> None:
        self.network, self.loss, self.optimizer = network_of(apply_fn), loss, optimizer
        self.record = record
        self._programs: dict[Any, _Static] = {}

    def __call__(self, params: Params, state: Any, x: Any, targets: Array) -> tuple:
        """Take a step."""
        return _take_step(*self._arguments(params, state, x, targets))

    def compile(self, params: Params, state: Any, x: Any, targets: Array) -> "CompiledStep":
        """The compiled step, not run, for arguments of these shapes."""
        static, network, *arguments = self._arguments(params, state, x, targets)
        return CompiledStep(_take_step.lower(static, network, *arguments).compile(), network)

    def _arguments(self, params: Params, state: Any, x: Any, targets: Array) -> tuple:
        network = self.network.at(params, x)
        key = network.program, jax.tree.structure(state)
        if key not in self._programs:  # functions that equal others of the same equations
            f = network.outputs
            update = functools.partial(_update, self.loss, self.optimizer)
            value = jax.ShapeDtypeStruct((), f.dtype)
            keyed = Keyed(update, network, params, state, params, x, targets, value, f)
            record = None if self.record is None else Keyed(self.record, state)
            self._programs[key] = _Static(keyed, self.loss, record)
        return self._programs[key], network, params, state, x, targets


class _Static(NamedTuple):
    """Static arguments of a step, without the network."""

    update: Keyed
    loss: Loss
    record: Keyed | None


class CompiledStep(NamedTuple):
    """A compiled step for arguments of fixed shapes.

    Attributes:
        compiled: of JAX; ``compiled.cost_analysis()`` counts its operations and bytes.
        network: the trained network.
    """

    compiled: jax.stages.Compiled
    network: Traced

    def __call__(self, params: Params, state: Any, x: Any, targets: Array) -> tuple:
        """Take a step."""
        return self.compiled(self.network, params, state, x, targets)


@registered
@functools.partial(jax.jit, static_argnums=0)
def _take_step(
    static: _Static, network: Traced, params: Params, state: Any, x: Any, targets: Array
) -> tuple[Params, Any, Array, Any]:
    def objective(w: Params) -> tuple[Array, Array]:
        f = network(w, x)
        return static.loss.value(f, targets), f

    (value, f), gradient = jax.value_and_grad(objective, has_aux=True)(params)
    updates, state = static.update(network, gradient, state, params, x, targets, value, f)
    kept = None if static.record is None else static.record(state)
    return optax.apply_updates(params, updates), state, f, kept


def _update(
    loss: Loss, optimizer: Any, network: Traced, gradient: Params, state: Any, params: Params,
    x: Any, targets: Array, value: Array, f: Array,
) -> tuple[Params, Any]:  # fmt: skip
    """The optimizer's update, with the extra arguments that it accepts."""
    if not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return optimizer.update(gradient, state, params)

    def value_fn(
        w: Params, x: Any = x, y: Any = targets, loss: Any = loss, outputs: Any = None
    ) -> Array:
        """The loss of other weights; line searches pass all extra arguments that it names."""
        return loss.value(network(w, x), y)

    extra = {"x": x, "y": targets, "loss": loss, "outputs": f, "value": value, "grad": gradient,
             "value_fn": value_fn}  # fmt: skip
    accepted = inspect.signature(optimizer.update).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        # optax.contrib.sam accepts some of them only
        extra = {name: argument for name, argument in extra.items() if name in accepted}
    return optimizer.update(gradient, state, params, **extra)


def train(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    loss: str | Loss,
    optimizer: optax.GradientTransformation,
    steps: int,
    batch_size: int | None = None,
    key: Array | None = None,
    protocol: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    callback: Callable[[int, Params, float], bool | None] | None = None,
    state: Any = None,
    record: Callable[[Any], Any] | None = None,
) -> TrainingRun:
    """Train all of `params` for real, recording outputs on all samples at every step.

    An optimizer with extra arguments (`optax.GradientTransformationExtraArgs`) receives the batch
    as `x` and `y`, with `loss`, `outputs`, `value`, `grad` and `value_fn`, the arguments of
    `jaxttp.gauss_newton.gauss_newton`, `optax.lbfgs` and similar ones.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, or logits of tokens (N, T, V), C = T V.
        params: the initial weights (they are not changed).
        x: samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C); with `jaxttp.weighted`, weights and masks; of
            tokens (N, T), see `jaxttp.losses.encode_targets` for the mean of a batch.
        loss: a name or a `Loss`; its mean over the batch is minimized.
        optimizer: any optax transformation. A second run with it compiles nothing; use
            `optax.inject_hyperparams` of it to change its rate in between, by `state`.
        steps: number of steps.
        batch_size: samples a step; all of them when None.
        key: a `jax.random.key`, needed with `batch_size`.
        protocol: how batches are drawn, "epochs" when None, see `jaxttp.dynamics.batch_indices`.
        progress: called with (steps done, steps in all).
        callback: called with (step, params, loss on all samples) before the first step and after
            every one; it is not timed. If it returns True the run ends, with shorter curves.
        state: the optimizer's initial state, such as the `TrainingRun.state` of a run to continue;
            `optimizer.init(params)` when None.
        record: ``state -> pytree`` of arrays to keep of the optimizer's state after every step, see
            `TrainingRun.recorded`. It is traced; one of the same equations compiles nothing again.

    Returns:
        A `TrainingRun`.

    Raises:
        ValueError: bad labels, batch size, key or protocol; a protocol without a batch size; a leaf
            of `params` that is not floating-point, a plain int included; errors of the optimizer; a
            loss that is not finite because the gradient of a sample at the initial weights is not.
        equinox.EquinoxRuntimeError: an optimizer's errors at run time, such as features that
            Gauss-Newton steps cannot invert.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> run = train(lambda w, x: x @ w, jnp.zeros((2, 1)), jnp.eye(2), jnp.ones((2, 1)),
        ...             loss="squared_error", optimizer=optax.sgd(1.0), steps=5)
        >>> run.loss.shape, bool(run.loss[-1] < run.loss[0])
        ((6,), True)
    """
    check_integer("steps", steps, at_least=1)
    bound_programs()
    apply_fn, x, targets, loss = _prepare(apply_fn, params, x, y, loss, optimizer)
    protocol = check_batches(batch_size, key, protocol, count(x))
    check_known(key=key)
    network = network_of(apply_fn)
    evaluate = evaluation(network)
    f = evaluate(params, x)
    indices = None
    if batch_size is not None:
        indices = batch_indices(key, f.shape[0], batch_size, steps, protocol=protocol)
    state = optimizer.init(params) if state is None else state
    step = TrainingStep(network, loss, optimizer, record)
    first = x if indices is None else take(x, indices[0])
    with stopwatch() as compiling:
        step = step.compile(params, state, first, targets[: count(first)])

    def call_back(t: int, f: Array) -> bool:
        answer = None if callback is None else callback(t, params, float(loss.value(f, targets)))
        return isinstance(answer, bool | np.bool_) and bool(answer)

    initial, history, kept, seconds = params, [f], [], 0.0
    evaluates = indices is not None or callback is not None
    ended = call_back(0, f)
    for t in range(0 if ended else steps):
        batch = (x, targets) if indices is None else (take(x, indices[t]), targets[indices[t]])
        jax.block_until_ready(batch)
        begun = time.perf_counter()
        params, state, before, report = _finished(step, params, state, *batch)
        seconds += time.perf_counter() - begun
        kept.append(report)
        if t > 0 and not evaluates:
            # A step on the full batch has computed the outputs after the step before it.
            history.append(before)
        if evaluates or t + 1 == steps:
            history.append(evaluate(params, x))
        ended = call_back(t + 1, history[-1])
        if progress is not None:
            progress(t + 1, steps)
        if ended:
            break
    outputs = jnp.stack(history)
    losses, errors = (jax.vmap(f, (0, None))(outputs, targets) for f in (loss.value, loss.error))
    check_gradients(apply_fn, initial, x, losses)
    recorded = jax.tree.map(lambda *rows: jnp.stack(rows), *kept) if kept else None
    return TrainingRun(losses, errors, outputs, params, seconds, compiling.seconds, state, recorded)


def _finished(step: Any, *arguments: Any) -> Any:
    """The finished results of a compiled step; an error inside it is raised by itself."""
    try:
        return jax.block_until_ready(step(*arguments))
    except jax.errors.JaxRuntimeError as problem:
        match = re.search(r"EquinoxRuntimeError: (.*?)\n\n\n-----", str(problem), re.DOTALL)
        if match is None:
            raise
        raise eqx.EquinoxRuntimeError(match[1].strip()) from None


def time_step(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    loss: str | Loss,
    optimizer: optax.GradientTransformation,
    batch_size: int | None = None,
    repeats: int = 15,
) -> StepTime:
    """Seconds of one training step on this device, the median of a few timed steps.

    It is the step of `jaxttp.train`. On CPUs a training loop without jaxttp can take longer: here
    operations that XLA compiles badly are rewritten (vision transformers of 12 blocks run 1.5 times
    faster).

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: weights; they are not changed.
        x: samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.
        optimizer: any optax transformation.
        batch_size: samples a step (the first ones are used); all of them when None.
        repeats: timed steps, after the compilation and one warm-up.

    Returns:
        A `StepTime`: the median, compilation apart.

    Raises:
        ValueError: bad labels, batch size or number of repeats.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> spent = time_step(lambda w, x: x @ w, jnp.zeros((2, 1)), jnp.eye(2), jnp.ones((2, 1)),
        ...                   loss="squared_error", optimizer=optax.sgd(1.0))
        >>> spent.seconds > 0
        True
    """
    check_integer("repeats", repeats, at_least=1)
    step, batch, compiling = compile_step(
        apply_fn, params, x, y, loss=loss, optimizer=optimizer, batch_size=batch_size
    )
    give_back()  # memory of the compilation
    jax.block_until_ready(step(*batch))
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(step(*batch))
        times.append(time.perf_counter() - begun)
    return StepTime(statistics.median(times), compiling)


def compile_step(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    loss: str | Loss,
    optimizer: optax.GradientTransformation,
    batch_size: int | None = None,
) -> tuple[CompiledStep, tuple, float]:
    """The compiled training step, not run, its arguments, and the seconds it took to compile.

    Args:
        apply_fn: as in `time_step`, like all other arguments.
        params: as there.
        x: as there.
        y: as there.
        loss: as there.
        optimizer: as there.
        batch_size: as there.

    Returns:
        ``(step, (params, state, x, targets), seconds)``, of the first batch;
        ``step.compiled.cost_analysis()`` counts its operations and bytes. A step that was compiled
        before, such as by `train`, takes nearly no time.

    Raises:
        ValueError: bad labels or batch size.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> step, _, _ = compile_step(lambda w, x: x @ w, jnp.zeros((2, 1)), jnp.eye(2),
        ...                        jnp.ones((2, 1)), loss="squared_error",
        ...                        optimizer=optax.sgd(1.0))
        >>> step.compiled.cost_analysis()["flops"] > 0
        True
    """
    apply_fn, x, targets, loss = _prepare(apply_fn, params, x, y, loss, optimizer)
    if batch_size is not None:
        check_integer("batch_size", batch_size, at_least=1, at_most=count(x))
        x, targets = take(x, slice(batch_size)), targets[:batch_size]
    batch = params, optimizer.init(params), x, targets
    with stopwatch() as compiling:
        step = TrainingStep(apply_fn, loss, optimizer).compile(*batch)
    return step, batch, compiling.seconds


def _prepare(
    apply_fn: ApplyFn, params: Params, x: Any, y: Any, loss: str | Loss, optimizer: Any
) -> tuple[ApplyFn, Any, Array, Loss]:
    """Network with outputs (N, C), samples, targets and loss, checked."""
    check_optimizer(optimizer)
    x = check_trained(apply_fn, params, x)
    check_known(params=params, x=x, y=y)
    apply_fn, outputs = as_rows(apply_fn, params, x)
    targets, loss = encode_targets(loss, y, outputs)
    return apply_fn, x, targets, loss
