"""The kernel, and nothing that moves."""

from jaxttp.ntk._plan import KernelPlan
from jaxttp.ntk.gram import empirical_ntk, ntk_plan

__all__ = ["KernelPlan", "empirical_ntk", "ntk_plan"]
