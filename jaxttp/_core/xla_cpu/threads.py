"""How many threads LAPACK gets, so that they do not fight XLA's for the cores.

XLA's CPU backend computes decompositions with the LAPACK of SciPy's BLAS, mostly OpenBLAS, which
starts a thread for every core and lets them spin while they wait for each other. In a compiled
program XLA's own threads hold those cores: on two cores a Gauss-Newton step then took 1.5 to 2
times its time, beside two other processes 3 to 100 times, different at every call. On many cores
it is worse: jaxlib 0.10.0 to 0.11.0 spread the matrices of a batch over XLA's threads, each of
which then asks OpenBLAS for a thread a core, and on a hundred cores the process crashes
(https://github.com/jax-ml/jax/issues/39292). The policy:

- **In compiled programs one thread**, from the first decomposition that this library traces
  (`settle`). Nothing of ours runs when a user's compiled step does, so it holds for the process,
  but for SciPy's BLAS alone: NumPy's is another copy (in conda environments it is the same one).
- **A large matrix that stands alone** is decomposed by `decompose` with half of the cores, if it
  is known (not traced), for that call only. Half, since two threads share most of the cores that a
  machine counts, and something else runs on the rest. On two cores that is one.
- **Around work in NumPy and SciPy** `limited` does the same, and restores what it found.

Who says otherwise is obeyed: with any variable of `VARIABLES` set nothing is touched, nor is a BLAS
that has a limit when it is first seen (`threadpoolctl.threadpool_limits`). One set later holds too:

    with threadpoolctl.threadpool_limits(16, user_api="blas"):
        jitted_program_with_a_large_decomposition(x).block_until_ready()

An OpenBLAS built on OpenMP takes such numbers for the calling thread alone, not for XLA's: there
set OMP_NUM_THREADS.
"""

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from threadpoolctl import ThreadpoolController, threadpool_limits

from jaxttp._core.checks import is_concrete

LARGE = 2000
"""Rows from which on threads are worth waiting for each other."""

ROWS = 250
"""Rows of a large matrix that keep one thread busy."""

MOST = 64
"""Threads that the OpenBLAS in the wheels of NumPy and SciPy starts at most."""

VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OPENBLAS_DEFAULT_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "OMP_NUM_THREADS",
)
"""Set by a user to say how many threads BLAS gets."""


def threads_for(rows: int, cores: int) -> int:
    """The threads for one decomposition of `rows` rows that has the machine for itself.

    Args:
        rows: the smaller side of the matrix.
        cores: logical cores that this process may use.

    Example:
        >>> [threads_for(6000, cores) for cores in (1, 2, 8, 64)]
        [1, 1, 4, 24]
        >>> threads_for(1024, 64)
        1
    """
    if rows < LARGE:
        return 1
    return max(1, min(cores // 2, rows // ROWS))


def user_decides(environment: Mapping[str, str]) -> bool:
    """Whether a variable says how many threads BLAS gets; an empty one says nothing.

    Example:
        >>> user_decides({"OMP_NUM_THREADS": "4"}), user_decides({"OMP_NUM_THREADS": ""})
        (True, False)
    """
    return any(environment.get(name) for name in VARIABLES)


def cores_of(affinity: int, quota: str = "max") -> int:
    """Cores to count on: those of the affinity mask, or of a container's quota if less.

    Args:
        affinity: logical cores on which this process may be scheduled.
        quota: what cpu.max of its control group says, "microseconds period" or "max period".

    Example:
        >>> cores_of(64, "200000 100000"), cores_of(64, "max 100000")
        (2, 64)
    """
    allowed, _, period = quota.partition(" ")
    if not (allowed.isdigit() and period.strip().isdigit() and int(period) > 0):
        return affinity
    return max(1, min(affinity, int(allowed) // int(period)))


def count_for(wanted: int, now: Mapping[str, int], before: Mapping[str, int]) -> int:
    """Threads while one piece of work runs that should have `wanted`: a user's limit holds.

    Args:
        wanted: of `threads_for`.
        now: what each library has.
        before: what those had that `settle` set to one.

    Example:
        >>> count_for(4, {"numpy": 8, "scipy": 1}, {"scipy": 8})   # the one is ours
        4
        >>> count_for(4, {"numpy": 2, "scipy": 1}, {"scipy": 8})   # the two are the user's
        2
    """
    limits = [before.get(name, 1) if count == 1 else count for name, count in now.items()]
    return min([wanted, *limits])


def of_compiled_programs(files: list[str]) -> list[str]:
    """The libraries among `files` that SciPy, and with it jaxlib, computes with.

    SciPy's wheels bring their own; elsewhere SciPy uses one that belongs to no package.

    Example:
        >>> of_compiled_programs(["/s/numpy.libs/a.so", "/s/scipy.libs/a.so"])
        ['/s/scipy.libs/a.so']
        >>> of_compiled_programs(["/s/faiss.libs/a.so", "/env/lib/libopenblas.so"])
        ['/env/lib/libopenblas.so']
    """
    own = [name for name in files if {"scipy.libs", "scipy"} & set(Path(name).parts)]
    packaged = ("site-packages", "dist-packages")
    shared = [
        name
        for name in files
        if not any(part in packaged or part.endswith(".libs") for part in Path(name).parts)
    ]
    return own or shared


class _Library(NamedTuple):
    """A library and the number of threads to restore."""

    handle: Any  # threadpoolctl's controller of it
    threads: int


_lock = threading.RLock()
_compiled: list[Any] = []  # what compiled programs use, once it is loaded
_before: dict[str, int] = {}  # what `settle` found in those that it set to one thread
_scopes: list[int] = []  # what the scopes of `limited` ask for that are open, one in another
_found: dict[str, _Library] = {}  # and what to leave behind after the last of them


def settle() -> None:
    """One thread for LAPACK in compiled programs, unless a user says otherwise.

    Called where a program with a decomposition is traced: whoever compiles our code runs it. It
    loads SciPy's LAPACK, which compiling such a program does next, and then costs microseconds.
    """
    if user_decides(os.environ):
        return
    with _lock:
        if not _compiled:
            importlib.import_module("scipy.linalg.cython_lapack")
            handles = {one.filepath: one for one in _handles()}
            _compiled.extend(handles[name] for name in of_compiled_programs(list(handles)))
        for handle in _compiled:
            name = handle.filepath
            count = _found[name].threads if name in _found else handle.get_num_threads()
            if name in _before or not _unlimited(handle, count):
                continue
            if name in _found:
                _found[name] = _Library(handle, 1)
                _before[name] = count
                continue
            handle.set_num_threads(1)
            if handle.get_num_threads() == 1:  # it may ignore other threads than the main one
                _before[name] = count


def decompose(function: Callable, matrix: Any, *others: Any, **options: Any) -> Any:
    """`function(matrix, *others, **options)`, a decomposition of `jax.numpy`, on fit threads.

    Args:
        function: such as `jnp.linalg.eigh`.
        matrix: (..., m, n); a traced one, a batch and a small one get one thread.
        others: further positional arguments of `function`.
        options: its keywords.

    Example:
        >>> import jax.numpy as jnp
        >>> decompose(jnp.linalg.eigvalsh, jnp.diag(jnp.array([1.0, 4.0]))).tolist()
        [1.0, 4.0]
    """
    settle()
    if is_concrete(matrix) and matrix.ndim == 2:
        rows = min(matrix.shape)
        if threads_for(rows, _cores()) > 1:
            with limited(rows):
                return jax.block_until_ready(function(matrix, *others, **options))
    return function(matrix, *others, **options)


@contextlib.contextmanager
def limited(rows: int) -> Iterator[None]:
    """BLAS and OpenMP on threads that are right for matrices of `rows` rows; restored at the end.

    One inside another gets what the smaller of them asks for; other threads wait for their turn.

    Example:
        >>> with limited(100):
        ...     pass
    """
    if user_decides(os.environ):
        yield
        return
    wanted = threads_for(rows, _cores())
    # Held to the end, as OpenBLAS ignores numbers that another thread sets in between.
    with _lock, threadpool_limits(1 if wanted == 1 else None, user_api="openmp"):
        if not _scopes:
            for handle in _handles():
                _found[handle.filepath] = _Library(handle, handle.get_num_threads())
        _scopes.append(wanted)
        _apply()
        try:
            yield
        finally:
            _scopes.remove(wanted)
            if _scopes:
                _apply()
            else:
                for library in _found.values():
                    library.handle.set_num_threads(library.threads)
                _found.clear()


def _apply() -> None:
    now = {name: library.threads for name, library in _found.items()}
    count = count_for(min(_scopes), now, _before)
    for library in _found.values():
        library.handle.set_num_threads(count)


def _handles() -> list[Any]:
    return ThreadpoolController().select(user_api="blas").lib_controllers


def _unlimited(handle: Any, count: int) -> bool:
    """Whether it has the threads that it starts with; MKL starts one for two logical cores."""
    cores = _affinity()
    return count >= (min(cores, MOST) if handle.internal_api == "openblas" else cores // 2)


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cores() -> int:
    try:
        quota = Path("/sys/fs/cgroup/cpu.max").read_text()
    except OSError:
        quota = "max"
    return cores_of(_affinity(), quota)
