"""A language model on a text: what is read off a forecast, and what is refused."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

from jaxttp import train
from jaxttp.data import load_corpus, load_tokenizer
from jaxttp.forecast import StaleGradientForecast
from jaxttp.models import load_transformer
from jaxttp.pipeline import (
    FineTuning,
    LoraSettings,
    Settings,
    fine_tuning_of,
    fine_tuning_task,
)
from jaxttp.pipeline.fine_tuning import TEXT, read_text, split_task, train_watched
from jaxttp.training import StepTime
from tests.models.texts import WORDS, write_model
from tests.test_cli import call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with 16 positions, a tokenizer of 14 words, and 1,500 of them."""
    path = tmp_path_factory.mktemp("llama")
    write_model(path, "llama-lm")
    draw = np.random.default_rng(0)
    (path / "corpus.txt").write_text(" ".join(draw.choice(WORDS[4:], 1500)))
    (path / "short.txt").write_text("good bad film " * 12)
    return path


def settings(folder, **options):
    given = {
        "model": str(folder), "optimizer": "adamw", "learning_rate": 0.01, "steps": 300,
        "batch_size": 8, "schedule": "cosine", "warmup": 10,
    }  # fmt: skip
    return Settings(**(given | options))


@pytest.fixture(scope="module")
def task(folder):
    network, ids, names = read_text(str(folder), str(folder / "corpus.txt"), 8)
    return split_task(settings(folder), network, ids, adapters=LoraSettings(2, 4.0), names=names)


def test_what_is_watched_is_no_part_of_what_trains(task):
    assert task.x.shape == (169, 8)  # 1,501 tokens with the end: 187 sequences
    assert task.x_watched.shape == (18, 8)  # a tenth
    rows = {tuple(row) for row in task.x.tolist()}
    assert not rows & {tuple(row) for row in task.x_watched.tolist()}
    np.testing.assert_array_equal(task.x[:, 1:], task.y[:, :-1])
    assert sorted(task.model.params)[0].startswith("blocks/0/")
    assert task.model.params["blocks/0/attention/q_proj/kernel"]["a"].shape == (16, 2)


def forecast(task, folder, held=None, **options):
    """Of a curve that is known: 3 - t / 300, ± 0.1, half a second a step."""
    loss = 3 - np.arange(301) / 300
    found = StaleGradientForecast(
        loss, np.full(301, 0.1), np.array([0, 300]), loss[[0, -1]], np.zeros(2), np.arange(40),
        480.0, 2400.0, False,
    )  # fmt: skip
    found = dataclasses.replace(found, **(held or {}))
    chosen = settings(folder, target_loss=(2.5, 1.0))
    parts = [chosen, LoraSettings(2, 4.0), task, found, StepTime(0.5, 0.0), 3.0]
    return dataclasses.replace(FineTuning(*parts), **options)


def bounded(task, folder, **held):
    """A path within the sample, of a corpus that is seen once: all that is in doubt has a size."""
    chosen = settings(folder, target_loss=(2.5, 1.0), total_samples=24_000)
    return forecast(task, folder, {"refresh_steps": np.arange(20)} | held, settings=chosen)


def test_steps_become_tokens_and_seconds(task, folder):
    found = bounded(task, folder)
    half, never = found.targets[-2:]
    # 3 - t / 300 < 2.5 first at t = 151, with ± 0.1 at 121 and 181; 64 tokens and 0.5 s a step
    assert (half.step, half.earliest, half.latest) == (151, 121, 181)
    assert half.tokens == 151 * 64
    assert half.seconds == 75.5
    assert (never.step, never.earliest, never.tokens, never.seconds) == (-1, -1, None, None)
    assert "loss below 2.5: step 151 (121 to 181), 9,664 tokens, " in str(found)
    assert found.targets[1].words == "10 % of the loss decrease left"
    assert found.targets[1].step == 271
    assert json.loads(json.dumps(found.to_json()))["targets"][-1]["step"] == -1


@pytest.mark.parametrize("reason", ["held too long", "seen again", "more weights"])
def test_a_warning_without_a_size_leaves_no_range(task, folder, reason):
    if reason == "held too long":
        found = bounded(task, folder, kept=0.2)
    elif reason == "seen again":
        found = forecast(task, folder)
    else:
        large = dataclasses.replace(task, weights=TEXT.measured + 1)
        found = dataclasses.replace(bounded(task, folder), task=large)
    assert found.warnings
    assert {(one.earliest, one.latest) for one in found.targets} == {(None, None)}
    assert found.to_json()["loss_uncertainty"] is None
    assert "loss below 1: not reached, see warnings" in str(found)
    (axes, *_) = found.plot().axes
    assert not axes.collections  # no band


def test_from_a_sample_to_the_whole_corpus(task, folder):
    """Epochs and the seconds of one are the corpus's; what the sample cannot say is said."""
    found = forecast(task, folder)
    assert found.epochs == pytest.approx(300 * 8 / 169)
    assert any(
        "sees every sequence 14.2 times, the forecast's path 1.9" in s for s in found.warnings
    )
    whole = forecast(task, folder, settings=settings(folder, total_samples=24_000))
    assert whole.epochs == 0.1
    assert whole.epoch_seconds == 3000 * 0.5
    assert any("169 sequences and the path draws 320" in line for line in whole.warnings)
    assert not any("overfitting is" in line for line in whole.warnings)
    large = dataclasses.replace(task, weights=TEXT.measured + 1)
    assert "alone; this one has 250,001" in forecast(large, folder).warnings[-1]


@pytest.mark.usefixtures("full_precision")
def test_the_real_training_is_train_s(task):
    """`jaxttp.train` keeps all outputs, which a language model has too many of; else the same."""

    options = {
        "optimizer": optax.adam(0.01),
        "steps": 12,
        "batch_size": 8,
        "key": jax.random.key(3),
    }
    x, y = task.x[:24], task.y[:24]
    ours = train_watched(task.model, x, y, x[:9], y[:9], **options)
    seen = []
    apply_fn = task.model.apply_fn
    train(*task.model, x, y, loss="cross_entropy", callback=lambda t, w, value: seen.append(
        optax.softmax_cross_entropy_with_integer_labels(apply_fn(w, x[:9]), y[:9]).mean()
    ), **options)  # fmt: skip
    # One step after another in float32, twelve of them.
    np.testing.assert_allclose(ours.loss, seen, rtol=2e-5)
    assert ours.finite


@pytest.mark.slow
def test_the_command_foresees_and_verifies(folder):
    out = folder / "out"
    arguments = (
        f"predict --model {folder} --lora r=2,alpha=4,modules=q_proj+v_proj --text "
        f"{folder / 'corpus.txt'} --optimizer adamw --learning-rate 0.01 --schedule cosine "
        f"--warmup 10 --steps 300 --batch-size 8 --sequence-length 8 --target-loss 3.2 "
        f"--verify --output {out}"
    )
    result = call(*arguments.split(), columns=120)
    assert result.exit_code == 0, result.stderr
    assert "LoRA r=2, α=4 on q_proj, v_proj" in result.stdout
    assert "300 steps see 19,200 tokens" in result.stdout
    assert "of the training's gradients" in result.stdout
    written = json.loads((out / "prediction.json").read_text())
    assert (out / "prediction.png").stat().st_size > 10_000
    assert written["forecast"]["fraction"] <= 0.2
    real = written["verified"]["loss"]
    drop = real[0] - real[-1]
    assert drop > 0.3
    # A tenth of the drop at the end; how true curves are is measured in experiments.bench.lora.
    assert abs(written["loss"][-1] - real[-1]) < 0.1 * drop


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": None}, "lora is needed with text"),
        ({"lora": "rank=4"}, "must give each of r, alpha, modules, rslora at most once"),
        ({"lora": "r=2,modules=queries"}, "'queries' fits no module"),
        ({"text": "gone.txt"}, "text='gone.txt' is not there"),
        ({"text": "short.txt"}, "are held out; batch-size"),
        ({"batch-size": None}, "batch_size is needed with a text"),
        ({"sequence-length": 99}, "sequence_length must be an integer between 1 and 16; got 99"),
        ({"budget": 2}, "budget=2.0 must be between 0 and 1"),
        ({"total-samples": 3}, "total_samples=3 is fewer than the 169 sequences"),
    ],
)
def test_bad_input_is_one_line(options, message, folder):
    given = {
        "model": folder, "lora": "r=2", "text": "corpus.txt", "steps": 300, "batch-size": 8,
        "sequence-length": 8,
    } | options  # fmt: skip
    if given["text"] in ("corpus.txt", "short.txt"):
        given["text"] = folder / given["text"]
    words = [str(w) for n, v in given.items() if v is not None for w in (f"--{n}", v)]
    result = call("predict", *words)
    assert result.exit_code == 2, result.stdout
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert message.replace("batch-size", "batch_size") in result.stderr


def test_other_folders_are_refused(folder, tmp_path):
    write_model(tmp_path, "bert-mlm")
    with pytest.raises(ValueError, match="An encoder sees what it would have to predict"):
        fine_tuning_task(settings(tmp_path), text=str(folder / "corpus.txt"))


@pytest.fixture(scope="module")
def at_hand(folder):
    """The same network and sequences as objects."""
    corpus = load_corpus(folder / "corpus.txt", load_tokenizer(folder), length=8)
    ids = np.concatenate([corpus.x, corpus.y[:, -1:]], axis=1)
    return load_transformer(folder, head="language_model"), ids


def test_a_network_and_sequences_as_objects(folder, at_hand):
    _, ids, names = read_text(str(folder), str(folder / "corpus.txt"), 8)
    np.testing.assert_array_equal(ids, at_hand[1])
    assert names[1] == "corpus.txt"
    chosen = settings(folder, model=None, steps=150, budget=0.5, total_samples=24_000)
    found = fine_tuning_of(
        chosen, *at_hand, adapters=LoraSettings(2, modules=("q_proj",)), names=("toy", "words")
    )
    assert found.found.loss.shape == (151,)
    assert found.task.description.startswith("toy (llama, ")
    assert "on words: 1,496 tokens in 187 sequences of 8" in found.task.description
    assert any("169 sequences and the path draws" in line for line in found.warnings)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "gone"}, ValueError, "model='gone' does nothing here: the network is given"),
        ({"network": None}, TypeError, "network must be a jaxttp.models.Decoder .* NoneType"),
        ({"ids": [1, 2, 3]}, ValueError, r"ids must be tokens \(N, T \+ 1\)"),
        ({"ids": np.full((40, 9), 99)}, ValueError, r"ids\[0, 0\]=99 is out of range"),
        ({"verify": True, "total_samples": 999}, ValueError, "would train on the sample"),
    ],
)
def test_what_is_no_network_or_no_text_is_refused(folder, at_hand, change, error, message):
    given = {"network": at_hand[0], "ids": at_hand[1]}
    fields = {field.name for field in dataclasses.fields(Settings)}
    chosen = settings(folder, **{"model": None} | {k: v for k, v in change.items() if k in fields})
    given |= {k: v for k, v in change.items() if k not in fields}
    with pytest.raises(error, match=message):
        fine_tuning_of(chosen, **given)
