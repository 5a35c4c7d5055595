"""Settings that would do nothing."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxttp._core.checks import check_used


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
        check_used(name, given, given == defaults[name], why)
