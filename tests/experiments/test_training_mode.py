"""The study of training mode: where nothing differs it finds no difference; its table by hand."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.bench import training_mode
from experiments.bench.training_mode import Network, Pair, train_in_training_mode
from jaxttp import from_nnx, train
from jaxttp.dynamics import batch_indices
from tests.experiments.test_accuracy import cells

X = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
Y = np.arange(10) % 2
KEY = jax.random.key(1)


def test_without_batch_norm_and_dropout_both_modes_are_one():
    module = Network(3, 2, 6, norm=False, rate=0.0, rngs=nnx.Rngs(0))
    rows = np.asarray(batch_indices(KEY, 10, 4, 12))
    found = train_in_training_mode(module, X, Y, 0.3, rows)
    model = from_nnx(module)
    real = train(
        *model, X, Y, loss="cross_entropy", optimizer=optax.sgd(0.3), steps=12, batch_size=4,
        key=KEY,
    )  # fmt: skip
    np.testing.assert_allclose(found, real.loss, rtol=1e-5)  # float32


def test_the_table_by_hand():
    pairs = [
        Pair("a", 0, (8, 4, 0), (8, 8, 1), (0.5, 1.0)),
        Pair("a", 1, (8, 4, 2), (4, 4, 2), (0.5, 0.5)),
        Pair("a", 1, (8, 4, 2), (-1, -1, -1), (0.5, np.inf)),
    ]
    found = cells(training_mode.table(pairs), "a")
    assert found[1:3] == ["2 of 3", "1.00 / 2.00 / 1.00, 0.50 / 1.00 / 1.00"]
    assert found[4].startswith("1.50 (")


@pytest.mark.slow
def test_smoke():
    pairs = training_mode.measure(training_mode.PRESETS["smoke"])
    assert {pair.kind for pair in pairs} == {"MLP, random, BatchNorm", "MLP, random, dropout 0.3"}
    for pair in pairs:
        assert min(*pair.still, *pair.moving) >= 0
        assert pair.still != pair.moving or pair.ends[0] != pair.ends[1]
