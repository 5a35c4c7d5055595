"""How true are forecasts? Predicted against real training times on the main job.

    python -m experiments.bench.accuracy [--preset smoke|cpu] [--relinearize K] [--output FILE]

For every seed (samples, fresh head) and learning rate (as eta lambda_max / N, lambda_max the
largest eigenvalue of Theta), the forecast and the real fine-tuning of `jaxttp predict --verify`,
read at every threshold. Nothing is tuned here: the forecast has no constants.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxttp import empirical_ntk
from jaxttp.pipeline import Settings, build_task, forecast


@dataclasses.dataclass(frozen=True)
class AccuracySettings:
    """What to measure."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    rates: tuple[float, ...] = (0.3, 1.0, 3.0)
    samples_per_class: int = 30
    steps: int = 150
    relinearize: int = 0


PRESETS = {
    "smoke": AccuracySettings(seeds=(0,), rates=(1.0,), samples_per_class=4, steps=12),
    "cpu": AccuracySettings(),
}


def run(settings: AccuracySettings) -> list[dict[str, Any]]:
    """One row for every seed and rate: predicted and real training times, losses, seconds."""
    rows = []
    for seed in settings.seeds:
        base = Settings(
            samples_per_class=settings.samples_per_class,
            steps=settings.steps,
            relinearize=settings.relinearize,
            seed=seed,
        )
        task = build_task(base)
        kernel = empirical_ntk(*task.model, task.x)
        matrix = np.asarray(kernel, np.float64).reshape(kernel.shape[0] * kernel.shape[1], -1)
        largest = np.linalg.eigvalsh(matrix)[-1] / len(task.x)
        for rate in settings.rates:
            result = forecast(
                dataclasses.replace(base, learning_rate=float(rate / largest)), verify=True
            )
            assert result.run is not None
            assert result.real_steps is not None
            predicted, real = np.asarray(result.prediction.loss), np.asarray(result.run.loss)
            row = {
                "seed": seed,
                "rate": rate,
                "learning_rate": rate / largest,
                "predicted": list(result.prediction.steps.values()),
                "real": list(result.real_steps.values()),
                "thresholds": list(result.prediction.steps),
                "curve_error": float(np.mean(np.abs(predicted - real)) / (real[0] - real[-1])),
                "final_loss": [float(predicted[-1]), float(real[-1])],
                "forecast_seconds": result.prediction.cost.seconds,
                "training_seconds": result.run.seconds,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def table(rows: list[dict[str, Any]], steps: int) -> str:
    """The rows as Markdown, with the share of readings within 13 % of the horizon."""
    lines = [
        "| seed | η λmax/N | predicted (1, 10, 40 %) | real | largest error | final loss |",
        "|---|---|---|---|---|---|",
    ]
    errors = []
    for row in rows:
        error = np.abs(np.subtract(row["predicted"], row["real"]))
        errors.append(error)
        words = [", ".join(map(str, row[name])) for name in ("predicted", "real")]
        losses = " / ".join(f"{loss:.3f}" for loss in row["final_loss"])
        cells = [row["seed"], f"{row['rate']:g}", *words, error.max(), losses]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    every = np.stack(errors)
    real = np.stack([row["real"] for row in rows])
    share = np.mean(every <= 0.13 * steps)
    true_share = np.mean(every <= np.maximum(0.13 * real, 2))
    lines += [
        "",
        f"{every.size} readings: {100 * share:.0f} % within 13 % of the horizon T = {steps}, "
        f"{100 * true_share:.0f} % within 13 % of the true time (or 2 steps); "
        f"mean error {every.mean():.1f} steps, largest {every.max()}.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--relinearize", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    settings = dataclasses.replace(PRESETS[arguments.preset], relinearize=arguments.relinearize)
    rows = run(settings)
    print(table(rows, settings.steps))
    if arguments.output is not None:
        text = json.dumps({"settings": dataclasses.asdict(settings), "rows": rows}, indent=1)
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
