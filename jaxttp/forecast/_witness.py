"""The network as a witness of a forecast with one kernel: how it fares at predicted weights."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxttp._core.types import ApplyFn, Params
from jaxttp.dynamics._network import outputs_and_pull
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.forecast._along import (
    Subset,
    loss_and_square,
    point_on_the_way,
    sampled,
    see_in_batches,
    weights_at,
)
from jaxttp.forecast._curves import loss_and_error
from jaxttp.losses import Loss
from jaxttp.losses.rule import training_time

TOWARDS, ASKED = 0.1, 0.2
"""On the straight way to the weights where the first share of the predicted drop is left, the
network is asked where the second is: of places on this way and on the path itself, one or two, it
told right forecasts from wrong ones best in `experiments.bench.trust`, for one of two ways back.
"""
WAYS = 2
"""On and back through the network, of those that are asked about: to the place, and there."""
NOTHING = 1e-6
"""A share of the first loss below which losses are alike."""


class Witness(NamedTuple):
    """What the network says of a forecast with one kernel.

    Attributes:
        step: on the way to whose weights it was asked; -1 where nobody was.
        speed: how fast its loss falls there over how fast the forecast has it fall.
        loss: its loss over the predicted one; 1 where one of them is negative.
        samples: how many it was asked about.
        share: which of all that is.
    """

    step: int = -1
    speed: float = 1.0
    loss: float = 1.0
    samples: int = 0
    share: float = 1.0

    @property
    def passes(self) -> float:
        """Ways on and back through the network with all samples, as they are counted."""
        return WAYS * self.share if self.step >= 0 else 0.0


NOBODY = Witness()


def passes_asked(samples: int) -> float:
    """The same before anybody is asked, with so many samples.

    Example:
        >>> passes_asked(20), passes_asked(1000)
        (2.0, 0.4)
    """
    return WAYS * sampled(samples) / samples


def batch_of_questions(samples: int, batch_size: int | None) -> int:
    """How many of so many samples the network is asked about at once.

    Example:
        >>> batch_of_questions(37, 32), batch_of_questions(37, None)
        (19, 37)
    """
    return math.ceil(samples / math.ceil(samples / (batch_size or samples)))


def ask_network(
    network: ApplyFn,
    params: Params,
    whole: Subset,
    loss: Loss,
    follow: Callable[[Subset], Trajectory],
    batch_size: int | None,
) -> Witness:
    """How fast the network learns, and what its loss is, at weights that one kernel predicts.

    At outputs f with gradient g the loss falls by g^T Theta g, which is |J^T g|^2: with the J of
    weights w on the way from w_0 to w_t = c_t w_0 + J_0^T a_t, over that with J_0, at the outputs
    that the linearised network has there, f_0 + s (f_t - f_0). It costs two products with J^T.
    The weights are those of a training on a part of the samples alone, with the same optimiser and
    full batches: its kernel is a part of the kernel, so that nothing but those products is to be
    paid for.

    Args:
        network: ``(params, x) -> outputs (N, C)``.
        params: w_0, the part that is trained.
        whole: all samples and their kernel.
        loss: exact.
        follow: the training of some samples, of `recursion`, which knows a_t and c_t.
        batch_size: samples at once at most; all of them when None.

    Returns:
        Speed and loss 1 for a linear network; infinite where the network is not finite. `NOBODY`
        where the loss does not change, the forecast diverges or there is no gradient.
    """
    part = whole.some()
    path = follow(part)
    if _diverges(path) and part is not whole:  # a part may be stiffer than the whole
        part, path = whole, follow(whole)
    if _diverges(path):
        return NOBODY
    curve = np.asarray(loss_and_error(loss, path.train, part.targets)[0])
    step, least = int(training_time(curve, TOWARDS)), float(curve.min())
    if step <= 0:
        return NOBODY
    level = least + ASKED * (float(curve[0]) - least)
    point = point_on_the_way(part, loss, path, step, level)
    expected = float(point.expected)
    if expected <= 0:
        return NOBODY
    size = batch_of_questions(part.size, batch_size)
    see = outputs_and_pull(network)
    weights = weights_at(see, params, part, point, size)
    outputs, pulled = see_in_batches(see, weights, part.x, point.gradient, size)
    real, found = map(float, loss_and_square(outputs, pulled, part.targets, loss))
    return Witness(
        step=step,
        speed=found / expected if np.isfinite(found) else np.inf,
        loss=_over(real, float(point.loss), float(curve[0])),
        samples=part.size,
        share=part.size / whole.size,
    )


def _diverges(path: Trajectory) -> bool:
    assert path.diverged_at is not None
    return int(path.diverged_at) >= 0


def _over(real: float, predicted: float, first: float) -> float:
    """A loss over what was predicted, where that means something."""
    if not np.isfinite(real):
        return np.inf
    if min(real, predicted) < 0 or first <= 0:
        return 1.0
    return (real + NOTHING * first) / (predicted + NOTHING * first)
