"""Exact Gauss-Newton steps of a reversible network on a named data set, beside their forecast."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_number, check_used
from jaxttp._core.results import RESULT, plain_numbers
from jaxttp._core.types import Progress
from jaxttp.data import is_table, load_whole, select
from jaxttp.data.columns import standardized
from jaxttp.forecast import training_time
from jaxttp.gauss_newton import (
    StepForecast,
    forecast_steps,
    gauss_newton,
    revmlp_forward,
)
from jaxttp.gauss_newton._network import read
from jaxttp.gauss_newton.pseudoinverse import FILTERS, FINEST_RTOL, KINDS, RESIDUAL_LIMIT
from jaxttp.losses import Loss, encode_targets
from jaxttp.models import RevMLP
from jaxttp.pipeline.settings import Arrival, TrainingSettings, arrivals, check_unused
from jaxttp.pipeline.tasks import REGRESSION
from jaxttp.training import TrainingRun, train

_RATES = tuple(0.5 / 2**k for k in range(6))
"""Tried in turn where none is given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings(TrainingSettings):
    """What to train, by names and numbers; full batches, "squared_error" or "cross_entropy".

    Attributes:
        learning_rate: fraction of a whole step; None for 0.5, halved (at most five times) until
            the loss does not rise to 1.5 times its lowest.
        steps: how many.
        blocks: L.
        bottleneck: m; None for twice the number of samples, at least 256: full rank.
        pseudoinverse: see `jaxttp.gauss_newton.gauss_newton_direction`;
            "noise" draws by the seed.
        rtol: of the pseudo-inverse; None for 1e-6, which is exact at full rank.

    Raises:
        ValueError: what is out of range, not known, or of no use.
    """

    learning_rate: float | None = None
    steps: int = 12
    blocks: int = 2
    bottleneck: int | None = None
    pseudoinverse: str = "truncate"
    rtol: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learning_rate is not None:
            check_number("learning_rate", self.learning_rate, above=0.0)
        kind = check_choice("pseudoinverse", self.pseudoinverse, KINDS)
        remedy = f"pseudoinverse={kind!r} has no tolerance"
        check_used("rtol", self.rtol, kind in FILTERS, remedy)
        if self.rtol is not None:
            check_number("rtol", self.rtol, at_least=0, below=1)


@dataclasses.dataclass(frozen=True)
class TaskSteps:
    """Exact steps, and what was forecast of them from the first outputs alone.

    Attributes:
        settings: what was asked for, with the loss, the learning rate and the rtol that were taken.
        description: network and data in words.
        forecast: losses and outputs of steps in function space.
        loss: of the network, on all samples (T + 1,); infinite after divergence.
        error: likewise.
        ranks: kept in every half-layer at the first step (L, 2).
        residual: relative residual of J times the first direction.
        largest_residual: the largest of all steps.
        samples: N.
        bottleneck: m.
        diverged: learning rates that were tried before and diverged.
    """

    settings: StepSettings
    description: str
    forecast: StepForecast
    loss: np.ndarray
    error: np.ndarray
    ranks: np.ndarray
    residual: float
    largest_residual: float
    samples: int
    bottleneck: int
    diverged: tuple[float, ...] = ()

    plot, _repr_html_, __repr__ = RESULT

    @property
    def stable(self) -> bool:
        """Whether every loss is finite, and the last one below the first."""
        return bool(np.all(np.isfinite(self.loss)) and self.loss[-1] < self.loss[0])

    @property
    def problem(self) -> str | None:
        """What keeps the steps from being stable, and what would do; None where they are."""
        if self.stable:
            return None
        rates = (*self.diverged, self.settings.learning_rate)
        where, remedies = f"at learning rate {rates[0]:g}", ["a smaller one"]
        if self.diverged:  # the rates tried: no rate was given
            where = f"at every learning rate from {rates[0]:g} to {rates[-1]:g}"
            remedies = []
        if self.settings.pseudoinverse in FILTERS:
            where += f" with rtol {self._rtol:g}"
            remedies.append("a larger rtol")
        remedies += ["fewer samples", "more hidden units (bottleneck)"]
        return f"diverges {where}; try {', '.join(remedies[:-1])} or {remedies[-1]}."

    @property
    def _rtol(self) -> float:
        return FINEST_RTOL if self.settings.rtol is None else self.settings.rtol

    @property
    def shortfall(self) -> str | None:
        """Why the steps were not exact and what would do; None where they were."""
        if self.largest_residual <= RESIDUAL_LIMIT:
            return None
        n, asked = self.samples, self.settings
        if self.bottleneck < 2 * n:
            remedy = f"a bottleneck of at least {2 * n} (twice the samples), or fewer samples"
        elif self._rtol > FINEST_RTOL or asked.pseudoinverse != "truncate":
            remedy = f"pseudoinverse truncate with rtol {FINEST_RTOL:g}"
        else:
            remedy = "a still wider bottleneck, or fewer samples (none of them twice)"
        return (
            f"rank {self.ranks.min()} of {n}, relative residual up to {self.largest_residual:.2g}, "
            f"while the forecast is of exact steps; {remedy}, would do"
        )

    def times(self) -> dict[float, tuple[int, int]]:
        """Forecast and real training time for every threshold; -1 for real ones that diverge."""
        with jax.enable_x64(True):  # losses far below 1e-7 of the first are told apart
            ahead = [int(training_time(self.forecast.loss, e)) for e in self.settings.thresholds]
            if not self.stable:
                real = [-1] * len(ahead)
            else:
                real = [int(training_time(self.loss, e)) for e in self.settings.thresholds]
        return dict(zip(self.settings.thresholds, zip(ahead, real, strict=True), strict=True))

    @property
    def targets(self) -> tuple[Arrival, ...]:
        """When the losses and errors aimed at are reached, forecast and real."""
        targets = self.settings.targets()
        with jax.enable_x64(True):
            ahead = arrivals(targets, self.forecast, reached=True, step_seconds=None)
            real = arrivals(targets, self, reached=self.stable, step_seconds=None)
        pairs = zip(ahead, real, strict=True)
        return tuple(one._replace(real_steps=other.steps) for one, other in pairs)

    def to_json(self) -> dict[str, Any]:
        """Plain values; a loss that is not finite is None."""
        times = self.times()
        return {
            "task": self.description,
            "settings": dataclasses.asdict(self.settings),
            "forecast": {"steps": {repr(e): time[0] for e, time in times.items()},
                         "loss": np.asarray(self.forecast.loss, float).tolist()},
            "real": {"steps": {repr(e): time[1] for e, time in times.items()},
                     "loss": plain_numbers(self.loss),
                     "error": plain_numbers(self.error)},
            "targets": [one._asdict() for one in self.targets],
            "stable": self.stable,
            "ranks": self.ranks.tolist(),
            "residual": self.residual,
            "shortfall": self.shortfall,
            "diverged": list(self.diverged),
        }  # fmt: skip


def gauss_newton_task(settings: StepSettings, *, progress: Progress | None = None) -> TaskSteps:
    """Train a reversible network by exact Gauss-Newton steps, in double precision.

    Args:
        settings: what to train.
        progress: called with (stage, done, total).

    Returns:
        A `TaskSteps`.

    Raises:
        ValueError: unknown data, too few samples, a loss that does not fit, steps or rates out of
            range, whatever `gauss_newton_direction` refuses.

    Example:
        >>> small = StepSettings(data="wine", samples_per_class=5, steps=3, bottleneck=32)
        >>> found = gauss_newton_task(small)
        >>> found.loss.shape, found.stable
        ((4,), True)

    Source:
        XGN Algorithm 1 and eq (8).
    """
    keys = jax.random.split(jax.random.key(settings.seed))
    dataset = load_whole(settings.data, **settings.table_options())
    if dataset.num_classes is not None:
        dataset = select(
            dataset,
            classes=settings.classes,
            per_class=settings.samples_per_class,
            fewer=is_table(settings.data),
            key=keys[0],
        )
    elif settings.loss == "cross_entropy":
        raise ValueError(f"loss={settings.loss!r} needs classes, and {dataset.name} has none.")
    else:
        check_unused(settings, ("samples_per_class", "classes"), REGRESSION)
    usual = "squared_error" if dataset.num_classes is None else "cross_entropy"
    loss_name = check_choice("loss", settings.loss or usual, ("squared_error", "cross_entropy"))
    flat = standardized(dataset.x.reshape(len(dataset.x), -1))
    outputs = dataset.num_classes or dataset.y.shape[1]
    bottleneck = settings.bottleneck or max(2 * len(flat), 256)
    words = (
        f"RevMLP of {settings.blocks} blocks, m = {bottleneck}, on {dataset.name}, {len(flat)} "
        f"samples, full batch, {loss_name}"
    )
    with jax.enable_x64(True):
        model = RevMLP(
            flat.shape[1], outputs, rngs=nnx.Rngs(settings.seed), blocks=settings.blocks,
            bottleneck=bottleneck, readout="orthonormal", param_dtype=jnp.float64,
        )  # fmt: skip
        start = model(flat)
        targets, loss = encode_targets(loss_name, dataset.y, start)
        descend = _descent(model, model.embed(flat), targets, loss, settings, keys[1], progress)
        rates = _RATES if settings.learning_rate is None else (settings.learning_rate,)
        run, diverged = descend(rates[0], len(rates) > 1), 0
        while _rises(run.loss) and diverged + 1 < len(rates):
            diverged += 1
            run = descend(rates[diverged], diverged + 1 < len(rates))
        rate = rates[diverged]
        ahead = forecast_steps(start, targets, loss=loss, learning_rate=rate, steps=settings.steps)
    missing = settings.steps + 1 - len(run.loss)
    residuals = np.asarray(run.recorded.residual)
    return TaskSteps(
        dataclasses.replace(settings, loss=loss_name, learning_rate=rate), words, ahead,
        _padded(run.loss, missing), _padded(run.error, missing),
        np.asarray(run.recorded.ranks[0]), float(residuals[0]), float(max(residuals)), len(flat),
        bottleneck, rates[:diverged],
    )  # fmt: skip


def _descent(
    model: RevMLP, x: Array, targets: Array, loss: Loss, settings: StepSettings, key: Array,
    progress: Progress | None,
) -> Callable[[float, bool], TrainingRun]:  # fmt: skip
    """Training runs of one network by rate: one compiled function serves them all."""
    weights, fixed, readout = model.weights[...], model.fixed_bottlenecks, model.fixed_readout
    assert readout is not None
    options: dict[str, Any] = {"pseudoinverse": settings.pseudoinverse}
    if settings.pseudoinverse == "noise":
        options["key"] = key
    elif settings.pseudoinverse in FILTERS:
        options["rtol"] = FINEST_RTOL if settings.rtol is None else settings.rtol

    def apply_fn(weights: Array, x: Array) -> Array:
        return read(readout, revmlp_forward(weights, fixed, x))

    static = ("readout", "bottlenecks", "pseudoinverse", "rtol", "key")
    injected = optax.inject_hyperparams(gauss_newton, static_args=static)
    optimizer = injected(learning_rate=0.5, readout=readout, bottlenecks=fixed, **options)

    def run(rate: float, may_stop: bool) -> TrainingRun:
        """Steps of one rate; they end where the loss is infinite or, if they may stop, rises."""
        state: Any = optimizer.init(weights)
        state.hyperparams["learning_rate"] = jnp.asarray(rate, weights.dtype)
        losses: list[float] = []

        def watch(step: int, weights: Array, value: float) -> bool:
            losses.append(value)
            over = not np.isfinite(value) or (may_stop and _rises(losses))
            if progress is not None and step < settings.steps and not over:
                progress(f"Gauss-Newton steps at rate {rate:g}", step, settings.steps)
            return bool(over)

        return train(
            apply_fn, weights, x, targets, loss=loss, optimizer=optimizer, steps=settings.steps,
            callback=watch, state=state,
            # What Gauss-Newton reports, within `inject_hyperparams` and the chain.
            record=lambda state: state.inner_state[0],
        )  # fmt: skip

    return run


def _rises(curve: Any) -> bool:
    """Whether the last loss is 1.5 times the lowest, and more than the rounding of the first."""
    last = curve[-1]
    return bool(not np.isfinite(last) or last > max(1.5 * min(curve), 1e-9 * curve[0]))


def _padded(values: Any, missing: int) -> np.ndarray:
    found = np.array([*values, *[np.inf] * missing])
    return np.where(np.isfinite(found), found, np.inf)
