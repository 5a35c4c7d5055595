"""Texts as tokens: the tokenizer of a folder, and CSV files with texts and labels."""

import builtins
import json

import jax
import numpy as np
import pytest
import tokenizers

from jaxttp.data import has_texts, load_texts, load_tokenizer, select
from tests.models.texts import WORDS, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"pad_token_id": 1}))
    return path


@pytest.fixture
def tokenizer(folder):
    return load_tokenizer(folder)


def test_ids_are_those_of_the_package_padded_on_the_right(folder, tokenizer):
    texts = ["the film was good", "dull", "good unheard film"]
    found = tokenizer(texts)
    assert {array.dtype for array in found.values()} == {np.dtype(np.int32)}
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.enable_padding(pad_id=1)
    expected = own.encode_batch(texts)
    np.testing.assert_array_equal(found["ids"], [one.ids for one in expected])
    np.testing.assert_array_equal(found["mask"], [one.attention_mask for one in expected])
    assert found["ids"][1].tolist() == [2, WORDS.index("dull"), 3, 1, 1, 1]
    assert len(tokenizer) == len(WORDS)


@pytest.mark.parametrize(
    ("texts", "options", "problem", "message"),
    [
        ("good", {}, TypeError, "texts must be several strings"),
        ([], {}, ValueError, "texts is empty"),
        (["good"], {"max_length": 2}, ValueError, "at least 3; got 2. The tokenizer adds 2 tok"),
    ],
)
def test_bad_texts(texts, options, problem, message, tokenizer):
    with pytest.raises(problem, match=message):
        tokenizer(texts, **options)


def test_folders_without_a_tokenizer_and_machines_without_the_package(
    tmp_path, folder, monkeypatch
):
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer.json; write one with Auto"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer: "):
        load_tokenizer(tmp_path)
    whole = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError("No module named 'tokenizers'")
        return whole(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"install the extra: pip install 'jaxttp\[text\]'"):
        load_tokenizer(folder)


def test_a_file_of_texts(tmp_path, tokenizer):
    path = tmp_path / "a.csv"
    path.write_text('Label,id,text\nneg,1,"dull,\nbad"\npos,2,good\nneg,3,boring\npos,4,the fine\n')
    assert has_texts(path)
    found = load_texts(path, tokenizer)
    assert found.class_names == ("neg", "pos")
    assert found.y.tolist() == [0, 1, 0, 1]
    assert found.x["mask"].sum(1).tolist() == [5, 3, 3, 4]  # a comma is a token, an unknown one
    assert found.description == "a.csv, texts of up to 5 tokens, id left out."
    assert repr(found) == "Dataset('a.csv': x['ids'] (4, 5), x['mask'] (4, 5), 2 classes)"
    part = select(found, classes=(1,), per_class=1, key=jax.random.key(0))
    assert (len(part), part.x["ids"].shape) == (1, (1, 5))
    cut = load_texts(path, tokenizer, max_length=3)  # the tokens that are added are kept
    assert cut.x["ids"].shape == (4, 3)
    assert set(cut.x["ids"][:, 0]) == {2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("words,label\na,b\n", "one column 'text' in the first line, which has words, label"),
        ("", "one column 'text' in the first line, which has nothing"),
        ("text,label\ngood,film,1\n", "line 2 has 3 cells, the head 2; put texts with commas"),
        ("text,label\n ,1\ngood,2\n", "the text in line 2 is empty, 1 of 2 are"),
        ("text,label\ngood,\nbad,1\n", "column 'label', is missing in 1 rows, first in line 2"),
    ],
)
def test_bad_files(content, message, tmp_path, tokenizer):
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_texts(path, tokenizer)
