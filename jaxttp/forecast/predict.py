"""From a model and data to a forecast of its training, without training it.

`predict_training_time` turns keywords into values, and `forecast_training` composes values: a
`Problem`, a `Descent`, a dynamics, a kernel estimator and a `Rule`.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxttp._core.checks import check_instance, check_number
from jaxttp._core.progress import shown, stopwatch
from jaxttp._core.types import ApplyFn, Params, Progress, count, split_trainable
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.dynamics._network import promote
from jaxttp.forecast.cost import Price, suited
from jaxttp.forecast.methods.base import Dynamics, Linearizer, recur
from jaxttp.forecast.methods.linear import Recursion
from jaxttp.forecast.options import (
    Keywords,
    check_level,
    check_mesh,
    check_supported,
    check_tokens,
    choose_kernel,
    choose_plan,
)
from jaxttp.forecast.prediction import Cost, Prediction
from jaxttp.forecast.problem import Problem, loss_and_error
from jaxttp.forecast.seconds import announce, estimate_seconds
from jaxttp.forecast.training_setup import Descent
from jaxttp.forecast.uncertainty import KNOWN, loss_band, read_targets, read_times
from jaxttp.losses import Loss, get_loss
from jaxttp.losses.rule import (
    ALL_CURVES,
    TRAIN_CURVES,
    Rule,
    Target,
    Values,
    check_targets,
    targets_of,
)
from jaxttp.ntk.estimators import Exact, KernelEstimator, Sketched
from jaxttp.ntk.sharded import several


def predict_training_time(  # noqa: PLR0913
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
    target_loss: Values = None,
    key: Array | None = None,
    # What is read off the curves
    target_error: Values = None,
    target_test_loss: Values = None,
    target_test_error: Values = None,
    x_test: Any = None,
    y_test: Any = None,
    thresholds: Sequence[float] | None = None,
    rule: str | Rule = "relative",
    metric: str = "loss",
    smooth: int = 1,
    window: int | None = None,
    # Method
    dynamics: str | Dynamics = "auto",
    relinearize: int | str = "auto",
    budget: float | str = "auto",
    tolerance: float | None = None,
    trainable: Any = None,
    total_samples: int | None = None,
    protocol: str | None = None,
    noise: str | None = None,
    paths: int | None = None,
    level: float | None = None,
    # Kernel
    kernel: KernelEstimator | None = None,
    sketch_dim: int | None = None,
    kernel_batch_size: int | None = None,
    max_bytes: int | None = None,
    mesh: Any = None,
    progress: Progress | bool | None = None,
) -> Prediction:
    """The loss curve of a training run and its training times, without training.

    The network is linearized in its weights. Its outputs then follow from the kernel
    Theta = J J^T, which is rebuilt along the predicted path. The guide "Options of a forecast"
    explains every argument.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)`` in evaluation mode; row i depends on sample i
            alone. `from_nnx`, `from_linen`, `from_equinox`, `from_keras`, `from_torch` make one.
        params: pytree of floating-point arrays, the weights before training.
        x: training samples (N, ...), an array or a pytree of arrays.
        y: integer labels (N,) or targets (N, C); `jaxttp.weighted` adds weights and masks.
        loss: "cross_entropy", "squared_error" (half the sum of squares over outputs),
            "binary_cross_entropy" or a `Loss`; the mean over samples.
        learning_rate: eta > 0 of gradient descent. Give this or `optimizer`.
        momentum: heavy-ball momentum in [0, 1), with `learning_rate`.
        batch_size: samples a step; all of them when None.
        optimizer: an optax transformation. Kernels follow linear ones (momentum, Nesterov,
            schedules, decoupled decay), Adam and clipping by the global norm. Others (Lion) run in
            the linearized network.
        steps: the horizon T, in steps.
        target_loss: losses to get below; their times are in `Prediction.targets`.
        key: a `jax.random.key`, needed with `batch_size` and `sketch_dim`.
        target_error: errors to get below, each in (0, 1].
        target_test_loss: as `target_loss`, on the test samples.
        target_test_error: as `target_error`, on the test samples.
        x_test: test samples (M, ...), whose loss and error are forecast too.
        y_test: their labels (M,) or targets (M, C).
        thresholds: fractions of the loss decrease that are left; 0.01, 0.1 and 0.4 when None.
        rule: definition of the training time, see `training_time`; or a `Rule`.
        metric: the curve that thresholds read, "loss" or "error".
        smooth: steps over which that curve is averaged.
        window: steps of "plateau".
        dynamics: "recursion" (step by step), "ode", "closed_form", "sde", "weight_space", "auto" or
            a `Dynamics` such as ``Noisy(centre=Relinearized(4))``.
        relinearize: kernels built after the first; "auto" within `tolerance` and `budget`; 0 for
            one kernel.
        budget: FLOPs of the forecast as a fraction of the training's; "auto" for 1 with
            relinearize="auto", else for no bound, as ``inf``.
        tolerance: accuracy that relinearize="auto" aims at, see `relinearized_recursion`.
        trainable: parameters that train, as in `empirical_ntk`; all of them when None.
        total_samples: samples of the training run, where `x` is a random part of them.
        protocol: how batches are drawn: "epochs", "independent" or "replacement".
        noise: model for "sde", see `jaxttp.dynamics.diffusion`.
        paths: paths for "sde"; 32 when None.
        level: fraction that bands hold, in (0, 1), for "sde" and `sketch_dim`; 0.9 when None.
        kernel: how kernels are computed, such as ``jaxttp.ntk.Sketched(4096, key)``.
        sketch_dim: width of a random projection of the Jacobian in place of the exact kernel.
        kernel_batch_size: samples a chunk.
        max_bytes: bound on the kernel's working memory.
        mesh: devices over which kernels are sharded.
        progress: called with (stage, done, total), total being 0 for a message. None prints lines
            in terminals and notebooks, False nothing.

    Returns:
        A `Prediction`. Where the forecast is unstable, `stable` is False, `steps` are -1, curves
        stay finite and `message` gives the reason.

    Raises:
        ValueError: an argument is out of range, does not fit another one or would have no effect;
            data, parameters or gradients are not finite; outputs are not (N, C), or depend on other
            samples.
        TypeError: modules or tensors in place of functions and parameters.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.random.normal(jax.random.key(0), (20, 3))
        >>> y = (x[:, 0] > 0).astype(int)
        >>> forecast = predict_training_time(lambda w, x: x @ w, jnp.zeros((3, 2)), x, y,
        ...                                  learning_rate=1.0, steps=50)
        >>> forecast.stable, sorted(forecast.steps) == [0.01, 0.1, 0.4]
        (True, True)

    Source:
        TTP Algorithm 1, with the exact recursion in place of the ODE, an exact kernel in place of
        random projections, and kernels rebuilt along the path.
    """
    keywords = Keywords(dynamics, relinearize, tolerance, noise, paths).check()
    descent = Descent.of(
        learning_rate=learning_rate, momentum=momentum, optimizer=optimizer, steps=steps,
        batch_size=batch_size, protocol=protocol, key=key,
    )  # fmt: skip
    estimator = choose_kernel(sketch_dim, key, kernel_batch_size, max_bytes, kernel, mesh)
    if budget not in ("auto", math.inf):
        check_number("budget", budget, above=0.0, hint="A tenth of the training is 0.1.")
    reading = Rule.of(thresholds, rule, metric, smooth, window, steps=steps)
    targets = targets_of(
        target_loss, target_error, target_test_loss, target_test_error, **_curves(x_test)
    )
    x = check_samples("x", x)
    check_network(apply_fn, params)
    descent.check(count(x))
    weights, _ = split_trainable(promote(params, trainable)[0], trainable)
    method = keywords.choose(descent, weights, total_samples)
    method.check(descent, weights, get_loss(loss))
    check_supported(method, x, descent, x_test, estimator)
    level = check_level(level, method, estimator)
    tell = shown(progress)
    with stopwatch() as watch:
        with stopwatch() as first:
            problem = method.view(Problem.of(
                apply_fn, params, x, y, loss=loss, trainable=trainable, x_test=x_test,
                y_test=y_test,
            ))  # fmt: skip
        is_open = all(v is None for v in (sketch_dim, kernel, kernel_batch_size, max_bytes))
        fixed, plan, message, seconds = None if is_open else estimator, None, None, None
        if budget != "auto" or not isinstance(dynamics, Dynamics):
            plan = choose_plan(method, problem, descent, fixed, budget, key)
        if plan is not None:
            method, estimator = plan.dynamics, plan.kernel
            if several(mesh) is not None:
                estimator = dataclasses.replace(estimator, mesh=mesh)  # type: ignore[type-var]
            message = str(plan) if budget != "auto" or not plan.whole else None
            seconds = estimate_seconds(plan, problem, descent.steps, first.compile_seconds)
            announce(seconds, tell, "train, or give a lower budget=; progress= shows how far it is")
        method = suited(method, problem)
        if method.kernels:
            check_tokens(problem, estimator)
        linearizer = Linearizer(problem, estimator, tell)
        bands = {"level": level, "with_bands": plan is None or fixed is not None}
        result = forecast_along(linearizer, descent, method, reading, targets=targets, **bands)
    cost = dataclasses.replace(
        result.cost, seconds=watch.run_seconds, compile_seconds=watch.compile_seconds,
        training_seconds=seconds and seconds.training,
        estimated_seconds=seconds and seconds.forecast,
    )  # fmt: skip
    return dataclasses.replace(result, cost=cost, plan=message)


def forecast_training(
    problem: Problem,
    descent: Descent,
    *,
    dynamics: Dynamics | None = None,
    kernel: KernelEstimator | None = None,
    rule: Rule | None = None,
    targets: Iterable[Target] = (),
    level: float = KNOWN.level,
    progress: Progress | None = None,
) -> Prediction:
    """A forecast composed of values, as `predict_training_time` composes it from keywords.

    Args:
        problem: network and data.
        descent: the training.
        dynamics: how its path is followed; step for step on one kernel when None.
        kernel: how kernels are computed; exactly when None.
        rule: how training times are read; as `Rule()` when None.
        targets: losses and errors to get below, read off the same curves.
        level: the fraction that bands hold, in (0, 1), where there are bands.
        progress: called with (stage, done, total).

    Returns:
        A `Prediction`.

    Raises:
        ValueError: a training that the dynamics cannot follow, test targets without test samples,
            a rule or batches that do not fit the horizon or the data.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxttp.forecast import Descent, Noisy, Problem, Relinearized, Rule
        >>> x = jax.random.normal(jax.random.key(0), (20, 3))
        >>> problem = Problem.of(lambda w, x: jnp.tanh(x @ w), jnp.zeros((3, 2)), x,
        ...                      (x[:, 0] > 0).astype(int))
        >>> descent = Descent.of(learning_rate=1.0, steps=40, batch_size=5, key=jax.random.key(1))
        >>> result = forecast_training(problem, descent, rule=Rule((0.4,), kind="absolute"),
        ...                           dynamics=Noisy(paths=8, centre=Relinearized(2)))
        >>> result.cost.kernels, len(result.steps_band[0.4])
        (3, 2)

    Source:
        See `predict_training_time`.
    """
    check_instance("problem", problem, Problem, "Problem.of")
    check_instance("descent", descent, Descent, "Descent.of")
    method = Recursion() if dynamics is None else dynamics
    rule = (Rule() if rule is None else rule).check(descent.steps)
    checked = check_targets(targets, **_curves(problem.x_test))
    descent.check(problem.f0.shape[0])
    method.check(descent, problem.weights, problem.loss)
    kernel = Exact() if kernel is None else kernel
    check_mesh(method, kernel)
    method = suited(method, problem)
    problem = method.view(problem)
    if method.kernels:
        check_tokens(problem, kernel)
    linearizer = Linearizer(problem, kernel, progress)
    return forecast_along(linearizer, descent, method, rule, targets=checked, level=level)


def forecast_along(
    linearizer: Linearizer,
    descent: Descent,
    dynamics: Dynamics,
    rule: Rule,
    *,
    targets: tuple[Target, ...] = (),
    level: float = KNOWN.level,
    with_limit: bool = True,
    with_bands: bool = True,
) -> Prediction:
    """The forecast of a training whose arguments were checked.

    Args:
        linearizer: of the problem in the dynamics' view.
        descent: the training.
        dynamics: how its path is followed.
        rule: how times are read.
        targets: losses and errors to get below.
        level: the fraction that bands hold.
        with_limit: whether to compute the largest stable rate, which takes a kernel.
        with_bands: whether a sketch has bands, which take four runs with full batches.
    """
    problem, kernel = linearizer.problem, linearizer.estimator
    with stopwatch() as watch:
        path = dynamics.follow(linearizer, descent)
        limit, rates = dynamics.rates(linearizer, descent) if with_limit else (math.inf, None)
        stable = dynamics.is_stable(path, rates, descent)
        has_parts = with_bands and dynamics.kernels and not dynamics.is_scaled
        sketched = _without_parts(linearizer, descent) if has_parts else None
        warnings, doubted_from = dynamics.doubt(path, rule.about(targets)) or (None, None)
        options: dict[str, Any] = {"stable": stable, "level": level, "sketched": sketched}
        options["doubted_from"] = doubted_from
        times = read_times(path, rule, **options)
        on_targets = read_targets(path, targets, rule.smooth, **options)
        band = loss_band(path, level, sketched)
    samples, is_scaled = dynamics.trained_samples(problem), dynamics.is_scaled
    price = Price.of(problem, descent, kernel, samples, is_scaled=is_scaled)
    kernels, passes = linearizer.kernels, path.gradient_evaluations + linearizer.passes
    cost = Cost(
        kernels, math.ceil(kernels * kernel.passes(problem) + passes),
        watch.run_seconds, watch.compile_seconds,
        price.forecast(kernels, passes, path.products), price.training,
    )  # fmt: skip
    plain = {**descent.plain_values(), "relinearize": 0, **dynamics.plain_values()}
    plain |= {"loss": problem.loss.name, "protocol": descent.protocol}
    plain["sketch_dim"] = kernel.sketch_dim if isinstance(kernel, Sketched) else None
    return Prediction(
        steps=times.steps,
        loss=path.loss,
        error=path.error,
        max_learning_rate=limit,
        stable=stable,
        cost=cost,
        horizon=descent.steps,
        rule=rule.kind,
        dynamics=dynamics.name,
        hyperparameters=plain,
        outputs=problem.whole_outputs(path.outputs),
        loss_uncertainty=path.uncertainty,
        steps_uncertainty=times.errors,
        loss_band=band,
        steps_band=times.bands,
        test_loss=path.test_loss,
        test_error=path.test_error,
        warnings=warnings,
        rates=rates,
        metric=rule.metric,
        targets=on_targets.steps,
        targets_band=on_targets.bands or {},
        targets_uncertainty=on_targets.errors or {},
        notes=problem.notes,
        doubted_from=doubted_from,
        frozen_from=path.frozen_from,
        error_kind=getattr((problem.whole or problem).loss.error, "__name__", "error"),
    )


def _without_parts(linearizer: Linearizer, descent: Descent) -> tuple[Array, Array] | None:
    """Losses and errors (G, T + 1) of full-batch training, without each part of a sketch."""
    if linearizer.estimate.parts is None:
        return None
    problem, losses, errors = linearizer.problem, [], []
    for kernel in linearizer.estimate.parts:
        outputs = recur(linearizer, descent.full, kernel).train
        loss, error = loss_and_error(problem.loss, outputs, problem.targets)
        losses.append(loss)
        errors.append(error)
    return jnp.stack(losses), jnp.stack(errors)


def _curves(x_test: Any) -> dict[str, Any]:
    """The curves that targets can be read off, for `check_targets`."""
    known = TRAIN_CURVES if x_test is None else ALL_CURVES
    return {"known": known, "hint": "Give x_test and y_test, the samples that it is about."}
