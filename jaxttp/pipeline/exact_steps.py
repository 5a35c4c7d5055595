"""Exact Gauss-Newton steps of a reversible network on a named data set, and their forecast."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxttp._core.checks import check_choice, check_number, check_used
from jaxttp._core.results import RESULT, plain_numbers
from jaxttp._core.types import Progress
from jaxttp.adapters import from_nnx
from jaxttp.data import is_table, load_whole, select
from jaxttp.data.dataset import standardized
from jaxttp.gauss_newton import StepForecast, forecast_steps, gauss_newton
from jaxttp.gauss_newton.pseudoinverse import FILTERS, FINEST_RTOL, KINDS, RESIDUAL_LIMIT
from jaxttp.losses import encode_targets
from jaxttp.losses.rule import Rule
from jaxttp.models import RevMLP
from jaxttp.pipeline.settings import DataSettings, check_unused
from jaxttp.pipeline.tasks import REGRESSION
from jaxttp.training import train


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings(DataSettings):
    """What to train, by names and numbers; full batches, "squared_error" or "cross_entropy".

    Attributes:
        samples_per_class: samples of each class; None for all. Regression takes all samples.
        classes: the labels to keep, or a number of random ones; None for all.
        loss: its name; None chooses cross-entropy for classes and squared error for regression.
        thresholds: fractions of the loss's decrease that define training times.
        learning_rate: fraction of a whole step.
        steps: how many.
        blocks: L.
        bottleneck: m; None for twice the number of samples, at least 256: full rank.
        pseudoinverse: see `jaxttp.gauss_newton.gauss_newton_direction`;
            "noise" draws by the seed.
        rtol: of the pseudo-inverse; None for 1e-6, which is exact at full rank.

    Raises:
        ValueError: what is out of range, not known, or of no use.
    """

    samples_per_class: int | None = 30
    classes: tuple[int, ...] | int | None = None
    loss: str | None = None
    thresholds: tuple[float, ...] = (0.01, 0.1, 0.4)
    learning_rate: float = 0.5
    steps: int = 12
    blocks: int = 2
    bottleneck: int | None = None
    pseudoinverse: str = "truncate"
    rtol: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("learning_rate", self.learning_rate, above=0.0)
        kind = check_choice("pseudoinverse", self.pseudoinverse, KINDS)
        check_used("rtol", self.rtol, kind in FILTERS, f"pseudoinverse={kind!r} has no tolerance")
        if self.rtol is not None:
            check_number("rtol", self.rtol, at_least=0, below=1)

    @property
    def tolerance(self) -> float:
        """The rtol, or its default."""
        return FINEST_RTOL if self.rtol is None else self.rtol


@dataclasses.dataclass(frozen=True)
class TaskSteps:
    """Exact steps, and what was forecast of them from the first outputs alone.

    Attributes:
        settings: what was asked for, with the loss that was taken.
        description: network and data in words.
        forecast: losses and outputs of steps in function space.
        loss: of the network, on all samples (T + 1,); infinite after divergence.
        error: likewise.
        ranks: kept in every half-layer at the first step (L, 2).
        residual: relative residual of J times the first direction.
        largest_residual: the largest of all steps.
        samples: N.
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
        where, hints = f"learning rate {self.settings.learning_rate:g}", ["a smaller one"]
        if self.settings.pseudoinverse in FILTERS:
            where += f" with rtol {self.settings.tolerance:g}"
            hints.append("a larger rtol")
        hints.append("fewer samples or more hidden units (bottleneck)")
        return f"diverges at {where}; try {', '.join(hints)}."

    @property
    def shortfall(self) -> str | None:
        """Why the steps were not exact and what would do; None where they were."""
        if self.largest_residual <= RESIDUAL_LIMIT:
            return None
        return (
            f"rank {self.ranks.min()} of {self.samples}, relative residual up to "
            f"{self.largest_residual:.2g}, while the forecast is of exact steps; a bottleneck of "
            f"at least {2 * self.samples} (twice the samples, none of them repeated) with "
            f"pseudoinverse truncate and rtol {FINEST_RTOL:g}, or fewer samples, would do"
        )

    def times(self) -> dict[float, tuple[int, int]]:
        """Forecast and real training time for every threshold; -1 for real ones that diverge."""
        rule = Rule(self.settings.thresholds)
        with jax.enable_x64(True):  # losses far below 1e-7 of the first are told apart
            ahead = rule.read(self.forecast.loss, self.forecast.error, reached=True)
            real = rule.read(self.loss, self.error, reached=self.stable)
        return {threshold: (ahead[threshold], real[threshold]) for threshold in ahead}

    def to_json(self) -> dict[str, Any]:
        """Plain values; a loss that is not finite is None."""
        times = self.times()
        return {
            "task": self.description,
            "settings": dataclasses.asdict(self.settings),
            "forecast": {
                "steps": {repr(e): time[0] for e, time in times.items()},
                "loss": plain_numbers(self.forecast.loss),
            },
            "real": {
                "steps": {repr(e): time[1] for e, time in times.items()},
                "loss": plain_numbers(self.loss), "error": plain_numbers(self.error),
            },
            "stable": self.stable, "ranks": self.ranks.tolist(),
            "residual": self.residual, "shortfall": self.shortfall,
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
        >>> result = gauss_newton_task(small)
        >>> result.loss.shape, result.stable
        ((4,), True)

    Source:
        XGN Algorithm 1 and eq (8).
    """
    keys = jax.random.split(jax.random.key(settings.seed))
    dataset = load_whole(settings.data, label=settings.label)
    if dataset.num_classes is not None:
        dataset = select(
            dataset, classes=settings.classes, per_class=settings.samples_per_class,
            fewer=is_table(settings.data), key=keys[0],
        )  # fmt: skip
    elif settings.loss == "cross_entropy":
        raise ValueError(f"loss={settings.loss!r} needs classes, and {dataset.name} has none.")
    else:
        check_unused(settings, ("samples_per_class", "classes"), REGRESSION)
    usual = "squared_error" if dataset.num_classes is None else "cross_entropy"
    loss_name = check_choice("loss", settings.loss or usual, ("squared_error", "cross_entropy"))
    flat = standardized(dataset.x.reshape(len(dataset.x), -1))
    outputs = dataset.num_classes or dataset.y.shape[1]
    bottleneck = settings.bottleneck or max(2 * len(flat), 256)
    description = (
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
        options: dict[str, Any] = {"pseudoinverse": settings.pseudoinverse}
        if settings.pseudoinverse == "noise":
            options["key"] = keys[1]
        elif settings.pseudoinverse in FILTERS:
            options["rtol"] = settings.tolerance

        rate, steps = settings.learning_rate, settings.steps

        def watch(step: int, weights: Any, value: float) -> bool:
            """Report progress, and stop where the loss is not finite."""
            if progress is not None and step < steps:
                progress("Gauss-Newton steps", step, steps)
            return not np.isfinite(value)

        run = train(
            *from_nnx(model), flat, targets, loss=loss, steps=steps, callback=watch,
            optimizer=gauss_newton(rate, **model.parts, **options), record=lambda state: state[0],
        )  # fmt: skip
        forecast = forecast_steps(start, targets, loss=loss, learning_rate=rate, steps=steps)
    loss, error = np.full((2, steps + 1), np.inf)  # infinite after divergence
    loss[: len(run.loss)] = np.where(np.isfinite(run.loss), run.loss, np.inf)
    error[: len(run.error)] = np.where(np.isfinite(run.error), run.error, np.inf)
    residuals = np.asarray(run.recorded.residual)
    return TaskSteps(
        dataclasses.replace(settings, loss=loss_name), description, forecast, loss, error,
        np.asarray(run.recorded.ranks[0]), float(residuals[0]), float(max(residuals)), len(flat),
    )  # fmt: skip
