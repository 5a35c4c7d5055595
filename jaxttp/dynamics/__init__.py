"""The outputs of a network during training, predicted from its kernel."""

from jaxttp.dynamics._trajectory import RelinearizedTrajectory as RelinearizedTrajectory
from jaxttp.dynamics._trajectory import Trajectory as Trajectory
from jaxttp.dynamics.batches import batch_indices as batch_indices
from jaxttp.dynamics.closed_form import closed_form as closed_form
from jaxttp.dynamics.diffusion import Diffusion as Diffusion
from jaxttp.dynamics.diffusion import diagonal_noise as diagonal_noise
from jaxttp.dynamics.diffusion import diffusion as diffusion
from jaxttp.dynamics.flow import gradient_flow as gradient_flow
from jaxttp.dynamics.optimizers import HeavyBall as HeavyBall
from jaxttp.dynamics.optimizers import effective_learning_rate as effective_learning_rate
from jaxttp.dynamics.optimizers import linear_filter as linear_filter
from jaxttp.dynamics.recursion import recursion as recursion
from jaxttp.dynamics.relinearize import relinearized_recursion as relinearized_recursion
from jaxttp.dynamics.two_factor import TwoFactorObservables as TwoFactorObservables
from jaxttp.dynamics.two_factor import TwoFactorTrajectory as TwoFactorTrajectory
from jaxttp.dynamics.two_factor import balanced_features as balanced_features
from jaxttp.dynamics.two_factor import power_law_labels as power_law_labels
from jaxttp.dynamics.two_factor import two_factor_descent as two_factor_descent
from jaxttp.dynamics.two_factor import two_factor_flow as two_factor_flow
from jaxttp.dynamics.two_factor import two_factor_observables as two_factor_observables
from jaxttp.dynamics.weight_space import WeightSpaceTrajectory as WeightSpaceTrajectory
from jaxttp.dynamics.weight_space import weight_space as weight_space
