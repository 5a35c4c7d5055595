"""The scripts that `variants` makes, one object for each figure: XGN 1, 2, 5-8 and 12-15."""

import functools
from typing import Any

from experiments.gauss_newton.variants import NAMES, Case, Settings, measure, plot, run
from experiments.harness import Script

GN, ADAM, SGD = "gn", "adam", "sgd"
EPOCHS, SMOKE_EPOCHS, PAPER_EPOCHS = 20, 2, 80
SMOKE = dict(
    data=("wine",), blocks=(1,), bottleneck=64, batch_size=32, seeds=(0,), rates=(0.01, 0.1),
)  # fmt: skip
PAPER = dict(
    data=("cifar10",), blocks=(6,), bottleneck=8000, batch_size=1024, float64=False
)  # fmt: skip


def _alone(epochs: int, **options: Any) -> tuple[Case, ...]:
    return _tuned(dict.fromkeys((GN, ADAM, SGD), epochs), **options)


def _tuned(steps: dict[str, int], **options: Any) -> tuple[Case, ...]:
    """Each optimizer by itself, over steps of its own."""
    return tuple(Case(NAMES[key], ((key, count),), **options) for key, count in steps.items())


def _adam(epochs: int) -> Case:
    return Case("Adam", ((ADAM, epochs),))


def _switching(epochs: int) -> tuple[Case, ...]:
    return (
        Case("Gauss-Newton", ((GN, 2 * epochs),)),
        Case("Adam", ((ADAM, 2 * epochs),)),
        Case("Adam, then Gauss-Newton", ((ADAM, epochs), (GN, epochs))),
        Case("Gauss-Newton, then Adam", ((GN, epochs), (ADAM, epochs))),
    )


def _scales(epochs: int) -> tuple[Case, ...]:
    scales = {"1e-3": 1e-3, "1e-2": 1e-2, "0.1": 0.1, "Xavier": "xavier", "He": "he"}
    cases = [Case(f"σ = {name}", ((GN, epochs),), scale=value) for name, value in scales.items()]
    return (*cases, _adam(epochs))


def _rates(epochs: int) -> tuple[Case, ...]:
    rates = (0.03, 0.1, 0.3, 1.0, 3.0)
    cases = [Case(f"Gauss-Newton, {rate:g}", ((GN, epochs),), rate=rate) for rate in rates]
    return (*cases, _adam(epochs))


def _decays(epochs: int) -> tuple[Case, ...]:
    decays = (0.0, 1e-3, 1e-2, 0.1)
    cases = [Case(f"decay {decay:g}", ((GN, epochs),), weight_decay=decay) for decay in decays]
    return (*cases, _adam(epochs))


def _pseudoinverses(epochs: int) -> tuple[Case, ...]:
    modes = {
        "truncation at 1 %": "truncate", "damping by 1 %": "damp", "Tikhonov, 1 %": "tikhonov",
        "noise of 10 %": "noise",
    }  # fmt: skip
    cases = [Case(name, ((GN, epochs),), pseudoinverse=mode) for name, mode in modes.items()]
    return (*cases, _adam(epochs))


def _ranks(epochs: int) -> tuple[Case, ...]:
    tolerances = (1e-6, 1e-3, 0.01, 0.1, 0.3)
    return tuple(Case(f"rtol {rtol:g}", ((GN, epochs),), rtol=rtol) for rtol in tolerances)


def _presets(cases: Any, everywhere: dict[str, Any] | None = None, **cpu: Any) -> dict[str, Any]:
    """Mini-batches; `cases` makes them from a number of epochs."""
    everywhere = everywhere or {}
    return {
        "smoke": Settings(cases(SMOKE_EPOCHS), **(SMOKE | everywhere)),
        "cpu": Settings(cases(EPOCHS), **(everywhere | cpu)),
        "paper": Settings(cases(PAPER_EPOCHS), **(PAPER | everywhere)),
    }


def _full(cases: Any, steps: int, everywhere: dict[str, Any] | None = None, **cpu: Any) -> Any:
    """The full batch; `cases` makes them from a number of steps."""
    everywhere = (everywhere or {}) | dict(batch_size=None)
    return {
        "smoke": Settings(cases(5), **(SMOKE | everywhere | dict(samples=40))),
        "cpu": Settings(cases(steps), **(everywhere | cpu)),
        "paper": Settings(cases(200), **(PAPER | everywhere | dict(samples=1024))),
    }


def _script(picture: str, claim: str, presets: dict[str, Settings], **how: Any) -> Script:
    score = {"score": "R²"} if how.get("score") == "R²" else {}
    return Script(
        {picture: claim},
        presets,
        run,
        lambda result: {picture: plot(result, **how)},
        lambda result: {picture: measure(result, **score)},
    )


NO_BOTTLENECK = functools.partial(_alone, bottleneck=None)
REGRESSION = dict(data=("diabetes",), loss="squared_error")
REGRESSION_PAPER = Settings(
    _alone(200), blocks=(6,), bottleneck=8000, batch_size=None, samples=353, float64=False,
    **REGRESSION,
)  # fmt: skip
FULL_PANELS = ("train_loss", "train_accuracy")

BOTH = dict(data=("mnist", "cifar10"), blocks=(2, 6), bottleneck=8000, float64=False)
ALL = (GN, "ggn", ADAM, SGD)

FULL_BATCH = _script(
    "xgn-full-batch", "With the full batch, exact Gauss-Newton needs far fewer steps than tuned "
    "Adam and SGD. (XGN Figure 1)",
    {
        "smoke": Settings(
            _tuned({GN: 4, ADAM: 8, SGD: 8}, pseudoinverse="exact"), samples=40, blocks=(1,),
            bottleneck=128, batch_size=None, loss="squared_error", seeds=(0,),
            rates=(1e-2, 0.1, 1.0), search="largest",
        ),
        "cpu": Settings(
            _tuned({GN: 12, ADAM: 100, SGD: 100}, pseudoinverse="exact"), samples=1024,
            bottleneck=2048, batch_size=None, loss="squared_error",
        ),
        "paper": Settings(
            _tuned(dict.fromkeys(ALL, 200)), samples=1024, batch_size=None, search="largest", **BOTH
        ),
    }, panels=FULL_PANELS, time="step",
)  # fmt: skip
MINI_BATCH = _script(
    "xgn-mini-batch", "With mini-batches exact Gauss-Newton overfits each batch and stalls: its "
    "features hardly move. (XGN Figure 2)",
    {
        "smoke": Settings(_alone(3), **(SMOKE | dict(rates=(0.01, 0.1, 1.0)))),
        "cpu": Settings(_tuned(dict.fromkeys(ALL, EPOCHS))),
        "paper": Settings(_tuned(dict.fromkeys(ALL, PAPER_EPOCHS)), batch_size=1024, **BOTH),
    },
)  # fmt: skip
NO_BOTTLENECK_FULL = _script(
    "xgn-5-full", "Without a bottleneck (rank-deficient, the theory does not hold) Gauss-Newton is "
    "still much faster than Adam and SGD with the full batch. (XGN Figure 5)",
    _full(NO_BOTTLENECK, 60, samples=512, loss="squared_error"), panels=FULL_PANELS, time="step",
)  # fmt: skip
NO_BOTTLENECK_MINI = _script(
    "xgn-5-mini", "Without a bottleneck Gauss-Newton saturates early with mini-batches; Adam and "
    "SGD do not. (XGN Figure 5)", _presets(NO_BOTTLENECK),
)  # fmt: skip
LONG = _script(
    "xgn-6", "In a long run Gauss-Newton does not lower its training loss further; even SGD "
    "overtakes it. (XGN Figure 6)",
    _presets(_alone) | {"cpu": Settings(_alone(120)), "paper": Settings(_alone(1000), **PAPER)},
)  # fmt: skip
SWITCHING = _script(
    "xgn-7", "From weights that Adam trained Gauss-Newton saturates too; Adam goes on from where "
    "Gauss-Newton stopped. (XGN Figure 7)", _presets(_switching),
    panels=("train_loss", "test_loss"), mark=EPOCHS,
)  # fmt: skip
INITIAL_VARIANCE = _script(
    "xgn-8", "A larger variance of the first weights is better for Gauss-Newton; it stays behind "
    "Adam with all. (XGN Figure 8)", _presets(_scales), panels=("train_loss", "test_loss"),
)  # fmt: skip
LEARNING_RATES = _script(
    "xgn-12", "Smaller learning rates do not cure the saturation of Gauss-Newton. (XGN Figure 12)",
    _presets(_rates),
)  # fmt: skip
WEIGHT_DECAY = _script(
    "xgn-13", "Weight decay hardly changes what Gauss-Newton does. (XGN Figure 13)",
    _presets(_decays),
)  # fmt: skip
PSEUDOINVERSES = _script(
    "xgn-14", "Damping is slightly better than truncation, noise is worse; Adam is better than "
    "all. (XGN Figure 14)", _presets(_pseudoinverses),
)  # fmt: skip
REGRESSION_FULL = _script(
    "xgn-15-full", "On a regression Gauss-Newton is much faster than Adam and SGD with the full "
    "batch. (XGN Figure 15)",
    _full(_alone, 60, REGRESSION, samples=353) | {"paper": REGRESSION_PAPER},
    panels=("train_loss", "test_loss"), time="step", score="R²",
)  # fmt: skip
REGRESSION_MINI = _script(
    "xgn-15-mini", "On a regression Gauss-Newton stagnates with mini-batches. (XGN Figure 15)",
    _presets(_alone, REGRESSION | dict(batch_size=64)), score="R²",
)  # fmt: skip
RANK = _script(
    "ours-gn-rank", "The more singular values are kept, the faster the training loss falls and the "
    "worse the test loss ends. (ours)", _presets(_ranks),
)  # fmt: skip
