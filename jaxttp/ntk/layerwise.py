"""The kernel layer by layer: Θ is a sum over parameters, and most of them need no Jacobian.

For a site (see `_sites`) with inputs x (b, s, k) and output cotangents g^c (b, s, o),

    activation form   Θ[i,c,j,d] += sum_{b,s,t} <x_i[b,s], x_j[b,t]> <g_i^c[b,s], g_j^d[b,t]>
    gradient form     Θ[i,c,j,d] += <dW_i^c, dW_j^d>,     dW_i^c[b] = sum_s x_i[b,s] g_i^c[b,s]^T

The first never forms a weight gradient (see `_products`). It needs no g of a last layer, which are
unit vectors: <g_i^c, g_j^d> is 1 for c = d and 0 else. The second is cheaper when many positions
share a small weight. Where x and g are smaller than the dW, the dW are deferred: they are formed
when they are multiplied (see `_products`). Direct parameters (see `_sites`) are in gradient form by
ordinary differentiation.

All cotangents come from one reverse pass for each of the C outputs, taken for all samples at once.

Everything is sample-major, (n, C, ...): a block of rows is then a contiguous slice. In other orders
copies take a third of the time of matrix products on a CPU.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxttp.ntk._products import PRODUCTS, Outer, mirrored, similarity, sum_over_pairs
from jaxttp.ntk._program import NetworkProgram
from jaxttp.ntk._sites import Site

JOIN_BELOW = 1 << 14
"""Leaves of fewer parameters are joined into one product."""
JOINED = "joined"


class Features(NamedTuple):
    """The data of each sample from which kernel entries are computed.

    Attributes:
        inputs: by leaf, x (n, b, s, k) of the sites in activation form; pixels (n, 1, p, channels)
            of convolutions with windows.
        cotangents: by leaf, g (n, C, b, s, o) of the same sites, without the last layer.
        gradients: by name, per-sample gradients (n, C, d) of all other parameters.
        late: by leaf, x (n, s, k) and g (n, C, o, s) of the sites with deferred gradients.
    """

    inputs: dict[int, Array]
    cotangents: dict[int, Array]
    gradients: dict[str, Array]
    late: dict[int, Outer]


@dataclasses.dataclass(frozen=True, eq=False)
class Layers:
    """The form of each trainable leaf of a network in the kernel.

    Attributes:
        program: the single-sample network.
        activation: sites contracted in activation form.
        gradient: sites whose weight gradient is formed from patches.
        direct: leaves in gradient form by ordinary differentiation.
        late: sites whose weight gradient is formed when it is multiplied; they have one group.
    """

    program: NetworkProgram
    activation: tuple[Site, ...]
    gradient: tuple[Site, ...]
    direct: tuple[int, ...]
    late: tuple[Site, ...] = ()

    def features(
        self,
        leaves: Sequence[Array],
        samples: Sequence[Array],
        factors: Mapping[int, Array] = types.MappingProxyType({}),
    ) -> Features:
        """The features of a batch.

        Args:
            leaves: of the parameters.
            samples: (n, ...).
            factors: by leaf, of the entries of per-sample gradients, see `factors`.
        """
        return jax.vmap(lambda *row: self._sample_features(leaves, row, factors))(*samples)

    def factors(self, diagonal: Sequence[Array], samples: Sequence[Array]) -> dict[int, Array]:
        """The entries of a diagonal in the layout of every leaf's gradient.

        Args:
            diagonal: leaves as those of the parameters, then the arrays that the network closes
                over.
            samples: (n, ...), of which only shapes count.
        """
        sites = self.gradient + self.late + self.activation
        sample = [row[0] for row in samples]
        captured = {site.step: site.weight for site in sites}
        _, seen = self.program.run(diagonal, sample, {}, captured)
        found = {site.leaf: site.layout(seen[site.step]) / site.scale for site in sites}
        return found | {leaf: diagonal[leaf] for leaf in self.direct}

    def _sample_features(
        self, leaves: Sequence[Array], sample: Sequence[Array], factors: Mapping[int, Array]
    ) -> Features:
        sites = self.activation + self.gradient + self.late
        captured = {site.step: site.operand for site in sites}
        heads = [site for site in self.activation if site.is_head]
        steps = self.program.steps

        def forward(probes: dict[int, Array], direct: dict[int, Array]) -> Any:
            mixed = [direct.get(index, leaf) for index, leaf in enumerate(leaves)]
            return self.program.run(mixed, sample, probes, captured)

        beneath = [site.step for site in sites if site not in heads]
        avals = {step: steps[step].equation.outvars[0].aval for step in beneath}
        probes = {step: jnp.zeros(aval.shape, aval.dtype) for step, aval in avals.items()}
        direct = {index: leaves[index] for index in self.direct}
        outputs, pull, seen = jax.vjp(forward, probes, direct, has_aux=True)
        basis = jnp.eye(outputs.shape[0], dtype=outputs.dtype)
        at_sites, at_leaves = jax.vmap(pull)(basis)

        inputs, cotangents, gradients, late = {}, {}, {}, {}
        for site in sites:
            compared = site.pixels if site.windows is not None and site in self.activation else None
            x = (compared or site.inputs)(seen[site.step])
            if site in heads:
                inputs[site.leaf] = x
                continue
            g = jax.vmap(site.cotangents, (0, None))(at_sites[site.step], seen[site.step])
            if site.scale != 1.0:
                g = g * jnp.asarray(site.scale, g.dtype)
            if site in self.activation:
                inputs[site.leaf], cotangents[site.leaf] = x, g
            elif site in self.late:
                late[site.leaf] = Outer(x[0].astype(g.dtype), g[:, 0].swapaxes(-1, -2))
            else:
                weight = jnp.einsum("bsk,cbso->cbko", x.astype(g.dtype), g)
                gradients[str(site.leaf)] = _flat(weight, factors.get(site.leaf))
        for index, value in at_leaves.items():
            gradients[str(index)] = _flat(value, factors.get(index))
        return Features(inputs, cotangents, self._join(gradients), late)

    def gradient_sizes(self) -> dict[str, int]:
        """By name, numbers of a sample's and output's gradient in `Features.gradients`."""
        shapes = {i: self.program.avals[self.program.parameters[i]].shape for i in self.direct}
        sizes = {str(site.leaf): site.size for site in self.gradient}
        sizes |= {str(leaf): math.prod(shape) for leaf, shape in shapes.items()}
        small = self._small(sizes)
        joined = {JOINED: sum(sizes.pop(name) for name in small)} if small else {}
        return {**sizes, **joined}

    def _small(self, sizes: dict[str, int]) -> list[str]:
        """The names of the gradients that are joined."""
        small = [name for name, size in sizes.items() if size < JOIN_BELOW]
        return small if len(small) > 1 else []

    def _join(self, gradients: dict[str, Array]) -> dict[str, Array]:
        small = self._small({name: value.shape[-1] for name, value in gradients.items()})
        if not small:
            return gradients
        joined = jnp.concatenate([gradients.pop(name) for name in small], axis=-1)
        return {**gradients, JOINED: joined}

    def kernel(self, first: Features, second: Features | None, output: str, dtype: Any) -> Array:
        """The kernel between two batches.

        Deferred gradients are left out: `jaxttp.ntk._products` multiplies them.

        Args:
            first: rows.
            second: columns; None for the rows again. Then only the entries on and above the
                diagonal are meaningful.
            output: "full", "trace" or "diagonal".
            dtype: in which it is summed.

        Returns:
            An array (n, C, m, C) for output "full", (C, n, m) for "diagonal", (n, m) for "trace".
        """
        product = PRODUCTS[output]
        inputs, cotangents, gradients = (
            ({}, {}, {}) if second is None else (second.inputs, second.cotangents, second.gradients)
        )
        terms: list[Array] = []
        for site in self.activation:
            x1, x2 = first.inputs[site.leaf], inputs.get(site.leaf)
            g1, g2 = first.cotangents.get(site.leaf), cotangents.get(site.leaf)
            if site.positions == 1 and site.groups == 1:
                x2 = None if x2 is None else x2.reshape(len(x2), -1)
                a = similarity(x1.reshape(len(x1), -1), x2, dtype)
                if g1 is None:  # a last layer
                    g = _units(self.program.outputs, output, dtype)
                    a = a * jnp.asarray(site.scale**2, a.dtype)
                else:
                    g = product(g1[:, :, 0, 0], None if g2 is None else g2[:, :, 0, 0], dtype)
                if site.bias is not None:
                    a = a + jnp.ones((), a.dtype)
                terms.append(_spread(a, output, g) * g)
            else:
                assert g1 is not None  # a last layer has one position
                terms.append(sum_over_pairs(x1, g1, x2, g2, output, dtype, site.windows))
        for name, value in first.gradients.items():
            terms.append(product(value, gradients.get(name), dtype))
        return functools.reduce(jnp.add, terms)


def _flat(gradients: Array, factor: Array | None) -> Array:
    """Gradients (C, d) of every output, their entries times those of a diagonal."""
    if factor is not None:
        gradients = gradients * factor[None].astype(gradients.dtype)
    return gradients.reshape(len(gradients), -1)


def _units(classes: int, output: str, dtype: Any) -> Array:
    """<g^c, g^d> of unit vectors, with the axes of a kernel; for the trace their sum."""
    if output == "full":
        return jnp.eye(classes, dtype=dtype)[None, :, None]
    if output == "diagonal":
        return jnp.ones((classes, 1, 1), dtype)
    return jnp.full((1, 1), classes, dtype)


def _spread(a: Array, output: str, g: Array) -> Array:
    """Give (n, m) the axes of a kernel: the same for every pair of classes of `g`."""
    if output == "full":
        classes = g.shape[1]
        # Repeated in memory, behind a barrier that keeps XLA from fusing it into later operations:
        # a broadcast along the fastest axis is not vectorized.
        n, m = a.shape
        repeated = jax.lax.optimization_barrier(jnp.repeat(a, classes, axis=1))
        return repeated.reshape(n, 1, m, classes)
    return a[None] if output == "diagonal" else a


def finish(kernel: Array, output: str) -> Array:
    """From the internal layout to the public one; the trace becomes a mean by the caller."""
    return kernel.transpose(1, 2, 0) if output == "diagonal" else kernel


COLUMN_AXIS = {"full": 2, "diagonal": 1, "trace": 1}


def mirror(kernel: Array, output: str) -> Array:
    """Copy the upper triangle of a kernel (public layout) onto the lower one."""
    if output == "full":
        size = kernel.shape[0] * kernel.shape[1]
        return mirrored(kernel.reshape(size, size)).reshape(kernel.shape)
    if output == "diagonal":
        return jnp.moveaxis(mirror(jnp.moveaxis(kernel, 2, 0), "trace"), 0, 2)
    return mirrored(kernel)


def transposed(kernel: Array, output: str) -> Array:
    """Θ(X2, X1) from Θ(X1, X2), in the public layout."""
    return kernel.transpose({"full": (2, 3, 0, 1), "diagonal": (1, 0, 2), "trace": (1, 0)}[output])
