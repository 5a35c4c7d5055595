"""What forecasts say, frozen: hundreds of settings, to hold a change of the code's shape against.

    python -m experiments.bench.goldens --write     compute them and keep them in goldens.npz
    python -m experiments.bench.goldens [--only T]  compute them again and say what moved

Curves are to agree to rounding (1e-12 of their size in float64, on the machine that wrote them);
steps, verdicts, counts of kernels and the words of refusals exactly. It is no part of the suite: a
threshold that is met within rounding may be crossed a step earlier on another CPU.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxttp
from jaxttp.forecast import Candidate, Hyperparameters, Online, grid

HERE = Path(__file__).parent / "goldens.npz"
T = 24
ROUNDING = 1e-12
FIELDS = ("loss", "error", "loss_uncertainty", "loss_band", "test_loss", "test_error")
KEY = {"key": 5}
RATES = {"linear": 0.4, "mlp": 0.3, "regression": 0.15, "binary": 0.4}
THRESHOLDS = {"gap": (0.05, 0.2), "absolute": (0.3, 0.6), "plateau": (0.01, 0.02)}


class Task(NamedTuple):
    """A small network and data."""

    apply_fn: Callable[[Any, Any], Any]
    params: Any
    x: Any
    y: Any
    x_test: Any
    y_test: Any
    loss: str


def network(params: Any, x: Any) -> Any:
    """An MLP with one hidden layer."""
    return jnp.tanh(x @ params["a"]) @ params["b"]


def linear(params: Any, x: Any) -> Any:
    """Logistic regression."""
    return x @ params


def tasks() -> dict[str, Task]:
    """Four of them."""
    keys = jax.random.split(jax.random.key(11), 12)
    x, x_test = (jax.random.normal(k, (n, 4)) for k, n in ((keys[0], 14), (keys[3], 6)))
    labels, more = (
        np.asarray(jax.random.randint(k, (n,), 0, 3)) for k, n in ((keys[1], 14), (keys[4], 6))
    )
    values = np.asarray(jnp.sin(x @ jax.random.normal(keys[2], (4, 1))))
    values_test = np.asarray(jnp.sin(x_test @ jnp.ones((4, 1)) / 2))
    mlp = {"a": jax.random.normal(keys[5], (4, 9)) / 2, "b": jax.random.normal(keys[6], (9, 3)) / 3}
    one = {"a": jax.random.normal(keys[7], (4, 9)) / 2, "b": jax.random.normal(keys[8], (9, 1)) / 3}
    weights = 0.1 * jax.random.normal(keys[9], (4, 3))
    signs, signs_test = ((v[:, 0] > 0).astype(int) for v in (values, values_test))
    return {
        "linear": Task(linear, weights, x, labels, x_test, more, "cross_entropy"),
        "mlp": Task(network, mlp, x, labels, x_test, more, "cross_entropy"),
        "regression": Task(network, one, x, values, x_test, values_test, "squared_error"),
        "binary": Task(network, one, x, signs, x_test, signs_test, "binary_cross_entropy"),
    }


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.2),
    "nesterov": lambda: optax.sgd(0.1, 0.7, nesterov=True),
    "cosine": lambda: optax.sgd(optax.cosine_decay_schedule(0.3, T), 0.5),
    "warmup": lambda: optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 0.3, 4, T)),
    "decay": lambda: optax.chain(optax.add_decayed_weights(0.05), optax.sgd(0.2, 0.6)),
    "inject": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.2),
    "multisteps": lambda: optax.MultiSteps(optax.sgd(0.2), 2).gradient_transformation(),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.2),
    "adam": lambda: optax.adam(0.01),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.3)),
    "beyond": lambda: optax.sgd(50.0),
}


def settings() -> dict[str, dict[str, Any]]:
    """Name -> call, task, options; every option of the front doors, alone and crossed."""
    out: dict[str, dict[str, Any]] = {}

    def add(name: str, call: str, task: str, **options: Any) -> None:
        assert name not in out, name
        out[name] = {"call": call, "task": task, **options}

    for task, momentum, batch in itertools.product(RATES, (0.0, 0.8), (None, 5)):
        tag = f"{task}-m{momentum:g}-b{batch}"
        rate = RATES[task] * (0.3 if momentum else 1.0)
        common: dict[str, Any] = {"learning_rate": rate, "momentum": momentum}
        if batch:
            common |= {"batch_size": batch, **KEY}
        add(f"plain-{tag}", "predict", task, **common)
        add(f"sketch-{tag}", "predict", task, sketch_dim=40, **common | KEY)
        add(f"test-{tag}", "predict", task, test=True, **common)
        if (momentum > 0) != (batch is not None):
            continue  # the rest with both and with neither
        add(f"error-{tag}", "predict", task, metric="error", thresholds=(0.3, 0.6), **common)
        for rule, thresholds in THRESHOLDS.items():
            add(f"{rule}-{tag}", "predict", task, rule=rule, thresholds=thresholds, **common)
        if task == "linear":
            continue
        for k in (1, 3, "auto"):
            add(f"rebuilt-{k}-{tag}", "predict", task, relinearize=k, **common)
        if task == "binary":
            continue
        more = {"relinearize": 2, "sketch_dim": 60}
        add(f"rebuilt-2-sketch-{tag}", "predict", task, **more, **common | KEY)
        add(f"test-sketch-{tag}", "predict", task, test=True, sketch_dim=40, **common | KEY)
        add(f"smooth-{tag}", "predict", task, smooth=5, **common)
        window = {"rule": "plateau", "window": 3, "thresholds": (0.02,)}
        add(f"window-{tag}", "predict", task, **window, **common)
        if batch:
            sde = {"dynamics": "sde", "paths": 4}
            for noise in ("full", "diagonal", "constant"):
                add(f"sde-{noise}-{tag}", "predict", task, noise=noise, **sde, **common)
            for protocol in ("replacement", "independent"):
                add(f"{protocol}-{tag}", "predict", task, protocol=protocol, **common)
            add(f"sde-test-{tag}", "predict", task, test=True, **sde, **common)
            add(f"sde-rebuilt-{tag}", "predict", task, relinearize=2, **sde, **common)
            add(f"sde-sketch-{tag}", "predict", task, sketch_dim=40, level=0.8, **sde, **common)
            metric = {"metric": "error", "thresholds": (0.5,)}
            add(f"sde-error-{tag}", "predict", task, **metric, **sde, **common)
        else:
            add(f"ode-{tag}", "predict", task, dynamics="ode", **common)
            add(f"ode-test-{tag}", "predict", task, dynamics="ode", test=True, **common)
            if task == "regression":
                closed = {"dynamics": "closed_form"}
                add(f"closed-{tag}", "predict", task, **closed, **common)
                add(f"closed-test-{tag}", "predict", task, test=True, **closed, **common)
    for name, batch in itertools.product(OPTIMIZERS, (None, 5)):
        common = {"optimizer": name} | ({"batch_size": batch, **KEY} if batch else {})
        tag = f"{name}-b{batch}"
        add(f"{tag}", "predict", "mlp", **common)
        add(f"{tag}-rebuilt", "predict", "mlp", relinearize=2, **common)
        if batch:
            continue
        add(f"{tag}-test", "predict", "mlp", test=True, **common)
        add(f"{tag}-sketch", "predict", "mlp", sketch_dim=40, **common | KEY)
        for dynamics in ("ode", "sde", "weight_space", "recursion"):
            add(f"{tag}-{dynamics}", "predict", "mlp", dynamics=dynamics, **common)
    for part, k in itertools.product(("a", "b"), (0, 2)):
        add(f"part-{part}-{k}", "predict", "mlp", learning_rate=0.3, trainable=part, relinearize=k)
    add("part-sketch", "predict", "mlp", learning_rate=0.3, trainable="a", sketch_dim=30, **KEY)
    for rate, k in itertools.product((3.0, 8.0, 40.0), (0, 2, "auto")):
        add(f"edge-{rate:g}-{k}", "predict", "mlp", learning_rate=rate, relinearize=k)
        less = rate / 10
        add(f"edge-r-{less:g}-{k}", "predict", "regression", learning_rate=less, relinearize=k)
    for i, options in enumerate(REFUSED):
        add(f"refused-{i}", "predict", "mlp", **options)
    grids: dict[str, dict[str, Any]] = {
        "rates": {"learning_rate": (0.05, 0.3, 2.0, 60.0), "momentum": (0.0, 0.9)},
        "batches": {"learning_rate": (0.1, 0.3), "batch_size": (None, 4, 7)},
        "schedules": {
            "learning_rate": 0.3, "schedule": ("constant", "linear", "cosine", "warmup_cosine"),
            "batch_size": (None, 5),
        },
        "horizons": {"learning_rate": 0.3, "steps": (10, 20, T)},
    }  # fmt: skip
    for (name, choices), task in itertools.product(grids.items(), ("mlp", "regression")):
        keyed = KEY if "batch_size" in choices else {}
        tag = f"sweep-{name}-{task}"
        add(tag, "sweep", task, grid=choices, **keyed)
        if task == "mlp":
            continue
        error = {"metric": "error", "thresholds": (0.3,)}
        add(f"{tag}-error", "sweep", task, grid=choices, **error, **keyed)
        absolute = {"rule": "absolute", "thresholds": (0.5,)}
        add(f"{tag}-absolute", "sweep", task, grid=choices, **absolute, **keyed)
    for task in ("mlp", "regression"):
        add(f"compare-{task}", "compare", task)
        add(f"compare-{task}-rate", "compare", task, learning_rate=RATES[task], momentum=0.5)
        add(f"compare-{task}-relative", "compare", task, rule="relative", batch_size=5, **KEY)
        for momentum in (0.0, 0.8):
            add(f"online-{task}-weights-{momentum:g}", "online", task, momentum=momentum)
    return out


REFUSED: tuple[dict[str, Any], ...] = (
    {}, {"learning_rate": 0.1, "optimizer": "sgd"}, {"learning_rate": -1.0},
    {"learning_rate": "0.1"}, {"learning_rate": 0.1, "momentum": 1.0},
    {"learning_rate": 0.1, "batch_size": 5}, {"learning_rate": 0.1, "batch_size": 500, **KEY},
    {"learning_rate": 0.1, "steps": 0}, {"learning_rate": 0.1, "thresholds": (2.0,)},
    {"learning_rate": 0.1, "thresholds": ()}, {"learning_rate": 0.1, "rule": "exact"},
    {"learning_rate": 0.1, "metric": "accuracy"}, {"learning_rate": 0.1, "dynamics": "magic"},
    {"learning_rate": 0.1, "relinearize": -1}, {"learning_rate": 0.1, "relinearize": "often"},
    {"learning_rate": 0.1, "sketch_dim": 40}, {"learning_rate": 0.1, "sketch_dim": 0, **KEY},
    {"learning_rate": 0.1, "dynamics": "sde"}, {"learning_rate": 0.1, "dynamics": "closed_form"},
    {"learning_rate": 0.1, "dynamics": "ode", "batch_size": 5, **KEY},
    {"learning_rate": 0.1, "dynamics": "ode", "relinearize": 2},
    {"learning_rate": 0.1, "level": 1.5}, {"learning_rate": 0.1, "key": "three"},
    {"learning_rate": 0.1, "test": True, "relinearize": 2}, {"learning_rate": 0.1, "level": 0.9},
    {"learning_rate": 0.1, "loss": "nothing"}, {"learning_rate": 0.1, "noise": "full"},
    {"learning_rate": 0.1, "protocol": "odd", "batch_size": 5, **KEY},
    {"learning_rate": 0.1, "protocol": "epochs"}, {"learning_rate": 0.1, "paths": 3},
    {"learning_rate": 0.1, "dynamics": "sde", "noise": "pink", "batch_size": 5, **KEY},
    {"learning_rate": 0.1, "tolerance": 0.1}, {"learning_rate": 0.1, "smooth": 2},
    {"learning_rate": 0.1, "relinearize": "auto", "tolerance": 0.0},
    {"learning_rate": 0.1, "window": 3}, {"learning_rate": 0.1, "window": 99, "rule": "plateau"},
    {"learning_rate": 0.1, "max_bytes": 10, "sketch_dim": 9, **KEY},
    {"learning_rate": 0.1, "max_bytes": -1}, {"learning_rate": 0.1, "kernel_batch_size": 0},
    {"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "sgd", "dynamics": "sde"},
    {"optimizer": "adam", "sketch_dim": 9, "level": 0.5, **KEY},
)  # fmt: skip
"""Options that do not go together, are out of range, or would do nothing."""


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Options as values: keys are numbers, optimisers and parts are names until here."""
    out = {k: v for k, v in options.items() if k not in ("call", "task", "test", "grid")}
    if isinstance(out.get("key"), int):
        out["key"] = jax.random.key(out["key"])
    if "optimizer" in out:
        out["optimizer"] = OPTIMIZERS[out["optimizer"]]()
    if "trainable" in out:
        part = out["trainable"]
        out["trainable"] = lambda path: part in path
    return out


def predict(task: Task, options: dict[str, Any]) -> dict[str, Any]:
    """What a forecast says, as plain values."""
    given = {"loss": task.loss, "steps": T, "relinearize": 0} | _given(options)
    if options.get("test"):
        given |= {"x_test": task.x_test, "y_test": task.y_test}
    found = jaxttp.predict_training_time(task.apply_fn, task.params, task.x, task.y, **given)
    bands, doubt = found.steps_band, found.steps_uncertainty
    return {name: getattr(found, name) for name in FIELDS} | {
        "steps": list(found.steps.values()),
        "band": None if bands is None else [list(band) for band in bands.values()],
        "doubt": None if doubt is None else list(doubt.values()),
        "stable": found.stable,
        "limit": np.asarray(found.max_learning_rate),
        "trust": found.trust,
        "message": found.message,
        "cost": [found.cost.kernels, found.cost.gradient_evaluations],
        "dynamics": found.dynamics,
    }


def swept(task: Task, options: dict[str, Any]) -> dict[str, Any]:
    """What a sweep says."""
    choices = grid(**({"steps": T} | options["grid"] | {"loss": task.loss}))
    found = jaxttp.sweep(
        task.apply_fn, task.params, task.x, task.y, choices, relinearize=0, **_given(options)
    )
    return {
        "loss": found.loss, "final_error": found.final_error, "steps": found.steps.tolist(),
        "stable": found.stable.tolist(), "limits": found.max_learning_rate,
        "warning": found.warning,
        "trust": [found.trust.get(i, "-") for i in range(len(choices))],
    }  # fmt: skip


def compared(task: Task, options: dict[str, Any]) -> dict[str, Any]:
    """What a comparison says."""
    candidates = {
        "all": Candidate(task.apply_fn, task.params),
        "head": Candidate(task.apply_fn, task.params, lambda path: "b" in path),
    }
    given = {"loss": task.loss, "steps": T, "time_steps": False, "relinearize": 0} | _given(options)
    found = jaxttp.compare(candidates, task.x, task.y, **given)
    return {
        "loss": found.sweep.loss, "steps": found.sweep.steps.tolist(), "names": list(found.names),
        "rates": np.array([one.learning_rate for one in found.sweep.settings]),
        "why": np.array([[one.speed, one.alignment] for one in found.explanations]),
    }  # fmt: skip


def watched(task: Task, options: dict[str, Any]) -> dict[str, Any]:
    """What a forecast says after some real steps."""
    setting = Hyperparameters(0.1, options["momentum"], loss=task.loss, steps=T)
    watch = Online(*task[:4], setting)
    jaxttp.train(*task[:4], loss=task.loss, optimizer=setting.optimizer(), steps=6, callback=watch)
    found = watch.forecast()
    return {
        "loss": found.loss, "steps": list(found.steps.values()), "stable": found.stable,
        "left": found.left_at,
    }  # fmt: skip


CALLS = {
    "predict": predict, "sweep": swept, "compare": compared, "online": watched,
}  # fmt: skip


def evaluate(options: dict[str, Any], known: dict[str, Task]) -> dict[str, Any]:
    """What one setting gives: values, or the words of its refusal."""
    try:
        found = CALLS[options["call"]](known[options["task"]], options)
    except (ValueError, TypeError) as refusal:
        return {"refused": f"{type(refusal).__name__}: {refusal}"}
    return {name: value for name, value in found.items() if value is not None}


def moved(now: dict[str, Any], then: dict[str, Any]) -> tuple[float, list[str]]:
    """How far curves moved, as a share of their size, and what differs otherwise."""
    worst, words = 0.0, []
    for name in sorted(set(now) | set(then)):
        a, b = now.get(name), then.get(name)
        if isinstance(b, np.ndarray) and a is not None:
            a = np.asarray(a, np.float64)
            if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
                words.append(f"{name}: {b.shape} {b.ravel()[:4]} -> {a.shape} {a.ravel()[:4]}")
                continue
            known = np.isfinite(b)
            size = float(np.max(np.abs(b[known]), initial=0.0)) or 1.0
            off = float(np.max(np.abs(a[known] - b[known]), initial=0.0)) / size
            worst = max(worst, off)
            if off > ROUNDING:
                words.append(f"{name}: moved by {off:.1e} of its size")
        elif a != b:
            words.append(f"{name}: {b!r} -> {a!r}")
    return worst, words


def write(found: dict[str, dict[str, Any]]) -> None:
    """Keep them."""
    arrays, plain = {}, {}
    for name, values in found.items():
        for field, value in values.items():
            if isinstance(value, jax.Array | np.ndarray):
                arrays[f"{name}/{field}"] = np.asarray(value, np.float64)
        plain[name] = {
            field: value
            for field, value in values.items()
            if not isinstance(value, jax.Array | np.ndarray)
        }
    np.savez_compressed(HERE, plain=np.array(json.dumps(plain)), **arrays)


def read() -> dict[str, dict[str, Any]]:
    """What was kept."""
    with np.load(HERE) as file:
        found = json.loads(str(file["plain"]))
        for key in set(file) - {"plain"}:
            name, field = key.rsplit("/", 1)
            if field not in ("scale", "rate_limits"):  # of corrections and limits that went
                found[name][field] = file[key]
    return found


ANSWERED = ("refused-23",)
"""Refused when the figures were frozen, answered since: test samples along rebuilt kernels."""


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep what is computed")
    parser.add_argument("--only", default="", help="names that hold this")
    parser.add_argument("--part", default="0/1", help="the i-th of n parts, as 0/2")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    i, n = map(int, arguments.part.split("/"))
    chosen = [name for name in settings() if arguments.only in name][i::n]
    known, everything = tasks(), settings()
    found, worst, off = {}, 0.0, 0
    then = {} if arguments.write else read()
    for count, name in enumerate(chosen):
        found[name] = evaluate(everything[name], known)
        if count % 40 == 39:
            jax.clear_caches()  # compiled code is never dropped otherwise
        if arguments.write:
            continue
        if name in ANSWERED:
            continue
        one, words = moved(found[name], then[name])
        worst, off = max(worst, one), off + bool(words)
        for line in words:
            print(f"{name}: {line}", flush=True)
    if arguments.write:  # what was not computed stays as it is
        write(found if len(found) == len(everything) else read() | found)
    refused = sum("refused" in one for one in found.values())
    print(f"{len(found)} settings, {refused} of them refused: {off} moved, by {worst:.1e} at most")


if __name__ == "__main__":
    main()
