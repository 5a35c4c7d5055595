"""What XLA compiles inside a block."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxttp._core.progress import listening


@contextmanager
def compilations() -> Iterator[list[float]]:
    """Seconds of every compilation by XLA inside a block."""
    seen: list[float] = []

    def record(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration_secs)

    with listening(record):
        yield seen
