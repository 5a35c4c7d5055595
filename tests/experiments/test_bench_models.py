"""Small runs of the measurements of adapters and of full-size networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.bench import (
    adapters,
    full_size,
    language,
    lora,
    lora_sample,
    lora_tasks,
    residual,
    transformer,
)
from experiments.bench.lora import linearized_at_states
from jaxttp import from_nnx
from jaxttp.models import Architecture, Decoder
from jaxttp.models import lora as lora_adapters


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
def test_residual_depth(capsys):
    residual.main(["--depths", "1", "2", "--width", "24", "--samples", "1", "--rounds", "1"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [int(row[0]) for row in rows] == [1, 2]
    # The same gradient, but for the rounding of float32, of sums over 64 tokens.
    assert all(float(row[-1]) < 1e-5 for row in rows)


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
    assert [name.partition(" ")[0] for name in names[1:]] == [
        "frozen", "subset", "states", "held",
    ]  # fmt: skip
    held = next(row for row in rows if row["name"].startswith("held "))
    assert 0 < held["share"] <= 0.8
    assert len(held["loss"]) == len(rows[0]["loss"]) == 9
    assert "| held | 1 |" in capsys.readouterr().out
    assert lora.main(["--preset", "smoke"]) == rows  # nothing is trained twice


def test_samples_are_tried_on_other_draws_than_their_constant_was_chosen_on():
    chosen, tried = ({task.name for task in tasks}
                     for tasks in (lora_sample.CHOSEN, lora_sample.REPORTED))  # fmt: skip
    assert chosen <= {task.name for task in lora_tasks.TUNING}
    assert not tried & (chosen | {task.name for task in lora_tasks.REPORTED})


@pytest.mark.slow
def test_lora_from_a_sample(tmp_path, monkeypatch, capsys):
    settings = lora_sample.SampleSettings(
        pretraining=2, folder=str(tmp_path), few=True, samples=(64, 32)
    )
    job = lora_sample.cut(settings.tasks(False)[0], 64, settings)
    assert job.x.shape == (64, lora_tasks.WINDOW)
    np.testing.assert_array_equal(job.x[:, 1:], job.y[:, :-1])
    rows = {row.tobytes() for row in np.concatenate([job.x, job.x_watched])}
    assert len(rows) > 0.9 * (64 + lora_tasks.WATCHED)  # of different parts of the text
    monkeypatch.setitem(lora_sample.PRESETS, "smoke", settings)
    found = lora_sample.main(["--preset", "smoke"])
    assert [row["name"].split(" llama")[0] for row in found] == ["real", "64", "32", "32 plain"]
    assert found[2]["loss"][-1] != found[3]["loss"][-1]
    table = capsys.readouterr().out
    assert table.count("| 32 | 1 |") == table.count("| 32 plain | 1 |") == 1
    assert lora_sample.main(["--preset", "smoke"]) == found  # nothing is trained twice


@pytest.mark.slow
@pytest.mark.parametrize("name", transformer.NETWORKS)
def test_a_transformers_kernel_is_timed_beside_a_product(name):
    row = transformer.measure(name, "auto", 1, transformer.SMALL, side=16)
    assert row["ratio"] > 0
    assert row["cpu ratio"] >= 0  # a clock of CPUs may be coarse
    n, t, d, layers, c, v = transformer.SMALL
    gates, shared = (3 * 22, 1) if name == "llama" else (2 * 32, 2)  # hidden units, keys and values
    blocks = layers * d * (2 * d + shared * d + gates)
    forward = n * t * (2 * blocks + 2 * d * v + layers * 4 * t * d)
    # Forward, backward for every word, and something for the contraction.
    assert (1 + c) * forward * 0.8 < row["operations"] < 20 * forward


def test_operations_are_those_of_products_as_often_as_they_run():
    def run(a, b):
        turned = jax.lax.scan(lambda h, _: (h @ b, None), a, None, length=5)[0]
        return jax.jit(lambda h: h @ b)(turned)

    jaxpr = jax.make_jaxpr(run)(np.ones((2, 3)), np.ones((3, 3))).jaxpr
    assert transformer.operations(jaxpr) == 6 * 2 * 2 * 3 * 3


@pytest.mark.parametrize("groups", [1, 2])
def test_operations_of_a_convolution(groups):
    """Each output sums over the window and the channels of its group."""
    x, w = jnp.ones((5, 7, 7, 4)), jnp.ones((3, 3, 4 // groups, 6))

    def convolve(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    counted = transformer.operations(jax.make_jaxpr(convolve)(x, w).jaxpr)
    assert counted == 2 * (5 * 4 * 4 * 6) * 3 * 3 * (4 // groups)


def test_states_linear_in_the_change_of_kernels_are_those_of_the_network_to_first_order():
    """The product A B is kept, so that B = 0 is no corner: both factors move, in float64.

    A step e of both changes s A B by O(e), and the difference to the network is O(e^2): a tenth of
    the step leaves about a hundredth (0.02 leaves room for the next order).
    """
    shape = Architecture("gpt2", 11, width=8, depth=2, heads=2, hidden=8, length=5)
    network = Decoder(shape, head="language_model", rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    adapted = lora_adapters(from_nnx(network), rank=2, key=jax.random.key(0))
    model = linearized_at_states(network, adapted, scale=1.0)
    ids = np.arange(15).reshape(3, 5) % 11
    keys = iter(jax.random.split(jax.random.key(1), 100))
    push = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), adapted.params)

    def off(step):
        moved = jax.tree.map(lambda leaf, by: leaf + step * by, adapted.params, push)
        there = adapted.apply_fn(moved, ids)
        away = np.max(np.abs(there - adapted.apply_fn(adapted.params, ids)))
        return np.max(np.abs(model.apply_fn(moved, ids) - there)), away

    np.testing.assert_allclose(
        model.apply_fn(adapted.params, ids), adapted.apply_fn(adapted.params, ids), rtol=1e-12
    )
    (far, _), (near, moved) = off(1e-2), off(1e-3)
    assert moved > 50 * near
    assert near < 0.02 * far
