"""One kernel, a thousand settings: forecasts for whole grids of hyper-parameters.

All settings of one loss and batch size are screened together on the first kernel, and those that
lead are followed along rebuilt ones (`jaxttp.forecast.leaders`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import check_array, check_known
from jaxttp._core.types import ApplyFn, Params, count
from jaxttp.adapters.inputs import check_samples
from jaxttp.forecast._options import Keywords, check_processes, check_tokens, choose_kernel
from jaxttp.forecast.hyperparameters import Hyperparameters, check_descent, check_settings
from jaxttp.forecast.leaders import follow_leaders, with_trust
from jaxttp.forecast.paths.base import Linearizer
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.screening import Wanted, screen, screen_kernel
from jaxttp.forecast.swept import Sweep
from jaxttp.losses import Loss
from jaxttp.losses.rule import Rule, Target, Values, targets_of
from jaxttp.ntk.estimators import KernelEstimator
from jaxttp.ntk.kernels import KernelLike


def sweep(  # noqa: PLR0913
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    settings: Sequence[Hyperparameters],
    *,
    loss: str | Loss | None = None,
    thresholds: Sequence[float] | None = None,
    target_loss: Values = None,
    target_error: Values = None,
    rule: str | Rule = "relative",
    metric: str = "loss",
    smooth: int = 1,
    window: int | None = None,
    key: Array | None = None,
    protocol: str | None = None,
    rank_by: str = "shared",
    relinearize: int | str = "auto",
    trainable: Any = None,
    sketch_dim: int | None = None,
    kernel: KernelEstimator | None = None,
    max_bytes: int | None = None,
    step_seconds: float | Mapping[int | None, float] | Sequence[float] | np.ndarray | None = None,
) -> Sweep:
    """Forecast every setting from ONE kernel, and those that lead along rebuilt ones.

    No training step is taken.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode.
        params: pytree of floating-point arrays, the weights before training.
        x: training samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        settings: what to forecast; `grid` makes combinations. Those that are not "sgd" without
            weight decay are followed one by one, and algorithms that know no kernel, such as
            "adamw", by training the linearised network: about a training each by cost
            (`Sweep.simulated`), which a `race` does not take.
        loss: of all settings, a name or a `Loss`; when None their own, as ``grid(loss=)`` names
            them, "cross_entropy" unless told.
        thresholds: the epsilons, shares in (0, 1) for the rule "relative"; 0.01, 0.1 and 0.4 when
            None.
        target_loss: losses on the training samples to get below, one or several, each above 0. The
            first target is what settings are ranked by.
        target_error: the same of errors, each in (0, 1].
        rule: the definition of training time, see `training_time`; or a `Rule`, which takes the
            place of thresholds, metric, smooth and window.
        metric: which curve it is read off, "loss" or "error".
        smooth: steps over which that curve is averaged first, see `smooth_curve`.
        window: steps of the rule "plateau".
        key: a `jax.random.key`, needed with `sketch_dim`, and where a setting has a batch size.
            Settings of the same batch size see the same batches, so that they can be compared.
        protocol: how batches are drawn, where a setting has a batch size: "epochs" when None, see
            `jaxttp.dynamics.batch_indices`.
        rank_by: where no target is given, "shared" for one that the sweep chooses for all settings
            (see `shared_goal`; the share is the middle threshold), or "own" for every setting's own
            drop, by which a slow one can seem early. Settings of several losses have their own.
        relinearize: as in `predict_training_time`, for the settings that lead (two to eight, see
            `Sweep.relinearized`): a single kernel ranks many at once, but its times can be several
            times the real ones. 0 for one kernel alone, which takes seconds for thousands.
        trainable: which parameters train, as in `empirical_ntk`; all of them when None.
        sketch_dim: width of a random projection of the Jacobian that stands for the exact kernel,
            see `sketch_jacobian`.
        kernel: how kernels come about, such as ``jaxttp.ntk.Sketched(4096, key)``, in place of the
            keywords that name it.
        max_bytes: bound on the exact kernel's working memory, in bytes.
        step_seconds: seconds of one training step, as `time_step` measures them: one number, one
            for every batch size that occurs, or one for every setting (S,).

    Returns:
        A `Sweep`.

    Raises:
        ValueError: no settings; a batch size without a key or above N; thresholds out of range;
            options that would do nothing; whatever `predict_training_time` refuses of model and
            data.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxttp.forecast import grid
        >>> x = jax.random.normal(jax.random.key(0), (20, 3))
        >>> y = (x[:, 0] > 0).astype(int)
        >>> settings = grid(learning_rate=(0.1, 1.0), momentum=(0.0, 0.9), steps=50)
        >>> result = sweep(lambda w, x: x @ w, jnp.zeros((3, 2)), x, y, settings, relinearize=0)
        >>> result.steps.shape, result.settings[result.best(0.1)].learning_rate > 0
        ((4, 3), True)

    Source:
        TTP Section 5 forecasts one setting at a time with an ODE; the recursion on the outputs is
        exact for the linearised network (derived, tested against `recursion`).
    """
    settings = check_settings(settings, loss)
    check_known(params=params, x=x, y=y)
    x = check_samples("x", x)
    reading = Rule.of(thresholds, rule, metric, smooth, window)
    Keywords(relinearize=relinearize).check()
    targets = targets_of(target_loss, target_error)
    wanted = Wanted.of(settings, count(x), reading, targets, key, protocol, step_seconds, rank_by)
    estimator = choose_kernel(sketch_dim, key, None, max_bytes, kernel)
    check_processes(x, estimator)
    losses = list(dict.fromkeys(one.loss for one in wanted.settings))
    problem = Problem.of(apply_fn, params, x, y, loss=losses[0], trainable=trainable)
    check_tokens(problem, estimator)
    y = problem.labels
    for other in losses[1:]:
        problem.with_loss(other, y)  # refuses labels that do not suit it
    lines = Linearizer(problem, estimator)
    swept = screen(lines, y, wanted)
    drawn: dict[str, Any] = {"key": key, "protocol": protocol}
    swept = follow_leaders(swept, lines, y, reading, relinearize=relinearize, **drawn)
    return with_trust(swept, lines, y)


def sweep_kernel(
    kernel: KernelLike,
    f0: ArrayLike,
    y: Any,
    settings: Sequence[Hyperparameters],
    *,
    thresholds: Sequence[float] | None = None,
    targets: Iterable[Target] = (),
    rule: str | Rule = "relative",
    metric: str = "loss",
    smooth: int = 1,
    window: int | None = None,
    key: Array | None = None,
    protocol: str | None = None,
    step_seconds: float | Mapping[int | None, float] | Sequence[float] | np.ndarray | None = None,
    rank_by: str = "shared",
) -> Sweep:
    """`sweep` for a kernel that exists already.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C; an array, also on a mesh.
        f0: outputs before training (N, C).
        y: integer labels (N,) or targets (N, C).
        settings: what to forecast, heavy-ball descent alone: a kernel does not know the weights,
            which others ask for.
        thresholds: see `sweep`.
        targets: losses and errors on the training samples to get below; the first is what settings
            are ranked by.
        rule: see `sweep`.
        metric: see `sweep`.
        smooth: see `sweep`.
        window: see `sweep`.
        key: see `sweep`.
        protocol: see `sweep`.
        step_seconds: see `sweep`.
        rank_by: see `sweep`.

    Returns:
        A `Sweep`.

    Raises:
        ValueError: see `sweep`; bad shapes; targets of test samples; other algorithms.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxttp.forecast import grid
        >>> kernel = jnp.eye(4).reshape(2, 2, 2, 2)
        >>> settings = grid(learning_rate=(0.5, 1.0), steps=20)
        >>> sweep_kernel(kernel, jnp.zeros((2, 2)), jnp.array([0, 1]), settings).loss.shape
        (2, 21)
    """
    check_known(kernel=kernel, f0=f0, y=y)
    f0 = check_array("f0", f0)
    n = len(f0) if f0.ndim else None
    reading = Rule.of(thresholds, rule, metric, smooth, window)
    wanted = Wanted.of(settings, n, reading, targets, key, protocol, step_seconds, rank_by)
    for one in wanted.settings:
        check_descent("settings", one, "jaxttp.sweep does, which has the network.")
    return screen_kernel(kernel, f0, y, wanted)
