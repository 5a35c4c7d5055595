"""Networks of Flax, Equinox, Keras and PyTorch as pure functions ``(params, x) -> outputs``.

Everything in this library rests on the Jacobian of single outputs, so row i of the outputs may
depend on row i of `x` alone. A network in training mode breaks that: BatchNorm mixes the samples of
its batch and dropout draws. Hence every adapter makes a copy in *evaluation* mode, by one rule:
an attribute of a module, or an argument of a call, that has one of the names below receives the
evaluation value, even where another one is hard-coded.

    True:  deterministic, use_running_average, inference
    False: train, training, is_training, update_stats

In Flax this holds for every submodule and its calls; in Equinox `inference` is set everywhere, as
by ``equinox.nn.inference_mode``, and the arguments are those of the outermost call. Networks that
still mix samples (statistics written by hand) are refused, with the reason, by `check_per_sample`.
Keras and PyTorch have a switch of their own for the whole module. All of these libraries are
imported when their adapter is called, not with this module.
"""

from jaxttp.adapters.frameworks import from_equinox as from_equinox
from jaxttp.adapters.frameworks import from_linen as from_linen
from jaxttp.adapters.frameworks import from_nnx as from_nnx
from jaxttp.adapters.keras import from_keras as from_keras
from jaxttp.adapters.outputs import as_rows as as_rows
from jaxttp.adapters.outputs import check_per_sample as check_per_sample
from jaxttp.adapters.outputs import flatten_tokens as flatten_tokens
from jaxttp.adapters.outputs import output_shape as output_shape
from jaxttp.adapters.pytorch import from_torch as from_torch
