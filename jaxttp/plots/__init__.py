"""Figures of the results (matplotlib, imported with this package only)."""

from jaxttp.plots._style import GREY as GREY
from jaxttp.plots._style import OTHER as OTHER
from jaxttp.plots._style import PREDICTED as PREDICTED
from jaxttp.plots._style import REAL as REAL
from jaxttp.plots._style import save as save
from jaxttp.plots._style import tidy as tidy
from jaxttp.plots.conditioning import plot_condition_sweep as plot_condition_sweep
from jaxttp.plots.conditioning import plot_conditioning as plot_conditioning
from jaxttp.plots.conditioning import plot_draws as plot_draws
from jaxttp.plots.conditioning import plot_rank_sensitivity as plot_rank_sensitivity
from jaxttp.plots.conditioning import plot_spectrum as plot_spectrum
from jaxttp.plots.forecast import MARKERS as MARKERS
from jaxttp.plots.forecast import plot_forecast as plot_forecast
from jaxttp.plots.kernel import plot_steps as plot_steps
from jaxttp.plots.kernel import plot_task_spectrum as plot_task_spectrum
from jaxttp.plots.sweeps import plot_comparison as plot_comparison
from jaxttp.plots.sweeps import plot_extrapolation as plot_extrapolation
from jaxttp.plots.sweeps import plot_sweep as plot_sweep
