"""Dynamics as values: the path of a training from one or more linearizations."""

from jaxttp.forecast.methods.base import Draws as Draws
from jaxttp.forecast.methods.base import Path as Path
