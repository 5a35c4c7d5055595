"""Where a forecast pays: its seconds against those of the training, by network, data and horizon.

Every case is a network of 1e4 to 1e7 weights with 2 to 100 outputs, some samples, batches, an
optimizer and a horizon. The forecast is the default one, made twice: what the second call takes is
without compilation. Trainings that would take longer than `longest` are not run: their seconds are
those of one step times the horizon, and the forecast's error is not known.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

from experiments import cuts
from experiments.store import Pieces, runner
from experiments.training_time.comparison import COLORS
from jaxttp import from_nnx, predict_training_time, time_step, train
from jaxttp.data import load_dataset, select
from jaxttp.models import MLP, calibrate_batch_norm, fresh_head, load_pretrained, make_model
from jaxttp.ntk import ClassSketched
from jaxttp.plots import tidy

CLAIM = {
    "ours-price": "A forecast pays where kernels times outputs are few against epochs. (ours)",
}
HEAD = jax.random.key(3)
THRESHOLDS = (0.01, 0.1, 0.4)


@dataclasses.dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        network: "MLP 64", "MLP 512", a shipped network or a name of `jaxttp.models.make_model`.
        pixels: side of the images.
        classes: C.
        samples: N.
        steps: T.
        batch_size: B; None for all samples.
        optimizer: "sgd", "momentum" or "adamw".
        total: samples of the training where the forecast sees N of them; None for N.
    """

    network: str
    pixels: int
    classes: int
    samples: int
    steps: int = cuts.one(150)
    batch_size: int | None = None
    optimizer: str = "sgd"
    total: int | None = None

    @property
    def epochs(self) -> float:
        """Passes of the training over the samples that the forecast sees."""
        return self.steps * (self.batch_size or self.total or self.samples) / self.samples

    def __str__(self) -> str:
        batches = "full batches" if self.batch_size is None else f"batches of {self.batch_size}"
        of = "" if self.total is None else f" of {self.total}"
        return (
            f"{self.network}, {self.pixels} px, C = {self.classes}, N = {self.samples}{of}, "
            f"{self.optimizer}, {batches}, T = {self.steps}"
        )


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        cases: the trainings.
        longest: seconds of the longest training that is run.
    """

    cases: tuple[Case, ...] = cuts.each()
    longest: float = 60.0


PRESETS = {
    "smoke": Settings((Case("MLP 64", 8, 2, 12, 20),)),
    "cpu": Settings((
        Case("MLP 64", 8, 10, 150, 150),
        Case("MLP 64", 8, 10, 500, 600, 32, "momentum"),
        Case("MLP 64", 8, 2, 500, 5000, 32),
        Case("MLP 64", 8, 10, 150, 600, None, "adamw"),
        Case("MLP 512", 16, 10, 200, 300, None, "momentum"),
        Case("MLP 512", 16, 10, 1000, 2000, 64),
        Case("MLP 512", 16, 100, 200, 1000, 32),
        Case("digits-resnet", 8, 5, 150, 150),
        Case("digits-resnet", 8, 5, 150, 600),
        Case("digits-resnet", 8, 5, 150, 600, 32, "momentum"),
        Case("digits-resnet", 8, 5, 150, 600, None, "adamw"),
        Case("digits-resnet-32", 32, 5, 150, 400),
        Case("digits-resnet-32", 32, 2, 150, 800),
        Case("digits-resnet-32", 32, 2, 150, 600, 32, "momentum"),
        Case("digits-resnet-32", 32, 5, 150, 600, 32, total=800),
        Case("resnet20", 32, 2, 200, 1000, 32),
        Case("resnet20", 32, 5, 100, 300),
        Case("resnet18", 32, 2, 100, 300),
        Case("resnet18", 32, 5, 100, 150, None, "momentum"),
        Case("vit_tiny", 32, 5, 60, 600),
    )),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Found:
    """What a case took.

    Attributes:
        case: which.
        weights: trained.
        training: seconds of the training.
        run: of the forecast, without compilation.
        compiling: seconds of compilation in the first call.
        expected: estimated seconds of the training, before it.
        expected_run: of the forecast, likewise.
        operations: FLOPs of the forecast over those of the training.
        kernels: built.
        warned: whether the forecast has a warning.
        errors: of the times to 1, 10 and 40 % of the loss decrease, in steps; empty where the
            training was not run.
        end: the error of the last loss over the loss decrease; NaN likewise.
    """

    case: Case
    weights: int
    training: float
    run: float
    compiling: float
    expected: float
    expected_run: float
    operations: float
    kernels: int
    warned: bool
    errors: tuple[int, ...]
    end: float


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        settings: how.
        found: by case.
    """

    settings: Settings
    found: dict[str, Found]


def pieces(settings: Settings) -> Pieces:
    """A piece for every case."""
    return {
        str(case): functools.partial(_measure, case, settings.longest) for case in settings.cases
    }


run = runner(pieces, Result)


def _measure(case: Case, longest: float) -> Found:
    model, *whole = job(case)
    optimizer = _optimizer(case, model, *(rows[: case.samples] for rows in whole))
    return measure_case(case, model, whole, optimizer, longest)


def measure_case(
    case: Case, model: Any, whole: Sequence[Any], optimizer: Any, longest: float
) -> Found:
    """Two forecasts of a training, the first with its compilation, and the training.

    Args:
        case: describes the training.
        model: the network before training.
        whole: samples and labels of the training, of which the forecast sees N.
        optimizer: of optax.
        longest: seconds of the longest training that is run.
    """
    x, y = (rows[: case.samples] for rows in whole)
    key = None if case.batch_size is None else jax.random.key(50)
    how: dict[str, Any] = {"loss": "cross_entropy", "batch_size": case.batch_size}
    how["optimizer"] = optimizer
    ahead = how | {"steps": case.steps, "key": key, "progress": False, "total_samples": case.total}
    first = predict_training_time(*model, x, y, **ahead)
    again = predict_training_time(*model, x, y, **ahead)
    training = case.steps * time_step(*model, *whole, **how).seconds
    errors, end = (), float("nan")
    if training < longest:
        another = None if key is None else jax.random.key(11)
        real = train(*model, *whole, steps=case.steps, key=another, **how)
        training = real.seconds
        times = [_times(one.read(THRESHOLDS), case.steps) for one in (real, again)]
        errors = tuple(np.abs(times[1] - times[0]).tolist())
        loss = np.asarray(real.loss)
        end = abs(float(again.loss[-1]) - float(loss[-1])) / float(loss[0] - loss.min())
    cost = again.cost
    return Found(
        case, sum(leaf.size for leaf in jax.tree.leaves(model.params)), training, cost.seconds,
        first.cost.compile_seconds, float(first.cost.training_seconds or 0.0),
        float(first.cost.estimated_seconds or 0.0), cost.operations / cost.training_operations,
        cost.kernels, again.warnings is not None, errors, end,
    )  # fmt: skip


def _times(read: dict[float, int], never: int) -> np.ndarray:
    """Training times; the horizon for a time that is not reached."""
    return np.array([read[e] if read[e] >= 0 else never for e in THRESHOLDS])


def job(case: Case) -> tuple[Any, np.ndarray, np.ndarray]:
    """The network before training, images and labels of all samples that train."""
    digits = tuple(range(10 - case.classes, 10)) if case.classes <= 10 else tuple(range(10))
    data = select(load_dataset("digits"), classes=digits, key=jax.random.key(17))
    rows = np.random.default_rng(0).permutation(len(data))[: case.total or case.samples]
    shape = (len(rows), case.pixels, case.pixels, 1)
    x, y = np.asarray(jax.image.resize(data.x[rows], shape, "bilinear")), np.asarray(data.y[rows])
    if case.classes > 10:  # ten groups of images of every digit, at random
        y = y + 10 * np.random.default_rng(1).integers(0, case.classes // 10, len(y))
    rngs = nnx.Rngs(params=HEAD)
    if case.network.startswith("MLP"):
        width = int(case.network.split()[1])
        x = x.reshape(len(x), -1)
        return from_nnx(MLP((x.shape[1], width, width, case.classes), rngs=rngs)), x, y
    if case.network.startswith("digits"):
        return from_nnx(fresh_head(load_pretrained(case.network), case.classes, key=HEAD)), x, y
    x, size = np.repeat(x, 3, axis=-1), case.pixels
    module = make_model(case.network, case.classes, image_size=size, rngs=rngs)
    if not case.network.startswith("vit"):
        module = calibrate_batch_norm(module, x)
    return from_nnx(module), x, y


def largest_rate(model: Any, x: Any, y: Any) -> float:
    """The largest stable rate of gradient descent before training, by a class sketch."""
    return predict_training_time(
        *model, x, y, learning_rate=1e-6, steps=1, relinearize=0, progress=False,
        kernel=ClassSketched(jax.random.key(0)),
    ).max_learning_rate  # fmt: skip


def _optimizer(case: Case, model: Any, x: Any, y: Any) -> optax.GradientTransformation:
    """SGD at 0.1 of the largest stable rate, AdamW at 1e-3."""
    if case.optimizer == "adamw":
        return optax.adamw(1e-3)
    limit = largest_rate(model, x, y)
    if case.optimizer == "momentum":
        return optax.sgd(0.01 * limit, 0.9)
    return optax.sgd(0.1 * limit)


def rule(found: Found) -> float:
    """Kernels times passes of each over the passes of the training: the rule of thumb."""
    return found.kernels * (1 + 2 * found.case.classes) / (3 * found.case.epochs)


def plot(result: Result) -> dict[str, Figure]:
    """Seconds of the training over those of the forecast, by the rule of thumb."""
    figure = Figure(figsize=(8.5, 4.8), layout="constrained")
    axes, names = figure.subplots(), list(dict.fromkeys(f.case.network for f in _all(result)))
    for name, color in zip(names, COLORS * 2, strict=False):
        some = [found for found in _all(result) if found.case.network == name]
        x = [rule(found) for found in some]
        warm = [found.training / found.run for found in some]
        cold = [found.training / (found.run + found.compiling) for found in some]
        axes.vlines(x, cold, warm, color=color, lw=1, alpha=0.5)
        axes.plot(x, warm, "o", color=color, label=name)
        axes.plot(x, cold, "o", color=color, mfc="white")
    for level, word in ((1, "the forecast takes as long"), (10, "the training takes 10 times")):
        axes.axhline(level, color="0.6", lw=0.8, ls="--")
        axes.annotate(word, (0.99, level), xycoords=("axes fraction", "data"), ha="right",
                      va="bottom", fontsize=8, color="0.4")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="kernels (1 + 2 C) / (3 epochs)",
             ylabel="seconds, training / forecast",
             title="filled: without compilation; open: with compilation")  # fmt: skip
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)
    return {"ours-price": figure}


def _all(result: Result) -> list[Found]:
    return list(result.found.values())


def measure(result: Result) -> dict[str, list[str]]:
    """A line for every case."""
    lines = []
    for name, found in result.found.items():
        errors = "training not run"
        if found.errors:
            errors = f"times off by {' / '.join(map(str, found.errors))} steps, end by "
            errors += f"{found.end:.0%} of the loss decrease"
        lines.append(
            f"{name} ({found.weights:.2g} weights): training {found.training:.3g} s (estimated "
            f"{found.expected:.3g} s), forecast {found.run:.3g} s (estimated "
            f"{found.expected_run or np.nan:.3g} s) + {found.compiling:.3g} s of compilation; "
            f"FLOPs, forecast / training {found.operations:.2g}; {found.kernels} kernels; "
            f"{errors}{'; warned' if found.warned else ''}"
        )
    return {"ours-price": lines}
