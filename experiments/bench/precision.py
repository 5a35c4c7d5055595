"""Which public functions depend on how a device multiplies matrices that nobody asked it to round?

    python -m experiments.bench.precision [NAME ...]

NVIDIA's GPUs round the operands of a float32 product to TF32 (ten bits of mantissa) where no
precision is asked for. Here a CPU does so: every function of `experiments.bench.audit_calls` is
called as it is and then with such products, on the same arguments, and what differs by more than
rounding is printed, largest first, relative to the largest value of the array. Real training runs
as JAX runs it and is expected there, with seconds that were measured; all else asks for
``precision="highest"`` or stands under `jaxttp._core.compile.full_precision`.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from experiments.bench.audit import leaves
from experiments.bench.audit_calls import calls, functions

MANTISSA = 10
ROUNDING = 1e-5
"""Some hundred roundings of float32; TF32 makes 1e-4 to 1e-3."""
ROUNDED = {
    "train": "real training", "race": "real training", "race_starts": "real training",
    "online": "follows a real training",
    "time_step": "measured seconds", "wall_clock": "measured seconds",
    "predict_training_time": "measured seconds", "forecast.forecast_training": "measured seconds",
    "dynamics.relinearized_recursion": "estimates of its error, which are rounding at two points",
}  # fmt: skip
"""Functions that may differ, and why."""


@contextlib.contextmanager
def rounded_products() -> Iterator[None]:
    """Within it a CPU computes float32 products as an NVIDIA GPU does by default.

    Raises:
        RuntimeError: this version of JAX has its lowerings elsewhere.
    """
    try:
        from jax._src.interpreters import mlir
        from jax._src.lax import convolution
        from jax._src.lax import lax as products

        primitives = (products.dot_general_p, convolution.conv_general_dilated_p)
        rules = mlir._platform_specific_lowerings["cpu"]
        before = {primitive: rules[primitive].rule for primitive in primitives}
        register = mlir.register_lowering
    except (ImportError, AttributeError, KeyError) as problem:
        raise RuntimeError(f"this JAX cannot be told how to multiply: {problem}") from problem
    try:
        for primitive, rule in before.items():
            register(primitive, functools.partial(_rounded, rule), platform="cpu")
        jax.clear_caches()
        yield
    finally:
        for primitive, rule in before.items():
            register(primitive, rule, platform="cpu")
        jax.clear_caches()


def _rounded(rule: Any, ctx: Any, left: Any, right: Any, **params: Any) -> Any:
    precision = params["precision"]
    both = precision if isinstance(precision, tuple) else (precision,)
    if all(one in (None, jax.lax.Precision.DEFAULT) for one in both):
        kinds = ctx.avals_in[:2]
        left, right = map(_to_tf32, (left, right), kinds)
    return rule(ctx, left, right, **params)


def _to_tf32(value: Any, kind: Any) -> Any:
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import hlo

    if kind.dtype != np.float32:
        return value
    bits = ir.IntegerType.get_signless(32)
    return hlo.reduce_precision(value, *(ir.IntegerAttr.get(bits, size) for size in (8, MANTISSA)))


def difference(one: Any, other: Any) -> float:
    """Of two results of a function, the largest relative one of their arrays."""
    found = 0.0
    first, second = ([np.asarray(leaf, np.float64) for leaf in leaves(r, 6)] for r in (one, other))
    if [a.shape for a in first] != [b.shape for b in second]:
        return float("inf")
    for a, b in zip(first, second, strict=True):
        known = np.isfinite(a) & np.isfinite(b)
        if np.any(known):
            size = max(float(np.max(np.abs(a[known]))), 1e-30)
            found = max(found, float(np.max(np.abs(a - b)[known])) / size)
    return found


def differences(names: list[str] | None = None) -> dict[str, float]:
    """Function -> how far products in TF32 move its result; all functions when None."""
    known, given = functions(), calls()
    chosen = {name: given[name] for name in names or given if name in known}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = {name: known[name](**arguments) for name, arguments in chosen.items()}
        with rounded_products():
            return {
                name: difference(plain[name], known[name](**arguments))
                for name, arguments in chosen.items()
            }


def main(names: list[str]) -> int:
    """Print what depends on the device; 1 where that is not expected."""
    found = differences(names)
    wrong = 0
    for name, size in sorted(found.items(), key=lambda pair: -pair[1]):
        if size > ROUNDING:
            wrong += name not in ROUNDED
            print(f"{size:.1e} {name}: {ROUNDED.get(name, 'NOT EXPECTED')}")
    print(f"{len(found)} functions, {wrong} that should not depend on it and do")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
