"""Dynamics as values: what follows the path of a training from one or more linearisations."""

from jaxttp.forecast.paths.base import Draws as Draws
from jaxttp.forecast.paths.base import Dynamics as Dynamics
from jaxttp.forecast.paths.base import Linearizer as Linearizer
from jaxttp.forecast.paths.base import Path as Path
from jaxttp.forecast.paths.checked import Checked as Checked
from jaxttp.forecast.paths.flow import ClosedForm as ClosedForm
from jaxttp.forecast.paths.flow import GradientFlow as GradientFlow
from jaxttp.forecast.paths.noisy import Noisy as Noisy
from jaxttp.forecast.paths.recursion import Recursion as Recursion
from jaxttp.forecast.paths.relinearized import Relinearized as Relinearized
from jaxttp.forecast.paths.scaled import Scaled as Scaled
from jaxttp.forecast.paths.weight_space import WeightSpace as WeightSpace
