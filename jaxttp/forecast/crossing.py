"""When is it over? The four definitions of training time."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxttp._checks import check_choice, check_finite, check_integer, check_number, is_concrete

RULES = ("relative", "gap", "absolute", "plateau")
METRICS = ("loss", "error")


def check_thresholds(thresholds: float | Sequence[float], rule: str) -> tuple[float, ...]:
    """Validated epsilons of a rule, one or several."""
    if isinstance(thresholds, int | float):
        thresholds = (thresholds,)
    if len(thresholds) == 0:
        raise ValueError("thresholds must hold at least one number; got none.")
    for threshold in thresholds:
        if rule == "relative":
            check_number("thresholds", threshold, above=0.0, below=1.0, remedy="1 % is 0.01.")
        else:
            check_number("thresholds", threshold, above=0.0)
    return tuple(float(threshold) for threshold in thresholds)


def smooth_curve(curve: Any, width: int) -> Float[Array, " t"]:
    """A curve averaged over `width` neighbouring steps, its first value left as it is.

    S_t is the mean of L_s over |s - t| <= (width - 1)/2 within the curve, and S_0 = L_0: smoothing
    L_0 too would lower it, and move every training time. Smooth forecast and reality alike.

    Args:
        curve: L_0, ..., L_T, shape (T + 1,).
        width: an odd number of steps; 1 changes nothing.

    Returns:
        The smoothed curve (T + 1,).

    Raises:
        ValueError: an even width, or one longer than the curve.

    Example:
        >>> smooth_curve([4.0, 1.0, 1.0, 1.0, 0.0, 0.0], 3).tolist()[:4]
        [4.0, 2.0, 1.0, 0.66666...]

    Source:
        TTP Section 5 reads training times off smoothed losses; the raw L_0 is an erratum.
    """
    curve = _as_curve(curve)
    check_integer("smooth", width, at_least=1, at_most=curve.shape[0])
    if width % 2 == 0:
        raise ValueError(f"smooth must be odd, so that it has a middle; got {width}.")
    if width == 1:
        return curve
    window = jnp.ones(width, curve.dtype)
    sums = jnp.convolve(curve, window, mode="same", precision="highest")
    counts = jnp.convolve(jnp.ones_like(curve), window, mode="same", precision="highest")
    return (sums / counts).at[0].set(curve[0])


def _as_curve(curve: Any) -> Array:
    curve = jnp.asarray(curve)
    if not jnp.issubdtype(curve.dtype, jnp.inexact):
        curve = curve.astype(jnp.result_type(float))  # a threshold of 0.5 is no integer
    if curve.ndim != 1 or curve.shape[0] < 2:
        raise ValueError(f"curve must be a vector of at least two losses; got shape {curve.shape}.")
    return curve


def training_time(
    curve: Any,
    threshold: Any,
    *,
    rule: str = "relative",
    window: int | None = None,
    smooth: int = 1,
) -> Int[Array, ""]:
    """The first step at which a loss (or error) curve counts as converged.

    Args:
        curve: L_0, ..., L_T, shape (T + 1,); one entry a step.
        threshold: epsilon; a share in (0, 1) for "relative", in units of the curve otherwise.
        rule: "relative": first t with |L_t - L_T| < epsilon |L_0 - L_T|;
            "gap": first t with |L_t - L_T| < epsilon; "absolute": first t with L_t < epsilon;
            "plateau": first t with L_{t-window} - L_t < epsilon.
        window: steps of "plateau"; a tenth of the horizon when None. An epoch has N/B steps.
        smooth: the curve is averaged over so many steps first, see `smooth_curve`.

    Returns:
        The step as an integer scalar, or -1 where the curve never gets there (possible for
        "absolute" and "plateau" only). A curve that ends where it began takes 0 steps.

    Raises:
        ValueError: an unknown rule, a threshold out of range, a curve that is not a finite vector,
            a window or a smoothing that does not fit it.
        RuntimeError: at run time, for a traced curve with NaN or infinity.

    Example:
        >>> import jax.numpy as jnp
        >>> int(training_time(jnp.array([1.0, 0.5, 0.2, 0.1, 0.0]), 0.25))
        2
        >>> int(training_time(jnp.array([1.0, 0.5, 0.4]), 0.3, rule="absolute"))
        -1

    Source:
        TTP Section 5 and Appendix A; the paper leaves open whether epsilon is a share of
        L_0 - L_T: it is in "relative", the default, and not in "gap".
    """
    check_choice("rule", rule, RULES)
    curve = _as_curve(curve)
    if rule == "relative":
        check_number(
            "threshold", threshold, above=0.0, below=1.0, remedy="It is a share of the drop."
        )
    else:
        check_number("threshold", threshold, above=0.0)
    if is_concrete(curve):
        check_finite("curve", np.asarray(curve))
    else:
        curve = eqx.error_if(curve, ~jnp.all(jnp.isfinite(curve)), "curve holds NaN or infinity")
    curve = smooth_curve(curve, smooth)
    threshold = jnp.asarray(threshold, curve.dtype)
    last = curve.shape[0] - 1
    if rule == "plateau":
        window = max(1, last // 10) if window is None else window
        check_integer("window", window, at_least=1, at_most=last, remedy="The curve is that long.")
        reached = curve[:-window] - curve[window:] < threshold
        return jnp.where(jnp.any(reached), jnp.argmax(reached) + window, -1)
    if rule == "absolute":
        reached = curve < threshold
        return jnp.where(jnp.any(reached), jnp.argmax(reached), -1)
    distance = jnp.abs(curve - curve[-1])
    bound = threshold if rule == "gap" else threshold * distance[0]
    reached = (distance < bound) | (distance == 0)
    return jnp.argmax(reached)


def read_times(
    loss: Any,
    error: Any,
    thresholds: float | Sequence[float],
    *,
    metric: str,
    rule: str,
    smooth: int,
    window: int | None,
    diverged: bool,
) -> dict[float, int]:
    """Training times off one of two curves.

    Args:
        loss: (T + 1,).
        error: (T + 1,).
        thresholds: the epsilons.
        metric: which of the two, "loss" or "error".
        rule: see `training_time`.
        smooth: see `smooth_curve`.
        window: steps of the rule "plateau".
        diverged: whether no threshold counts as reached.

    Returns:
        Steps for every threshold, -1 where it diverged or never gets there.

    Raises:
        ValueError: an unknown metric or rule, a threshold out of range.

    Example:
        >>> read_times([1.0, 0.5, 0.1, 0.0], [1.0, 1.0, 1.0, 0.0], (0.2, 0.6), metric="loss",
        ...            rule="gap", smooth=1, window=None, diverged=False)
        {0.2: 2, 0.6: 1}
    """
    curve = loss if check_choice("metric", metric, METRICS) == "loss" else error
    check_choice("rule", rule, RULES)
    wanted = check_thresholds(thresholds, rule)
    if diverged:
        return dict.fromkeys(wanted, -1)
    return {
        e: int(training_time(curve, e, rule=rule, smooth=smooth, window=window)) for e in wanted
    }
