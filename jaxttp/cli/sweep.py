"""`jaxttp sweep`: which learning rate, momentum, batch and schedule, from one kernel."""

import math
from typing import Any

from rich.console import Console

from jaxttp.cli._options import Option, Options, names, numbers, takes, whole_numbers
from jaxttp.cli._shell import figure, say


@takes(
    ("learning_rate", "momentum", "batch_size", "schedule", "weight_decay"),
    ("optimizer", "nesterov", "total_samples", "budget", "verify"),
    learning_rates=Option(
        "Training", "As 0.001,0.01 (default: 16 around the limit, 6 of Adam).", type=str,
        parse=numbers("learning_rates", "0.001,0.01"),
    ),
    algorithms=Option(
        "Training", "Of sgd, nesterov, adam, adamw; the last two for a training each.", "sgd",
        parse=names,
    ),
    momenta=Option(
        "Training", "Of sgd and nesterov, from 0 to below 1.", "0,0.9", parse=numbers("momenta")
    ),
    weight_decays=Option(
        "Training", "As 0,0.01 (default: none, and 0.01 of adamw).", type=str,
        parse=lambda text: numbers("weight_decays")(text) or (),
    ),
    batch_sizes=Option(
        "Training", "As 16,64; 0 stands for all samples.", "0",
        parse=lambda text: whole_numbers("batch_sizes", text, "16,64"),
    ),
    schedules=Option(
        "Training", "Of constant, linear, cosine, warmup_cosine.", "constant", parse=names
    ),
    race=Option(
        "Training", "Train all in rungs, to --target-loss, in place of forecasts.", False,
        flags=("--race",),
    ),
)  # fmt: skip
def sweep(options: Options) -> None:
    """Forecast a grid of settings from one kernel, the leading ones again, and advise a rate."""
    from jaxttp.pipeline import Choices, race_task, sweep_task

    shell, race = options.shell, options["race"]
    with shell.work() as report:
        choices = options.make(
            Choices, batch_sizes=[size or None for size in options["batch_sizes"]]
        )
        if race:
            result: Any = race_task(options.settings(), choices, progress=report)
        else:
            result = sweep_task(
                options.settings(), choices, time_steps=options["seconds"], progress=report
            )
    if race:
        task, ranked = result
        plain = {"task": task.description, "note": task.note} | ranked.to_json()
        files = {"race.png": figure(lambda: ranked.plot(title=task.description))}
        problem = None if ranked.ranking() else f"{ranked.advice}."
        shell.deliver(
            "race", plain, lambda to: say(to, str(task), str(ranked)), files, problem=problem
        )
        return
    files = {"sweep.csv": result.sweep.to_csv, "sweep.png": figure(result.plot)}
    problem = None if result.fastest is not None else f"{result.sweep.hint()}."
    shell.deliver("sweep", result.to_json(), lambda to: _print(to, result), files, problem=problem)


def _print(console: Console, result: Any) -> None:
    limit, note = result.max_learning_rate, None
    if limit < math.inf:
        note = f"largest stable learning rate: {limit:.4g} (no momentum)"
    say(console, str(result.task), str(result.sweep), note)
