"""The kernel layer by layer: Θ is a sum over parameters, and most of them need no Jacobian.

For a site (see `_sites`) with inputs x (b, s, k) and output cotangents g^c (b, s, o),

    activation form   Θ[i,c,j,d] += sum_{b,s,t} <x_i[b,s], x_j[b,t]> <g_i^c[b,s], g_j^d[b,t]>
    gradient form     Θ[i,c,j,d] += <dW_i^c, dW_j^d>,     dW_i^c[b] = sum_s x_i[b,s] g_i^c[b,s]^T

The first never forms a weight gradient; the second is cheaper when many positions share a small
weight. Where x and g are smaller than the dW, these wait, and are formed when they are multiplied
(see `_late`). Direct parameters (see `_sites`) are in gradient form by ordinary differentiation.

All cotangents come from one reverse pass for each of the C outputs, taken for all samples at once.

Everything is sample-major, (n, C, ...): a block of rows is then a contiguous slice, which the
matrix products of a CPU like (a third of their time otherwise goes into copies).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp.ntk._late import Outer
from jaxttp.ntk._program import NetworkProgram
from jaxttp.ntk._sites import Site

_TURN = 1 << 21  # numbers that a turn of a loop over pairs of positions makes at most
_SLICE, _FEW_ROWS = 1 << 22, 512  # numbers of a slice of rows, and how many rows are cut so
_JOIN_BELOW = 1 << 14  # leaves of fewer parameters are joined into one product


class Features(NamedTuple):
    """What a kernel entry needs to know of each sample.

    Attributes:
        inputs: by leaf, x (n, b, s, k) of the sites in activation form.
        cotangents: by leaf, g (n, C, b, s, o) of the same sites.
        gradients: by name, per-sample gradients (n, C, d) of everything else.
        late: by leaf, x (n, s, k) and g (n, C, o, s) of the sites whose gradients are yet to form.
    """

    inputs: dict[int, Array]
    cotangents: dict[int, Array]
    gradients: dict[str, Array]
    late: dict[int, Outer]


@dataclasses.dataclass(frozen=True, eq=False)
class Layers:
    """How each trainable leaf of a program enters the kernel.

    Attributes:
        program: the single-sample network.
        activation: sites contracted in activation form.
        gradient: sites whose weight gradient is formed from patches.
        direct: leaves differentiated as they stand.
        late: sites whose weight gradient is formed when it is multiplied; they have one group.
        joined: whether small leaves are joined, so that per-layer kernels are lost.
    """

    program: NetworkProgram
    activation: tuple[Site, ...]
    gradient: tuple[Site, ...]
    direct: tuple[int, ...]
    late: tuple[Site, ...] = ()
    joined: bool = True

    def features(self, leaves: Sequence[Array], samples: Sequence[Array]) -> Features:
        """The features of a batch: `leaves` of the parameters, `samples` (n, ...)."""
        return jax.vmap(lambda *row: self._one(leaves, row))(*samples)

    def _one(self, leaves: Sequence[Array], sample: Sequence[Array]) -> Features:
        sites = self.activation + self.gradient + self.late
        captured = {site.step: site.operand for site in sites}
        steps = self.program.steps

        def forward(probes: dict[int, Array], direct: dict[int, Array]) -> Any:
            mixed = [direct.get(index, leaf) for index, leaf in enumerate(leaves)]
            return self.program.run(mixed, sample, probes, captured)

        avals = {site.step: steps[site.step].equation.outvars[0].aval for site in sites}
        probes = {step: jnp.zeros(aval.shape, aval.dtype) for step, aval in avals.items()}
        direct = {index: leaves[index] for index in self.direct}
        outputs, pull, seen = jax.vjp(forward, probes, direct, has_aux=True)
        basis = jnp.eye(outputs.shape[0], dtype=outputs.dtype)
        at_sites, at_leaves = jax.vmap(pull)(basis)

        inputs, cotangents, gradients, late = {}, {}, {}, {}
        for site in sites:
            x = site.inputs(seen[site.step])
            g = jax.vmap(site.cotangents, (0, None))(at_sites[site.step], seen[site.step])
            if site.scale != 1.0:
                g = g * jnp.asarray(site.scale, g.dtype)
            if site in self.activation:
                inputs[site.leaf], cotangents[site.leaf] = x, g
            elif site in self.late:
                late[site.leaf] = Outer(x[0].astype(g.dtype), g[:, 0].swapaxes(-1, -2))
            else:
                weight = jnp.einsum("bsk,cbso->cbko", x.astype(g.dtype), g)
                gradients[str(site.leaf)] = weight.reshape(len(basis), -1)
        for index, value in at_leaves.items():
            gradients[str(index)] = value.reshape(len(basis), -1)
        return Features(inputs, cotangents, self._join(gradients), late)

    def _join(self, gradients: dict[str, Array]) -> dict[str, Array]:
        small = [name for name, value in gradients.items() if value.shape[-1] < _JOIN_BELOW]
        if not self.joined or len(small) < 2:
            return gradients
        joined = jnp.concatenate([gradients.pop(name) for name in small], axis=-1)
        return {**gradients, "joined": joined}

    def kernels(
        self, first: Features, second: Features, output: str, dtype: Any
    ) -> dict[str, Array]:
        """The kernel between two batches by parameter leaf (or "joined" leaves).

        What waits is left out: `jaxttp.ntk._late` multiplies it.

        Returns:
            Arrays (n, C, m, C) for output "full", (C, n, m) for "diagonal", (n, m) for "trace".
        """
        product = PRODUCTS[output]
        terms: dict[str, Array] = {}
        for site in self.activation:
            x1, x2 = first.inputs[site.leaf], second.inputs[site.leaf]
            g1, g2 = first.cotangents[site.leaf], second.cotangents[site.leaf]
            if site.positions == 1 and site.groups == 1:
                a = _similarity(x1.reshape(len(x1), -1), x2.reshape(len(x2), -1), dtype)
                g = product(g1[:, :, 0, 0], g2[:, :, 0, 0], dtype)
                if site.bias is not None and self.joined:
                    a = a + jnp.ones((), a.dtype)
                elif site.bias is not None:
                    terms[str(site.bias)] = g
                terms[str(site.leaf)] = _spread(a, output, g1.shape[1]) * g
            else:
                terms[str(site.leaf)] = _sum_over_pairs(x1, g1, x2, g2, output, dtype)
        for name, value in first.gradients.items():
            terms[name] = product(value, second.gradients[name], dtype)
        return terms


def _similarity(x: Array, y: Array, dtype: Any) -> Array:
    """<x_i, y_j> of rows; for tokens (integers) whether they are the same."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return (x[:, 0, None] == y[None, :, 0]).astype(dtype)
    return _rows_product(x, y, dtype)


def _rows_product(a: Array, b: Array, dtype: Any) -> Array:
    """A B^T: twice as fast on a CPU as the same product of arrays with more axes.

    A CPU multiplies few and very long rows a slice at a time, a third faster: the slices of all
    rows stay in its caches.
    """
    product = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=dtype,
    )
    rows, size = max(len(a), len(b)), a.shape[1]
    width = _SLICE // max(rows, 1)
    if rows > _FEW_ROWS or size < 2 * width or jax.default_backend() != "cpu":
        return product(a, b)
    turns = size // width

    def add(index: Array, total: Array) -> Array:
        one, two = (jax.lax.dynamic_slice_in_dim(m, index * width, width, 1) for m in (a, b))
        return total + product(one, two)

    rest = product(a[:, turns * width :], b[:, turns * width :])
    return jax.lax.fori_loop(0, turns, add, rest)


def _product_full(a: Array, b: Array, dtype: Any) -> Array:
    (n, c, size), m = a.shape, len(b)
    found = _rows_product(a.reshape(n * c, size), b.reshape(m * c, size), dtype)
    return found.reshape(n, c, m, c)


def _product_trace(a: Array, b: Array, dtype: Any) -> Array:
    return _rows_product(a.reshape(len(a), -1), b.reshape(len(b), -1), dtype)


def _product_diagonal(a: Array, b: Array, dtype: Any) -> Array:
    return jnp.einsum("ncd,mcd->cnm", a, b, preferred_element_type=dtype)


PRODUCTS: Mapping[str, Callable[[Array, Array, Any], Array]] = {
    "full": _product_full,
    "trace": _product_trace,
    "diagonal": _product_diagonal,
}


def _spread(a: Array, output: str, classes: int) -> Array:
    """Give (n, m) the axes of a kernel: the same for every pair of classes."""
    if output == "full":
        # Repeated in memory, behind a barrier that keeps XLA from fusing it into what follows: a
        # broadcast along the fastest axis is not vectorised.
        n, m = a.shape
        repeated = jax.lax.optimization_barrier(jnp.repeat(a, classes, axis=1))
        return repeated.reshape(n, 1, m, classes)
    return a[None] if output == "diagonal" else a


def _sum_over_pairs(x1: Array, g1: Array, x2: Array, g2: Array, output: str, dtype: Any) -> Array:
    """Activation form with several positions: a loop over (group, position, some positions')."""
    n, groups, positions = x1.shape[:3]
    m, classes = x2.shape[0], g1.shape[1]
    shape = {
        "full": (n, classes, classes, m),
        "diagonal": (classes, n, m),
        "trace": (n, m),
    }[output]
    most = max(1, _TURN // math.prod(shape))
    turn = max(t for t in range(1, positions + 1) if positions % t == 0 and t <= most)
    turns = positions // turn
    # Copies with the positions in front, so that every turn of the loop reads contiguous memory,
    # and is one product of two matrices.
    x1, x2 = (x.reshape(*x.shape[:3], -1).transpose(1, 2, 0, 3) for x in (x1, x2))
    x2 = x2.reshape(groups, turns, turn * m, -1)
    if output == "full":
        g1 = g1.transpose(2, 3, 0, 1, 4).reshape(groups, positions, n * classes, -1)
        g2 = g2.transpose(2, 3, 1, 0, 4).reshape(groups, turns, turn * classes * m, -1)
    elif output == "diagonal":
        g1 = g1.transpose(2, 3, 1, 0, 4)
        g2 = g2.transpose(2, 1, 3, 0, 4).reshape(groups, classes, turns, turn * m, -1)
        g2 = g2.swapaxes(1, 2)
    else:
        g1 = g1.transpose(2, 3, 0, 1, 4).reshape(groups, positions, n, -1)
        g2 = g2.transpose(2, 3, 0, 1, 4).reshape(groups, turns, turn * m, -1)

    def add(index: Array, total: Array) -> Array:
        b, rest = index // (positions * turns), index % (positions * turns)
        s, t = rest // turns, rest % turns
        a = _similarity(x1[b, s], x2[b, t], dtype).reshape(n, turn, m)
        if output == "diagonal":
            g = jnp.einsum("cno,cmo->cnm", g1[b, s], g2[b, t], preferred_element_type=dtype)
            return total + jnp.sum(a[None] * g.reshape(classes, n, turn, m), axis=2)
        g = _rows_product(g1[b, s], g2[b, t], dtype)
        if output == "trace":
            return total + jnp.sum(a * g.reshape(n, turn, m), axis=1)
        g = g.reshape(n, classes, turn, classes, m)
        return total + jnp.sum(a[:, None, :, None] * g, axis=2)

    found = jax.lax.fori_loop(0, groups * positions * turns, add, jnp.zeros(shape, dtype))
    return found.swapaxes(2, 3) if output == "full" else found


def finish(kernel: Array, output: str) -> Array:
    """From the internal layout to the public one; the trace becomes a mean by the caller."""
    return kernel.transpose(1, 2, 0) if output == "diagonal" else kernel


def square(
    features: Features,
    contract: Callable[[Features, Features], dict[str, Array]],
    output: str,
    rows: int,
    strips: int,
) -> dict[str, Array]:
    """Θ(X, X), exactly symmetric: only the upper triangle of blocks is computed, then mirrored."""
    edges = [round(index * rows / strips) for index in range(strips + 1)]
    parts: dict[str, list[Array]] = {}
    for low, high in itertools.pairwise(edges):
        upper = contract(_rows_of(features, low, high), _rows_of(features, low, rows))
        for name, part in upper.items():
            widths = [(0, 0)] * finish(part, output).ndim
            widths[COLUMN_AXIS[output]] = (low, 0)
            parts.setdefault(name, []).append(jnp.pad(finish(part, output), widths))
    return {name: mirror(jnp.concatenate(strip), output) for name, strip in parts.items()}


COLUMN_AXIS = {"full": 2, "diagonal": 1, "trace": 1}


def mirror(kernel: Array, output: str) -> Array:
    """Copy the upper triangle of a kernel (public layout) onto the lower one."""
    if output == "full":
        n, classes = kernel.shape[:2]
        flat = kernel.reshape(n * classes, n * classes)
        return (jnp.triu(flat) + jnp.triu(flat, 1).T).reshape(kernel.shape)
    if output == "diagonal":
        return jnp.moveaxis(mirror(jnp.moveaxis(kernel, 2, 0), "trace"), 0, 2)
    return jnp.triu(kernel) + jnp.triu(kernel, 1).swapaxes(-1, -2)


def transposed(kernel: Array, output: str) -> Array:
    """Θ(X2, X1) from Θ(X1, X2), in the public layout."""
    return kernel.transpose({"full": (2, 3, 0, 1), "diagonal": (1, 0, 2), "trace": (1, 0)}[output])


def _rows_of(features: Features, low: int, high: int) -> Features:
    return jax.tree.map(lambda value: value[low:high], features)
