"""From steps to seconds: measured on this device, or estimated for another one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import optax

from jaxttp._core.checks import check_choice, check_integer, check_known, check_number
from jaxttp._core.progress import readable_time
from jaxttp._core.results import RESULT
from jaxttp._core.types import ApplyFn, Params
from jaxttp.losses import Loss
from jaxttp.losses.rule import Target
from jaxttp.training import compile_step, time_step


@dataclasses.dataclass(frozen=True)
class Device:
    """The speed of a device, for estimates.

    Attributes:
        flops: peak operations a second of matrix products at JAX's default precision for float32
            arrays (TF32 tensor cores where there are any, bfloat16 on TPUs).
        bandwidth: peak bytes a second from and to its memory.
        dispatch: seconds until the host has started a compiled step, however small: a round figure
            of what is usual with the leaves of a network.
    """

    flops: float
    bandwidth: float
    dispatch: float = 1e-4


DEVICES: Mapping[str, Device] = {
    "T4": Device(8.1e12, 3.2e11),
    "V100": Device(15.7e12, 9.0e11),
    "L4": Device(60e12, 3.0e11),
    "A100": Device(156e12, 2.04e12),
    "H100": Device(494e12, 3.35e12),
    "H200": Device(494e12, 4.8e12),
    "TPU v4": Device(275e12, 1.23e12),
    "TPU v5e": Device(197e12, 8.19e11),
}
"""Peaks from the makers' data sheets (dense, one device; SXM variants)."""


@dataclasses.dataclass(frozen=True)
class WallClock:
    """How long training takes; prints itself as a table.

    Attributes:
        step_seconds: seconds of one step.
        seconds: for every threshold or target that is reached, seconds until then.
        total_seconds: seconds of the whole horizon.
        source: how the seconds of a step are known.
        compile_seconds: time to trace and compile the step here (not part of the above).
    """

    step_seconds: float
    seconds: Mapping[float | Target, float]
    total_seconds: float
    source: str
    compile_seconds: float

    def __str__(self) -> str:
        lines = [f"{readable_time(self.step_seconds)} a step, {self.source}"]
        for target, seconds in self.seconds.items():
            label = target.words() if isinstance(target, Target) else f"threshold {target:g}"
            lines.append(f"  to {label}: {readable_time(seconds)}")
        lines.append(f"  whole horizon: {readable_time(self.total_seconds)}")
        return "\n".join(lines)

    plot, _repr_html_, __repr__ = RESULT


def wall_clock(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    steps: Mapping[float, int] | Mapping[Target, int] | Mapping[float | Target, int],
    horizon: int,
    optimizer: optax.GradientTransformation,
    loss: str | Loss = "cross_entropy",
    batch_size: int | None = None,
    device: str | Device | None = None,
    efficiency: float = 0.4,
    repeats: int = 15,
) -> WallClock:
    """Seconds for a forecast in steps.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: weights; they are not changed.
        x: samples (N, ...); a step is timed on the first batch of them.
        y: integer labels (N,) or targets (N, C).
        steps: training times in steps, such as `Prediction.steps`, `Prediction.targets`, or
            ``{**forecast.steps, **forecast.targets}``; negative ones are left out.
        horizon: T, steps in all.
        optimizer: what trains, any optax transformation.
        loss: a name or a `Loss`.
        batch_size: samples a step; all of them when None.
        device: None measures a few steps on the current device (their result is thrown away); a
            name of `DEVICES` or a `Device` estimates them from XLA's count of operations and bytes,
            and at least what it takes to start a step.
        efficiency: fraction of the peaks that an estimate expects to reach, in (0, 1]; 0.4 is usual
            for large layers, small networks stay far below.
        repeats: timed steps.

    Returns:
        A `WallClock`.

    Raises:
        ValueError: an unknown device, numbers out of range, bad labels or batch size.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> clock = wall_clock(lambda w, x: x @ w, jnp.zeros((2, 1)), jnp.eye(2), jnp.ones((2, 1)),
        ...                    steps={0.1: 40}, horizon=100, optimizer=optax.sgd(1.0),
        ...                    loss="squared_error", device="A100")
        >>> clock.total_seconds == 100 * clock.step_seconds, clock.source
        (True, 'estimated for A100 (the time to start a step)')

    Source:
        TTP Section 5 reports seconds on one device; the roofline estimate is standard.
    """
    check_integer("horizon", horizon, at_least=1)
    check_known(efficiency=efficiency)
    check_number("efficiency", efficiency, above=0.0)
    if not isinstance(steps, Mapping):
        raise TypeError(f"steps must be a mapping, threshold -> steps; got {steps!r}.")
    if efficiency > 1:
        raise ValueError(f"efficiency must be at most 1; got {efficiency!r}.")
    training: Any = {"loss": loss, "optimizer": optimizer, "batch_size": batch_size}
    if device is None:
        measured = time_step(apply_fn, params, x, y, repeats=repeats, **training)
        seconds, compiling = measured.seconds, measured.compile_seconds
        source = f"measured on {jax.devices()[0].device_kind}"
    else:
        name = device if isinstance(device, str) else "the given device"
        if isinstance(device, str):
            device = DEVICES[check_choice("device", device, DEVICES)]
        step, _, compiling = compile_step(apply_fn, params, x, y, **training)
        counts = step.compiled.cost_analysis() or {}
        operations = float(counts.get("flops", 0.0))
        moved = float(counts.get("bytes accessed", 0.0))
        if not operations > 0:
            raise ValueError(
                f"device={name!r} needs XLA's count of operations, which the backend "
                f"{jax.default_backend()!r} does not give; measure with device=None, or run on CPU."
            )
        seconds = max(operations / device.flops, moved / device.bandwidth) / efficiency
        source = f"estimated for {name}"
        if device.dispatch > seconds:
            seconds, source = device.dispatch, f"{source} (the time to start a step)"
    total = horizon * seconds
    reached = {e: t * seconds for e, t in steps.items() if t >= 0}
    return WallClock(seconds, reached, total, source, compiling)
