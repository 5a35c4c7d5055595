"""Settings that would do nothing."""

import dataclasses
from collections.abc import Iterable
from typing import Any


def check_unused(settings: Any, names: Iterable[str], why: str) -> None:
    """Raise `ValueError` for settings that were changed and that nothing would read.

    Args:
        settings: a dataclass whose fields have defaults.
        names: fields that are not read.
        why: the reason, in words.

    Raises:
        ValueError: one of them is not its default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(settings)}
    for name in names:
        given = getattr(settings, name)
        if given is not None and given != defaults[name]:
            raise ValueError(f"{name}={given!r} does nothing here: {why}. Leave it out.")
