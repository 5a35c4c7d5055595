"""Workarounds for XLA's CPU backend, each with its gain and the condition under which it can go.

`steps` rewrites slow convolutions and avoids recomputed sums, `pooling` differentiates maxima over
windows, `threads` sets the threads of LAPACK. GPUs and TPUs do not use them.

In this module: jaxlib 0.10.2 computes wrong results on CPUs, without an error. It hands larger
parts of a function to YNNPACK than other versions, some with wrong float32 results: the mean of
``logsumexp(f) - sum(y * f)`` over more than 32,768 rows is off by some tenths, and a softmax behind
a few residual layers can be NaN in every entry (`jaxttp doctor` computes both). The dependencies
exclude this version. If it is installed all the same, a flag switches these fusions off, which XLA
reads when its first backend starts. This can go once jaxlib 0.11 is required.
"""

import os
import sys
import warnings

from jaxlib.version import __version__ as JAXLIB

WRONG_VERSION = "0.10.2"
FLAG = "--xla_cpu_experimental_ynn_fusion_type"


def protect_process(version: str = JAXLIB) -> None:
    """Set the flag for this process and its children; called by `import jaxttp`.

    Other versions are left alone, as an unknown flag ends the process; so is a user's own choice.

    Args:
        version: of jaxlib.
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if version != WRONG_VERSION or FLAG in flags:
        return
    names_a_file = flags and not flags.startswith("-")
    if names_a_file or sys.modules["jax._src.xla_bridge"].backends_are_initialized():
        warnings.warn(
            f"jaxlib {WRONG_VERSION} computes wrongly on CPUs: install another version (pip "
            f"install 'jaxlib!={WRONG_VERSION}'), or set XLA_FLAGS={FLAG}= before Python starts.",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    os.environ["XLA_FLAGS"] = f"{flags} {FLAG}=".strip()
