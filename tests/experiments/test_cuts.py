"""What a dry run makes of settings is said by their fields."""

import dataclasses

import pytest

from experiments import cuts
from experiments.dry_run import one_step


@dataclasses.dataclass(frozen=True)
class Part:
    epochs: int = cuts.one(9)
    sizes: tuple = (1, 2)


@dataclasses.dataclass(frozen=True)
class Settings:
    horizons: dict = cuts.one()  # noqa: RUF009
    steps: int = cuts.one(150)
    seeds: tuple = cuts.one((4, 5))
    rates: tuple = cuts.first((0.1, 0.3))
    samples: int | None = cuts.few(32, 1000)
    rows: tuple = cuts.few(8, (20, 40))
    part: int | None = cuts.few(32, None, otherwise="batch")
    batch: int = cuts.few(4, 64)
    pair: tuple = cuts.whole((100, 300), small=(4, 8))
    classes: tuple = cuts.whole((5, 6))
    cases: tuple = cuts.each((Part(), Part(epochs=3)))
    parts: tuple = (Part(), Part(sizes=(7, 8)))
    when: tuple = cuts.points((0, 10, 20))
    often: int = cuts.points(20)
    phases: tuple = cuts.phases((("adam", 20), ("gn", 5)))
    runs: int = 7  # called as others are that are cut, and not cut: nothing is said of it
    widths: tuple = (10, 100)
    name: str = "digits"


BOTH = {
    "steps": 1, "seeds": (4,), "horizons": {"gn": 1}, "rates": (0.1,), "classes": (5, 6),
    "when": (0, 1), "often": 1, "phases": (("adam", 1), ("gn", 1)), "runs": 7, "name": "digits",
}  # fmt: skip
LAST = Part(1, (2,))


@pytest.mark.parametrize(
    ("few", "expected"),
    [
        (False, {
            "samples": 1000, "rows": (40,), "part": 64, "batch": 64, "pair": (100, 300),
            "cases": (LAST, LAST), "parts": (Part(1, (8,)),), "widths": (100,),
        }),
        (True, {
            "samples": 32, "rows": (8,), "part": 4, "batch": 4, "pair": (4, 8),
            "cases": (Part(1, (1,)),), "parts": (Part(1, (1,)),), "widths": (10,),
        }),
    ],
)  # fmt: skip
def test_every_kind_of_field(few, expected):
    cut = one_step(Settings(horizons={"gn": 30}), few=few)
    assert dataclasses.asdict(cut) == dataclasses.asdict(Settings(**BOTH, **expected))
    assert isinstance(cut.cases[0], Part)


def test_nothing_is_left_of_an_empty_grid():
    assert one_step(Settings(horizons={}, widths=(), samples=None)).widths == ()
    assert one_step(Settings(horizons={}, samples=None), few=True).samples is None
