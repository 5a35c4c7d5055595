"""A kernel that is kept as its factors."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float


class Factored(eqx.Module):
    """Theta = A B^T from A (M, C, k) and B (N, C, k), which is never formed.

    A product with outputs takes 2 (M + N) C k operations in place of 2 M N C^2, and the factors so
    much less memory than the kernel: what a sketch of width k is kept as where k is below N C / 2.

    Attributes:
        rows: A as a matrix (M C, k). (Reshaped within a loop it costs XLA 100 times as long.)
        columns: B as a matrix (N C, k).
        classes: C.

    Example:
        >>> import jax.numpy as jnp
        >>> kernel = Factored.of(jnp.ones((3, 2, 5)), jnp.ones((4, 2, 5)))
        >>> kernel.shape, float(kernel.dense()[0, 0, 0, 0])
        ((3, 2, 4, 2), 5.0)
    """

    rows: Float[Array, "mc k"]
    columns: Float[Array, "nc k"]
    classes: int = eqx.field(static=True)

    @classmethod
    def of(cls, rows: Float[Array, "m c k"], columns: Float[Array, "n c k"]) -> "Factored":
        """From A and B as sketches are."""
        (_, c, k) = rows.shape
        return cls(rows.reshape(-1, k), columns.reshape(-1, k), c)

    @property
    def shape(self) -> tuple[int, ...]:
        """(M, C, N, C)."""
        m, n = (len(factor) // self.classes for factor in (self.rows, self.columns))
        return m, self.classes, n, self.classes

    @property
    def ndim(self) -> int:
        """4, as of the kernel."""
        return 4

    @property
    def dtype(self) -> Any:
        """Of the numbers."""
        return self.rows.dtype

    def astype(self, dtype: Any) -> "Factored":
        """The same in other numbers."""
        return Factored(self.rows.astype(dtype), self.columns.astype(dtype), self.classes)

    def apply(self, vectors: Float[Array, "*t n c"]) -> Float[Array, "*t m c"]:
        """Theta v for one v (N, C) or many."""
        leading = vectors.shape[:-2]
        inner = jnp.dot(vectors.reshape(*leading, -1), self.columns, precision="highest")
        out = jnp.einsum("pk,...k->...p", self.rows, inner, precision="highest")
        return out.reshape(*leading, -1, self.classes)

    def dense(self) -> Float[Array, "m c n c"]:
        """The kernel itself."""
        whole = jnp.dot(self.rows, self.columns.T, precision="highest")
        return whole.reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The kernel itself, for NumPy."""
        del copy
        return np.asarray(self.dense(), dtype)


Kernel = Array | Factored
"""A kernel as an array or as its factors."""

KernelLike = ArrayLike | Factored
"""What becomes one."""
