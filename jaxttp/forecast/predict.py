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

from jaxttp._core.checks import check_instance
from jaxttp._core.progress import Stopwatch, stopwatch
from jaxttp._core.types import ApplyFn, Params, Progress, count, split_trainable
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.dynamics._network import promote
from jaxttp.forecast.cost import Price, check_budget, suited
from jaxttp.forecast.methods.base import Dynamics, Linearizer, Path, recur
from jaxttp.forecast.methods.linear import Recursion
from jaxttp.forecast.options import (
    Keywords,
    check_at_hand,
    check_level,
    check_mesh,
    check_tokens,
    choose_kernel,
    choose_plan,
)
from jaxttp.forecast.prediction import Cost, Prediction
from jaxttp.forecast.problem import Problem, loss_and_error
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
    total_samples: int | None = None,
    thresholds: Sequence[float] | None = None,
    target_loss: Values = None,
    target_error: Values = None,
    target_test_loss: Values = None,
    target_test_error: Values = None,
    dynamics: str | Dynamics = "auto",
    relinearize: int | str = "auto",
    tolerance: float | None = None,
    sketch_dim: int | None = None,
    kernel: KernelEstimator | None = None,
    budget: float | str = "auto",
    key: Array | None = None,
    rule: str | Rule = "relative",
    metric: str = "loss",
    smooth: int = 1,
    window: int | None = None,
    protocol: str | None = None,
    x_test: Any = None,
    y_test: Any = None,
    noise: str | None = None,
    paths: int | None = None,
    level: float | None = None,
    trainable: Any = None,
    kernel_batch_size: int | None = None,
    max_bytes: int | None = None,
    mesh: Any = None,
    progress: Progress | None = None,
) -> Prediction:
    """How many steps will training take? No update of the network's weights is evaluated.

    The network is linearised in its weights, so that its outputs on the training samples follow
    from its kernel Theta = J J^T alone (see `jaxttp.dynamics`); the kernel is rebuilt along the
    predicted path, as often as it takes, and the predicted loss curve is read off.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode: row i depends on sample i
            alone. `from_nnx`, `from_linen`, `from_equinox`, `from_keras` and `from_torch` make it
            from a module. Logits of tokens (N, T, V) are flattened to C = T V.
        params: pytree of floating-point arrays, the weights before training; those in bfloat16 or
            float16 are promoted to float32, and `Prediction.notes` says so.
        x: training samples (N, ...): an array, or a pytree of arrays with N rows each, such as the
            ids and masks of a tokenizer, which `apply_fn` is given as it is. Of a pipeline of
            batches, `jaxttp.draw_samples` draws some. Of several processes each may bring some of
            the rows (`jax.make_array_from_process_local_data`), with a `kernel` that has a mesh.
        y: integer labels (N,) or targets (N, C); with `jaxttp.weighted`, weights and masks. For
            logits of tokens labels (N, T), -100 for what does not count; for one label a sequence,
            or where N T V is above some thousands, see `jaxttp.losses.tokens`.
        loss: "cross_entropy", "squared_error", "binary_cross_entropy" (binary or multi-label) or a
            `Loss`; the mean over the batch. The squared error is half the sum over outputs of
            (f - y)^2: for a network trained on mean((f - y)**2) over C outputs at a rate r, give
            learning_rate = 2 r / C, and r / C for a binary cross-entropy with a mean over outputs,
            which is a sum here. Of such a mean as a goal, `target_loss` is C / 2 times, and C
            times.
        learning_rate: eta > 0 of gradient descent. Give either this or `optimizer`.
        momentum: heavy-ball momentum in [0, 1), with `learning_rate`.
        batch_size: samples a step; all of them when None.
        optimizer: any optax transformation, in place of `learning_rate`: linear ones (momentum,
            Nesterov, schedules, decoupled weight decay) are followed by kernels, others (Adam,
            AdamW, clipping) simulated in the linearised network's weights.
        steps: the horizon T.
        total_samples: how many samples training will see, where `x` and `y` are only some of them,
            drawn at random: those are followed whole and in halves, and how much later the whole
            comes to a loss than its halves says how much later all of them do, see
            `jaxttp.forecast.Scaled`. For any loss, with mini-batches and schedules; when None those
            of `x`.
        thresholds: the epsilons, fractions in (0, 1) for the rule "relative"; 0.01, 0.1 and 0.4
            when None.
        target_loss: losses on the training samples to get below, one or several, each above 0: when
            they are reached is in `Prediction.targets`, beside the thresholds' times.
        target_error: the same of errors, each in (0, 1].
        target_test_loss: as `target_loss`, on the test samples.
        target_test_error: as `target_error`, on the test samples.
        dynamics: "recursion" (step for step, exact for a linear network), "ode" (gradient flow,
            momentum by the effective learning rate eta/(1 - m)), "closed_form" (the same for
            squared error, exactly), "sde" (mini-batch noise as an SDE: medians and bands of many
            paths; linear optimisers without weight decay, schedules and momentum step by step),
            "weight_space" (the linearised network under any optimiser) or "auto", which is
            "recursion", or "weight_space" for an optimiser that is not linear (Adam). Or a value
            such as ``Noisy(centre=Relinearized(4))``, which takes the place of the keywords
            relinearize, tolerance, noise and paths.
        relinearize: kernels built after the first, placed by the library along the predicted path
            (second order); "auto" for as many as `tolerance` asks for and `budget` allows; 0 for
            one kernel alone, which costs the least and tells the least. With mini-batches the path
            is that of the very batches. With "recursion" or, for its centre, "sde"; the others
            follow one kernel, and "auto" asks for no more. A network that is linear in its
            trained weights, such as a last layer on a frozen trunk, is never rebuilt.
        tolerance: for relinearize="auto", see `relinearized_recursion`; when None 0.02 up to 300
            steps, beyond in proportion less.
        sketch_dim: width of a random projection of the Jacobian (CountSketch) that stands for the
            exact kernel, see `sketch_jacobian`; its error falls as 1/sqrt(sketch_dim), is estimated
            by leaving out parts of the projection, and widens the bands. Below N C / 2 the kernel
            is never formed, which is the way to thousands of samples.
        kernel: how kernels are computed, such as ``jaxttp.ntk.Sketched(4096, key)``, in place of
            the keywords that name it.
        budget: what the forecast may cost, as a fraction of the predicted training run, both
            counted in operations: within it the kernel (exact or sketched) and the number of
            rebuilds are chosen that make the expected error least, where `sketch_dim`, `kernel`,
            `max_bytes` or `relinearize` do not say them. "auto" is a tenth, and no less than 4.5e12
            operations, a minute or two of a laptop. `Prediction.plan` says what was chosen, see
            `jaxttp.forecast.cost`.
        key: a `jax.random.key`, needed with `batch_size` and with `sketch_dim`.
        rule: the definition of training time, see `training_time`; or a `Rule`, which takes the
            place of thresholds, metric, smooth and window.
        metric: which curve it is read off, "loss" or "error"; see `Prediction.read` for others of
            the same forecast.
        smooth: steps over which that curve is averaged first, see `smooth_curve`.
        window: steps of the rule "plateau".
        protocol: how batches are drawn, with `batch_size`: "epochs" (when None), "independent" or
            "replacement", see `jaxttp.dynamics.batch_indices`.
        x_test: test samples (M, ...), whose loss and error are forecast too. Give
            `y_test` with them.
        y_test: their labels (M,) or targets (M, C).
        noise: for "sde", the noise model of `jaxttp.dynamics.diffusion`; "full" when None.
        paths: for "sde", how many paths; 32 when None.
        level: for "sde", and with `sketch_dim`, the share that the bands are to hold, in (0, 1):
            of real runs, of other projections, or of both; 0.9 when None. With
            `relinearize` they lie around the re-linearised full-batch forecast, leave room for its
            error, and are calibrated (see experiments/bench); around a single kernel's forecast
            they hold the noise alone.
        trainable: which parameters train, as in `empirical_ntk`; all of them when None.
        kernel_batch_size: samples a tile of the kernel; chosen from `max_bytes` when None.
        max_bytes: bound on the exact kernel's working memory, in bytes.
        mesh: a `jax.sharding.Mesh` over whose devices kernels are sharded, whichever are chosen; a
            `kernel` that is given has one of its own. Not for dynamics="closed_form" and "sde",
            which decompose the kernel, nor for "weight_space", which has none.
        progress: called with (stage, done, total); a large kernel reports its tiles.

    Returns:
        A `Prediction`. A forecast that is not stable is no exception: `stable` is False, `steps`
        are -1, the curves are finite (held at the last representable value), and `message` says
        why. With rebuilt kernels, the default, the predicted loss judges: a rate above
        `max_learning_rate` at which it converges is stable, and `message` says by how much and
        until when the rate is above. With one kernel a rate above the limit, be it for one step of
        a schedule, is not stable.

    Raises:
        ValueError: neither or both of `learning_rate` and `optimizer`; a batch size without a key;
            rates, momentum, thresholds, targets, steps out of range; test targets without `x_test`;
            labels out of range; mismatched lengths; non-finite data or parameters; gradients that
            are not finite before training, with the first such sample and parameter; an `apply_fn`
            that returns no (N, C), or whose outputs depend on the other samples of the batch, or
            are coarser than float32; options that do not go together or would do nothing; an
            optimiser that is not linear where the dynamics need one. Options are looked at before
            `apply_fn` is called.
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
        TTP Algorithm 1, with the exact recursion in place of the ODE and of the effective learning
        rate, an exact kernel in place of random projections, and kernels rebuilt along the path;
        with relinearize=0 one kernel, as there.
    """
    keywords = Keywords(dynamics, relinearize, tolerance, noise, paths).check()
    descent = Descent.of(
        learning_rate=learning_rate, momentum=momentum, optimizer=optimizer, steps=steps,
        batch_size=batch_size, protocol=protocol, key=key,
    )  # fmt: skip
    estimator = choose_kernel(sketch_dim, key, kernel_batch_size, max_bytes, kernel, mesh)
    check_budget(budget)
    reading = Rule.of(thresholds, rule, metric, smooth, window, steps=steps)
    targets = targets_of(
        target_loss, target_error, target_test_loss, target_test_error, **_curves(x_test)
    )
    x = check_samples("x", x)
    check_network(apply_fn, params)
    descent.check(count(x))
    weights, _ = split_trainable(promote(params, trainable)[0], trainable)
    way = keywords.choose(descent, weights, total_samples)
    way.check(descent, weights, get_loss(loss))
    check_at_hand(way, x, descent, x_test, estimator)
    level = check_level(level, way, estimator)
    with stopwatch() as watch:
        problem = way.view(Problem.of(
            apply_fn, params, x, y, loss=loss, trainable=trainable, x_test=x_test, y_test=y_test
        ))  # fmt: skip
        is_open = all(v is None for v in (sketch_dim, kernel, kernel_batch_size, max_bytes))
        fixed, plan, words = None if is_open else estimator, None, None
        if budget != "auto" or not isinstance(dynamics, Dynamics):
            plan = choose_plan(way, problem, descent, fixed, budget, key, progress)
        if plan is not None:
            way, estimator = plan.dynamics, plan.kernel
            if several(mesh) is not None:  # on its devices, what is computed stays the same
                estimator = dataclasses.replace(estimator, mesh=mesh)  # type: ignore[type-var]
            words = str(plan) if budget != "auto" or not plan.whole else None
        way = suited(way, problem)
        if way.kernels:
            check_tokens(problem, estimator)
        lines = Linearizer(problem, estimator, progress)
        found = forecast_along(lines, descent, way, reading, targets=targets, level=level)
    cost = dataclasses.replace(
        found.cost, seconds=watch.run_seconds, compile_seconds=watch.compile_seconds
    )
    return dataclasses.replace(found, cost=cost, plan=words)


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
    """A forecast composed of values: what `predict_training_time` does with its keywords.

    Args:
        problem: network and data.
        descent: the training.
        dynamics: how its path is followed; step for step on one kernel when None.
        kernel: how kernels are computed; exactly when None.
        rule: how training times are read; as `Rule()` when None.
        targets: losses and errors to get below, read off the same curves.
        level: the share that bands hold, in (0, 1), where there are bands.
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
        >>> found = forecast_training(problem, descent, rule=Rule((0.4,), kind="absolute"),
        ...                           dynamics=Noisy(paths=8, centre=Relinearized(2)))
        >>> found.cost.kernels, len(found.steps_band[0.4])
        (3, 2)

    Source:
        See `predict_training_time`.
    """
    check_instance("problem", problem, Problem, "Problem.of")
    check_instance("descent", descent, Descent, "Descent.of")
    way = Recursion() if dynamics is None else dynamics
    rule = (Rule() if rule is None else rule).check(descent.steps)
    wanted = check_targets(targets, **_curves(problem.x_test))
    descent.check(problem.f0.shape[0])
    way.check(descent, problem.weights, problem.loss)
    kernel = Exact() if kernel is None else kernel
    check_mesh(way, kernel)
    way = suited(way, problem)
    problem = way.view(problem)
    if way.kernels:
        check_tokens(problem, kernel)
    lines = Linearizer(problem, kernel, progress)
    return forecast_along(lines, descent, way, rule, targets=wanted, level=level)


def forecast_along(
    lines: Linearizer,
    descent: Descent,
    way: Dynamics,
    rule: Rule,
    *,
    targets: tuple[Target, ...] = (),
    level: float = KNOWN.level,
    asks_limit: bool = True,
) -> Prediction:
    """The forecast of a training that was checked: a path, its verdict, its times, its doubts.

    Args:
        lines: linearisations of the problem as the dynamics looks at it.
        descent: the training.
        way: how its path is followed.
        rule: how times are read.
        targets: losses and errors to get below.
        level: the share that bands hold.
        asks_limit: whether the largest stable rate is wanted, which takes a kernel.
    """
    problem, kernel = lines.problem, lines.estimator
    with stopwatch() as watch:
        path = way.follow(lines, descent)
        limit, rates = way.rates(lines, descent) if asks_limit else (math.inf, None)
        stable = way.is_stable(path, rates, descent)
        sketched = _without_parts(lines, descent) if way.kernels else None
        trust, doubted_from = way.doubt(path, rule.about(targets)) or (None, None)
        sure = {
            "stable": stable, "level": level, "sketched": sketched, "doubted_from": doubted_from
        }  # fmt: skip
        times = read_times(path, rule, **sure)
        on_targets = read_targets(path, targets, rule.smooth, **sure)
        band = loss_band(path, level, sketched)
    cost = _cost(lines, descent, way, path, watch)
    plain = {**descent.plain_values(), "relinearize": 0, **way.plain_values()}
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
        dynamics=way.name,
        hyperparameters=plain,
        outputs=problem.whole_outputs(path.outputs),
        loss_uncertainty=path.uncertainty,
        steps_uncertainty=times.errors,
        loss_band=band,
        steps_band=times.bands,
        test_loss=path.test_loss,
        test_error=path.test_error,
        trust=trust,
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


def _cost(lines: Linearizer, descent: Descent, way: Dynamics, path: Path, watch: Stopwatch) -> Cost:
    """What a forecast took, beside what its training takes."""
    problem, kernel = lines.problem, lines.estimator
    price = Price.of(problem, descent, kernel, way.trained_samples(problem))
    passes = path.gradient_evaluations + lines.passes
    return Cost(
        lines.kernels, math.ceil(lines.kernels * kernel.passes(problem) + passes),
        watch.run_seconds, watch.compile_seconds,
        price.forecast(lines.kernels, passes, path.products), price.training,
    )  # fmt: skip


def _without_parts(lines: Linearizer, descent: Descent) -> tuple[Array, Array] | None:
    """Losses and errors (G, T + 1) of full-batch training, without each part of a sketch."""
    if lines.estimate.parts is None:
        return None
    problem = lines.problem
    paths = (recur(lines, descent.full, kernel).train for kernel in lines.estimate.parts)
    losses, errors = zip(
        *(loss_and_error(problem.loss, path, problem.targets) for path in paths), strict=True
    )
    return jnp.stack(losses), jnp.stack(errors)


def _curves(x_test: Any) -> dict[str, Any]:
    """What targets can be read off, for `check_targets`."""
    known = TRAIN_CURVES if x_test is None else ALL_CURVES
    return {"known": known, "hint": "Give x_test and y_test, the samples that it is about."}
