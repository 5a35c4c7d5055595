"""The interface of dynamics: the kernels they use, the path they return, and four methods.

A dynamics is a value. It refuses a training that it cannot follow before a kernel exists (`check`),
computes the path (`follow`), compares rates with their limits (`rates`), and gives reliability
warnings (`doubt`). A new one is one class in a file of its own; see CONTRIBUTING.
"""

import abc
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.checks import check_instance
from jaxttp._core.compile import full_precision
from jaxttp._core.types import Params, Progress
from jaxttp.dynamics._kernels import block_of
from jaxttp.dynamics._network import compile_network
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.dynamics.optimizers import HeavyBall
from jaxttp.dynamics.recursion import recursion
from jaxttp.dynamics.stability import curvature_limits, curvature_modes
from jaxttp.forecast.problem import Problem, loss_and_error
from jaxttp.forecast.stability import Rates, constant_rate, optimizer_rates, rises
from jaxttp.forecast.training_setup import Descent
from jaxttp.losses import Loss
from jaxttp.losses.centered_logits import centered_logits
from jaxttp.losses.rule import Rule
from jaxttp.ntk.estimators import Estimate, Exact, KernelEstimator, Sketched
from jaxttp.ntk.kernels import Factored, Kernel


class Linearizer:
    """Linearizations of a problem: kernels, built on demand, the first one kept, and counted.

    Args:
        problem: network and data.
        estimator: how kernels are computed.
        progress: called with (stage, done, total).
        first: the kernel before training, where it is available.
        is_checked: whether a path on one kernel is compared with the network, unless this is linear
            in its trained weights.
    """

    def __init__(
        self,
        problem: Problem,
        estimator: KernelEstimator | None = None,
        progress: Progress | None = None,
        first: Kernel | None = None,
        is_checked: bool = True,
    ) -> None:
        self.problem = problem
        self.estimator = Exact() if estimator is None else estimator
        self.progress = progress
        self.kernels = 0
        self._is_checked = is_checked
        self.rebuilds_cross = True
        self.passes = 0  # through the network, apart from those of kernels and paths
        if first is not None:
            self.__dict__["estimate"] = Estimate(first)

    @property
    def is_checked(self) -> bool:
        """Whether a path on one kernel is compared with the network."""
        is_exact = self.problem.is_linear and isinstance(self.estimator, Exact)
        return self._is_checked and not is_exact  # of a linear network a sketch has errors, too

    def centered(self) -> "Linearizer":
        """Linearizations of the centered logits of these outputs, with counters of their own.

        They share the kernel before training where it was built.
        """
        small, first = self.problem.centered(), self.built
        if first is not None and small is not self.problem:
            first = self._first_centered
        return Linearizer(small, self.estimator, first=first)

    @functools.cached_property
    def _first_centered(self) -> Kernel:
        """The kernel before training of the centered logits, made once for all that share it."""
        return _centered_kernel(self.first)

    def take(
        self, rows: np.ndarray | None = None, unseen: np.ndarray | None = None
    ) -> "Linearizer":
        """Linearizations of some of the samples, with counters of their own and no check.

        Their kernel before training is a block of this one where that was built.

        Args:
            rows: indices of the samples; all of them when None.
            unseen: indices of test samples, used where the kernel was built; their cross kernel is
                that before training and never rebuilt.
        """
        first, problem = self.built, self.problem
        if rows is not None:
            problem = problem.take(rows, None if first is None else unseen)
        if rows is None or first is None:
            return Linearizer(problem, self.estimator, self.progress, first, is_checked=False)
        block = block_of(first, rows, rows)
        part = Linearizer(problem, self.estimator, self.progress, block, is_checked=False)
        if unseen is not None:
            cross = block_of(first, unseen, rows)
            part.__dict__["cross"] = {"kernel_test": cross, "f0_test": problem.f0_test}
            part.rebuilds_cross = False
        return part

    def report(self, stage: str, done: int = 0, total: int = 1) -> None:
        """Report progress."""
        if self.progress is not None:
            self.progress(stage, done, total)

    @functools.cached_property
    def estimate(self) -> Estimate:
        """The kernel before training, and kernels that lack a part of its sketch."""
        self.report("kernel")
        estimate = self._estimate(self.problem.weights)
        self.problem.check_gradients(estimate.kernel)
        self.report("dynamics")
        return estimate

    @property
    def first(self) -> Kernel:
        """Theta before training (N, C, N, C)."""
        return self.estimate.kernel

    @property
    def built(self) -> Kernel | None:
        """Theta before training where it was built; else None."""
        return self.estimate.kernel if "estimate" in self.__dict__ else None

    def at(self, weights: Params) -> Kernel:
        """Theta at these weights of the trained part; the one before training is kept."""
        is_first = weights is self.problem.weights or self.problem.is_linear
        return self.first if is_first else self._estimate(weights).kernel

    def scaled(self, weights: Params, diagonal: Params | None = None, x: Any = None) -> Kernel:
        """J diag(q) J^T at these weights of the trained part.

        Args:
            weights: of the trained part.
            diagonal: q, shaped like them; 1 when None.
            x: samples of the rows; the training samples when None, as of the columns.

        Raises:
            TypeError: the estimator is no sketch.
        """
        check_instance("kernel", self.estimator, Sketched, "jaxttp.ntk.Sketched(1024, key)")
        self.kernels += 1
        samples = (self.problem.x, None) if x is None else (x, self.problem.x)
        kernel = self.estimator.factors(self.problem, weights, *samples, diagonal)  # type: ignore[attr-defined]
        if x is None:
            self.problem.check_gradients(kernel)
        return kernel

    def _estimate(self, weights: Params) -> Estimate:
        self.kernels += 1
        chunks = None if self.progress is None else functools.partial(self.progress, "kernel")
        return self.estimator.estimate(self.problem, weights, chunks)

    @functools.cached_property
    def cross(self) -> dict[str, Any]:
        """The dynamics' arguments for test samples before training; empty without these."""
        if self.problem.x_test is None:
            return {}
        kernel = self._cross(self.problem.weights)
        self.problem.check_gradients(kernel, test=True)
        return {"kernel_test": kernel, "f0_test": self.problem.f0_test}  # type: ignore[dict-item]

    def cross_at(self, weights: Params) -> Kernel:
        """Theta(x_test, x) at these weights of the trained part; that before training is kept."""
        is_first = weights is self.problem.weights or self.problem.is_linear
        is_first = is_first or not self.rebuilds_cross
        return self.cross["kernel_test"] if is_first else self._cross(weights)

    def _cross(self, weights: Params) -> Kernel:
        self.kernels += 1
        return self.estimator.cross(self.problem, weights, self.problem.x_test)

    @functools.cached_property
    def tangents(self) -> dict[str, Array]:
        """J w_0 on the samples and, where there are any, on the test samples (for decay)."""
        problem, weights = self.problem, self.problem.weights
        push = compile_network(problem.network)[2]
        tangents = {"initial_tangent": push(weights, problem.x, weights)}
        if problem.x_test is not None:
            tangents["initial_tangent_test"] = push(weights, problem.x_test, weights)
        return tangents

    @functools.cached_property
    def curvature(self) -> Any:
        """The largest curvature before training."""
        problem = self.problem
        values, *_ = curvature_modes(self.first, problem.f0, problem.targets, problem.loss)
        return np.asarray(values)[0]

    @property
    def limit(self) -> float:
        """The largest stable rate of plain gradient descent."""
        return self.momentum_limit(0.0)

    def momentum_limit(self, momentum: float) -> float:
        """The same with heavy-ball momentum."""
        return largest_rate(self.curvature, momentum)


def largest_rate(curvature: Any, momentum: float) -> float:
    """The rate beyond which heavy-ball descent is not stable, from the largest curvature."""
    huge = np.finfo(curvature.dtype).max
    limit = curvature_limits(HeavyBall(1.0, momentum), 1)[0]
    return float(min(limit / curvature, huge) if curvature > 0 else huge)


def recur(
    linearizer: Linearizer, descent: Descent, kernel: Kernel | None = None, **cross: Any
) -> Trajectory:
    """`recursion` of a training, on `kernel` or the kernel before training."""
    problem, kernel = linearizer.problem, linearizer.first if kernel is None else kernel
    tangents = linearizer.tangents if descent.decays else {}
    return recursion(
        kernel, problem.f0, problem.targets, loss=problem.loss, steps=descent.steps,
        optimizer=descent.stepper, **descent.batches, **tangents, **cross,
    )  # fmt: skip


@full_precision
def _centered_kernel(kernel: Array | Factored) -> Kernel:
    """B^T Theta B, from Theta; one scalar kernel for all outputs stays as it is."""
    if kernel.ndim == 2:
        return kernel
    if isinstance(kernel, Factored):
        rows, columns = (
            jnp.moveaxis(centered_logits(jnp.moveaxis(factor.reshape(n, c, -1), 1, -1)), -1, 1)
            for factor, n, c in zip(
                (kernel.rows, kernel.columns), kernel.shape[::2], kernel.shape[1::2], strict=True
            )
        )
        return Factored.of(rows, columns)
    return jnp.moveaxis(centered_logits(jnp.moveaxis(centered_logits(kernel), 1, -1)), -1, 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Draws:
    """Curves under many draws of the batches.

    Attributes:
        loss: (P, T + 1).
        error: (P, T + 1).
    """

    loss: Float[Array, "p t"]
    error: Float[Array, "p t"]


@dataclasses.dataclass(frozen=True, eq=False)
class Path:
    """A predicted training run, as every dynamics returns it.

    Attributes:
        outputs: (T + 1, N, C), the mean over draws where there are many.
        loss: (T + 1,), with draws their median.
        error: (T + 1,).
        test_loss: on the test samples (T + 1,), or None.
        test_error: the same.
        diverged: whether outputs could not be represented.
        gradient_evaluations: backward passes, without those of kernels.
        products: approximate number of products of a kernel with outputs.
        uncertainty: estimated error of `loss` (T + 1,), or None.
        draws: curves of many draws, or None.
        auxiliary: data for the `doubt` of the dynamics.
        frozen_from: the step whose kernel is frozen from there on, because the path stays beyond
            the edge of stability; None for never.
    """

    outputs: Float[Array, "t n c"]
    loss: Float[Array, " t"]
    error: Float[Array, " t"]
    test_loss: Float[Array, " t"] | None = None
    test_error: Float[Array, " t"] | None = None
    diverged: bool = False
    gradient_evaluations: float = 0
    products: int = 0
    uncertainty: Float[Array, " t"] | None = None
    draws: Draws | None = None
    auxiliary: Any = None
    frozen_from: int | None = None

    @classmethod
    def of(
        cls, linearizer: Linearizer, outputs: Array, test: Array | None = None, **more: Any
    ) -> "Path":
        """The path of these outputs (T, N, C), or of many paths (P, T, N, C)."""
        problem = linearizer.problem
        loss, error = loss_and_error(problem.loss, outputs, problem.targets)
        if test is not None and problem.loss_test is not None and problem.targets_test is not None:
            curves = loss_and_error(problem.loss_test, test, problem.targets_test)
            more |= {"test_loss": curves[0], "test_error": curves[1]}
        whole = jnp.mean(outputs, axis=0) if outputs.ndim == 4 else outputs
        return cls(whole, loss, error, **more)


class Doubt(NamedTuple):
    """A reliability warning of a path.

    Attributes:
        words: a sentence.
        since: the step from which on the error has no estimate; None for never.
    """

    words: str
    since: int | None


class Dynamics(abc.ABC):
    """How outputs move during training; see the module."""

    name: ClassVar[str]
    """Its name in results."""
    kernels: ClassVar[bool] = True
    """Whether it uses kernels, and so has the error of a sketch."""
    by_products: ClassVar[bool] = False
    """Whether it only multiplies by kernels, which may then be sharded over devices."""
    is_judged_by_loss: ClassVar[bool] = False
    """Whether the predicted loss alone decides stability, not the first kernel's limit."""
    is_scaled: ClassVar[bool] = False
    """Whether its kernels are those of a preconditioned network."""
    is_centre: ClassVar[bool] = True
    """Whether it is a single path of the given samples, and can be the centre of another."""

    def check(self, descent: Descent, weights: Params, loss: Loss) -> None:  # noqa: B027
        """Refuse a training that it cannot follow, before anything is computed.

        Args:
            descent: the training.
            weights: the trained weights.
            loss: of the training.

        Raises:
            ValueError: it cannot be followed.
        """

    def view(self, problem: Problem) -> Problem:
        """The problem in centered logits where the method supports them, else in all outputs."""
        return problem.centered() if self.kernels else problem.whole or problem

    @abc.abstractmethod
    def follow(self, linearizer: Linearizer, descent: Descent) -> Path:
        """The path of a training that was checked."""

    def trained_samples(self, problem: Problem) -> int:
        """On how many samples the predicted training runs."""
        return problem.f0.shape[0]

    def rates(self, linearizer: Linearizer, descent: Descent) -> tuple[float, Rates | None]:
        """The largest stable rate, and the rates of all steps with their limits where known."""
        limit = self.limit(linearizer, descent.momentum)
        if descent.learning_rate is not None:
            return limit, constant_rate(descent.learning_rate, limit)
        if not self.kernels:
            return limit, None
        # Of any linear optimizer: the limit at the step that exceeds its own the most.
        assert not isinstance(descent.optimizer, HeavyBall)  # which has a rate
        rates = optimizer_rates(descent.optimizer, descent.steps, 2.0 / limit)
        return (limit if rates is None or not np.isfinite(rates.limit) else rates.limit), rates

    def limit(self, linearizer: Linearizer, momentum: float) -> float:
        """The largest stable rate of gradient descent with this momentum."""
        return linearizer.momentum_limit(momentum)

    def is_stable(self, path: Path, rates: Rates | None, descent: Descent) -> bool:
        """Whether outputs are finite, the loss below twice its start, rates below their limits."""
        below = self.is_judged_by_loss or rates is None or not len(rates.above)
        return below and not path.diverged and not bool(rises(path.loss))

    def doubt(self, path: Path, rule: Rule) -> Doubt | None:
        """A reliability warning, where there is one."""
        return None

    def plain_values(self) -> dict[str, Any]:
        """Its options, for `Prediction.hyperparameters`."""
        return {}


def check_centre(centre: Dynamics) -> None:
    """Refuse a dynamics that cannot be the centre of another one.

    Raises:
        TypeError: no dynamics.
        ValueError: many draws, or more samples.
    """
    check_instance("centre", centre, Dynamics, "Recursion()")
    if not centre.is_centre:
        raise ValueError(
            "centre must be a single path of the given samples, such as Relinearized(); got "
            f"{type(centre).__name__}."
        )
