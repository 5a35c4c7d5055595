"""The training loop of RevMLPs, its checkpoints and its searches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.gauss_newton.search import best_first, first_stable, is_stable, largest_first
from experiments.gauss_newton.training import Phase, Record, Training, load, train
from jaxttp.models import RevMLP

KEY = jax.random.key(7)


def wine():
    return load("wine", key=jax.random.key(0), samples=40)


def network(data, **options):
    options = {"blocks": 1, "bottleneck": 96, "readout": "orthonormal", "scale": 0.05} | options
    inputs = int(np.prod(data.x.shape[1:]))
    return RevMLP(inputs, data.outputs, rngs=nnx.Rngs(0), param_dtype=jnp.float64, **options)


def same(first: Record, second: Record):
    for field in dataclasses.fields(Record):
        if "seconds" not in field.name:
            values = (np.asarray(getattr(record, field.name)) for record in (first, second))
            np.testing.assert_array_equal(*values, err_msg=field.name)


# --- data -----------------------------------------------------------------------------------------


def test_parts_are_disjoint_and_standardised_by_the_training_part():
    data = wine()
    assert (len(data.x), len(data.x_test), data.outputs) == (40, 138, 3)
    np.testing.assert_allclose(data.x.mean(axis=0), 0, atol=1e-12)  # float64
    np.testing.assert_allclose(data.x.std(axis=0), 1, atol=1e-12)
    assert np.abs(data.x_test.mean(axis=0)).max() > 1e-3
    every = np.concatenate([data.x, data.x_test])
    assert len(np.unique(every, axis=0)) == 178


def test_standard_parts_of_a_download(stub_tfds, monkeypatch):
    monkeypatch.setitem(load.__globals__["TRAIN_SIZES"], "cifar10", 20)
    for samples, size in ((None, 20), (8, 8)):
        data = load("cifar10", key=KEY, samples=samples)
        assert (len(data.x), len(data.x_test)) == (size, 10)  # never a test sample
        np.testing.assert_array_equal(data.y_test, np.arange(10))
        # By channel: a mean over samples and pixels.
        np.testing.assert_allclose(data.x.mean(axis=(0, 1, 2)), 0, atol=1e-12)


# --- training -------------------------------------------------------------------------------------


def test_a_record_of_everything():
    data = wine()
    settings = Training((Phase("gn", 1.0, 7),), evaluate_every=3, pseudoinverse="exact")
    record = train(network(data, blocks=2), data, settings, key=KEY)
    assert record.steps.tolist() == [0, 3, 6, 7]
    assert record.diverged == -1
    # With the full batch, both records of the training loss agree.
    np.testing.assert_allclose(record.train_loss[:3], record.batch_loss[[0, 3, 6]], rtol=1e-9)
    np.testing.assert_array_equal(record.train_accuracy[:3], record.batch_accuracy[[0, 3, 6]])
    assert record.train_loss[-1] < 1e-15  # full rank: quadratic convergence
    assert record.train_accuracy[-1] == 1
    assert 0.5 < record.test_accuracy[-1] <= 1
    assert np.all(record.seconds > 0)


def test_batches_depend_on_the_key_and_the_epoch():
    data = wine()
    settings = Training((Phase("sgd", 0.1, 9),), batch_size=13)  # three steps an epoch, one left
    first, again = (train(network(data), data, settings, key=KEY) for _ in range(2))
    same(first, again)
    assert first.steps.tolist() == [0, 3, 6, 9]
    other = train(network(data), data, settings, key=jax.random.key(8))
    assert np.all(first.batch_loss != other.batch_loss)


def test_optimizers_can_be_switched():
    """The second phase goes on from the weights of the first, with a fresh state of its own."""
    data = wine()
    model = network(data)
    adam, gn = Phase("adam", 0.01, 5), Phase("gn", 1.0, 4)
    both = train(model, data, Training((adam, gn)), key=KEY)
    alone = train(model, data, Training((adam,)), key=KEY)
    np.testing.assert_array_equal(both.batch_loss[:5], alone.batch_loss)
    model.weights[...] = alone.weights
    then = train(model, data, Training((gn,)), key=KEY)
    # The same steps; the first phase was compiled in another program.
    np.testing.assert_allclose(both.batch_loss[5:], then.batch_loss, rtol=1e-9)
    np.testing.assert_allclose(both.weights, then.weights, atol=1e-12)
    assert both.batch_loss[6] < 0.5 * both.batch_loss[5]


@pytest.mark.parametrize(("optimizer", "rate"), [("adam", 1e200), ("gn", 5.0)])
def test_divergence_is_recorded(optimizer, rate):
    data = wine()
    record = train(network(data), data, Training((Phase(optimizer, rate, 6),)), key=KEY)
    assert 0 <= record.diverged < 6
    assert np.isfinite(record.batch_loss[0])
    assert np.isnan(record.train_loss[-1])
    assert np.all(np.isfinite(record.weights))


def test_a_rank_deficient_batch_is_divergence():
    data = wine()
    data = data._replace(x=np.repeat(data.x[:1], 40, axis=0))
    settings = Training((Phase("gn", 1.0, 3),), pseudoinverse="exact")
    assert train(network(data), data, settings, key=KEY).diverged == 0


def test_bad_trainings():
    data = wine()
    settings = Training((Phase("sgd", 0.1, 2),), batch_size=41)
    with pytest.raises(ValueError, match=r"batch_size .* 41. The data has 40 samples"):
        train(network(data), data, settings, key=KEY)
    with pytest.raises(ValueError, match="samples must be"):
        load("wine", key=KEY, samples=178)


# --- searches -------------------------------------------------------------------------------------


def record_of(*, diverged=-1, loss=1.0):
    names = {field.name for field in dataclasses.fields(Record)} - {"diverged", "weights"}
    record = dict.fromkeys(names, np.zeros(0)) | {"train_loss": np.array([2.0, loss])}
    return Record(**record, diverged=diverged, weights=jnp.zeros(0))


def test_the_largest_rate_at_which_no_seed_diverges():
    made = []

    def runs(rate):
        def run(seed):
            made.append((rate, seed))
            return record_of(diverged=3 if rate > 1 or (rate == 1 and seed == 1) else -1)

        return [lambda seed=seed: run(seed) for seed in (0, 1, 2)]

    rate, records = first_stable(largest_first([0.1, 1.0, 10.0]), runs)
    assert (rate, len(records)) == (0.1, 3)
    assert made == [(10.0, 0), (1.0, 0), (1.0, 1), (0.1, 0), (0.1, 1), (0.1, 2)]
    with pytest.raises(ValueError, match="unstable at every rate"):
        first_stable([10.0, 3.0], runs)


def test_the_rate_with_the_largest_progress_in_an_epoch():
    found = {0.1: record_of(loss=0.8), 1.0: record_of(loss=0.3), 3.0: record_of(loss=0.5),
             10.0: record_of(loss=0.1, diverged=2)}  # fmt: skip
    assert best_first(list(found), found.__getitem__) == [1.0, 3.0, 0.1]


def test_a_loss_that_grows_again_is_not_stable():
    record = dataclasses.replace(record_of(), train_loss=np.array([2.0, 0.1, 0.25, 0.05]))
    assert is_stable(record)
    assert is_stable(record, rise=2.6)
    assert not is_stable(record, rise=2.4)
    assert not is_stable(record_of(diverged=3))
    assert not is_stable(dataclasses.replace(record, train_loss=np.array([2.0, 0.1, 2.5])))
    rate, _ = first_stable([3.0, 1.0], lambda r: [lambda: record if r > 1 else record_of()], rise=2)
    assert rate == 1.0


def test_weight_decay_is_taken_off_beside_the_direction():
    """One step of SGD with decay equals one without, minus rate x decay x the weights."""
    data, ends = wine(), []
    for decay in (0.0, 0.5):
        training = Training((Phase("sgd", 0.1, 1),), weight_decay=decay)
        ends.append(np.asarray(train(network(data), data, training, key=KEY).weights))
    start = np.asarray(network(data).weights[...])
    np.testing.assert_allclose(ends[1], ends[0] - 0.1 * 0.5 * start, atol=1e-12)  # the same sums
