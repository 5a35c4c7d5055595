"""How long will training take?"""

from jaxttp.crossing import smooth_curve as smooth_curve
from jaxttp.crossing import training_time as training_time
from jaxttp.forecast.closed_loop import OnlineForecast as OnlineForecast
from jaxttp.forecast.closed_loop import online as online
from jaxttp.forecast.comparison import Candidate as Candidate
from jaxttp.forecast.comparison import Comparison as Comparison
from jaxttp.forecast.comparison import Explanation as Explanation
from jaxttp.forecast.comparison import compare as compare
from jaxttp.forecast.extrapolation import Extrapolation as Extrapolation
from jaxttp.forecast.extrapolation import extrapolate as extrapolate
from jaxttp.forecast.hyperparameters import Hyperparameters as Hyperparameters
from jaxttp.forecast.hyperparameters import grid as grid
from jaxttp.forecast.predict import predict_training_time as predict_training_time
from jaxttp.forecast.prediction import Cost as Cost
from jaxttp.forecast.prediction import Prediction as Prediction
from jaxttp.forecast.seconds import DEVICES as DEVICES
from jaxttp.forecast.seconds import Device as Device
from jaxttp.forecast.seconds import WallClock as WallClock
from jaxttp.forecast.seconds import wall_clock as wall_clock
from jaxttp.forecast.spectra import Spectrum as Spectrum
from jaxttp.forecast.spectra import extrapolate_spectrum as extrapolate_spectrum
from jaxttp.forecast.spectra import mode_curve as mode_curve
from jaxttp.forecast.sweeps import Sweep as Sweep
from jaxttp.forecast.sweeps import sweep as sweep
from jaxttp.forecast.sweeps import sweep_kernel as sweep_kernel
from jaxttp.forecast.watch import Online as Online
