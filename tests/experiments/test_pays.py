"""Forecasts beside trainings that were kept: only of the network that was trained."""

import numpy as np
import pytest

from experiments.bench.pays import Guess, Real, check_start


def test_a_training_of_another_network_is_refused():
    loss = np.array([2.0, 1.0])
    guess = Guess(loss, True, 0.1, 1.0, 0.0, "")
    check_start("ResNet20", "Adam", guess, Real(loss * (1 + 1e-6), 1.0, 0.0))
    with pytest.raises(ValueError, match=r"kept \(Adam\) began at a loss of 2\.0100"):
        check_start("ResNet20", "Adam", guess, Real(loss * 1.005, 1.0, 0.0))
