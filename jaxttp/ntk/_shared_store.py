"""One store that many devices fill, of one process or of several: each sees to tiles of its own.

A tile is the same program on whichever device, so the store does not know how many there were, and
a run that was ended goes on with other ones. Process 0 makes the store before the others open it.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxttp._interrupt import between_pieces

T = TypeVar("T")
TilePlace = tuple[slice, slice]
WAIT = 0.2
"""Seconds between two looks at what other processes have done."""


def shares_of(places: Sequence[TilePlace], workers: int) -> list[list[TilePlace]]:
    """Whole rows of tiles for every worker, about as many tiles each; a row's features are shared.

    Args:
        places: of tiles, row by row.
        workers: how many share them.

    Example:
        >>> rows = [(slice(i, i + 1), slice(j, j + 1)) for i in range(4) for j in range(i, 4)]
        >>> [len(share) for share in shares_of(rows, 2)]
        [5, 5]
    """
    rows: dict[int, list[TilePlace]] = {}
    for place in places:
        rows.setdefault(place[0].start, []).append(place)
    shares: list[list[TilePlace]] = [[] for _ in range(workers)]
    for row in sorted(rows.values(), key=len, reverse=True):
        min(shares, key=len).extend(row)
    return shares


def own_devices(mesh: Mesh) -> dict[int, Any]:
    """This process's devices of a mesh, by their number among all of them.

    Raises:
        ValueError: a mesh without devices of some process, which would wait for nothing.
    """
    devices = list(mesh.devices.flat)
    lacking = set(range(jax.process_count())) - {device.process_index for device in devices}
    if lacking:
        raise ValueError(
            f"mesh has no device of process {min(lacking)}; give one of all processes, such as "
            "jax.make_mesh((jax.device_count(),), ('rows',))."
        )
    mine = jax.process_index()
    return {i: device for i, device in enumerate(devices) if device.process_index == mine}


def opened_by_one(mesh: Mesh | None, opened: Callable[[], T]) -> T:
    """What opens a store, called by process 0 first and by the others when it is there.

    Raises:
        ValueError: what it refuses, in every process.
    """
    if mesh is None or jax.process_count() == 1:
        return opened()
    from jax.experimental import multihost_utils  # here, since most have one process

    found: T | None = None
    problem: Exception | None = None
    if jax.process_index() == 0:
        try:
            found = opened()
        except Exception as one:  # told to the others first, who would wait for ever
            problem = one
    is_there = int(multihost_utils.broadcast_one_to_all(np.int32(problem is None)))
    if problem is not None:
        raise problem
    if not is_there:
        raise ValueError("path was refused in process 0, which says why.")
    return opened() if found is None else found


def fill(
    name: str,
    path: Any,
    mesh: Mesh | None,
    places: Sequence[TilePlace],
    tasks: Mapping[int, Callable[..., bool]],
    missing: Callable[[], int],
    progress: Callable[[int, int], None] | None,
) -> int:
    """Every tile of a store seen to, by this process's devices and those of the others.

    Args:
        name: of the function that is called, for what SIGTERM says.
        path: of the store, for the same.
        mesh: the devices, or None for one.
        places: of the tiles.
        tasks: by the number of a device of this process what it does with the rows and columns of a
            tile; whether it had to be computed.
        missing: how many tiles are not there.
        progress: called with (tiles done, tiles in all) of this process.

    Returns:
        Tiles that were computed here.

    Raises:
        SystemExit: SIGTERM came.
    """
    everyone = shares_of(places, 1 if mesh is None else mesh.size)
    shares = [everyone[number] for number in tasks]
    total, computed = sum(map(len, shares)), 0
    words = f"{total} tiles stand in {str(path)!r}, and the same call goes on."
    doing = in_threads(shares, list(tasks.values()))
    with between_pieces() as piece, contextlib.closing(doing) as tiles:
        for done, is_new in enumerate(tiles, start=1):
            computed += is_new
            if progress is not None:
                progress(done, total)
            piece(f"{name}: SIGTERM; {done} of {words}")
        wait_for_all(mesh, missing, lambda _: piece(f"{name}: SIGTERM; {total} of {words}"))
    return computed


def in_threads(
    shares: Sequence[Sequence[TilePlace]], workers: Sequence[Callable[..., T]]
) -> Generator[T]:
    """What the workers say of their tiles, as they come: a thread for each, or none for one.

    Closed, it lets every worker finish the tile in work.

    Args:
        shares: the tiles of every worker.
        workers: each called with the rows and columns of a tile.

    Example:
        >>> place = (slice(0, 1), slice(2, 4))
        >>> list(in_threads([[place], [place]], [lambda *_: 1, lambda *_: 1]))
        [1, 1]
    """
    if len(workers) == 1:
        yield from (workers[0](*place) for place in shares[0])
        return
    ended, said = threading.Event(), queue.SimpleQueue()
    is_wide = jax.dtypes.canonicalize_dtype("float64") == np.float64  # of this thread alone

    def work(share: Sequence[TilePlace], worker: Callable[..., T]) -> None:
        try:
            with jax.enable_x64(is_wide):
                for place in share:
                    if ended.is_set():
                        return
                    said.put((worker(*place), None))
        except BaseException as problem:  # raised where the tiles are waited for
            said.put((None, problem))

    threads = [
        threading.Thread(target=work, args=given) for given in zip(shares, workers, strict=True)
    ]
    try:
        for thread in threads:
            thread.start()
        for _ in range(sum(map(len, shares))):
            found, problem = said.get()
            if problem is not None:
                raise problem
            yield found
    finally:
        ended.set()
        for thread in threads:
            with contextlib.suppress(RuntimeError):  # never started
                thread.join()


def wait_for_all(
    mesh: Mesh | None, missing: Callable[[], int], told: Callable[[int], None]
) -> None:
    """Until every process has done its part of a store.

    Args:
        mesh: None where there are no others.
        missing: how many tiles are not there.
        told: called with that number now and then.
    """
    if mesh is None or jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    while left := missing():
        told(left)
        time.sleep(WAIT)
    multihost_utils.sync_global_devices("a store")  # tiles that were redone, too
