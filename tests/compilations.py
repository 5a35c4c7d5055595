"""How many programs XLA compiles while something runs."""

import contextlib

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def counted():
    """A list that holds one entry for every program compiled inside the block."""
    found = []

    def listen(event, duration, **_):
        if event == EVENT:
            found.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
