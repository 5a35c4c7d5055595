"""The clock of a forecast with one kernel, set by how fast the network really learns further on.

One kernel predicts a path of the weights, w_t = c_t w_0 + J_0^T a_t, and a loss L_t along it. At
some of these weights the network itself is asked for its loss l and its gradient: gradient descent
would there lower the loss at the rate |grad|^2, where the kernel has it fall by g^T Theta g. How
fast ln L falls is then taken as a function of ln L alone,

    d ln L / d tau = -rho(ln L) phi(ln L),

phi the predicted speed where the forecast has that loss, tau the sum of the learning rates, and
rho, 1 at the start, read off at the losses l and interpolated between them:

    ln rho = c tanh(y / c),   y = ln( |grad|^2 / (g^T Theta g) phi(ln L_t) L_t / (l phi(ln l)) ).

Large ratios are too large: weights that were predicted too far away are steep in directions that a
training would have left behind. c = 2.25 and the three places were chosen on the tuning tasks of
`experiments.bench.planning`, where errors of times fall to a third (experiments/bench/RESULTS.md).
No step of training is taken.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._samples import count
from jaxttp._types import Params
from jaxttp.dynamics._network import compile_network
from jaxttp.dynamics._trajectory import Trajectory
from jaxttp.forecast._along import Network, batch_of, places_of, pull_in_batches, square
from jaxttp.forecast._curves import at_places, loss_and_error
from jaxttp.losses import Loss
from jaxttp.ntk.factored import Kernel

PLACES = 3
"""Steps at which the network is asked, the last one among them."""
LARGEST = 2.25
"""c: no ratio of speeds counts for more than exp(c), nine and a half times."""
SURE, UNSURE = 0.05, 0.5
"""A time is known to this share of it and to this share of what the clock moved it (logarithms):
86 of 100 times of the tuning tasks were."""
MOST = 0.7
"""But to no more than a factor of two."""
WINDOW = 10
"""Speeds are those over a tenth of the steps so far, on either side."""


class Sight(NamedTuple):
    """What the network says at predicted weights.

    Attributes:
        step: whose weights they are.
        loss: of the network there.
        speed: |grad|^2 over the kernel's g^T Theta g.
    """

    step: int
    loss: float
    speed: float


class Clock(NamedTuple):
    """A predicted curve by another clock.

    Attributes:
        places: the predicted step (T + 1,) whose loss every step has; beyond T the curve goes on as
            fast as it ended.
        factors: by which the loss lies below that of the last predicted step (T + 1,); 1 before it.
        doubt: logarithm of the factor to which a time is known (T + 1,).
        ratios: rho where the network was asked, before they are bounded.
        used: how many sights lie on a falling loss; the others, farther on, are left out.
    """

    places: Float[np.ndarray, " t"]
    factors: Float[np.ndarray, " t"]
    doubt: Float[np.ndarray, " t"]
    ratios: Float[np.ndarray, " p"]
    used: int

    def of(self, values: Float[np.ndarray, "t ..."]) -> Float[np.ndarray, "t ..."]:
        """Values of the predicted steps (T + 1, ...) at these; the last one from its step on."""
        return at_places(values, self.places)


def places_to_look(loss: Float[np.ndarray, " t"]) -> list[int]:
    """Steps at which a third, two thirds and all of the drop are done, of L and ln L on average.

    Args:
        loss: the predicted curve (T + 1,).

    Returns:
        At most three steps, increasing; none where the loss does not fall.

    Example:
        >>> places_to_look(np.exp(-np.arange(101) / 20.0))
        [17, 34, 100]
    """
    first, last = float(loss[0]), max(float(np.min(loss)), 1e-9 * float(loss[0]))
    if not last < first:
        return []
    shares = np.linspace(0, 1, PLACES + 1)[1:]
    goals = 0.5 * (first - (first - last) * shares + first ** (1 - shares) * last**shares)
    found = [int(np.argmax(loss <= goal * (1 + 1e-6))) for goal in goals]
    return sorted({step for step in found if step > 0})


def look(
    network: Network,
    params: Params,
    x: Any,
    targets: Array,
    loss: Loss,
    kernel: Kernel,
    path: Trajectory,
    steps: Sequence[int],
    batch_size: int | None,
) -> list[Sight]:
    """Ask the network at predicted weights: one way forward and two back each.

    Args:
        network: ``(params, x) -> outputs (N, C)``.
        params: w_0, the part that is trained.
        x: samples (N, ...).
        targets: encoded.
        loss: exact.
        kernel: Theta.
        path: of `recursion`, which knows a_t and c_t.
        steps: at which; at step 0 no weights have to be found.
        batch_size: samples at once; all of them when None.
    """
    n = count(x)
    size = n if batch_size is None else min(batch_size, n)
    apply, pull, *_ = compile_network(network)
    sights = []
    for step, weights, _, expected in places_of(
        pull, params, x, targets, loss, kernel, path, steps, size
    ):
        parts = [apply(weights, batch_of(x, targets, s, size)[0]) for s in range(0, n, size)]
        outputs = jnp.concatenate(parts)[:n]
        found = pull_in_batches(pull, weights, x, loss.gradient(outputs, targets), size)
        here = float(loss_and_error(loss, outputs[None], targets)[0][0])
        speed = float(square(found))
        sights.append(Sight(step, here, speed / expected if expected > 0 else np.inf))
    return sights


def retime(
    loss: Float[np.ndarray, " t"],
    sights: Sequence[Sight],
    rates: Float[np.ndarray, " steps"] | None = None,
) -> Clock:
    """Set the clock of a predicted curve by what the network says along it.

    Args:
        loss: the predicted curve of full batches (T + 1,), above 0.
        sights: by increasing step, see `look`; without one at step 0 the kernel is exact there.
        rates: the learning rates (T,) of a schedule; None for a constant one.

    Example:
        >>> slow = np.exp(-np.arange(41) / 40.0)  # the network learns twice as fast from the start
        >>> found = retime(slow, [Sight(0, 1.0, 2.0), Sight(40, float(slow[40]), 2.0)])
        >>> found.places[[0, 10, 20]].round().tolist()
        [0.0, 20.0, 39.0]

    Source:
        Ours; the speed of the loss is that of TTP equation (1), the rest is measured.
    """
    steps = len(loss) - 1
    fall = np.minimum.accumulate(np.log(np.maximum(loss, 1e-9 * loss[0])))
    clock = np.ones(steps) if rates is None else np.asarray(rates, float) / np.max(rates)
    time = np.concatenate([[0.0], np.cumsum(clock)])
    levels, bounded, ratios = [], [], []
    for step, here, speed in sights:
        good = np.isfinite(speed) and np.isfinite(here) and speed > 0 and here > 0
        if not good or (levels and -np.log(here) <= levels[-1] + 1e-6):
            break
        level = float(np.log(here))
        place = float(np.interp(-level, -fall, np.arange(steps + 1.0)))
        gain = np.log(_speed(fall, time, step) / _speed(fall, time, place))
        ratio = np.log(speed) + gain + fall[step] - level
        levels.append(-level)
        ratios.append(np.exp(ratio))
        bounded.append(LARGEST * np.tanh(ratio / LARGEST))
    used = len(levels)
    if not sights or sights[0].step > 0:
        levels, bounded = [-fall[0], *levels], [0.0, *bounded]
    if not levels:
        levels, bounded = [-fall[0]], [0.0]
    rho = np.exp(np.interp(-fall, levels, bounded))
    real = np.concatenate([[0.0], np.cumsum(clock * 2 / (rho[1:] + rho[:-1]))])
    places = np.interp(time, real, np.arange(steps + 1.0))
    factors = np.ones(steps + 1)
    then = np.interp(time, real, time)  # the predicted time of the same loss
    speed, level, before = _speed(fall, time, steps), fall[-1], real[-1]
    for t in np.flatnonzero(time > real[-1]):  # the forecast goes on as fast as it ended
        pace = float(np.exp(np.interp(-level, levels, bounded))) * (time[t] - before)
        level, before = level - speed * pace, time[t]
        factors[t] = np.exp(level - fall[-1])
        then[t] = then[t - 1] + pace
    shift = np.abs(np.log(np.maximum(then, 1e-12) / np.maximum(time, 1e-12)))
    doubt = np.minimum(SURE + UNSURE * shift, MOST)
    return Clock(places, factors, doubt, np.array(ratios), used)


def uncertainty(loss: Float[np.ndarray, " t"], doubt: Float[np.ndarray, " t"]) -> np.ndarray:
    """By how much a curve changes where its times are off by factors exp(+-doubt)."""
    t = np.arange(len(loss))
    early = np.interp(t * np.exp(-doubt), t, loss)
    late = t * np.exp(doubt)
    rest = np.log(np.maximum(loss, 1e-30))
    slope = min(0.0, (rest[-1] - rest[-1 - max(1, len(t) // WINDOW)]) / max(1, len(t) // WINDOW))
    after = np.interp(late, t, loss) * np.exp(slope * np.maximum(late - t[-1], 0.0))
    return np.maximum(np.abs(early - loss), np.abs(after - loss))


def _speed(fall: np.ndarray, time: np.ndarray, step: float) -> float:
    """How fast the logarithm of the loss falls around a step, or between two."""
    before = int(step)
    if step > before:
        share = step - before
        return (1 - share) * _speed(fall, time, before) + share * _speed(fall, time, before + 1)
    around = max(1, before // WINDOW)
    step = before
    low, high = max(0, step - around), min(len(fall) - 1, step + around)
    passed = time[high] - time[low]
    return max(float(fall[low] - fall[high]) / passed if passed > 0 else 0.0, 1e-12)
