"""From a model and data to a forecast of its training, without training it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxttp._checks import check_choice, check_finite, check_integer, check_number
from jaxttp._timing import stopwatch
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters import check_per_sample, output_shape
from jaxttp.dynamics.closed_form import closed_form
from jaxttp.dynamics.diffusion import diffusion
from jaxttp.dynamics.filters import linear_filter
from jaxttp.dynamics.flow import gradient_flow
from jaxttp.dynamics.rates import effective_learning_rate
from jaxttp.dynamics.recursion import recursion
from jaxttp.dynamics.relinearize import relinearized_recursion
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.dynamics.weight_space import weight_space
from jaxttp.forecast.bands import steps_band, steps_uncertainty
from jaxttp.forecast.crossing import RULES, training_time
from jaxttp.losses import Loss, encode_targets
from jaxttp.ntk import empirical_ntk
from jaxttp.ntk._select import split_trainable

DYNAMICS = ("auto", "recursion", "ode", "closed_form", "sde", "weight_space")


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a forecast cost.

    Attributes:
        kernels: kernels built.
        gradient_evaluations: passes back through the network over all samples; an exact kernel
            takes one for each of the C outputs, a step of full-batch training takes one.
        seconds: wall-clock time without compilation.
        compile_seconds: time to trace and compile.
    """

    kernels: int
    gradient_evaluations: int
    seconds: float
    compile_seconds: float

    def __str__(self) -> str:
        kernels = "1 kernel" if self.kernels == 1 else f"{self.kernels} kernels"
        return (
            f"{kernels}, {self.gradient_evaluations} gradient evaluations, "
            f"{self.seconds:.2f} s + {self.compile_seconds:.2f} s to compile"
        )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A forecast of training; prints itself as a table.

    Attributes:
        steps: training time in steps for every threshold; -1 where the forecast diverges, or never
            gets there (rules "absolute" and "plateau" only).
        loss: predicted mean loss L_0, ..., L_T on the training samples, (T + 1,).
        error: predicted error (share misclassified; for regression unexplained variance), (T + 1,).
        max_learning_rate: beyond it the linearised network diverges at the start of training; for
            an `optimizer` given as such, the limit of plain gradient descent.
        stable: False when the learning rate is beyond that limit, the outputs diverged, or the loss
            ends above twice its start (small batches can diverge below the limit).
        cost: what the forecast cost.
        horizon: T.
        rule: the definition of training time, see `training_time`.
        dynamics: how the outputs were moved.
        hyperparameters: what was asked for, as plain values.
        outputs: predicted outputs (T + 1, N, C).
        loss_uncertainty: with re-linearisation, the estimated error of the loss curve, (T + 1,):
            what the second-order correction changed so far; None otherwise.
        steps_uncertainty: with re-linearisation, the estimated error of every training time, at
            least 1; None otherwise.
        loss_band: with dynamics "sde", the 10 % and 90 % quantiles of the loss, (2, T + 1).
        steps_band: with dynamics "sde", those of every training time.
        test_loss: predicted loss on the test samples (T + 1,), where they were given.
        test_error: predicted error on the test samples (T + 1,), where they were given.
        trust: how far the forecast can be trusted, where the dynamics say so; None otherwise.
    """

    steps: Mapping[float, int]
    loss: Float[Array, " t"]
    error: Float[Array, " t"]
    max_learning_rate: float
    stable: bool
    cost: Cost
    horizon: int
    rule: str
    dynamics: str
    hyperparameters: Mapping[str, Any]
    outputs: Float[Array, "t n c"]
    loss_uncertainty: Float[Array, " t"] | None = None
    steps_uncertainty: Mapping[float, int] | None = None
    loss_band: Float[Array, "2 t"] | None = None
    steps_band: Mapping[float, tuple[int, int]] | None = None
    test_loss: Float[Array, " t"] | None = None
    test_error: Float[Array, " t"] | None = None
    trust: str | None = None

    @property
    def message(self) -> str:
        """One line on stability."""
        rate = self.hyperparameters.get("learning_rate")
        if self.stable:
            return f"stable; largest stable learning rate {self.max_learning_rate:.4g}"
        if rate is not None and rate < self.max_learning_rate:
            return (
                f"diverges at learning rate {rate:g} with batches of "
                f"{self.hyperparameters['batch_size']}; a full batch diverges above "
                f"η = {self.max_learning_rate:.4g}"
            )
        given = "" if rate is None else f" (learning rate {rate:g})"
        return f"diverges above η = {self.max_learning_rate:.4g}{given}"

    def __str__(self) -> str:
        share = self.rule == "relative"
        lines = [f"Training-time forecast: {self.horizon} steps, dynamics {self.dynamics!r}"]
        for threshold, step in self.steps.items():
            goal = f"{100 * threshold:g} % of the loss's drop" if share else f"{threshold:g}"
            when = f"step {step}" if step >= 0 else ("not reached" if self.stable else "diverges")
            if step >= 0 and self.steps_uncertainty is not None:
                when += f" ± {self.steps_uncertainty[threshold]}"
            if step >= 0 and self.steps_band is not None:
                when += " ({}-{})".format(*self.steps_band[threshold])
            lines.append(f"  {self.rule:<9} {goal:<26} {when:>12}")
        first, last = float(self.loss[0]), float(self.loss[-1])
        lines.append(f"  loss   {first:.4g} -> {last:.4g}")
        lines.append(f"  error  {float(self.error[0]):.4g} -> {float(self.error[-1]):.4g}")
        if self.test_loss is not None and self.test_error is not None:
            ends = [float(c[i]) for c in (self.test_loss, self.test_error) for i in (0, -1)]
            lines.append("  test   loss {:.4g} -> {:.4g}, error {:.4g} -> {:.4g}".format(*ends))
        lines.append(f"  {self.message}")
        if self.trust is not None:
            lines.append(f"  trust  {self.trust}")
        lines.append(f"  cost   {self.cost}")
        return "\n".join(lines)

    __repr__ = __str__


def predict_training_time(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    loss: str | Loss = "cross_entropy",
    learning_rate: float | None = None,
    momentum: float = 0.0,
    batch_size: int | None = None,
    optimizer: optax.GradientTransformation | None = None,
    steps: int = 150,
    thresholds: Sequence[float] = (0.01, 0.1, 0.4),
    dynamics: str = "auto",
    relinearize: int | str = 0,
    tolerance: float = 0.02,
    key: Array | None = None,
    rule: str = "relative",
    protocol: str = "epochs",
    x_test: Any = None,
    y_test: Any = None,
    noise: str = "full",
    paths: int = 32,
    trainable: Any = None,
    kernel_batch_size: int | None = None,
    max_bytes: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Prediction:
    """How many steps will training take? No update of the network's weights is evaluated.

    The network is linearised in its weights, so that its outputs on the training samples follow
    from its kernel Theta = J J^T alone (see `jaxttp.dynamics`), and the predicted loss curve is
    read off.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode: row i depends on sample i
            alone. `from_nnx`, `from_linen` and `from_equinox` make it from a module.
        params: pytree of floating-point arrays, the weights before training.
        x: training samples (N, ...).
        y: integer labels (N,) or targets (N, C).
        loss: "cross_entropy", "squared_error", "binary_cross_entropy" or a `Loss`; the mean over
            the batch.
        learning_rate: eta > 0 of gradient descent. Give either this or `optimizer`.
        momentum: heavy-ball momentum in [0, 1), with `learning_rate`.
        batch_size: samples a step; all of them when None.
        optimizer: any linear optax transformation (momentum, Nesterov, schedules, decoupled weight
            decay), in place of `learning_rate`.
        steps: the horizon T.
        thresholds: the epsilons, shares in (0, 1) for the rule "relative".
        dynamics: "recursion" (step for step, exact for the linearised network), "ode" (gradient
            flow, momentum by the effective learning rate eta/(1 - m)), "closed_form" (the same for
            squared error, exactly), "sde" (mini-batch noise as an SDE: medians and bands of many
            paths), "weight_space" (the linearised network under any optimiser) or "auto", which is
            "recursion", or "weight_space" for an optimiser that is not linear (Adam).
        relinearize: kernels built after the first, placed by the library along the predicted path
            (second order); "auto" for as many as `tolerance` asks for; 0 is plain linearisation.
        tolerance: for relinearize="auto", see `relinearized_recursion`.
        key: a `jax.random.key`, needed with `batch_size`.
        rule: the definition of training time, see `training_time`.
        protocol: how batches are drawn, see `jaxttp.dynamics.batch_indices`.
        x_test: test samples (M, ...), whose loss and error are forecast too (without
            re-linearisation). Give `y_test` with them.
        y_test: their labels (M,) or targets (M, C).
        noise: for "sde", the noise model of `jaxttp.dynamics.diffusion`.
        paths: for "sde", how many paths.
        trainable: which parameters train, as in `empirical_ntk`; all of them when None.
        kernel_batch_size: samples a tile of the kernel; chosen from `max_bytes` when None.
        max_bytes: bound on the kernel's working memory, in bytes.
        progress: called with (stage, done, total).

    Returns:
        A `Prediction`. A learning rate beyond stability is no exception: `stable` is False, `steps`
        are -1, the curves are finite (held at the last representable value).

    Raises:
        ValueError: neither or both of `learning_rate` and `optimizer`; a batch size without a key;
            rates, momentum, thresholds, steps out of range; labels out of range; mismatched
            lengths; non-finite data or parameters; an `apply_fn` that returns no (N, C), or whose
            outputs depend on the other samples of the batch; options that do not go together; an
            optimiser that is not linear where the dynamics need one.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.random.normal(jax.random.key(0), (20, 3))
        >>> y = (x[:, 0] > 0).astype(int)
        >>> forecast = predict_training_time(lambda w, x: x @ w, jnp.zeros((3, 2)), x, y,
        ...                                  learning_rate=1.0, steps=50)
        >>> forecast.stable, sorted(forecast.steps) == [0.01, 0.1, 0.4]
        (True, True)

    Source:
        TTP Algorithm 1, with the exact recursion in place of the ODE and of the effective learning
        rate, and an exact kernel in place of random projections.
    """
    hyperparameters = _check_options(
        learning_rate, momentum, batch_size, optimizer, steps, dynamics, relinearize, key, rule
    )
    if (x_test is None) != (y_test is None):
        raise ValueError("x_test and y_test belong together: give both or neither.")
    if x_test is not None and relinearize:
        raise ValueError("x_test needs relinearize=0: the cross kernel is not rebuilt.")
    thresholds = _check_thresholds(thresholds, rule)
    x = jnp.asarray(x)
    check_finite("x", x)
    check_finite("params", params)
    n, c = output_shape(apply_fn, params, x)
    if batch_size is not None:
        remedy = f"The data has {n} samples."
        check_integer("batch_size", batch_size, at_least=1, at_most=n, remedy=remedy)
    if optimizer is None and learning_rate is not None:
        optimizer = optax.sgd(learning_rate, momentum or None)
    assert optimizer is not None  # one of both is given, _check_options saw to it
    dynamics = _choose_dynamics(dynamics, optimizer, relinearize)
    selected, restore = split_trainable(params, trainable)

    def part(weights: Params, samples: Any) -> Array:
        return apply_fn(restore(weights), samples)

    network = apply_fn if trainable is None else part  # one identity: what is compiled is kept

    def report(stage: str) -> None:
        if progress is not None:
            progress(stage, 0, 1)

    with stopwatch() as watch:
        check_per_sample(apply_fn, params, x)
        f0 = jax.jit(apply_fn)(params, x)
        loss_name = loss
        targets, loss = encode_targets(loss, y, f0)
        check_finite("apply_fn(params, x)", f0)

        def build(weights: Params) -> Array:
            return empirical_ntk(
                apply_fn,
                restore(weights),
                x,
                trainable=trainable,
                batch_size=kernel_batch_size,
                max_bytes=max_bytes,
            )

        report("kernel")
        kernel = build(selected)
        limit = max_learning_rate(kernel, f0, targets, loss=loss, momentum=momentum)
        report("dynamics")
        common = {"loss": loss, "steps": steps, "optimizer": optimizer}
        batches = {"batch_size": batch_size, "key": key, "protocol": protocol}
        diverged_at, passes, kernels, uncertainty, band, trust = None, 0, 1, None, None, None
        test: dict[str, Any] = {}
        targets_test = None
        if x_test is not None:
            x_test = jnp.asarray(x_test)
            check_finite("x_test", x_test)
            f0_test = jax.jit(apply_fn)(params, x_test)
            targets_test, _ = encode_targets(loss_name, y_test, f0_test)
            if dynamics != "weight_space":
                test["kernel_test"] = empirical_ntk(
                    network, selected, x_test, x, batch_size=kernel_batch_size, max_bytes=max_bytes
                )
                test["f0_test"] = f0_test
                kernels += 1
        draws = None
        if relinearize:
            path = relinearized_recursion(
                network, selected, x, targets, **common, **batches, tolerance=tolerance,
                kernel_fn=lambda w: kernel if w is selected else build(w), rebuilds=relinearize,
                progress=None if progress is None else lambda i, k: progress("kernels", i, k),
            )  # fmt: skip
            diverged_at, passes, kernels = path.diverged_at, path.gradient_evaluations, path.kernels
            uncertainty = path.loss_uncertainty
        elif dynamics == "recursion":
            tangents: dict[str, Any] = {}
            if linear_filter(optimizer).weight_decay:
                push = lambda z: jax.jvp(lambda w: network(w, z), (selected,), (selected,))[1]  # noqa: E731
                tangents["initial_tangent"] = push(x)
                if test:
                    tangents["initial_tangent_test"] = push(x_test)
            path = recursion(kernel, f0, targets, **common, **batches, **test, **tangents)
            diverged_at = path.diverged_at
        elif dynamics == "weight_space":
            path = weight_space(network, selected, x, targets, **common, **batches, x_test=x_test)
            diverged_at, passes, trust = path.diverged_at, 2 * steps, path.trust
        elif dynamics == "sde":
            assert batch_size is not None  # _check_options saw to it
            path = draws = diffusion(
                kernel, f0, targets, loss=loss, learning_rate=learning_rate, momentum=momentum,
                steps=steps, **batches, noise=noise, paths=paths, **test,
            )  # fmt: skip
        else:
            solve = gradient_flow if dynamics == "ode" else closed_form
            rate = effective_learning_rate(learning_rate, momentum)
            ts = jnp.arange(steps + 1, dtype=f0.dtype)
            path = solve(kernel, f0, targets, loss=loss, learning_rate=rate, ts=ts, **test)
        outputs, test_outputs = path.train, getattr(path, "test", None)
        assert outputs is not None  # diffusion was asked for outputs
        if draws is not None:
            outputs = jnp.mean(outputs, axis=0)
            test_outputs = None if test_outputs is None else jnp.mean(test_outputs, axis=0)
        curves = np.asarray(_curves(loss, outputs, targets))
        if draws is not None:
            curves = np.stack([np.median(draws.loss, axis=0), np.median(draws.error, axis=0)], 1)
            band = draws.bands((0.1, 0.9))
        test_curves = None
        if test_outputs is not None and targets_test is not None:
            test_curves = jnp.asarray(_curves(loss, test_outputs, targets_test))
    stable = diverged_at is None or int(diverged_at) < 0
    if learning_rate is not None:
        stable = stable and float(learning_rate) < float(limit)
    losses = jnp.asarray(curves[:, 0])
    stable = stable and bool(losses[-1] <= 2 * losses[0])
    times = {e: int(training_time(losses, e, rule=rule)) if stable else -1 for e in thresholds}
    bands = doubt = None
    if draws is not None:
        bands = {e: steps_band(draws.loss, e, rule=rule) for e in thresholds}
        if stable:
            times = {e: middle for e, (_, middle, _) in bands.items()}
        bands = {e: (low, high) for e, (low, _, high) in bands.items()}
    if uncertainty is not None:
        doubt = {e: steps_uncertainty(losses, uncertainty, e, rule=rule) for e in thresholds}
    return Prediction(
        steps=times,
        loss=losses,
        error=jnp.asarray(curves[:, 1]),
        max_learning_rate=float(limit),
        stable=bool(stable),
        cost=Cost(kernels, kernels * c + passes, watch.run_seconds, watch.compile_seconds),
        horizon=steps,
        rule=rule,
        dynamics=dynamics,
        hyperparameters={**hyperparameters, "loss": loss.name, "protocol": protocol},
        outputs=outputs,
        loss_uncertainty=uncertainty,
        steps_uncertainty=doubt,
        loss_band=band,
        steps_band=bands,
        test_loss=None if test_curves is None else test_curves[:, 0],
        test_error=None if test_curves is None else test_curves[:, 1],
        trust=trust,
    )


def _curves(loss: Loss, outputs: Array, targets: Array) -> Array:
    """Loss and error along a path (T, N, C), as columns."""
    both = lambda f: jnp.stack([loss.value(f, targets), loss.error(f, targets)])  # noqa: E731
    return jax.jit(jax.vmap(both))(outputs)


def _choose_dynamics(
    dynamics: str, optimizer: optax.GradientTransformation, relinearize: int | str
) -> str:
    """What "auto" means for this optimiser."""
    if dynamics != "auto":
        return dynamics
    if relinearize:
        return "recursion"
    try:
        linear_filter(optimizer)
    except ValueError:
        return "weight_space"
    return "recursion"


def _check_options(
    learning_rate: Any,
    momentum: Any,
    batch_size: int | None,
    optimizer: Any,
    steps: int,
    dynamics: str,
    relinearize: int | str,
    key: Array | None,
    rule: str,
) -> dict[str, Any]:
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
    check_integer("steps", steps, at_least=1)
    check_choice("dynamics", dynamics, DYNAMICS)
    check_choice("rule", rule, RULES)
    if relinearize != "auto":
        remedy = "It counts kernels after the first; 'auto' chooses."
        check_integer("relinearize", relinearize, at_least=0, remedy=remedy)
    if batch_size is not None and key is None:
        raise ValueError(
            f"batch_size={batch_size} needs key: batches are drawn at random; pass "
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
    if relinearize and dynamics not in ("auto", "recursion"):
        raise ValueError(f"relinearize needs dynamics='recursion'; got {dynamics!r}.")
    return {
        "learning_rate": None if learning_rate is None else float(learning_rate),
        "momentum": float(momentum),
        "batch_size": batch_size,
        "optimizer": None if optimizer is None else "optax",
        "steps": steps,
        "relinearize": relinearize,
    }


def _check_thresholds(thresholds: Sequence[float], rule: str) -> tuple[float, ...]:
    if isinstance(thresholds, int | float):
        thresholds = (thresholds,)
    if len(thresholds) == 0:
        raise ValueError("thresholds must hold at least one number; got none.")
    for threshold in thresholds:
        if rule == "relative":
            check_number("thresholds", threshold, above=0.0, below=1.0, remedy="1 % is 0.01.")
        else:
            check_number("thresholds", threshold, above=0.0)
    return tuple(float(threshold) for threshold in thresholds)
