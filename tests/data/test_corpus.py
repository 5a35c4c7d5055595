"""Running text as sequences: every token predicted once, files in order, bad input by name."""

import json

import numpy as np
import pytest

from jaxttp.data import load_corpus, load_tokenizer
from tests.models.texts import WORDS, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus")
    write_tokenizer(path)  # adds [CLS] and [SEP] to single texts
    (path / "config.json").write_text(json.dumps({"eos_token_id": [3, 2], "pad_token_id": 0}))
    return path


def ids(text):
    return [WORDS.index(word) for word in text.split()]


def test_a_text_is_cut_where_it_stands_and_every_token_is_predicted_once(folder, tmp_path):
    text = "good film bad plot fine great dull the was boring"
    (tmp_path / "one.log").write_text(text)  # a file may have any suffix
    found = load_corpus(tmp_path / "one.log", load_tokenizer(folder), length=4)
    whole = [*ids(text), 3]  # the end of the text, and no [CLS]
    assert found.tokens == 11
    assert found.files == 1
    np.testing.assert_array_equal(found.x, np.reshape(whole[:8], (2, 4)))
    np.testing.assert_array_equal(found.y, np.reshape(whole[1:9], (2, 4)))
    assert found.x.dtype == np.int32


def test_files_of_a_folder_come_by_their_names_with_an_end_after_each(folder, tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in (("b/2.py", "film"), ("c.txt", "bad"), ("a.md", "good"), ("d.bin", "dull")):
        (tmp_path / name).write_text(text)
    found = load_corpus(tmp_path, load_tokenizer(folder), length=5)
    assert found.files == 3
    assert found.x.tolist() == [[*ids("good"), 3, *ids("film"), 3, *ids("bad")]]
    assert found.y[0, -1] == 3


@pytest.mark.parametrize(
    ("files", "length", "message"),
    [
        ({}, 4, "holds no .txt, .md, .py"),
        ({"a.txt": b""}, 4, "is empty"),
        ({"a.txt": b"\xff\xfe\x00"}, 4, r"a.txt' is no text in UTF-8"),
        ({"a.txt": b"good bad"}, 4, "has 3 tokens; a sequence of 4 and the token after"),
        ({"a.txt": b"good bad"}, 0, "length must be an integer of at least 1; got 0"),
    ],
)
def test_bad_texts_are_refused(files, length, message, folder, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(tmp_path, load_tokenizer(folder), length=length)
