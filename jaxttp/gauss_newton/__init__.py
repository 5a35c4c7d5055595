"""Exact Gauss-Newton steps in reversible networks."""

from jaxttp.gauss_newton.pseudoinverse import Solve, apply_pseudoinverse, choose_method
from jaxttp.gauss_newton.reversible import inverse_jvp, revmlp_forward, revmlp_inverse

__all__ = [
    "revmlp_forward",
    "revmlp_inverse",
    "inverse_jvp",
    "apply_pseudoinverse",
    "choose_method",
    "Solve",
]
