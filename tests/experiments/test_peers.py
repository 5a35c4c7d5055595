"""The harness of peers: its messages, its checks, its tables, and rows that need no peer."""

import io
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.bench.peers import __main__ as command
from experiments.bench.peers import environments, networks, problems, rows
from experiments.bench.peers.harness import Bench, Limits, Row, Side, largest_difference
from experiments.bench.peers.protocol import Prepared, Session, answer_all, memory
from experiments.bench.peers.table import attempts, confirmed, table, verdicts
from experiments.bench.peers.worker import Worker, WorkerError

GIB = 2**30


@pytest.fixture(autouse=True)
def _plain_networks():
    """Networks are written as anybody would, with biases that broadcast."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def doubled(problem, options):
    def call():
        return options["factor"] * problem["x"]

    return Prepared(call, lambda found: {"y": found}, lambda: 5.0)


@pytest.fixture
def session():
    return Session({"doubled": doubled}, ("numpy",))


@pytest.fixture
def problem_file(tmp_path):
    np.savez(tmp_path / "problem.npz", x=np.arange(3.0))
    return str(tmp_path / "problem.npz")


def test_a_conversation(session, problem_file, tmp_path):
    """Every request as a line, every reply as a line, until one says stop."""
    answer = str(tmp_path / "answer.npz")
    requests = [
        {"do": "prepare", "work": "doubled", "problem": problem_file, "options": {"factor": 2}},
        {"do": "call"}, {"do": "answer", "file": answer}, {"do": "count"}, {"do": "memory"},
        {"do": "stop"}, {"do": "call"},
    ]  # fmt: skip
    replies = io.StringIO()
    answer_all(session, io.StringIO("".join(json.dumps(r) + "\n" for r in requests)), replies)
    ready, called, written, counted, held = (json.loads(r) for r in replies.getvalue().splitlines())
    assert ready["versions"] == {"numpy": np.__version__}
    assert called["wall"] > 0
    assert called["cpu"] >= 0
    assert written == {}
    assert counted == {"operations": 5.0}
    assert held["peak"] >= held["idle"] > 2**20
    np.testing.assert_array_equal(np.load(answer)["y"], [0.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"do": "dance"}, "do must be prepare, call, answer, count or memory; got dance"),
        ({}, "do must be .*; got None"),
        ({"do": "call"}, "prepare must come before call"),
        ({"do": "answer", "file": "x"}, "call must come before answer"),
        ({"do": "prepare", "work": "tripled"}, "work must be one of doubled; got tripled"),
        ({"do": "prepare", "work": "doubled", "problem": "none.npz", "options": {}}, "none.npz"),
    ],
)
def test_what_cannot_be_is_one_line(session, request_, words):
    (error,) = session.reply(request_).values()
    assert "\n" not in error
    assert re.search(words, error)


def test_a_line_that_is_no_json(session):
    replies = io.StringIO()
    answer_all(session, io.StringIO("hello\n"), replies)
    assert "got 'hello'" in json.loads(replies.getvalue())["error"]


def test_memory_is_that_of_this_process():
    block = np.ones(2**22)  # 32 MiB
    highest, present = memory()
    assert highest >= present > block.nbytes


@pytest.mark.parametrize(
    ("answer", "off"),
    [
        ({"a": np.array([1.0, 2.0])}, 0.0),
        ({"a": np.array([1.0, 1.5])}, 0.25),
        ({"a": np.array([1.0, np.nan])}, np.inf),
    ],
)
def test_largest_difference(answer, off):
    assert largest_difference({}, answer, {"a": np.array([1.0, 2.0])}) == off


@pytest.mark.parametrize("answer", [{"b": np.ones(2)}, {"a": np.ones(3)}])
def test_answers_of_another_kind_are_refused(answer):
    with pytest.raises(ValueError, match=r"answers hold|a is \(3,\) here"):
        largest_difference({}, answer, {"a": np.ones(2)})


def make_motion():
    draw = np.random.default_rng(0).standard_normal((6, 9))
    return {
        "kernel": (draw @ draw.T).reshape(3, 2, 3, 2), "f0": np.zeros((3, 2)),
        "targets": np.eye(2)[[0, 1, 0]], "rate": np.asarray(0.1), "steps": np.asarray(4),
    }  # fmt: skip


def oracle_side(name, *variants, environment=environments.OURS, work="momentum"):
    return Side(name, environment, "oracle", work, variants)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A row of workers that import nothing but NumPy and SciPy."""
    row = Row(
        "motion", "dynamics", "the same steps.", make_motion,
        (
            oracle_side("first", {"factor": 1.0}),
            oracle_side("second", {"factor": 2.0}, {"factor": 1.0}),
            oracle_side("wrong", {"factor": 1.5}),
            oracle_side("refuses", {}),
            oracle_side("absent", {"factor": 1.0}, environment="torch"),
        ),
        tolerance=1e-6, seconds=0.5,
    )  # fmt: skip
    said = []
    bench = Bench(tmp_path_factory.mktemp("cache"), Limits(rounds=(2, 3)), said.append)
    found = json.loads(json.dumps(bench.run(row)))
    return found, said, bench, row


def test_only_right_answers_are_timed(measured):
    result, said, *_ = measured
    sides = {side["side"]: side for side in result["sides"]}
    assert sides["second"]["options"] == {"factor": 1.0}  # the other setting is wrong
    assert "off by" in sides["second"]["tried"][0]["failed"]
    assert 2 <= len(sides["first"]["walls"]) == len(sides["second"]["walls"]) <= 3
    assert "off by" in sides["wrong"]["failed"]
    assert "KeyError" in sides["refuses"]["failed"]
    assert "setup torch" in sides["absent"]["failed"]
    assert all("walls" not in sides[name] for name in ("wrong", "refuses", "absent"))
    assert any("motion: second (factor 1.0)" in line for line in said)


def test_a_second_pass_adds_its_repetitions(measured):
    before, _, bench, row = measured
    result = bench.again(row, before)
    for one, other in zip(before["sides"], result["sides"], strict=True):
        assert one["side"] == other["side"]
        if "walls" not in one:
            assert other == one
            continue
        extra = len(other["walls"]) - len(one["walls"])
        assert 2 <= extra <= 3
        assert other["walls"][:-extra] == one["walls"]
        assert other["wall"] == np.median(other["walls"])
        assert other["peak"] >= one["peak"]
    assert result["seconds"] > before["seconds"]
    assert len(result["load"]) == 4


def test_a_second_pass_leaves_out_what_is_far_and_tells_what_fails(measured, monkeypatch):
    before, _, bench, row = measured
    walls = {"first": [1.0, 1.0], "second": [99.0, 99.0]}
    sides = [one | {"walls": walls[one["side"]], "cpus": [1.0, 1.0]} if "walls" in one else one
             for one in before["sides"]]  # fmt: skip
    result = bench.again(row, before | {"sides": sides})
    assert [len(one.get("walls", ())) > 2 for one in result["sides"][:2]] == [True, False]
    monkeypatch.setattr(bench, "limits", Limits(max_bytes=1, rounds=(2, 3)))
    result = bench.again(row, before)
    assert result["sides"][0]["failed"].startswith("the second time: ")


def test_the_table_tells_what_was_and_what_was_not(measured):
    text = table([measured[0]])
    lines = [line for line in text.splitlines() if line.startswith("| motion")]
    assert [line.split("|")[2].strip() for line in lines] == [
        "first", "second", "wrong", "refuses", "absent",
    ]  # fmt: skip
    assert len({line.count("|") for line in lines}) == 1
    assert "**KeyError" in lines[3]
    assert "the same steps." in text
    assert f"numpy {np.__version__}" in text


def test_a_row_whose_reference_fails_is_told_and_the_next_one_runs(tmp_path):
    sides = (oracle_side("first", {}), oracle_side("second", {"factor": 1.0}))
    row = Row("motion", "dynamics", "the same steps.", make_motion, sides, tolerance=1e-6)
    found = Bench(tmp_path, say=lambda line: None).run(row)
    assert found["sides"][0]["failed"].startswith("KeyError")
    assert found["sides"][1]["failed"].startswith("nothing to hold it against: KeyError")
    assert table([found]).count("**") == 6  # the row's name, and two refusals


def side(name, walls, **more):
    return {
        "side": name, "options": {}, "walls": walls, "cpus": walls, "wall": walls[1],
        "cpu": walls[1], "first": 2.0, "peak": 3 * 2**20, "idle": 2**20, "off": 0.0, **more,
    }  # fmt: skip


def test_ratios_of_the_table_by_hand():
    """Repetition by repetition 1/2, 3/4 and 2/1; any over any 1/4 to 3; and operations' rate."""
    ours = side("jaxttp", [2.0, 4.0, 1.0], operations=100.0)
    result = {
        "row": "r", "group": "g", "same": "s", "sides": [
            ours, side("peer", [1.0, 3.0, 2.0]), side("product", [1.0, 1.0, 1.0], operations=50.0),
        ],
    }  # fmt: skip
    lines = [line for line in table([result]).splitlines() if line.startswith("| r ")]
    assert len(lines) == 2  # the product is no side of its own
    assert lines[0].endswith("|  |  | 2.00 |")  # 4 s for 100 operations at 50 a second
    assert "| 0.75 (0.25 to 3.00) | 0.75 |" in lines[1]
    assert verdicts(result) == ["- **r: peer is ahead, 1.33 times.**"]
    assert verdicts(result | {"why": "So."}) == ["- **r: peer is ahead, 1.33 times.** So."]
    ours["failed"] = "out of memory"
    assert verdicts(result) == []


def test_a_second_run_by_hand():
    """A median within the first run's range, one outside, and what only one run has."""

    def run(*more):
        return {"row": "r", "group": "g", "same": "s", "sides": [side("jaxttp", [1.0, 1.0]), *more]}

    first = run(
        side("near", [1.0, 3.0]), side("far", [1.0, 1.2]), side("gone", [1.0, 1.0]),
        side("beside", [1.0, 1.2]), side("product", [1.0, 1.0]),
    )  # fmt: skip
    second = run(
        side("near", [2.0, 2.0]), side("far", [2.0, 2.0]), side("beside", [1.1, 1.9]),
        side("product", [3.0, 3.0]),
    )  # fmt: skip
    assert confirmed([first], [second]) == [
        "- r, near: 2.00 is within 1.00 to 3.00.", "- r, far: 2.00 is **outside** 1.00 to 1.20.",
        "- r, beside: 1.50 (1.10 to 1.90) overlaps with 1.00 to 1.20.",
    ]  # fmt: skip
    assert confirmed([first], []) == []


class Clock:
    """A worker whose calls take what they are said to."""

    def __init__(self, wall):
        self.wall = wall

    def ask(self, what):
        assert what == "call"
        return {"wall": self.wall, "cpu": self.wall}


def test_repetitions_of_what_is_far_behind(tmp_path):
    """Twice, as all in the first two rounds; the time of the others is theirs."""
    running = {"jaxttp": Clock(1.0), "near": Clock(9.0), "far": Clock(100.0)}
    bench = Bench(tmp_path)
    found = bench._rounds(40.0, {}, running)
    # Ten seconds a round; the fifth would end after the forty.
    assert {name: len(calls) for name, calls in found.items()} == {
        "jaxttp": 4, "near": 4, "far": 2,
    }  # fmt: skip
    short = bench._rounds(0.1, {}, {"jaxttp": Clock(1e-3), "first": Clock(0.02)})
    assert len(short["first"]) == len(short["jaxttp"]) == 4  # no time is lost with these
    slow = bench._rounds(40.0, {}, {"jaxttp": Clock(30.0), "near": Clock(40.0)})
    assert len(slow["near"]) == 2  # the fewest, for up to six times as long
    slower = bench._rounds(40.0, {}, {"jaxttp": Clock(70.0), "near": Clock(90.0)})
    assert len(slower["near"]) == 1


def test_spare_settings_are_tried_where_no_other_does(tmp_path):
    wrong, right = {"factor": 2.0}, {"factor": 1.0}
    spared = Side("spared", environments.OURS, "oracle", "momentum", (wrong, right), ({},))
    helped = Side("helped", environments.OURS, "oracle", "momentum", (wrong,), (right,))
    row = Row(
        "motion", "dynamics", "the same steps.", make_motion,
        (oracle_side("first", right), spared, helped), tolerance=1e-6, seconds=0.1,
    )  # fmt: skip
    found = Bench(tmp_path, Limits(rounds=(2, 2)), lambda line: None).run(row)
    sides = {side["side"]: side for side in found["sides"]}
    assert [one["options"] for one in sides["spared"]["tried"]] == [wrong, right]
    assert [one["options"] for one in sides["helped"]["tried"]] == [wrong, right]
    assert sides["helped"]["options"] == right


def test_what_was_tried(measured):
    (line,) = attempts(measured[0])
    assert line.startswith("- motion, second: factor 2.0: off by")
    assert "; factor 1.0: " in line


def test_workers_that_end(tmp_path):
    """Too slow, too large, and a module that is not there: a line for each."""
    python = Path(sys.executable)
    with (
        Worker(python, "oracle", max_bytes=GIB, timeout=0.01) as worker,
        pytest.raises(WorkerError, match=r"no answer within 0.01 s"),
    ):
        worker.ask("memory")
    assert not worker.alive
    with (
        Worker(python, "oracle", max_bytes=2**20, timeout=60) as worker,
        pytest.raises(WorkerError, match=r"needs more than 0.0 GiB"),
    ):
        [worker.ask("memory") for _ in range(100_000)]
    with (
        Worker(python, "nobody", max_bytes=GIB, timeout=60) as worker,
        pytest.raises(WorkerError, match=r"ended with status 1: .*nobody"),
    ):
        worker.ask("memory")


def test_environments(tmp_path, monkeypatch):
    assert environments.check_names([]) == ["jax", "kfac", "neural-tangents", "torch"]
    with pytest.raises(ValueError, match=r"NAME must be one of jax, .*; got 'tensorflow'"):
        environments.check_names(["tensorflow"])
    assert environments.interpreter("jax", tmp_path) is None
    (tmp_path / "jax").mkdir()
    mark = tmp_path / "jax" / environments.MARK
    mark.write_text((environments.REQUIREMENTS / "jax.txt").read_text())
    assert environments.interpreter("jax", tmp_path) is not None
    mark.write_text("other requirements")
    assert environments.interpreter("jax", tmp_path) is None
    assert environments.cache_folder(tmp_path) == tmp_path.resolve()
    assert environments.cache_folder().name == "jaxttp-peers"
    monkeypatch.setitem(environments.PYTHONS, "jax", ("2.7",))
    monkeypatch.setattr(environments.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"jax needs Python 2.7; none is on the path"):
        environments.make("jax", tmp_path / "empty")
    with pytest.raises(RuntimeError, match="the environment jax could not be made: ERROR: no"):
        environments._run([sys.executable, "-c", "import sys; sys.exit('ERROR: no')"], "jax")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "or say --all"),
        (["run", "kernels", "colonels"], "ROW must be one of .*; got 'colonels'"),
        (["setup", "flax"], "NAME must be one of .*; got 'flax'"),
        (["table", "--results", "nowhere"], "nowhere has no results"),
    ],
)
def test_bad_input_of_the_command(arguments, words, capsys):
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(words, error)


def test_rows_are_whole(capsys):
    """Names are unique, every side's worker has its work, and both presets have the same kinds."""
    for sizes in rows.PRESETS.values():
        made = rows.make_rows(sizes)
        assert len({row.name for row in made}) == len(made)
        for row in made:
            names = [side.name for side in row.sides]
            assert len(set(names)) == len(names)
            assert row.reference is None or row.reference in names
            for one in row.sides:
                folder = Path(environments.__file__).parent / "workers"
                text = (folder / f"{one.module}.py").read_text()
                assert f'"{one.work}": ' in text, (one.module, one.work)
    assert command.main(["list"]) == 0
    assert "kernel-resnet20 (jaxttp, neural-tangents" in capsys.readouterr().out


@pytest.mark.parametrize("network", ["tiny", "digits", "transformer"])
def test_networks_travel_as_arrays(network):
    case = networks.NETWORKS[network](2)
    problem = networks.make_problem(network, 2)
    there = networks.load(problem)
    np.testing.assert_allclose(
        there.apply_fn(there.params, there.x), case.apply_fn(case.params, case.x), atol=1e-6
    )
    assert problems.parameters(network) == sum(
        array.size for name, array in problem.items() if name.startswith(networks.PREFIX)
    )


def test_rows_that_the_time_does_not_suffice_for_are_named(tmp_path, capsys):
    given = ["run", "--all", "--preset", "smoke", "--minutes", "-1", "--results", str(tmp_path)]
    assert command.main([*given, "--cache", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "left: kernel-tiny dynamics-flow" in out
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.slow
def test_our_side_of_rows_without_a_peer(tmp_path, capsys):
    """What needs no other environment, small, through the command, up to the table."""
    results = str(tmp_path / "results")
    wanted = ["kernel-tiny", "condition-linear"]
    cache = ["--cache", str(tmp_path / "none")]
    assert command.main(["run", *wanted, "--preset", "smoke", "--results", results, *cache]) == 0
    for file in Path(results).glob("*.json"):
        found = json.loads(file.read_text())
        sides = found["sides"]
        assert "failed" not in sides[0], sides[0]
        here = [one for one in sides[1:] if "not measured" not in one.get("failed", "")]
        assert all("failed" not in one for one in here), file
    capsys.readouterr()
    assert command.main(["table", "--results", results]) == 0
    text = capsys.readouterr().out
    assert text.count("### ") == 2
    assert "not measured: no environment" in text
