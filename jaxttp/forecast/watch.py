"""The callback that watches a real training and corrects its forecast."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._checks import check_choice, check_finite, check_number, check_used
from jaxttp._result import RESULT
from jaxttp._types import ApplyFn, Params
from jaxttp.adapters import check_per_sample
from jaxttp.adapters.inputs import check_samples
from jaxttp.crossing import check_reading
from jaxttp.dynamics.relinearize import relinearized_recursion
from jaxttp.forecast._options import check_memory, check_model
from jaxttp.forecast.closed_loop import (
    DEPARTURE,
    OnlineForecast,
    carried_on,
    corrected,
    last_move,
    online,
)
from jaxttp.forecast.hyperparameters import Hyperparameters
from jaxttp.losses import encode_targets
from jaxttp.ntk import empirical_ntk
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
        x: training samples (N, ...).
        y: integer labels (N,) or targets (N, C).
        setting: rate, momentum, schedule, batch size, loss and horizon.
        thresholds: the epsilons.
        rule: the definition of training time.
        departure: see `online`.
        trainable: which parameters train, as in `empirical_ntk`.
        max_bytes: bound on a kernel's working memory.

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
        thresholds: Sequence[float] = (0.01, 0.1, 0.4),
        rule: str = "relative",
        departure: float = DEPARTURE,
        trainable: Any = None,
        max_bytes: int | None = None,
    ) -> None:
        self._reading: dict[str, Any] = {
            "thresholds": check_reading(thresholds, rule, steps=setting.steps),
            "rule": rule,
            "departure": check_number("departure", departure, above=0.0),
        }
        check_memory(None, max_bytes)
        x = check_samples("x", x)
        check_finite("x", x)
        shape = check_model(apply_fn, params, x, trainable)
        check_finite("params", params)
        encode_targets(setting.loss, y, jax.ShapeDtypeStruct(shape, x.dtype))
        check_per_sample(apply_fn, params, x)
        self._apply, self._x, self._y, self._setting = apply_fn, x, y, setting
        self._trainable = trainable
        self._kernel = lambda w: empirical_ntk(
            apply_fn, w, x, trainable=trainable, max_bytes=max_bytes
        )
        self._outputs = jax.jit(apply_fn)
        self.kernel = self._kernel(params)
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
        self._path.append(self._outputs(params, self._x))
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
        base = online(self.kernel, f0, self._y, self._setting, **known, **self._reading)
        if kind != "weights":
            return base
        found = self._relinearized(base, "auto" if rebuilds is None else rebuilds)
        highest = OUT_OF_RANGE * float(found.loss[: found.at + 1].max())
        if found.stable and found.loss.max() <= highest:
            return found
        return self.forecast("outputs")

    def _relinearized(self, base: OnlineForecast, rebuilds: int | str) -> OnlineForecast:
        setting, k = self._setting, base.at
        if k == setting.steps:
            return dataclasses.replace(base, kind="weights")
        rates = setting.rates()
        before = split_trainable(self._weights[0], self._trainable)[0]
        now, restore = split_trainable(self._weights[-1], self._trainable)

        def part(w: Params, x: Any) -> Array:
            return self._apply(restore(w), x)

        network = self._apply if self._trainable is None else part  # what is compiled is kept
        velocity = move = jax.tree.map(jnp.subtract, before, now)
        if setting.momentum:
            targets, loss = encode_targets(setting.loss, self._y, self._path[-1])
            outputs, pull = jax.vjp(lambda w: network(w, self._x), now)
            gradient = pull(loss.gradient(outputs, targets) / len(outputs))[0]
            velocity = carried_on(move, gradient, setting, k)
        rest = jnp.asarray(rates[k:])
        rate = float(rates[k]) if np.all(rates[k:] == rates[k]) else lambda t: rest[t]
        path = relinearized_recursion(
            network, now, self._x, self._y, loss=setting.loss,
            optimizer=optax.sgd(rate, setting.momentum or None), steps=setting.steps - k,
            kernel_fn=lambda w: self._kernel(restore(w)), rebuilds=rebuilds,
            accumulators=(velocity,) if setting.momentum else (),
            damp=True,  # a training that is under way may be at the edge, and has not diverged
        )  # fmt: skip
        thresholds, rule, departure = (
            self._reading[name] for name in ("thresholds", "rule", "departure")
        )
        return corrected(
            setting.steps, thresholds, rule, departure, base.open_loop, base.loss[: k + 1],
            path.loss[1:], bool(path.diverged_at < 0), "weights", base.time_scale, path.kernels,
        )  # fmt: skip
