import jax
import numpy as np
import pytest

from jaxttp.dynamics import batch_indices


@pytest.mark.parametrize(
    ("n", "b", "steps"),
    [  # one sample; one batch an epoch; batches of one; epochs that end with samples left over
        (1, 1, 3), (6, 6, 4), (5, 1, 13), (10, 4, 9), (30, 7, 40), (30, 16, 2),
    ],
)  # fmt: skip
def test_epochs_visit_no_sample_twice(n, b, steps):
    indices = np.asarray(batch_indices(jax.random.key(1), n, b, steps))
    assert indices.shape == (steps, b)
    assert indices.min() >= 0
    assert indices.max() < n
    per_epoch = n // b
    for start in range(0, steps, per_epoch):
        seen = indices[start : start + per_epoch].reshape(-1)
        assert len(set(seen.tolist())) == len(seen)


def test_independent_batches_have_no_repeats_inside():
    indices = np.asarray(batch_indices(jax.random.key(1), 9, 5, 200, protocol="independent"))
    assert all(len(set(row)) == 5 for row in indices.tolist())
    # every sample is drawn with probability 5/9 a step: 111 +- 7 of 200 (one standard deviation)
    assert np.all(np.abs(np.bincount(indices.reshape(-1)) - 111) < 35)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, 10, 3, 5), "key"),
        ((jax.random.key(0), 10, 11, 5), "batch_size"),
        ((jax.random.key(0), 10, 0, 5), "batch_size"),
    ],
)
def test_bad_input(arguments, words):
    with pytest.raises(ValueError, match=words):
        batch_indices(*arguments)


def test_every_sample_can_come_again_with_replacement():
    indices = np.asarray(batch_indices(jax.random.key(1), 9, 5, 200, protocol="replacement"))
    assert any(len(set(row)) < 5 for row in indices.tolist())
    # 1,000 draws of nine samples: 111 +- 10 each (one standard deviation), the last one too
    assert np.all(np.abs(np.bincount(indices.reshape(-1), minlength=9) - 111) < 50)
