"""How long will training take, how well conditioned is it, what would an exact step do?

Answers before a network is trained, from its outputs, its Jacobian and its kernel.
"""

from jaxttp import _interrupt, _programs

if _interrupt.is_command():
    _interrupt.watch()  # first of all: what follows takes seconds
    _programs.hush()  # before JAX is imported

from jaxttp import _backend as _backend  # before a backend starts
from jaxttp import conditioning as conditioning
from jaxttp import dynamics as dynamics
from jaxttp import gauss_newton as gauss_newton
from jaxttp import losses as losses
from jaxttp import ntk as ntk
from jaxttp import representation as representation
from jaxttp._types import Model as Model
from jaxttp._versions import __version__ as __version__
from jaxttp.adapters import from_equinox as from_equinox
from jaxttp.adapters import from_linen as from_linen
from jaxttp.adapters import from_nnx as from_nnx
from jaxttp.forecast import Candidate as Candidate
from jaxttp.forecast import Cost as Cost
from jaxttp.forecast import Online as Online
from jaxttp.forecast import Prediction as Prediction
from jaxttp.forecast import compare as compare
from jaxttp.forecast import extrapolate as extrapolate
from jaxttp.forecast import grid as grid
from jaxttp.forecast import online as online
from jaxttp.forecast import predict_training_time as predict_training_time
from jaxttp.forecast import sweep as sweep
from jaxttp.forecast import training_time as training_time
from jaxttp.forecast import wall_clock as wall_clock
from jaxttp.losses import weighted as weighted
from jaxttp.ntk import class_sketch as class_sketch
from jaxttp.ntk import empirical_ntk as empirical_ntk
from jaxttp.ntk import ntk_operator as ntk_operator
from jaxttp.ntk import ntk_plan as ntk_plan
from jaxttp.ntk import sketch_jacobian as sketch_jacobian
from jaxttp.training import time_step as time_step
from jaxttp.training import train as train
