"""`jax.jit` for the programs of a forecast: at full precision, and on CPUs compiled quickly.

What a user waits for is mostly the compilation of some dozens of programs that run a few times.
XLA's older emitter for CPUs and LLVM's first level of optimisation take half of the time of a
compilation; the programs run as fast, and the
numbers differ by rounding only. Of a deep network, where a program has many arguments, it is the
newer emitter that is quicker. Steps of real trainings stay with `jax.jit`, as their users' do.

NVIDIA's GPUs round the operands of a float32 product to TF32 by default, eleven bits, and TPUs to
bfloat16. A training run tolerates that, and runs here as JAX runs it. What is computed once to be
relied on (kernels, outputs, the courses that are read off them, pseudoinverses and their residuals)
asks for all of float32, whatever the device: `tests/test_precision.py` looks for what does not.
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
"""Options of XLA for programs of many arrays, and for those whose time is in loops over pieces of
large arrays, of which the older emitter makes copies: a layer's sketch takes it two to four times
as long."""
SHORT = {**LONG, "xla_cpu_use_fusion_emitters": False}
"""The same for all others."""
MANY = 64
"""A program of more arrays is long."""


Function = TypeVar("Function", bound=Callable[..., Any])


def full_precision(fun: Function) -> Function:
    """The same function, whose products of float32 matrices are float32 on every device.

    What it calls is traced so, too, networks of users among it, unless they say a precision.

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
    """A compiled function, as `jax.jit` gives it, at full precision; on CPUs compiled quickly.

    Within a caller's trace (XLA's options are those of whole programs), on other backends, for a
    jaxlib that does not know the options, and for users who chose options of their own, it is
    compiled as by `jax.jit` itself.

    Args:
        fun: the function, as `__wrapped__` afterwards.
        has_loops: whether its time is in loops over pieces of large arrays.
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
"""What a jaxlib has said that does not know the options."""


def is_quick() -> bool:
    """Whether a program that is called here and now is compiled with options of ours.

    Example:
        >>> jax.jit(lambda x: x + is_quick())(0).item()
        0
    """
    is_outside = jex.core.get_opaque_trace_state() == _OUTSIDE
    is_ours = is_outside and not _unknown_options and not _users_chose()
    return is_ours and jax.default_backend() == "cpu"


def _users_chose() -> bool:
    """Whether the flags or the configuration say how programs are to be compiled."""
    flags = os.environ.get("XLA_FLAGS", "")
    is_set = jax.config.values.get("jax_disable_most_optimizations", False)
    return is_set or any(name in flags for name in SHORT)


_programs: weakref.WeakSet[Any] = weakref.WeakSet()


def registered(program: Any) -> Any:
    """A function that `jax.jit` gave, to be dropped by `bound_programs` with those of `jit`."""
    _programs.add(program)
    return program


def bound_programs() -> None:
    """Drop what jaxttp has compiled before Linux lets the process map no more memory.

    `jax.jit` keeps 4,096 programs, each of which maps 15 pieces of memory or more on a CPU (jaxlib
    0.10.1), and Linux allows a process 65,530 of them: the next compilation would end the process.
    What is called again is compiled again; what the user compiled is left alone.
    """
    allowed, used = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")
    if not (allowed.exists() and used.exists()):
        return
    if used.read_bytes().count(b"\n") > 0.4 * int(allowed.read_text()):  # some 5 GiB by then
        for program in list(_programs):
            program.clear_cache()
        give_back()


def give_back() -> None:
    """What is garbage goes back to the machine; what is freed alone stays with the process."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
