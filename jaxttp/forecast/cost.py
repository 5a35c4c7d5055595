"""What a forecast costs, counted and not timed, and the truest one within a budget.

Counts are the same on every machine, so that the same call plans the same forecast everywhere. They
are floating-point operations as the traced program has them: products of dense and convolutional
layers at their size, everything else at one a number; a way back through a network at twice a way
forward. What more kernels and wider sketches are worth was measured on tasks that nothing else is
reported of (`experiments/bench/planning.py`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import check_number
from jaxttp.forecast.methods.base import Dynamics
from jaxttp.forecast.methods.linear import Linear, Noisy, Recursion
from jaxttp.forecast.methods.relinearized import MOST, Relinearized
from jaxttp.forecast.methods.scaled import Scaled
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.training_setup import Descent
from jaxttp.forecast.uncertainty import passes_asked
from jaxttp.ntk.estimators import ClassSketched, Exact, KernelEstimator, Sketched, plan_of

STEP = 3.0
"""Ways forward that one on and back counts for."""


@dataclasses.dataclass(frozen=True)
class Price:
    """Estimated operations of a training and of the parts of its forecast.

    Attributes:
        training: all steps of it.
        kernel: one kernel.
        whole_pass: one way forward and back with all samples.
        product: one product of the kernel with outputs.

    Example:
        >>> price = Price(training=3e9, kernel=1e8, whole_pass=1e6, product=1e4)
        >>> price.forecast(kernels=2, passes=10, products=100)
        211000000.0
    """

    training: float
    kernel: float
    whole_pass: float
    product: float

    @classmethod
    def of(
        cls,
        problem: Problem,
        descent: Descent,
        estimator: KernelEstimator,
        samples: int | None = None,
    ) -> "Price":
        """From shapes alone.

        Args:
            problem: network and data.
            descent: the training.
            estimator: how kernels are computed.
            samples: that are trained on; those of the problem when None.
        """
        n = problem.f0.shape[0]
        step = STEP * plan_of(problem.whole or problem).forward
        return cls(
            training=step * (descent.batch_size or samples or n) * descent.steps,
            kernel=estimator.operations(problem),
            whole_pass=step * n,
            product=estimator.product(problem),
        )

    def forecast(self, kernels: int, passes: float, products: int) -> float:
        """The operations of a forecast.

        Args:
            kernels: that it builds.
            passes: ways on and back with all samples beside them.
            products: with its kernels.
        """
        return kernels * self.kernel + passes * self.whole_pass + products * self.product


def fraction_of(operations: float, training: float) -> str:
    """How many trainings some operations are, in words.

    Example:
        >>> fraction_of(1.0, 31.0), fraction_of(1500.0, 1.0), fraction_of(1.4, 1.0)
        ('3.2 % of', '1,500 times', '1.4 times')
    """
    ratio = operations / max(training, 1.0)
    if ratio < 0.95:
        return f"{100 * ratio:.2g} % of"
    return f"{ratio:.2g} times" if ratio < 10 else f"{ratio:,.0f} times"


@dataclasses.dataclass(frozen=True)
class CostModel:
    """What forecasts take, and how far off they are expected to be, in numbers.

    Errors and passes are means over the tasks of `experiments/bench/planning.py`, which nothing
    else is reported of; limits are a choice.

    Attributes:
        fraction: of the training's operations that a forecast may take unless told otherwise.
        least: and so many operations in any case: a minute or two of a laptop.
        memory: bytes that the kernels of a plan may take where another plan takes less.
        widths: of sketches that are looked at.
        per_class: columns of a sketch for each class at least: it follows no more directions than
            it has.
        alike: expected errors that differ by no more times are alike, and the cheaper forecast is
            planned.
        horizons: at which errors were measured.
        rebuilds: kernels after the first at most, with which they were.
        errors: for those the error of a time as a fraction of it, beyond two steps. Over a long way
            one rebuilt kernel is no better than none.
        by_class: the same of class sketches, which the network itself corrects where they are
            rebuilt.
        by_sketch: a sketch of width k makes it 1 + by_sketch/sqrt(k) times as large.
        of_sketch: and adds in square so much over k, which no number of kernels takes away.
        passes: passes through the network besides a kernel that is rebuilt.
        exact_passes: the same beside exact kernels, which leave the network less to correct.
        memories: so many times as many where the optimiser has a memory: a velocity is carried.
        exact_memories: the same beside exact kernels.
        runs: of the horizon with such a kernel.
        parts: runs where larger data are forecast on one kernel: those of the samples, halves too.
        subset_runs: of both halves where kernels are rebuilt, beside those of the path.
        reading: a product with a kernel takes the time of so many times its operations: every
            number of the kernel is read from memory for one multiplication.
    """

    fraction: float = 0.1
    least: float = 4.5e12
    memory: float = 4e9
    widths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    per_class: int = 25
    alike: float = 1.1
    horizons: tuple[int, int] = (150, 600)
    rebuilds: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    errors: tuple[tuple[float, ...], ...] = (
        (0.112, 0.079, 0.025, 0.007, 0.002, 0.001),
        (0.262, 0.255, 0.119, 0.061, 0.020, 0.006),
    )
    by_class: tuple[tuple[float, ...], ...] = (
        (0.125, 0.102, 0.046, 0.020, 0.013, 0.012),
        (0.278, 0.268, 0.167, 0.074, 0.032, 0.014),
    )
    by_sketch: float = 4.0
    of_sketch: tuple[float, float] = (0.6, 4.2)
    passes: float = 3.7
    exact_passes: float = 3.1
    memories: float = 1.3
    exact_memories: float = 1.1
    runs: float = 1.5
    parts: float = 3.5
    subset_runs: float = 6.0
    reading: float = 8.0


MODEL = CostModel()


@dataclasses.dataclass(frozen=True, eq=False)
class ForecastPlan:
    """How to forecast within a budget; prints itself in a line.

    Attributes:
        dynamics: how the path is followed.
        kernel: how kernels are computed.
        operations: that it takes, estimated as if all kernels were built; products with kernels
            and sketches of gradients, which wait for memory, count for as many as take their time.
        error: the expected error of a training time, as a fraction of it.
        training: operations of the training.
        budget: operations that it may take.
        whole: whether nothing was left out: an exact kernel, or the one given, rebuilt as often as
            it takes.
    """

    dynamics: Dynamics
    kernel: KernelEstimator
    operations: float
    error: float
    training: float
    budget: float = math.inf
    whole: bool = True

    def __str__(self) -> str:
        cost, allowed = (fraction_of(n, self.training) for n in (self.operations, self.budget))
        words = f"{_words(self.dynamics, self.kernel)}: at most {cost} the training's FLOPs"
        if isinstance(_center(self.dynamics), Linear):
            words += "; the network is linear in its trained weights, so that it is never rebuilt"
        elif not is_rebuilt(self.dynamics):  # else the forecast estimates its own error
            off = f"{100 * self.error:.0f} %"
            words += f"; on the small tasks this was tuned on times were off by {off} on average"
        if self.operations > self.budget:
            words += f"; nothing fits the budget, {allowed} the training"
        if self.operations > self.training:
            words += "; training itself costs less"
        return words


def check_budget(budget: float | str) -> None:
    """Refuse what is neither "auto" nor a fraction above 0."""
    if budget != "auto":
        check_number("budget", budget, above=0.0, hint="A tenth of the training is 0.1.")


def plan_forecast(
    dynamics: Dynamics,
    problem: Problem,
    descent: Descent,
    kernel: KernelEstimator | None = None,
    *,
    budget: float | str = "auto",
    key: Array | None = None,
) -> ForecastPlan:
    """The forecast with the least expected error within a budget.

    Args:
        dynamics: as asked for. Where it rebuilds kernels as often as it takes, the plan bounds how
            often; every other one stays as it is.
        problem: network and data.
        descent: the training.
        kernel: how kernels are computed; chosen when None: exactly, by a sketch or a class sketch.
        budget: the fraction of the training's operations that the forecast may take, above 0;
            "auto" for a tenth, and no less than 4.5e12 operations, a minute or two of a laptop.
        key: a `jax.random.key` for sketches; ``jax.random.key(0)`` when None.

    Returns:
        A `ForecastPlan`; the cheapest one where nothing fits.

    Raises:
        ValueError: a budget out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> x, network = jnp.eye(6), lambda w, x: jnp.tanh(x @ w)
        >>> problem = Problem.of(network, jnp.zeros((6, 2)), x, jnp.arange(6) % 2)
        >>> plan = plan_forecast(Relinearized(), problem, Descent.of(learning_rate=0.1, steps=50))
        >>> plan.dynamics, plan.kernel
        (Relinearized(rebuilds='auto', tolerance=None, most=16), Exact(batch_size=None, ...))
    """
    check_budget(budget)
    problem = dynamics.view(problem)
    dynamics = suited(dynamics, problem)
    free = is_rebuilt(dynamics) and _center(dynamics).rebuilds == "auto"
    rebuilds = range(MOST, -1, -1) if free else (None,)
    kernels = [kernel] if kernel is not None else _kernels(problem, descent, key)
    samples = dynamics.trained_samples(problem)
    prices = [Price.of(problem, descent, one, samples) for one in kernels]
    plans = [  # the best of all comes first
        _plan(dynamics, problem, descent, price, one, most)
        for one, price in zip(kernels, prices, strict=True)
        for most in rebuilds
    ]
    training = plans[0].training
    if budget == "auto":
        limit = max(MODEL.fraction * training, MODEL.least)
    else:
        limit = float(budget) * training
    chosen = _best(plans, limit)
    whole = chosen.operations <= limit and chosen.error <= plans[0].error
    whole &= kernel is not None or isinstance(chosen.kernel, Exact)
    return dataclasses.replace(chosen, budget=limit, whole=whole)


def _kernels(problem: Problem, descent: Descent, key: Any) -> list[KernelEstimator]:
    """Those that fit into memory, the best first; the one that takes the least where none does.

    Class sketches are for full batches, since how a batch's noise grows depends on the stiffest
    modes, which they know less well; with mini-batches where memory allows nothing else. They take
    all outputs of a sample for alike, which tokens are not.
    """
    if key is None:  # jax.random.key(0), which would compile two functions
        words: Any = np.zeros(2, np.uint32)
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
    widths = [k for k in reversed(MODEL.widths) if MODEL.per_class * problem.classes <= k]
    every = [Exact(), *(Sketched(width, key) for width in widths)]
    fitting = [one for one in every if _bytes(one, problem) <= MODEL.memory]
    is_wanted = descent.batch_size is None or not fitting
    if problem.classes > 1 and not problem.loss.tokens and is_wanted:
        every.append(ClassSketched(key))
        fitting += [one for one in every[-1:] if _bytes(one, problem) <= MODEL.memory]
    return fitting or [min(every, key=lambda one: _bytes(one, problem))]


def _bytes(kernel: KernelEstimator, problem: Problem) -> float:
    """Memory of two kernels and the work on them, in float32."""
    outputs = problem.f0.size
    numbers = outputs * (kernel.sketch_dim if isinstance(kernel, Sketched) else outputs)
    if isinstance(kernel, ClassSketched) or (isinstance(kernel, Exact) and problem.is_repeated):
        numbers = problem.f0.shape[0] ** 2
    return 4.0 * 3 * numbers


def is_rebuilt(dynamics: Dynamics) -> bool:
    """Whether kernels are rebuilt along the mean path."""
    return isinstance(_center(dynamics), Relinearized)


def _center(dynamics: Dynamics) -> Any:
    """The mean path of a dynamics."""
    return dynamics.centre if isinstance(dynamics, Noisy | Scaled) else dynamics


def _plan(
    dynamics: Dynamics,
    problem: Problem,
    descent: Descent,
    price: Price,
    kernel: KernelEstimator,
    most: int | None,
) -> ForecastPlan:
    """What a dynamics takes with these kernels, rebuilt so often; None for as it says itself."""
    is_scaled, is_exact = isinstance(dynamics, Scaled), isinstance(kernel, Exact)
    with_test = 1.0
    if problem.x_test is not None:
        with_test += len(jax.tree.leaves(problem.x_test)[0]) / problem.f0.shape[0]
    if most is None and is_rebuilt(dynamics):
        most = _center(dynamics).rebuilds
    if not most:
        if most == 0:
            first = None if isinstance(dynamics, Noisy) else Recursion()
            dynamics = _with_center(dynamics, first)
        runs = MODEL.parts if is_scaled else 1.0
        passes = 0.0 if problem.is_linear and is_exact else passes_asked(problem.f0.shape[0])
        built, counts = 1, MOST if problem.is_linear else 0
    else:
        built = most + 1
        passes, memories = MODEL.passes, MODEL.memories
        if is_exact:
            passes, memories = MODEL.exact_passes, MODEL.exact_memories
        if not descent.is_plain or descent.momentum:
            passes *= memories
        passes, runs = int(passes * built), MODEL.runs * built + MODEL.subset_runs * is_scaled
        center, counts = _center(dynamics), most
        if center.rebuilds == "auto":
            dynamics = _with_center(dynamics, dataclasses.replace(center, most=most))
    cost = price.forecast(built, passes, int(MODEL.reading * runs * descent.steps))
    error = expected_error(counts, kernel, descent.steps)
    return ForecastPlan(dynamics, kernel, cost * with_test, error, price.training)


def suited(dynamics: Dynamics, problem: Problem) -> Dynamics:
    """The same, without rebuilt kernels where a network is linear in its trained weights."""
    rebuilds = is_rebuilt(dynamics) and problem.is_linear
    return _with_center(dynamics, Linear()) if rebuilds else dynamics


def _with_center(dynamics: Dynamics, center: Any) -> Dynamics:
    is_around = isinstance(dynamics, Noisy | Scaled)
    return dataclasses.replace(dynamics, centre=center) if is_around else center


def expected_error(most: int, kernel: KernelEstimator, steps: int) -> float:
    """By how much of itself a time is off on average.

    Args:
        most: kernels after the first.
        kernel: how kernels are computed.
        steps: of the training; the error grows with their logarithm between those that were
            measured, is that of fewer below, and beyond depends on the kernels a step: four times
            as many steps took four times as many kernels there.

    Example:
        >>> expected_error(16, Exact(), 600) < expected_error(0, Exact(), 600)
        True
    """
    known = MODEL.by_class if isinstance(kernel, ClassSketched) else MODEL.errors
    built = most * min(1.0, MODEL.horizons[-1] / max(steps, 1))
    of_rebuilds = _between([np.interp(built, MODEL.rebuilds, row) for row in known], steps)
    if not isinstance(kernel, Sketched):
        return of_rebuilds
    width = kernel.sketch_dim
    by_width = of_rebuilds * (1 + MODEL.by_sketch / np.sqrt(width))
    return float(np.hypot(by_width, _between(MODEL.of_sketch, steps) / width))


def _between(known: Sequence[float], steps: int) -> float:
    """What is known at two horizons, by the logarithm of the steps between them."""
    return float(np.interp(np.log(max(steps, 1)), np.log(MODEL.horizons), known))


def _best(plans: list[ForecastPlan], limit: float) -> ForecastPlan:
    """The first where it is within the limit; else the cheapest of those about as accurate as any.

    Where none is within the limit, the cheapest of all.
    """
    within = [plan for plan in plans if plan.operations <= limit]
    if not within:
        return min(plans, key=lambda plan: plan.operations)
    if within[0] is plans[0]:
        return within[0]
    least = min(plan.error for plan in within)
    good = [plan for plan in within if plan.error <= MODEL.alike * least]
    return min(good, key=lambda plan: (plan.operations, plan.error))


def _words(dynamics: Dynamics, kernel: KernelEstimator) -> str:
    """A way in words."""
    one, several = "", "kernels"
    if isinstance(kernel, Sketched):
        one, several = (f"{s} of width {kernel.sketch_dim:,}" for s in ("a sketch", "sketches"))
    elif isinstance(kernel, ClassSketched):
        one, several = "a class sketch", "class sketches"
    if not is_rebuilt(dynamics):
        return f"one kernel, {one}" if one else "one kernel"
    center = _center(dynamics)
    often = f"at most {center.most + 1}" if center.rebuilds == "auto" else f"{center.rebuilds + 1}"
    return f"{often} {several}"
