"""What a forecast costs, counted and not timed, and the truest one within a budget.

Counts are the same on every machine, so that the same call plans the same forecast everywhere. They
are floating-point operations as the traced program has them: products of dense and convolutional
layers at their size, everything else at one a number; a way back through a network at twice a way
forward. What more kernels and wider sketches are worth was measured on tasks that nothing else is
reported of (`experiments/bench/planning.py`).
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.checks import check_number
from jaxttp.forecast.methods.base import Dynamics
from jaxttp.forecast.methods.noisy import Noisy
from jaxttp.forecast.methods.recursion import Linear, Recursion
from jaxttp.forecast.methods.relinearized import MOST, Relinearized
from jaxttp.forecast.methods.scaled import Scaled
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.training_setup import Descent
from jaxttp.forecast.witness import passes_asked
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
            estimator: how kernels come about.
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


def share_of(operations: float, training: float) -> str:
    """How many trainings some operations are, in words.

    Example:
        >>> share_of(1.0, 31.0), share_of(1500.0, 1.0), share_of(1.4, 1.0)
        ('1/31 of', '1,500 times', '1.4 times')
    """
    share = operations / max(training, 1.0)
    if share < 0.95:
        return f"1/{1 / share:.2g} of" if share > 0.1 else f"1/{1 / max(share, 1e-12):.0f} of"
    return f"{share:.2g} times" if share < 10 else f"{share:,.0f} times"


SHARE = 0.1
"""Of the training's operations that a forecast may take unless told otherwise."""
LEAST = 4.5e12
"""And so many operations in any case: a minute or two of a laptop."""
MEMORY = 4e9
"""Bytes that the kernels of a plan may take where another plan takes less."""
ERRORS = {
    150: {0: 0.112, 1: 0.079, 2: 0.025, 4: 0.007, 8: 0.002, 16: 0.001},
    600: {0: 0.262, 1: 0.255, 2: 0.119, 4: 0.061, 8: 0.020, 16: 0.006},
}
"""By steps and kernels after the first at most, the error of a time as a share of it, beyond two
steps. Over a long way one rebuilt kernel is no better than none."""
BY_CLASS = {
    150: {0: 0.125, 1: 0.102, 2: 0.046, 4: 0.020, 8: 0.013, 16: 0.012},
    600: {0: 0.278, 1: 0.268, 2: 0.167, 4: 0.074, 8: 0.032, 16: 0.014},
}
"""The same of class sketches, which the network itself corrects where they are rebuilt."""
BY_SKETCH = 4.0
"""A sketch of width k makes it 1 + 4/sqrt(k) times as large."""
OF_SKETCH = {150: 0.6, 600: 4.2}
"""And adds in square so much over k, by steps: no number of kernels takes it away."""
WIDTHS = (256, 512, 1024, 2048, 4096, 8192)
PER_CLASS = 25
"""Columns of a sketch for each class at least: it follows no more directions than it has."""
PASSES, BATCH_PASSES = 3.7, 5.3
"""Ways through the network beside a kernel that is rebuilt; with mini-batches."""
EXACT_PASSES, EXACT_BATCH_PASSES = 3.1, 4.4
"""The same beside exact kernels, which leave the network less to correct."""
MEMORIES, EXACT_MEMORIES = 1.3, 1.1
"""So many times as many where the optimiser has a memory: a velocity is carried along."""
RUNS, BATCH_RUNS = 1.5, 2.5
"""Runs of the horizon with such a kernel; with mini-batches, which cost next to nothing where the
kernel is kept as factors (`jaxttp.dynamics.recursion`)."""
PARTS = 3.5
"""Runs where larger data are forecast on one kernel: the samples', all of them at once, halves'."""
SUBSET_RUNS = 6.0
"""And where its kernels are rebuilt, beside those of the path: of all of them at once and of both
halves, by the kernels at both ends of a segment."""
READING = 8.0
"""A product with a kernel takes the time of so many times its operations: every number of the
kernel is read from memory for one multiplication."""
TRUE = 0.1
"""An expected error of times, as a share of them, with which a forecast is worth its cost."""
ALIKE = 1.1
"""Expected errors that differ by no more times are alike, and the cheaper forecast is planned."""


@dataclasses.dataclass(frozen=True, eq=False)
class ForecastPlan:
    """How to forecast within a budget; prints itself in a line.

    Attributes:
        dynamics: how the path is followed.
        kernel: how kernels come about.
        operations: that it takes, estimated as if all kernels were built; products with kernels
            and sketches of gradients, which wait for memory, count for as many as take their time.
        budget: that it may take.
        training: that the training takes.
        error: the expected error of a training time, as a share of it.
        whole: whether nothing was left out: an exact kernel, or the one given, rebuilt as often as
            it takes.
        more: what twice the budget would buy, in words; empty for nothing.
        needed: operations that times within a tenth of themselves are expected to take, or the
            truest ones where none are.
    """

    dynamics: Dynamics
    kernel: KernelEstimator
    operations: float
    budget: float
    training: float
    error: float
    whole: bool
    more: str = ""
    needed: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether times within a tenth of themselves take no more than the training."""
        return self.needed <= self.training

    def __str__(self) -> str:
        cost, allowed = (share_of(n, self.training) for n in (self.operations, self.budget))
        words = f"{_words(self.dynamics, self.kernel)}: at most {cost} the training by count"
        if isinstance(_centre(self.dynamics), Linear):
            words += "; the network is linear in its trained weights, so that it is never rebuilt"
        elif not is_rebuilt(self.dynamics):  # else the forecast estimates its own error
            off = f"{100 * self.error:.0f} %"
            words += f"; on the small tasks this was tuned on times were off by {off} on average"
        if self.operations > self.budget:
            words += f"; nothing fits the budget, {allowed} the training"
        if self.operations > self.training:
            words += "; training itself costs less"
        elif self.needed > self.budget:
            words += (
                f"; times within a tenth take {share_of(self.needed, self.training)} the training, "
            )
            words += "for which this budget does not pay" if self.pays else "so that none pays"
        return words + (f"; twice the budget buys a truer one, {self.more}" if self.more else "")


def check_budget(budget: float | str) -> None:
    """Refuse what is neither "auto" nor a share above 0."""
    if budget != "auto":
        check_number("budget", budget, above=0.0, remedy="A tenth of the training is 0.1.")


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
        kernel: how kernels come about; chosen when None: exactly, by a sketch or a class sketch.
        budget: the share of the training's operations that the forecast may take, above 0; "auto"
            for a tenth, and no less than 4.5e12 operations, a minute or two of a laptop.
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
    several = list(_candidates(dynamics, problem, descent, kernel, key))
    kernels = {id(one): one for one, _ in several}
    prices = {name: Price.of(problem, descent, one) for name, one in kernels.items()}
    priced = [
        _priced(dynamics, problem, descent, prices[id(one)], one, most) for one, most in several
    ]
    samples = dynamics.trained_samples(problem)
    training = Price.of(problem, descent, priced[0].kernel, samples).training
    share = SHARE if budget == "auto" else float(budget)
    limit = max(share * training, LEAST if budget == "auto" else 0.0)
    chosen, twice = (_best(priced, allowed) for allowed in (limit, 2 * limit))
    whole = chosen.operations <= limit and chosen.error <= priced[0].error
    whole &= kernel is not None or isinstance(chosen.kernel, Exact)
    more = _words(twice.dynamics, twice.kernel) if ALIKE * twice.error < chosen.error else ""
    return ForecastPlan(
        chosen.dynamics,
        chosen.kernel,
        chosen.operations,
        limit,
        training,
        chosen.error,
        whole,
        more,
        _needed(priced),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Priced:
    """A way that is open, what it takes, and how far off it is expected to be."""

    dynamics: Dynamics
    kernel: KernelEstimator
    operations: float
    error: float


def _candidates(
    dynamics: Dynamics,
    problem: Problem,
    descent: Descent,
    kernel: KernelEstimator | None,
    key: Array | None,
) -> Iterator[tuple[KernelEstimator, int | None]]:
    """Kernels and bounds on how often they are rebuilt; the best of all comes first.

    Class sketches are for full batches, since how a batch's noise grows depends on the stiffest
    modes, which they know less well; with mini-batches where memory allows nothing else. They take
    all outputs of a sample for alike, which tokens are not.
    """
    kernels = [kernel] if kernel is not None else _kernels(problem, descent, key)
    free = _centre(dynamics).rebuilds == "auto" if is_rebuilt(dynamics) else False
    most = sorted(range(MOST + 1), reverse=True) if free else [None]
    return itertools.product(kernels, most)


def _kernels(problem: Problem, descent: Descent, key: Array | None) -> list[KernelEstimator]:
    """Those that fit into memory; the one that takes the least of it where none does."""
    key = jax.random.key(0) if key is None else key
    every = of_outputs(problem, key)
    fitting = [one for one in every if fits(one, problem)]
    is_wanted = descent.batch_size is None or not fitting
    if problem.classes > 1 and not problem.loss.tokens and is_wanted:
        every.append(ClassSketched(key))
        fitting += [one for one in every[-1:] if fits(one, problem)]
    return fitting or [min(every, key=lambda one: _bytes(one, problem))]


def of_outputs(problem: Problem, key: Array) -> list[KernelEstimator]:
    """Exact kernels and sketches of all outputs, the best first.

    Args:
        problem: network and data.
        key: a `jax.random.key` for sketches.
    """
    widths = [k for k in reversed(WIDTHS) if PER_CLASS * problem.classes <= k]
    return [Exact(), *(Sketched(width, key) for width in widths)]


def fits(kernel: KernelEstimator, problem: Problem) -> bool:
    """Whether kernels and the work on them fit into the memory of a plan."""
    return _bytes(kernel, problem) <= MEMORY


def _bytes(kernel: KernelEstimator, problem: Problem) -> float:
    """Memory of two kernels and the work on them, in float32."""
    outputs = problem.f0.size
    numbers = outputs * (kernel.sketch_dim if isinstance(kernel, Sketched) else outputs)
    if isinstance(kernel, ClassSketched) or (isinstance(kernel, Exact) and problem.is_repeated):
        numbers = problem.f0.shape[0] ** 2
    return 4.0 * 3 * numbers


def is_rebuilt(dynamics: Dynamics) -> bool:
    """Whether kernels are rebuilt along the mean path."""
    return isinstance(_centre(dynamics), Relinearized)


def _centre(dynamics: Dynamics) -> Any:
    """The mean path of a dynamics."""
    return dynamics.centre if isinstance(dynamics, Noisy | Scaled) else dynamics


def _priced(
    dynamics: Dynamics,
    problem: Problem,
    descent: Descent,
    price: Price,
    kernel: KernelEstimator,
    most: int | None,
) -> _Priced:
    beside, is_scaled = 1.0, isinstance(dynamics, Scaled)
    if problem.x_test is not None:
        beside += len(jax.tree.leaves(problem.x_test)[0]) / problem.f0.shape[0]
    if most is None and is_rebuilt(dynamics):
        most = _centre(dynamics).rebuilds
    if not most:
        one_kernel = on_one_kernel(dynamics) if most == 0 else dynamics
        products = int(READING * descent.steps * (PARTS if is_scaled else 1.0))
        is_known = problem.is_linear and isinstance(kernel, Exact)
        passes = 0.0 if is_known else passes_asked(problem.f0.shape[0])
        cost = price.forecast(1, passes, products)
        error = expected_error(MOST if problem.is_linear else 0, kernel, descent.steps)
        return _Priced(one_kernel, kernel, cost * beside, error)
    batches = descent.batch_size is not None and not isinstance(dynamics, Noisy)
    passes, memories = (BATCH_PASSES if batches else PASSES), MEMORIES
    if isinstance(kernel, Exact):
        passes = EXACT_BATCH_PASSES if batches else EXACT_PASSES
        memories = EXACT_MEMORIES
    runs = BATCH_RUNS if batches and not isinstance(kernel, Sketched) else RUNS
    built = most + 1
    runs, passes = runs * built + SUBSET_RUNS * is_scaled, passes * built
    if not descent.is_plain or descent.momentum:
        passes = memories * passes
    cost = price.forecast(built, int(passes), int(READING * runs * descent.steps)) * beside
    bounded = dynamics
    if _centre(dynamics).rebuilds == "auto":
        bounded = _with_centre(dynamics, dataclasses.replace(_centre(dynamics), most=most))
    return _Priced(bounded, kernel, cost, expected_error(most, kernel, descent.steps))


def suited(dynamics: Dynamics, problem: Problem) -> Dynamics:
    """The same, without rebuilt kernels where a network is linear in its trained weights."""
    rebuilds = is_rebuilt(dynamics) and problem.is_linear
    return _with_centre(dynamics, Linear()) if rebuilds else dynamics


def on_one_kernel(dynamics: Dynamics) -> Dynamics:
    """The same on the first kernel alone."""
    if isinstance(dynamics, Noisy):
        return dataclasses.replace(dynamics, centre=None)
    return _with_centre(dynamics, Recursion())


def _with_centre(dynamics: Dynamics, centre: Relinearized | Recursion) -> Dynamics:
    is_around = isinstance(dynamics, Noisy | Scaled)
    return dataclasses.replace(dynamics, centre=centre) if is_around else centre


def expected_error(most: int, kernel: KernelEstimator, steps: int) -> float:
    """By how much of itself a time is off on average.

    Args:
        most: kernels after the first.
        kernel: how they come about.
        steps: of the training; the error grows with their logarithm between those that were
            measured, is that of fewer below, and beyond depends on the kernels a step: four times
            as many steps took four times as many kernels there.

    Example:
        >>> expected_error(16, Exact(), 600) < expected_error(0, Exact(), 600)
        True
    """
    known = BY_CLASS if isinstance(kernel, ClassSketched) else ERRORS
    built = most * min(1.0, max(known) / max(steps, 1))
    each = [np.interp(built, list(row), list(row.values())) for row in known.values()]
    of_rebuilds = _between(dict(zip(known, each, strict=True)), steps)
    if not isinstance(kernel, Sketched):
        return of_rebuilds
    width = kernel.sketch_dim
    by_width = of_rebuilds * (1 + BY_SKETCH / np.sqrt(width))
    return float(np.hypot(by_width, _between(OF_SKETCH, steps) / width))


def _between(known: Mapping[int, float], steps: int) -> float:
    """What is known at some horizons, by the logarithm of the steps between them."""
    at = np.log([max(steps, 1), *known])
    return float(np.interp(at[0], at[1:], list(known.values())))


def _best(several: list[_Priced], limit: float) -> _Priced:
    """The first where it is within the limit; else the cheapest of those about as true as any.

    Where none is within the limit, the cheapest of all.
    """
    within = [one for one in several if one.operations <= limit]
    if not within:
        return min(several, key=lambda one: one.operations)
    if within[0] is several[0]:
        return within[0]
    least = min(one.error for one in within)
    good = [one for one in within if one.error <= ALIKE * least]
    return min(good, key=lambda one: (one.operations, one.error))


def _needed(several: list[_Priced]) -> float:
    """The least operations with which times are off by no more than `TRUE`, or as little as can."""
    least = min(one.error for one in several)
    return min(one.operations for one in several if one.error <= max(TRUE, least))


def _words(dynamics: Dynamics, kernel: KernelEstimator) -> str:
    """A way in words."""
    one, several = "", "kernels"
    if isinstance(kernel, Sketched):
        one, several = (f"{s} of width {kernel.sketch_dim:,}" for s in ("a sketch", "sketches"))
    elif isinstance(kernel, ClassSketched):
        one, several = "a class sketch", "class sketches"
    if not is_rebuilt(dynamics):
        return f"one kernel, {one}" if one else "one kernel"
    centre = _centre(dynamics)
    often = f"at most {centre.most + 1}" if centre.rebuilds == "auto" else f"{centre.rebuilds + 1}"
    return f"{often} {several}"


JUMP = 0.05
"""A predicted loss that rises by more than this share of its drop is given up."""


def jump_of(loss: Float[Array | np.ndarray, " t"]) -> float:
    """By how much a curve rises above its least value so far, at most, as a share of its drop.

    Example:
        >>> round(jump_of(np.array([1.0, 0.5, 0.7, 0.2])), 6)
        0.25
    """
    curve = np.asarray(loss, np.float64)
    drop = float(curve[0] - curve.min())
    rise = float(np.max(curve - np.minimum.accumulate(curve)))
    return rise / drop if drop > 0 else 0.0


def plan_again(
    plan: ForecastPlan,
    dynamics: Dynamics,
    problem: Problem,
    descent: Descent,
    *,
    loss: Any,
    held_from: int | None,
    spent: float,
) -> ForecastPlan | None:
    """Another plan, where the network denies class sketches; None where all is well.

    A class sketch is off by a fifth to all of the kernel. Where a segment went too far by such a
    kernel, the predicted loss jumps, as losses of real full batches at stable rates do not; or the
    path sees that the network denies what rebuilt kernels say, and holds an earlier one from there
    on. Either is forecast again, by exact kernels or sketches of all outputs as far as what is left
    of the budget goes; where it buys none that is rebuilt, a path that jumps gives way to one
    kernel, and one that holds a kernel stays.

    Args:
        plan: by which a forecast was made.
        dynamics: as asked for, before the plan.
        problem: network and data.
        descent: the training.
        loss: the predicted curve (T + 1,).
        held_from: the step whose kernel was held, see `Prediction`.
        spent: operations of the forecast.
    """
    sketch = plan.kernel
    if not isinstance(sketch, ClassSketched) or not is_rebuilt(plan.dynamics):
        return None
    jumps = jump_of(loss) > JUMP
    if descent.batch_size is not None or not (jumps or held_from is not None):
        return None
    room = plan.budget - spent
    plans = [
        plan_forecast(dynamics, problem, descent, kernel, budget=room / plan.training)
        for kernel in of_outputs(problem, sketch.key)
        if room > 0 and fits(kernel, problem)
    ]
    plans = [other for other in plans if other.operations <= room]
    best = min(plans, key=lambda other: other.error, default=None)
    if best is not None and (jumps or is_rebuilt(best.dynamics)):
        return best
    if not jumps:
        return None
    share = plan.budget / plan.training
    return plan_forecast(on_one_kernel(dynamics), problem, descent, sketch, budget=share)


GIVEN_UP = "class sketches before, which the network denies, were given up"
"""Said of a plan that took another's place."""
