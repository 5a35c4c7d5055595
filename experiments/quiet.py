"""Imported before JAX by `python -m experiments`: no false alarms when it reads kept programs.

The same as `jaxttp._core.programs.hush`, which says why; that is too late here, since importing it
imports JAX.
"""

import importlib.util
import os

accelerator = importlib.util.find_spec("jax_plugins") or importlib.util.find_spec("libtpu")
if not accelerator and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
