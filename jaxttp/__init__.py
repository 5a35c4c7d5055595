"""How long will training take, how well conditioned is it, what would an exact step do?

Answers before a network is trained, from its outputs, its Jacobian and its kernel. A network is a
function ``apply_fn(params, x) -> outputs (N, C)`` and its parameters; `x` is an array (N, ...) or a
pytree of arrays with N rows each. Every result prints itself and has ``.plot()``.

A network of a framework      `from_nnx`, `from_linen`, `from_equinox`, `from_keras`, `from_torch`;
                              `jaxttp.models` has some
Data                          `jaxttp.data.load_dataset`, `load_table`
... of a pipeline of batches  `draw_samples`: some at random, the rest counted
Labels that count differently `weighted` (samples, classes, masks); labels of -100 do not count
Logits of tokens (N, T, V)    labels (N, T); or `label_words`, `sample_tokens`, `flatten_tokens`

How many steps will training take?             `predict_training_time`
... for many rates, momenta, batch sizes?      `sweep`, with the settings of `grid`
... which is best, by a few trained steps?      `race`, of the same settings
... from which of several starting points?     `compare`, each a `Candidate`
... the same, by a few trained steps?          `race_starts`
... now that it has begun?                     `Online`, a callback of `train`
... in seconds?                                `wall_clock`; `time_step` measures one step
What would really happen?                      `train`
When is a curve there?                         `training_time`, and `read` of every result
... a loss or an error to get below            `Target`
When does the test loss rise again?            `early_stopping`, with `x_test` of a forecast

The kernel of a network                        `empirical_ntk`; `ntk_plan` says how, and how large
... without forming it                         `ntk_operator`
... from random projections                    `sketch_jacobian`, `class_sketch`
Its spectrum, and what labels see of it        `jaxttp.ntk`
How outputs move, step by step or as a flow    `jaxttp.dynamics`
Is the problem well conditioned, and why?      `jaxttp.conditioning`
What would an exact Gauss-Newton step do?      `jaxttp.gauss_newton`
What has a network learnt to represent?        `jaxttp.representation`
Losses, encoded labels                         `jaxttp.losses`
How far it is, and how long it still takes     `print_progress`, for what takes progress=
Figures of all of these                        `jaxttp.plots`, loaded when it is first used

    >>> import jax, jax.numpy as jnp, jaxttp
    >>> x = jax.random.normal(jax.random.key(0), (20, 3))
    >>> y = (x[:, 0] > 0).astype(int)
    >>> forecast = jaxttp.predict_training_time(lambda w, x: x @ w, jnp.zeros((3, 2)), x, y,
    ...                                         learning_rate=1.0, steps=50, relinearize=0)
    >>> forecast.stable
    True

On the command line: ``jaxttp --help``. What needs Flax, matplotlib or a data set on the disk is
imported when it is first used.
"""

from typing import Any

from jaxttp._core import process as _process
from jaxttp._core import xla_cpu as _xla_cpu

if _process.is_command():
    _process.watch()  # first of all: what follows takes seconds
    _process.hush()  # before JAX is imported

from jaxttp import conditioning as conditioning
from jaxttp import dynamics as dynamics
from jaxttp import gauss_newton as gauss_newton
from jaxttp import losses as losses
from jaxttp import ntk as ntk
from jaxttp import representation as representation
from jaxttp._core.process import __version__ as __version__
from jaxttp._core.progress import print_progress as print_progress
from jaxttp._core.types import Model as Model
from jaxttp.adapters import flatten_tokens as flatten_tokens
from jaxttp.adapters import from_equinox as from_equinox
from jaxttp.adapters import from_keras as from_keras
from jaxttp.adapters import from_linen as from_linen
from jaxttp.adapters import from_nnx as from_nnx
from jaxttp.adapters import from_torch as from_torch
from jaxttp.batches import draw_samples as draw_samples
from jaxttp.forecast import Candidate as Candidate
from jaxttp.forecast import Cost as Cost
from jaxttp.forecast import Online as Online
from jaxttp.forecast import Prediction as Prediction
from jaxttp.forecast import compare as compare
from jaxttp.forecast import grid as grid
from jaxttp.forecast import predict_training_time as predict_training_time
from jaxttp.forecast import race as race
from jaxttp.forecast import race_starts as race_starts
from jaxttp.forecast import sweep as sweep
from jaxttp.forecast import training_time as training_time
from jaxttp.forecast import wall_clock as wall_clock
from jaxttp.losses import weighted as weighted
from jaxttp.losses.rule import Target as Target
from jaxttp.losses.rule import early_stopping as early_stopping
from jaxttp.losses.tokens import label_words as label_words
from jaxttp.losses.tokens import sample_tokens as sample_tokens
from jaxttp.ntk import class_sketch as class_sketch
from jaxttp.ntk import empirical_ntk as empirical_ntk
from jaxttp.ntk import ntk_operator as ntk_operator
from jaxttp.ntk import ntk_plan as ntk_plan
from jaxttp.ntk import sketch_jacobian as sketch_jacobian
from jaxttp.training import time_step as time_step
from jaxttp.training import train as train

_xla_cpu.protect_process()  # before a backend starts

__all__ = [
    "Candidate",
    "Cost",
    "Model",
    "Online",
    "Prediction",
    "Target",
    "class_sketch",
    "compare",
    "conditioning",
    "draw_samples",
    "dynamics",
    "early_stopping",
    "empirical_ntk",
    "flatten_tokens",
    "from_equinox",
    "from_keras",
    "from_linen",
    "from_nnx",
    "from_torch",
    "gauss_newton",
    "grid",
    "label_words",
    "losses",
    "ntk",
    "ntk_operator",
    "ntk_plan",
    "predict_training_time",
    "print_progress",
    "race",
    "race_starts",
    "representation",
    "sample_tokens",
    "sketch_jacobian",
    "sweep",
    "time_step",
    "train",
    "training_time",
    "wall_clock",
    "weighted",
]

_LATER = ("data", "models", "plots")


def __getattr__(name: str) -> Any:
    """Packages that load Flax, data or figures: imported on first use."""
    import importlib

    from jaxttp._core.results import figures

    if name == "data":
        return importlib.import_module("jaxttp.data")
    if name == "models":
        return importlib.import_module("jaxttp.models")
    if name == "plots":
        return figures()
    raise AttributeError(f"module 'jaxttp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
