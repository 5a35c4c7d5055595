"""Samples out of a pipeline of batches: a few at random, the rest counted."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxttp import draw_samples, predict_training_time


def pipeline(sizes):
    """Batches whose samples are numbered, in two columns, and whose labels are the numbers."""
    ends = np.cumsum([0, *sizes])
    for first, last in itertools.pairwise(ends):
        numbers = np.arange(first, last)
        yield np.stack([numbers, -numbers], axis=1), numbers


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    st.integers(1, 40),
    st.integers(0, 3),
)
def test_samples_keep_their_labels_and_come_once(sizes, samples, seed):
    x, y, total = draw_samples(pipeline(sizes), samples=samples, seed=seed)
    assert total == sum(sizes)
    assert len(x) == len(y) == min(samples, total)
    np.testing.assert_array_equal(x, np.stack([y, -y], axis=1))
    assert len(set(y.tolist())) == len(y)
    assert set(y.tolist()) <= set(range(total))


def test_every_sample_has_the_same_chance():
    """Wherever it stands: batches of different sizes, 10 of 40 drawn 800 times.

    A sample is drawn 200 times, with a standard deviation of sqrt(800 x 1/4 x 3/4) = 12.2; of 40
    the farthest is beyond 5 of these with a chance of 2e-5. Seeds fix the draws.
    """
    hits = np.zeros(40)
    for seed in range(800):
        hits[draw_samples(pipeline([1, 12, 20, 7]), samples=10, seed=seed).y] += 1
    assert np.max(np.abs(hits - 200)) < 61


def test_no_more_is_read_than_is_trained_on():
    def for_ever():
        for number in itertools.count():
            assert number < 4
            yield np.full((8, 1), number), np.full(8, number)

    seen = []
    x, y, total = draw_samples(
        for_ever(), samples=5, total=27, progress=lambda *done: seen.append(done)
    )
    assert (len(x), len(y), total) == (5, 5, 27)
    assert seen == [("samples", n, 27) for n in (8, 16, 24, 27)]
    whole = draw_samples(for_ever(), samples=40, total=27).y
    assert sorted(whole.tolist()) == [*[0] * 8, *[1] * 8, *[2] * 8, *[3] * 3]  # 3 of the fourth


def test_mappings_tensors_and_lists():
    class Tensor:
        def __init__(self, values):
            self.values = np.asarray(values)

        def __array__(self, dtype=None, copy=None):
            return self.values

    image = draw_samples([{"image": Tensor(np.ones((3, 2, 2))), "label": Tensor([0, 1, 0])}])
    assert isinstance(image.x, np.ndarray)
    assert (image.x.shape, sorted(image.y.tolist())) == ((3, 2, 2), [0, 0, 1])
    text = {"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [1, 0]], "labels": [0, 1]}
    words = draw_samples([text, text], samples=3)
    assert {name: leaf.shape for name, leaf in words.x.items()} == {
        "input_ids": (3, 2),
        "attention_mask": (3, 2),
    }
    assert words.total == 4
    pairs = draw_samples([((np.ones((4, 1)), np.ones((4, 2))), np.ones((4, 5)))])
    assert [leaf.shape for leaf in pairs.x] == [(4, 1), (4, 2)]
    assert pairs.y.shape == (4, 5)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "at least one sample"),
        ([(np.ones((3, 2)), np.ones(2))], "a label for every sample; got 3"),
        ([(np.ones((3, 2)), 1.0)], "a label for every sample"),
        ([(np.ones((3, 2)), np.ones(3)), (np.ones((3, 4)), np.ones(3))], "must be alike"),
        ([{"image": np.ones(3)}], "got 'image'"),
        ([{"image": np.ones(3), "label": np.ones(3), "y": np.ones(3)}], "under one of"),
        ([(np.ones((4, 2)), np.ones(4))] * 2, "total=9 samples were announced; the batches hold 8"),
    ],
)
def test_bad_batches(batches, words):
    with pytest.raises(ValueError, match=words):
        draw_samples(batches, total=9 if "total" in words else None)


def test_what_is_no_pipeline():
    with pytest.raises(TypeError, match="batches must be iterable"):
        draw_samples(3)
    with pytest.raises(TypeError, match="must hold pairs"):
        draw_samples(np.ones((4, 3)))
    with pytest.raises(ValueError, match="samples must be"):
        draw_samples(pipeline([3]), samples=0)
    with pytest.raises(ValueError, match="total must be"):
        draw_samples(pipeline([3]), total=0)


NETWORK = (lambda w, x: x @ w, jnp.zeros((3, 2)))
COMMON = {"learning_rate": 0.5, "steps": 12, "relinearize": 0}


def batches(count):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 3))
    y = (x[:, 0] + 0.5 * rng.normal(size=count) > 0).astype(int)
    return [(x[i : i + 100], y[i : i + 100]) for i in range(0, count, 100)]


def test_a_forecast_of_drawn_samples_is_of_all():
    x, y, total = draw_samples(batches(2000))
    found = predict_training_time(*NETWORK, x, y, total_samples=total, **COMMON)
    assert found.outputs.shape[1] == 512
    assert found.hyperparameters["total_samples"] == 2000
    assert "for 2,000 samples, read off 512" in str(found)
