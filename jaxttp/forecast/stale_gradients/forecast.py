"""Fine-tuning whose outputs are too many for a kernel: held gradients, and what their noise costs.

A language model with next-token loss has N T V outputs. What can be afforded is a gradient of a
batch here and there. The optimiser itself is run for all of its steps, warm-up, momentum, second
moments and decay included, but between two *knots* it is fed the same gradient of the trainable
weights (of a LoRA adapter: of A and B, so that A B stays exact). With K knots for T steps this
costs K / T of the training, and sees K / T of its data: the noise of the batches acts T / K times
as strongly, and the path of the held gradients lies above the training's by what that costs.

That can be measured on the path itself. Right after a batch was learnt, its own loss has fallen
further than that of other sequences, by its *memory*

    gamma_k = [L(w_{k+1}) - L(w_k)] - [L_k(w_{k+1}) - L_k(w_k)],

one way forward a knot. For a quadratic loss with noise of a fixed covariance S, steps of z = eta
Delta lambda along an eigenvector of curvature lambda, memory after m knots is
gamma_m = z (1 - z)^(m - 1) S / lambda, and the loss that noise costs at knot k

    1/2 sum_(i < k) z^2 (1 - z)^(2 i) S / lambda = 1/2 (gamma_1 - gamma_2 + ... - gamma_2k),

the alternating sum of the memories, 1/(4 - 2 z) of gamma_1 in the end. In networks it is about the
memory itself (curvature that is met late costs as well); the factor is `cost` of the module
`curve`, chosen on the TUNING tasks of experiments/bench/lora_tasks.py.

Where the sequences at hand are a sample of those that train, a path that sees them again learns
them by heart, as the training does not. How far a batch has fallen since its first time, beyond
what others have, says how much (`jaxttp.forecast.stale_gradients.curve.by_heart`).
"""

import itertools
from typing import Any

import numpy as np
import optax
from jaxtyping import Array

from jaxttp._core.checks import (
    check_finite,
    check_floating,
    check_integer,
    check_key,
    check_known,
    check_number,
    check_optimizer,
)
from jaxttp._core.compile import give_back
from jaxttp._core.traced import network_of
from jaxttp._core.types import ApplyFn, Params, count, take
from jaxttp.adapters import as_rows, check_per_sample
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.adapters.outputs import check_gradients
from jaxttp.dynamics._network import evaluation
from jaxttp.dynamics.batches import batch_indices, check_batches
from jaxttp.dynamics.weight_space import check_stepping
from jaxttp.forecast.stale_gradients.curve import HeldForecast, corrected
from jaxttp.forecast.stale_gradients.path import (
    HeldPath,
    HeldState,
    follow_held,
    held_programs,
    place_knots,
    place_points,
    step_sizes,
    watcher,
)
from jaxttp.losses import Loss, encode_targets, get_loss

POINTS = 11
"""Points of the curve, at which the loss of what is watched is evaluated."""
FEWEST = 24
"""Knots below which no path is followed."""
FORWARD = 1 / 3
"""What a way forward costs, in gradients."""


def held_forecast(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    x_watched: Any,
    y_watched: Any,
    optimizer: optax.GradientTransformation,
    steps: int,
    batch_size: int,
    key: Array,
    protocol: str | None = None,
    loss: str | Loss = "cross_entropy",
    share: float = 0.2,
    total_samples: int | None = None,
) -> HeldForecast:
    """The loss curve of a fine-tuning with many outputs, from a share of its gradients.

    This is an integrator with few right-hand sides, and it does step the network's weights, along
    its own path: of the steps between two knots only the first has a gradient of its own. What
    that costs is counted, and kept within `share`; the module says what is done.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, or logits of tokens (N, T, V).
        params: what trains, such as the adapters of `jaxttp.models.lora`.
        x: training sequences (N, ...).
        y: labels (N,), of tokens (N, T), or targets (N, C).
        x_watched: the sequences whose loss is foreseen (M, ...); of no batch, or some of `x`.
        y_watched: their labels.
        optimizer: any optax transformation of gradients alone.
        steps: T.
        batch_size: B, sequences a step.
        key: draws the batches; those of the training at the same key are used at the knots.
        protocol: how, see `jaxttp.dynamics.batch_indices`.
        loss: a name or a `Loss`.
        share: of the training's gradients that this may take, in (0, 1); counted, not timed.
        total_samples: sequences of the corpus that trains, of which `x` is a sample; None where
            `x` trains. Batches are then no training's, and are drawn so that a path sees every
            sequence of the sample once before it sees one again.

    Returns:
        A `HeldForecast`.

    Raises:
        ValueError: a share that pays for fewer than 24 knots beside the points of the curve; steps,
            batches, labels or an optimiser that do not fit; gradients that are not finite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> table = jnp.zeros((5, 5))
        >>> x = jnp.arange(240).reshape(60, 4) % 5
        >>> found = held_forecast(lambda w, x: w[x], table, x, (x + 1) % 5, x_watched=x[:4],
        ...                       y_watched=(x[:4] + 1) % 5, optimizer=optax.adam(0.02), steps=200,
        ...                       batch_size=6, key=jax.random.key(0))
        >>> found.loss.shape, bool(found.loss[-1] < found.loss[0]), found.share <= 0.2
        ((201,), True, True)

    Source:
        Derived; held gradients are Euler's method of first weak order for the mean path.
    """
    check_integer("steps", steps, at_least=1)
    check_number("share", share, above=0.0, below=1.0)
    check_key(key, optional=False)
    if total_samples is not None:
        check_integer("total_samples", total_samples, at_least=count(x),
                      remedy=f"x, a sample of them, has {count(x)}.")  # fmt: skip
    check_optimizer(optimizer)
    x, x_watched = check_samples("x", x), check_samples("x_watched", x_watched)
    check_known(share=share, key=key, y=y, y_watched=y_watched)
    _check_network(apply_fn, params, optimizer, {"params": params, "x": x, "x_watched": x_watched})
    protocol = check_batches(batch_size, key, protocol, count(x))
    rows, outputs = as_rows(apply_fn, params, x)
    rows = network_of(rows)
    _check_outputs(rows, params, take(x, slice(0, 8)))
    given_loss = get_loss(loss)
    targets, loss = encode_targets(given_loss, y, outputs)
    seen = as_rows(apply_fn, params, x_watched)[1]
    watched, loss_watched = encode_targets(given_loss, y_watched, seen)
    indices = np.asarray(batch_indices(key, count(x), batch_size, steps, protocol=protocol))
    fresh = None if total_samples is None else count(x) // batch_size
    look_cost = FORWARD * count(x_watched) / batch_size
    look = watcher(rows, loss_watched, x_watched, watched, batch_size)
    programs = held_programs(rows, loss, optimizer, params)
    sizes, beside = step_sizes(optimizer, params, steps), POINTS * look_cost
    paid, most = share * steps, affordable(share, steps, beside, batch_size)

    def follow(start: HeldState, scale: float, most: int, points: int, seen: int = 0) -> HeldPath:
        in_turn = itertools.islice(itertools.cycle(indices[:fresh]), seen, None)

        def batch(step: int) -> tuple[Any, Array]:
            some = indices[step] if fresh is None else next(in_turn)
            return take(x, some), targets[some]

        knots = start.step + place_knots(sizes[start.step :], most)
        return follow_held(
            programs, start, scale, knots, place_points(len(knots), points), batch, look,
        )  # fmt: skip

    begin = HeldState(0, params, optimizer.init(params), look(params))
    give_back()  # what compiling has left: hundreds of MB for a large network
    whole, scale = follow(begin, 1.0, most, POINTS), 1.0
    check_gradients(rows, params, x, (whole.before, whole.loss))
    paid -= cost_of(whole, look_cost) + look_cost
    while whole.left:
        part, good, scale = whole.upto_good(), whole.good, scale / 2
        points = max(3, POINTS - len(part.points) + 1)
        most = min(pays_for(paid - (points - 1) * look_cost), steps - good.step)
        if most < FEWEST * (steps - good.step) / steps:
            break
        further = follow(good, scale, most, points, len(part.before))
        paid -= cost_of(further, look_cost)
        whole = part.then(further)
    spent = share * steps - paid
    return corrected(whole, spent * batch_size, float(steps * batch_size), steps, fresh)


def _check_network(
    apply_fn: ApplyFn, params: Params, optimizer: optax.GradientTransformation, given: dict
) -> None:
    """Refuse a network that the optimizer cannot step, and arrays that are not known or finite."""
    check_network(apply_fn, params)
    check_floating("params", params)
    check_stepping(optimizer, params)
    check_known(**given)
    for name, value in given.items():
        check_finite(name, value)


def _check_outputs(network: Any, params: Params, few: Any) -> None:
    """Refuse outputs that depend on other samples, or that are not finite."""
    evaluate = evaluation(network)
    outputs = evaluate(params, few)
    check_per_sample(network, params, few, evaluate=evaluate, outputs=outputs)
    check_finite("apply_fn(params, x)", outputs)


def cost_of(path: HeldPath, look: float) -> float:
    """Gradients of a batch that a path took, the first of its points apart.

    Args:
        path: as far as it was followed.
        look: what one of its points costs.
    """
    return len(path.before) + FORWARD * len(path.measured) + look * (len(path.points) - 1)


def pays_for(paid: float) -> int:
    """Knots that some gradients pay for, each with half a look back at its batch.

    Example:
        >>> pays_for(98.0)
        84
    """
    knots = max(0, int(paid / (1 + FORWARD / 2)))
    # Every second batch is looked at again, the first one among them.
    return knots - (knots > 0 and knots + FORWARD * -(-knots // 2) > paid)


def affordable(
    share: float, steps: int, beside: float, batch_size: int, *, name: str = "share"
) -> int:
    """How many knots a share of a training pays for, each with half a look back at its batch.

    Args:
        share: of the training's gradients.
        steps: T.
        beside: what the points of the curve cost, in gradients of a batch.
        batch_size: B, for the words.
        name: what the words call the share.

    Returns:
        K.

    Raises:
        ValueError: fewer than are worth following.

    Example:
        >>> affordable(0.2, 600, beside=22.0, batch_size=16)
        84
    """
    paid = share * steps - beside
    knots = pays_for(paid)
    if knots < FEWEST:
        raise ValueError(
            f"{name}={share:g} of {steps} steps pays for {knots} gradients beside the "
            f"points of the curve (worth {beside:.3g} batches of {batch_size}); {FEWEST} are "
            f"needed. Give a larger {name}, fewer watched sequences, or train it."
        )
    return min(knots, steps)
