"""Exact Gauss-Newton steps in reversible networks."""

from jaxttp.gauss_newton.gauges import flow_error, inverse_error
from jaxttp.gauss_newton.kernel import revmlp_kernel
from jaxttp.gauss_newton.modes import Damp, Exact, Filter, Mode, Noise, Tikhonov, Truncate
from jaxttp.gauss_newton.optimizer import GaussNewtonState, gauss_newton, scale_by_gauss_newton
from jaxttp.gauss_newton.output_space import (
    StepForecast,
    forecast_flow,
    forecast_steps,
    output_change,
)
from jaxttp.gauss_newton.pseudoinverse import Solve, apply_pseudoinverse
from jaxttp.gauss_newton.readout import orthonormal_readout, selection_readout
from jaxttp.gauss_newton.reversible import inverse_jvp, revmlp_forward, revmlp_inverse
from jaxttp.gauss_newton.shorthands import choose_method
from jaxttp.gauss_newton.update import StepInfo, gauss_newton_direction

__all__ = [
    "revmlp_forward",
    "revmlp_inverse",
    "inverse_jvp",
    "selection_readout",
    "orthonormal_readout",
    "Mode",
    "Filter",
    "Exact",
    "Truncate",
    "Damp",
    "Tikhonov",
    "Noise",
    "apply_pseudoinverse",
    "choose_method",
    "Solve",
    "output_change",
    "gauss_newton_direction",
    "StepInfo",
    "gauss_newton",
    "scale_by_gauss_newton",
    "GaussNewtonState",
    "inverse_error",
    "flow_error",
    "forecast_steps",
    "forecast_flow",
    "StepForecast",
    "revmlp_kernel",
]
