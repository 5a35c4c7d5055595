"""Patches of two photographs by the thousands."""

import dataclasses

import numpy as np
import pytest

from experiments.bench.thousands import PRESETS, Long, patches, table


def test_patches_are_of_both_photographs_and_each_once():
    job = patches(20_000)
    assert job.x.shape == (20_000, 8, 8, 1)
    assert (job.x.min(), job.x.max()) >= (0.0, 0.0)
    assert job.x.max() <= 1.0
    assert 0.4 < np.mean(job.y) < 0.6
    assert Long(20_000, True, 2).steps == 1250
    some = patches(300)
    np.testing.assert_array_equal(some.x, job.x[:300])


@pytest.mark.slow
def test_forecasts_stand_beside_trainings():
    settings = dataclasses.replace(PRESETS["smoke"], budgets=(0.5,))
    lines = table(settings)
    assert len(lines) == 2 + 2  # at a constant rate, and with a cosine
    for line in lines[2:]:
        cells = line.strip("| ").split(" | ")
        assert len(cells) == 10
        assert float(cells[8]) > 100  # MiB of a process that imports JAX
        assert " of " in cells[5]
