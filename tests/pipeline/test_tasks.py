"""Networks and data by name: weights from a file, images from tensorflow-datasets and folders."""

import dataclasses

import numpy as np
import pytest
from flax import nnx
from PIL import Image

import jaxttp.models.catalog as catalog
from jaxttp.adapters import output_shape
from jaxttp.data import imagenet_preprocessing
from jaxttp.models import ResNet, ViT, save_params
from jaxttp.pipeline import Settings, build_task
from tests.models.filled import filled
from tests.models.texts import write_model, write_texts


def small_resnet(num_classes=1000, *, rngs, **options):
    shape = {"in_channels": 3, "stem_width": 4, "widths": (4,), "strides": (2,), "norm": "batch"}
    return ResNet(num_classes, **(shape | options), rngs=rngs)


def small_vit(num_classes=1000, *, rngs, **options):
    shape = {"patch_size": 8, "width": 8, "depth": 1, "heads": 2}
    return ViT(num_classes, **(shape | options), rngs=rngs)


@pytest.fixture(autouse=True)
def small_networks(monkeypatch):
    """The catalog's names with networks that compile at once."""
    small = {
        "resnet18": catalog.Entry(small_resnet, 16, "resnet"),
        "vit_tiny": catalog.Entry(small_vit, 16, "vit"),
    }
    for name, entry in small.items():
        assert catalog.MODELS[name].family == entry.family
        monkeypatch.setitem(catalog.MODELS, name, entry)


@pytest.fixture
def weights(tmp_path):
    """A file with the weights of the small residual network for seven classes."""
    network = filled(lambda: small_resnet(7, rngs=nnx.Rngs(0)))
    save_params(tmp_path / "trained.safetensors", nnx.state(network))
    return tmp_path / "trained.safetensors", network


def pictures(root, classes=3, each=4):
    draw = np.random.default_rng(0)
    for label in range(classes):
        for i in range(each):
            path = root / f"class{label}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(40 * label, 40 * label + 60, (20 + i, 24, 3), np.uint8)
            Image.fromarray(pixels).save(path)


@pytest.mark.slow
def test_a_network_with_weights_on_tensorflow_datasets(weights, stub_tfds):
    path, network = weights
    settings = Settings(
        data="cifar10", model="resnet18", weights=str(path), classes=3, samples_per_class=2
    )
    task = build_task(settings)
    assert task.x.shape == (6, 16, 16, 3)
    assert output_shape(*task.model, task.x) == (6, 3)
    assert "resnet18 with the weights of trained.safetensors and a fresh head" in task.description
    assert "cifar10 at 16x16, 6 samples, cross_entropy" in task.description
    np.testing.assert_array_equal(task.model.params["stem"]["kernel"], network.stem.kernel)
    # The frozen averages came too: a network with other ones gives other outputs.
    features = network.activations(task.x)["pool"]
    head = task.model.params["head"]
    expected = np.asarray(features) @ np.asarray(head["kernel"]) + np.asarray(head["bias"])
    found = task.model.apply_fn(task.model.params, task.x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_random_weights_get_the_averages_of_the_samples(tmp_path):
    pictures(tmp_path)
    options = {"data": "image_folder", "folder": str(tmp_path), "samples_per_class": 4}
    task = build_task(Settings(**options, model="resnet18"))
    outputs = np.asarray(task.model.apply_fn(task.model.params, task.x))
    assert 0.1 < outputs.std() < 10


@pytest.mark.parametrize("shape", [(6, 20, 24), (6, 20, 24, 3)])
def test_an_image_model_takes_arrays_of_images(shape, tmp_path):
    """Bytes and numbers in [0, 1] alike, and as images of a data set are."""
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    path = tmp_path / "own.npz"
    settings = Settings(data=str(path), model="resnet18", samples_per_class=2)
    found = []
    for x in (pixels, pixels / 255):
        np.savez(path, x=x, y=np.arange(6) % 2)
        found.append(build_task(settings))
    first, second = found
    assert first.x.shape == (4, 16, 16, 3)
    np.testing.assert_array_equal(first.x, second.x)
    whole = build_task(dataclasses.replace(settings, samples_per_class=3))
    prepared = imagenet_preprocessing(16)(pixels[0].reshape(20, 24, -1))
    np.testing.assert_array_equal(whole.x[0], prepared)
    assert first.description.startswith("resnet18 from random weights on own.npz at 16x16, 4 sam")
    for wrong in (pixels.astype(float), pixels.reshape(6, -1), pixels.reshape(6, 2, 2, -1)):
        np.savez(path, x=wrong, y=np.arange(6) % 2)
        with pytest.raises(ValueError, match=r"model takes images: .* has x \("):
            build_task(settings)


def test_classes_of_any_data_set():
    task = build_task(Settings(data="wine", classes=(2, 0), samples_per_class=3))
    assert output_shape(*task.model, task.x) == (6, 2)
    task = build_task(Settings(data="wine", classes=2, samples_per_class=3))
    assert output_shape(*task.model, task.x) == (6, 2)
    task = build_task(Settings(classes=(1, 2), samples_per_class=3, trainable="head"))
    assert (
        "ResNet pre-trained on digits 0-4, fine-tuned on digits 1, 2, head alone"
        in task.description
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnet19"}, "^model='resnet19' is not known; choose one of 'resnet18'"),
        ({"model": "nowhere/bert"}, "^model='nowhere/bert' is not.* Or a folder on this machine"),
        ({"max_length": 8}, "^max_length=8 does nothing here: it cuts texts for a language model"),
        ({"weights": "x"}, "^weights='x' does nothing here: it needs a model, one of resnet18"),
        ({"image_size": 9}, "^image_size=9 is not known; choose one of 8, 32"),
        ({"data": "wine", "image_size": 8}, "^image_size=8 does nothing here: it needs a model"),
        ({"model": "resnet18", "weights": "nowhere"}, "^path='nowhere' is not a file"),
        ({"data": "diabetes", "classes": 2}, "^classes=2: diabetes is a regression"),
        ({"data": "mit67"}, "^mit67 is read from a folder, and folder is missing"),
        ({"data": "wine", "classes": 4}, r"^classes must be .* 1 and 3; got 4\. wine has 3 class"),
        ({"classes": (3, 4, 17)}, r"^classes: \[17\] not in digits; choose among 0 \(0\), 1"),
        ({"classes": (3,)}, "^digits has a single class, '3'; a network learns to tell two"),
    ],
)
def test_settings_that_do_not_fit(options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        build_task(Settings(**options))


def test_weights_of_another_network(weights):
    with pytest.raises(ValueError, match=r"trained\.safetensors' .* does not fit this ViT"):
        build_task(Settings(model="vit_tiny", weights=str(weights[0]), samples_per_class=2))


def test_texts_for_a_language_model(tmp_path):
    path, folder = tmp_path / "own.csv", tmp_path / "bert"
    write_texts(path)
    with pytest.raises(ValueError, match="has a column of texts, which needs a language model: mo"):
        build_task(Settings(data=str(path)))
    folder.mkdir()
    asked = Settings(data=str(path), model=str(folder), samples_per_class=2)
    with pytest.raises(FileNotFoundError, match=r"^folder='.*bert' has no tokenizer\.json"):
        build_task(asked)
    write_model(folder)
    task = build_task(asked)
    assert {name: array.shape for name, array in task.x.items()} == {"ids": (4, 7), "mask": (4, 7)}
    assert sorted(task.y.tolist()) == [0, 0, 1, 1]
    assert str(task).startswith(
        "bert (bert) with a fresh head on own.csv, up to 7 tokens, 4 samples, cross_entropy\n"
        "own.csv, texts of up to 7 tokens. 4 of 12 rows: at most 2 a class"
    )
    head = build_task(dataclasses.replace(asked, trainable="head", max_length=5))
    assert sorted(head.model.params) == ["head/bias", "head/kernel"]
    assert head.x["ids"].shape == (4, 5)
    adapted = build_task(dataclasses.replace(asked, trainable="lora", rank=2))
    assert all(path.startswith(("blocks/", "pooler/")) for path in adapted.model.params)
    assert len(adapted.model.params) == 2 * 6 + 1
    for name, value in {"weights": "x", "image_size": 8, "hidden": (3,), "label": 1}.items():
        with pytest.raises(ValueError, match=f"^{name}=.* does nothing here: .* is a language mo"):
            build_task(dataclasses.replace(asked, **{name: value}))
    with pytest.raises(ValueError, match="data='digits' is not a CSV file"):
        build_task(dataclasses.replace(asked, data="digits"))
    long = path.read_text().replace("the film", "the film " * 9)
    path.write_text(long)
    with pytest.raises(ValueError, match=r"tokens are longer than the 16 positions.*--max-length"):
        build_task(asked)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"^folder='.*bert' has no model\.safetensors"):
        build_task(asked)
