"""How the outputs of a network move while it trains, given its kernel."""

from jaxttp.dynamics._trajectory import Trajectory as Trajectory
from jaxttp.dynamics.batches import batch_indices as batch_indices
from jaxttp.dynamics.closed_form import closed_form as closed_form
from jaxttp.dynamics.diffusion import Diffusion as Diffusion
from jaxttp.dynamics.diffusion import diffusion as diffusion
from jaxttp.dynamics.filters import LinearFilter as LinearFilter
from jaxttp.dynamics.filters import linear_filter as linear_filter
from jaxttp.dynamics.flow import gradient_flow as gradient_flow
from jaxttp.dynamics.horizon import FlowCurves as FlowCurves
from jaxttp.dynamics.horizon import crossing_time as crossing_time
from jaxttp.dynamics.horizon import flow_curves as flow_curves
from jaxttp.dynamics.noise import diagonal_noise as diagonal_noise
from jaxttp.dynamics.noise import noise_factor as noise_factor
from jaxttp.dynamics.rates import effective_learning_rate as effective_learning_rate
from jaxttp.dynamics.recursion import recursion as recursion
from jaxttp.dynamics.relinearize import RelinearizedTrajectory as RelinearizedTrajectory
from jaxttp.dynamics.relinearize import relinearized_recursion as relinearized_recursion
from jaxttp.dynamics.samples import cluster_samples as cluster_samples
from jaxttp.dynamics.samples import sample_losses as sample_losses
from jaxttp.dynamics.weight_space import WeightSpaceTrajectory as WeightSpaceTrajectory
from jaxttp.dynamics.weight_space import weight_space as weight_space
from jaxttp.dynamics.weight_space import weight_space_flow as weight_space_flow
