"""A kernel as a linear operator on outputs (N, C): dense, the same for every output, or factored.

All three have one interface, that of `lineax` where it has a name for something: `mv` multiplies
one v (N, C) or many, `as_matrix` forms the matrix (M C, N C). Arrays may have their rows on several
devices (see `jaxttp.ntk.sharded`); products are then distributed by XLA.

`ntk_operator` multiplies without any kernel, by one reverse and one forward product over the data:

    Θ v = J (Jᵀ v),        v (N, C)
"""

import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxttp._core.checks import check_array, check_finite
from jaxttp._core.products import pull_and_push
from jaxttp._core.traced import Traced, network_of
from jaxttp._core.types import ApplyFn, Params, count, select_leaves
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.adapters.outputs import check_gradients, output_shape


class KernelOperator(eqx.Module):
    """Theta between M and N samples: `Dense`, `Scalar` or `Factored`."""

    @property
    @abc.abstractmethod
    def plain(self) -> "Array | Factored":
        """The form that public functions return: an array, or the factors."""

    @abc.abstractmethod
    def mv(self, vectors: Float[Array, "*t n c"]) -> Float[Array, "*t m c"]:
        """Theta v for one v (N, C) or many, as one product of pinned precision."""

    @abc.abstractmethod
    def as_matrix(self) -> Float[Array, "mc nc"]:
        """The matrix, sample-major."""

    @abc.abstractmethod
    def some_columns(self, samples: Int[Array, " b"]) -> "KernelOperator":
        """Theta[:, :, samples] (M, C, B, C)."""

    @abc.abstractmethod
    def some_rows(self, samples: Int[Array, " b"]) -> "KernelOperator":
        """Theta[samples] (B, C, N, C)."""

    def block(self, rows: Any, columns: Any) -> "KernelOperator":
        """Theta[rows, :, columns], by the indices of samples."""
        return self.some_rows(jnp.asarray(rows)).some_columns(jnp.asarray(columns))


class Dense(KernelOperator):
    """Theta as an array (M, C, N, C)."""

    array: Float[Array, "m c n c"]

    @property
    def plain(self) -> Array:
        """The array."""
        return self.array

    def mv(self, vectors: Float[Array, "*t n c"]) -> Float[Array, "*t m c"]:
        """See `KernelOperator`."""
        m, c, n, _ = self.array.shape
        leading = vectors.shape[:-2]
        flat = vectors.reshape(*leading, n * c)
        out = jnp.einsum("pq,...q->...p", self.as_matrix(), flat, precision="highest")
        return out.reshape(*leading, m, c)

    def as_matrix(self) -> Float[Array, "mc nc"]:
        """See `KernelOperator`."""
        m, c, n, _ = self.array.shape
        return self.array.reshape(m * c, n * c)

    def some_columns(self, samples: Int[Array, " b"]) -> "Dense":
        """See `KernelOperator`."""
        return Dense(jnp.take(self.array, samples, axis=2))

    def some_rows(self, samples: Int[Array, " b"]) -> "Dense":
        """See `KernelOperator`."""
        return Dense(jnp.take(self.array, samples, axis=0))


class Scalar(KernelOperator):
    """K ⊗ I_C: one kernel K (M, N) for every output, which do not mix."""

    array: Float[Array, "m n"]
    classes: int = eqx.field(static=True)

    @property
    def plain(self) -> Array:
        """K."""
        return self.array

    def mv(self, vectors: Float[Array, "*t n c"]) -> Float[Array, "*t m c"]:
        """See `KernelOperator`."""
        return jnp.einsum("mn,...nc->...mc", self.array, vectors, precision="highest")

    def as_matrix(self) -> Float[Array, "mc nc"]:
        """See `KernelOperator`."""
        return jnp.kron(self.array, jnp.eye(self.classes, dtype=self.array.dtype))

    def some_columns(self, samples: Int[Array, " b"]) -> "Scalar":
        """See `KernelOperator`."""
        return Scalar(jnp.take(self.array, samples, axis=1), self.classes)

    def some_rows(self, samples: Int[Array, " b"]) -> "Scalar":
        """See `KernelOperator`."""
        return Scalar(jnp.take(self.array, samples, axis=0), self.classes)


class Factored(KernelOperator):
    """Theta = A B^T from A (M, C, k) and B (N, C, k), which is never formed.

    A product with outputs takes 2 (M + N) C k operations in place of 2 M N C^2, and memory shrinks
    by the same factor. A sketch of width k is kept in this form where k is below N C / 2.

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
    def plain(self) -> "Factored":
        """The factors."""
        return self

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
        """The dtype of the factors."""
        return self.rows.dtype

    def astype(self, dtype: Any) -> "Factored":
        """The same kernel in another dtype."""
        return Factored(self.rows.astype(dtype), self.columns.astype(dtype), self.classes)

    def mv(self, vectors: Float[Array, "*t n c"]) -> Float[Array, "*t m c"]:
        """See `KernelOperator`."""
        leading = vectors.shape[:-2]
        inner = jnp.dot(vectors.reshape(*leading, -1), self.columns, precision="highest")
        out = jnp.einsum("pk,...k->...p", self.rows, inner, precision="highest")
        return out.reshape(*leading, -1, self.classes)

    def as_matrix(self) -> Float[Array, "mc nc"]:
        """See `KernelOperator`."""
        return jnp.dot(self.rows, self.columns.T, precision="highest")

    def dense(self) -> Float[Array, "m c n c"]:
        """The kernel itself."""
        return self.as_matrix().reshape(self.shape)

    def some_columns(self, samples: Int[Array, " b"]) -> "Factored":
        """See `KernelOperator`."""
        return Factored(self.rows, self.columns[self._outputs_of(samples)], self.classes)

    def some_rows(self, samples: Int[Array, " b"]) -> "Factored":
        """See `KernelOperator`."""
        return Factored(self.rows[self._outputs_of(samples)], self.columns, self.classes)

    def _outputs_of(self, samples: Int[Array, " b"]) -> Int[Array, " bc"]:
        """The indices of the outputs of some samples in a factor."""
        return (samples[:, None] * self.classes + jnp.arange(self.classes)[None]).reshape(-1)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The kernel itself, for NumPy."""
        del copy
        return np.asarray(self.dense(), dtype)


Kernel = Array | Factored
"""A kernel as an array (M, C, N, C) or (M, N), or as its factors."""

KernelLike = ArrayLike | Factored
"""A kernel, or what NumPy converts to an array."""


def operator_of(kernel: Array | KernelOperator, classes: int = 1) -> KernelOperator:
    """The operator that an array stands for; an operator is returned as it is.

    Args:
        kernel: (M, C, N, C), or (M, N) for K ⊗ I_C.
        classes: C, which an array (M, N) does not say; only its matrix depends on that.
    """
    if isinstance(kernel, KernelOperator):
        return kernel
    return Scalar(kernel, classes) if kernel.ndim == 2 else Dense(kernel)


class NTKOperator(lx.AbstractLinearOperator):
    """Θ(x, x) as a positive semi-definite lineax operator on arrays (N, C).

    Attributes:
        leaves: parameter leaves.
        x: inputs (N, ...), an array or a pytree of arrays with N rows each.
        network: traced for these samples.
    """

    leaves: list[Array]
    x: Any
    network: Traced
    treedef: Any = eqx.field(static=True)
    trainable: tuple[bool, ...] = eqx.field(static=True)

    def mv(self, vector: Array) -> Array:
        """Θ v, for v (N, C) of the outputs' dtype; refused where a gradient is not finite."""
        vector, outputs = check_array("v", vector), self.in_structure()
        if vector.shape != outputs.shape:
            raise ValueError(f"v must have the outputs' shape {outputs.shape}; got {vector.shape}.")
        if vector.dtype != outputs.dtype:
            raise ValueError(
                f"v must have the outputs' dtype {outputs.dtype}; got {vector.dtype}. Cast it: "
                f"v.astype({str(outputs.dtype)!r})."
            )

        def network(trained: dict[int, Array]) -> Array:
            leaves = [trained.get(index, leaf) for index, leaf in enumerate(self.leaves)]
            return self.network(jax.tree.unflatten(self.treedef, leaves), self.x)

        weights = {i: leaf for i, leaf in enumerate(self.leaves) if self.trainable[i]}
        with jax.default_matmul_precision("highest"):
            _, pull, push = pull_and_push(network, weights)
            return self._checked(push(pull(vector)))

    def _checked(self, result: Array) -> Array:
        """`result`, unless it is not finite because a gradient is not."""
        params = jax.tree.unflatten(self.treedef, self.leaves)
        check_gradients(self._some_outputs, params, self.x, result, trainable=self.trainable)
        return result

    def _some_outputs(self, params: Params, x: Any) -> Array:
        """The outputs of fewer samples, which are padded with copies."""
        n = count(self.x)
        padded = jax.tree.map(lambda a: jnp.resize(a, (n, *a.shape[1:])), x)
        return self.network(params, padded)[: count(x)]

    def as_matrix(self) -> Array:
        """Θ as a matrix (N C, N C); N C products."""
        structure = self.in_structure()
        size = structure.shape[0] * structure.shape[1]
        basis = jnp.eye(size, dtype=structure.dtype).reshape(size, *structure.shape)
        return self._checked(jax.lax.map(self.mv, basis)).reshape(size, size).T

    def transpose(self) -> "NTKOperator":
        """Θ is symmetric."""
        return self

    def in_structure(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of v."""
        outputs = self.network.outputs
        return jax.ShapeDtypeStruct((count(self.x), *outputs.shape[1:]), outputs.dtype)

    def out_structure(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of Θv."""
        return self.in_structure()


def ntk_operator(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    *,
    trainable: Any = None,
) -> NTKOperator:
    """Θ(x, x) as a lineax operator: ``.mv(v)`` maps (N, C) to (N, C) without forming Θ.

        Θ v = J (Jᵀ v)

    Args:
        apply_fn: ``(params, x (N, ...)) -> outputs (N, C)``; row i depends on row i of x alone.
        params: pytree of arrays.
        x: inputs (N, ...), an array or a pytree of arrays with N rows each.
        trainable: see `empirical_ntk`.

    Returns:
        The operator, tagged symmetric and positive semi-definite.

    Raises:
        ValueError: nothing trainable, a bad mask.

    Example:
        >>> import jax.numpy as jnp
        >>> operator = ntk_operator(lambda w, x: x @ w, jnp.ones((2, 1)), jnp.array([[3.0, 4.0]]))
        >>> operator.mv(jnp.ones((1, 1))).tolist()
        [[25.0]]
    """
    check_network(apply_fn, params)
    x = check_samples("x", x)
    for name, value in (("params", params), ("x", x)):
        check_finite(name, value)
    output_shape(apply_fn, params, x)
    mask = select_leaves(params, trainable)
    leaves, treedef = jax.tree.flatten(params)
    network = network_of(apply_fn).precise(params, x)
    return NTKOperator([jnp.asarray(leaf) for leaf in leaves], x, network, treedef, mask)


def register_symmetric(kind: type[lx.AbstractLinearOperator]) -> None:
    """Register a class of symmetric positive semi-definite operators with `lineax`.

    Functions of `lineax` dispatch on the class. An operator known by products counts as dense.
    """
    for predicate, value in (
        (lx.is_symmetric, True),
        (lx.is_positive_semidefinite, True),
        (lx.is_negative_semidefinite, False),
        (lx.is_diagonal, False),
        (lx.is_tridiagonal, False),
        (lx.is_lower_triangular, False),
        (lx.is_upper_triangular, False),
        (lx.has_unit_diagonal, False),
    ):
        predicate.register(kind)(lambda operator, value=value: value)  # type: ignore[attr-defined]
    for identity in (lx.linearise, lx.conj):
        identity.register(kind)(lambda operator: operator)
    lx.diagonal.register(kind)(lambda operator: jnp.diagonal(operator.as_matrix()))
    lx.materialise.register(kind)(_materialised)


def _materialised(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    structure: Any = operator.in_structure()
    tag, matrix = lx.positive_semidefinite_tag, operator.as_matrix()
    if len(structure.shape) == 1:
        return lx.MatrixLinearOperator(matrix, (lx.symmetric_tag, tag))
    array = matrix.reshape(*structure.shape, *structure.shape)
    return lx.PyTreeLinearOperator(array, structure, tag)


register_symmetric(NTKOperator)
