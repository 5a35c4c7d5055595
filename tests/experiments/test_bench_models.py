"""Small runs of the measurements of adapters and of full-size networks."""

import jax
import numpy as np
import pytest

from experiments.bench import adapters, full_size, language, lora, lora_tasks


@pytest.mark.slow
def test_adapters(capsys):
    rows = adapters.main(["--preset", "smoke"])
    cases = [row.case for row in rows]
    assert cases == ["LoRA, rank 2, α/r = 1", "head", "last block and head", "all weights"]
    sizes = [row.parameters for row in rows]
    assert sizes[1] < sizes[0] < sizes[2] < sizes[3] == 77_093
    assert all(0 <= time <= 10 for row in rows for time in row.forecast.values())
    # A forecast at a small rate is right to the step or nearly.
    assert all(row.error <= 0.2 for row in rows)
    assert capsys.readouterr().out.count("\n") == 2 + len(rows)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_processes")
def test_a_full_size_network_in_a_process_of_its_own(capfd):
    full_size.main(["vgg5", "--samples", "5", "--image-size", "32", "--train", "head"])
    row = capfd.readouterr().out.splitlines()[-1]
    assert row.startswith("| vgg5 | head |")
    assert "exact" in row


@pytest.mark.slow
def test_a_network_that_fails_is_said_and_does_not_stop_the_table(capfd):
    full_size.main(["vgg7"])
    out = capfd.readouterr()
    assert out.out.splitlines()[-1].startswith("| vgg7 | failed with 1")
    assert "model='vgg7'" in out.err


@pytest.mark.slow
def test_a_language_model_learns_bytes_and_starts_every_case_from_them():
    settings = language.PRESETS["smoke"]
    draw = np.random.default_rng(0)
    docs, code, licence = language.texts()
    assert len(code) > len(docs) > len(licence) > 10_000
    assert "Apache License" in bytes(licence.astype(np.uint8)).decode()
    network, loss = language.pretrained(settings, draw)
    assert 0 < loss < 1.1 * np.log(128)
    cases = dict(language.cases(network, settings))
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(model.params)) for model in cases.values()]
    assert sizes == [2216, 112, 512, 24, 136, 2240]
    x = language.windows(licence, 3, settings.window, draw)
    first, *_, last = (name for name in cases if name.startswith("prompt"))
    starts = [np.asarray(jax.jit(cases[name].apply_fn)(cases[name].params, x))
              for name in (first, last)]  # fmt: skip
    assert starts[0].shape == (3, 3)
    np.testing.assert_allclose(*starts, rtol=1e-5, atol=1e-6)


def test_tasks_that_are_reported_tuned_nothing():
    tuned, reported = ({task.name for task in tasks}
                       for tasks in (lora_tasks.TUNING, lora_tasks.REPORTED))  # fmt: skip
    assert not tuned & reported
    assert len(reported) == len(lora_tasks.REPORTED) == 20
    assert len(lora_tasks.RANKED) == 12


def test_a_power_law_goes_on_as_it_began():
    at = np.arange(61.0)
    loss = 1.5 + 2.0 * (at + 3.0) ** -0.5
    np.testing.assert_allclose(lora.power_law(loss, 0.2), loss, atol=1e-3)


@pytest.mark.slow
def test_lora_on_next_tokens(tmp_path, monkeypatch, capsys):
    """A tiny run, foreseen, linearised, and read again from the store."""
    settings = lora.LoraSettings(pretraining=2, folder=str(tmp_path), few=True)
    monkeypatch.setitem(lora.PRESETS, "smoke", settings)
    rows = lora.main(["--preset", "smoke"])
    names = [row["name"] for row in rows]
    assert [name.partition(" ")[0] for name in names[1:]] == ["frozen", "held"]
    held = next(row for row in rows if row["name"].startswith("held "))
    assert 0 < held["share"] <= 0.8
    assert len(held["loss"]) == len(rows[0]["loss"]) == 9
    assert "| held | 1 |" in capsys.readouterr().out
    assert lora.main(["--preset", "smoke"]) == rows  # nothing is trained twice
