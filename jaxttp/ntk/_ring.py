"""A symmetric kernel on many devices: features go around, and every block is computed once.

Device p has the features of its own samples. After s turns it has those of device p + s beside
them, and multiplies the two; the block's transpose is sent to p + s, whose rows it belongs to. So
half a way around is enough. Where the devices are even in number, those of the last turn meet in
pairs, and each computes half of the block they share. What travels are features, from neighbour to
neighbour, and blocks. A device holds the features of one other's samples, and multiplies with some
of them at a time, as many as its plan has columns.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from jaxttp._core.checks import is_concrete
from jaxttp._core.compile import jit
from jaxttp.ntk._compiled import Functions, wide
from jaxttp.ntk._each_device import EVERYWHERE, gathered_leaves, on_all, some_rows
from jaxttp.ntk._memory import KEPT_ROWS
from jaxttp.ntk._plan import DEFAULT_WORK_BYTES, KernelPlan
from jaxttp.ntk.layerwise import COLUMN_AXIS, transposed
from jaxttp.ntk.row_sharded import settled

Parts = dict[str, Array]


def fits(plan: KernelPlan, features: int) -> bool:
    """Whether there is room for the features of another device's samples.

    Args:
        plan: of one device's rows against all columns.
        features: bytes of one device's.
    """
    bound = plan.kernel_bytes + DEFAULT_WORK_BYTES if plan.max_bytes is None else plan.max_bytes
    return plan.bytes + features <= bound


def around(
    functions: Functions,
    mesh: Mesh,
    given: tuple[list[Array], list[Array], Any],
    specs: tuple[PartitionSpec, ...],
    *,
    columns: int,
    output: str,
    dtype: str,
    empty: Callable[[Array], Array],
    progress: Callable[[int], None],
) -> Parts:
    """The kernel (rows, C, devices, columns of one, C) or of the other outputs, rows sharded.

    Args:
        functions: compiled pieces for one device.
        mesh: of automatic axes.
        given: parameters; samples, rows sharded; their features.
        specs: how the parameters lie.
        columns: samples whose features may be multiplied at a time.
        output: "full", "trace" or "diagonal".
        dtype: in which the kernel is summed.
        empty: (part of a block) -> where blocks of that kind are written.
        progress: called with the turns that are done.
    """
    products, moves = _products(functions, mesh, specs), _moves(mesh, output)
    work = _Turns(products, moves, mesh, *given, columns, dtype, empty)
    others: Any = None
    for turn in range(mesh.size // 2 + 1):
        if turn == 0:
            work.with_themselves()
        elif 2 * turn == mesh.size:
            work.with_each_other(others)
        else:
            work.with_others(others, turn)
        if 2 * (turn + 1) <= mesh.size:
            others = work.passed_on(others)
        progress(turn + 1)
    return work.kernels


@dataclasses.dataclass
class _Turns:
    """What devices do in a turn, and the kernels as far as they are written.

    Attributes:
        products: of features.
        moves: of features and parts.
        mesh: of automatic axes.
        leaves: of the parameters.
        x: samples, rows sharded.
        held: their features.
        columns: samples whose features may be multiplied at a time.
        dtype: in which the kernel is summed.
        empty: (part of a block) -> where blocks of that kind are written.
        kernels: by name.
    """

    products: "_Products"
    moves: "_Moves"
    mesh: Mesh
    leaves: list[Any]
    x: list[Array]
    held: Any
    columns: int
    dtype: str
    empty: Callable[[Array], Array]
    kernels: Parts = dataclasses.field(default_factory=dict)

    @property
    def mine(self) -> int:
        """Samples of a device."""
        return jax.tree.leaves(self.held)[0].shape[0] // self.mesh.size

    @property
    def size(self) -> int:
        """Columns at a time: all where they fit in one piece, else as few as on one device."""
        if self.columns >= self.mesh.size * self.mine:
            return self.mine
        return min(self.columns, math.ceil(self.mine / math.ceil(self.mine / KEPT_ROWS)))

    def with_themselves(self) -> None:
        """The kernel of each device's own samples."""
        if self.size == self.mine:
            self._write(self.products.own(self.leaves, self.x, self.held), 0, 0, 0)
            return
        places = starts(self.mine, self.size)
        for i, j in itertools.combinations_with_replacement(places, 2):
            parts = self._pair(self.held, i, j, self.size)
            self._write(parts, i, j, 0)
            if i != j:
                self._write(self._back(parts, 0), j, i, 0)

    def with_others(self, others: Any, turn: int) -> None:
        """Those of a device with another one's, and the transposes to where they belong."""
        for j in starts(self.mine, self.size):
            parts = self._pair(others, 0, j, self.mine)
            self._write(parts, 0, j, turn)
            self._write(self._back(parts, turn), j, 0, -turn)

    def with_each_other(self, others: Any) -> None:
        """Those of two devices with each other, half of them by each."""
        half = math.ceil(self.mine / 2)
        side = min(self.size, half)
        for i, j in itertools.product(starts(self.mine, side), starts(half, side)):
            given = (self.leaves, self.x, self.held, others, i, j)
            parts = settled(self.products.shared(*given, size=side), self.mesh)
            with wide(self.dtype):
                for name, part in parts.items():
                    self.kernels[name] = self.moves.meet(self._kernel(name, part), part, i, j)
            self._wait()

    def passed_on(self, others: Any) -> Any:
        """Features of the next device's samples; of None, those of one's own neighbour."""
        others = self.moves.copy(self.held) if others is None else others
        for low in range(0, self.mine, self.size):
            size = min(self.size, self.mine - low)
            others = settled(self.moves.on(others, low, size=size), self.mesh)
        return others

    def _pair(self, others: Any, i: int, j: int, rows: int) -> Parts:
        given = (self.leaves, self.x, self.held, others, i, j)
        return settled(self.products.pair(*given, rows=rows, size=self.size), self.mesh)

    def _back(self, parts: Parts, turn: int) -> Parts:
        with wide(self.dtype):
            sent = {name: self.moves.back(part, turn=turn) for name, part in parts.items()}
        return settled(sent, self.mesh)

    def _kernel(self, name: str, part: Array) -> Array:
        return self.kernels.pop(name) if name in self.kernels else self.empty(part)

    def _write(self, parts: Parts, row: int, column: int, turn: int) -> None:
        with wide(self.dtype):
            for name, part in parts.items():
                kernel = self._kernel(name, part)
                self.kernels[name] = self.moves.write(kernel, part, row, column, turn)
        self._wait()

    def _wait(self) -> None:
        if all(is_concrete(kernel) for kernel in self.kernels.values()):
            jax.block_until_ready(self.kernels)  # else parts to come would be allocated already


def starts(total: int, size: int) -> list[int]:
    """Where blocks of one size begin that cover `total`; the last one reaches back."""
    return [min(low, total - size) for low in range(0, total, size)]


class _Products(NamedTuple):
    """Products of features, on all devices at once; places are those in a device's share.

    Attributes:
        own: (leaves, x, features) -> the kernel of each device's samples with themselves.
        pair: (leaves, x, features, others', i, j, rows, size) -> of rows from i on with columns of
            another device from j on.
        shared: (leaves, x, features, others', i, j, size) -> of the block that two devices share,
            in the rows of the one of the lower place: its rows i and columns j, by the other one
            columns j of the second half.
    """

    own: Callable[..., Parts]
    pair: Callable[..., Parts]
    shared: Callable[..., Parts]


class _Moves(NamedTuple):
    """What travels, and where it is written.

    Attributes:
        copy: (features) -> the same, elsewhere.
        on: (features, start, size) -> with some rows of the next device in place of these.
        back: (part, turn) -> what device p - turn has computed of p, transposed.
        meet: (kernel, shared part, i, j) -> with both devices' parts written, on both.
        write: (kernel, part, row, column, turn) -> with columns of device p + turn written.
    """

    copy: Callable[..., Any]
    on: Callable[..., Any]
    back: Callable[..., Array]
    meet: Callable[..., Array]
    write: Callable[..., Array]


def _is_first(mesh: Mesh) -> Array:
    """Of two that meet, the one of the lower place."""
    return jax.lax.axis_index(mesh.axis_names) < mesh.size // 2


@functools.lru_cache(maxsize=64)
def _products(
    functions: Functions,
    mesh: Mesh,
    specs: tuple[PartitionSpec, ...],
) -> _Products:
    rows = PartitionSpec(mesh.axis_names)
    own_and_theirs = (mesh, list(specs), rows, rows, rows, EVERYWHERE, EVERYWHERE)

    @jit
    def own(leaves: list[Any], x: list[Array], held: Any) -> Parts:
        def each(leaves: list[Any], x: list[Array], held: Any) -> Parts:
            return functions.square(gathered_leaves(leaves, specs), x, held)

        return on_all(each, mesh, list(specs), rows, rows)(leaves, x, held)

    @functools.partial(jit, static_argnames=("rows", "size"))
    def pair(
        leaves: list[Any], x: list[Array], held: Any, others: Any, i: Array, j: Array, rows: int,
        size: int,
    ) -> Parts:  # fmt: skip
        def each(leaves: Any, x: Any, held: Any, others: Any, i: Array, j: Array) -> Parts:
            upper, lower = some_rows(held, i, rows), some_rows(others, j, size)
            return functions.against(gathered_leaves(leaves, specs), x, upper, lower)

        return on_all(each, *own_and_theirs)(leaves, x, held, others, i, j)

    @functools.partial(jit, static_argnames="size")
    def shared(
        leaves: list[Any], x: list[Array], held: Any, others: Any, i: Array, j: Array, size: int
    ) -> Parts:
        def each(leaves: Any, x: Any, held: Any, others: Any, i: Array, j: Array) -> Parts:
            first, mine = _is_first(mesh), jax.tree.leaves(held)[0].shape[0]
            either = functools.partial(jax.tree.map, lambda a, b: jnp.where(first, a, b))
            upper = either(some_rows(held, i, size), some_rows(others, i, size))
            lower = either(some_rows(others, j, size), some_rows(held, j + mine // 2, size))
            return functions.against(gathered_leaves(leaves, specs), x, upper, lower)

        return on_all(each, *own_and_theirs)(leaves, x, held, others, i, j)

    return _Products(own, pair, shared)


@functools.lru_cache(maxsize=64)
def _moves(mesh: Mesh, output: str) -> _Moves:
    axes, axis, count = mesh.axis_names, COLUMN_AXIS[output], mesh.size
    rows = PartitionSpec(axes)

    def from_device(distance: int, tree: Any) -> Any:
        """What device p + distance has."""
        if distance == 0:
            return tree
        pairs = [((p + distance) % count, p) for p in range(count)]
        return jax.tree.map(lambda a: jax.lax.ppermute(a, axes, pairs), tree)

    def written(kernel: Array, part: Array, row: Array, column: Array, turn: Any) -> Array:
        place: list[Any] = [0] * kernel.ndim
        place[0], place[axis + 1] = row, column
        place[axis] = (jax.lax.axis_index(axes) + turn) % count
        place = [jnp.asarray(one, jnp.int32) for one in place]
        return jax.lax.dynamic_update_slice(kernel, jnp.expand_dims(part, axis), place)

    @jit
    def copy(held: Any) -> Any:
        return jax.tree.map(jnp.copy, held)

    @functools.partial(jit, static_argnames="size", donate_argnums=0)
    def on(held: Any, start: Array, size: int) -> Any:
        def each(held: Any, start: Array) -> Any:
            new = from_device(1, some_rows(held, start, size))
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
            return jax.tree.map(lambda a, b: put(a, b, start), held, new)

        return on_all(each, mesh, rows, EVERYWHERE)(held, start)

    @functools.partial(jit, static_argnames="turn")
    def back(part: Array, turn: int) -> Array:
        return on_all(lambda a: from_device(-turn, transposed(a, output)), mesh, rows)(part)

    @functools.partial(jit, donate_argnums=0)
    def meet(kernel: Array, part: Array, i: Array, j: Array) -> Array:
        def each(kernel: Array, part: Array, i: Array, j: Array) -> Array:
            first, last = _is_first(mesh), j + kernel.shape[0] // 2
            theirs = from_device(count // 2, part)
            for one, column in ((part, (j, last)), (theirs, (last, j))):
                place = jnp.where(first, *column)
                one = jnp.where(first, one, transposed(one, output))
                row = jnp.where(first, i, place)
                kernel = written(kernel, one, row, jnp.where(first, place, i), count // 2)
            return kernel

        return on_all(each, mesh, rows, rows, EVERYWHERE, EVERYWHERE)(kernel, part, i, j)

    @functools.partial(jit, donate_argnums=0)
    def write(kernel: Array, part: Array, row: Array, column: Array, turn: Array) -> Array:
        each = on_all(written, mesh, rows, rows, EVERYWHERE, EVERYWHERE, EVERYWHERE)
        return each(kernel, part, row, column, turn)

    return _Moves(copy, on, back, meet, write)
