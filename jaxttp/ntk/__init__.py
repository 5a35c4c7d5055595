"""The kernel, and nothing that moves: exact, sketched, matrix-free, and its spectrum."""

from jaxttp.ntk._plan import KernelPlan
from jaxttp.ntk.estimators import ClassSketched, Estimate, Exact, KernelEstimator, Sketched
from jaxttp.ntk.gram import empirical_ntk, ntk_plan
from jaxttp.ntk.kernels import Factored, NTKOperator, ntk_operator
from jaxttp.ntk.lanczos import SpectralDensity, extreme_eigenvalues, spectral_density
from jaxttp.ntk.sketch import ClassSketch, class_sketch, sketch_jacobian
from jaxttp.ntk.spectrum import (
    ClassSeparation,
    Eigensystem,
    PowerLaw,
    as_matrix,
    class_separation,
    eigendecomposition,
    fit_power_law,
    gradient_components,
    label_alignment,
)

__all__ = [
    "ClassSeparation",
    "ClassSketch",
    "ClassSketched",
    "Eigensystem",
    "Estimate",
    "Exact",
    "Factored",
    "KernelEstimator",
    "KernelPlan",
    "NTKOperator",
    "PowerLaw",
    "Sketched",
    "SpectralDensity",
    "as_matrix",
    "class_separation",
    "class_sketch",
    "eigendecomposition",
    "empirical_ntk",
    "extreme_eigenvalues",
    "fit_power_law",
    "gradient_components",
    "label_alignment",
    "ntk_operator",
    "ntk_plan",
    "sketch_jacobian",
    "spectral_density",
]
