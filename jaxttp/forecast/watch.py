"""The callback that watches a real training and corrects its forecast."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_number, check_used
from jaxttp._core.compile import full_precision
from jaxttp._core.results import RESULT
from jaxttp._core.types import ApplyFn, Params
from jaxttp.dynamics._network import compile_network
from jaxttp.dynamics._promoted import promote
from jaxttp.dynamics.relinearize import relinearized_recursion
from jaxttp.forecast._options import check_tokens, choose_kernel
from jaxttp.forecast.closed_loop import (
    DEPARTURE,
    OnlineForecast,
    carried_on,
    corrected,
    last_move,
    loss_rule,
    online,
)
from jaxttp.forecast.hyperparameters import Hyperparameters, check_descent
from jaxttp.forecast.paths.base import Linearizer
from jaxttp.forecast.problem import Problem
from jaxttp.losses.rule import Rule, Values, targets_of
from jaxttp.ntk._select import split_trainable

OUT_OF_RANGE = 2.0
"""A re-linearised forecast whose loss exceeds all observed ones by this factor is not believed."""
KINDS = ("losses", "outputs", "weights")


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
        departure: see `online`.
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
        departure: float = DEPARTURE,
        trainable: Any = None,
        sketch_dim: int | None = None,
        key: Array | None = None,
        max_bytes: int | None = None,
    ) -> None:
        if not isinstance(setting, Hyperparameters):
            raise TypeError(
                f"setting must be a Hyperparameters, such as Hyperparameters(0.1, 0.9, steps=100), "
                f"of gradient descent; got {type(setting).__name__}. Other optimisers are forecast "
                "by predict_training_time."
            )
        check_descent("setting", setting)
        self._rule = loss_rule(thresholds, rule, smooth, window, setting.steps)
        self._targets = targets_of(target_loss)
        self._departure = check_number("departure", departure, above=0.0)
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
            target_loss=[target.value for target in self._targets], departure=self._departure,
        )  # fmt: skip
        if kind != "weights":
            return base
        found = self._relinearized(base, "auto" if rebuilds is None else rebuilds)
        highest = OUT_OF_RANGE * float(found.loss[: found.at + 1].max())
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
            # A training that is under way may be at the edge, and has not diverged.
            damp=not problem.is_linear,
        )  # fmt: skip
        return corrected(
            self._rule, self._targets, self._departure, base.open_loop, base.loss[: k + 1],
            path.loss[1:], bool(path.diverged_at < 0), "weights", base.time_scale, path.kernels,
        )  # fmt: skip
