"""Programs that are compiled in the background, while others are compiled or run.

What a forecast will need later is known early, and XLA compiles without Python's lock: on two cores
two programs at a time take less than one after the other.
"""

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import jax

WAITED = "/jax/core/compile/jaxttp_waited"
"""The event of waiting for a program, named like those of JAX's own compiler."""


class Background:
    """What was begun in the background, to be waited for.

    Example:
        >>> import jax.numpy as jnp
        >>> double, background = jax.jit(lambda x: 2 * x), Background()
        >>> background.begin(lambda: double.lower(jnp.ones(3)).compile())
        >>> background.wait()
        >>> double(jnp.ones(3)).tolist()
        [2.0, 2.0, 2.0]
    """

    def __init__(self) -> None:
        self._begun: list[concurrent.futures.Future[None]] = []

    def begin(self, work: Callable[[], Any]) -> None:
        """Begin it, at the precision of numbers of the caller.

        What fails there fails again where the program is called, and is told there.
        """
        enabled = bool(jax.config.read("jax_enable_x64"))

        def run() -> None:
            with contextlib.suppress(Exception), jax.enable_x64(enabled):
                work()

        with contextlib.suppress(RuntimeError):  # the interpreter is going away
            self._begun.append(_workers().submit(run))

    def wait(self) -> None:
        """Until what was begun is done; the time that passes here counts as compilation."""
        if not self._begun:
            return
        begun, (pending, self._begun) = time.perf_counter(), (self._begun, [])
        concurrent.futures.wait(pending)
        jax.monitoring.record_event_duration_secs(WAITED, time.perf_counter() - begun)


@functools.cache
def _workers() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="jaxttp-compiles")
