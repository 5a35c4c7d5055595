"""A folder with a tiny language model and a tokenizer of words, and texts for it."""

import pathlib
import shutil

import tokenizers
from tokenizers import models, pre_tokenizers, processors

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "transformers"
WORDS = "[PAD] [UNK] [CLS] [SEP] good bad film plot boring fine great dull the was".split()


def write_tokenizer(folder, *, added=True):
    """A tokenizer.json that splits at spaces; with [CLS] and [SEP] around a text."""
    words = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if added:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))


def write_model(folder, name="bert-classifier"):
    """One of the goldens with a tokenizer."""
    for path in (GOLDENS / name).glob("*.*"):
        shutil.copy(path, folder)
    write_tokenizer(folder)


def write_texts(path, count=12):
    """Reviews, good and bad ones by turns."""
    words = (("bad", "boring", "dull"), ("good", "fine", "great"))
    rows = [
        f"the {('film', 'plot')[i // 2 % 2]} was {words[i % 2][i % 3]} "
        f"{words[i % 2][i // 3 % 3]},{('neg', 'pos')[i % 2]}"
        for i in range(count)
    ]
    path.write_text("\n".join(["text,label", *rows]) + "\n")
