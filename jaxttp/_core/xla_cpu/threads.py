"""LAPACK within XLA's compiled functions on CPUs: one thread each, and one batch at a time.

Measured with jaxlib 0.10.1. Both parts can go once jaxlib computes a batch of decompositions on one
thread and passes the number of free threads to LAPACK.

**Threads.** XLA calls the LAPACK of SciPy's BLAS, mostly OpenBLAS, which starts a thread for every
core and lets them spin while they wait for each other, on cores that XLA's own threads hold. On two
cores a Gauss-Newton step then took 1.5 to 2 times its time, beside two other processes 3 to 100
times; on a hundred cores the process crashes (https://github.com/jax-ml/jax/issues/39292). So
`settle` gives LAPACK in compiled programs one thread, for the process, and a large matrix that
stands alone half of the cores for that call (`decompose`, `limited`). A user who sets one of
`VARIABLES` decides.

**Order.** jaxlib cuts a *batch* of matrices, as `jax.vmap` makes it, into a task for each thread of
XLA's pool and waits for them on a thread of the same pool. With as many independent batches in one
program as there are cores all threads wait, and the process never ends (two batches of 20 SVDs of
60 x 30 on two cores, within seconds). So a batch waits for the results `after` which it comes.
"""

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from threadpoolctl import ThreadpoolController, threadpool_limits

from jaxttp._core.checks import is_concrete

VARIABLES = (
    "OPENBLAS_NUM_THREADS", "OPENBLAS_DEFAULT_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS", "OMP_NUM_THREADS",
)  # fmt: skip
"""Set by a user to say how many threads BLAS gets."""
LARGE = 2000
"""Rows from which on threads are worth waiting for each other; 250 rows keep one thread busy."""

_lock = threading.RLock()
_settled: list[bool] = []


def user_decides() -> bool:
    """Whether a variable sets the number of threads of BLAS; empty ones do not."""
    return any(os.environ.get(name) for name in VARIABLES)


def settle() -> None:
    """One thread for LAPACK in compiled functions, for this process, unless a user sets a number.

    Called where a function with a decomposition is traced. It loads SciPy's LAPACK, as compiling
    such a function does. NumPy's BLAS is another copy and keeps its threads.
    """
    if _settled or user_decides():
        return
    _settled.append(True)
    importlib.import_module("scipy.linalg.cython_lapack")
    libraries = ThreadpoolController().select(user_api="blas").lib_controllers
    # Where SciPy's wheel brings no BLAS of its own it computes with one that belongs to no wheel.
    own = [lib for lib in libraries if {"scipy.libs", "scipy"} & {*Path(lib.filepath).parts}]
    shared = [lib for lib in libraries if ".libs" not in lib.filepath]
    for library in own or shared:
        library.set_num_threads(1)


def decompose(function: Callable[..., Any], matrix: Array, *others: Any, **options: Any) -> Any:
    """A decomposition on a suitable number of threads: `function` of a matrix and more arguments.

    Args:
        function: such as `jnp.linalg.eigh`.
        matrix: traced, batched or a single one; a known matrix of `LARGE` rows gets several
            threads.
        others: further arguments.
        options: keywords.

    Example:
        >>> decompose(jnp.linalg.eigvalsh, jnp.diag(jnp.array([1.0, 4.0]))).tolist()
        [1.0, 4.0]
    """
    settle()
    rows = min(matrix.shape[-2:])
    if is_concrete(matrix) and matrix.ndim == 2 and rows >= LARGE:
        with limited(rows):
            return jax.block_until_ready(function(matrix, *others, **options))
    return function(matrix, *others, **options)


@contextlib.contextmanager
def limited(rows: int) -> Iterator[None]:
    """BLAS and OpenMP on as many threads as suit matrices of `rows` rows; restored at the end.

    Half of the cores at most: two threads share most of the cores that a machine counts.

    Example:
        >>> with limited(100):
        ...     pass
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = 1 if rows < LARGE else max(1, min((cores or 1) // 2, rows // 250))
    with contextlib.ExitStack() as stack:
        if not user_decides():
            stack.enter_context(_lock)
            stack.enter_context(threadpool_limits(threads))
        yield


def after(value: Array, *done: Array) -> Array:
    """Return `value`, unchanged; in a compiled function available once all of `done` is computed.

    Args:
        value: any floating-point array.
        done: real arrays. Give all results so far: one that is not batched has waited for nothing.

    Example:
        >>> after(jnp.ones(2), jnp.zeros(3)).tolist()
        [1.0, 1.0]
    """
    if is_concrete(value) or not done:
        return value
    with jax.enable_x64(True):  # the arrays may be of float64 in any mode
        firsts = [jax.lax.stop_gradient(array).reshape(-1)[0].astype(value.dtype) for array in done]
        total = functools.reduce(jnp.add, firsts)
        # Not an optimization_barrier, which XLA removes before it schedules. XLA keeps 0 * x, since
        # x may be negative.
        return value + 0 * jnp.where(jnp.isfinite(total), total, 0)
