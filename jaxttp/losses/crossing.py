"""When is it over? The four definitions of training time."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxttp._core.checks import (
    check_array,
    check_choice,
    check_finite,
    check_integer,
    check_number,
    is_concrete,
)

RULES = ("relative", "gap", "absolute", "plateau")
METRICS = ("loss", "error")


def check_thresholds(thresholds: float | Sequence[float], rule: str) -> tuple[float, ...]:
    """Validated epsilons of a rule, one or several."""
    several: Any = (thresholds,) if np.ndim(thresholds) == 0 else thresholds
    if len(several) == 0:
        raise ValueError("thresholds must hold at least one number; got none.")
    for threshold in several:
        if rule == "relative":
            check_number("thresholds", threshold, above=0.0, below=1.0, remedy="1 % is 0.01.")
        else:
            check_number("thresholds", threshold, above=0.0)
    return tuple(float(threshold) for threshold in several)


def check_reading(
    thresholds: float | Sequence[float],
    rule: str,
    metric: str = "loss",
    smooth: int = 1,
    window: int | None = None,
    steps: int | None = None,
) -> tuple[float, ...]:
    """Everything that says how training times are read off a curve, checked before there is one.

    Args:
        thresholds: the epsilons, one or several.
        rule: see `training_time`.
        metric: "loss" or "error".
        smooth: see `smooth_curve`.
        window: steps of the rule "plateau".
        steps: the horizon T, where it is known.

    Returns:
        The thresholds.

    Raises:
        ValueError: an unknown rule or metric, numbers out of range, a window without "plateau".

    Example:
        >>> check_reading(0.1, "plateau", window=5, steps=150)
        (0.1,)
    """
    check_choice("rule", rule, RULES)
    check_choice("metric", metric, METRICS)
    thresholds = check_thresholds(thresholds, rule)
    check_smooth(smooth, None if steps is None else steps + 1)
    _check_window(window, rule, steps)
    return thresholds


def check_smooth(width: Any, length: int | None, name: str = "smooth") -> None:
    """Refuse a width that is even, or wider than the curve."""
    check_integer(name, width, at_least=1, at_most=length)
    if width % 2 == 0:
        raise ValueError(f"{name} must be odd, so that it has a middle; got {width}.")


def _check_window(window: int | None, rule: str, last: int | None) -> None:
    if window is None:
        return
    if rule != "plateau":
        raise ValueError(
            f"window={window!r} is for rule='plateau'; with rule={rule!r} leave it out."
        )
    remedy = "" if last is None else "The curve is that long."
    check_integer("window", window, at_least=1, at_most=last, remedy=remedy)


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
    check_smooth(width, curve.shape[0], "width")
    return _smoothed(jnp.asarray(curve), width)


def _smoothed(curve: Any, width: int) -> Any:
    """The same of a checked curve, in NumPy or JAX as it comes."""
    if width == 1:
        return curve
    if isinstance(curve, np.ndarray):
        xp, exactly = np, {}
    else:
        xp, exactly = jnp, {"precision": "highest"}
    window = xp.ones(width, curve.dtype)
    sums = xp.convolve(curve, window, mode="same", **exactly)
    counts = xp.convolve(xp.ones_like(curve), window, mode="same", **exactly)
    return xp.concatenate([curve[:1], (sums / counts)[1:]])


def _as_curve(curve: Any) -> Any:
    """A curve of floats: in NumPy where its values are known, since reading it is no computation.

    A curve of integers becomes one of floats: as an integer a threshold of 0.5 is 0.
    """
    if not isinstance(curve, jax.Array) or is_concrete(curve):
        curve = np.asarray(curve)
        if curve.dtype.kind in "OUSc":
            check_array("curve", curve)  # says what is wrong
        if curve.dtype.kind in "biu":
            curve = curve.astype(jnp.result_type(float))
        elif not isinstance(curve.dtype, np.dtype) or curve.dtype == np.float64:
            curve = curve.astype(jax.dtypes.canonicalize_dtype(curve.dtype))
    elif not jnp.issubdtype(curve.dtype, jnp.inexact):
        curve = curve.astype(jnp.result_type(float))
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
        The step as an integer scalar, or -1 where the curve never gets there: with "relative" one
        that ends where it began (unless that is 0, where nothing is left to train: 0 steps), with
        "absolute" and "plateau" one that does not come down so far, or goes on falling.

    Raises:
        ValueError: an unknown rule, a threshold out of range, a curve that is not a finite vector,
            a window or a smoothing that does not fit it, a window without "plateau".
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
    known = isinstance(curve, np.ndarray) and is_concrete(threshold)
    if isinstance(curve, np.ndarray):
        check_finite("curve", curve)
    else:
        curve = eqx.error_if(curve, ~jnp.all(jnp.isfinite(curve)), "curve holds NaN or infinity")
    check_smooth(smooth, curve.shape[0])
    _check_window(window, rule, curve.shape[0] - 1)
    if not known:
        curve = jnp.asarray(curve)
    return jnp.asarray(
        _first(np if known else jnp, _smoothed(curve, smooth), threshold, rule, window)
    )


def _first(xp: Any, curve: Any, threshold: Any, rule: str, window: int | None) -> Any:
    """The first step that counts, of a checked and smoothed curve, in NumPy or JAX."""
    threshold = xp.asarray(threshold, curve.dtype)
    last = curve.shape[0] - 1
    if rule == "plateau":
        window = max(1, last // 10) if window is None else window
        reached = curve[:-window] - curve[window:] < threshold
        return xp.where(xp.any(reached), xp.argmax(reached) + window, -1)
    if rule == "absolute":
        reached = curve < threshold
        return xp.where(xp.any(reached), xp.argmax(reached), -1)
    distance = xp.abs(curve - curve[-1])
    if rule == "gap":
        return xp.argmax((distance < threshold) | (distance == 0))
    reached = (distance < threshold * distance[0]) | (distance == 0)
    return xp.where((distance[0] > 0) | (curve[-1] == 0), xp.argmax(reached), -1)


def metric_time(
    curve: Any,
    threshold: Any,
    *,
    metric: str = "loss",
    rule: str = "relative",
    window: int | None = None,
    smooth: int = 1,
) -> Int[Array, ""]:
    """`training_time` of a curve that is known to be a loss or an error.

    An error has a share of its drop only where it drops: one that ends above its start never gets
    there. A loss may rise to where it ends (weight decay does that), and is read as
    `training_time` has it.

    Args:
        curve: (T + 1,).
        threshold: epsilon.
        metric: "loss" or "error".
        rule: see `training_time`.
        window: see there.
        smooth: see there.

    Returns:
        The step as an integer scalar, -1 where the curve never gets there.

    Raises:
        ValueError: see `training_time`.

    Example:
        >>> rising = [0.25, 0.5, 0.5]
        >>> int(metric_time(rising, 0.1, metric="error")), int(training_time(rising, 0.1))
        (-1, 1)
    """
    time = training_time(curve, threshold, rule=rule, window=window, smooth=smooth)
    if metric == "loss" or rule != "relative":
        return time
    ends = _smoothed(_as_curve(curve), smooth)
    rose = ends[-1] > ends[0]
    if is_concrete(rose):
        return jnp.asarray(-1) if bool(rose) else time
    return jnp.where(rose, -1, time)
