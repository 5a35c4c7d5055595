import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jaxttp.data import Dataset, select, split
from jaxttp.data.dataset import _permutation


def toy(labels, classes):
    """Samples whose only feature is their row number."""
    return Dataset(
        x=np.arange(len(labels), dtype=np.float32)[:, None],
        y=np.asarray(labels, np.int32),
        name="toy",
        description="",
        num_classes=classes,
        class_names=tuple("abcdef"[:classes]),
    )


def rows_of(data):
    return data.x[:, 0].astype(int)


@st.composite
def selections(draw):
    """Labels, number of classes, classes to keep, how many samples of each, and a seed."""
    count = draw(st.integers(1, 6))
    counts = draw(st.lists(st.integers(1, 8), min_size=count, max_size=count))
    labels = draw(st.permutations([c for c in range(count) for _ in range(counts[c])]))
    classes = draw(st.permutations(range(count)))[: draw(st.integers(1, count))]
    per_class = draw(st.none() | st.integers(1, min(counts[c] for c in classes)))
    return labels, count, tuple(classes), per_class, draw(st.integers(0, 2**31 - 1))


@hypothesis.given(selections())
def test_selection(case):
    labels, count, classes, per_class, seed = case
    data = toy(labels, count)
    key = jax.random.key(seed)
    part = select(data, classes=classes, per_class=per_class, key=key)
    rows = rows_of(part)
    # Rows of the data set, in its order, none twice, with the label's place in `classes`.
    assert np.all(np.diff(rows) > 0)
    np.testing.assert_array_equal(np.asarray(classes)[part.y], data.y[rows])
    for label, old in enumerate(classes):
        available = np.sum(data.y == old)
        assert np.sum(part.y == label) == (available if per_class is None else per_class)
    assert part.num_classes == len(classes)
    assert part.class_names == tuple("abcdef"[c] for c in classes)
    again = select(data, classes=classes, per_class=per_class, key=key)
    np.testing.assert_array_equal(rows_of(again), rows)
    # The order of the classes and the company of other classes change no draw.
    for label, old in enumerate(classes):
        alone = select(data, classes=(old,), per_class=per_class, key=key)
        np.testing.assert_array_equal(rows_of(alone), rows[part.y == label])
    # Fewer samples with the same key are some of them.
    if per_class is not None:
        fewer = select(data, classes=classes, per_class=1, key=key)
        assert set(rows_of(fewer)) <= set(rows)


@hypothesis.given(selections(), st.integers(1, 6))
def test_random_classes(case, wanted):
    labels, count, _, _, seed = case
    data = toy(labels, count)
    wanted = min(wanted, data.num_classes)
    part = select(data, classes=wanted, key=jax.random.key(seed))
    assert part.num_classes == wanted
    names = list(part.class_names)
    assert names == sorted(set(names))
    np.testing.assert_array_equal(np.unique(part.y), np.arange(wanted))
    np.testing.assert_array_equal(
        [data.class_names[label] for label in data.y[rows_of(part)]],
        [part.class_names[label] for label in part.y],
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": (0, 3, 7)}, r"classes: \[3, 7\] not in toy; choose among 0 \(a\), 1 \(b\)"),
        ({"classes": ()}, "no class at all"),
        ({"classes": (1, 1)}, "names a class twice"),
        ({"classes": 4}, "classes must be an integer between 1 and 3; got 4"),
        ({"per_class": 0}, "per_class must be an integer of at least 1"),
        ({"per_class": 3}, r"per_class=3, but toy has only 2 samples of class 1 \(b\)"),
        ({"per_class": 1, "key": None}, "key is needed"),
    ],
)
def test_bad_selections(key, options, message):
    with pytest.raises(ValueError, match=message):
        select(toy([0, 0, 0, 1, 1, 2, 2, 2], 3), **({"key": key} | options))


@hypothesis.given(selections(), st.floats(0.05, 0.95))
def test_split_is_a_partition_of_every_class(case, fraction):
    labels, count, _, _, seed = case
    data = toy(labels, count)
    counts = np.bincount(data.y)
    expected = [round(fraction * int(count)) for count in counts]
    hypothesis.assume(0 < sum(expected) < len(data))
    parts = split(data, held_out=fraction, key=jax.random.key(seed))
    train, held_out = rows_of(parts.train), rows_of(parts.held_out)
    assert np.all(np.diff(train) > 0)
    assert np.all(np.diff(held_out) > 0)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, held_out])), np.arange(len(data)))
    np.testing.assert_array_equal(parts.train.y, data.y[train])
    np.testing.assert_array_equal(np.bincount(parts.held_out.y, minlength=len(counts)), expected)


@pytest.mark.parametrize(
    ("fraction", "message"),
    [
        (0.0, "held_out must be greater than 0 and less than 1"),
        (0.1, "held_out=0.1 leaves one part of the 4 samples empty"),
    ],
)
def test_bad_splits(key, fraction, message):
    with pytest.raises(ValueError, match=message):
        split(toy([0, 0, 1, 1], 2), held_out=fraction, key=key)


@pytest.mark.parametrize("n", [1, 2, 256, 257, 1626])
def test_an_order_is_that_of_jax(n):
    """For every length, and with as many programs as there are powers of two."""
    key = jax.random.key(0)
    expected = jax.random.permutation(jax.random.fold_in(key, 4), np.arange(n, dtype=np.int32))
    found = _permutation(key, 4, n)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.int32
