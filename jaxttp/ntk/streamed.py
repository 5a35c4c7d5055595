"""A kernel that stays where it is, on a disk, and is multiplied by from compiled programs."""

import math
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jaxtyping import Array, Float

from jaxttp.ntk.row_sharded import SMALL


@runtime_checkable
class SupportsProducts(Protocol):
    """What has its kernel elsewhere, such as a `StoredKernel`."""

    @property
    def ndim(self) -> int:
        """4, or 2."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, C, N, C) or (M, N)."""
        ...

    def streamed(self) -> "Streamed":
        """The kernel as dynamics multiply by it."""
        ...


class Streamed(eqx.Module):
    """Theta (M, C, N, C) or (M, N) of which a host multiplies, tile by tile.

    What a `StoredKernel` becomes where dynamics ask for a kernel. Every product reads all of it;
    many vectors at once, as the settings of a sweep, are one product.

    Attributes:
        source: has `shape`, `ndim`, `dtype` and ``apply(vectors (N, C, ...)) -> (M, C, ...)``.
        dtype: of the products; those of the source are its own.
        batch: the samples (B,) whose columns it has, by their indices; None for all.

    Example:
        >>> import tempfile
        >>> from jaxttp.ntk import store_kernel
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stored = store_kernel(lambda w, x: x @ w, jnp.ones((3, 1)), jnp.eye(3), path=folder)
        ...     Streamed(stored, "float32").apply(jnp.ones((3, 1))).tolist()
        [[1.0], [1.0], [1.0]]
    """

    source: Any = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)
    batch: Array | None = None

    @property
    def ndim(self) -> int:
        """4, or 2."""
        return self.source.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, C, N, C) or (M, N); of the columns of a batch (M, C, B, C) or (M, B)."""
        shape, axis = list(self.source.shape), self.ndim // 2
        if self.batch is not None:
            shape[axis] = self.batch.shape[0]
        return tuple(shape)

    def astype(self, dtype: Any) -> "Streamed":
        """The same with other products."""
        return Streamed(self.source, jnp.dtype(dtype).name, self.batch)

    def some_columns(self, batch: Array) -> "Streamed":
        """Theta[:, :, batch] (M, C, B, C), by the indices of samples (B,)."""
        return Streamed(self.source, self.dtype, batch)

    def apply(self, vectors: Float[Array, "*t n c"]) -> Float[Array, "*t m c"]:
        """Theta v for one v (N, C) or many, in one turn through the tiles."""
        if self.batch is not None:
            n = self.source.shape[self.ndim // 2]
            whole = jnp.zeros((*vectors.shape[:-2], n, vectors.shape[-1]), vectors.dtype)
            vectors = whole.at[..., self.batch, :].add(vectors)
        return _product(self.source, jnp.dtype(self.dtype).name, vectors)

    def operator(self) -> lx.AbstractLinearOperator:
        """A square Theta as a lineax operator on flat vectors (N C,), or (N,) of a scalar kernel.

        Its products read the whole kernel from the disk, in a call from the compiled program.
        """
        shape = self.source.shape[: self.ndim // 2]
        flat = jax.ShapeDtypeStruct((math.prod(shape),), self.dtype)
        columns = shape if len(shape) == 2 else (*shape, 1)

        def product(vector: Array) -> Array:
            return self.apply(vector.reshape(columns)).reshape(-1)

        return lx.FunctionLinearOperator(product, flat, lx.positive_semidefinite_tag)

    def on_one_device(self) -> Array:
        """All of a kernel of at most `SMALL` rows and columns.

        Raises:
            ValueError: a larger one.
        """
        if self.batch is not None or math.prod(self.shape) > SMALL**2:
            raise ValueError(
                f"kernel {self.shape} lies on a disk, and what needs all of it at once (a "
                "decomposition, a dense matrix) is not done with it: ask its operator() for "
                "eigenvalues, follow it by recursion, gradient_flow or sweep_kernel; or "
                "np.asarray(kernel) where memory can hold it."
            )
        kind = jax.ShapeDtypeStruct(self.shape, self.dtype)
        read = lambda: np.asarray(self.source, self.dtype)  # noqa: E731
        return jax.pure_callback(read, kind)


def _product(source: Any, dtype: str, vectors: Array) -> Array:
    """Theta v on the host; linear in v."""
    scalar, lead = source.ndim == 2, vectors.ndim - 2
    kind = jax.ShapeDtypeStruct((*vectors.shape[:-2], source.shape[0], vectors.shape[-1]), dtype)

    def on_host(vectors: Any) -> np.ndarray:
        # Samples first, as the source takes them: (N, C, T), or (N, T, C) of a scalar kernel.
        given = np.asarray(vectors)
        order = (lead, *range(lead), lead + 1) if scalar else (lead, lead + 1, *range(lead))
        moved = source.apply(given.transpose(order))
        return np.ascontiguousarray(moved.transpose(np.argsort(order)), dtype=dtype)

    @jax.custom_jvp
    def times(vectors: Array) -> Array:
        return jax.pure_callback(on_host, kind, vectors, vmap_method="sequential")

    @times.defjvp
    def _(values: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
        return times(values[0]), times(tangents[0])

    return times(vectors)


__all__ = ["Streamed"]
