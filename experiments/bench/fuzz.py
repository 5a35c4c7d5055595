"""Random calls on linear models, where every forecast has to be the training itself.

    python -m experiments.bench.fuzz [--first 0] [--calls 100] [--folder F]

Call by call, each drawn from a seed of its own: a linear model, a loss with or without weights,
any of optax's optimisers, batches, and options of `predict_training_time`. Ten calls that follow
each other are of one kind (model, loss, optimiser, shapes, options) and differ in samples, targets,
weights, and which samples are drawn: a program is compiled once for them, which takes twenty times
as long as a call. The same training is then run for real, in float64 with the same batches. A
forecast is equal to it (and says so where the loss rises, or the rate is beyond the limit), or is
refused by the argument's name, or says that the sketch of a small budget is not to be trusted;
everything else is printed, and the exit status is 1. A training that itself leaves its path when
its weights are moved by a rounding is no measure from there on. What is kept in the folder is not
tried again; ``--again`` tries what was wrong.
"""

import argparse
import collections
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.store import Store
from jaxttp import predict_training_time, train, weighted
from jaxttp.dynamics.batches import PROTOCOLS

LOSSES = ("squared_error", "cross_entropy", "binary_cross_entropy")
HORIZONS = (1, 2, 5, 12, 40, 90)
SKETCH, OF_SKETCH = 4096, 0.2
"""A sketch so wide is off by this share of the loss at most: two weights may share a place."""
ROUNDING = 1e-6
"""Of everything else, in float64; a filter's response is known to less than the last digit."""
ALIKE = 10
"""Calls of a kind."""
BEYOND = ("limit", "diverges above", "largest stable")
"""How a forecast says that a rate is too large."""
NUDGE, AS_FAR = 1e-13, 100.0
"""Weights are moved by this share; a forecast may be so many times as far off as the training."""
GOOD = (
    "equal", "refused", "beyond the limit", "both diverge", "doubts a rising loss",
    "says that it diverges", "a sketch, doubted", "chaotic",
)  # fmt: skip
_ARGUMENTS = frozenset(inspect.signature(predict_training_time).parameters)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a call.

    Attributes:
        kind: one of `GOOD`, or what is wrong.
        call: in words.
        said: by the forecast, or by what it raised.
    """

    kind: str
    call: str
    said: str = ""


@dataclasses.dataclass(frozen=True)
class Call:
    """A forecast and the training that it foresees.

    Attributes:
        words: what is asked.
        model: apply_fn, params, x, y.
        shared: of both: loss, steps, batches.
        rate: of gradient descent, with momentum; or None.
        optimizer: of the training, and of the forecast where there is no rate.
        options: of the forecast.
        tolerance: how far the curves may be apart, as a share of the first loss.
    """

    words: str
    model: tuple[Any, ...]
    shared: dict[str, Any]
    rate: dict[str, float] | None
    optimizer: Any
    options: dict[str, Any]
    tolerance: float


def dense(p: Any, x: Any) -> Any:
    """A matrix."""
    return x @ p


def affine(p: Any, x: Any) -> Any:
    """A matrix and biases."""
    return x @ p["w"] + p["b"][None]


def features(p: Any, x: Any) -> Any:
    """Two matrices, one behind sines."""
    return jnp.sin(3 * x) @ p["w"] + x @ p["v"] + p["b"][None]


def shifted(p: Any, x: Any) -> Any:
    """A matrix and one number for all outputs."""
    return x @ p["w"] + p["s"]


MODELS = (dense, affine, features, shifted)
"""Networks that are linear in their weights."""


def weights(rng: np.random.Generator, model: Callable, d: int, c: int) -> Any:
    """Those of a model of so many inputs and outputs."""
    w, v = jnp.asarray(rng.normal(size=(d, c))), jnp.asarray(rng.normal(size=(d, c)))
    b, s = jnp.asarray(rng.normal(size=c)), jnp.asarray(rng.normal())
    named = {
        affine: {"w": w, "b": b},
        features: {"w": w, "v": v, "b": b},
        shifted: {"w": w, "s": s},
    }
    return named.get(model, w)


def _exact_mean() -> dict[str, Any]:
    """Options of `optax.MultiSteps`, whose means are rounded to float32 by default."""
    known = inspect.signature(optax.MultiSteps.__init__).parameters
    return {"accumulator_dtype": jnp.float64} if "accumulator_dtype" in known else {}


def optimizers(r: float, m: float, t: int) -> dict[str, Callable[[], Any]]:
    """Optimisers of optax by name, of rate r and momentum m; some change at step t."""
    sgd, contrib = functools.partial(optax.sgd, r, m or None), optax.contrib
    late = optax.piecewise_constant_schedule(r, {t: 0.1})
    return {
        "sgd": sgd,
        "nesterov": lambda: optax.sgd(r, m, nesterov=True),
        "inject_hyperparams": lambda: optax.inject_hyperparams(optax.sgd)(
            learning_rate=r, momentum=m
        ),
        "cosine": lambda: optax.sgd(optax.cosine_decay_schedule(r, t), m or None),
        "warm-up": lambda: optax.sgd(
            optax.warmup_cosine_decay_schedule(0.0, r, t, 3 * t, 0.1 * r), m or None
        ),
        "a late drop": lambda: optax.sgd(late, m or None),
        "weight decay": lambda: optax.chain(optax.add_decayed_weights(0.1), sgd()),
        "decay behind": lambda: optax.chain(sgd(), optax.add_decayed_weights(-0.01)),
        "late decay": lambda: optax.chain(
            optax.add_decayed_weights(lambda s: jnp.where(s >= t, 0.3, 0.0)), sgd()
        ),
        "trace": lambda: optax.chain(optax.trace(0.7), optax.scale(-0.3 * r)),
        "ema": lambda: optax.chain(optax.ema(0.5), optax.sgd(r)),
        "optimistic": lambda: optax.optimistic_gradient_descent(0.3 * r),
        "MultiSteps": lambda: optax.MultiSteps(
            sgd(), every_k_schedule=2, **_exact_mean()
        ).gradient_transformation(),
        "apply_if_finite": lambda: optax.apply_if_finite(sgd(), 3),
        "masked": lambda: optax.masked(sgd(), lambda p: jax.tree.map(lambda _: True, p)),
        "multi_transform": lambda: optax.multi_transform(
            {"a": sgd(), "b": optax.sgd(late)},
            lambda p: jax.tree.map(lambda a: "a" if a.ndim > 1 else "b", p),
        ),
        "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.3), sgd()),
        "clip": lambda: optax.chain(optax.clip(0.05), optax.sgd(r)),
        "late clip": lambda: optax.chain(
            optax.transforms.conditionally_transform(optax.clip(0.01), lambda s: s >= t), sgd()
        ),
        "centralize": lambda: optax.chain(optax.centralize(), optax.sgd(r)),
        "sign": lambda: optax.sign_sgd(0.03 * r),
        "lion": lambda: optax.lion(0.03 * r),
        "noisy_sgd": lambda: optax.noisy_sgd(r),
        "adamw, decayed": lambda: optax.adamw(0.1 * r, weight_decay=0.1),
        "adam, cosine": lambda: optax.adam(optax.cosine_decay_schedule(0.1 * r, t)),
        **{
            name: functools.partial(getattr(optax, name), 0.1 * r)
            for name in (
                "adam", "adamax", "adabelief", "adadelta", "adafactor", "adagrad", "adan",
                "amsgrad", "fromage", "lamb", "lars", "nadam", "novograd", "polyak_sgd", "radam",
                "rmsprop", "rprop", "sm3", "yogi",
            )
        },
        "lbfgs": optax.lbfgs,
        "schedule_free_sgd": lambda: contrib.schedule_free_sgd(r),
        "schedule_free_adamw": lambda: contrib.schedule_free_adamw(0.1 * r),
        "dadapt_adamw": contrib.dadapt_adamw,
        "prodigy": contrib.prodigy,
        "dog": lambda: contrib.dog(1.0),
        "cocob": contrib.cocob,
        "mechanize": lambda: contrib.mechanize(sgd()),
        "muon": lambda: contrib.muon(0.1 * r),
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kind:
    """What calls have in common.

    Attributes:
        words: of the call.
        apply: the network.
        sizes: samples, inputs, outputs, and samples of the test.
        target: labels, or which targets; and how they are weighted.
        shared: of forecast and training: loss, steps, batches, without their key.
        rate: of gradient descent, with momentum; or None.
        optimizer: of the training.
        way: options of the forecast; without arrays and keys.
    """

    words: str
    apply: Callable
    sizes: tuple[int, int, int, int]
    target: tuple[str, str]
    shared: dict[str, Any]
    rate: dict[str, float] | None
    optimizer: Any
    way: tuple[str, dict[str, Any]]


@functools.lru_cache(maxsize=2)
def kind(number: int) -> Kind:
    """The kind of a number."""
    rng = np.random.default_rng(number)
    apply = MODELS[rng.integers(len(MODELS))]
    n, d, c = int(rng.integers(1, 13)), int(rng.integers(1, 6)), int(rng.integers(1, 4))
    steps = int(rng.choice(HORIZONS))
    loss = str(rng.choice(LOSSES if c > 1 else ("squared_error", "binary_cross_entropy")))
    target = {"squared_error": "targets", "binary_cross_entropy": "two classes an output"}.get(
        loss, str(rng.choice(["labels", "soft labels"]))
    )
    weighting = str(rng.choice(["", "weighted", "one masked"], p=[2 / 3, 1 / 6, 1 / 6]))
    r, m = float(10 ** rng.uniform(-2.5, 0.5)), float(rng.choice([0.0, 0.5, 0.9]))
    known = optimizers(r, m, int(rng.integers(1, steps + 1)))
    name = str(rng.choice(["by its rate", *known]))
    plain = name == "by its rate"
    shared: dict[str, Any] = {"loss": loss, "steps": steps}
    if rng.integers(2):
        protocol = str(rng.choice(PROTOCOLS))
        shared |= {"batch_size": int(rng.integers(1, n + 1)), "protocol": protocol}
    ways: dict[str, dict[str, Any]] = {
        "defaults": {},
        "one kernel": {"relinearize": 0},
        "three rebuilds": {"relinearize": 3},
        "tiles": {"kernel_batch_size": int(rng.integers(1, n + 1))},
        "budget": {"budget": float(rng.choice([0.01, 0.3, 5.0]))},
        "recursion": {"dynamics": "recursion"},
        "weight space": {"dynamics": "weight_space"},
        "test samples": {},
        "a wide sketch": {"sketch_dim": SKETCH, "relinearize": 0},
        "little memory": {"max_bytes": 1_000_000},
    }
    way = str(rng.choice(list(ways)))
    words = (
        f"{n} samples, {d} inputs, {c} outputs, {steps} steps, {apply.__name__}, {loss} "
        f"({target}{', ' * bool(weighting)}{weighting}), {name}, rate {r:.3g}, momentum {m:g}, "
        f"batches {shared.get('batch_size')} {shared.get('protocol', '')}; {way}"
    )
    return Kind(
        words, apply, (n, d, c, max(1, n // 2)), (target, weighting), shared,
        {"learning_rate": r, "momentum": m} if plain else None,
        optax.sgd(r, m or None) if plain else known[name](), (way, ways[way]),
    )  # fmt: skip


def targets(rng: np.random.Generator, of: Kind, n: int) -> Any:
    """Labels or targets of so many samples."""
    c = of.sizes[2]
    made: dict[str, Callable[[], Any]] = {
        "targets": lambda: rng.normal(size=(n, c)),
        "two classes an output": lambda: rng.integers(0, 2, (n, c)).astype(float),
        "labels": lambda: rng.integers(0, c, n),
        "soft labels": lambda: rng.dirichlet(np.ones(c), n),
    }
    return made[of.target[0]]()


def draw(seed: int) -> Call:
    """The call of a seed."""
    of, rng = kind(seed // ALIKE), np.random.default_rng([seed, ALIKE])
    n, d, c, some = of.sizes
    x = jnp.asarray(rng.normal(size=(n, d)) * rng.choice([0.3, 1.0]))
    y = targets(rng, of, n)
    if of.target[1] == "weighted":
        y = weighted(y, sample_weight=rng.uniform(0.1, 2.0, n))
    elif of.target[1] and n > 1:
        y = weighted(y, mask=np.arange(n) != rng.integers(n))
    way, options = of.way
    key, shared = jax.random.key(seed), dict(of.shared)
    if "batch_size" in shared:
        shared["key"] = key
    if way == "a wide sketch":
        options = options | {"key": key}
    elif way == "test samples":
        options = {"x_test": x[:some], "y_test": targets(rng, of, some)}
    model = (of.apply, weights(rng, of.apply, d, c), x, y)
    tolerance = OF_SKETCH if way == "a wide sketch" else ROUNDING
    words = f"call {seed}: {of.words}"
    return Call(words, model, shared, of.rate, of.optimizer, options, tolerance)


def judge(call: Call) -> Verdict:
    """Forecast and train, and hold one against the other."""
    say = functools.partial(Verdict, call=call.words)
    how = call.rate or {"optimizer": call.optimizer}
    try:
        found = predict_training_time(*call.model, **(call.shared | how | call.options))
    except (ValueError, TypeError) as problem:
        named = str(problem).partition(" ")[0].partition("=")[0] in _ARGUMENTS
        return say("refused" if named else "refused, but what?", said=str(problem))
    except Exception as problem:  # whatever it is, it is found
        return say("crash", said=repr(problem))
    real = np.asarray(train(*call.model, optimizer=call.optimizer, **call.shared).loss)
    loss = np.asarray(found.loss)
    said = f"{found.message}; {found.trust}"
    if not np.all(np.isfinite(loss)):
        return say("not finite", said=said)
    if not np.all(np.isfinite(real)):
        return say("called stable" if found.stable else "both diverge", said=said)
    apart = np.abs(loss - real) / max(1e-3, float(real.max()))
    sketched = "sketch" in (found.plan or "")  # of a small budget
    if apart.max() > (OF_SKETCH if sketched else call.tolerance):
        if sketched and found.trust is not None:
            return say("a sketch, doubted", said=f"{found.plan}; {said}")
        if apart.max() <= AS_FAR * _moved(call, real):
            return say("chaotic", said=f"off by {apart.max():.2g}; {said}")
        return say("wrong", said=f"off by {apart.max():.2g} at step {apart.argmax()}; {said}")
    if not found.stable:
        if any(words in said for words in BEYOND):
            return say("beyond the limit", said=said)
        does = "rises" in said and real.max() > real[0]
        return say("says that it diverges" if does else "called unstable", said=said)
    if found.trust is not None and "rises" not in found.trust:
        return say("a sketch, doubted" if sketched else "doubted", said=said)
    return say("equal" if found.trust is None else "doubts a rising loss", said=said)


def _moved(call: Call, real: np.ndarray) -> float:
    """How far a training goes from itself when its weights are moved by a rounding."""
    apply, params, *data = call.model
    nudged = jax.tree.map(lambda w: w * (1 + NUDGE), params)
    other = train(apply, nudged, *data, optimizer=call.optimizer, **call.shared).loss
    return float(np.max(np.abs(np.asarray(other) - real))) / max(1e-3, float(real.max()))


def try_call(seed: int) -> Verdict:
    """Draw and judge, in float64."""
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judge(draw(seed))


def main(arguments: list[str] | None = None) -> int:
    """Try calls, print what is wrong, and leave with 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--calls", type=int, default=100, help="how many")
    parser.add_argument("--folder", type=Path, help="where to keep what came of them")
    parser.add_argument("--again", action="store_true", help="what was wrong")
    options = parser.parse_args(arguments)
    store = Store(options.folder, settings={})
    if options.again:
        store.records = {
            name: one
            for name, one in store.records.items()
            if one["value"]["fields"]["kind"] in GOOD
        }
    seeds = range(options.first, options.first + options.calls)
    found = store.all({f"call {seed}": functools.partial(try_call, seed) for seed in seeds})
    bad = [verdict for verdict in found.values() if verdict.kind not in GOOD]
    for verdict in bad:
        print(f"{verdict.kind}: {verdict.call}\n    {verdict.said}")
    counts = collections.Counter(verdict.kind for verdict in found.values())
    print(", ".join(f"{kind} {count}" for kind, count in counts.most_common()))
    return int(bool(bad))


if __name__ == "__main__":
    from experiments.bench import fuzz  # what is kept names its classes by their module

    raise SystemExit(fuzz.main())
