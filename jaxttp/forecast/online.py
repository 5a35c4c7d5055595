"""Closed loop: the first steps of a real training correct its forecast.

After k steps the network is linearized again at its present weights, and then along the predicted
path (`relinearized_recursion`, with the velocity of the last step). `Online` is a callback that
records the losses and weights for this.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import check_finite
from jaxttp._core.compile import full_precision
from jaxttp._core.results import RESULT
from jaxttp._core.types import ApplyFn, Params, split_trainable
from jaxttp.dynamics._network import promote
from jaxttp.dynamics.recursion import heavy_ball_curves
from jaxttp.dynamics.relinearize import relinearized_recursion
from jaxttp.forecast.methods.base import Linearizer
from jaxttp.forecast.options import check_tokens, choose_kernel
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.stability import RISE
from jaxttp.forecast.training_setup import Hyperparameters, check_descent
from jaxttp.losses.rule import Curves, Rule, Target, Values, reach, target_label, targets_of

DEPARTURE = 0.05
"""The linear regime is left when the loss is off by this fraction of the predicted drop."""


@dataclasses.dataclass(frozen=True)
class OnlineForecast:
    """A forecast corrected by the first k real steps; prints itself as a table.

    Attributes:
        steps: training time for every threshold, from the start of training; -1 where the corrected
            forecast diverges or never gets there.
        loss: L_0, ..., L_T: observed up to step k, predicted beyond it.
        open_loop: the loss predicted before training, (T + 1,).
        at: k.
        stable: False where the corrected forecast diverges, or rises above twice what was seen.
        rule: the definition of training time.
        kernels: kernels built for the correction.
        targets: the step at which every target is reached, -1 as in `steps`.
    """

    steps: Mapping[float, int]
    loss: np.ndarray
    open_loop: np.ndarray
    at: int
    stable: bool
    rule: str
    kernels: int
    targets: Mapping[Target, int]

    @property
    def departure(self) -> np.ndarray:
        """|observed - predicted loss| as a fraction of the predicted drop, (k + 1,)."""
        drop = abs(float(self.open_loop[0] - self.open_loop[-1])) or 1.0
        return np.abs(self.loss - self.open_loop)[: self.at + 1] / drop

    @property
    def left_at(self) -> int:
        """The step at which the linear regime was left, -1 for not yet."""
        beyond = np.flatnonzero(self.departure > DEPARTURE)
        return int(beyond[0]) if beyond.size else -1

    @property
    def message(self) -> str:
        """One line on the linear regime."""
        worst = float(self.departure.max())
        if self.left_at < 0:
            return f"linear regime so far (off by at most {worst:.1%})"
        return (
            f"linear regime left at step {self.left_at}: the loss is off by up to {worst:.0%} of "
            "the predicted drop"
        )

    def __str__(self) -> str:
        lines = [f"Forecast after {self.at} of {len(self.loss) - 1} steps"]
        for target, step in {**self.steps, **self.targets}.items():
            is_target = isinstance(target, Target)
            label = target.words() if is_target else target_label(target, self.rule)
            when = f"step {step}" if step >= 0 else ("not reached" if self.stable else "diverges")
            lines.append(f"  {label:<31} {when:>12}")
        lines.append(
            f"  loss   {self.loss[0]:.4g} -> {self.loss[-1]:.4g} "
            f"(before training: {self.open_loop[-1]:.4g})"
        )
        return "\n".join([*lines, f"  {self.message}"])

    plot, _repr_html_, __repr__ = RESULT


class Online:
    """A callback for `train` (or any loop) that corrects the forecast whenever it is asked.

    Before the first step it builds one kernel. Called with (step, params, loss on all samples) it
    only remembers; `forecast` does the work. With mini-batches the rest is forecast by the expected
    gradient.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode.
        params: the weights before training.
        x: training samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        setting: rate, momentum, schedule, batch size, loss and horizon.
        thresholds: the epsilons, fractions in (0, 1) for the rule "relative"; 0.01, 0.1 and 0.4
            when None.
        target_loss: losses on the training samples to get below, one or several, each above 0; the
            error is not corrected.
        rule: the definition of training time, see `training_time`; or a `Rule` of the loss, which
            takes the place of thresholds, smooth and window.
        smooth: steps over which the curve is averaged first, see `smooth_curve`.
        window: steps of the rule "plateau".
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
        >>> result = watch.forecast()
        >>> result.at, sorted(result.steps)
        (15, [0.01, 0.1, 0.4])

    Source:
        Ours; measured by `experiments/training_time/closing.py`.
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
        reading = Rule.of(thresholds, rule, smooth=smooth, window=window, steps=setting.steps)
        if reading.metric != "loss":
            raise ValueError("rule: only the loss is corrected by what was seen; read the loss.")
        self._rule, self._targets = reading, targets_of(target_loss)
        estimator = choose_kernel(sketch_dim, key, None, max_bytes)
        problem = Problem.of(apply_fn, params, x, y, loss=setting.loss, trainable=trainable)
        check_tokens(problem, estimator)
        self._linearizer, self._setting = Linearizer(problem.centered(), estimator), setting
        problem = self._linearizer.problem
        rates = jnp.asarray(setting.rates()[:, None], problem.f0.dtype)
        curves, *_ = heavy_ball_curves(
            self._linearizer.first, problem.f0, problem.targets, rates,
            jnp.array([setting.momentum], problem.f0.dtype), None, problem.loss,
        )  # fmt: skip
        self._open_loop = np.asarray(curves[:, 0], np.float64)
        self._losses: list[float] = []
        self._weights: list[Params] = []

    def __call__(self, step: int, params: Params, loss: float) -> None:
        """Remember one step: its number, the weights after it, and the loss on all samples."""
        if step != len(self._losses):
            raise ValueError(
                f"step must be {len(self._losses)}, the one after the last seen; got {step}."
            )
        self._losses.append(float(loss))
        params, _ = promote(
            params, self._linearizer.problem.trainable
        )  # as those of the forecast were
        # Weights before and after the last move give the velocity. They are copied, as a step may
        # write into its arrays.
        moved = step == 0 or np.any(self._setting.rates()[step - 1 : step] > 0)
        kept = self._weights[-1:] if moved else self._weights[:-1]
        self._weights = [*kept, jax.tree.map(jnp.array, params)]

    @full_precision
    def forecast(self) -> OnlineForecast:
        """The forecast as it stands after the steps seen so far.

        Returns:
            An `OnlineForecast`, of `relinearized_recursion` from the present weights on; at the
            edge of stability the mean path.

        Raises:
            ValueError: no step seen yet, more than the horizon, or losses that are not finite.
        """
        setting, k = self._setting, len(self._losses) - 1
        seen = np.array(self._losses)
        if not 1 <= k <= setting.steps:
            raise ValueError(
                f"a forecast needs the start, one step and no more than {setting.steps} steps; "
                f"{len(seen)} calls were seen. Pass this object as callback to train."
            )
        check_finite("losses", seen)
        curve, diverged, kernels = seen, False, 0
        if k < setting.steps:
            path = self._remaining(k)
            curve = np.concatenate([seen, np.asarray(path.loss[1:], np.float64)])
            kernels, diverged = path.kernels, int(path.diverged_at) >= 0
        # Losses that were observed did not end the training.
        rises = curve.max() > RISE * seen.max() or curve[-1] > RISE * curve[0]
        stable = bool(not diverged and not rises)
        return OnlineForecast(
            self._rule.read(curve, None, reached=stable), curve, self._open_loop, k, stable,
            self._rule.kind, kernels,
            reach(Curves(curve), self._targets, smooth=self._rule.smooth, reached=stable),
        )  # fmt: skip

    def _remaining(self, k: int) -> Any:
        """The path of the steps after the k-th."""
        setting, problem = self._setting, self._linearizer.problem
        rates = setting.rates()
        before, now = (split_trainable(self._weights[i], problem.trainable)[0] for i in (0, -1))
        accumulators = ()
        if (m := setting.momentum) > 0:
            # Steps at rate 0, as the first of a warm-up, accumulate gradients without moving.
            moved = int(np.max(np.flatnonzero(rates[:k] > 0), initial=-1)) + 1  # 0 for no step yet
            kept = m ** (k - moved)
            fraction, gained = kept / rates[moved - 1] if moved else 0.0, (1 - kept) / (1 - m)
            outputs, pull = jax.vjp(lambda w: problem.network(w, problem.x), now)
            force = pull(problem.loss.gradient(outputs, problem.targets) / len(outputs))[0]
            accumulators = (
                jax.tree.map(lambda a, b, g: fraction * (a - b) + gained * g, before, now, force),
            )
        remaining = jnp.asarray(rates[k:])
        rate = float(rates[k]) if np.all(rates[k:] == rates[k]) else lambda t: remaining[t]
        return relinearized_recursion(
            problem.network, now, problem.x, problem.targets, loss=problem.loss,
            optimizer=optax.sgd(rate, setting.momentum or None), steps=setting.steps - k,
            kernel_fn=self._linearizer.at, rebuilds="auto", accumulators=accumulators,
            # A training run in progress may be at the edge, and has not diverged.
            damp=not problem.is_linear,
        )  # fmt: skip
