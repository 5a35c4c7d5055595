"""From a model and data to a forecast of its training, without training it."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._checks import check_finite
from jaxttp._timing import stopwatch
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters import check_per_sample, output_shape
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.crossing import check_reading, metric_time
from jaxttp.dynamics.batches import check_batches
from jaxttp.dynamics.closed_form import closed_form
from jaxttp.dynamics.diffusion import diffusion
from jaxttp.dynamics.filters import linear_filter
from jaxttp.dynamics.flow import gradient_flow
from jaxttp.dynamics.rates import effective_learning_rate
from jaxttp.dynamics.recursion import recursion
from jaxttp.dynamics.relinearize import relinearized_recursion
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.dynamics.weight_space import weight_space
from jaxttp.forecast._options import check_model, check_modes, check_options, choose_dynamics
from jaxttp.forecast._stability import constant_rate, optimizer_rates, rises
from jaxttp.forecast._trust import learning_speeds, trust_in_path, trust_in_speeds
from jaxttp.forecast.bands import (
    delete_groups,
    jackknife,
    loss_band,
    recentred,
    steps_band,
    steps_uncertainty,
    steps_with_error,
    widened,
    with_error,
)
from jaxttp.forecast.prediction import Cost, Prediction
from jaxttp.losses import Loss, encode_targets
from jaxttp.ntk import empirical_ntk, sketch_jacobian
from jaxttp.ntk._select import split_trainable
from jaxttp.ntk.sketch import sketch_product


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
    tolerance: float | None = None,
    sketch_dim: int | None = None,
    key: Array | None = None,
    rule: str = "relative",
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
        y: integer labels (N,) or targets (N, C); with `jaxttp.weighted`, weights and masks.
        loss: "cross_entropy", "squared_error", "binary_cross_entropy" (binary or multi-label) or a
            `Loss`; the mean over the batch.
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
            With "recursion" or, for their mean path, "sde".
        tolerance: for relinearize="auto", see `relinearized_recursion`; 0.02 when None.
        sketch_dim: width of a random projection of the Jacobian (CountSketch) that stands for the
            exact kernel, see `sketch_jacobian`; its error falls as 1/sqrt(sketch_dim), is estimated
            by leaving out parts of the projection, and widens the bands.
        key: a `jax.random.key`, needed with `batch_size` and with `sketch_dim`.
        rule: the definition of training time, see `training_time`.
        metric: which curve it is read off, "loss" or "error"; see `Prediction.read` for others of
            the same forecast.
        smooth: steps over which that curve is averaged first, see `smooth_curve`.
        window: steps of the rule "plateau".
        protocol: how batches are drawn, with `batch_size`: "epochs" when None, see
            `jaxttp.dynamics.batch_indices`.
        x_test: test samples (M, ...), whose loss and error are forecast too (without
            re-linearisation). Give `y_test` with them.
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
        progress: called with (stage, done, total); a large kernel reports its tiles.

    Returns:
        A `Prediction`. A learning rate beyond stability is no exception, be it for one step of a
        schedule: `stable` is False, `steps` are -1, the curves are finite (held at the last
        representable value), and `message` says by how much and until when.

    Raises:
        ValueError: neither or both of `learning_rate` and `optimizer`; a batch size without a key;
            rates, momentum, thresholds, steps out of range; labels out of range; mismatched
            lengths; non-finite data or parameters; an `apply_fn` that returns no (N, C), or whose
            outputs depend on the other samples of the batch, or are coarser than float32; options
            that do not go together, or that would do nothing; an optimiser that is not linear where
            the dynamics need one. Options are looked at before `apply_fn` is called.
        TypeError: dictionaries, modules or tensors in place of arrays and functions.

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
    hyperparameters = check_options(
        learning_rate,
        momentum,
        batch_size,
        optimizer,
        steps,
        dynamics,
        relinearize,
        sketch_dim,
        key,
    )
    if (x_test is None) != (y_test is None):
        raise ValueError("x_test and y_test belong together: give both or neither.")
    if x_test is not None and relinearize:
        raise ValueError("x_test needs relinearize=0: the cross kernel is not rebuilt.")
    thresholds = check_reading(thresholds, rule, metric, smooth, window, steps)
    x = check_samples("x", x)
    check_network(apply_fn, params)
    check_finite("x", x)
    check_finite("params", params)
    protocol = check_batches(batch_size, key, protocol, len(x) if x.ndim else None)
    given = optimizer  # gradient descent need not be probed: it is linear, without weight decay
    if optimizer is None and learning_rate is not None:
        optimizer = optax.sgd(learning_rate, momentum or None)
    assert optimizer is not None  # one of both is given, check_options saw to it
    selected, restore = split_trainable(params, trainable)
    dynamics = choose_dynamics(dynamics, given, selected, relinearize, steps)
    modes = check_modes(
        dynamics, relinearize, sketch_dim, loss, noise, paths, tolerance, level, kernel_batch_size,
        max_bytes,
    )  # fmt: skip
    _, c = check_model(apply_fn, params, x, trainable)
    if x_test is not None:
        x_test = check_samples("x_test", x_test)
        check_finite("x_test", x_test)
        outputs_test = jax.ShapeDtypeStruct(output_shape(apply_fn, params, x_test), x.dtype)
        encode_targets(loss, y_test, outputs_test)

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

        kernel_of, project = _kernel_function(
            apply_fn, trainable, sketch_dim, key, kernel_batch_size, max_bytes,
            None if progress is None else lambda i, n: progress("kernel", i, n),
        )  # fmt: skip

        def build(weights: Params) -> Array:
            return kernel_of(restore(weights), x)

        report("kernel")
        without = None  # kernels without a part of the sketch
        if project is None:
            kernel = build(selected)
        else:
            sketch = project(params, x)
            kernel = sketch_product(sketch, sketch)
            if sketch.shape[-1] > 1:  # a single column does not tell its error
                without = delete_groups(sketch)
        limit = max_learning_rate(kernel, f0, targets, loss=loss, momentum=momentum)
        report("dynamics")
        common = {"loss": loss, "steps": steps, "optimizer": optimizer}
        batches = {"batch_size": batch_size, "key": key, "protocol": protocol}
        diverged_at, passes, kernels, uncertainty, band, trust = None, 0, 1, None, None, None
        test: dict[str, Any] = {}
        targets_test = loss_test = None
        if x_test is not None:
            f0_test = jax.jit(apply_fn)(params, x_test)
            targets_test, loss_test = encode_targets(loss_name, y_test, f0_test)
            if dynamics != "weight_space":
                test["kernel_test"] = kernel_of(params, x_test, x)
                test["f0_test"] = f0_test
                kernels += 1
        path: Any = None
        draws = None
        tangents: dict[str, Any] = {}
        linear = dynamics == "recursion" and (not relinearize or without is not None)
        if given is not None and linear and linear_filter(given, steps=steps).weight_decay:
            push = lambda z: jax.jvp(lambda w: network(w, z), (selected,), (selected,))[1]  # noqa: E731
            tangents["initial_tangent"] = push(x)
            if test:
                tangents["initial_tangent_test"] = push(x_test)
        if relinearize:
            path = relinearized_recursion(
                network, selected, x, targets, **common, tolerance=modes.tolerance,
                **({} if dynamics == "sde" else batches),  # the SDE's mean path
                kernel_fn=lambda w: kernel if w is selected else build(w), rebuilds=relinearize,
                progress=None if progress is None else lambda i, k: progress("kernels", i, k),
            )  # fmt: skip
            diverged_at, passes, kernels = path.diverged_at, path.gradient_evaluations, path.kernels
            uncertainty = path.loss_uncertainty
        elif dynamics == "recursion":
            path = recursion(kernel, f0, targets, **common, **batches, **test, **tangents)
            diverged_at = path.diverged_at
        elif dynamics == "weight_space":
            path = weight_space(network, selected, x, targets, **common, **batches, x_test=x_test)
            diverged_at, passes, trust = path.diverged_at, 2 * steps, path.trust
        elif dynamics != "sde":
            solve = gradient_flow if dynamics == "ode" else closed_form
            rate = effective_learning_rate(learning_rate, momentum)
            ts = jnp.arange(steps + 1, dtype=f0.dtype)
            path = solve(kernel, f0, targets, loss=loss, learning_rate=rate, ts=ts, **test)
        curves = None
        if dynamics == "sde":
            assert batch_size is not None  # check_options saw to it
            draws = diffusion(
                kernel, f0, targets, loss=loss, learning_rate=learning_rate, momentum=momentum,
                steps=steps, **batches, noise=modes.noise, paths=modes.paths, **test,
                save="curves" if relinearize else "outputs",
            )  # fmt: skip
            curves = draws.loss
            if path is None:
                path, diverged_at = draws, jnp.max(draws.diverged_at)
            else:
                plain = recursion(kernel, f0, targets, **common).train
                curves = recentred(curves, _curves(loss, plain, targets)[0], path.loss)
            band = loss_band(curves, modes.level, uncertainty)
        speeds = None
        if not relinearize and dynamics != "weight_space":
            plain = path
            if dynamics != "recursion":  # the weights of the ODE and the SDE are those of this
                plain = recursion(kernel, f0, targets, **common, **batches)
            speeds = learning_speeds(
                network, selected, x, targets, loss, kernel, plain, batch_size
            )  # fmt: skip
            passes += 2 * len(speeds)
        parts = None
        if without is not None and dynamics != "weight_space":
            parts = _parts(
                without, f0, targets, **common, initial_tangent=tangents.get("initial_tangent")
            )  # fmt: skip
        assert path is not None
        outputs, test_outputs = path.train, getattr(path, "test", None)
        assert outputs is not None  # diffusion was asked for them
        losses, errors = _curves(loss, outputs, targets)
        test_loss = test_error = None
        if test_outputs is not None and targets_test is not None and loss_test is not None:
            test_loss, test_error = _curves(loss_test, test_outputs, targets_test)
        if curves is not None:
            losses = jnp.median(curves, axis=0)
        if outputs.ndim == 4:
            outputs = jnp.mean(outputs, axis=0)
    rates = None
    if learning_rate is not None:
        rates = constant_rate(float(learning_rate), float(limit))
    elif dynamics == "recursion":  # until here the limit is plain gradient descent's
        problem = kernel, f0, targets, loss
        rates = optimizer_rates(optimizer, steps, 2.0 / float(limit), problem, batch_size, protocol)
        limit = limit if rates is None or not np.isfinite(rates.limit) else rates.limit
    stable = (diverged_at is None or int(diverged_at) < 0) and not rises(losses)
    if rates is not None and (learning_rate is not None or not relinearize):
        stable = stable and not len(rates.above)  # re-linearised, a schedule may pass its limit
    definition = {"metric": metric, "rule": rule, "smooth": smooth, "window": window}
    curve = losses if metric == "loss" else errors
    times = {e: int(metric_time(curve, e, **definition)) if stable else -1 for e in thresholds}
    if speeds is not None:
        trust = trust_in_speeds(speeds, losses)
    elif relinearize:
        read = thresholds if metric == "loss" else ()
        trust = trust_in_path(path, read, **definition)
    bands = doubt = None
    if uncertainty is not None and metric == "loss":
        doubt = {e: steps_uncertainty(losses, uncertainty, e, **definition) for e in thresholds}
    if draws is not None and stable:
        quantiles = ((1 - modes.level) / 2, 0.5, (1 + modes.level) / 2)
        some = curves if metric == "loss" else draws.error
        assert some is not None
        found = {e: steps_band(some, e, quantiles=quantiles, **definition) for e in thresholds}
        times = {e: middle for e, (_, middle, _) in found.items()}
        more = dict.fromkeys(thresholds) if doubt is None else doubt
        bands = {e: widened((low, high), more[e], steps) for e, (low, _, high) in found.items()}
    if parts is not None:
        reads = {
            e: [int(metric_time(part, e, **definition)) for part in parts[metric == "error"]]
            for e in thresholds
        }
        still = jnp.stack([losses, losses]) if band is None else band
        ends = with_error(still, losses, jackknife(parts[0]), modes.level)
        band = jnp.maximum(jnp.asarray(ends, losses.dtype), 0.0)
        if stable:
            bands = steps_with_error(bands, times, reads, modes.level, steps)
    return Prediction(
        steps=times,
        loss=losses,
        error=errors,
        max_learning_rate=float(limit),
        stable=bool(stable),
        rates=rates,
        cost=Cost(kernels, kernels * c + passes, watch.run_seconds, watch.compile_seconds),
        horizon=steps,
        rule=rule,
        metric=metric,
        dynamics=dynamics,
        hyperparameters={**hyperparameters, "loss": loss.name, "protocol": protocol},
        outputs=outputs,
        loss_uncertainty=uncertainty,
        steps_uncertainty=doubt,
        loss_band=band,
        steps_band=bands,
        test_loss=test_loss,
        test_error=test_error,
        trust=trust,
    )


def _kernel_function(
    apply_fn: ApplyFn,
    trainable: Any,
    sketch_dim: int | None,
    key: Array | None,
    batch_size: int | None,
    max_bytes: int | None,
    progress: Callable[[int, int], None] | None,
) -> tuple[Callable[..., Array], Callable[..., Array] | None]:
    """(params, x1, x2 = x1) -> Theta: exact, or from one projection for all calls, and that."""
    if sketch_dim is None:
        exact = functools.partial(
            empirical_ntk, apply_fn, trainable=trainable, batch_size=batch_size,
            max_bytes=max_bytes, progress=progress,
        )  # fmt: skip
        return exact, None
    assert key is not None  # check_options saw to it
    project = functools.partial(
        sketch_jacobian, apply_fn, key=jax.random.fold_in(key, 1), dim=sketch_dim,
        trainable=trainable, batch_size=batch_size,
    )  # fmt: skip

    def sketched(params: Params, x1: Any, x2: Any = None) -> Array:
        first = project(params, x1)
        return sketch_product(first, first if x2 is None else project(params, x2))

    return sketched, project


def _parts(
    kernels: Iterable[Array], f0: Array, targets: Array, **common: Any
) -> tuple[Array, Array]:
    """Losses and errors (G, T + 1) of full-batch training, a curve for each kernel."""
    curves = [
        _curves(common["loss"], recursion(kernel, f0, targets, **common).train, targets)
        for kernel in kernels
    ]
    losses, errors = zip(*curves, strict=True)
    return jnp.stack(losses), jnp.stack(errors)


def _curves(loss: Loss, outputs: Array, targets: Array) -> tuple[Array, Array]:
    """Loss and error along a path (T, N, C); their medians over many paths (P, T, N, C)."""

    def along(path: Array) -> tuple[Array, Array]:
        return jax.vmap(lambda f: (loss.value(f, targets), loss.error(f, targets)))(path)

    if outputs.ndim == 3:
        return jax.jit(along)(outputs)
    both = jax.jit(jax.vmap(along))(outputs)
    return jnp.median(both[0], axis=0), jnp.median(both[1], axis=0)
