"""How a kernel is computed: exactly, or from a random projection of the Jacobian.

An estimator is a subclass of `KernelEstimator`. Its methods take a `jaxttp.forecast.Problem` and
weights of the trained part.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.checks import check_integer, check_key, check_number
from jaxttp._core.types import Params
from jaxttp.ntk._countsketch import sketch_cost
from jaxttp.ntk._plan import KernelPlan
from jaxttp.ntk.gram import kernel_of, ntk_plan, workload
from jaxttp.ntk.kernels import Factored, Kernel
from jaxttp.ntk.sharded import several
from jaxttp.ntk.sketch import signed_kernel, signed_network, sketch_of

Tiles = Callable[[int, int], None]


class Estimate(NamedTuple):
    """A kernel, and estimates of it without each group of its random columns.

    Attributes:
        kernel: Theta (N, C, N, C), as an array or as its factors.
        parts: kernels without one group each, with mean Theta, one at a time; None where the kernel
            is exact, or a sketch too narrow to estimate its own error.
    """

    kernel: Kernel
    parts: Iterator[Kernel] | None = None


class KernelEstimator(abc.ABC):
    """How Theta is computed at some weights."""

    def estimate(self, problem: Any, weights: Params, progress: Tiles | None = None) -> Estimate:
        """Theta(X, X) at these weights, with a call (tiles done, tiles in all) where it has any."""
        return Estimate(self.between(problem, weights, problem.x, None, progress))

    def cross(self, problem: Any, weights: Params, x: Any) -> Kernel:
        """Theta(x, X) at these weights."""
        return self.between(problem, weights, x, problem.x)

    @abc.abstractmethod
    def between(
        self, problem: Any, weights: Params, x1: Any, x2: Any, progress: Tiles | None = None
    ) -> Kernel:
        """Theta(x1, x2) at these weights; x2 is x1 for None."""

    def operations(self, problem: Any) -> float:
        """Estimated floating-point operations of one kernel: those of a full Jacobian and J J^T."""
        return plan_of(problem).flops["jacobian"]

    def passes(self, problem: Any) -> int:
        """Backward passes over all samples that one kernel takes."""
        return problem.classes

    def product(self, problem: Any, share: float = 1.0) -> float:
        """Operations of one product of the kernel with outputs, zero but for a share of samples."""
        return 2.0 * share * problem.f0.size**2


@dataclasses.dataclass(frozen=True)
class Exact(KernelEstimator):
    """The kernel itself, see `empirical_ntk`; K (N, N) where last layers alone train, K ⊗ I_C.

    Attributes:
        batch_size: samples a tile; chosen from `max_bytes` when None.
        max_bytes: bound on the working memory, in bytes; on a mesh that of one device.
        mesh: a `jax.sharding.Mesh` over whose devices the kernel's rows are sharded.

    Raises:
        ValueError: a number out of range.
        TypeError: a mesh that is none.

    Example:
        >>> Exact(max_bytes=10**9)
        Exact(batch_size=None, max_bytes=1000000000, mesh=None)
    """

    batch_size: int | None = None
    max_bytes: int | None = None
    mesh: Any = None

    def __post_init__(self) -> None:
        several(self.mesh)
        if self.batch_size is not None:
            check_integer("kernel_batch_size", self.batch_size, at_least=1)
        if self.max_bytes is not None:
            check_number("max_bytes", self.max_bytes, above=0.0)

    def operations(self, problem: Any) -> float:
        """See `KernelEstimator`."""
        whole, output = _problem_and_output(problem)
        bound = _device_bound(self)
        plan = plan_of(whole, batch_size=self.batch_size, max_bytes=bound, output=output)
        return plan.flops[plan.method]

    def passes(self, problem: Any) -> int:
        """See `KernelEstimator`; last layers alone are not differentiated."""
        return 1 if problem.is_repeated else super().passes(problem)

    def product(self, problem: Any, share: float = 1.0) -> float:
        """See `KernelEstimator`."""
        whole = super().product(problem, share)
        return whole / problem.classes if problem.is_repeated else whole

    def between(
        self, problem: Any, weights: Params, x1: Any, x2: Any, progress: Tiles | None = None
    ) -> Kernel:
        """See `KernelEstimator`."""
        whole, output = _problem_and_output(problem)
        return kernel_of(
            whole.apply_fn, problem.restore(weights), x1, x2, trainable=problem.trainable,
            output=output, batch_size=self.batch_size, max_bytes=self.max_bytes, progress=progress,
            mesh=self.mesh,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Sketched(KernelEstimator):
    """S S^T of one random projection S of the Jacobian for all weights, see `sketch_jacobian`.

    Attributes:
        sketch_dim: width of the projection; the error falls as 1/sqrt(sketch_dim).
        key: a `jax.random.key`.
        batch_size: samples whose rows of the Jacobian are held at once.
        mesh: a `jax.sharding.Mesh` over whose devices the rows of S are sharded.
        factored: whether the kernel is never formed, see `Factored`; None for where S is narrower
            than half of it, and on a mesh.

    Raises:
        ValueError: a number out of range, or no key.
        TypeError: a mesh that is none.

    Example:
        >>> import jax
        >>> Sketched(4096, jax.random.key(0)).sketch_dim
        4096
    """

    sketch_dim: int
    key: Array | None
    batch_size: int | None = None
    mesh: Any = None
    factored: bool | None = None

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
        several(self.mesh)

    def estimate(self, problem: Any, weights: Params, progress: Tiles | None = None) -> Estimate:
        """See `KernelEstimator`."""
        sketch = self._project(problem, weights, problem.x)
        is_factored = self._is_factored(problem)
        parts = delete_groups(sketch, is_factored) if sketch.shape[-1] > 1 else None
        kernel = Factored.of(sketch, sketch)
        return Estimate(kernel if is_factored else kernel.dense(), parts)

    def between(
        self, problem: Any, weights: Params, x1: Any, x2: Any, progress: Tiles | None = None
    ) -> Kernel:
        """See `KernelEstimator`."""
        kernel = self.factors(problem, weights, x1, x2)
        return kernel if self._is_factored(problem) else kernel.dense()

    def factors(
        self, problem: Any, weights: Params, x1: Any, x2: Any, diagonal: Params | None = None
    ) -> Factored:
        """J(x1) diag(q) J(x2)^T at these weights; x2 is x1 for None, and q is 1 for None."""
        rows = self._project(problem, weights, x1, diagonal)
        columns = rows if x2 is None else self._project(problem, weights, x2, diagonal)
        return Factored.of(rows, columns)

    def operations(self, problem: Any, *, is_scaled: bool = False) -> float:
        """See `KernelEstimator`: C backward passes a sample, and the product of the sketches."""
        work = workload(problem.apply_fn, problem.params, problem.x, problem.trainable)
        rows = problem.f0.shape[0] * sketch_cost(work, self.sketch_dim, is_scaled=is_scaled)
        formed = 0.0 if self._is_factored(problem) else 2.0 * problem.f0.size**2
        return rows + formed * self.sketch_dim

    def product(self, problem: Any, share: float = 1.0) -> float:
        """See `KernelEstimator`."""
        if not self._is_factored(problem):
            return super().product(problem, share)
        # Outputs of the other samples come from many steps at once, an eighth of the time.
        others = 0.0 if share == 1 else 0.125
        return (4.0 * share + 2.0 * others) * problem.f0.size * self.sketch_dim

    def _is_factored(self, problem: Any) -> bool:
        if self.factored is not None:
            return self.factored
        return several(self.mesh) is not None or 2 * self.sketch_dim < problem.f0.size

    def _project(
        self, problem: Any, weights: Params, x: Any, diagonal: Params | None = None
    ) -> Array:
        assert self.key is not None  # checked when it was made
        if diagonal is not None:
            diagonal = problem.restore(diagonal)
        return sketch_of(
            problem.apply_fn, problem.restore(weights), x, key=jax.random.fold_in(self.key, 1),
            dim=self.sketch_dim, trainable=problem.trainable, batch_size=self.batch_size,
            mesh=self.mesh, diagonal=diagonal,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class ClassSketched(KernelEstimator):
    """K ⊗ I_C with K the kernel of the outputs' sum under random signs, see `class_sketch`.

    One backward pass a sample in place of C, and C^2 times fewer numbers, for networks of
    hundreds of classes. It has no entries between different classes. That is exact for a last layer
    with separate weights for every class, and an approximation for the layers before it. Forecasts
    with rebuilt kernels correct it by evaluating the network; those with one kernel do not.

    Attributes:
        key: a `jax.random.key`.
        batch_size: see `empirical_ntk`.
        max_bytes: see there.
        mesh: see there.

    Raises:
        ValueError: a number out of range, or no key.
        TypeError: a mesh that is none.

    Example:
        >>> import jax
        >>> ClassSketched(jax.random.key(0), batch_size=8).batch_size
        8
    """

    key: Array
    batch_size: int | None = None
    max_bytes: int | None = None
    mesh: Any = None

    def __post_init__(self) -> None:
        check_key(self.key)
        Exact(self.batch_size, self.max_bytes, self.mesh)  # raises for values out of range

    def operations(self, problem: Any) -> float:
        """See `KernelEstimator`: exact kernels of a network with one output."""
        signed, pair, mask = signed_network(
            problem.apply_fn, problem.params, problem.x, key=None, trainable=problem.trainable
        )
        plan = ntk_plan(
            signed, pair, problem.x, output="trace", trainable=mask, batch_size=self.batch_size,
            max_bytes=_device_bound(self),
        )  # fmt: skip
        return plan.flops[plan.method]

    def passes(self, problem: Any) -> int:
        """See `KernelEstimator`."""
        return 1

    def product(self, problem: Any, share: float = 1.0) -> float:
        """See `KernelEstimator`."""
        return super().product(problem, share) / problem.classes

    def between(
        self, problem: Any, weights: Params, x1: Any, x2: Any, progress: Tiles | None = None
    ) -> Kernel:
        """See `KernelEstimator`."""
        (key,) = jax.random.split(self.key, 1)
        return signed_kernel(
            problem.apply_fn, problem.restore(weights), x1, x2, key=key,
            trainable=problem.trainable, batch_size=self.batch_size, max_bytes=self.max_bytes,
            progress=progress, mesh=self.mesh,
        )  # fmt: skip


def plan_of(problem: Any, **options: Any) -> KernelPlan:
    """The plan of a problem's exact kernel; only shapes are looked at."""
    return ntk_plan(
        problem.apply_fn, problem.params, problem.x, trainable=problem.trainable, **options
    )


def _problem_and_output(problem: Any) -> tuple[Any, str]:
    """The problem whose kernel is computed, and which output of `empirical_ntk` that is.

    Outputs and centered logits have the same K in K ⊗ I, with I of different sizes.
    """
    return (problem.whole or problem, "trace") if problem.is_repeated else (problem, "full")


def _device_bound(kernel: Exact | ClassSketched) -> int | None:
    """The bound of a kernel on one device; on a mesh no device has all of it."""
    return kernel.max_bytes if several(kernel.mesh) is None else None


def delete_groups(
    sketch: Float[Array, "n c k"], is_factored: bool | None = None, groups: int = 4
) -> Iterator[Kernel]:
    """Kernels from all columns of a sketch but those of one group, for every group.

    Args:
        sketch: S with E[S S^T] = Theta, columns alike (N, C, k).
        is_factored: whether they are kept as factors; None for where these are cheaper.
        groups: how many.

    Yields:
        k / (k - k_j) (S S^T - S_j S_j^T), each with mean Theta, (N, C, N, C), one at a time.

    Example:
        >>> import jax.numpy as jnp
        >>> [round(kernel.item(), 6) for kernel in delete_groups(jnp.ones((1, 1, 8)))]
        [8.0, 8.0, 8.0, 8.0]
    """
    width = sketch.shape[-1]
    if is_factored is None:
        is_factored = 2 * width < sketch.shape[0] * sketch.shape[1]
    for group in np.array_split(np.arange(width), min(groups, width)):
        columns = np.setdiff1d(np.arange(width), group)
        kept = sketch[..., columns]
        kernel = Factored.of(kept * (width / max(1, len(columns))), kept)
        yield kernel if is_factored else kernel.dense()
