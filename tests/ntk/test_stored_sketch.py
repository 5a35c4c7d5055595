"""Sketches in a store: those in memory, whatever happened to the run or to the files."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp.conditioning import condition_number
from jaxttp.dynamics import gradient_flow, recursion
from jaxttp.forecast import grid, sweep_kernel
from jaxttp.ntk import (
    Factored,
    extreme_eigenvalues,
    open_sketch,
    sketch_jacobian,
    store_kernel,
    store_sketch,
)
from jaxttp.ntk.stored_sketch import StoredSketch
from tests.meshes import automatic_four, labels, network, samples, weights

N, TILE, DIM = 11, 4, 64  # blocks of 4, 4 and 3 samples
KEY = jax.random.key(1)
X, TEST = samples(N), samples(5, seed=3)
F0, Y = network(weights(), X), labels(X)


def stored(path, x=X, **options):
    options = {"key": KEY, "dim": DIM, "tile": TILE} | options
    return store_sketch(network, weights(), x, path=path, **options)


def files(path):
    return sorted(file for file in (path / "sketch" / "c").rglob("*") if file.is_file())


def close(got, wanted):
    # The same float64 numbers, added up by blocks.
    np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Sketches of two sets of samples by one key, on disk."""
    path = tmp_path_factory.mktemp("whole")
    return stored(path / "own"), stored(path / "test", TEST)


@pytest.fixture(scope="module")
def in_memory():
    own, other = (sketch_jacobian(network, weights(), x, key=KEY, dim=DIM) for x in (X, TEST))
    return own, other


@pytest.mark.parametrize(("kind", "tile"), [("countsketch", 1), ("gaussian", 4), ("gaussian", 30)])
def test_it_is_the_sketch(tmp_path, kind, tile):
    kept = stored(tmp_path, kind=kind, tile=tile)
    wanted = sketch_jacobian(network, weights(), X, key=KEY, dim=DIM, kind=kind)
    close(np.asarray(kept), wanted)
    assert kept.shape == wanted.shape == open_sketch(tmp_path).shape
    assert kept.computed == len(files(tmp_path)) == -(-N // tile)
    close(kept.rows(np.array([7, 0, 7])), np.asarray(wanted)[[7, 0, 7]])


def test_a_part_of_the_weights_and_a_pytree_of_samples(tmp_path):
    pair = lambda w, x: network(w, x["a"] + x["b"])  # noqa: E731
    x = {"a": X, "b": jnp.zeros_like(X)}
    part = jax.tree.map(lambda leaf: leaf.ndim > 1, weights())
    options = {"key": KEY, "dim": DIM, "trainable": part}
    kept = store_sketch(pair, weights(), x, path=tmp_path, tile=TILE, **options)
    close(np.asarray(kept), sketch_jacobian(network, weights(), X, **options))


def test_products_of_the_kernel(kept, in_memory):
    own, other = kept
    wanted = np.asarray(Factored.of(in_memory[1], in_memory[0]).dense())
    cross = other.kernel(own)
    close(np.asarray(cross), wanted)
    vectors = np.random.default_rng(0).normal(size=(N, 3, 2))
    close(cross.apply(vectors), np.einsum("ncmd,mds->ncs", wanted, vectors))
    square = np.asarray(Factored.of(in_memory[0], in_memory[0]).dense()).reshape(33, 33)
    values = np.linalg.eigvalsh(square)
    ends = extreme_eigenvalues(own.kernel().operator(), key=jax.random.key(0))
    np.testing.assert_allclose(ends, values[[0, -1]], rtol=1e-6)
    result = condition_number(own.kernel().operator())
    np.testing.assert_allclose(result.value, values[-1] / values[0], rtol=1e-6)
    with pytest.raises(ValueError, match=r"vector must be \(11, 3\)"):
        cross.apply(vectors[:5])
    with pytest.raises(ValueError, match="is square"):
        cross.operator()


OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.4, momentum=0.5),
    "schedule": lambda: optax.sgd(optax.cosine_decay_schedule(0.5, 9), nesterov=True, momentum=0.8),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(0.3),
}


@pytest.mark.parametrize(
    ("optimizer", "batches"),
    [
        ("schedule", {}),
        *[(name, {"batch_size": 4, "key": KEY}) for name in ("momentum", "injected")],
    ],
)
def test_recursion_is_that_in_memory(kept, in_memory, optimizer, batches):
    options = {"loss": "cross_entropy", "optimizer": OPTIMIZERS[optimizer](), "steps": 9}
    f0_test = network(weights(), TEST)
    own, other = in_memory
    wanted = recursion(
        Factored.of(own, own), F0, Y, f0_test=f0_test, kernel_test=Factored.of(other, own),
        **options, **batches,
    )  # fmt: skip
    found = recursion(
        kept[0].kernel(), F0, Y, f0_test=f0_test, kernel_test=kept[1].kernel(kept[0]),
        **options, **batches,
    )  # fmt: skip
    for name in ("train", "test", "dual", "scale", "ts", "diverged_at"):
        close(getattr(found, name), getattr(wanted, name))


def test_weight_decay_and_a_test_kernel_in_memory(kept, in_memory):
    optimizer = optax.chain(optax.add_decayed_weights(0.05), optax.sgd(0.3, momentum=0.9))
    tangents = [
        jax.jvp(lambda w, x=x: network(w, x), (weights(),), (weights(),))[1] for x in (X, TEST)
    ]
    options = {
        "loss": "squared_error", "optimizer": optimizer, "steps": 8, "batch_size": 4, "key": KEY,
        "initial_tangent": tangents[0], "initial_tangent_test": tangents[1],
        "f0_test": network(weights(), TEST),
        "kernel_test": Factored.of(in_memory[1], in_memory[0]),
    }  # fmt: skip
    target = jax.nn.one_hot(Y, 3)
    wanted = recursion(Factored.of(in_memory[0], in_memory[0]), F0, target, **options)
    found = recursion(kept[0].kernel(), F0, target, **options)
    for name in ("train", "test", "dual", "scale"):
        close(getattr(found, name), getattr(wanted, name))


def test_what_diverges_is_held(kept, in_memory):
    options = {"loss": "squared_error", "optimizer": optax.sgd(1e60), "steps": 9}
    options |= {"batch_size": 4, "key": KEY}
    target = jax.nn.one_hot(Y, 3)
    wanted = recursion(Factored.of(in_memory[0], in_memory[0]), F0, target, **options)
    found = recursion(kept[0].kernel(), F0, target, **options)
    assert int(found.diverged_at) == int(wanted.diverged_at) > 0
    assert np.all(np.isfinite(found.train))
    np.testing.assert_allclose(found.train, wanted.train, rtol=1e-9)


def test_a_step_with_batches_reads_the_rows_of_its_batch(kept, monkeypatch):
    seen, rows, blocks = [], StoredSketch.rows, StoredSketch.blocks
    monkeypatch.setattr(
        StoredSketch, "rows", lambda self, which: seen.append(len(which)) or rows(self, which)
    )
    monkeypatch.setattr(StoredSketch, "blocks", lambda self: seen.append("whole") or blocks(self))
    options = {"loss": "cross_entropy", "optimizer": optax.sgd(0.1), "steps": 5}
    recursion(kept[0].kernel(), F0, Y, batch_size=4, key=KEY, **options)
    assert seen.count(4) == 5
    # A network's outputs on all samples at all steps are one reading of the sketch.
    assert seen.count("whole") == 1


def test_flow_and_sweeps(kept, in_memory):
    memory = Factored.of(in_memory[0], in_memory[0])
    ts = np.linspace(0.0, 6.0, 4)
    wanted, found = (
        gradient_flow(k, F0, Y, loss="cross_entropy", learning_rate=0.2, ts=ts).train
        for k in (memory, kept[0].kernel())
    )
    close(found, wanted)
    settings = grid(learning_rate=(0.1, 0.3), momentum=(0.0, 0.9), steps=6)
    wanted, found = (
        sweep_kernel(k, F0, Y, settings, key=KEY).loss for k in (memory, kept[0].kernel())
    )
    close(found, wanted)


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_run_that_was_ended_goes_on(tmp_path, kept, done):
    class Killed(Exception):
        pass

    def progress(count, total):
        assert total == 3
        if count == done + 1:
            raise Killed

    with pytest.raises(Killed):
        stored(tmp_path, progress=progress)
    if done + 1 < 3:
        with pytest.raises(ValueError, match=rf"lacks {2 - done} tiles of its sketch"):
            open_sketch(tmp_path)
    again = stored(tmp_path)
    assert again.computed == 2 - done
    np.testing.assert_array_equal(np.asarray(again), np.asarray(kept[0]))  # bit for bit


def test_blocks_that_were_damaged_are_computed_again(tmp_path, kept):
    stored(tmp_path)
    first, second, third = files(tmp_path)
    first.write_bytes(first.read_bytes()[:-100])
    second.write_bytes(third.read_bytes().ljust(second.stat().st_size, b"\0"))
    again = stored(tmp_path)
    assert again.computed == 2
    np.testing.assert_array_equal(np.asarray(again), np.asarray(kept[0]))
    assert stored(tmp_path).computed == 0


def test_stores_of_something_else_are_refused(tmp_path):
    stored(tmp_path)
    others = (
        {"key": jax.random.key(2)}, {"dim": 32}, {"kind": "rademacher"}, {"tile": 5},
        {"x": X + 1}, {"trainable": jax.tree.map(lambda leaf: leaf.ndim > 1, weights())},
    )  # fmt: skip
    for other in others:
        with pytest.raises(ValueError, match="holds another sketch"):
            stored(tmp_path, **other)
    with pytest.raises(ValueError, match="holds another kernel"):
        store_kernel(network, weights(), samples(30), path=tmp_path, tile=3)
    with pytest.raises(ValueError, match=r"holds no sketch of store_sketch"):
        open_sketch(tmp_path / "nowhere")


def test_devices_share_the_blocks(tmp_path, kept):
    found = stored(tmp_path, mesh=automatic_four())
    assert found.computed == 3
    np.testing.assert_array_equal(np.asarray(found), np.asarray(kept[0]))


def test_memory_is_bounded(tmp_path):
    row = 3 * DIM * 8
    least = ValueError, r"max_bytes=2000 does not hold a block of 1 samples .* give at least (\d+)"
    with pytest.raises(least[0], match=least[1]) as refused:
        stored(tmp_path, tile=None, max_bytes=2000)
    enough = int(str(refused.value).rpartition(" ")[2].rstrip("."))
    kept = stored(tmp_path, tile=None, max_bytes=enough)
    assert kept.tile * row < enough
    close(np.asarray(kept), sketch_jacobian(network, weights(), X, key=KEY, dim=DIM))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dim": 0}, "dim must be"),
        ({"kind": "fourier"}, "kind"),
        ({"tile": 0}, "tile must be"),
        ({"max_bytes": -1}, "max_bytes must be"),
        ({"key": 3}, "key"),
        ({"x": X[:0]}, "x must hold at least one sample"),
        ({"x": X.at[3, 0].set(jnp.nan)}, "x"),
    ],
)
def test_bad_input(tmp_path, changes, match):
    with pytest.raises((ValueError, TypeError), match=match):
        stored(tmp_path / "new", **changes)
    assert not (tmp_path / "new").exists()


def test_sketches_of_other_widths_make_no_kernel(tmp_path, kept):
    for number, options in enumerate(({"dim": 32},)):
        other = stored(tmp_path / str(number), **options)
        with pytest.raises(ValueError, match="same key and dim"):
            kept[0].kernel(other)


def test_blocks_come_in_order(kept):
    places = [place for place, _ in kept[0].blocks()]
    assert [place.start for place in places] == [0, 4, 8]
    joined = np.concatenate([numbers for _, numbers in kept[0].blocks()])
    np.testing.assert_array_equal(joined, np.asarray(kept[0]))
    assert all(a.stop == b.start for a, b in itertools.pairwise(places))
