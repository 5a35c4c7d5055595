"""The runner: results that come back as they were, runs that go on, pictures from what is saved."""

import dataclasses
import json
import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from experiments import harness
from experiments.__main__ import app
from experiments.harness import Script, add_to_gallery, find, run_script
from experiments.store import MissingError, Store
from experiments.two_factor.theorems import Settings as Theorems
from jaxttp.training import StepTime


@dataclasses.dataclass(frozen=True)
class Settings:
    seeds: tuple[int, ...] = (0, 1, 2)


class Toy:
    """A script of one picture that counts what it makes, and can be killed half way."""

    def __init__(self):
        self.made, self.kill_at = [], None

    def run(self, settings, store):
        def make(seed):
            if seed == self.kill_at:
                raise KeyboardInterrupt
            self.made.append(seed)
            return {"seed": seed, "curve": np.arange(3.0) * seed}

        pieces = {f"seed {seed}": lambda seed=seed: make(seed) for seed in settings.seeds}
        return store.all(pieces)

    def script(self, **changes):
        parts = {
            "claim": {"toy-1": "Grows. (Toy Figure 1)"},
            "presets": {"smoke": Settings(), "cpu": Settings((0, 1, 2, 3))},
            "run": self.run,
            "plot": lambda result: {"toy-1": Figure()},
            "measure": lambda result: {"toy-1": [f"{len(result)} curves"]},
        }
        return Script(**(parts | changes))


@pytest.fixture
def toy(monkeypatch):
    out = Toy()
    monkeypatch.setattr(harness, "SCRIPTS", {"toy": "nowhere"})
    monkeypatch.setattr(harness, "load_script", lambda name: out.script())
    return out


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, "text", 0.1, math.inf, [1, (2, "a")], {1.5: "a", "b": (1,)},
        Theorems(rates=(0.1, 0.2)), {("a", 1): [None]}, StepTime(0.5, 1.0),
    ],
)  # fmt: skip
def test_values_come_back_as_they_were(tmp_path, value):
    store = Store(tmp_path, settings=1)
    assert store.get("a b/c", lambda: value) == value
    again = Store(tmp_path, settings=1, read_only=True).get("a b/c", pytest.fail)
    assert again == value
    assert type(again) is type(value)


def test_arrays_come_back_as_they_were(tmp_path):
    value = {"x": np.array([1.0, math.nan, math.inf]), "y": (np.arange(4, dtype=np.int32),)}
    Store(tmp_path, settings=1).get("one/two", lambda: value)
    again = Store(tmp_path, settings=1).get("one/two", pytest.fail)
    np.testing.assert_array_equal(again["x"], value["x"])
    np.testing.assert_array_equal(again["y"][0], value["y"][0])
    assert again["y"][0].dtype == np.int32
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["one/two"]


def test_names_that_look_alike_do_not_fraction_a_file(tmp_path):
    store = Store(tmp_path, settings=1)
    for place, name in enumerate(("a b", "a/b", "a-b")):
        store.get(name, lambda place=place: np.array(place))
    again = Store(tmp_path, settings=1)
    assert [int(again.get(name, pytest.fail)) for name in ("a b", "a/b", "a-b")] == [0, 1, 2]


def test_what_cannot_be_kept_is_refused(tmp_path):
    with pytest.raises(TypeError, match="cannot be kept"):
        Store(tmp_path, settings=1).get("a", lambda: {"a": object()})
    assert not (tmp_path / "records.jsonl").exists()


def test_a_line_cut_short_is_made_again(tmp_path):
    store = Store(tmp_path, settings=1)
    store.get("whole", lambda: 1)
    store.get("cut", lambda: 2)
    path = tmp_path / "records.jsonl"
    path.write_text(path.read_text()[:-10])
    store = Store(tmp_path, settings=1)
    assert store.get("whole", pytest.fail) == 1
    assert store.get("cut", lambda: 3) == 3
    assert Store(tmp_path, settings=1).get("cut", pytest.fail) == 3


def test_other_settings_are_refused(tmp_path):
    Store(tmp_path, settings=Settings((0,)))
    Store(tmp_path, settings=Settings((0,)))
    with pytest.raises(ValueError, match="other settings"):
        Store(tmp_path, settings=Settings((1,)))


def test_a_killed_run_goes_on_and_a_finished_one_is_not_repeated(tmp_path, toy):
    toy.kill_at = 2
    with pytest.raises(KeyboardInterrupt):
        run_script("toy", "smoke", results=tmp_path)
    toy.kill_at = None
    seen = []
    outcome = run_script("toy", "smoke", results=tmp_path, report=lambda *args: seen.append(args))
    assert toy.made == [0, 1, 2]
    assert seen == [("seed 0", 0, 3), ("seed 1", 1, 3), ("seed 2", 2, 3), ("", 3, 3)]
    assert outcome.measured == {"toy-1": ["3 curves"]}
    assert outcome.pictures[0].read_bytes().startswith(b"\x89PNG")
    sessions = json.loads((outcome.folder / "sessions.json").read_text())
    assert len(sessions) == 2
    assert {"jax", "numpy"} <= set(sessions[0]["versions"])
    assert "cpu" in sessions[0]["device"]
    settings = json.loads((outcome.folder / "settings.json").read_text())
    assert settings["fields"] == {"seeds": {"tuple": [0, 1, 2]}}
    outcome.pictures[0].unlink()
    assert run_script("toy", "smoke", results=tmp_path, only_plot=True).pictures[0].exists()
    run_script("toy", "smoke", results=tmp_path)
    assert toy.made == [0, 1, 2]
    assert len(json.loads((outcome.folder / "sessions.json").read_text())) == 2
    run_script("toy", "smoke", results=tmp_path, fresh=True)
    assert toy.made == [0, 1, 2] * 2


def test_the_gallery_gets_small_copies_and_the_results(tmp_path, toy):
    gallery = tmp_path / "gallery"
    outcome = run_script("toy", "smoke", results=tmp_path)
    for _ in range(2):  # what was there is replaced
        (copy,) = add_to_gallery(outcome, gallery)
    assert copy == gallery / "toy-1.png"
    assert 0 < copy.stat().st_size < outcome.pictures[0].stat().st_size
    kept = gallery / "results" / "toy" / "smoke"
    assert {path.name for path in kept.iterdir()} == {
        "arrays", "records.jsonl", "settings.json", "sessions.json", "measured.json",
    }  # fmt: skip
    made = len(toy.made)
    again = run_script("toy", "smoke", results=gallery / "results", only_plot=True)
    assert len(toy.made) == made
    assert again.measured == outcome.measured
    (copy,) = add_to_gallery(again, gallery)  # from where it lies
    assert copy.stat().st_size > 0
    assert (kept / "records.jsonl").exists()


def test_plot_without_results_says_so(tmp_path, toy):
    with pytest.raises(MissingError, match="nothing is saved"):
        run_script("toy", "smoke", results=tmp_path, only_plot=True)
    assert not (tmp_path / "toy").exists()


def test_unknown_names(tmp_path, toy):
    with pytest.raises(ValueError, match="preset='huge'"):
        run_script("toy", "huge", results=tmp_path)
    assert find("toy-1") == "toy"
    with pytest.raises(ValueError, match=r"neither a script nor a picture; did you mean toy-1"):
        find("toy-2")
    with pytest.raises(ValueError, match=r"picture\. `python -m experiments list` names them all"):
        find("qqqqqqqq")


def test_the_command_line(tmp_path):
    runner = CliRunner()
    options = ["--preset", "smoke", "--output", str(tmp_path)]
    refused = runner.invoke(app, ["run", "two-factor-theorems", "--plot", "--fresh", *options])
    assert refused.exit_code == 2
    nothing = runner.invoke(app, ["run"])
    assert nothing.exit_code == 2


def test_plot_runs_first_what_is_not_saved(tmp_path, toy, monkeypatch):
    """On a first run there is nothing to draw; a second one only draws."""
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "toy", "--plot", "--preset", "smoke", "--output", str(tmp_path / "out")]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "It is run first." in first.output
    assert (tmp_path / "out" / "toy" / "smoke" / "toy-1.png").exists()
    made = len(toy.made)
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0
    assert "It is run first." not in again.output
    assert len(toy.made) == made > 0
