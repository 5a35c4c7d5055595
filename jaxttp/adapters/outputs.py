"""The requirements on a network: outputs (N, C), each of its own sample alone; finite gradients.

Where a gradient is not finite though outputs are, the error names the sample and the parameter.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import check_leaves, is_concrete, is_finite, values_known
from jaxttp._core.compile import registered
from jaxttp._core.traced import Traced, network_of
from jaxttp._core.types import ApplyFn, Params, count, noted, notes_of, shape_words, take
from jaxttp.adapters.inputs import is_swapped, swapped_words, traced_outputs

FEW = 8
"""Samples of the test whether outputs mix them."""

TOKENS = (
    " For outputs over tokens (N, T, V) give jaxttp.flatten_tokens(apply_fn); one label a sequence "
    "goes with jaxttp.label_words(apply_fn, ids), the logits of a few words at the last token."
)


def flatten_tokens(apply_fn: ApplyFn) -> ApplyFn:
    """The network with outputs (N, T, V), of every token, as one row a sample (N, T V).

    Kernels, sketches and products need this form: `empirical_ntk` of it is (N, T V, N, T V), index
    token * V + word. Forecasts, `train` and curvature matrices need no such call.

    Args:
        apply_fn: ``(params, x) -> outputs (N, T, V)``.

    Returns:
        ``(params, x) -> outputs (N, T V)``.

    Example:
        >>> import jax.numpy as jnp
        >>> rows = flatten_tokens(lambda w, x: w[x])
        >>> rows(jnp.ones((7, 5)), jnp.zeros((2, 3), int)).shape
        (2, 15)
    """
    if not callable(apply_fn):
        raise TypeError(f"apply_fn must be a function (params, x) -> outputs; got {apply_fn!r}.")

    def rows(params: Params, x: Any) -> Array:
        outputs = apply_fn(params, x)
        return outputs.reshape(outputs.shape[0], -1)

    return noted(rows, lambda: notes_of(apply_fn))


def as_rows(
    apply_fn: ApplyFn, params: Params, x: Any, name: str = "apply_fn"
) -> tuple[ApplyFn, jax.ShapeDtypeStruct]:
    """A network with outputs (N, C), and the outputs' own shape: (N, C), or (N, T, V) of tokens.

    Args:
        apply_fn: ``(params, x) -> outputs``.
        params: its parameters.
        x: inputs (N, ...).
        name: of `apply_fn` in messages.

    Returns:
        `apply_fn` itself, or `flatten_tokens` of it, with shape and dtype of the original outputs.

    Raises:
        TypeError: see `output_shape`.
        ValueError: see `output_shape`.

    Example:
        >>> import jax.numpy as jnp
        >>> rows, outputs = as_rows(lambda w, x: w[x], jnp.ones((7, 5)), jnp.zeros((2, 3), int))
        >>> outputs.shape, output_shape(rows, jnp.ones((7, 5)), jnp.zeros((2, 3), int))
        ((2, 3, 5), (2, 15))
    """
    outputs = _traced(apply_fn, params, x, name)
    rows = flatten_tokens(apply_fn) if len(outputs.shape) == 3 else apply_fn
    output_shape(rows, params, x, name)
    return rows, outputs


def output_shape(
    apply_fn: ApplyFn, params: Params, x: Any, name: str = "apply_fn"
) -> tuple[int, int]:
    """The outputs' shape (N, C), from shapes alone: nothing is computed.

    Args:
        apply_fn: ``(params, x) -> outputs``.
        params: its parameters.
        x: inputs (N, ...), an array, a ``jax.ShapeDtypeStruct`` or a pytree; may be traced.
        name: of `apply_fn` in messages.

    Returns:
        ``(N, C)``.

    Raises:
        TypeError: `x` is no array or pytree of arrays, `apply_fn` no function of its parameters.
        ValueError: `x` is a scalar, or holds arrays of different lengths; the outputs are not one
            floating-point array (N, C); see `jaxttp.adapters.inputs.traced_outputs`.

    Example:
        >>> import jax.numpy as jnp
        >>> output_shape(lambda params, x: x @ params, jnp.ones((3, 2)), jnp.ones((5, 3)))
        (5, 2)
    """
    outputs = _traced(apply_fn, params, x, name)
    shape, n = outputs.shape, count(x)
    if len(shape) != 2 or shape[0] != n or shape[1] == 0:
        if is_swapped(apply_fn, params, x):
            raise ValueError(swapped_words(name))
        tokens = TOKENS if len(shape) == 3 and shape[0] == n else ""
        raise ValueError(
            f"{name} must return outputs (N, C), one row for every row of x; for "
            f"{shape_words(x)} it returned {shape}. Flatten to (N, C), add an axis with "
            f"outputs[:, None], or select outputs.{tokens}"
        )
    if not jnp.issubdtype(outputs.dtype, jnp.floating):
        raise ValueError(
            f"{name} must return floating-point outputs, such as logits; it returned "
            f"{outputs.dtype} of shape {shape}. Return what comes before the argmax or the cast."
        )
    return shape


def _traced(apply_fn: ApplyFn, params: Params, x: Any, name: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the outputs, one array of any shape."""
    others = [leaf for leaf in jax.tree.leaves(x) or [x] if not hasattr(leaf, "shape")]
    if others:
        kind = type(x if isinstance(x, list) else others[0]).__name__
        raise TypeError(f"x must be an array (N, ...) or a pytree of arrays; got {kind}.")
    check_leaves("x", x)
    count(x)
    outputs = traced_outputs(apply_fn, params, x, name)
    if not isinstance(outputs, jax.ShapeDtypeStruct):
        raise ValueError(
            f"{name} must return one array (N, C); it returned a {type(outputs).__name__}. Select "
            f"the outputs, for instance with lambda params, x: {name}(params, x)[0]."
        )
    return outputs


def check_per_sample(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    name: str = "apply_fn",
    *,
    evaluate: Callable[[Params, Any], Array] | None = None,
    outputs: Array | None = None,
) -> None:
    """Raise `ValueError` unless outputs are (N, C) and each depends on its own sample alone.

    The network is evaluated on two batches of k = min(N, 8) rows with the same first row:
    ``x[:k]``, and k copies of ``x[0]``, whose outputs must all be the same (dropout's are not). One
    compiled function computes both, in the same order, so that row 0 agrees to the last bit unless
    it depends on the other rows; the tolerance, sqrt(machine epsilon) and at most 1 % of the
    largest output, is for nondeterministic hardware. Where all rows of outputs are equal (a last
    layer initialized at zero), the gradients of row 0 are compared instead.

    Shapes are always checked. The rest is skipped for a single sample, traced values, arrays spread
    over several processes, and rows of `x` that are all equal.

    Args:
        apply_fn: ``(params, x) -> outputs``.
        params: its parameters.
        x: inputs (N, ...).
        name: of `apply_fn` in messages.
        evaluate: `apply_fn` compiled for all of `x`; with `outputs`, k is N and nothing more is
            compiled.
        outputs: of `evaluate` for `x`.

    Raises:
        TypeError: see `output_shape`.
        ValueError: see `output_shape`; an output depends on the other samples of its batch.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.array([[1.0], [4.0]])
        >>> check_per_sample(lambda params, x: x * params, jnp.ones((1, 1)), x)
        >>> check_per_sample(lambda params, x: x - x.mean(0, keepdims=True), None, x)
        Traceback (most recent call last):
        ...
        ValueError: apply_fn: an output depends on the other samples of its batch...
    """
    rows, _ = output_shape(apply_fn, params, x, name)
    if rows < 2 or not all(map(_is_available, jax.tree.leaves((params, x)))):
        return
    with values_known():
        batch, copies, are_alike = _first_rows(x, min(rows, FEW if evaluate is None else rows))
        if bool(are_alike):
            return
        if evaluate is None:
            network = network_of(apply_fn).at(params, batch)
            evaluate = functools.partial(_forward, network)
        outputs = evaluate(params, batch) if outputs is None else outputs
        if not is_concrete(outputs):
            return  # `apply_fn` itself closes over traced values
        mixed, alone = np.asarray(outputs), np.asarray(evaluate(params, copies))
        is_mixing = _differ(mixed[0], alone[0])
        is_random = _differ(alone, np.broadcast_to(alone[:1], alone.shape))
        if not is_mixing and bool(np.all(mixed == mixed[:1])):
            batches = _first_rows(x, min(rows, FEW))[:2]
            network = network_of(apply_fn).at(params, batches[0])
            is_mixing = _differ(*(_row_gradient(params, network, batch) for batch in batches))
    if is_random and not is_mixing:
        raise ValueError(
            f"{name}: copies of one sample give different outputs, as with dropout that is left "
            "on; such a network has no per-example kernel. Put it into evaluation mode: "
            "jaxttp.from_nnx, from_linen and from_equinox do."
        )
    if is_mixing:
        raise ValueError(
            f"{name}: an output depends on the other samples of its batch, as with BatchNorm in "
            "training mode; such a network has no per-example kernel. Put the normalization into "
            "evaluation mode (running averages): jaxttp.from_nnx, from_linen and from_equinox do. "
            "Statistics over the batch that are computed by hand need a stored value instead."
        )


@functools.partial(jax.jit, static_argnums=1)
def _first_rows(x: Any, size: int) -> tuple[Any, Any, Array]:
    """The first rows, as many copies of the first one, and whether they are equal."""
    batch = x if size == count(x) else take(x, slice(size))
    copies = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), batch)
    same = jax.tree.map(lambda leaf, copy: jnp.all(leaf == copy), batch, copies)
    return batch, copies, functools.reduce(jnp.logical_and, jax.tree.leaves(same))


@registered
@jax.jit
def _forward(network: Traced, params: Params, x: Any) -> Array:
    return network(params, x)


@eqx.filter_jit
@eqx.filter_grad
def _row_gradient(params: Params, network: Traced, x: Any) -> Array:
    """The gradient in the parameters of a weighted sum of the outputs of row 0."""
    outputs = network(params, x)[0]
    return jnp.sum(outputs * np.cos(np.arange(outputs.size)).astype(outputs.dtype))


def _differ(batch: Any, copies: Any) -> bool:
    """Whether results for row 0 differ by more than rounding.

    NaN among copies of a row (a standard deviation of zero) where the batch is finite is a
    difference; NaN in the batch may come from another row's data, which another check finds.
    """
    pairs = zip(jax.tree.leaves(batch), jax.tree.leaves(copies), strict=True)
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in pairs]
    size = max((np.where(np.isfinite(a), abs(a), 0).max(initial=0) for a, _ in pairs), default=0)
    for a, b in pairs:
        tolerance = min(float(jnp.finfo(a.dtype).eps) ** 0.5, 0.01)
        with np.errstate(invalid="ignore"):
            near = abs(a - b) <= tolerance * size
        if np.any(np.isfinite(a) & ~near):
            return True
    return False


def _is_available(leaf: Any) -> bool:
    return is_concrete(leaf) and getattr(leaf, "is_fully_addressable", True)


DERIVATIVES = {1: "gradient", 2: "second derivative"}


def check_gradients(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    result: Any,
    *,
    trainable: Sequence[bool] | None = None,
    order: int = 1,
    name: str = "x",
) -> None:
    """Raise `ValueError` if `result` is not finite because the gradient of a sample is not.

    The norm of a row of zeros is 0 and has no derivative: outputs are finite and the Jacobian is
    not. Where `result` is finite nothing else is computed. Else samples are differentiated
    in turn, 8 at a time, until one has a gradient that is not finite. If none has, nothing is
    raised: `result` has another reason, such as a learning rate that is too high.

    Traced values, and arrays spread over several processes, pass.

    Args:
        apply_fn: ``(params, x) -> outputs (N, ...)``; row i depends on row i of x alone.
        params: pytree of arrays.
        x: samples (N, ...), an array or a pytree of arrays.
        result: pytree of arrays computed from the gradients.
        trainable: for each leaf of `params`, whether it is differentiated by; None for all that
            are floating-point.
        order: 1, or 2 for results of second derivatives.
        name: of `x` in the message.

    Raises:
        ValueError: with the index of the first such sample, and the path of the parameter.

    Example:
        >>> x = jnp.array([[3.0, 4.0], [0.0, 0.0]])
        >>> network = lambda w, x: jnp.linalg.norm(x * w[None], axis=1, keepdims=True)
        >>> check_gradients(network, jnp.ones(2), x, jnp.nan)
        Traceback (most recent call last):
        ...
        ValueError: apply_fn: the gradient of sample 1 of x with respect to params is not finite...
    """
    if not all(map(_is_available, jax.tree.leaves((params, x, result)))):
        return
    if all(map(is_finite, jax.tree.leaves(result))):
        return
    params = jax.tree.map(jnp.asarray, params)
    mask: Any = eqx.is_inexact_array
    if trainable is not None:
        mask = jax.tree.unflatten(jax.tree.structure(params), trainable)
    trained, frozen = eqx.partition(params, mask)

    def signed_sum(trained: Params, frozen: Params, rows: Any) -> Array:
        """A scalar with a different weight on every output of a row, so that none cancel."""
        outputs = apply_fn(eqx.combine(trained, frozen), rows)
        signs = np.cos(np.arange(outputs[0].size)).reshape(1, *outputs.shape[1:])
        return jnp.sum(outputs * signs.astype(outputs.dtype))

    @functools.partial(jax.jit, static_argnums=4)
    def are_bad(trained: Params, frozen: Params, x: Any, start: Any, size: int) -> Array:
        """For each leaf of `trained`, whether its gradient at some rows is not finite."""
        rows = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(jnp.asarray(a), start, size), x)
        derivative = functools.partial(jax.grad(signed_sum), frozen=frozen, rows=rows)
        result = derivative(trained)
        if order == 2:
            result = jax.jvp(derivative, (trained,), (jax.tree.map(jnp.ones_like, trained),))[1]
        return jnp.stack([~jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(result)])

    low, high = 0, count(x)
    for size in (min(FEW, high), 1):
        for start in range(low, high, size):
            bad = np.asarray(are_bad(trained, frozen, x, start, size))
            if bad.any():
                low, high = start, min(start + size, high)
                break
        else:
            return
    path = jax.tree_util.tree_leaves_with_path(trained)[bad.argmax()][0]
    raise ValueError(
        f"apply_fn: the {DERIVATIVES[order]} of sample {low} of {name} with respect to "
        f"params{jax.tree_util.keystr(path)} is not finite. A norm, a square root or a power has "
        "no derivative at 0, where its value is finite. Add an epsilon inside, such as "
        "jnp.sqrt(jnp.sum(h**2, axis=-1) + 1e-12), or leave the sample out."
    )
