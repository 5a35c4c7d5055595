"""Every number in a result of the gallery, experiments/README.md, is in the script's records."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?|\.\d+)(e-?\d+)?( ?%| million)?(?!\w)")
RECORDS = {  # picture -> its lines of measured.json, and the settings of its script
    picture: "\n".join([*lines, (file.parent / "settings.json").read_text()])
    for file in (ROOT / "docs/gallery/results").glob("*/cpu/measured.json")
    for picture, lines in json.loads(file.read_text())["measured"].items()
}


def sections():
    """Pictures of a heading, and the text of its results."""
    for part in re.split(r"^#+ ", (ROOT / "experiments/README.md").read_text(), flags=re.M):
        heading, _, body = part.partition("\n")
        pictures = set(re.findall(r"`([a-z]+-[\w-]+)`", heading))
        results = re.search(r"^(- )?Result\b.*?(?=^(- )?Verdict|\Z)", body, re.M | re.S)
        if pictures and results:
            yield pytest.param(pictures, results[0], id=min(pictures))


def numbers(text):
    """What is written, its value, half a unit of its last digit, and 100 for a percentage."""
    for match in NUMBER.finditer(re.sub(r"`[^`]*`", "", text.replace("e+", "e"))):
        digits, exponent, unit = (group or "" for group in match.groups())
        scale = float("1" + exponent) * (1e6 if unit == " million" else 1.0)
        half = (0.5 + 1e-9) * scale / 10 ** len(digits.partition(".")[2])
        yield match[0], float(digits.replace(",", "")) * scale, half, 100 if "%" in unit else 1


@pytest.mark.parametrize(("pictures", "results"), list(sections()))
def test_results_are_on_record(pictures, results):
    text = "\n".join(RECORDS[picture] for picture in pictures)
    known = [size / unit for _, size, _, percent in numbers(text) for unit in {1, percent}]
    assert not [
        written
        for written, size, half, percent in numbers(results)
        if not any(abs(size - unit * value) <= half for value in known for unit in {1, percent})
    ]


def test_every_picture_has_a_record():
    assert {path.stem for path in (ROOT / "docs/gallery").glob("*.png")} <= RECORDS.keys()
