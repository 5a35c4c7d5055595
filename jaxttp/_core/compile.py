"""`jax.jit` for the programs of a forecast: at full precision, and on CPUs compiled quickly.

What a user waits for is mostly the compilation of some dozens of programs that run a few times.
XLA's older emitter for CPUs and LLVM's first level of optimisation take half of the time of a
compilation; the programs run as fast, and the
numbers differ by rounding only. Of a deep network, where a program has many arguments, it is the
newer emitter that is quicker. Steps of real trainings stay with `jax.jit`, as their users' do.

NVIDIA's GPUs round the operands of a float32 product to TF32 by default, eleven bits, and TPUs to
bfloat16. A training bears that, and runs here as JAX runs it. What is computed once to be relied on
(kernels, outputs, the courses that are read off them, pseudoinverses and their residuals) asks for
all of float32, whatever the device: `tests/test_precision.py` looks for what does not.
"""

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.extend as jex

QUICKLY: dict[str, Any] = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_backend_optimization_level": 1,
}
"""Options of XLA for one program."""
NEW: dict[str, Any] = {"xla_backend_optimization_level": 1}
"""The same for long programs, and for those whose time is in loops over pieces of large arrays, of
which the older emitter makes copies: a layer's sketch takes it two to four times as long."""
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

    Within somebody's trace (XLA's options are those of whole programs), on other backends, for a
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
    plain: Any = jax.jit(fun, **options)
    short: Any = jax.jit(fun, compiler_options=NEW if has_loops else QUICKLY, **options)
    long: Any = jax.jit(fun, compiler_options=NEW, **options)

    def choose(*args: Any) -> Any:
        if not is_quick():
            return plain
        return long if len(jax.tree.leaves(args)) > MANY else short

    @functools.wraps(fun)
    @full_precision
    def call(*args: Any, **kwargs: Any) -> Any:
        run = choose(args, kwargs)
        try:
            return run(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            if "compile option" not in str(error):
                raise
            _known[:] = [False]
        return plain(*args, **kwargs)

    for each in (plain, short, long):
        registered(each)
    return call


_programs: weakref.WeakSet[Any] = weakref.WeakSet()


def registered(program: Any) -> Any:
    """A function that `jax.jit` gave, to be dropped with those of `jit`.

    Args:
        program: with a method `clear_cache`.
    """
    _programs.add(program)
    return program


def drop_programs() -> None:
    """Drop what jaxttp has compiled; what is called again is compiled again."""
    for program in list(_programs):
        program.clear_cache()


try:
    _OUTSIDE: Any = jex.core.get_opaque_trace_state()  # this module is imported outside of traces
except (AttributeError, TypeError):
    _OUTSIDE = None

_known: list[bool] = []
"""Whether the options are there and ours to choose, once that was asked."""


def is_quick() -> bool:
    """Whether a program that is called here and now is compiled with options of ours.

    Example:
        >>> jax.jit(lambda x: x + is_quick())(0).item()
        0
    """
    if not _known:
        _known[:] = [_are_ours()]
    return _known[0] and _is_outside() and jax.default_backend() == "cpu"


def _are_ours() -> bool:
    """Neither the flags nor the configuration say how programs are to be compiled."""
    flags = os.environ.get("XLA_FLAGS", "")
    chosen = jax.config.values.get("jax_disable_most_optimizations", False)
    return not chosen and not any(name in flags for name in QUICKLY)


def _is_outside() -> bool:
    """Whether no trace is going on; False where this JAX cannot say."""
    try:
        return jex.core.get_opaque_trace_state() == _OUTSIDE
    except (AttributeError, TypeError):
        return False
