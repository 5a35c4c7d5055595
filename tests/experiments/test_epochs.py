"""Forecasts from some samples beside trainings on all of them."""

import jax
import numpy as np
import pytest

from experiments.bench import epochs
from experiments.bench.epochs import PRESETS, Training, gather, run_for_real, table
from experiments.bench.pays import Guess, Real
from jaxttp import train

TRAINING = Training("digits ResNet", 5, True, 40, None)


def test_a_reading_is_right_within_its_share_or_two_steps():
    t = np.arange(101.0)
    real = [np.exp(-t / tau) for tau in (19.0, 20.0, 21.0)]
    found = epochs._row(TRAINING, "late", 0.1, np.exp(-t / 24.0), real)
    # A fifth late everywhere; the drop of the forecast is its own, whose end is higher.
    want = [24 * np.log(1 / goal) for goal in epochs.ABSOLUTE]
    np.testing.assert_allclose(found.times[2:], want, atol=1.0)  # whole steps
    np.testing.assert_allclose(found.true[2:], np.array(want) * 20 / 24, atol=1.0)
    assert [off > epochs.WITHIN for off in found.off[2:]] == [True] * 4
    near = epochs._row(TRAINING, "near", 0.1, np.exp(-t / 22.0), real)
    assert max(near.off) <= epochs.WITHIN
    assert near.off[2] == 0.0  # 15 for 14 steps: within two
    assert near.end == pytest.approx(abs(np.exp(-100 / 22) - np.mean([r[-1] for r in real])), 0.05)


def test_a_time_that_is_not_foreseen_is_wrong_and_one_that_never_comes_no_reading():
    t = np.arange(51.0)
    real, flat = np.exp(-t / 20.0), np.maximum(np.exp(-t / 20.0), 0.3)
    found = epochs._row(TRAINING, "flat", 0.1, flat, [real, real])
    assert len(found.off) == 5  # 0.05 of the first loss is not reached within 50 steps
    assert found.off[-1] == np.inf
    lines = table([found])
    assert lines[2].split(" | ")[3].endswith("14, -, -, -")
    assert lines[2].split(" | ")[5] == "1 of 5"
    assert lines[-1] == "| flat | 1 of 5 | 0 of 1 | 0.1 |"


def test_every_forecast_stands_beside_all_real_runs():
    settings = PRESETS["smoke"]
    loss = np.exp(-np.arange(8.0))
    real, guess = Real(loss, 1.0, 0.0), Guess(loss, True, 0.25, 1.0, 0.0, "")
    found = {name: real if "real" in name else guess for name in epochs.pieces(settings)}
    rows = gather(settings, found)
    kinds = {row.what for row in rows}
    assert {"a quarter, from 64", "the subset alone, from 64", epochs.TENTH} == kinds
    assert all(max(row.off) == 0.0 for row in rows if row.what != epochs.TENTH)


@pytest.mark.slow
def test_real_trainings_and_their_forecasts(tmp_path, capsys):
    arguments = ["--preset", "smoke", "--folder", str(tmp_path)]
    epochs.main(arguments)
    first = capsys.readouterr().out
    epochs.main(arguments)  # nothing is made twice
    again = capsys.readouterr().out
    assert again[again.index("| training") :] == first[first.index("| training") :]
    training = next(epochs.trainings(PRESETS["smoke"]))
    found, job = run_for_real(training, 50), training.job
    want = train(
        *job.model, job.x, job.y, loss="cross_entropy", optimizer=training.optimizer(),
        steps=training.steps, batch_size=epochs.BATCH, key=jax.random.key(50),
    )  # fmt: skip
    # All steps are read where there are so few; in float32 sums are taken in other parts.
    np.testing.assert_allclose(found.loss, want.loss, rtol=1e-4)
