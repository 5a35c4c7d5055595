"""Fine-tuning with too many outputs for a kernel, from gradients that are held."""

from jaxttp.forecast.stale_gradients.curve import HeldForecast as HeldForecast
from jaxttp.forecast.stale_gradients.forecast import held_forecast as held_forecast
