"""Numbers as JSON takes them."""

import math
from typing import Any

import numpy as np


def plain_number(value: Any) -> float | None:
    """A float; None where it is not finite, which JSON does not know."""
    return float(value) if math.isfinite(float(value)) else None


def plain_numbers(values: Any) -> list[float | None]:
    """A list of them."""
    return [plain_number(value) for value in np.asarray(values)]
