"""The kernel as a linear operator: Θv without Θ.

    Θ v = J (Jᵀ v),        v (N, C)

One reverse and one forward product over the data for each v; memory does not grow with N² or with
the size of a Jacobian. The operator has the lineax interface, so Krylov solvers take it.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array

from jaxttp._core.checks import check_array, check_finite, check_integer
from jaxttp._core.products import pull_and_push
from jaxttp._core.traced import Traced, network_of
from jaxttp._core.types import ApplyFn, Params, count, take
from jaxttp.adapters.gradients import check_gradients
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.adapters.outputs import check_per_sample, output_shape
from jaxttp.ntk._select import select_leaves


class NTKOperator(lx.AbstractLinearOperator):
    """Θ(x, x) as a positive semi-definite lineax operator on arrays (N, C).

    Attributes:
        leaves: parameter leaves.
        x: inputs (N, ...), an array or a pytree of arrays with N rows each.
        networks: the network, traced for a batch of samples, and for those that are left over.
    """

    leaves: list[Array]
    x: Any
    networks: tuple[Traced, ...]
    treedef: Any = eqx.field(static=True)
    trainable: tuple[bool, ...] = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)

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
        with jax.default_matmul_precision("highest"):
            return self._checked(self._products(vector))

    def _checked(self, result: Array) -> Array:
        """`result`, unless it is not finite because a gradient is not."""
        params = jax.tree.unflatten(self.treedef, self.leaves)
        check_gradients(self._in_parts, params, self.x, result, trainable=self.trainable)
        return result

    def _in_parts(self, params: Params, x: Any) -> Array:
        """The outputs of any number of samples, in batches, the last filled up with copies."""
        network, n = self.networks[0], count(x)
        size = network.outputs.shape[0]
        filled = jax.tree.map(lambda a: jnp.resize(a, (-(-n // size) * size, *a.shape[1:])), x)
        parts = [network(params, take(filled, slice(i, i + size))) for i in range(0, n, size)]
        return jnp.concatenate(parts)[:n]

    def _network(self, chosen: dict[int, Array], x: Any) -> Array:
        leaves = [chosen.get(index, leaf) for index, leaf in enumerate(self.leaves)]
        sizes = [network.outputs.shape[0] for network in self.networks]
        network = self.networks[sizes.index(count(x))]
        return network(jax.tree.unflatten(self.treedef, leaves), x)

    def _products(self, vector: Array) -> Array:
        chosen = {i: leaf for i, leaf in enumerate(self.leaves) if self.trainable[i]}
        n = vector.shape[0]
        size = n if self.batch_size is None else min(self.batch_size, n)
        whole = n - n % size

        def products(x: Any) -> tuple[Array, Callable[[Array], Any], Callable[[Any], Array]]:
            return pull_and_push(lambda leaves: self._network(leaves, x), chosen)

        def add(total: Any, block: tuple[Any, Array]) -> tuple[Any, None]:
            _, pull, _ = products(block[0])
            return jax.tree.map(jnp.add, total, pull(block[1])), None

        def forward(x: Any, direction: Any) -> Array:
            _, _, push = products(x)
            return push(direction)

        # The whole batches go through a loop; the samples that are left over follow.
        blocks = jax.tree.map(lambda a: a[:whole].reshape(-1, size, *a.shape[1:]), (self.x, vector))
        rest = jax.tree.map(lambda a: a[whole:], (self.x, vector))
        direction, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, chosen), blocks)
        if whole < n:
            direction, _ = add(direction, rest)
        parts = jax.lax.map(lambda x: forward(x, direction), blocks[0])
        result = parts.reshape(whole, *vector.shape[1:])
        return jnp.concatenate([result, forward(rest[0], direction)]) if whole < n else result

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
        outputs = self.networks[0].outputs
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
    batch_size: int | None = None,
) -> NTKOperator:
    """Θ(x, x) as a lineax operator: ``.mv(v)`` maps (N, C) to (N, C) without forming Θ.

        Θ v = J (Jᵀ v)

    Args:
        apply_fn: ``(params, x (N, ...)) -> outputs (N, C)``; row i depends on row i of x alone.
        params: pytree of arrays.
        x: inputs (N, ...), an array or a pytree of arrays with N rows each.
        trainable: see `empirical_ntk`.
        batch_size: samples at a time, for less memory; None for all at once.

    Returns:
        The operator, tagged symmetric and positive semi-definite.

    Raises:
        ValueError: nothing trainable, a bad mask or batch size.

    Example:
        >>> import jax.numpy as jnp
        >>> operator = ntk_operator(lambda w, x: x @ w, jnp.ones((2, 1)), jnp.array([[3.0, 4.0]]))
        >>> operator.mv(jnp.ones((1, 1))).tolist()
        [[25.0]]
    """
    if batch_size is not None:
        batch_size = check_integer("batch_size", batch_size, at_least=1)
    check_network(apply_fn, params)
    x = check_samples("x", x)
    for name, value in (("params", params), ("x", x)):
        check_finite(name, value)
    output_shape(apply_fn, params, x)
    if batch_size is not None:
        check_per_sample(apply_fn, params, x)
    mask = select_leaves(params, trainable)
    leaves, treedef = jax.tree.flatten(params)
    leaves, network, n = [jnp.asarray(leaf) for leaf in leaves], network_of(apply_fn), count(x)
    size = n if batch_size is None else min(batch_size, n)
    networks = [network.precise(params, take(x, slice(k))) for k in (size, n % size) if k]
    return NTKOperator(leaves, x, tuple(networks), treedef, mask, batch_size)


def register_symmetric(kind: type[lx.AbstractLinearOperator]) -> None:
    """Answer `lineax`'s questions of a class of symmetric positive semi-definite operators.

    Its functions dispatch on the class; an operator known by products is dense in all else.
    """
    for question, answer in (
        (lx.is_symmetric, True),
        (lx.is_positive_semidefinite, True),
        (lx.is_negative_semidefinite, False),
        (lx.is_diagonal, False),
        (lx.is_tridiagonal, False),
        (lx.is_lower_triangular, False),
        (lx.is_upper_triangular, False),
        (lx.has_unit_diagonal, False),
    ):
        question.register(kind)(lambda operator, answer=answer: answer)  # type: ignore[attr-defined]
    for same in (lx.linearise, lx.conj):
        same.register(kind)(lambda operator: operator)
    lx.diagonal.register(kind)(lambda operator: jnp.diagonal(operator.as_matrix()))
    lx.materialise.register(kind)(_materialised)


def _materialised(operator: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    structure: Any = operator.in_structure()
    tags = lx.positive_semidefinite_tag
    matrix = operator.as_matrix()
    if len(structure.shape) == 1:
        return lx.MatrixLinearOperator(matrix, (lx.symmetric_tag, tags))
    whole = matrix.reshape(*structure.shape, *structure.shape)
    return lx.PyTreeLinearOperator(whole, structure, tags)


register_symmetric(NTKOperator)
