"""Token sequences to train a small language model on, without any download.

"license" is real English, the characters of this repository's LICENSE file (11,309 of them, about
70 distinct). "zipf" is drawn: a chain whose tokens have frequencies 1/rank^exponent and whose next
token is half the time a fixed function of the last two, so that there is something to learn beyond
the frequencies.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

LICENSE = Path(__file__).parents[2] / "LICENSE"
TEXTS = ("license", "zipf")


class Corpus(NamedTuple):
    """Tokens to train on and tokens held out.

    Attributes:
        train: int32 (n,), 0..vocabulary-1.
        held_out: int32 (m,), what follows.
        vocabulary: V.
        description: what it is.
    """

    train: np.ndarray
    held_out: np.ndarray
    vocabulary: int
    description: str


def load_text(name: str, *, length: int = 20_000, vocabulary: int = 64, seed: int = 0) -> Corpus:
    """A corpus by name; the last tenth is held out.

    Args:
        name: "license" or "zipf".
        length: tokens of "zipf".
        vocabulary: V of "zipf".
        seed: of "zipf".

    Returns:
        A `Corpus`.

    Raises:
        ValueError: an unknown name.
    """
    if name == "license":
        text = LICENSE.read_text()
        letters = sorted(set(text))
        tokens = np.array([letters.index(letter) for letter in text], np.int32)
        vocabulary, words = len(letters), "characters of the Apache license"
    elif name == "zipf":
        tokens = zipf_tokens(length, vocabulary, seed=seed)
        words = f"tokens of a chain with Zipf frequencies, V = {vocabulary}"
    else:
        raise ValueError(f"text={name!r} is not known; choose one of {', '.join(TEXTS)}.")
    cut = len(tokens) * 9 // 10
    return Corpus(tokens[:cut], tokens[cut:], vocabulary, f"{len(tokens)} {words}")


def zipf_tokens(
    length: int, vocabulary: int, *, exponent: float = 1.0, seed: int = 0
) -> np.ndarray:
    """A chain with frequencies 1/rank^exponent: half fresh draws, half functions of the last two.

    Args:
        length: tokens.
        vocabulary: V.
        exponent: of the frequencies.
        seed: of everything.

    Returns:
        int32 (length,).
    """
    rng = np.random.default_rng(seed)
    fraction = np.arange(1, vocabulary + 1) ** -exponent
    fraction /= fraction.sum()
    follow = rng.choice(vocabulary, (vocabulary, vocabulary), p=fraction)
    fresh = rng.choice(vocabulary, length, p=fraction)
    bound = rng.random(length) < 0.5
    tokens = fresh.astype(np.int32)
    for i in range(2, length):
        if bound[i]:
            tokens[i] = follow[tokens[i - 2], tokens[i - 1]]
    return tokens


def windows(tokens: np.ndarray, context: int, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Contexts (n, context) and the tokens that follow each position (n, context)."""
    rows = starts[:, None] + np.arange(context + 1)[None]
    both = tokens[rows]
    return both[:, :-1], both[:, 1:]
