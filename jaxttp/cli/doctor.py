"""`jaxttp doctor`: what is installed, what it runs on, and whether it computes what it should."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxttp.cli._options import Given, because, takes
from jaxttp.cli._shell import seconds_text, write_json
from jaxttp.cli._vocabulary import DEVICES, FORECAST, GOALS, TASK, TRAINING

if TYPE_CHECKING:
    from jaxttp._core.machine import Fault, Machine
    from jaxttp.cli.known_answers import Answer


@takes(
    without=because(
        "it examines the machine, not a task", TASK, TRAINING, GOALS, FORECAST, DEVICES, "no_cache"
    )
)
def doctor(given: Given) -> None:
    """Versions, devices, threads; small computations against known answers; what to mend."""
    import time

    from jaxttp._core.machine import Fault, faults, inspect_machine
    from jaxttp.cli.known_answers import KNOWN_ANSWERS

    machine = inspect_machine()
    starts = machine.backend != "none"  # else there is no device whose name could be told
    # the known answers are for what is compiled here and now
    shell = dataclasses.replace(given.shell, verbose=given["verbose"] and starts, cache=False)
    answers: dict[str, Answer] = {}
    seconds: dict[str, float] = {}
    with shell.work() as report:
        wrong = faults(machine)
        if starts:
            for k, (name, ask) in enumerate(KNOWN_ANSWERS.items()):
                report("known answers", k, len(KNOWN_ANSWERS))
                began = time.perf_counter()
                answers[name] = ask()
                seconds[name] = time.perf_counter() - began
    for name, answer in answers.items():
        if not answer.right:
            rounding = f"where rounding explains {answer.tolerance:.0e}"
            off = answer.failure or f"off by {answer.error:.1e}, {rounding}"
            wrong.append(Fault(f"{name}: {off}", answer.remedy))
    plain = _to_json(machine, answers, wrong)
    shell.deliver(
        plain,
        lambda to: _print(to, machine, answers, seconds, wrong),
        lambda folder: _write(plain, folder),
    )
    for problem in wrong:
        words = f"{problem.what}. To mend it: {problem.remedy}."
        print(f"jaxttp: {' '.join(words.split())}", file=sys.stderr)
    if wrong:
        raise typer.Exit(1)


def _to_json(
    machine: "Machine", answers: "dict[str, Answer]", wrong: "list[Fault]"
) -> dict[str, Any]:
    return {
        **dataclasses.asdict(machine),
        "answers": {
            name: {
                "right": answer.right,
                "error": answer.error if math.isfinite(answer.error) else None,
                "tolerance": answer.tolerance,
                "failure": answer.failure,
            }
            for name, answer in answers.items()
        },
        "problems": [problem._asdict() for problem in wrong],
    }


def _write(plain: dict[str, Any], folder: Path) -> list[Path]:
    path = folder / "doctor.json"
    write_json(path, plain)
    return [path]


def _print(
    console: Console,
    machine: "Machine",
    answers: "dict[str, Answer]",
    seconds: dict[str, float],
    wrong: "list[Fault]",
) -> None:
    def say(words: str) -> None:
        console.print(words, soft_wrap=True, markup=False)

    say(", ".join(f"{name} {version}" for name, version in machine.versions.items()))
    say(f"devices: {'; '.join(machine.devices)}")
    say(f"processor: {machine.processor}")
    say(f"cores: {machine.cores} of {machine.cores_there}")
    if machine.memory is not None and machine.memory_there is not None:
        say(f"memory: {machine.memory:.1f} of {machine.memory_there:.1f} GiB free")
    for line in machine.threads:
        say(f"threads: {line}")
    say(f"compiled programs: {machine.programs}")
    for name, value in machine.environment.items():
        say(f"{name}={value}")
    table = Table("known answer")
    for title in ("error", "allowed", "seconds", ""):
        table.add_column(title, justify="right")
    for name, answer in answers.items():
        table.add_row(
            name, f"{answer.error:.1e}", f"{answer.tolerance:.0e}", seconds_text(seconds[name]),
            "right" if answer.right else "WRONG",
        )  # fmt: skip
    console.print(table)
    if not wrong:
        say("all is well")
