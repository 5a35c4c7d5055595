"""Keeps jaxlib 0.10.2 from computing wrongly on CPUs: `protect_process`, called by `import jaxttp`.

That version hands larger parts of a program to YNNPACK than those before it, and some of them come
back wrong in float32, without a word: the mean of ``logsumexp(f) - sum(y * f)`` over more than
32,768 rows is off by some tenths, and a softmax behind a few residual layers can be NaN in every
entry (`cli.known_answers` holds both). The dependencies exclude it. Where it is installed all
the same, these fusions are switched off by a flag, which XLA reads when its first backend starts.
"""

import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

from jaxlib.version import __version__ as JAXLIB

WRONG_VERSION = "0.10.2"
FLAG = "--xla_cpu_experimental_ynn_fusion_type"


class Protection(NamedTuple):
    """What has to be done about the installed jaxlib.

    Attributes:
        flags: the new value of XLA_FLAGS, or None to leave it.
        warning: what the user has to be told, or None.
    """

    flags: str | None = None
    warning: str | None = None


def protect(version: str, flags: str, started: bool, listed: str = "") -> Protection:
    """What has to be done so that a version of jaxlib computes what it should.

    Args:
        version: of jaxlib.
        flags: the present value of XLA_FLAGS, "" if there is none.
        started: whether a backend runs already, which reads no flags any more.
        listed: the flags in the file that XLA_FLAGS names, where it names a file.

    Returns:
        A `Protection`. Any other version is left alone, as an unknown flag ends the process; so is
        a user's own choice for this flag.

    Example:
        >>> protect("0.10.2", "--xla_force_host_platform_device_count=4", started=False).flags
        '--xla_force_host_platform_device_count=4 --xla_cpu_experimental_ynn_fusion_type='
        >>> protect("0.10.1", "", started=False)
        Protection(flags=None, warning=None)
    """
    if version != WRONG_VERSION or any(
        name.partition("=")[0] == FLAG for name in f"{flags} {listed}".split()
    ):
        return Protection()
    wrong = f"jaxlib {WRONG_VERSION} computes wrongly on CPUs"
    other = f"install another version (pip install 'jaxlib!={WRONG_VERSION}')"
    if started:
        return Protection(
            warning=f"{wrong}, and JAX has started already: {other}, import jaxttp before the "
            f"first computation, or set XLA_FLAGS={FLAG}= before Python starts."
        )
    if flags.strip() and not flags.strip().startswith("-"):
        return Protection(
            warning=f"{wrong}, and XLA_FLAGS names a file: {other}, or add {FLAG}= to "
            f"{flags.strip()}."
        )
    return Protection(flags=f"{flags} {FLAG}=".strip())


def listed_flags(flags: str) -> str:
    """What the file says that XLA_FLAGS names; "" where it names none."""
    name = flags.strip()
    if name and not name.startswith("-"):
        with contextlib.suppress(OSError):
            return Path(name).read_text(errors="replace")
    return ""


def backend_started() -> bool:
    """Whether JAX has started a backend; starts none, and imports nothing."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    ask = getattr(bridge, "backends_are_initialized", None)
    return bool(ask()) if callable(ask) else bool(getattr(bridge, "_backends", None))


def protect_process(version: str = JAXLIB) -> None:
    """`protect` this process, its children too, which inherit the environment.

    Args:
        version: of jaxlib.
    """
    flags = os.environ.get("XLA_FLAGS", "") if version == WRONG_VERSION else ""
    wanted = protect(version, flags, backend_started(), listed_flags(flags))
    if wanted.flags is not None:
        os.environ["XLA_FLAGS"] = wanted.flags
    if wanted.warning is not None:
        warnings.warn(wanted.warning, RuntimeWarning, stacklevel=3)
