"""Conditioning composed: from the names of a network and of data to one frozen result."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxttp import conditioning
from jaxttp._core.checks import check_choice, check_integer
from jaxttp._core.process import versions
from jaxttp._core.results import RESULT, plain_number, plain_numbers
from jaxttp._core.types import ApplyFn, Params
from jaxttp._core.xla_cpu.threads import limited
from jaxttp.adapters import from_nnx
from jaxttp.conditioning import ConditionNumber, ConditionSweep, RankSensitivity, Record, Tracker
from jaxttp.data import Dataset, load_dataset, load_whole, select
from jaxttp.models import MLP, fresh_head, load_pretrained
from jaxttp.ntk.sharded import mesh_of
from jaxttp.pipeline.settings import DataSettings, check_unused
from jaxttp.training import TrainingRun, train

NETWORKS = ("linear", "leaky_relu", "mlp", "resnet")

SWEEP_VALUES: dict[str, tuple] = {
    "depth": (1, 2, 3, 4, 6, 8),
    "width": (20, 50, 100, 200, 400),
    "skip": (0.0, 0.1, 0.25, 0.5, 1.0),
    "alpha": (0.0, 0.01, 0.1, 0.25, 0.5, 1.0),
}
"""What a swept parameter takes if nothing else is asked for."""

_READ: dict[str, tuple[str, ...]] = {
    "linear": ("depth", "width", "skip", "batch_norm", "whiten"),
    "leaky_relu": ("width", "alpha", "whiten"),
    "mlp": ("depth", "width", "whiten", "mesh"),
    "resnet": ("mesh",),
}
"""The settings that some networks have and others have not."""
DENSE = 3000
"""Matrices up to so many rows get all their eigenvalues, for the spectrum and the ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConditionSettings(DataSettings):
    """Which network, on which data, by names and numbers.

    Attributes:
        network: "linear" (deep linear, or residual with `skip`), "leaky_relu" (one hidden layer),
            "mlp" (ReLU) or "resnet" (the shipped network before fine-tuning; digits only).
        samples: drawn at random; None for all of a linear network and 50 of the others, whose
            matrix has samples times outputs rows.
        depth: weight matrices of "linear" and "mlp".
        width: hidden units.
        skip: beta of W + beta I on every layer of "linear".
        alpha: negative slope of "leaky_relu".
        whiten: centre and whiten the inputs of all networks but "resnet".
        batch_norm: frozen batch norm behind the hidden layers of "linear".
        accuracy: of the steps that gradient descent needs.
        mesh: see `Settings`, of "mlp" and "resnet": every device computes its rows of the matrix,
            which are put together on one to be decomposed.
    """

    network: str = "linear"
    samples: int | None = None
    depth: int = 3
    width: int = 100
    skip: float = 0.0
    alpha: float = 0.01
    whiten: bool = True
    batch_norm: bool = False
    accuracy: float = 0.01
    mesh: int | str | None = None


@dataclasses.dataclass(frozen=True)
class Conditioning:
    """A condition number, what bounds it, and what it means for gradient descent.

    Attributes:
        settings: what was asked for.
        description: the same in words.
        condition: with all eigenvalues where the matrix is not too large.
        bounds: name -> bound; empty where none is known (networks that are not linear, but for one
            hidden leaky-ReLU layer).
        generic_rank: the rank for almost all weights, where it is known.
        sensitivity: kappa at every rank; None without all eigenvalues.
        contraction: (kappa - 1)/(kappa + 1), what a step of gradient descent leaves of the slowest
            error at the best rate.
        steps: of gradient descent until the slowest error is down to `settings.accuracy`.
    """

    settings: ConditionSettings
    description: str
    condition: ConditionNumber
    bounds: dict[str, float]
    generic_rank: int | None
    sensitivity: RankSensitivity | None
    contraction: float
    steps: float

    plot, _repr_html_, __repr__ = RESULT

    def to_json(self) -> dict[str, Any]:
        """Plain values; what is not finite becomes None."""
        found = self.condition
        spectrum = None if found.eigenvalues is None else plain_numbers(found.eigenvalues)
        ranks = self.sensitivity and {
            "ranks": self.sensitivity.ranks.tolist(),
            "condition_numbers": plain_numbers(self.sensitivity.values),
        }
        return {
            "condition_number": plain_number(found.value),
            "kind": found.kind,
            "largest": plain_number(found.largest),
            "smallest": plain_number(found.smallest),
            "rank": None if found.rank is None else int(found.rank),
            "generic_rank": self.generic_rank,
            "tolerance": plain_number(found.tolerance),
            "gap": plain_number(found.gap),
            "at_rank_below": plain_number(found.rank_below),
            "at_rank_above": plain_number(found.rank_above),
            "bounds": {name: plain_number(value) for name, value in self.bounds.items()},
            "contraction": plain_number(self.contraction),
            "steps": plain_number(self.steps),
            "eigenvalues": spectrum,
            "rank_sensitivity": ranks,
            "settings": dataclasses.asdict(self.settings),
            "description": self.description,
            "versions": versions(),
        }


def sweep_to_json(result: ConditionSweep) -> dict[str, Any]:
    """A sweep as plain values; what is not finite becomes None."""
    tables = {"condition_number": result.condition, "bound": result.bound}
    if result.maximum is not None:
        tables["maximum_bound"] = result.maximum
    return {
        "parameter": result.parameter,
        "values": list(result.values),
        **{name: [plain_numbers(row) for row in table] for name, table in tables.items()},
    }


def _load(settings: ConditionSettings, *, linear: bool) -> tuple[Dataset, np.ndarray]:
    """The data set, and its chosen inputs (n, d) in float64, whitened where asked for."""
    dataset = load_whole(settings.data, **settings.table_options())
    count = settings.samples
    if count is None:
        count = len(dataset) if linear else min(50, len(dataset))
    check_integer("samples", count, at_least=2, at_most=len(dataset))
    rows = np.random.default_rng(settings.seed).permutation(len(dataset))[:count]
    dataset = dataset.take(np.sort(rows))
    x = np.asarray(dataset.x, np.float64).reshape(count, -1)
    if settings.whiten:
        x = x - x.mean(axis=0)
        x = x @ np.asarray(conditioning.whitening(x.T @ x / count))
    return dataset, x


def refuse_unused(settings: ConditionSettings, sweep: str | None = None) -> None:
    """Raise `ValueError` for settings that were changed and that this network does not have.

    Args:
        settings: what was asked for.
        sweep: the parameter that is swept, if one is.

    Raises:
        ValueError: a setting that nothing would read.
    """
    has = _READ[check_choice("network", settings.network, NETWORKS)]
    others = {name for names in _READ.values() for name in names}.difference(has)
    check_unused(settings, sorted(others), f"network={settings.network!r} has none")
    if sweep is not None:
        check_unused(settings, ("batch_norm",), "a sweep is over networks without it")


def _count_outputs(dataset: Dataset) -> int:
    return dataset.num_classes or dataset.y.shape[1]


def condition(settings: ConditionSettings) -> Conditioning:
    """The condition number of a named network's Gauss-Newton matrix at initialisation.

    Args:
        settings: network, data, sizes.

    Returns:
        A `Conditioning`.

    Raises:
        ValueError: unknown names, sizes out of range, "resnet" on other data than the digits.

    Example:
        >>> found = condition(ConditionSettings(data="wine", width=40))
        >>> float(found.condition.value) <= found.bounds["convex"] <= found.bounds["maximum"]
        True
    """
    check_integer("depth", settings.depth, at_least=1)
    check_integer("width", settings.width, at_least=1)
    mesh_of(settings.mesh)
    build = {"linear": _linear, "leaky_relu": _leaky_relu, "mlp": _mlp, "resnet": _resnet}
    chosen = check_choice("network", settings.network, NETWORKS)
    description, found, bounds, rank = build[chosen](settings)
    kappa = float(found.value)
    contraction, steps = math.nan, math.nan  # a zero matrix has no condition number
    if kappa >= 1:
        contraction = float(conditioning.contraction_rate(kappa))
        steps = float(conditioning.steps_to_accuracy(kappa, settings.accuracy))
    sensitivity = None if found.eigenvalues is None else conditioning.rank_sensitivity(found)
    return Conditioning(settings, description, found, bounds, rank, sensitivity, contraction, steps)


Built = tuple[str, ConditionNumber, dict[str, float], int | None]


def _linear(settings: ConditionSettings) -> Built:
    dataset, x = _load(settings, linear=True)
    covariance = x.T @ x / len(x)
    d, k = x.shape[1], _count_outputs(dataset)
    widths = (d, *(settings.width,) * (settings.depth - 1), k)
    weights = conditioning.gaussian_weights(widths, key=jax.random.key(settings.seed))
    scales = conditioning.batch_norm_scales(weights, covariance) if settings.batch_norm else None
    options = {"skip": settings.skip, "scales": scales}
    bounds = conditioning.linear_bound(weights, covariance, **options)
    with limited(len(covariance)):
        values = np.linalg.eigvalsh(covariance)
    data_rank = int(np.sum(values > d * 2.0**-52 * values[-1]))
    rank = conditioning.generic_rank(widths, data_rank)
    if k * d <= DENSE:
        matrix = conditioning.gauss_newton_linear(weights, covariance, **options)
        found = conditioning.condition_number(matrix, rank=rank)
    else:
        operator = conditioning.gauss_newton_linear_operator(weights, covariance, **options)
        found = conditioning.condition_number(operator)
    kind = "residual" if settings.skip else "linear"
    skip = f", skip {settings.skip:g}" if settings.skip else ""
    norm = ", batch norm" if settings.batch_norm else ""
    words = (
        f"{kind} network {'-'.join(map(str, widths))}{skip}{norm} on {_data_in_words(settings, x)}"
    )
    return words, found, {"convex": float(bounds.convex), "maximum": float(bounds.maximum)}, rank


def _data_in_words(settings: ConditionSettings, x: np.ndarray) -> str:
    return (
        f"{len(x)} samples of {Path(settings.data).name}{', whitened' if settings.whiten else ''}"
    )


def _leaky_relu(settings: ConditionSettings) -> Built:
    dataset, x = _load(settings, linear=False)
    d, k, m = x.shape[1], _count_outputs(dataset), settings.width
    v, w = conditioning.gaussian_weights((d, m, k), key=jax.random.key(settings.seed))
    matrix = conditioning.leaky_relu_gram(w, v, x.T, settings.alpha)
    found = conditioning.condition_number(matrix, spectrum=len(matrix) <= DENSE)
    bound = float(conditioning.leaky_relu_bound(w, v, x.T, settings.alpha))
    words = (
        f"leaky ReLU network {d}-{m}-{k}, slope {settings.alpha:g} on {_data_in_words(settings, x)}"
    )
    return words, found, {"eq (11)": bound}, None


def _mlp(settings: ConditionSettings) -> Built:
    dataset, x = _load(settings, linear=False)
    sizes = (x.shape[1], *(settings.width,) * (settings.depth - 1), _count_outputs(dataset))
    model = from_nnx(MLP(sizes, rngs=nnx.Rngs(settings.seed)))
    words = f"ReLU MLP {'-'.join(map(str, sizes))} on {_data_in_words(settings, x)}"
    return words, network_condition(*model, x, mesh=mesh_of(settings.mesh)), {}, None


def _resnet(settings: ConditionSettings) -> Built:
    if settings.data != "digits":
        raise ValueError(
            f"network='resnet' is trained for the digits; got data={settings.data!r}. Choose "
            "network='mlp', or call jaxttp.conditioning.curvature_matrix on your own network."
        )
    unseen = select(load_dataset("digits"), classes=(5, 6, 7, 8, 9))
    count = check_integer("samples", settings.samples or 50, at_least=2, at_most=len(unseen))
    rows = np.random.default_rng(settings.seed).permutation(len(unseen))[:count]
    key = jax.random.key(settings.seed)
    network = fresh_head(load_pretrained(), 5, key=key)
    mesh = mesh_of(settings.mesh)
    found = network_condition(*from_nnx(network), unseen.take(np.sort(rows)).x, mesh=mesh)
    words = f"ResNet pre-trained on digits 0-4, fresh head, on {count} samples of digits 5-9"
    return words, found, {}, None


def network_condition(
    apply_fn: ApplyFn, params: Params, x: Any, *, mesh: Any = None
) -> ConditionNumber:
    """Kappa of the Gauss-Newton matrix of any network, with its spectrum where that is small.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: its parameters.
        x: samples (N, ...).
        mesh: see `jaxttp.conditioning.curvature_matrix`.

    Returns:
        A `jaxttp.conditioning.ConditionNumber`.

    Raises:
        ValueError: as `jaxttp.conditioning.curvature_matrix`.

    Example:
        >>> found = network_condition(lambda w, x: x @ w, np.ones((2, 1)), np.diag([1.0, 2.0]))
        >>> float(found.value)
        4.0
    """
    matrix = conditioning.curvature_matrix(apply_fn, params, jnp.asarray(x), mesh=mesh)
    return conditioning.condition_number(matrix, spectrum=len(matrix) <= DENSE)


def condition_sweep(
    settings: ConditionSettings,
    parameter: str,
    values: Sequence[Any] | None = None,
    *,
    seeds: int = 3,
) -> ConditionSweep:
    """Kappa and its bound as one parameter varies, all else by the settings.

    Args:
        settings: "linear" for "depth", "width" and "skip"; "leaky_relu" for "alpha" and "width".
        parameter: "depth", "width", "skip" or "alpha".
        values: what it takes; `SWEEP_VALUES` when None.
        seeds: draws of the weights at every value.

    Returns:
        A `jaxttp.conditioning.ConditionSweep`.

    Raises:
        ValueError: an unknown parameter, one that the network does not have, values out of range.

    Example:
        >>> small = ConditionSettings(data="wine", width=30)
        >>> condition_sweep(small, "skip", (0.0, 1.0), seeds=2).condition.shape
        (2, 2)
    """
    check_choice("sweep", parameter, SWEEP_VALUES)
    network = settings.network
    fitting = {"linear": ("depth", "width", "skip"), "leaky_relu": ("width", "alpha")}
    if parameter not in fitting.get(network, ()):
        useful = [name for name, parameters in fitting.items() if parameter in parameters]
        raise ValueError(
            f"sweep={parameter!r} does not fit network={network!r}; choose network "
            f"{' or '.join(map(repr, useful))}."
        )
    linear = network == "linear"
    dataset, x = _load(settings, linear=linear)
    given: dict[str, Any] = {"covariance": x.T @ x / len(x)} if linear else {"data": x.T}
    return conditioning.sweep(
        parameter,
        SWEEP_VALUES[parameter] if values is None else values,
        outputs=_count_outputs(dataset),
        depth=settings.depth,
        width=settings.width,
        skip=settings.skip,
        alpha=settings.alpha,
        batch_norm=settings.batch_norm and linear,
        seeds=seeds,
        key=jax.random.key(settings.seed),
        **given,
    )


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A real training with what was measured along it.

    Attributes:
        run: losses and final weights.
        records: step, loss and measures at the steps that were due.
    """

    run: TrainingRun
    records: tuple[Record, ...]

    plot, _repr_html_, __repr__ = RESULT


def tracked_run(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    measures: dict[str, Callable[[Params], Any]] | None = None,
    every: int = 1,
    **training: Any,
) -> TrackedRun:
    """Train for real and measure condition numbers, bounds or anything else along the way.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: the weights to start from.
        x: samples (N, ...).
        y: labels (N,) or targets (N, C).
        measures: name -> function of the weights; None for "kappa", the condition number of the
            Gauss-Newton matrix on all of `x`.
        every: measure at the steps that are multiples of this.
        training: `loss`, `optimizer`, `steps` and the other keywords of `jaxttp.train`.

    Returns:
        A `TrackedRun`.

    Raises:
        ValueError: as `jaxttp.train` and `Tracker`.

    Example:
        >>> import numpy as np, optax
        >>> found = tracked_run(lambda w, x: x @ w, np.zeros((2, 1)), np.eye(2), np.ones((2, 1)),
        ...                     loss="squared_error", optimizer=optax.sgd(0.5), steps=4, every=2)
        >>> [(record.step, float(record.values["kappa"])) for record in found.records]
        [(0, 1.0), (2, 1.0), (4, 1.0)]

    Source:
        GNC Figures 10 and 18.
    """
    if measures is None:
        measures = {"kappa": lambda weights: network_condition(apply_fn, weights, x).value}
    tracker = Tracker(measures, every=every)
    run = train(apply_fn, params, x, y, callback=tracker, **training)
    return TrackedRun(run, tuple(tracker.records))
