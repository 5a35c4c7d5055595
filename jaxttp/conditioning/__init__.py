"""The conditioning of the Gauss-Newton matrix of a network.

The functions behind the figures of the paper (GNC); those along training run in a callback of
`jaxttp.train`:

========== =============================================== =========================================
figures    content                                         computed by
========== =============================================== =========================================
1, 13-17   loss and kappa of pruned networks               `condition_number`, `apply_masks`
2, 5       kappa and bound by depth, width, skip           `sweep("depth", ...)`, `linear_point`
3          convex against maximum bound                    `sweep(...)`: `.bound`, `.maximum`
4          (a drawing)
6, 23      one hidden leaky-ReLU layer, by width and slope `sweep("width" or "alpha", data=...)`
7          batch normalization                             `sweep("width", batch_norm=True)`
8          linear CNNs by filters and kernel size          `gauss_newton_convolution`
9          spectrum, kappa at neighboring ranks            `condition_number`, `rank_sensitivity`
10         loss, kappa and bounds along training           `linear_point`
11         kappa and sigma_min of the partial products     `layer_spectra`
12         the terms of Lemma 2 and their weights          `linear_point`: `.terms`, `.weights`
18         loss and kappa by width, a ReLU network         `condition_number`
19         with and without whitening                      `sweep("depth", covariance=...)`
20-22      residual networks by depth and skip             `sweep("depth", skip=...)`
========== =============================================== =========================================
"""

from jaxttp._core.arrays import whitening as whitening
from jaxttp.conditioning.bounds import Bounds as Bounds
from jaxttp.conditioning.bounds import asymptotic_bound as asymptotic_bound
from jaxttp.conditioning.bounds import functional_hessian_bound as functional_hessian_bound
from jaxttp.conditioning.bounds import gaussian_init_bound as gaussian_init_bound
from jaxttp.conditioning.bounds import gaussian_init_probability as gaussian_init_probability
from jaxttp.conditioning.bounds import linear_bound as linear_bound
from jaxttp.conditioning.condition_number import ConditionNumber as ConditionNumber
from jaxttp.conditioning.condition_number import condition_number as condition_number
from jaxttp.conditioning.convergence import contraction_rate as contraction_rate
from jaxttp.conditioning.convergence import steps_to_accuracy as steps_to_accuracy
from jaxttp.conditioning.convolution import gauss_newton_convolution as gauss_newton_convolution
from jaxttp.conditioning.convolution import toeplitz as toeplitz
from jaxttp.conditioning.leaky_relu import leaky_relu_bound as leaky_relu_bound
from jaxttp.conditioning.leaky_relu import leaky_relu_gram as leaky_relu_gram
from jaxttp.conditioning.linear import LinearGaussNewton as LinearGaussNewton
from jaxttp.conditioning.linear import batch_norm_scales as batch_norm_scales
from jaxttp.conditioning.linear import gauss_newton_linear as gauss_newton_linear
from jaxttp.conditioning.linear import gauss_newton_linear_operator as gauss_newton_linear_operator
from jaxttp.conditioning.linear import generic_rank as generic_rank
from jaxttp.conditioning.matrices import curvature_matrix as curvature_matrix
from jaxttp.conditioning.matrices import curvature_operator as curvature_operator
from jaxttp.conditioning.pruning import apply_masks as apply_masks
from jaxttp.conditioning.pruning import keep_pruned as keep_pruned
from jaxttp.conditioning.pruning import magnitude_masks as magnitude_masks
from jaxttp.conditioning.sweeps import ConditionSweep as ConditionSweep
from jaxttp.conditioning.sweeps import LayerSpectra as LayerSpectra
from jaxttp.conditioning.sweeps import LinearPoint as LinearPoint
from jaxttp.conditioning.sweeps import RankSensitivity as RankSensitivity
from jaxttp.conditioning.sweeps import gaussian_weights as gaussian_weights
from jaxttp.conditioning.sweeps import layer_spectra as layer_spectra
from jaxttp.conditioning.sweeps import linear_point as linear_point
from jaxttp.conditioning.sweeps import rank_sensitivity as rank_sensitivity
from jaxttp.conditioning.sweeps import sweep as sweep
