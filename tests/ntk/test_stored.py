"""Tiles in a store: the kernel, whatever happened to the run or to the files."""

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from jaxttp.conditioning import condition_number
from jaxttp.ntk import empirical_ntk, extreme_eigenvalues, open_kernel, store_kernel, store_plan
from jaxttp.ntk._shared_store import opened_by_one, own_devices, shares_of
from jaxttp.ntk._tile_work import COPIES, TileWorker
from tests import oracles
from tests.meshes import automatic_four, four, network, samples, weights

N, TILE = 11, 4  # tiles of 4, 4 and 3 samples: 9, of which 6 are computed


def stored(path, **options):
    return store_kernel(network, weights(), samples(N), path=path, tile=TILE, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished store, and its numbers."""
    path = tmp_path_factory.mktemp("whole")
    return path, np.asarray(stored(path))


def files(path):
    """The tiles' files in order, their places beginning with the row."""
    return sorted(file for file in (path / "kernel" / "c").rglob("*") if file.is_file())


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-13 * np.max(np.abs(wanted)))


def test_the_kernel_is_that_of_the_brute_force_jacobian(whole):
    path, found = whole
    close(found, oracles.kernel(network, weights(), samples(N)))
    np.testing.assert_array_equal(found, found.transpose(2, 3, 0, 1))
    assert len(files(path)) == 9
    assert found.shape == open_kernel(path).shape


@pytest.mark.parametrize(
    ("output", "other"), [("trace", None), ("diagonal", None), ("full", 6), ("diagonal", 6)]
)
def test_other_outputs_and_samples(tmp_path, output, other):
    x2 = None if other is None else samples(other, seed=3)
    kernel = store_kernel(
        network, weights(), samples(N), x2, path=tmp_path, tile=TILE, output=output
    )
    wanted = empirical_ntk(network, weights(), samples(N), x2, output=output)
    assert kernel.shape == wanted.shape
    close(np.asarray(kernel), wanted)
    if other is None:
        np.testing.assert_array_equal(np.asarray(kernel), np.asarray(kernel).swapaxes(0, 1))


def test_products_and_eigenvalues_read_tile_by_tile(whole):
    path, found = whole
    kernel = open_kernel(path)
    vector = np.random.default_rng(0).normal(size=(N, 3))
    close(kernel.apply(vector), np.einsum("ncmd,md->nc", found, vector))
    values = np.linalg.eigvalsh(found.reshape(33, 33))
    ends = extreme_eigenvalues(kernel.operator(), key=jax.random.key(0))
    np.testing.assert_allclose(ends, values[[0, -1]], rtol=1e-9)
    result = condition_number(kernel.operator())
    np.testing.assert_allclose(result.value, values[-1] / values[0], rtol=1e-8)
    with pytest.raises(ValueError, match=r"vector must be \(11, 3\)"):
        kernel.apply(vector[:5])


class Ended(Exception):
    """Stands for a run that ends early."""


@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_run_that_was_ended_goes_on(tmp_path, whole, after):
    def end(done, total):
        if done == after:
            raise Ended

    with pytest.raises(Ended):
        stored(tmp_path, progress=end)
    with pytest.raises(ValueError, match=r"lacks \d tiles of its kernel; call store_kernel"):
        open_kernel(tmp_path)
    kernel = stored(tmp_path)
    assert kernel.computed == 6 - after  # nothing that was stored
    np.testing.assert_array_equal(np.asarray(kernel), whole[1])
    assert stored(tmp_path).computed == 0


def test_a_full_disk_leaves_what_was_stored(tmp_path, whole, full_disk):
    """The system refuses in the middle of a tile; what is there stays, and the next call ends."""
    with contextlib.ExitStack() as stack:

        def fill(done, total):
            if done == 2:
                stack.enter_context(full_disk(500))

        with pytest.raises(ValueError, match=r"Error writing local file .*File too large"):
            stored(tmp_path, progress=fill)
    with pytest.raises(ValueError, match=r"lacks \d tiles of its kernel; call store_kernel"):
        open_kernel(tmp_path)
    kernel = stored(tmp_path)
    assert kernel.computed == 4
    np.testing.assert_array_equal(np.asarray(kernel), whole[1])


def test_devices_of_a_mesh_write_the_same_bits(tmp_path, whole):
    """Each its own tiles; what one device began others end, and the other way round."""
    seen = []
    kernel = stored(tmp_path / "four", mesh=four(), progress=lambda *told: seen.append(told))
    assert seen == [(done, 6) for done in range(1, 7)]
    assert kernel.computed == 6
    np.testing.assert_array_equal(np.asarray(kernel), whole[1])
    assert stored(tmp_path / "four").computed == 0

    def end(done, total):
        if done == 1:
            raise Ended

    with pytest.raises(Ended):
        stored(tmp_path / "begun", mesh=four(), progress=end)
    kernel = stored(tmp_path / "begun")
    assert kernel.computed < 6  # tiles that the four were at work on were stored
    np.testing.assert_array_equal(np.asarray(kernel), whole[1])


def test_what_goes_wrong_on_one_device_is_told(tmp_path, monkeypatch):
    """The others end their tiles, and nobody waits."""
    compute = TileWorker.compute

    def fails(self, rows, columns, *, mirror):
        if rows.start == TILE:
            raise MemoryError("no room")
        return compute(self, rows, columns, mirror=mirror)

    monkeypatch.setattr(TileWorker, "compute", fails)
    with pytest.raises(MemoryError, match="no room"):
        stored(tmp_path, mesh=four())


def test_a_store_that_process_0_refuses_is_refused_everywhere(monkeypatch):
    """The others neither open it nor wait; see `experiments.bench.processes` for real ones."""
    mesh, told = automatic_four(), []

    def refuses():
        raise ValueError("path holds another kernel")

    def other(value):
        told.append(int(value))
        return np.int32(0)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"mesh has no device of process 1; give one of all"):
        own_devices(mesh)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", other)
    with pytest.raises(ValueError, match="path holds another kernel"):
        opened_by_one(mesh, refuses)
    assert told == [0]  # before it was raised
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match="path was refused in process 0"):
        opened_by_one(mesh, lambda: pytest.fail("it was opened"))


def test_tiles_are_shared_by_rows():
    places = [(slice(i, i + 2), slice(j, j + 2)) for i in range(0, 14, 2) for j in range(i, 14, 2)]
    shares = shares_of(places, 3)
    assert sorted(map(len, shares)) == [9, 9, 10]
    assert sorted(itertools.chain(*shares), key=str) == sorted(places, key=str)
    rows = [{place[0].start for place in share} for share in shares]
    assert sum(map(len, rows)) == len(set.union(*rows)) == 7
    assert shares_of(places[:1], 4) == [places[:1], [], [], []]


def cut(file, other):
    file.write_bytes(file.read_bytes()[:-9])


def change(file, other):
    numbers = bytearray(file.read_bytes())
    numbers[40] ^= 1
    file.write_bytes(bytes(numbers))


def exchange(file, other):
    """A whole tile with a right checksum, of another place."""
    file.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [cut, change, exchange])
def test_damaged_tiles_are_found_and_redone(tmp_path, whole, damage):
    stored(tmp_path)
    first, *_, last = files(tmp_path)  # on the diagonal
    damage(first, last)
    kernel = stored(tmp_path)
    assert kernel.computed == 1
    np.testing.assert_array_equal(np.asarray(kernel), whole[1])
    below = files(tmp_path)[3]  # the mirrored one is whole, and turned
    damage(below, last)
    kernel = stored(tmp_path)
    assert kernel.computed == 0
    np.testing.assert_array_equal(np.asarray(kernel), whole[1])


def test_tiles_of_another_kernel_are_redone(tmp_path, whole):
    """Files copied from a store of the same shape."""
    stored(tmp_path / "one")
    store_kernel(network, weights(), samples(N) + 1, path=tmp_path / "other", tile=TILE)
    for mine, foreign in zip(files(tmp_path / "one"), files(tmp_path / "other"), strict=True):
        mine.write_bytes(foreign.read_bytes())
    kernel = stored(tmp_path / "one")
    assert kernel.computed == 6
    np.testing.assert_array_equal(np.asarray(kernel), whole[1])


def test_stores_of_other_kernels_are_refused(tmp_path):
    stored(tmp_path)
    others = [
        lambda: store_kernel(network, weights(), samples(N) + 1, path=tmp_path, tile=TILE),
        lambda: store_kernel(lambda p, x: 2 * network(p, x), weights(), samples(N), path=tmp_path,
                             tile=TILE),
        lambda: stored(tmp_path, output="trace"),
        lambda: store_kernel(network, weights(), samples(N), path=tmp_path, tile=3),
    ]  # fmt: skip
    for call in others:
        with pytest.raises(ValueError, match="holds another kernel"):
            call()
    (tmp_path / "kernel" / "zarr.json").write_text('{"shape": [11')
    with pytest.raises(ValueError, match="or cannot be read"):
        stored(tmp_path)
    with pytest.raises(ValueError, match="holds no kernel of store_kernel"):
        open_kernel(tmp_path / "nothing")


def test_bad_input(tmp_path):
    for options, words in (
        ({"max_bytes": 100}, "max_bytes=100 does not hold a tile"),
        ({"max_bytes": 0}, "max_bytes must be greater than 0"),
    ):
        with pytest.raises(ValueError, match=words):
            store_kernel(network, weights(), samples(N), path=tmp_path, **options)
    with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh"):
        stored(tmp_path, mesh="four")
    with pytest.raises(ValueError, match="tile must be an integer"):
        store_kernel(network, weights(), samples(N), path=tmp_path, tile=0)


RUN = """
import sys, jax
jax.config.update("jax_enable_x64", True)
from jaxttp.ntk import store_kernel
from tests.meshes import network, samples, weights
mesh = jax.make_mesh((jax.device_count(),), ("rows",))
kernel = store_kernel(network, weights(), samples(120), path=sys.argv[1], tile=10, mesh=mesh,
                      progress=lambda done, total: print(done, flush=True))
print("computed", kernel.computed)
"""


def devices(count):
    """An environment with so many virtual devices."""
    return os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}


@pytest.mark.slow
def test_sigterm_is_heard_when_the_tile_is_stored(tmp_path):
    """The tile in work is there, the status says so, and the rest is computed by the next call."""
    path = str(tmp_path / "ended")
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=devices(1),
    )  # fmt: skip
    for line in run.stdout:
        if int(line) == 3:
            run.send_signal(signal.SIGTERM)
            break
    rest, said = run.communicate(timeout=120)
    done = int(rest.splitlines()[-1]) if rest else 3
    assert run.returncode == 143
    assert f"store_kernel: SIGTERM; {done} of 78 tiles stand in {path!r}" in said
    again = subprocess.run(
        [sys.executable, "-c", RUN, path], check=True, capture_output=True, text=True
    )  # fmt: skip
    assert again.stdout.splitlines()[-1] == f"computed {78 - done}"


def test_the_plan_says_what_it_takes(whole):
    """Before anything is computed, from shapes alone."""
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (weights(), samples(N)))
    plan = store_plan(network, *shapes, tile=TILE)
    assert (plan.tile, plan.tiles, plan.disk_bytes) == (TILE, 6, whole[1].nbytes)
    given = sum(leaf.nbytes for leaf in jax.tree.leaves((weights(), samples(N))))
    assert plan.host_bytes == given + COPIES * TILE**2 * 9 * 8
    assert re.search(r"host\nstore: 8.5 KiB, 6 tiles of 4 samples a side to compute", str(plan))
    assert store_plan(network, *shapes, shapes[1], tile=TILE).tiles == 9
    shared = store_plan(network, *shapes, tile=TILE, mesh=four())
    assert shared.host_bytes == given + 4 * COPIES * TILE**2 * 9 * 8
    assert (shared.devices, shared.bytes, shared.tile) == (4, plan.bytes, TILE)
    with pytest.raises(ValueError, match="max_bytes=100 does not hold a tile"):
        store_plan(network, *shapes, max_bytes=100)


@pytest.mark.slow
def test_kill_and_resume_ten_times(tmp_path):
    """SIGKILL at random tiles: all that was reported done is there, and the bits are the same.

    One device and a mesh of two take turns.
    """
    pick, done, kills, path = random.Random(0), 0, 0, str(tmp_path / "killed")
    while True:
        run = subprocess.Popen(
            [sys.executable, "-c", RUN, path], stdout=subprocess.PIPE, text=True,
            env=devices(1 + kills % 2),
        )  # fmt: skip
        goal, seen, last = done + pick.randint(1, 7), [], ""
        for last in run.stdout:
            if last.startswith("computed"):
                break
            seen.append(int(last))
            if seen[-1] == goal and kills < 10:
                time.sleep(pick.random() * 0.01)
                run.send_signal(signal.SIGKILL)
                break
        run.wait()
        if last.startswith("computed"):
            break
        kills, done = kills + 1, max(done, seen[-1])
    assert kills == 10
    # Some tiles may have been written between the last word of a run and its end.
    assert 0 < int(last.split()[1]) <= 78 - done
    alone = str(tmp_path / "alone")
    subprocess.run([sys.executable, "-c", RUN, alone], check=True, stdout=subprocess.DEVNULL)
    np.testing.assert_array_equal(*(np.asarray(open_kernel(place)) for place in (path, alone)))
