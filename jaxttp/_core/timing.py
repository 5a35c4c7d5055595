"""Wall-clock time with compilation apart."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax


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
        # What another thread of the user's compiles is no part of the block.
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
    jax.monitoring.register_event_duration_secs_listener(watch._record)
    start = time.perf_counter()
    try:
        yield watch
    finally:
        end = time.perf_counter()
        jax.monitoring.unregister_event_duration_listener(watch._record)
        watch._close(start, end)


@contextmanager
def compilations() -> Iterator[list[float]]:
    """Seconds of every program that XLA compiles inside a block; one entry each.

    Example:
        >>> with compilations() as seen:
        ...     _ = sum(range(10))
        >>> seen
        []
    """
    seen: list[float] = []

    def record(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
