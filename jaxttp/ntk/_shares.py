"""How many devices a kernel takes: each has its rows of it, and a bound on its memory."""

from collections.abc import Callable

from jaxttp.ntk._memory import TooLittle
from jaxttp.ntk._plan import KernelPlan

PlanOnDevices = Callable[[int], KernelPlan]


def plan_on(devices: int, plan: PlanOnDevices, most: int) -> KernelPlan:
    """The plan of one of so many devices.

    Args:
        devices: that share the rows.
        plan: of one of any number of devices; raises `TooLittle`.
        most: devices that can have a row each.

    Raises:
        ValueError: a bound that cannot be kept, with the fewest devices that can keep it.
    """
    try:
        return plan(devices)
    except TooLittle as problem:
        fewest = fewest_devices(devices + 1, plan, most)
        if fewest is None:
            raise
        raise TooLittle(
            f"{problem} Or share its rows over a mesh of at least {fewest} devices, each with that "
            "bound."
        ) from None


def fewest_devices(least: int, plan: PlanOnDevices, most: int) -> int | None:
    """The fewest devices, from so many on, that can keep a bound; None where `most` cannot.

    Example:
        >>> def plan(devices):
        ...     if devices < 7:
        ...         raise TooLittle
        >>> fewest_devices(2, plan, 50), fewest_devices(2, plan, 6)
        (7, None)
    """

    def fits(devices: int) -> bool:
        try:
            plan(devices)
        except TooLittle:
            return False
        return True

    low, high = least - 1, least
    while not fits(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
