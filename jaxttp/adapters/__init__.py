"""Networks of Flax, Equinox, Keras and PyTorch as pure functions ``(params, x) -> outputs``.

Everything in this library rests on the Jacobian of single outputs, so row i of the outputs may
depend on row i of `x` alone. A network in training mode breaks that: BatchNorm mixes the samples of
its batch and dropout draws. Hence every adapter makes a copy in *evaluation* mode, by one rule:
an attribute of a module, or an argument of a call, that has one of the names below receives the
evaluation value, whatever was hard-coded there.

    True:  deterministic, use_running_average, inference
    False: train, training, is_training, update_stats

In Flax this holds for every submodule and its calls; in Equinox `inference` is set everywhere, as
by ``equinox.nn.inference_mode``, and the arguments are those of the outermost call. What still
mixes samples after that (statistics written by hand) is refused, with the reason, by
`check_per_sample`. Keras and PyTorch have a switch of their own for the whole module. All of these
are imported when an adapter for them is called, not with this module.
"""

from jaxttp.adapters.frameworks import from_equinox, from_linen, from_nnx
from jaxttp.adapters.keras import from_keras
from jaxttp.adapters.outputs import as_rows, check_per_sample, flatten_tokens, output_shape
from jaxttp.adapters.pytorch import from_torch

__all__ = [
    "as_rows",
    "check_per_sample",
    "flatten_tokens",
    "from_equinox",
    "from_keras",
    "from_linen",
    "from_nnx",
    "from_torch",
    "output_shape",
]
