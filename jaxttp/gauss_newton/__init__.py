"""Exact Gauss-Newton steps in reversible networks."""

from jaxttp.gauss_newton._network import orthonormal_readout as orthonormal_readout
from jaxttp.gauss_newton._network import selection_readout as selection_readout
from jaxttp.gauss_newton.kernel import revmlp_kernel as revmlp_kernel
from jaxttp.gauss_newton.optimizer import GaussNewtonState as GaussNewtonState
from jaxttp.gauss_newton.optimizer import gauss_newton as gauss_newton
from jaxttp.gauss_newton.output_space import StepForecast as StepForecast
from jaxttp.gauss_newton.output_space import forecast_steps as forecast_steps
from jaxttp.gauss_newton.output_space import output_change as output_change
from jaxttp.gauss_newton.reversible import revmlp_forward as revmlp_forward
from jaxttp.gauss_newton.reversible import revmlp_inverse as revmlp_inverse
from jaxttp.gauss_newton.update import StepInfo as StepInfo
from jaxttp.gauss_newton.update import gauss_newton_direction as gauss_newton_direction
