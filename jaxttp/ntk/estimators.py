"""How a kernel comes about: exactly, or from a random projection of the Jacobian.

An estimator is a value with two methods; a new one is one more class here. What it is asked about
is a `jaxttp.forecast.Problem` (its `apply_fn`, `restore`, `trainable` and `x` are read) at some
weights of the trained part.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxttp._checks import check_integer, check_key, check_number
from jaxttp._types import Params
from jaxttp.ntk._plan import KernelPlan
from jaxttp.ntk.gram import empirical_ntk, ntk_plan
from jaxttp.ntk.sketch import sketch_jacobian, sketch_product

GROUPS = 4
"""Parts of a sketch that its error is told from."""
Tiles = Callable[[int, int], None]


class Estimate(NamedTuple):
    """A kernel, and what it would be without each part of the data that it was estimated from.

    Attributes:
        kernel: Theta (N, C, N, C).
        parts: kernels that lack a part, each with mean Theta, one at a time; None where the kernel
            is exact, or too narrow a sketch to tell its own error.
    """

    kernel: Float[Array, "n c n c"]
    parts: Iterator[Array] | None = None


class KernelEstimator(abc.ABC):
    """How Theta is found at some weights; `Exact` and `Sketched` are two ways."""

    @abc.abstractmethod
    def estimate(self, problem: Any, weights: Params, progress: Tiles | None = None) -> Estimate:
        """Theta(X, X) at these weights, with a call (tiles done, tiles in all) where it has any."""

    @abc.abstractmethod
    def cross(self, problem: Any, weights: Params, x: Any) -> Float[Array, "m c n c"]:
        """Theta(x, X) at these weights."""

    def operations(self, problem: Any) -> float:
        """Estimated floating-point operations of one kernel: those of a full Jacobian and J J^T."""
        return plan_of(problem).flops["jacobian"]


@dataclasses.dataclass(frozen=True)
class Exact(KernelEstimator):
    """The kernel itself, see `empirical_ntk`.

    Attributes:
        batch_size: samples a tile; chosen from `max_bytes` when None.
        max_bytes: bound on the working memory, in bytes.

    Raises:
        ValueError: a number out of range.

    Example:
        >>> Exact(max_bytes=10**9)
        Exact(batch_size=None, max_bytes=1000000000)
    """

    batch_size: int | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            check_integer("kernel_batch_size", self.batch_size, at_least=1)
        if self.max_bytes is not None:
            check_number("max_bytes", self.max_bytes, above=0.0)

    def estimate(self, problem: Any, weights: Params, progress: Tiles | None = None) -> Estimate:
        """See `KernelEstimator`."""
        return Estimate(self._between(problem, weights, problem.x, None, progress))

    def cross(self, problem: Any, weights: Params, x: Any) -> Float[Array, "m c n c"]:
        """See `KernelEstimator`."""
        return self._between(problem, weights, x, problem.x, None)

    def operations(self, problem: Any) -> float:
        """See `KernelEstimator`."""
        plan = plan_of(problem, batch_size=self.batch_size, max_bytes=self.max_bytes)
        return plan.flops[plan.method]

    def _between(
        self, problem: Any, weights: Params, x1: Any, x2: Any, progress: Tiles | None
    ) -> Array:
        return empirical_ntk(
            problem.apply_fn, problem.restore(weights), x1, x2, trainable=problem.trainable,
            batch_size=self.batch_size, max_bytes=self.max_bytes, progress=progress,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Sketched(KernelEstimator):
    """S S^T of one random projection S of the Jacobian for all weights, see `sketch_jacobian`.

    Attributes:
        sketch_dim: width of the projection; the error falls as 1/sqrt(sketch_dim).
        key: a `jax.random.key`.
        batch_size: samples whose rows of the Jacobian are held at once.

    Raises:
        ValueError: a number out of range, or no key.

    Example:
        >>> import jax
        >>> Sketched(4096, jax.random.key(0)).sketch_dim
        4096
    """

    sketch_dim: int
    key: Array | None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        check_integer("sketch_dim", self.sketch_dim, at_least=1)
        if self.key is None:
            raise ValueError(
                f"sketch_dim={self.sketch_dim} needs key: the projection is drawn at random; pass "
                "key=jax.random.key(0)."
            )
        check_key(self.key)
        if self.batch_size is not None:
            check_integer("kernel_batch_size", self.batch_size, at_least=1)

    def estimate(self, problem: Any, weights: Params, progress: Tiles | None = None) -> Estimate:
        """See `KernelEstimator`."""
        sketch = self._project(problem, weights, problem.x)
        parts = delete_groups(sketch) if sketch.shape[-1] > 1 else None
        return Estimate(sketch_product(sketch, sketch), parts)

    def cross(self, problem: Any, weights: Params, x: Any) -> Float[Array, "m c n c"]:
        """See `KernelEstimator`."""
        rows, columns = (self._project(problem, weights, some) for some in (x, problem.x))
        return sketch_product(rows, columns)

    def operations(self, problem: Any) -> float:
        """See `KernelEstimator`: C ways back a sample, and the product of the projections."""
        n, c = problem.f0.shape
        size = sum(leaf.size for leaf in jax.tree.leaves(problem.weights))
        rows = n * plan_of(problem).forward * (1 + 2 * c) + n * c * size
        return rows + 2.0 * (n * c) ** 2 * self.sketch_dim

    def _project(self, problem: Any, weights: Params, x: Any) -> Array:
        assert self.key is not None  # checked when it was made
        return sketch_jacobian(
            problem.apply_fn, problem.restore(weights), x, key=jax.random.fold_in(self.key, 1),
            dim=self.sketch_dim, trainable=problem.trainable, batch_size=self.batch_size,
        )  # fmt: skip


def plan_of(problem: Any, **options: Any) -> KernelPlan:
    """The plan of a problem's exact kernel; only shapes are looked at."""
    return ntk_plan(
        problem.apply_fn, problem.params, problem.x, trainable=problem.trainable, **options
    )


def delete_groups(sketch: Float[Array, "n c k"]) -> Iterator[Float[Array, "n c n c"]]:
    """Kernels from all columns of a sketch but those of one group, for every group.

    Args:
        sketch: S with E[S S^T] = Theta, columns alike (N, C, k).

    Yields:
        k / (k - k_j) (S S^T - S_j S_j^T), each with mean Theta, (N, C, N, C), one at a time.

    Example:
        >>> import jax.numpy as jnp
        >>> [kernel.item() for kernel in delete_groups(jnp.ones((1, 1, 8)))]
        [8.0, 8.0, 8.0, 8.0]
    """
    width = sketch.shape[-1]
    parts = np.array_split(np.arange(width), min(GROUPS, width))
    for part in parts:
        k = np.setdiff1d(np.arange(width), part)
        yield sketch_product(sketch[..., k], sketch[..., k]) * (width / max(1, len(k)))
