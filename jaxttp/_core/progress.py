"""How far a long job is and how long it still takes; how long a block took, compilation apart."""

import collections
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxttp._core.checks import check_number
from jaxttp._core.types import Progress

SHORT = 3.0
"""Seconds of a job that shows no progress by itself."""
RECENT = 32
"""Calls whose pace gives the remaining time; the first calls of a job compile."""


def print_progress(
    what: str = "", *, every: float = 10.0, after: float = 0.0, to: Any = None
) -> Callable[..., None]:
    """A function for `progress=` that prints lines with the remaining time, and messages.

    A stage with a total of 0 is a message.

    The remaining time is estimated from the pace of the last 32 calls, so that a slow start with
    compilation does not mislead for long.

    Args:
        what: a label before every line, for functions that do not name their stages.
        every: seconds between two lines, at least; the end of a stage is always printed.
        after: seconds without lines, for jobs that may be short.
        to: a file for the lines; standard error when None.

    Returns:
        A function of (done, total), or of (stage, done, total).

    Raises:
        ValueError: `every` is negative or no number.

    Example:
        >>> show = print_progress("kernel", every=0, to=sys.stdout)
        >>> show(0, 2); show(2, 2)
        kernel: 0 of 2
        kernel: 2 of 2
    """
    check_number("every", every, at_least=0.0)
    marks: collections.deque[tuple[float, int]] = collections.deque(maxlen=RECENT)
    last, begun = {"stage": what, "printed": -float("inf")}, time.monotonic()

    def show(*progress: str | int) -> None:
        *stages, done, total = progress
        if total == 0:
            return print(*stages, file=to or sys.stderr, flush=True)
        now, stage = time.monotonic(), str(stages[0]) if stages else what
        if stage != last["stage"] or (marks and int(done) < marks[-1][1]):
            marks.clear()
            last.update(stage=stage, printed=-float("inf"))
        marks.append((now, int(done)))
        if now - begun >= after and (now - float(last["printed"]) >= every or done == total):
            last["printed"] = now
            label = f"{stage}: " if stage else ""
            left = seconds_left(marks, int(total))
            remaining = f", {readable_time(left)} left" if left else ""
            print(f"{label}{done} of {total}{remaining}", file=to or sys.stderr, flush=True)

    return show


def shown(progress: Progress | bool | None) -> Progress | None:
    """The function that shows progress: one that is given, or lines where a person watches.

    Args:
        progress: a function of (stage, done, total); False for none, True for lines on standard
            error; None for lines on a terminal and in a notebook.

    Example:
        >>> shown(False) is None, shown(print) is print
        (True, True)
    """
    if progress is None:
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        progress = sys.stderr.isatty() or shell is not None
    if isinstance(progress, bool):
        return print_progress(after=SHORT) if progress else None
    return progress


def readable_time(seconds: float) -> str:
    """Seconds in the unit that suits them.

    Example:
        >>> [readable_time(t) for t in (2e-5, 0.02, 3.0, 200.0, 9000.0)]
        ['20.0 µs', '20.0 ms', '3.00 s', '3.3 min', '2.5 h']
    """
    if seconds < 1e-3:
        return f"{1e6 * seconds:.1f} µs"
    if seconds < 1:
        return f"{1e3 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def seconds_left(marks: Iterable[tuple[float, int]], total: int) -> float | None:
    """Remaining seconds at the pace of these marks; None where the pace is zero or unknown.

    Args:
        marks: (seconds, amount done at that time), in order.
        total: how much there is to do.

    Example:
        >>> seconds_left([(0.0, 0), (10.0, 2), (20.0, 4)], 7)
        15.0
    """
    (first, few), (last, done) = (marks := list(marks))[0], marks[-1]
    if done == total:
        return 0.0
    return (last - first) * (total - done) / (done - few) if done > few else None


class Stopwatch:
    """Seconds spent inside `stopwatch`, in all and on tracing, lowering and compiling.

    Attributes:
        seconds: all of it.
        compile_seconds: the part in which JAX traced, lowered or compiled.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.compile_seconds = 0.0
        self._spans: list[tuple[float, float]] = []
        self._thread = threading.get_ident()

    @property
    def run_seconds(self) -> float:
        """Seconds without compilation."""
        return self.seconds - self.compile_seconds

    def _record(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        # Compilations of the user's other threads are not part of the block.
        if event.startswith("/jax/core/compile/") and threading.get_ident() == self._thread:
            now = time.perf_counter()
            self._spans.append((now - duration_secs, now))

    def _close(self, start: float, end: float) -> None:
        self.seconds = end - start
        reached = start  # spans nest (jit inside jit), so take the length of their union
        for left, right in sorted(self._spans):
            left = max(left, reached)
            if right > left:
                self.compile_seconds += right - left
                reached = right
        self.compile_seconds = min(self.compile_seconds, self.seconds)


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    """Time a block; the caller blocks on its results inside it.

    Example:
        >>> with stopwatch() as watch:
        ...     _ = sum(range(10))
        >>> watch.seconds >= watch.compile_seconds
        True
    """
    watch = Stopwatch()
    with listening(watch._record):
        start = time.perf_counter()
        try:
            yield watch
        finally:
            watch._close(start, time.perf_counter())


@contextmanager
def listening(record: Callable[..., None]) -> Iterator[None]:
    """Call a function for every event that JAX times inside a block."""
    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
