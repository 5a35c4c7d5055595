"""One tile of a kernel: how large it is, how it is computed, and what its numbers depend on."""

import dataclasses
import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.version import __version__ as jaxlib_version
from jaxtyping import Array

from jaxttp._checks import check_integer
from jaxttp.ntk._blocks import features_of_rows
from jaxttp.ntk._compiled import compiled
from jaxttp.ntk._plan import KernelPlan
from jaxttp.ntk._tiles import mirrored_tile
from jaxttp.ntk.gram import Job, cached
from jaxttp.ntk.layerwise import COLUMN_AXIS

DEFAULT_BYTES = 1 << 30  # of working memory, where no bound is given
TILE_BYTES = 32 << 20  # of the largest tile that is chosen unasked
COPIES = 6  # of a tile, on the host and on its way to the disk


def plan_tiles(job: Job, method: str, tile: int | None, bound: float) -> tuple[int, KernelPlan]:
    """The side of a tile, and how one is computed with its rows' features in memory."""
    work = job.work
    largest = max(work.n1, work.n2)
    given = tile is not None
    if tile is None:
        tile = max(1, math.isqrt(TILE_BYTES // (work.entries * work.itemsize)))
    tile = min(check_integer("tile", tile, at_least=1), largest)
    while True:
        size = tile**2 * work.entries * work.itemsize
        share = dataclasses.replace(work, n1=tile, n2=tile, symmetric=False, alone=False)
        try:
            plan = dataclasses.replace(job, work=share).plan(method, None, int(bound))
        except ValueError:
            plan = None
        fits = plan is not None and plan.rows == tile and plan.bytes + COPIES * size <= bound
        if plan is not None and fits:
            return tile, plan
        if given or tile == 1:
            raise ValueError(
                f"max_bytes={bound} does not hold a tile of {tile} samples ({size} bytes, some "
                f"copies of it, and the features of its rows); give more"
                + (", or leave tile out." if given else ".")
            )
        tile = -(-tile // 2)


@dataclasses.dataclass(eq=False)
class TileWorker:
    """Computes tiles, and keeps the features of the last block of rows; on one device."""

    job: Job
    plan: KernelPlan
    functions: Any
    leaves: list[Array]
    tile: int
    device: Any = None
    rows: tuple[slice, list[Array], Any] | None = None

    @classmethod
    def of(cls, job: Job, plan: KernelPlan, tile: int, device: Any = None) -> "TileWorker":
        """One on some device, or on the default one."""
        functions = cached(compiled, job.apply_fn, job.variant(plan))
        leaves = [on_device(device, leaf) for leaf in job.leaves]
        return cls(job, plan, functions, leaves, tile, device)

    @property
    def inner(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Axes after those of the rows' samples and of the columns'."""
        c = self.job.work.classes
        return {"full": ((c,), (c,)), "diagonal": ((), (c,)), "trace": ((), ())}[
            self.job.work.output
        ]

    def compute(self, rows: slice, columns: slice, *, mirror: bool) -> np.ndarray:
        """The tile of some rows and columns."""
        job, plan, tile = self.job, self.plan, self.tile
        axis = COLUMN_AXIS[job.work.output]
        with jax.default_matmul_precision("highest"):
            if self.rows is None or self.rows[0] != rows:
                self.rows = None  # dropped before the next ones are there
                x = self._samples(job.rows, rows)
                held = features_of_rows(
                    self.functions, self.leaves, x, 0, tile, min(plan.chunk, tile)
                )
                self.rows = rows, x, held
            _, _, held = self.rows
            x = self._samples(job.rows if job.columns is None else job.columns, columns)
            out = np.zeros(
                (tile, *self.inner[0], tile, *self.inner[1]), np.dtype(job.dtype)
            )  # fmt: skip
            size = min(plan.columns, tile)
            for low in range(0, tile, size):
                j = min(low, tile - size)
                part = self.functions.stream(self.leaves, x, held, j, size=size)["sum"]
                out[(slice(None),) * axis + (slice(j, j + size),)] = np.asarray(part)
        high, wide = rows.stop - rows.start, columns.stop - columns.start
        cut = out[(slice(high),) + (slice(None),) * (axis - 1) + (slice(wide),)]
        return mirrored_tile(cut, job.work.output) if mirror else np.ascontiguousarray(cut)

    def _samples(self, leaves: list[Any], rows: slice) -> list[Array]:
        return [on_device(self.device, padded(leaf, rows, self.tile)) for leaf in leaves]


def on_device(device: Any, leaf: Any) -> Array:
    """An array on a device, where programs follow it; on none in particular for None."""
    array = jnp.asarray(leaf)
    return array if device is None else jax.device_put(array, device)


def fingerprint_of(job: Job, plan: KernelPlan, tile: int) -> str:
    """What a kernel's numbers depend on: network, parameters, samples, plan and versions."""
    said = (
        job.work.trainable, job.work.output, job.dtype, plan.method, dict(plan.forms),
        plan.columns, plan.chunk, tile,
    )  # fmt: skip
    params = jax.tree.unflatten(job.treedef, [jnp.asarray(leaf) for leaf in job.leaves])
    samples = jax.tree.unflatten(job.sample_treedef, job.rows)
    return identity_of(job.apply_fn, params, samples, said, job.columns or [])


def identity_of(
    apply_fn: Any, params: Any, samples: Any, said: tuple, more: Sequence[Any] = ()
) -> str:
    """A digest of a network, its parameters and samples, of what else is said, and of versions.

    Args:
        apply_fn: ``(params, x (N, ...)) -> outputs (N, C)``.
        params: pytree of arrays.
        samples: (N, ...), a pytree.
        said: options; what prints alike is alike.
        more: further arrays.
    """
    rows = jax.tree.leaves(samples)
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *np.shape(a)[1:]), a.dtype), samples)
    network = jax.make_jaxpr(apply_fn)(params, one)
    text = re.sub(r"0x[0-9a-f]+", "", str(network))  # functions that are no part of the maths
    kind = jax.devices()[0].device_kind
    everything = (text, *said, jax.__version__, jaxlib_version, kind)
    found = hashlib.sha256(repr(everything).encode())
    for number, leaves in enumerate((network.consts, jax.tree.leaves(params), rows, more)):
        for leaf in leaves:
            host = np.asarray(leaf)
            found.update(f"{number} {host.dtype} {host.shape}".encode())
            found.update(np.ascontiguousarray(host).data)
    return found.hexdigest()


def padded(leaf: Any, rows: slice, length: int) -> np.ndarray:
    """Samples of a block; the last one repeats its last sample to be as long as the others."""
    some = np.asarray(leaf[rows])
    return np.concatenate([some, np.repeat(some[-1:], length - (rows.stop - rows.start), 0)])
