"""`jax.jit` for a forecast's compiled functions: at full precision, and on CPUs compiled quickly.

Most of the time of a forecast is the compilation of some dozens of functions that run a few times.
XLA's older emitter for CPUs and LLVM's first optimization level halve the time of a compilation;
the functions run as fast, and results differ by rounding only. For a deep network, whose functions
have many arguments, the newer emitter is quicker. Steps of training runs use `jax.jit`, as users'
own training does.

NVIDIA's GPUs round the operands of a float32 product to TF32 by default, eleven bits, and TPUs to
bfloat16. Training runs tolerate that and use JAX's defaults. Kernels, outputs, forecasts,
pseudoinverses and their residuals are computed in float32 on every device;
`tests/test_precision.py` checks that.
"""

import ctypes
import functools
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import jax.extend as jex

LONG = {"xla_backend_optimization_level": 1}
"""Options of XLA for functions of many arrays, and for loops over slices of large arrays. The older
emitter copies these: a layer's sketch takes 2 to 4 times as long."""
SHORT = {**LONG, "xla_cpu_use_fusion_emitters": False}
"""Options for all other functions."""
MANY = 64
"""Functions of more arrays take the options `LONG`."""


Function = TypeVar("Function", bound=Callable[..., Any])


def full_precision(fun: Function) -> Function:
    """The same function, whose products of float32 matrices are float32 on every device.

    Functions that it calls are traced at the same precision, users' networks included, unless they
    set a precision themselves.

    Args:
        fun: any function; under `jax.jit` and the like it counts while it is traced.

    Example:
        >>> import jax.numpy as jnp
        >>> product = full_precision(lambda a, b: a @ b)
        >>> "HIGHEST" in str(jax.make_jaxpr(product)(jnp.ones((2, 3)), jnp.ones((3, 2))))
        True
    """

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return fun(*args, **kwargs)

    return cast(Function, call)


def jit(fun: Callable[..., Any], *, has_loops: bool = False, **options: Any) -> Callable[..., Any]:
    """A compiled function, as of `jax.jit`, at full precision; on CPUs compiled quickly.

    It is compiled with the options of `jax.jit` itself within a caller's trace (XLA's options apply
    to whole functions), on other backends, if jaxlib does not support the options, and if the user
    sets some of them.

    Args:
        fun: the function, as `__wrapped__` afterwards.
        has_loops: whether loops over slices of large arrays dominate its time.
        options: those of `jax.jit`.

    Example:
        >>> import jax.numpy as jnp
        >>> @jit
        ... def double(x):
        ...     return 2 * x
        >>> double(jnp.ones(2)).tolist(), jax.grad(double)(3.0).tolist()
        ([2.0, 2.0], 2.0)
    """
    plain: Any = registered(jax.jit(fun, **options))
    long: Any = registered(jax.jit(fun, compiler_options=LONG, **options))
    short: Any = registered(jax.jit(fun, compiler_options=SHORT, **options))

    @functools.wraps(fun)
    @full_precision
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_quick():
            return plain(*args, **kwargs)
        is_long = has_loops or len(jax.tree.leaves((args, kwargs))) > MANY
        try:
            return (long if is_long else short)(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            if "compile option" not in str(error):
                raise
            _unknown_options.append(str(error))
        return plain(*args, **kwargs)

    return call


_OUTSIDE: Any = jex.core.get_opaque_trace_state()  # this module is imported outside of traces
_unknown_options: list[str] = []
"""Error messages of a jaxlib that does not support the options."""


def is_quick() -> bool:
    """Whether a function called now is compiled with the options of this module.

    Example:
        >>> jax.jit(lambda x: x + is_quick())(0).item()
        0
    """
    is_outside = jex.core.get_opaque_trace_state() == _OUTSIDE
    is_ours = is_outside and not _unknown_options and not _users_chose()
    return is_ours and jax.default_backend() == "cpu"


def _users_chose() -> bool:
    """Whether flags or the configuration set how functions are compiled."""
    flags = os.environ.get("XLA_FLAGS", "")
    is_set = jax.config.values.get("jax_disable_most_optimizations", False)
    return is_set or any(name in flags for name in SHORT)


_compiled: weakref.WeakSet[Any] = weakref.WeakSet()


def registered(compiled: Any) -> Any:
    """A function of `jax.jit`, whose cache `bound_programs` may clear."""
    _compiled.add(compiled)
    return compiled


def bound_programs() -> None:
    """Clear jaxttp's caches of compiled functions before the process reaches Linux's map limit.

    `jax.jit` keeps 4,096 compiled functions, each with 15 memory maps or more on a CPU (jaxlib
    0.10.1). Linux allows a process 65,530 maps; beyond, the next compilation ends the process.
    Cleared functions compile again when they are called; those of the user are kept.
    """
    allowed, used = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")
    if not (allowed.exists() and used.exists()):
        return
    if used.read_bytes().count(b"\n") > 0.4 * int(allowed.read_text()):  # at some 5 GiB
        for compiled in list(_compiled):
            compiled.clear_cache()
        give_back()


def give_back() -> None:
    """Collect garbage and return freed memory to the operating system."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
