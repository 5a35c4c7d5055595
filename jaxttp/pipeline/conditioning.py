"""Conditioning composed: from the names of a network and of data to one frozen result."""

import dataclasses
import math
from collections.abc import Sequence
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
from jaxttp._core.xla_cpu.threads import limited
from jaxttp.adapters import from_nnx
from jaxttp.conditioning import ConditionNumber, ConditionSweep, RankSensitivity
from jaxttp.data import Dataset, load_whole
from jaxttp.models import MLP
from jaxttp.ntk.sharded import mesh_of
from jaxttp.pipeline.settings import DataSettings, check_unused

SWEEP_VALUES: dict[str, tuple] = {
    "depth": (1, 2, 3, 4, 6, 8),
    "width": (20, 50, 100, 200, 400),
    "skip": (0.0, 0.1, 0.25, 0.5, 1.0),
    "alpha": (0.0, 0.01, 0.1, 0.25, 0.5, 1.0),
}
"""What a varied parameter takes if nothing else is asked for."""

NETWORKS: dict[str, tuple[str, ...]] = {
    "linear": ("depth", "width", "skip", "batch_norm"),
    "leaky_relu": ("width", "alpha"),
    "mlp": ("depth", "width", "mesh"),
}
"""Networks, and the settings that not all of them have."""
DENSE = 3000
"""Matrices up to so many rows get all their eigenvalues, for the spectrum and the ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConditionSettings(DataSettings):
    """Which network, on which data, by names and numbers.

    Attributes:
        network: "linear" (deep linear, or residual with `skip`), "leaky_relu" (one hidden layer) or
            "mlp" (ReLU).
        samples: drawn at random; None for all of a linear network and 50 of the others, whose
            matrix has samples times outputs rows.
        depth: weight matrices of "linear" and "mlp".
        width: hidden units.
        skip: beta of W + beta I on every layer of "linear".
        alpha: negative slope of "leaky_relu".
        whiten: center and whiten the inputs.
        batch_norm: frozen batch norm behind the hidden layers of "linear".
        accuracy: of the steps that gradient descent needs.
        mesh: see `Settings`, of "mlp": every device computes its rows of the matrix,
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

    def __post_init__(self) -> None:
        super().__post_init__()
        own = NETWORKS[check_choice("network", self.network, NETWORKS)]
        unused = sorted({name for names in NETWORKS.values() for name in names}.difference(own))
        check_unused(self, unused, f"network={self.network!r} has none")
        check_integer("depth", self.depth, at_least=1)
        check_integer("width", self.width, at_least=1)
        mesh_of(self.mesh)


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
        kappa, ranks = self.condition, self.sensitivity
        numbers = {
            "condition_number": kappa.value, "largest": kappa.largest, "smallest": kappa.smallest,
            "tolerance": kappa.tolerance, "gap": kappa.gap, "at_rank_below": kappa.rank_below,
            "at_rank_above": kappa.rank_above, "contraction": self.contraction, "steps": self.steps,
        }  # fmt: skip
        return {
            **{name: plain_number(value) for name, value in numbers.items()},
            "kind": kappa.kind,
            "rank": None if kappa.rank is None else int(kappa.rank),
            "generic_rank": self.generic_rank,
            "bounds": {name: plain_number(value) for name, value in self.bounds.items()},
            "eigenvalues": None if ranks is None else plain_numbers(kappa.eigenvalues),
            "rank_sensitivity": ranks and {
                "ranks": ranks.ranks.tolist(), "condition_numbers": plain_numbers(ranks.values)
            },
            "settings": dataclasses.asdict(self.settings),
            "description": self.description,
            "versions": versions(),
        }  # fmt: skip


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
    dataset = load_whole(settings.data, label=settings.label)
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


def _count_outputs(dataset: Dataset) -> int:
    return dataset.num_classes or dataset.y.shape[1]


def condition(settings: ConditionSettings) -> Conditioning:
    """The condition number of a named network's Gauss-Newton matrix at initialisation.

    Args:
        settings: network, data, sizes.

    Returns:
        A `Conditioning`.

    Raises:
        ValueError: unknown names, sizes out of range.

    Example:
        >>> result = condition(ConditionSettings(data="wine", width=40))
        >>> float(result.condition.value) <= result.bounds["convex"] <= result.bounds["maximum"]
        True
    """
    build = {"linear": _linear, "leaky_relu": _leaky_relu, "mlp": _mlp}
    description, number, bounds, rank = build[settings.network](settings)
    kappa = float(number.value)
    # A zero matrix has no condition number; a lower bound gives no rate.
    contraction, steps = math.nan, math.nan
    if kappa >= 1 and not number.is_lower_bound:
        contraction = float(conditioning.contraction_rate(kappa))
        steps = float(conditioning.steps_to_accuracy(kappa, settings.accuracy))
    ranks = None if number.eigenvalues is None else conditioning.rank_sensitivity(number)
    return Conditioning(settings, description, number, bounds, rank, ranks, contraction, steps)


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
        number = conditioning.condition_number(matrix, rank=rank)
    else:
        operator = conditioning.gauss_newton_linear_operator(weights, covariance, **options)
        number = conditioning.condition_number(operator)
    kind = f"residual network, skip {settings.skip:g}," if settings.skip else "linear network"
    label = _label(settings, kind, widths, ", batch norm," if settings.batch_norm else "", x)
    return label, number, {"convex": float(bounds.convex), "maximum": float(bounds.maximum)}, rank


def _label(
    settings: ConditionSettings, kind: str, widths: Sequence[int], extra: str, x: np.ndarray
) -> str:
    data = f"{len(x)} samples of {Path(settings.data).name}"
    data += ", whitened" if settings.whiten else ""
    return f"{kind} {'-'.join(map(str, widths))}{extra} on {data}"


def _leaky_relu(settings: ConditionSettings) -> Built:
    dataset, x = _load(settings, linear=False)
    d, k, m = x.shape[1], _count_outputs(dataset), settings.width
    v, w = conditioning.gaussian_weights((d, m, k), key=jax.random.key(settings.seed))
    matrix = conditioning.leaky_relu_gram(w, v, x.T, settings.alpha)
    number = conditioning.condition_number(matrix, spectrum=len(matrix) <= DENSE)
    bound = float(conditioning.leaky_relu_bound(w, v, x.T, settings.alpha))
    label = _label(settings, "leaky ReLU network", (d, m, k), f", slope {settings.alpha:g}", x)
    return label, number, {"eq (11)": bound}, None


def _mlp(settings: ConditionSettings) -> Built:
    dataset, x = _load(settings, linear=False)
    sizes = (x.shape[1], *(settings.width,) * (settings.depth - 1), _count_outputs(dataset))
    model = from_nnx(MLP(sizes, rngs=nnx.Rngs(settings.seed)))
    matrix = conditioning.curvature_matrix(*model, jnp.asarray(x), mesh=mesh_of(settings.mesh))
    number = conditioning.condition_number(matrix, spectrum=len(matrix) <= DENSE)
    return _label(settings, "ReLU MLP", sizes, "", x), number, {}, None


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
    linear = check_choice("network", settings.network, ("linear", "leaky_relu")) == "linear"
    dataset, x = _load(settings, linear=linear)
    data: dict[str, Any] = {"covariance": x.T @ x / len(x)} if linear else {"data": x.T}
    values = SWEEP_VALUES[parameter] if values is None else values
    options = settings.pick("depth", "width", "skip", "alpha", "batch_norm")
    return conditioning.sweep(
        parameter, values, outputs=_count_outputs(dataset), seeds=seeds,
        key=jax.random.key(settings.seed), **options, **data,
    )  # fmt: skip
