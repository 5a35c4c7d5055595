"""Networks over tokens as users define them, in Linen, NNX and Equinox, each in one forecast.

The data come as pipelines give them: a generator of pairs, a data set of mappings that can be read
again and again (as tensorflow-datasets and Hugging Face have it), arrays.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxttp import from_equinox, from_linen, from_nnx, predict_training_time, train

RANDOM = np.random.default_rng(2)
V, T, D, N = 7, 5, 6, 8
IDS = RANDOM.integers(1, V, (N, T))
MASK = np.arange(T) < RANDOM.integers(2, T + 1, (N, 1))
NEXT = np.where(MASK, np.roll(IDS, -1, 1), -100)  # next token, wrapped around; padding is left out
RATE = 0.001
CAUSAL = np.tril(np.ones((T, T), bool))


class Linen(nn.Module):
    """A language model: causal attention, dropout, logits of the next token."""

    @nn.compact
    def __call__(self, ids, train: bool = True):
        h = nn.Embed(V, D)(ids) + self.param("places", nn.initializers.normal(), (T, D))[None]
        h = h + nn.MultiHeadAttention(2)(nn.LayerNorm()(h), mask=CAUSAL[None, None])
        return nn.Dense(V)(nn.Dropout(0.2, deterministic=not train)(h))


class Tagger(nnx.Module):
    """A label for every token, from itself and the mean of what is no padding."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.norm, self.out = nnx.LayerNorm(D, rngs=rngs), nnx.Linear(D, V, rngs=rngs)

    def __call__(self, ids, mask):
        h = self.embed(ids)
        there = mask[..., None].astype(h.dtype)
        mean = (h * there).sum(1, keepdims=True) / there.sum(1, keepdims=True)
        return self.out(self.norm(nnx.gelu(h + mean)))


class Recurrent(eqx.Module):
    """A recurrent network; its call takes one sequence."""

    embed: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(V, D, key=keys[0])
        self.cell = eqx.nn.GRUCell(D, D, key=keys[1])
        self.out = eqx.nn.Linear(D, V, key=keys[2])

    def __call__(self, ids):
        def step(h, token):
            h = self.cell(self.embed(token), h)
            return h, self.out(h)

        return jax.lax.scan(step, jnp.zeros(D), ids)[1]


class Dataset:
    """What a data set of tensorflow-datasets is to its reader, batches of mappings."""

    def __iter__(self):
        for rows in (slice(0, 5), slice(5, 8)):
            yield {"ids": IDS[rows], "mask": MASK[rows], "labels": NEXT[rows]}


def of_linen():
    module = Linen()
    variables = module.init(jax.random.key(0), IDS[:1], train=False)
    pairs = ((IDS[i : i + 2], NEXT[i : i + 2]) for i in range(0, N, 2))
    return from_linen(module, variables), pairs, None, IDS


def of_nnx():
    return from_nnx(Tagger(nnx.Rngs(0))), Dataset(), None, {"ids": IDS, "mask": MASK}


def of_equinox():
    return from_equinox(Recurrent(jax.random.key(0))), IDS, NEXT, IDS


@pytest.mark.parametrize(
    "make", [pytest.param(of_linen, marks=pytest.mark.slow), of_nnx, of_equinox]
)
@pytest.mark.usefixtures("full_precision")
def test_a_token_module_is_forecast(make):
    """Where training is short and slow one kernel follows it, to 3 % of the drop of the loss."""
    model, x, y, arrays = make()
    assert model.apply_fn(model.params, jax.tree.map(jnp.asarray, arrays)).shape == (N, T, V)
    found = predict_training_time(*model, x, y, learning_rate=RATE, steps=10, relinearize=0)
    run = train(*model, arrays, NEXT, loss="cross_entropy", optimizer=optax.sgd(RATE), steps=10)
    # A draw has its own order, which the mean does not see.
    np.testing.assert_allclose(found.loss[0], run.loss[0], rtol=1e-6)  # float32
    drop = run.loss[0] - run.loss[-1]
    assert drop > 0
    np.testing.assert_allclose(found.loss, run.loss, atol=0.03 * float(drop))


class Batched:
    """A prepared set of tensorflow-datasets, which reads samples, as batches."""

    def __init__(self, source, size):
        self.source, self.size = source, size

    def __iter__(self):
        for low in range(0, len(self.source), self.size):
            rows = [self.source[i] for i in range(low, min(low + self.size, len(self.source)))]
            yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def test_a_set_of_tensorflow_datasets_prepared_here_is_forecast(tmp_path):
    """The real package writes the set to disk and reads it, without TensorFlow or a download."""
    tfds = pytest.importorskip("tensorflow_datasets", reason="the extra 'datasets'")
    pytest.importorskip("array_record", reason="the file format that needs no TensorFlow")
    columns = {"ids": IDS.astype(np.int32), "mask": MASK, "labels": NEXT.astype(np.int32)}

    class Tokens(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        code_path = None  # else it asks for importlib_resources, which it does not install

        def _info(self):
            features = {
                name: tfds.features.Tensor(shape=(T,), dtype=rows.dtype)
                for name, rows in columns.items()
            }
            features = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i in range(N):
                yield i, {name: rows[i] for name, rows in columns.items()}

    builder = Tokens(data_dir=tmp_path, file_format="array_record")
    builder.download_and_prepare()
    data = Batched(builder.as_data_source(split="train"), size=3)
    model = from_nnx(Tagger(nnx.Rngs(0)))
    options = {"learning_rate": RATE, "steps": 3, "relinearize": 0}
    found = predict_training_time(*model, data, None, **options)
    arrays = predict_training_time(*model, {"ids": IDS, "mask": MASK}, NEXT, **options)
    # The set is shuffled when it is written, which changes the order of sums in float32.
    np.testing.assert_allclose(found.loss, arrays.loss, rtol=1e-5)
    assert found.loss[-1] < found.loss[0]
