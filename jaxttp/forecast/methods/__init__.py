"""Dynamics as values: the path of a training from one or more linearizations."""

from jaxttp.forecast.methods.base import Draws as Draws
from jaxttp.forecast.methods.base import Dynamics as Dynamics
from jaxttp.forecast.methods.base import Linearizer as Linearizer
from jaxttp.forecast.methods.base import Path as Path
from jaxttp.forecast.methods.linear import ClosedForm as ClosedForm
from jaxttp.forecast.methods.linear import GradientFlow as GradientFlow
from jaxttp.forecast.methods.linear import Noisy as Noisy
from jaxttp.forecast.methods.linear import Recursion as Recursion
from jaxttp.forecast.methods.linear import WeightSpace as WeightSpace
from jaxttp.forecast.methods.relinearized import Relinearized as Relinearized
from jaxttp.forecast.methods.scaled import Scaled as Scaled
