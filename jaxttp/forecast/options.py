"""The keywords of a forecast, turned into values."""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_integer, check_key, check_number, check_used
from jaxttp._core.types import Params, count
from jaxttp.dynamics.preconditioned import preconditioned_filter
from jaxttp.forecast.cost import ForecastPlan, center_of, plan_forecast
from jaxttp.forecast.methods.base import Dynamics
from jaxttp.forecast.methods.linear import ClosedForm, GradientFlow, Noisy, Recursion, WeightSpace
from jaxttp.forecast.methods.relinearized import Preconditioned, Relinearized
from jaxttp.forecast.methods.scaled import Scaled
from jaxttp.forecast.problem import Problem
from jaxttp.forecast.training_setup import Descent
from jaxttp.forecast.uncertainty import KNOWN
from jaxttp.ntk.estimators import Exact, KernelEstimator, Sketched
from jaxttp.ntk.sharded import is_by_process, several

DYNAMICS: dict[str, type[Dynamics]] = {
    "auto": Recursion,
    "recursion": Recursion,
    "ode": GradientFlow,
    "closed_form": ClosedForm,
    "sde": Noisy,
    "weight_space": WeightSpace,
}


MOST_TOKENS = 2**14
"""Most outputs N T V over tokens for exact kernels by default: 1 GiB each in float32."""
REBUILT = ("auto", "recursion", "sde")
"""Dynamics whose kernel can be rebuilt."""
NOT_LINEAR = (
    "optimizer is neither linear in the gradients nor like Adam (sign and accumulated steps are "
    "not), so it is simulated in weight space, where no kernel is rebuilt"
)


class Keywords(NamedTuple):
    """The keywords that determine the dynamics, see `predict_training_time`."""

    dynamics: str | Dynamics = "auto"
    relinearize: int | str = "auto"
    tolerance: float | None = None
    noise: str | None = None
    paths: int | None = None

    def check(self) -> "Keywords":
        """Refuse values that are out of range or have no effect; return the keywords."""
        if isinstance(self.dynamics, Dynamics):
            for name in ("tolerance", "noise", "paths"):
                hint = "dynamics is a value, which says it itself"
                check_used(name, getattr(self, name), False, hint)
            setting = None if self.relinearize == "auto" else self.relinearize
            check_used("relinearize", setting, False, "give dynamics=Relinearized")
            return self
        check_choice("dynamics", self.dynamics, DYNAMICS)
        if not (isinstance(self.relinearize, str) and self.relinearize == "auto"):
            hint = "It counts kernels after the first; 'auto' chooses."
            check_integer("relinearize", self.relinearize, at_least=0, hint=hint)
            if self.relinearize and self.dynamics not in REBUILT:
                raise ValueError(
                    f"relinearize needs dynamics='recursion' or 'sde'; got {self.dynamics!r}."
                )
        sde = self.dynamics == "sde"
        check_used("noise", self.noise, sde, "it is the noise of dynamics='sde'")
        check_used("paths", self.paths, sde, "it counts the paths of dynamics='sde'")
        used = self.relinearize == "auto" and self.dynamics in REBUILT
        check_used("tolerance", self.tolerance, used, "it is the target of relinearize='auto'")
        return self

    def choose(
        self, descent: Descent, weights: Params, total_samples: int | None = None
    ) -> Dynamics:
        """The dynamics of these keywords; "auto" depends on the optimizer."""
        if total_samples is not None:
            hint = "dynamics='sde' is of the given samples; leave total_samples or it out"
            check_used("total_samples", total_samples, self.dynamics != "sde", hint)
            check_integer("total_samples", total_samples, at_least=2)
            return Scaled(total_samples, self.choose(descent, weights))
        if isinstance(self.dynamics, Dynamics):
            return self.dynamics
        rebuilt = None
        if self.relinearize and self.dynamics in REBUILT:
            rebuilt = Relinearized(self.relinearize, self.tolerance)
        if self.dynamics == "sde":
            options = {"noise": self.noise, "paths": self.paths, "centre": rebuilt}
            return Noisy(**{k: v for k, v in options.items() if v is not None})
        if self.dynamics == "auto" and not descent.is_plain:
            try:
                descent.response(weights)
            except ValueError:
                return self._nonlinear(descent, weights)
        return DYNAMICS[self.dynamics]() if rebuilt is None else rebuilt

    def _nonlinear(self, descent: Descent, weights: Params) -> Dynamics:
        """By kernels behind a diagonal where the optimizer has one, else in weight space."""
        reason = "relinearize=0 linearizes once, in weight space"
        if self.relinearize:
            try:
                found = preconditioned_filter(descent.optimizer, weights, descent.steps)
            except ValueError:
                reason = NOT_LINEAR
            else:
                return Preconditioned(self.relinearize, self.tolerance, optimizer=found)
        check_used("tolerance", self.tolerance, False, reason)
        setting = None if self.relinearize in (0, "auto") else self.relinearize
        check_used("relinearize", setting, False, reason)
        return WeightSpace()


def check_supported(
    dynamics: Dynamics, x: Any, descent: Descent, x_test: Any, kernel: KernelEstimator
) -> None:
    """Refuse samples and devices that the dynamics does not support."""
    check_mesh(dynamics, kernel)
    check_processes(x, kernel)
    if not dynamics.kernels:
        mesh = several(getattr(kernel, "mesh", None))
        hint = f"dynamics={dynamics.name!r} follows weights, on one device, and no kernel"
        check_used("mesh", mesh, False, hint)
    if isinstance(dynamics, Scaled):
        dynamics.check_samples(count(x), descent)
        check_used("x_test", x_test, False, "test curves of total_samples are not forecast")


def choose_plan(
    dynamics: Dynamics,
    problem: Problem,
    descent: Descent,
    estimator: KernelEstimator | None,
    budget: float | str,
    key: Array | None,
) -> ForecastPlan | None:
    """The plan of a forecast; None where the keywords leave nothing open.

    Args:
        dynamics: of the keywords.
        problem: network and data.
        descent: the training.
        estimator: how kernels are computed; None where that is open.
        budget: see `plan_forecast`.
        key: for sketches.

    Raises:
        ValueError: a budget that has no effect.
    """
    centre = center_of(dynamics)
    by_kernels = isinstance(dynamics, Noisy) or isinstance(centre, Recursion | Relinearized)
    is_open = estimator is None or (isinstance(centre, Relinearized) and centre.rebuilds == "auto")
    if not (by_kernels and is_open):
        hint = (
            "it chooses kernels and how often they are rebuilt, where relinearize='auto' or no "
            "sketch_dim leaves that open"
        )
        check_used("budget", None if budget == "auto" else budget, False, hint)
        return None
    return plan_forecast(dynamics, problem, descent, estimator, budget=budget, key=key)


def choose_kernel(
    sketch_dim: int | None,
    key: Array | None,
    batch_size: int | None,
    max_bytes: int | None,
    kernel: KernelEstimator | None = None,
    mesh: Any = None,
) -> KernelEstimator:
    """The estimator of the keywords, or `kernel` in their place."""
    mesh = several(mesh)
    if kernel is not None:
        if not isinstance(kernel, KernelEstimator):
            raise TypeError(
                "kernel must be jaxttp.ntk.Exact() or jaxttp.ntk.Sketched(dim, key); "
                f"got {type(kernel).__name__}. An existing kernel goes to "
                "jaxttp.dynamics.recursion, or to sweep_kernel."
            )
        names = ("sketch_dim", "kernel_batch_size", "max_bytes", "mesh")
        for name, value in zip(names, (sketch_dim, batch_size, max_bytes, mesh), strict=True):
            check_used(name, value, False, "kernel is a value, which says it itself")
        return kernel
    if sketch_dim is None:
        return Exact(batch_size, max_bytes, mesh)
    check_key(key)
    hint = "it bounds an exact kernel; with sketch_dim give kernel_batch_size"
    check_used("max_bytes", max_bytes, False, hint)
    return Sketched(sketch_dim, key, batch_size, mesh)


def check_tokens(problem: Problem, kernel: KernelEstimator) -> None:
    """Refuse outputs over tokens that are too many for the default exact kernel.

    Args:
        problem: network and data.
        kernel: how kernels are computed; ``Exact()`` by default.

    Raises:
        ValueError: too many outputs.
    """
    (n, c), t = problem.f0.shape, problem.loss.tokens
    if not t or n * c <= MOST_TOKENS or kernel != Exact():
        return
    tokens = MOST_TOKENS // (n * c // t)
    sampled = (
        f"{tokens} token(s) of every sequence, sample_tokens(..., tokens={tokens}, key=key), or "
    )
    raise ValueError(
        f"outputs (N, T, V) = {(n, t, c // t)} are {n * c:,} numbers, of which a kernel takes "
        f"{4e-9 * (n * c) ** 2:,.0f} GB. Forecast the logits of a few words at the last token, "
        f"jaxttp.label_words(apply_fn, ids), or {sampled if tokens else ''}fewer sequences; or say "
        "sketch_dim=, or max_bytes= for a kernel all the same."
    )


def check_mesh(dynamics: Dynamics, kernel: KernelEstimator) -> None:
    """Refuse a kernel on many devices where the dynamics needs all of it on one.

    Args:
        dynamics: how the path is followed.
        kernel: how kernels are computed.

    Raises:
        ValueError: it has a mesh, and the dynamics needs more than products.
    """
    if not dynamics.by_products:
        refuse_mesh(kernel, f"dynamics={dynamics.name!r}", "dynamics='recursion' or 'ode'")


def refuse_mesh(kernel: KernelEstimator, what: str, hint: str) -> None:
    """Raise `ValueError` for a mesh of several devices where `what` decomposes the whole kernel."""
    devices = several(getattr(kernel, "mesh", None))
    if devices is not None:
        raise ValueError(
            f"kernel={type(kernel).__name__}(mesh=...) lies on {devices.size} devices, and {what} "
            f"decomposes all of it on one; use {hint}, or leave mesh out."
        )


def check_processes(x: Any, kernel: KernelEstimator) -> None:
    """Refuse samples that are spread over processes where the kernel lies on one device.

    Raises:
        ValueError: it has no mesh.
    """
    is_spread = any(map(is_by_process, jax.tree.leaves(x)))
    if is_spread and several(getattr(kernel, "mesh", None)) is None:
        raise ValueError(
            "x has rows that this process has not, and a kernel on one device needs all of them: "
            "give a mesh of the devices of all processes, kernel=jaxttp.ntk.Exact(mesh=mesh)."
        )


def check_level(level: float | None, dynamics: Dynamics, kernel: KernelEstimator) -> float:
    """The fraction that bands hold, where there are bands."""
    sketched = isinstance(kernel, Sketched) and kernel.sketch_dim > 1
    sketched = sketched and dynamics.kernels and not dynamics.is_scaled
    hint = (
        "it is the fraction that bands hold: those of dynamics='sde' and, unless in weight space, "
        "of a sketch_dim above 1"
    )
    check_used("level", level, dynamics.name == "sde" or sketched, hint)
    level = KNOWN.level if level is None else level
    return check_number("level", level, above=0.0, below=1.0, hint="90 % is 0.9.")
