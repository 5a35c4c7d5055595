"""How well conditioned is the Gauss-Newton matrix of a network?"""

from jaxttp.conditioning.bounds import Bounds as Bounds
from jaxttp.conditioning.bounds import Sandwich as Sandwich
from jaxttp.conditioning.bounds import functional_hessian_bound as functional_hessian_bound
from jaxttp.conditioning.bounds import functional_hessian_spectrum as functional_hessian_spectrum
from jaxttp.conditioning.bounds import linear_bound as linear_bound
from jaxttp.conditioning.bounds import one_hidden_layer_bound as one_hidden_layer_bound
from jaxttp.conditioning.bounds import psd_residual_bound as psd_residual_bound
from jaxttp.conditioning.bounds import psd_sum_bounds as psd_sum_bounds
from jaxttp.conditioning.bounds import whitening as whitening
from jaxttp.conditioning.condition_number import ConditionNumber as ConditionNumber
from jaxttp.conditioning.condition_number import condition_number as condition_number
from jaxttp.conditioning.convergence import Record as Record
from jaxttp.conditioning.convergence import Tracker as Tracker
from jaxttp.conditioning.convergence import contraction_rate as contraction_rate
from jaxttp.conditioning.convergence import steps_to_accuracy as steps_to_accuracy
from jaxttp.conditioning.convolution import convolution_bound as convolution_bound
from jaxttp.conditioning.convolution import gauss_newton_convolution as gauss_newton_convolution
from jaxttp.conditioning.convolution import toeplitz as toeplitz
from jaxttp.conditioning.initialization import asymptotic_bound as asymptotic_bound
from jaxttp.conditioning.initialization import gaussian_init_bound as gaussian_init_bound
from jaxttp.conditioning.initialization import (
    gaussian_init_probability as gaussian_init_probability,
)
from jaxttp.conditioning.leaky_relu import leaky_relu_bound as leaky_relu_bound
from jaxttp.conditioning.leaky_relu import leaky_relu_gram as leaky_relu_gram
from jaxttp.conditioning.leaky_relu import leaky_relu_product_bound as leaky_relu_product_bound
from jaxttp.conditioning.leaky_relu import leaky_relu_rank as leaky_relu_rank
from jaxttp.conditioning.linear import LinearGaussNewton as LinearGaussNewton
from jaxttp.conditioning.linear import batch_norm_scales as batch_norm_scales
from jaxttp.conditioning.linear import gauss_newton_linear as gauss_newton_linear
from jaxttp.conditioning.linear import gauss_newton_linear_operator as gauss_newton_linear_operator
from jaxttp.conditioning.linear import gauss_newton_linear_terms as gauss_newton_linear_terms
from jaxttp.conditioning.linear import generic_rank as generic_rank
from jaxttp.conditioning.matrices import curvature_matrix as curvature_matrix
from jaxttp.conditioning.matrices import curvature_operator as curvature_operator
from jaxttp.conditioning.matrices import layer_terms as layer_terms
from jaxttp.conditioning.pruning import apply_masks as apply_masks
from jaxttp.conditioning.pruning import keep_pruned as keep_pruned
from jaxttp.conditioning.pruning import magnitude_masks as magnitude_masks
