"""From 250 samples to 1,000: how far off is a forecast from a quarter of the data?

    python -m experiments.bench.extrapolation [--preset smoke|cpu] [--store FILE] [--subsets|--real]

Squared error, full batches, eta lambda_max / N = 1 by 100 samples. Against the extrapolations stand
the linearised network on all samples, which they are meant to foresee (an MLP is trained in weight
space, so that no kernel of all samples is needed), and the real training. At long horizons the
goals are 10, 3 and 2 % of the initial loss. A run that was stopped goes on. `--subsets` repeats the
long runs' extrapolations (nothing else) from disjoint subsets: what the draw of a subset does.
`--real` forecasts nothing: real trainings of subsets and of their halves go through the law of
`total_samples`, which is the most that a forecast from these samples could know of it.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from experiments.bench.accuracy_tasks import Job, digits
from experiments.bench.stored import go_on
from jaxttp import (
    empirical_ntk,
    extrapolate,
    from_nnx,
    predict_training_time,
    train,
    training_time,
)
from jaxttp.data import select
from jaxttp.dynamics import weight_space
from jaxttp.forecast import Hyperparameters, extrapolate_spectrum, mode_curve
from jaxttp.forecast.scaling import time_scale
from jaxttp.models import MLP, fresh_head, load_pretrained

THRESHOLDS = (0.01, 0.1, 0.4)
SHARES = (0.1, 0.03, 0.02)
LONG = 500
"""Steps from which on a run is a long one."""
NAMES = ("subset", "power law", "resolvent", "linearised", "real")
"""Curves: the subset's own, both methods of `extrapolate`, and what happens on all samples."""


@dataclasses.dataclass(frozen=True)
class ExtrapolationSettings:
    """What to measure: (network, seed, horizon, momentum) each."""

    runs: tuple[tuple[str, int, int, float], ...] = (
        ("tanh MLP", 0, 150, 0.0),
        ("tanh MLP", 1, 150, 0.0),
        ("deep MLP", 2, 150, 0.0),
        ("ResNet", 0, 150, 0.0),
        ("ResNet", 0, 600, 0.0),
        ("ResNet", 1, 600, 0.0),
        ("tanh MLP", 0, 3000, 0.0),
        ("deep MLP", 2, 3000, 0.0),
        ("tanh MLP", 0, 6000, 0.95),
        ("deep MLP", 2, 6000, 0.95),
    )
    subset: int = 250
    per_class: int = 100
    rate: float = 1.0


PRESETS = {
    "smoke": ExtrapolationSettings(runs=(("tanh MLP", 0, 10, 0.0),), subset=20, per_class=4),
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


def name_of(network: str, seed: int, horizon: int, momentum: float) -> str:
    """What a run is kept under."""
    return f"{network}, seed {seed}, T = {horizon}" + (f", m = {momentum:g}" if momentum else "")


def measure(
    network: str, seed: int, horizon: int, momentum: float, settings: ExtrapolationSettings
) -> dict[str, Any]:
    """Training times of the extrapolations, the linearised network and the real one."""
    begun = time.perf_counter()

    def report(stage: str) -> None:
        print(f"  {network}, {seed}: {stage}, {time.perf_counter() - begun:.0f} s", flush=True)

    job = make(network, seed, settings.per_class)
    subset = min(settings.subset, len(job.x) // 3)
    eta = _rate(job, seed, settings)
    key = jax.random.key(seed)
    options: dict[str, Any] = {
        "learning_rate": eta, "momentum": momentum, "steps": horizon, "loss": "squared_error",
    }  # fmt: skip
    curves, spreads, messages = {}, {}, {}
    for method in ("power_law", "resolvent"):
        name = method.replace("_", " ")
        report(name)
        begin = time.perf_counter()
        found = extrapolate(
            *job.model, job.x, job.y, subset=subset, key=key, method=method, **options
        )
        curves[name] = found.loss
        spreads[name] = {
            "steps": list(found.spread.values()), "seconds": time.perf_counter() - begin
        }  # fmt: skip
        messages[name] = "" if found.spectrum is None else found.spectrum.message
    chosen = np.asarray(jax.random.permutation(jax.random.split(key, 9)[0], len(job.x)))[:subset]
    part = Job(job.model, job.x[chosen], job.y[chosen])
    report("subset")
    one: dict[str, Any] = options | {"relinearize": 0}
    curves["subset"] = predict_training_time(*part.model, part.x, part.y, **one).loss
    report("linearised network")
    common: dict[str, Any] = {
        "loss": "squared_error", "optimizer": optax.sgd(eta, momentum or None), "steps": horizon
    }  # fmt: skip
    if network == "ResNet":  # a convolution in a scan over steps is slow on CPUs
        curves["linearised"] = predict_training_time(*job.model, job.x, job.y, **one).loss
    else:
        path = np.array(weight_space(*job.model, job.x, job.y, **common).train)
        path[..., np.arange(len(job.y)), job.y] -= 1.0
        curves["linearised"] = 0.5 * np.sum(path**2, axis=2).mean(axis=1)
    report("real training")
    curves["real"] = train(*job.model, job.x, job.y, **common).loss
    out: dict[str, Any] = {
        "name": name_of(network, seed, horizon, momentum),
        "horizon": horizon,
        "samples": f"{subset} to {len(job.x)}",
        "spread": spreads,
        "message": messages,
        "seconds": time.perf_counter() - begun,
    }
    for name in NAMES:
        curve = np.asarray(curves[name], np.float64)
        out[name] = {
            "relative": [int(training_time(curve, e)) for e in THRESHOLDS],
            "absolute": _to_shares(curve),
            "final": float(curve[-1] / curve[0]),
        }
    return out


def _rate(job: Job, seed: int, settings: ExtrapolationSettings) -> float:
    some = np.random.default_rng(seed).permutation(len(job.x))[:100]
    kernel = np.asarray(empirical_ntk(*job.model, job.x[some]), np.float64)
    size = kernel.shape[0] * kernel.shape[1]
    return settings.rate * len(some) / float(np.linalg.eigvalsh(kernel.reshape(size, size))[-1])


def subsets(settings: ExtrapolationSettings) -> Iterator[str]:
    """A line for every long run: steps by the resolvent from each of several disjoint subsets."""
    longest = max(horizon for _, _, horizon, _ in settings.runs)
    for network, seed, horizon, momentum in settings.runs:
        if horizon < longest:
            continue
        job = make(network, seed, settings.per_class)
        eta = _rate(job, seed, settings)
        setting = Hyperparameters(eta, momentum, loss="squared_error", steps=horizon)
        f0 = np.asarray(job.model.apply_fn(job.model.params, job.x), np.float64)
        residual = f0 - np.eye(f0.shape[1])[job.y]
        size = float(np.sum(residual**2)) / len(job.x)
        order = np.random.default_rng(7).permutation(len(job.x))
        count = len(job.x) // max(1, min(settings.subset, len(job.x) // 3))
        times = []
        for rows in np.array_split(order, count):
            kernel = np.asarray(empirical_ntk(*job.model, job.x[rows]))
            found = extrapolate_spectrum(kernel, residual[rows], samples=len(job.x), size=size)
            path, _ = mode_curve(found.values, found.residual, setting)
            times.append(_to_shares(path))
        columns = [_words(column) for column in zip(*times, strict=True)]
        yield f"| {name_of(network, seed, horizon, momentum)} | {' | '.join(columns)} |"


def laws(settings: ExtrapolationSettings, draws: int = 3) -> Iterator[str]:
    """A line for every run of MLPs over 500 steps: the law on real curves of subsets."""
    for network, seed, horizon, momentum in settings.runs:
        if network == "ResNet" or horizon < LONG:
            continue
        job = make(network, seed, settings.per_class)
        go = functools.partial(_real, job, _rate(job, seed, settings), momentum, horizon)
        count = len(job.x)
        found, subset = [_read(go(np.arange(count)))], min(settings.subset, count // 3)
        for size in (subset, 2 * subset):
            for draw in range(draws):
                rows = np.random.default_rng(draw).permutation(count)[:size]
                parts = np.array_split(rows, 2)
                whole, halves = go(rows), np.stack([go(part) for part in parts])
                scale = time_scale(whole, halves, count / size)
                found += [_read(whole), _read(scale.of(whole))]
        yield f"| {name_of(network, seed, horizon, momentum)} | {' | '.join(found)} |"


def _real(job: Job, eta: float, momentum: float, steps: int, rows: np.ndarray) -> np.ndarray:
    found = train(
        *job.model, job.x[rows], job.y[rows], loss="squared_error",
        optimizer=optax.sgd(eta, momentum or None), steps=steps,
    )  # fmt: skip
    return np.asarray(found.loss, np.float64)


def _read(curve: np.ndarray) -> str:
    return _words(_to_shares(curve))


def _to_shares(curve: np.ndarray) -> list[int]:
    return [int(training_time(curve, share * curve[0], rule="absolute")) for share in SHARES]


def _words(times: Iterable[int]) -> str:
    return ", ".join(str(time) if time >= 0 else "-" for time in times)


def table(rows: list[dict[str, Any]]) -> str:
    """All runs."""
    lines = [
        "| network | samples | goals | " + " | ".join(NAMES) + " | final loss / L_0 |",
        "|" + "---|" * (len(NAMES) + 4),
    ]
    goals = {"relative": "1, 10, 40 % of the drop", "absolute": "10, 3, 2 % of L_0"}
    for row in rows:
        rule = "absolute" if row["horizon"] > LONG else "relative"
        final = ", ".join(f"{row[name]['final']:.3f}" for name in NAMES)
        cells = [_words(row[name][rule]) for name in NAMES]
        lines.append(
            "| " + " | ".join([row["name"], row["samples"], goals[rule], *cells, final]) + " |"
        )
    return "\n".join(lines)


def run_all(settings: ExtrapolationSettings, store: Path) -> list[dict[str, Any]]:
    """Measure what the store does not have yet; returns all its rows."""
    jobs = ((name_of(*one), functools.partial(measure, *one, settings)) for one in settings.runs)
    return go_on(store, jobs)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--store", type=Path, help="a file of JSON lines (default: by preset)")
    parser.add_argument("--subsets", action="store_true", help="what the draw of a subset does")
    parser.add_argument("--real", action="store_true", help="the law on real curves of subsets")
    arguments = parser.parse_args()
    if arguments.subsets or arguments.real:
        for line in (subsets if arguments.subsets else laws)(PRESETS[arguments.preset]):
            print(line, flush=True)
        return
    store = arguments.store or Path(f"extrapolation-{arguments.preset}.jsonl")
    print(table(run_all(PRESETS[arguments.preset], store)))


if __name__ == "__main__":
    main()
