"""From 250 samples to 1,000: how far off is a forecast from a quarter of the data?

    python -m experiments.bench.extrapolation [--preset smoke|cpu] [--store FILE]

Squared error, full batches, eta lambda_max / N = 1 by the subset. Against the extrapolation stand
the linearised network on all samples (trained in weight space, so that no kernel of all samples is
needed), which it is meant to foresee, and the real training. At long horizons the goals are 10, 3
and 2 % of the initial loss.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from experiments.bench.accuracy_tasks import Job, digits
from jaxttp import empirical_ntk, extrapolate, from_nnx, train, training_time
from jaxttp.data import select
from jaxttp.dynamics import weight_space
from jaxttp.models import MLP, fresh_head, load_pretrained

THRESHOLDS = (0.01, 0.1, 0.4)
SHARES = (0.1, 0.03, 0.02)


@dataclasses.dataclass(frozen=True)
class ExtrapolationSettings:
    """What to measure: (network, seed, horizon) each."""

    runs: tuple[tuple[str, int, int], ...] = (
        ("tanh MLP", 0, 150),
        ("tanh MLP", 1, 150),
        ("deep MLP", 2, 150),
        ("ResNet", 0, 150),
        ("tanh MLP", 0, 3000),
        ("deep MLP", 2, 3000),
    )
    subset: int = 250
    per_class: int = 100
    rate: float = 1.0


PRESETS = {
    "smoke": ExtrapolationSettings(runs=(("tanh MLP", 0, 10),), subset=20, per_class=4),
    "cpu": ExtrapolationSettings(),
}  # fmt: skip


def make(network: str, seed: int, per_class: int) -> Job:
    """Ten digits for the MLPs; for the ResNet, pre-trained on 0 to 4, all it has of 5 to 9."""
    samples_key, weights_key = jax.random.split(jax.random.key(300 + seed))
    if network == "ResNet":
        data = select(digits(), classes=range(5, 10), per_class=None, key=samples_key)
        module: Any = fresh_head(load_pretrained(), 5, key=weights_key)
    else:
        data = select(digits(), per_class=per_class, key=samples_key)
        sizes = (64, 128, 128, 128, 10) if network == "deep MLP" else (64, 128, 10)
        activation = "relu" if network == "deep MLP" else "tanh"
        module = MLP(sizes, rngs=nnx.Rngs(params=weights_key), activation=activation)
    return Job(from_nnx(module), data.x, data.y)


def measure(
    network: str, seed: int, horizon: int, settings: ExtrapolationSettings
) -> dict[str, Any]:
    """Training times of the extrapolation, the linearised network and the real one."""
    job = make(network, seed, settings.per_class)
    subset = min(settings.subset, len(job.x) // 3)
    some = np.random.default_rng(seed).permutation(len(job.x))[:100]
    kernel = np.asarray(empirical_ntk(*job.model, job.x[some]), np.float64)
    size = kernel.shape[0] * kernel.shape[1]
    eta = settings.rate * len(some) / float(np.linalg.eigvalsh(kernel.reshape(size, size))[-1])
    found = extrapolate(
        *job.model, job.x, job.y, learning_rate=eta, subset=subset, key=jax.random.key(seed),
        steps=horizon,
    )  # fmt: skip
    common: dict[str, Any] = {
        "loss": "squared_error", "optimizer": optax.sgd(eta), "steps": horizon
    }  # fmt: skip
    real = np.asarray(train(*job.model, job.x, job.y, **common).loss, np.float64)
    path = weight_space(*job.model, job.x, job.y, **common).train
    targets = np.eye(path.shape[-1])[np.asarray(job.y)]
    linear = 0.5 * np.sum((np.asarray(path) - targets[None]) ** 2, axis=2).mean(axis=1)
    curves = {"extrapolated": found.loss, "linearised": linear, "real": real}
    out: dict[str, Any] = {
        "name": f"{network}, seed {seed}, T = {horizon}",
        "horizon": horizon,
        "samples": f"{subset} to {len(job.x)}",
        "message": "" if found.spectrum is None else found.spectrum.message,
    }
    for name, curve in curves.items():
        out[name] = {
            "relative": [int(training_time(curve, e)) for e in THRESHOLDS],
            "absolute": [
                int(training_time(curve, share * curve[0], rule="absolute")) for share in SHARES
            ],
            "final": float(curve[-1] / curve[0]),
        }
    return out


def table(rows: list[dict[str, Any]]) -> str:
    """All runs."""
    lines = [
        "| network | samples | goals | extrapolated | linearised, all samples | real | final loss "
        "/ L_0 (extrapolated, linearised, real) |",
        "|" + "---|" * 7,
    ]
    names = ("extrapolated", "linearised", "real")
    for row in rows:
        final = ", ".join(f"{row[name]['final']:.3f}" for name in names)
        goals = {"relative": "1, 10, 40 % of the drop", "absolute": "10, 3, 2 % of L_0"}
        for rule, text in goals.items():
            if (rule == "absolute") != (row["horizon"] > 500):
                continue
            cells = [
                ", ".join(str(t) if t >= 0 else "-" for t in row[name][rule]) for name in names
            ]
            lines.append(
                "| " + " | ".join([row["name"], row["samples"], text, *cells, final]) + " |"
            )
    return "\n".join(lines)


def run_all(settings: ExtrapolationSettings, store: Path) -> list[dict[str, Any]]:
    """Measure what the store does not have yet; returns all its rows."""
    rows = [json.loads(line) for line in store.read_text().splitlines()] if store.exists() else []
    known = {row["name"] for row in rows}
    for network, seed, horizon in settings.runs:
        if f"{network}, seed {seed}, T = {horizon}" in known:
            continue
        rows.append(measure(network, seed, horizon, settings))
        with store.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--store", type=Path, help="a file of JSON lines (default: by preset)")
    arguments = parser.parse_args()
    store = arguments.store or Path(f"extrapolation-{arguments.preset}.jsonl")
    print(table(run_all(PRESETS[arguments.preset], store)))


if __name__ == "__main__":
    main()
