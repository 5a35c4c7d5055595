"""Train a RevMLP: optimizers in phases, full batch or mini-batches, records."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from jaxttp._core.checks import check_choice, check_integer, check_number
from jaxttp.data import load_dataset, split
from jaxttp.data.sources import TRAIN_SIZES
from jaxttp.gauss_newton import gauss_newton, revmlp_forward
from jaxttp.losses import Loss, encode_targets
from jaxttp.models import RevMLP

OPTIMIZERS = ("gn", "ggn", "adam", "sgd")


class Samples(NamedTuple):
    """Standardised inputs and their targets: what is trained on, and what is held out."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    outputs: int


@dataclasses.dataclass(frozen=True)
class Phase:
    """Some steps of one optimizer; its state starts afresh.

    Attributes:
        optimizer: "gn", "ggn" (Gauss-Newton with the loss's Hessian), "adam" or "sgd".
        learning_rate: of the mean loss for Adam and SGD, the fraction of a whole step for the
            others.
        steps: how many.
    """

    optimizer: str
    learning_rate: float
    steps: int

    def __post_init__(self):
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_number("learning_rate", self.learning_rate, above=0)
        check_integer("steps", self.steps, at_least=1)


@dataclasses.dataclass(frozen=True)
class Training:
    """How to train.

    Attributes:
        phases: one after the other.
        loss: "squared_error" or "cross_entropy".
        batch_size: samples a step; None for all. The last incomplete batch of an epoch is dropped.
        evaluate_every: steps between evaluations on all the data; None for once an epoch.
        pseudoinverse: of Gauss-Newton, see `gauss_newton_direction`.
        rtol: of the pseudo-inverse.
        damping: of the Hessian ("ggn").
        limit: a loss above this multiple of the first is divergence, which ends the training.
        weight_decay: fraction of the weights taken off in a step, per unit of learning rate; beside
            the direction, for every optimizer (for SGD it is an L2 term in the loss).
        own_batch: whether the loss of every batch is also measured after its step.
    """

    phases: tuple[Phase, ...]
    loss: str = "squared_error"
    batch_size: int | None = None
    evaluate_every: int | None = None
    pseudoinverse: str = "truncate"
    rtol: float = 0.01
    damping: float = 1e-3
    limit: float = 2.0
    weight_decay: float = 0.0
    own_batch: bool = False

    @property
    def steps(self) -> int:
        """Of all phases."""
        return sum(phase.steps for phase in self.phases)


@dataclasses.dataclass(frozen=True)
class Record:
    """What happened; NaN after divergence.

    Accuracies are fractions of samples classified correctly, and R² for a regression.

    Attributes:
        batch_loss: of every step's batch, before the step (T,); with all samples in the batch this
            is the training loss.
        batch_accuracy: likewise.
        own_batch_loss: of the same batch after the step (T,); NaN unless asked for.
        steps: when all the data were evaluated (E,): 0, ..., T.
        train_loss: then (E,).
        train_accuracy: likewise.
        test_loss: likewise.
        test_accuracy: likewise.
        seconds: of every step (T,), wall clock; the first holds the compilation.
        cpu_seconds: likewise, of all threads.
        diverged: the step after which the loss was not finite or beyond the limit, or at which
            Gauss-Newton had no finite direction; -1 if none.
        weights: at the end, or when divergence was found.
    """

    batch_loss: np.ndarray
    batch_accuracy: np.ndarray
    own_batch_loss: np.ndarray
    steps: np.ndarray
    train_loss: np.ndarray
    train_accuracy: np.ndarray
    test_loss: np.ndarray
    test_accuracy: np.ndarray
    seconds: np.ndarray
    cpu_seconds: np.ndarray
    diverged: int
    weights: Array = dataclasses.field(repr=False)


class _Method(NamedTuple):
    """What is static in a compiled step; a learning rate is not."""

    optimizer: str
    loss: Loss
    activation: Any
    pseudoinverse: str
    rtol: float
    damping: float
    weight_decay: float


def load(name: str, *, key: Array, samples: int | None = None, held_out: float = 0.2) -> Samples:
    """A data set in two parts, standardised with the mean and deviation of the training part.

    Images of colour or of MNIST are standardised by channel, everything else by feature.

    Args:
        name: see `jaxttp.data.load_dataset`.
        key: draws the parts.
        samples: size of the training part, drawn at random; the others are held out. None for the
            standard training set where there is one, else all but `held_out`.
        held_out: the fraction held out where nothing else says it.

    Returns:
        `Samples`, inputs in float64.

    Raises:
        ValueError: an unknown name, or more samples than there are.
    """
    data = load_dataset(name)
    standard = min(TRAIN_SIZES.get(name, 0), len(data))
    if standard:
        train, test = data.take(np.arange(standard)), data.take(np.arange(standard, len(data)))
        if samples is not None:
            check_integer("samples", samples, at_least=1, at_most=standard)
            train = train.take(np.asarray(jax.random.permutation(key, standard))[:samples])
    elif samples is None:
        train, test = split(data, held_out=held_out, key=key)
    else:
        check_integer("samples", samples, at_least=1, at_most=len(data) - 1)
        order = np.asarray(jax.random.permutation(key, len(data)))
        train, test = data.take(order[:samples]), data.take(order[samples:])
    x = np.asarray(train.x, np.float64)
    axes = tuple(range(x.ndim - 1)) if standard else (0,)
    mean, deviation = x.mean(axis=axes), x.std(axis=axes)
    deviation = np.where(deviation > 0, deviation, 1.0)
    outputs = train.y.shape[1] if data.num_classes is None else data.num_classes
    return Samples((x - mean) / deviation, train.y, (test.x - mean) / deviation, test.y, outputs)


def train(
    model: RevMLP,
    data: Samples,
    training: Training,
    *,
    key: Array,
    observe: Callable[[int, Array], None] | None = None,
) -> Record:
    """Train the model's weights; the model itself is left as it is.

    The batches of an epoch depend on the key and the epoch's number alone.

    Args:
        model: a `RevMLP`.
        data: what to train on and to evaluate.
        training: how.
        key: draws the batches.
        observe: called with (step, weights) at every evaluation.

    Returns:
        A `Record`. Divergence is recorded, not raised.

    Raises:
        ValueError: targets that do not fit the loss, or a batch larger than the data.
    """
    weights = model.weights[...]
    fixed = (model.fixed_bottlenecks, model.fixed_readout)
    x, x_test = model.embed(data.x), model.embed(data.x_test)
    shape = jax.ShapeDtypeStruct((len(x), data.outputs), weights.dtype)
    targets, loss = encode_targets(training.loss, data.y, shape)
    held_out, _ = encode_targets(
        training.loss, data.y_test, jax.ShapeDtypeStruct((len(x_test), data.outputs), shape.dtype)
    )
    n = len(x)
    size = n if training.batch_size is None else training.batch_size
    check_integer("batch_size", size, at_least=1, at_most=n, hint=f"The data has {n} samples.")
    epoch, total = n // size, training.steps
    every = epoch if training.evaluate_every is None else training.evaluate_every
    check_integer("evaluate_every", every, at_least=1)
    record = _blank(total, every)
    starts = np.cumsum([0, *(phase.steps for phase in training.phases)])
    methods = [
        _Method(phase.optimizer, loss, model.activation, training.pseudoinverse, training.rtol,
                training.damping, training.weight_decay)
        for phase in training.phases
    ]  # fmt: skip

    def optimizer_of(step: int) -> tuple[int, Array]:
        index = min(int(np.searchsorted(starts, step, side="right")), len(methods)) - 1
        return index, jnp.asarray(training.phases[index].learning_rate, weights.dtype)

    def start_of(index: int) -> Any:
        return _optimizer(methods[index], 0.0, None).init(weights)

    state = start_of(0)

    def evaluate(step: int) -> bool:
        row = int(np.searchsorted(record["steps"], step))
        good = True
        for name, inputs, wanted in (("train", x, targets), ("test", x_test, held_out)):
            value, error = _evaluate(loss, model.activation, weights, fixed, inputs, wanted)
            record[f"{name}_loss"][row], record[f"{name}_accuracy"][row] = value, 1 - error
            good = good and (name == "test" or bool(value <= limit(value)))
        return good

    def limit(value: ArrayLike) -> float:
        reference = record["train_loss"][0]
        return training.limit * float(reference if np.isfinite(reference) else value)

    diverged = -1
    order: tuple[int, np.ndarray] = (-1, np.arange(n))
    for step in range(total + 1):
        index, rate = optimizer_of(step)
        if step in starts[1:-1]:
            state = start_of(index)
        if step in record["steps"]:
            if not evaluate(step):
                diverged = step
                break
            if observe is not None:
                observe(step, weights)
        if step == total:
            break
        inputs, wanted = x, targets
        if size < n:
            if order[0] != step // epoch:
                permuted = jax.random.permutation(jax.random.fold_in(key, step // epoch), n)
                order = (step // epoch, np.asarray(permuted))
            rows = order[1][size * (step % epoch) : size * (step % epoch + 1)]
            inputs, wanted = x[rows], targets[rows]
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            draw = jax.random.fold_in(jax.random.fold_in(key, 1), step)  # for noise
            new = _step(methods[index], rate, weights, state, fixed, inputs, wanted, draw)
            updated, state, value, error = jax.block_until_ready(new)
        except eqx.EquinoxRuntimeError:  # no finite direction, or rank-deficient features
            diverged = step
            break
        record["seconds"][step] = time.perf_counter() - wall
        record["cpu_seconds"][step] = time.process_time() - cpu
        record["batch_loss"][step], record["batch_accuracy"][step] = value, 1 - error
        if not value <= limit(value):
            diverged = step
            break
        weights = updated
        if training.own_batch:
            after, _ = _evaluate(loss, model.activation, weights, fixed, inputs, wanted)
            record["own_batch_loss"][step] = after
    return Record(**record, diverged=diverged, weights=weights)


def _blank(total: int, every: int) -> dict[str, np.ndarray]:
    steps = np.unique([*range(0, total, every), total])
    names = ("batch_loss", "batch_accuracy", "own_batch_loss", "seconds", "cpu_seconds")
    record = {name: np.full(total, np.nan) for name in names}
    names = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
    return record | {name: np.full(len(steps), np.nan) for name in names} | {"steps": steps}


def _optimizer(
    method: _Method, rate: ArrayLike, readout: Array | None, key: Array | None = None
) -> Any:
    decay = optax.add_decayed_weights(method.weight_decay)
    if method.optimizer == "adam":
        return optax.chain(optax.scale_by_adam(), decay, optax.scale_by_learning_rate(rate))
    if method.optimizer == "sgd":
        return optax.chain(decay, optax.scale_by_learning_rate(rate))
    step = gauss_newton(
        1.0,
        loss=method.loss,
        activation=method.activation,
        readout=readout,
        curvature="identity" if method.optimizer == "gn" else "hessian",
        damping=method.damping,
        pseudoinverse=method.pseudoinverse,
        rtol=method.rtol,
        key=key,
        measure=False,
    )
    # The step is minus the direction; the decay goes the same way.
    return optax.chain(step, optax.add_decayed_weights(-method.weight_decay), optax.scale(rate))


def _objective(
    loss: Loss, activation: Any, weights: Array, fixed: Any, x: Array, targets: Array
) -> tuple[Array, Array]:
    bottlenecks, readout = fixed
    outputs = revmlp_forward(weights, bottlenecks, x, activation=activation)
    outputs = outputs if readout is None else outputs @ readout.T
    return loss.value(outputs, targets), loss.error(outputs, targets)


_evaluate = eqx.filter_jit(_objective)


@eqx.filter_jit
def _step(
    method: _Method,
    rate: Array,
    weights: Array,
    state: Any,
    fixed: Any,
    x: Array,
    targets: Array,
    key: Array,
) -> tuple[Array, Any, Array, Array]:
    optimizer = _optimizer(method, rate, fixed[1], key)

    def objective(w: Array) -> tuple[Array, Array]:
        return _objective(method.loss, method.activation, w, fixed, x, targets)

    if method.optimizer in ("gn", "ggn"):
        value, error = objective(weights)
        updates, state = optimizer.update(
            weights, state, weights, x=x, y=targets, bottlenecks=fixed[0]
        )
    else:
        (value, error), gradient = jax.value_and_grad(objective, has_aux=True)(weights)
        updates, state = optimizer.update(gradient, state, weights)
    return optax.apply_updates(weights, updates), state, value, error
