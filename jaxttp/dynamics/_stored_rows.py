"""Mini-batches on a sketch that lies on a disk: steps that read the batch's rows alone.

With Theta = S S^T the optimiser, linear as it is, acts on a (k,) with f = f_0 + S a beside its dual
coefficients: a step needs the rows of its batch twice, for the outputs there and for S^T g, and
reads them once. What all samples do follows in one reading, when all steps are known.
"""

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxttp._jit import jit
from jaxttp.dynamics._dual import Coefficients, output_limit, start
from jaxttp.dynamics._kernels import apply_kernel
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.dynamics.optimizers import Optimizer, keep_dtypes
from jaxttp.losses import Loss
from jaxttp.ntk.factored import Kernel
from jaxttp.ntk.streamed import Streamed


@runtime_checkable
class _SupportsRows(Protocol):
    """A kernel A B^T of which rows of the factors are read, such as `jaxttp.ntk.StoredFactors`."""

    left: Any
    right: Any

    def outputs(self, places: Any) -> np.ndarray:
        """A a (T, M, C) of many a (T, k)."""
        ...


def has_rows(kernel: Kernel) -> bool:
    """Whether rows of a kernel's one sketch can be read."""
    if not isinstance(kernel, Streamed) or not isinstance(kernel.source, _SupportsRows):
        return False
    return kernel.source.left is kernel.source.right


class _Along(NamedTuple):
    """Where the weights are: w = own.weights w_0 + R a, own.dual beside it."""

    own: Coefficients
    sketched: Array


def start_rows(kernel: Kernel, f0: Array) -> _Along:
    """Before training."""
    assert isinstance(kernel, Streamed)
    return _Along(start(f0), jnp.zeros(kernel.source.left.shape[2], f0.dtype))


@functools.partial(jit, static_argnames=("loss", "steps"))
def follow_rows(
    optimizer: Optimizer,
    state: optax.OptState | None,
    kernel: Streamed,
    f0: Array,
    targets: Array,
    indices: Array,
    tangent: Array | None,
    kernel_test: Kernel | None,
    f0_test: Array | None,
    tangent_test: Array | None,
    *,
    loss: Loss,
    steps: int,
) -> Trajectory:
    """The steps of `recursion` with batches (T, B) on a sketch."""
    dtype, limit = f0.dtype, output_limit(f0.dtype)

    def step(carry: tuple, batch: Array) -> tuple[tuple, _Along]:
        here, state, is_alive = carry
        rows = _rows(kernel, batch)
        f = f0[batch] + jnp.einsum("bck,k->bc", rows, here.sketched, precision="highest")
        if tangent is not None:
            f = f + (here.own.weights - 1.0) * tangent[batch]
        is_alive = is_alive & jnp.all(jnp.abs(f) < limit)
        gradient = loss.gradient(f, targets[batch]) / batch.shape[0]
        whole = jnp.zeros_like(f0).at[batch].add(gradient)
        image = jnp.einsum("bck,bc->k", rows, gradient, precision="highest")
        given = _Along(Coefficients(whole, jnp.zeros((), dtype)), image)
        updates, after = optimizer.update(given, state, here)
        new: Any = optax.apply_updates(here, updates)
        there = jax.tree.map(lambda a, b: jnp.where(is_alive, a, b), new, here)
        return (there, keep_dtypes(after, state), is_alive), there

    begin = start_rows(kernel, f0)
    first = optimizer.init(begin) if state is None else state
    _, path = jax.lax.scan(step, (begin, first, jnp.asarray(True)), indices, length=steps)
    path = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), begin, path)
    scale = path.own.weights[:, None, None]
    train = f0[None] + _outputs(kernel, path.sketched)
    if tangent is not None:
        train = train + (scale - 1.0) * tangent[None]
    good = jnp.cumprod(jnp.all(jnp.abs(train) < limit, axis=(1, 2))).astype(bool)
    last = jnp.where(good, jnp.arange(steps + 1), 0)
    held = jax.lax.cummax(last)
    train, dual, scales = train[held], path.own.dual[held], path.own.weights[held]
    test = None
    if kernel_test is not None and f0_test is not None:
        test = f0_test[None] + _moved(kernel, kernel_test, path)[held]
        if tangent_test is not None:
            test = test + (scales[:, None, None] - 1.0) * tangent_test[None]
    return Trajectory(
        jnp.arange(steps + 1, dtype=dtype), train, test,
        diverged_at=jnp.where(jnp.all(good), -1, jnp.argmin(good)), dual=dual, scale=scales,
    )  # fmt: skip


def _moved(kernel: Streamed, kernel_test: Kernel, path: _Along) -> Array:
    """What test outputs (T, M, C) have moved by."""
    if isinstance(kernel_test, Streamed) and isinstance(kernel_test.source, _SupportsRows):
        if kernel_test.source.right is kernel.source.right:
            return _outputs(kernel_test, path.sketched)
    return apply_kernel(kernel_test, path.own.dual)


def _rows(kernel: Streamed, batch: Array) -> Array:
    """S[batch] (B, C, k)."""
    _, classes, dim = kernel.source.left.shape
    kind = jax.ShapeDtypeStruct((batch.shape[0], classes, dim), kernel.dtype)
    read = lambda batch: kernel.source.left.rows(np.asarray(batch)).astype(kind.dtype)  # noqa: E731
    return jax.pure_callback(read, kind, batch, vmap_method="sequential")


def _outputs(kernel: Streamed, places: Array) -> Array:
    """A a (T, M, C) of many a (T, k)."""
    kind = jax.ShapeDtypeStruct((len(places), *kernel.shape[:2]), kernel.dtype)
    read = lambda places: kernel.source.outputs(places).astype(kind.dtype)  # noqa: E731
    return jax.pure_callback(read, kind, places, vmap_method="sequential")
