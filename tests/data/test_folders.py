"""Folders of images as distributed, made here in small."""

import re

import numpy as np
import pytest
from PIL import Image

from jaxttp.data import Preprocessing, load_dataset
from jaxttp.data.sources import LAYOUTS

PLAIN = Preprocessing(crop=8)


def image(path, value, size=(8, 8)):
    """A lossless file of one value, whatever its suffix says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), value, np.uint8)).save(path, format="PNG")


def make_image_folder(root):
    for label, name in enumerate(("cat", "dog")):
        for i in range(3):
            image(root / name / f"{i}.jpg", 100 * label + i, size=(8, 8 + i))
    (root / "dog" / "notes.txt").write_text("not an image")


def make_mit67(root):
    values = {"bar/a.jpg": 10, "bar/b.jpg": 11, "office room/c.jpg": 20, "office room/d.jpg": 21}
    for name, value in values.items():
        image(root / "Images" / name, value)
    image(root / "Images" / "bar" / "unlisted.jpg", 99)
    (root / "TrainImages.txt").write_text("office room/c.jpg\nbar/a.jpg\n")
    (root / "TestImages.txt").write_text("bar/b.jpg\noffice room/d.jpg")


def make_fgvc_aircraft(root):
    for number in range(4):
        image(root / "data" / "images" / f"00{number}.jpg", number, size=(28, 8))
    (root / "data" / "variants.txt").write_text("737-200\nA340 300\n")
    for part, text in (("train", "000 A340 300\n001 737-200\n"), ("val", "002 A340 300\n")):
        (root / "data" / f"images_variant_{part}.txt").write_text(text)
    (root / "data" / "images_variant_test.txt").write_text("003 737-200\n")


def make_minc2500(root):
    for label, name in enumerate(("brick", "carpet")):
        for i in range(3):
            image(root / "images" / name / f"{name}_{i}.jpg", 50 * label + i)
    (root / "categories.txt").write_text("brick\ncarpet\n")
    (root / "labels").mkdir()
    for i, part in enumerate(("train", "validate", "test")):
        lines = f"images/carpet/carpet_{i}.jpg\nimages/brick/brick_{i}.jpg\n"
        (root / "labels" / f"{part}1.txt").write_text(lines)


MAKE = {
    "image_folder": make_image_folder,
    "mit67": make_mit67,
    "fgvc_aircraft": make_fgvc_aircraft,
    "minc2500": make_minc2500,
}
EXPECTED = {
    # name: split -> pixels and labels in order
    "image_folder": {None: ([0, 1, 2, 100, 101, 102], [0, 0, 0, 1, 1, 1])},
    "mit67": {
        None: ([20, 10, 11, 21], [1, 0, 0, 1]),
        "train": ([20, 10], [1, 0]),
        "test": ([11, 21], [0, 1]),
    },
    "fgvc_aircraft": {
        None: ([0, 1, 2, 3], [1, 0, 1, 0]),
        "val": ([2], [1]),
    },
    "minc2500": {
        None: ([50, 0, 51, 1, 52, 2], [1, 0, 1, 0, 1, 0]),
        "validate": ([51, 1], [1, 0]),
    },
}
NAMES = {
    "image_folder": ("cat", "dog"),
    "mit67": ("bar", "office room"),
    "fgvc_aircraft": ("737-200", "A340 300"),
    "minc2500": ("brick", "carpet"),
}


@pytest.mark.parametrize(("name", "split"), [(n, s) for n, e in EXPECTED.items() for s in e])
def test_images_labels_and_parts(name, split, tmp_path):
    MAKE[name](tmp_path)
    data = load_dataset(name, folder=tmp_path, split=split, preprocessing=PLAIN)
    pixels, labels = EXPECTED[name][split]
    assert data.x.shape == (len(pixels), 8, 8, 3)
    np.testing.assert_array_equal(np.round(255 * data.x[:, 0, 0, 0]), pixels)
    np.testing.assert_array_equal(data.y, labels)
    assert data.class_names == NAMES[name]


def test_the_banner_of_an_aircraft_is_cut_off(tmp_path):
    make_fgvc_aircraft(tmp_path)
    path = tmp_path / "data" / "images" / "000.jpg"
    pixels = np.full((28, 8, 3), 40, np.uint8)
    pixels[8:] = 255
    Image.fromarray(pixels).save(path, format="PNG")
    data = load_dataset("fgvc_aircraft", folder=tmp_path, split="train")
    assert data.x.shape[1:] == (8, 8, 3)
    np.testing.assert_array_equal(np.round(255 * data.x[0]), 40)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_missing_folder_says_how_it_is_fetched(name, tmp_path):
    fetch = re.escape(LAYOUTS[name].fetch)
    with pytest.raises(ValueError, match=rf"folder is missing.*fetched by: {fetch}"):
        load_dataset(name)
    with pytest.raises(ValueError, match=r"folder='.*nowhere' does not exist.*fetched by"):
        load_dataset(name, folder=tmp_path / "nowhere")


def test_a_missing_list(tmp_path):
    make_mit67(tmp_path)
    (tmp_path / "TrainImages.txt").unlink()
    with pytest.raises(ValueError, match=r"lacks .*TrainImages.txt; mit67 as distributed is"):
        load_dataset("mit67", folder=tmp_path)


def test_a_folder_without_images(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no images in folders named after their classes"):
        load_dataset("image_folder", folder=tmp_path)
