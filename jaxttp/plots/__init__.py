"""Figures (matplotlib) and reports: every result draws itself by ``.plot()``, or `draw(result)`.

`save` writes a figure, `save_report` the page of a task, `results_html` a page of any results.
Figures follow matplotlib's styles: ``with plt.style.context("dark_background"): result.plot()``.
"""

from jaxttp.plots import forecast as forecast
from jaxttp.plots import sweeps as sweeps
from jaxttp.plots import theory as theory
from jaxttp.plots._style import GREY as GREY
from jaxttp.plots._style import MARKERS as MARKERS
from jaxttp.plots._style import OTHER as OTHER
from jaxttp.plots._style import PREDICTED as PREDICTED
from jaxttp.plots._style import REAL as REAL
from jaxttp.plots._style import draw as draw
from jaxttp.plots._style import save as save
from jaxttp.plots._style import tidy as tidy
from jaxttp.plots.conditioning import plot_draws as plot_draws
from jaxttp.plots.report import report_html as report_html
from jaxttp.plots.report import results_html as results_html
from jaxttp.plots.report import save_report as save_report
