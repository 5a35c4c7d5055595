"""The network at the data, compiled: outputs, and products with its Jacobian.

Weights in half precision come in as float32: what follows needs small differences of outputs.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxttp._core.checks import is_concrete
from jaxttp._core.compile import jit
from jaxttp._core.products import with_forward_mode
from jaxttp._core.traced import Traced, network_of
from jaxttp._core.types import ApplyFn, Params, select_leaves
from jaxttp.losses import Loss
from jaxttp.losses.centered_logits import CenteredLogits, centered_logits, from_centered_logits


@jit
def inner(left: Params, right: Params) -> Array:
    """The product of two vectors in weight space."""
    leaves = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return sum((jnp.vdot(a, b) for a, b in leaves), start=jnp.zeros(()))


@jit
def add_scaled(total: Params, weight: Array, vector: Params) -> Params:
    """Total + weight vector, in weight space."""
    return jax.tree.map(lambda a, b: a + weight.astype(a.dtype) * b, total, vector)


@jit
def scale(diagonal: Params, vector: Params) -> Params:
    """A diagonal times a vector, in weight space."""
    return jax.tree.map(lambda q, v: q * v, diagonal, vector)


def compile_network(apply_fn: ApplyFn) -> tuple[Callable, Callable, Callable]:
    """Outputs, J^T a and J v, compiled; a network is traced once for every shape.

    A network and its centered logits share their compiled functions.

    Args:
        apply_fn: ``(params, x) -> outputs``; a `Network` is traced once in all calls.
    """
    if isinstance(apply_fn, CenteredLogits):
        outputs, pull, push = compile_network(apply_fn.network)
        return (
            lambda w, x: centered_logits(outputs(w, x)),
            lambda w, x, a: pull(w, x, from_centered_logits(a)),
            lambda w, x, v: centered_logits(push(w, x, v)),
        )
    network, evaluate_and_pull = network_of(apply_fn), outputs_and_pull(apply_fn)
    return (
        evaluation(network),
        lambda w, x, a: evaluate_and_pull(w, x, a)[1],
        lambda w, x, v: _push(network.precise(w, x), w, x, v),
    )


def outputs_and_pull(apply_fn: ApplyFn) -> Callable:
    """(weights, x, a) -> (outputs, J^T a), by `compile_network`'s compiled J^T a."""
    if isinstance(apply_fn, CenteredLogits):
        evaluate_and_pull = outputs_and_pull(apply_fn.network)

        def centered(w: Params, x: Any, a: Array) -> tuple[Array, Params]:
            outputs, pulled = evaluate_and_pull(w, x, from_centered_logits(a))
            return centered_logits(outputs), pulled

        return centered
    network = network_of(apply_fn)
    return lambda w, x, a: _outputs_and_pull(network.precise(w, x), w, x, a)


def evaluation(apply_fn: ApplyFn) -> Callable[[Params, Any], Array]:
    """The outputs of `compile_network`: (weights, x) -> outputs."""
    network = network_of(apply_fn)
    return lambda w, x: _outputs(network.precise(w, x), w, x)


def squared_gradients(apply_fn: ApplyFn) -> Callable[[Params, Any, Array], Params]:
    """(weights, x, a) -> sum of (J_n^T a_n)^2 over the samples n, compiled."""
    if isinstance(apply_fn, CenteredLogits):
        squares = squared_gradients(apply_fn.network)
        return lambda w, x, a: squares(w, x, from_centered_logits(a))
    network = network_of(apply_fn)

    def compute(w: Params, x: Any, a: Array) -> Params:
        return _squares(network.precise(w, jax.tree.map(lambda leaf: leaf[:1], x)), w, x, a)

    return compute


@jit
def _squares(network: Traced, w: Params, x: Any, a: Array) -> Params:
    size = max(part for part in range(1, 17) if len(a) % part == 0)

    def one(sample: Any, row: Array) -> Params:
        run = lambda v: network(v, jax.tree.map(lambda leaf: leaf[None], sample))  # noqa: E731
        return jax.vjp(run, w)[1](row[None])[0]

    def add(total: Params, chunk: tuple) -> tuple[Params, None]:
        gradients = jax.vmap(one)(*chunk)
        return jax.tree.map(lambda t, g: t + jnp.sum(g**2, axis=0), total, gradients), None

    chunks = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), (x, a))
    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), chunks)[0]


@jit
def _outputs(network: Traced, w: Params, x: Any) -> Array:
    return network(w, x)


@jit
def _outputs_and_pull(network: Traced, w: Params, x: Any, a: Array) -> tuple[Array, Params]:
    outputs, pull = jax.vjp(lambda v: network(v, x), w)
    return outputs, pull(a)[0]


@functools.partial(jit, static_argnames="loss")
def loss_of_weights(network: Traced, w: Params, x: Any, targets: Array, *, loss: Loss) -> Array:
    """The mean loss of samples at some weights, compiled."""
    return loss.value(network(w, x), targets)


@jit
def _push(network: Traced, w: Params, x: Any, v: Params) -> Array:
    run = with_forward_mode(lambda u: network(u, x), w)
    return jax.jvp(run, (w,), (v,))[1]


# --- half precision -------------------------------------------------------------------------------


def promote(params: Params, trainable: Any = None) -> tuple[Params, tuple[str, ...]]:
    """Trained parameters, those in half precision as float32, and notes on the promotion.

    A forecast needs small differences of outputs and small eigenvalues, which the two or three
    digits of bfloat16 and float16 do not have; the cast itself is exact. Frozen parameters keep
    their dtype.

    Args:
        params: pytree of arrays.
        trainable: which parameters train, as in `empirical_ntk`.

    Returns:
        ``(params, notes)``; `params` itself and no note where none is in half precision.

    Example:
        >>> promote({"w": jnp.ones(2, "bfloat16")})
        ({'w': Array([1., 1.], dtype=float32)}, ('parameters promoted from bfloat16',))
    """
    leaves, treedef = jax.tree.flatten(params)
    names: dict[str, None] = {}
    for i, is_trained in enumerate(select_leaves(params, trainable)):
        if is_trained and _is_coarse(leaves[i]):
            names[jnp.result_type(leaves[i]).name] = None
            leaves[i] = _widened(leaves[i])
    if not names:
        return params, ()
    return jax.tree.unflatten(treedef, leaves), (f"parameters promoted from {' and '.join(names)}",)


def promote_samples(x: Any) -> Any:
    """Samples in half precision as float32, which goes with parameters that were promoted."""
    return jax.tree.map(lambda leaf: _widened(leaf) if _is_coarse(leaf) else leaf, x)


def promote_all(params: Params, *samples: Any) -> tuple[Any, ...]:
    """Parameters and samples, in float32 where parameters are coarser, with a warning.

    Args:
        params: pytree of arrays, all of which train.
        *samples: arrays or pytrees of arrays; None stays None.

    Returns:
        (params, *samples).
    """
    params, notes = promote(params)
    if not notes:
        return params, *samples
    warn_of(notes)
    return params, *map(promote_samples, samples)


def warn_of(notes: tuple[str, ...]) -> None:
    """Warn of a promotion, for results that carry no notes."""
    for note in notes:
        warnings.warn(
            f"{note} to float32 for the forecast: half precision has no small eigenvalues. The "
            "training itself may go on in half precision; its rounding is not forecast.",
            UserWarning, stacklevel=4,
        )  # fmt: skip


def _widened(leaf: Any) -> Array:
    """In float32; on CPUs by NumPy, since XLA converts no float16 where the CPU does not (F16C)."""
    if is_concrete(leaf) and jax.default_backend() == "cpu":
        return jax.device_put(np.asarray(leaf).astype(np.float32))
    return jnp.asarray(leaf, jnp.float32)


def _is_coarse(leaf: Any) -> bool:
    dtype = jnp.result_type(leaf)
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
