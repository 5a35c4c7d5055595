"""One row: the answers of all sides held against each other, then their clocks, in turn."""

import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.peers.environments import OURS, interpreter
from experiments.bench.peers.protocol import Options, Problem, read_problem
from experiments.bench.peers.worker import GIB, Worker, WorkerError

Result = dict[str, Any]

PATIENCE, SLOWER = 60.0, 4.0
"""A setting is given up after so many seconds, and so many times those of the best before it."""
FAR, LONG, SEEN = 10.0, 5.0, 2
"""A side that takes so many times as long as the fastest, and so many seconds, is repeated so often
and no more."""


@dataclasses.dataclass(frozen=True)
class Side:
    """Who does a row's work, and how.

    Attributes:
        name: in the table.
        environment: "ours", or of the peer.
        module: the worker, below `experiments.bench.peers.workers`.
        work: one of its WORKS.
        variants: options to try; the one that is fastest of those which are right is measured.
        spare: more of them, tried where none of those is right.
        timed: False for an oracle, which is only asked.
    """

    name: str
    environment: str
    module: str
    work: str
    variants: tuple[Options, ...] = ({},)
    spare: tuple[Options, ...] = ()
    timed: bool = True


@dataclasses.dataclass(frozen=True)
class Row:
    """The same work for several sides.

    Attributes:
        name: of the row.
        group: rows of a group make one table.
        same: what is the same work, and what a user should know about who does what.
        problem: makes weights and data, as arrays by name.
        sides: the first is ours.
        tolerance: how far answers may be off, by `judge`.
        reference: the side whose answer is right; the first where none is named.
        judge: (problem, answer, reference's answer) -> how far off.
        seconds: of repetitions, for all sides together, in both passes.
        why: where a peer may be ahead, the reason.
    """

    name: str
    group: str
    same: str
    problem: Callable[[], Problem]
    sides: tuple[Side, ...]
    tolerance: float
    reference: str | None = None
    judge: Callable[[Problem, Problem, Problem], float] | None = None
    seconds: float = 40.0
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a run may take.

    Attributes:
        max_bytes: resident memory of one worker.
        timeout: seconds of one answer.
        rounds: (fewest, most) repetitions of a pass; the fewest are made unless one takes too long.
    """

    max_bytes: int = 8 * GIB
    timeout: float = 150.0
    rounds: tuple[int, int] = (2, 8)


def largest_difference(_: Problem, answer: Problem, reference: Problem) -> float:
    """The largest difference of two answers, as a share of the largest number; arrays by name."""
    if answer.keys() != reference.keys():
        raise ValueError(f"answers hold {sorted(answer)} and {sorted(reference)}")
    worst = 0.0
    for name, found in answer.items():
        wanted = reference[name]
        if found.shape != wanted.shape:
            raise ValueError(f"{name} is {found.shape} here and {wanted.shape} there")
        off = np.max(np.abs(found.astype(float) - wanted)) / max(np.max(np.abs(wanted)), 1e-300)
        worst = max(worst, float(off) if np.isfinite(off) else float("inf"))
    return worst


class Bench:
    """Runs rows.

    Args:
        cache: folder of the environments.
        limits: what a row may take.
        say: told what is happening, a line at a time.
    """

    def __init__(
        self, cache: Path, limits: Limits | None = None, say: Callable[[str], None] = print
    ):
        self.cache, self.limits, self.say = cache, limits or Limits(), say

    def run(self, row: Row) -> Result:
        """Everything about a row, as JSON can hold it."""
        begun, load = time.perf_counter(), os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            problem = row.problem()
            np.savez(folder / "problem.npz", **problem)
            sides = self._chosen(row, problem, folder)
            self._timed(row, problem, sides, folder)
        seconds = time.perf_counter() - begun
        for side in sides.values():
            if "wall" in side or "failed" in side:
                self.say(f"{row.name}: {side['side']}: {side.get('failed') or _said(side)}")
        self.say(f"{row.name}: {seconds:.0f} s")
        return {
            "row": row.name, "group": row.group, "same": row.same, "tolerance": row.tolerance,
            "why": row.why,
            "sides": list(sides.values()), "seconds": seconds, "load": [load, os.getloadavg()[0]],
        }  # fmt: skip

    def again(self, row: Row, result: Result) -> Result:
        """A second pass: the clocks of the sides that were measured, in processes of their own.

        One process can be faster than the next by more than its repetitions differ, and a machine
        half an hour later; so ranges are of both passes. What is far behind is not asked again.

        Args:
            row: that was run.
            result: of `run`.

        Returns:
            The result with the repetitions of both.
        """
        begun, load = time.perf_counter(), os.getloadavg()[0]
        sides = {side["side"]: dict(side) for side in result["sides"]}
        with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
            folder = Path(place)
            np.savez(folder / "problem.npz", **row.problem())
            first = {name: one["walls"] for name, one in sides.items() if "walls" in one}
            running: dict[str, Worker] = {}
            for side in row.sides:
                if side.name not in first or _is_far(side.name, first):
                    continue
                try:
                    worker = stack.enter_context(self._worker(side))
                    self._once(side, sides[side.name]["options"], folder, worker)
                    running[side.name] = worker
                except WorkerError as reason:
                    sides[side.name]["failed"] = f"the second time: {reason}"
            rounds = self._rounds(row.seconds / 2, sides, running)
            for name, worker in running.items():
                entry = sides[name]
                both = zip(entry["walls"], entry["cpus"], strict=True)
                calls = [{"wall": wall, "cpu": cpu} for wall, cpu in both] + rounds[name]
                peak = max(entry["peak"], worker.ask("memory")["peak"])
                sides[name] |= {**_medians(calls), "peak": peak}
        seconds = time.perf_counter() - begun
        self.say(f"{row.name} again: {seconds:.0f} s")
        return result | {
            "sides": list(sides.values()), "seconds": result["seconds"] + seconds,
            "load": [*result["load"], load, os.getloadavg()[0]],
        }  # fmt: skip

    def _worker(self, side: Side) -> Worker:
        python = interpreter(side.environment, self.cache)
        if python is None:
            raise WorkerError(
                f"not measured: no environment (python -m experiments.bench.peers setup "
                f"{side.environment})"
            )
        limits = self.limits
        return Worker(python, side.module, max_bytes=limits.max_bytes, timeout=limits.timeout)

    def _once(
        self, side: Side, options: Options, folder: Path, worker: Worker
    ) -> tuple[Result, Problem]:
        """Prepare one variant and call it once: what it took, and its answer."""
        ready = worker.ask(
            "prepare", work=side.work, problem=str(folder / "problem.npz"), options=dict(options)
        )
        first = worker.ask("call")
        worker.ask("answer", file=str(folder / "answer.npz"))
        found = {"first": first["wall"], "prepare": ready["seconds"], "versions": ready["versions"]}
        return found, read_problem(str(folder / "answer.npz"))

    def _chosen(self, row: Row, problem: Problem, folder: Path) -> dict[str, Result]:
        """What to measure of every side, with what was tried; the reference first."""
        reference = row.reference or row.sides[0].name
        order = sorted(row.sides, key=lambda side: side.name != reference)
        sides: dict[str, Result] = {side.name: {"side": side.name} for side in row.sides}
        for side in order:
            entry = sides[side.name]
            entry["ours"] = side.environment == OURS and side is row.sides[0]
            if len(side.variants) == 1 and not side.spare and side.name != reference:
                entry["options"] = dict(side.variants[0])
                continue
            tried = self._tried(row, side, problem, folder)
            entry["tried"] = tried
            right = [one for one in tried if "failed" not in one]
            if right:
                entry["options"] = min(right, key=lambda one: one["wall"])["options"]
            else:
                entry["failed"] = tried[-1]["failed"]
            if side.name == reference and not right:
                for other in sides.values():
                    other.setdefault("failed", f"nothing to hold it against: {entry['failed']}")
                break
        return sides

    def _tried(self, row: Row, side: Side, problem: Problem, folder: Path) -> list[Result]:
        """Every variant: right or not, and the seconds of a second call; one process for all.

        What takes several times as long as the best before it is given up.
        """
        out: list[Result] = []
        worker: Worker | None = None
        try:
            for place, options in enumerate((*side.variants, *side.spare)):
                if place >= len(side.variants) and any("failed" not in one for one in out):
                    break
                found: Result = {"options": dict(options)}
                try:
                    worker = worker or self._worker(side)
                    best = min([one["first"] for one in out if "failed" not in one], default=None)
                    if best is not None:
                        worker.timeout = min(self.limits.timeout, max(PATIENCE, SLOWER * best))
                    found |= self._try(row, side, options, problem, folder, worker)
                except WorkerError as reason:
                    found["failed"] = str(reason)
                    if worker is not None and not worker.alive:
                        worker.close()
                        worker = None
                out.append(found)
                text = found.get("failed") or f"{found['wall']:.3g} s, off by {found['off']:.1e}"
                self.say(f"  {row.name}: {side.name} ({described(options)}): {text}")
        finally:
            if worker is not None:
                worker.close()
        return out

    def _try(
        self, row: Row, side: Side, options: Options, problem: Problem, folder: Path, worker: Worker
    ) -> Result:
        first, answer = self._once(side, options, folder, worker)
        reference = folder / "reference.npz"
        if not reference.exists():
            np.savez(reference, **answer)
        found = {"first": first["first"], **self._judged(row, problem, answer, folder)}
        found["wall"] = first["first"]
        if "failed" not in found and side.timed:
            found["wall"] = worker.ask("call")["wall"]
        return found

    def _judged(self, row: Row, problem: Problem, answer: Problem, folder: Path) -> Result:
        judge = row.judge or largest_difference
        try:
            off = judge(problem, answer, read_problem(str(folder / "reference.npz")))
        except ValueError as reason:
            return {"off": None, "failed": f"another answer: {reason}"}
        if not off <= row.tolerance:
            return {"off": off, "failed": f"off by {off:.1e}, more than {row.tolerance:.0e}"}
        return {"off": off}

    def _timed(self, row: Row, problem: Problem, sides: Mapping[str, Result], folder: Path) -> None:
        """Start every side that can, check once more what it answers, and time all in turn."""
        with contextlib.ExitStack() as stack:
            running: dict[str, Worker] = {}
            for side in row.sides:
                entry = sides[side.name]
                if not side.timed or "failed" in entry:
                    continue
                try:
                    worker = stack.enter_context(self._worker(side))
                    found, answer = self._once(side, entry["options"], folder, worker)
                    entry |= found
                    if answer:
                        entry |= self._judged(row, problem, answer, folder)
                    entry |= worker.ask("count")
                except WorkerError as reason:
                    entry["failed"] = str(reason)
                if "failed" not in entry:
                    running[side.name] = worker
            rounds = self._rounds(row.seconds / 2, sides, running)
            for name, worker in running.items():
                if "failed" not in sides[name]:
                    sides[name] |= {**worker.ask("memory"), **_medians(rounds[name])}

    def _rounds(
        self, seconds: float, sides: Mapping[str, Result], running: dict[str, Worker]
    ) -> dict[str, list[Result]]:
        """Repetitions in turn until the time is over, of those that are far behind only the first.

        All others have the same number, and the clock is theirs alone.
        """
        fewest, most = self.limits.rounds
        found: dict[str, list[Result]] = {name: [] for name in running}

        def is_far(name: str) -> bool:
            return _is_far(name, {n: [one["wall"] for one in c] for n, c in found.items() if c})

        spent = longest = 0.0
        for done in range(most):
            if done and spent + longest > (seconds if done >= fewest else 6 * seconds):
                break
            for name, worker in list(running.items()):
                if done >= SEEN and is_far(name):
                    continue
                try:
                    found[name].append(worker.ask("call"))
                except WorkerError as problem:
                    sides[name]["failed"] = str(problem)
                    del running[name]
            one = sum(found[name][-1]["wall"] for name in running if not is_far(name))
            spent, longest = spent + one, max(longest, one)
        return found


def _is_far(name: str, walls: Mapping[str, Sequence[float]]) -> bool:
    """Whether a side's first repetition was `FAR` behind the fastest's, and `LONG`."""
    best = min(calls[0] for calls in walls.values())
    return walls[name][0] > max(FAR * best, LONG)


def _medians(calls: Sequence[Result]) -> Result:
    walls, cpus = ([call[key] for call in calls] for key in ("wall", "cpu"))
    return {
        "walls": walls, "cpus": cpus, "wall": statistics.median(walls),
        "cpu": statistics.median(cpus),
    }  # fmt: skip


def _said(side: Result) -> str:
    return f"{side['wall']:.3g} s of {len(side['walls'])}, CPU {side['cpu']:.3g} s"


def described(options: Options) -> str:
    """Options in a cell of a table."""
    return ", ".join(f"{name} {value}" for name, value in options.items())
