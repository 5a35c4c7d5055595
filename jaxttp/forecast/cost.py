"""The cost of a forecast in FLOPs, and the most accurate forecast within a budget.

FLOPs do not depend on the machine, so that the same call plans the same forecast everywhere. They
are counted in the jaxpr: products of dense and convolutional layers at their size, everything else
at one a number, a backward pass at two forward passes. The errors by number of kernels and width of
a sketch were measured on tasks that are used for nothing else (`experiments/bench/planning.py`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxttp.forecast.methods.base import Dynamics
from jaxttp.forecast.methods.linear import Linear, Noisy, Recursion
from jaxttp.forecast.methods.relinearized import MOST, Relinearized
from jaxttp.forecast.methods.scaled import Scaled
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.training_setup import Descent
from jaxttp.forecast.uncertainty import passes_asked
from jaxttp.ntk.estimators import ClassSketched, Exact, KernelEstimator, Sketched, plan_of

STEP = 3.0
"""Forward passes that a forward and a backward pass cost."""


@dataclasses.dataclass(frozen=True)
class Price:
    """Estimated FLOPs of a training run and of the parts of its forecast.

    Attributes:
        training: all steps.
        kernel: one kernel.
        whole_pass: one forward and backward pass with all samples.
        product: one product of the kernel with the gradient of a step.

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
        kernel: KernelEstimator,
        samples: int | None = None,
        *,
        is_scaled: bool = False,
    ) -> "Price":
        """From shapes alone.

        Args:
            problem: network and data.
            descent: the training.
            kernel: how kernels are computed.
            samples: number of training samples; those of the problem when None.
            is_scaled: whether kernels are those of a preconditioned network.
        """
        n, form = problem.f0.shape[0], {"is_scaled": True} if is_scaled else {}
        step, rows = STEP * plan_of(problem.whole or problem).forward, descent.batch_size or n
        return cls(
            training=step * (descent.batch_size or samples or n) * descent.steps,
            kernel=kernel.operations(problem, **form),
            whole_pass=step * n,
            product=kernel.product(problem, min(1.0, rows / n)),
        )

    def forecast(self, kernels: int, passes: float, products: int) -> float:
        """The FLOPs of a forecast.

        Args:
            kernels: that it builds.
            passes: further forward and backward passes with all samples.
            products: with its kernels.
        """
        return kernels * self.kernel + passes * self.whole_pass + products * self.product


def fraction_of(operations: float, training: float) -> str:
    """FLOPs relative to those of the training, as text.

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
    """Cost and expected error of forecasts.

    Errors and passes are means over the tasks of `experiments/bench/planning.py`; limits are
    chosen.

    Attributes:
        fraction: default budget, as a fraction of the training's FLOPs.
        memory: bytes of kernels above which a plan with less memory is preferred.
        widths: of sketches, candidates for a plan.
        scaled_width: of sketches of a preconditioned network, for mini-batches and for full ones.
            On 12 tuning tasks 15 of 23 ends of full batches were right with 1024, 20 with 2048.
        per_class: least columns of a sketch for each class.
        alike: expected errors within this factor count as equal; the cheaper plan is taken.
        horizons: steps at which errors were measured.
        rebuilds: most kernels after the first at which errors were measured.
        errors: relative error of a time, beyond two steps, by horizon and rebuilds. Over long
            horizons one rebuilt kernel is no better than none.
        by_class: the same with class sketches.
        by_sketch: a sketch of width k multiplies the error by 1 + by_sketch/sqrt(k).
        of_sketch: and adds of_sketch/k in quadrature, by horizon.
        passes: passes through the network besides each rebuilt kernel, sketched or exact.
        memories: factor of the passes with optimizer memory (a velocity), likewise.
        scaled_passes: passes for each kernel of a preconditioned network: 8 to 11 in 4 tuning runs.
        runs: of the recursion over the horizon for each kernel.
        parts: runs of samples and halves where larger data are forecast on one kernel.
        cache: outputs N C above which steps of a recursion are bound by memory.
        reading: cost of their products with a kernel over its FLOPs. On 14 tuning runs of 600 steps
            with fewer outputs 71 % of the times were right where products counted so, 93 % without.
        vectors: FLOPs that the rest of such a step costs for each output. With it 7 of 8 tuning
            forecasts took at most 1.1 times the training's seconds, without it 2.
    """

    fraction: float = 1.0
    memory: float = 4e9
    widths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    scaled_width: tuple[int, int] = (1024, 2048)
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
    passes: tuple[float, float] = (3.7, 3.1)
    memories: tuple[float, float] = (1.3, 1.1)
    scaled_passes: float = 10.0
    runs: float = 1.5
    parts: float = 3.5
    cache: int = 3000
    reading: float = 8.0
    vectors: float = 4000.0


MODEL = CostModel()


@dataclasses.dataclass(frozen=True, eq=False)
class ForecastPlan:
    """A forecast within a budget; prints itself in a line.

    Attributes:
        dynamics: how the path is followed.
        kernel: how kernels are computed.
        operations: estimated FLOPs if all kernels are built; operations that are bound by memory
            are weighted by their time.
        error: the expected relative error of a training time.
        training: FLOPs of the training.
        kernels: at most.
        budget: FLOPs that the forecast may take.
        whole: whether the budget removed nothing: an exact kernel, or the given estimator, rebuilt
            without a bound.
    """

    dynamics: Dynamics
    kernel: KernelEstimator
    operations: float
    error: float
    training: float
    kernels: int
    budget: float = math.inf
    whole: bool = True

    def __str__(self) -> str:
        cost = fraction_of(self.operations, self.training)
        message = f"{_label(self.dynamics, self.kernel)}: at most {cost} the training's FLOPs"
        if isinstance(center_of(self.dynamics), Linear):
            message += "; the network is linear in its trained weights, so that it is never rebuilt"
        elif not is_rebuilt(self.dynamics):  # else the forecast estimates its own error
            off = f"{100 * self.error:.0f} %"
            message += f"; on the small tasks this was tuned on times were off by {off} on average"
        if self.operations > self.budget:
            message += "; nothing fits the budget"
        if self.operations > self.training:
            message += "; training itself costs less"
        return message


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
        dynamics: the plan bounds its rebuilds where these are "auto", and changes nothing else.
        problem: network and data.
        descent: the training.
        kernel: how kernels are computed; chosen when None: exactly, by a sketch or a class sketch.
        budget: FLOPs of the forecast as a fraction of the training's, above 0; "auto" for 1
            where rebuilds are "auto", else unbounded. The cheapest kernel is always allowed.
        key: a `jax.random.key` for sketches; ``jax.random.key(0)`` when None.

    Returns:
        A `ForecastPlan`; the cheapest one where nothing fits.

    Example:
        >>> import jax.numpy as jnp
        >>> x, network = jnp.eye(6), lambda w, x: jnp.tanh(x @ w)
        >>> problem = Problem.of(network, jnp.zeros((6, 2)), x, jnp.arange(6) % 2)
        >>> descent = Descent.of(learning_rate=0.1, steps=50)
        >>> plan = plan_forecast(Relinearized(), problem, descent, budget=math.inf)
        >>> plan.dynamics, plan.kernel
        (Relinearized(rebuilds='auto', tolerance=None, most=16), Exact(batch_size=None, ...))
    """
    problem = dynamics.view(problem)
    dynamics = suited(dynamics, problem)
    free = is_rebuilt(dynamics) and center_of(dynamics).rebuilds == "auto"
    is_scaled = getattr(center_of(dynamics), "is_scaled", False)
    least = 1 if is_scaled else 0
    rebuilds = range(center_of(dynamics).most, least - 1, -1) if free else (None,)
    if is_scaled:
        kernels = _projections(kernel, problem, descent, key)
    else:
        kernels = [kernel] if kernel is not None else _kernels(problem, key)
    samples = dynamics.trained_samples(problem)
    if budget == "auto":
        budget = MODEL.fraction if free else math.inf
    prices = [Price.of(problem, descent, k, samples, is_scaled=is_scaled) for k in kernels]
    limit = float(budget) * prices[0].training
    plans = [  # the most accurate one first
        _plan(dynamics, problem, descent, price, estimator, most, limit)
        for price, estimator in zip(prices, kernels, strict=True)
        for most in rebuilds
    ]
    # Class sketches are less accurate at the stiffest modes, on which the growth of mini-batch
    # noise depends: with mini-batches they are a last resort.
    finer = [p for p in plans if not isinstance(p.kernel, ClassSketched)]
    is_fine = descent.batch_size and min((p.operations for p in finer), default=math.inf) <= limit
    plan = _best(finer if is_fine else plans, limit)
    whole = plan.operations <= limit and plan.error <= plans[0].error
    whole &= kernel is not None or isinstance(plan.kernel, Exact)
    return dataclasses.replace(plan, budget=limit, whole=whole)


def _kernels(problem: Problem, key: Any) -> list[KernelEstimator]:
    """Estimators that fit into memory, the most accurate first; else the smallest one.

    Class sketches average over outputs, which tokens do not allow.
    """
    key = _key(key)
    widths = [k for k in reversed(MODEL.widths) if MODEL.per_class * problem.classes <= k]
    kernels = [Exact(), *(Sketched(width, key) for width in widths)]
    fitting = [kernel for kernel in kernels if _bytes(kernel, problem) <= MODEL.memory]
    if problem.classes > 1 and not problem.loss.tokens:
        kernels.append(ClassSketched(key))
        if _bytes(kernels[-1], problem) <= MODEL.memory:
            fitting.append(kernels[-1])
    return fitting or [min(kernels, key=lambda kernel: _bytes(kernel, problem))]


def _projections(
    kernel: KernelEstimator | None, problem: Problem, descent: Descent, key: Any
) -> list[KernelEstimator]:
    """Kernels of a preconditioned network: its path needs them as factors.

    Raises:
        ValueError: the given kernel has none.
    """
    most = MODEL.scaled_width[descent.batch_size is None]
    if kernel is None:
        widths = [width for width in reversed(MODEL.widths) if width <= most]
        sketches = [Sketched(width, _key(key), factored=True) for width in widths]
        fitting = [sketch for sketch in sketches if _bytes(sketch, problem) <= MODEL.memory]
        return [*(fitting or sketches[-1:])]
    if not isinstance(kernel, Sketched):
        raise ValueError(
            "kernel must be Sketched(width, key) for an optimizer that is followed behind a "
            f"diagonal of past gradients, such as Adam; got {type(kernel).__name__}. Leave it out "
            f"for a sketch of width {most:,}."
        )
    return [dataclasses.replace(kernel, factored=True)]


def _key(key: Any) -> Array:
    """The key of a sketch; jax.random.key(0), which would compile two functions, when None."""
    data: Any = np.zeros(2, np.uint32)
    return jax.random.wrap_key_data(data, impl="threefry2x32") if key is None else key


def _bytes(kernel: KernelEstimator, problem: Problem) -> float:
    """Memory of two kernels and the work on them, in float32."""
    outputs = problem.f0.size
    numbers = outputs * (kernel.sketch_dim if isinstance(kernel, Sketched) else outputs)
    if isinstance(kernel, ClassSketched) or (isinstance(kernel, Exact) and problem.is_repeated):
        numbers = problem.f0.shape[0] ** 2
    return 4.0 * 3 * numbers


def is_rebuilt(dynamics: Dynamics) -> bool:
    """Whether kernels are rebuilt along the mean path."""
    return isinstance(center_of(dynamics), Relinearized)


def center_of(dynamics: Dynamics) -> Any:
    """The dynamics of the mean path."""
    return dynamics.centre if isinstance(dynamics, Noisy | Scaled) else dynamics


def _plan(
    dynamics: Dynamics,
    problem: Problem,
    descent: Descent,
    price: Price,
    kernel: KernelEstimator,
    most: int | None,
    limit: float,
) -> ForecastPlan:
    """The plan with these kernels and at most `most` rebuilds; by the dynamics' own when None."""
    is_scaled, is_exact = isinstance(dynamics, Scaled), isinstance(kernel, Exact)
    samples, with_test = problem.f0.shape[0], 1.0
    if problem.f0_test is not None:
        with_test += problem.f0_test.shape[0] / samples
    if most is None and is_rebuilt(dynamics):
        most = center_of(dynamics).rebuilds
    # The halves of larger data, and the whole by full batches, are followed with as many kernels.
    copies = (2 if descent.batch_size is None else 3) if is_scaled else 1
    if not most:
        if most == 0:
            dynamics = _with_center(dynamics, None if isinstance(dynamics, Noisy) else Recursion())
        runs = MODEL.parts if is_scaled else 1.0
        passes = 0.0 if problem.is_linear and is_exact else passes_asked(samples)
        built, counts = 1, MOST if problem.is_linear else 0
    else:
        built = copies * (most + 1)
        passes = built * MODEL.passes[is_exact]
        if center_of(dynamics).is_scaled:
            passes = built * MODEL.scaled_passes
        elif not descent.is_plain or descent.momentum:
            passes *= MODEL.memories[is_exact]
        runs, counts = MODEL.runs * built, most
    products, others = runs * descent.steps, 0.0
    if problem.f0.size > MODEL.cache:
        others = MODEL.vectors * problem.f0.size * products
        products *= MODEL.reading
    others += price.forecast(built, 0, int(products))
    cost = with_test * (others + int(passes) * price.whole_pass)
    if most and center_of(dynamics).rebuilds == "auto":
        bound = np.array([max(limit, cost) / with_test / copies, others / built])
        bound = tuple((bound / price.whole_pass).tolist())
        center = dataclasses.replace(center_of(dynamics), most=most, products=bound)
        dynamics = _with_center(dynamics, center)
    error = expected_error(counts, kernel, descent.steps)
    return ForecastPlan(dynamics, kernel, cost, error, price.training, built)


def suited(dynamics: Dynamics, problem: Problem) -> Dynamics:
    """The dynamics without rebuilt kernels where a network is linear in its trained weights."""
    rebuilds = is_rebuilt(dynamics) and not center_of(dynamics).is_scaled
    return _with_center(dynamics, Linear()) if rebuilds and problem.is_linear else dynamics


def _with_center(dynamics: Dynamics, center: Any) -> Dynamics:
    is_around = isinstance(dynamics, Noisy | Scaled)
    return dataclasses.replace(dynamics, centre=center) if is_around else center


def expected_error(most: int, kernel: KernelEstimator, steps: int) -> float:
    """The mean relative error of a time.

    Args:
        most: kernels after the first.
        kernel: how kernels are computed.
        steps: of the training; the error is interpolated in their logarithm between the measured
            horizons, and constant below these. Beyond, it depends on the kernels a step.

    Example:
        >>> expected_error(16, Exact(), 600) < expected_error(0, Exact(), 600)
        True
    """
    errors = MODEL.by_class if isinstance(kernel, ClassSketched) else MODEL.errors
    built = most * min(1.0, MODEL.horizons[-1] / max(steps, 1))
    of_rebuilds = _between([np.interp(built, MODEL.rebuilds, row) for row in errors], steps)
    if not isinstance(kernel, Sketched):
        return of_rebuilds
    width = kernel.sketch_dim
    by_width = of_rebuilds * (1 + MODEL.by_sketch / np.sqrt(width))
    return float(np.hypot(by_width, _between(MODEL.of_sketch, steps) / width))


def _between(values: Sequence[float], steps: int) -> float:
    """Interpolation of values at the two horizons, in the logarithm of the steps."""
    return float(np.interp(np.log(max(steps, 1)), np.log(MODEL.horizons), values))


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


def _label(dynamics: Dynamics, kernel: KernelEstimator) -> str:
    """Number and kind of the kernels."""
    single, plural = "", "kernels"
    if isinstance(kernel, Sketched):
        single, plural = (f"{s} of width {kernel.sketch_dim:,}" for s in ("a sketch", "sketches"))
    elif isinstance(kernel, ClassSketched):
        single, plural = "a class sketch", "class sketches"
    if not is_rebuilt(dynamics):
        return f"one kernel, {single}" if single else "one kernel"
    center = center_of(dynamics)
    count = f"at most {center.most + 1}" if center.rebuilds == "auto" else f"{center.rebuilds + 1}"
    return f"{count} {plural}"
