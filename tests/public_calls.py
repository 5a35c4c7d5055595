"""A tiny valid call of every public function, for `test_bad_inputs` and `test_transforms`.

`PUBLIC` are the modules whose functions users call; `functions` finds them. `calls` gives each what
its signature requires, by the names of the arguments: values that all packages share, and those of
the function's own package. Arguments that may be left out, and values for one function alone, are
given for it by name. What is not called is in `LEFT_OUT`, with the reason.
"""

import ast
import functools
import importlib
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxttp
from jaxttp import conditioning, data, models, ntk
from jaxttp.forecast import Candidate, Descent, Hyperparameters, Problem

PUBLIC = (
    "jaxttp", "conditioning", "dynamics", "gauss_newton", "losses", "ntk", "representation",
    "forecast", "data", "models",
)  # fmt: skip
LEFT_OUT = {
    "dataset_names": "takes nothing", "model_names": "takes nothing",
    "from_equinox": "takes a module; tests/test_adapters.py",
    "from_keras": "takes a module; tests/test_from_keras.py",
    "from_linen": "takes a module; tests/test_adapters.py",
    "from_torch": "takes a module; tests/test_from_torch.py",
    "load_tokenizer": "takes a folder; tests/data/test_text.py",
    "load_texts": "takes a folder; tests/data/test_text.py",
    "load_corpus": "takes a folder; tests/data/test_corpus.py",
    "load_transformer": "takes a folder; tests/models/test_language.py",
    "adapter_targets": "takes a network of a folder; tests/models/test_language.py",
    **dict.fromkeys(
        ("resnet18", "resnet34", "resnet50", "resnet20", "resnet32", "vit_tiny", "vit_small",
         "vit_base", "vgg5", "digits_resnet", "load_pretrained"),
        "a network by name: make_model stands for all",
    ),
}  # fmt: skip
"""Functions that are not called, and why. `plots` and `pipeline` take results and settings."""


def functions() -> dict[str, Callable[..., Any]]:
    """The public functions by name, "conditioning.linear_bound"; each once."""
    found: dict[str, Callable[..., Any]] = {}
    for name in PUBLIC:
        module = importlib.import_module(name if name == "jaxttp" else f"jaxttp.{name}")
        for public in _names(module):
            value = getattr(module, public)
            ours = inspect.isfunction(value) and value.__module__.startswith("jaxttp")
            if ours and value not in found.values():
                found[public if name == "jaxttp" else f"{name}.{public}"] = value
    return found


def _names(module: Any) -> list[str]:
    """Of ``__all__``; else what is defined there or imported under its own name."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    tree = ast.parse(Path(module.__file__).read_text())
    imported = [
        alias.asname or ""
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [name for name in imported + defined if not name.startswith("_")]


def network(params: Any, x: Any) -> jax.Array:
    """Outputs (N, 2) of a network with two layers."""
    return jnp.tanh(x @ params["w"]) @ params["v"]


Known = dict[str, Any]
"""Values by the names of arguments; or such values by the names of functions."""


def _common() -> Known:
    """For functions of every package: six samples of three features, two classes."""
    rng = np.random.default_rng(0)
    w, v = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((3, 4), (4, 2)))
    x, y = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32), jnp.asarray([0, 1, 0, 1, 1, 0])
    params = {"w": w, "v": v}
    return {
        "apply_fn": network, "params": params, "x": x, "x1": x, "y": y, "loss": "cross_entropy",
        "f0": network(params, x), "kernel": jaxttp.empirical_ntk(network, params, x),
        "key": jax.random.key(0), "optimizer": optax.sgd(0.1, 0.5), "learning_rate": 0.1,
        "momentum": 0.5, "batch_size": 2, "steps": 3, "ts": jnp.asarray([0.0, 1.0, 2.0]),
        "curve": jnp.asarray([1.0, 0.6, 0.4, 0.3, 0.28]),
        "settings": (Hyperparameters(0.1, steps=4), Hyperparameters(0.2, steps=4)),
        "candidates": {"all": Candidate(network, params)},
    }  # fmt: skip


def _conditioning(common: Known) -> tuple[Known, Known]:
    rng = np.random.default_rng(0)

    def draw(*size: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=size), jnp.float32)

    weights, x = [draw(4, 3), draw(2, 4)], draw(3, 5)
    covariance = x @ x.T / 5
    known = {
        "weights": weights, "covariance": covariance, "W": draw(2, 4), "V": draw(4, 3), "X": x,
        "alpha": 0.1, "output_weights": draw(2, 4), "input_weights": draw(4, 3),
        "teacher": draw(2, 3), "filters": [draw(2, 1, 2, 2)],
        "shape": (3, 3), "width": 4, "widths": [3, 4, 2], "d": 3, "k": 2, "m": 8, "n": 5,
        "var_w": 0.1, "var_v": 0.1, "t": 0.5,
        "matrix_or_operator": covariance, "condition": 5.0,
        "accuracy": 0.01, "rate": 0.5, "parameter": "width", "values": [4, 6],
        "masks": conditioning.magnitude_masks(common["params"], 0.5),
        "result": conditioning.condition_number(covariance, spectrum=True),
    }  # fmt: skip
    linear = {"covariance": covariance, "skip": 0.5}
    return known, {
        "functional_hessian_bound": {"covariance": covariance},
        "linear_bound": linear,
        "condition_number": {"rank": 3, "rtol": 1e-6},
        "toeplitz": {"filters": draw(2, 1, 2, 2)},
        "asymptotic_bound": {"covariance_condition": 2.0},
        "gaussian_init_bound": {"m": 900},
        "gaussian_init_probability": {"t": 2.0},
        "batch_norm_scales": {"covariance": covariance, "epsilon": 1e-5},
        "gauss_newton_linear": linear | {"scales": [jnp.ones(4)]},
        "gauss_newton_linear_operator": linear,
        "linear_point": linear,
        "generic_rank": {"data_rank": 3},
        "rank_sensitivity": {"fraction": 1.0},
        "gaussian_weights": {"gain": 2.0},
        "sweep": {
            "inputs": 3, "outputs": 2, "depth": 2, "skip": 0.0, "alpha": 0.01, "seeds": 1,
        },
    }  # fmt: skip


def _dynamics(common: Known) -> tuple[Known, Known]:
    rng = np.random.default_rng(1)
    known = {
        "f": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32),
        "w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32),
        "labels": jnp.asarray([0, 1, 1, 0]), "n": 6, "samples": 4, "classes": 2, "rebuilds": 1,
        "kernel_fn": lambda params: jaxttp.empirical_ntk(network, params, common["x"]),
    }  # fmt: skip
    batches = {"batch_size": 2, "key": common["key"]}
    return known, {
        "closed_form": {"loss": "squared_error"},
        "diffusion": {"momentum": 0.5, "paths": 2, "learning_rate": 0.1},
        "linear_filter": {"steps": 8},
        "recursion": batches,
        "weight_space": batches,
        "power_law_labels": {"exponent": 1.0},
    }


def _gauss_newton(common: Known) -> tuple[Known, Known]:
    draw = np.random.default_rng(1)
    weights, bottlenecks, x = (
        jnp.asarray(scale * draw.normal(size=size), jnp.float32)
        for scale, size in ((0.3, (1, 2, 2, 6)), (1.0, (1, 2, 6, 2)), (1.0, (3, 4)))
    )
    known = {
        "weights": weights, "bottlenecks": bottlenecks, "x": x, "x1": x, "outputs": x,
        "y": jnp.asarray([0, 1, 2]), "epsilon": jnp.ones((3, 4), jnp.float32), "targets": x + 0.1,
        "width": 4,
    }  # fmt: skip
    solver = {"rtol": 0.01, "atol": 1e-5}
    return known, {
        "selection_readout": {"outputs": 2},
        "orthonormal_readout": {"outputs": 2},
        "output_change": {"damping": 1e-3},
        "gauss_newton_direction": solver,
        "gauss_newton": {"damping": 1e-3, **solver},
    }


def _losses(common: Known) -> tuple[Known, Known]:
    targets = jax.nn.one_hot(common["y"], 2)
    return {"outputs": common["f0"], "targets": targets, "width": 3}, {}


def _ntk(common: Known) -> tuple[Known, Known]:
    components = jnp.asarray(np.random.default_rng(2).normal(size=(6, 4)), jnp.float32)
    known = {
        "components": components, "labels": common["y"], "classes": 2, "count": 2,
        "values": jnp.asarray([8.0, 4.0, 2.0, 1.0, 0.5, 0.2]), "residual": common["f0"],
        "system": ntk.eigendecomposition(common["kernel"]),
    }  # fmt: skip
    return known, {
        "extreme_eigenvalues": {"depth": 4},
        "spectral_density": {"depth": 4, "probes": 2},
    }


def _representation(common: Known) -> tuple[Known, Known]:
    rng = np.random.default_rng(3)
    one, two = (jnp.asarray(rng.normal(size=(6, 4)), jnp.float32) for _ in range(2))
    kernels = jnp.stack([jnp.eye(4), 2.0 * jnp.eye(4) + 1, 3.0 * jnp.eye(4) + 1])
    smaller = jax.tree.map(lambda a: 0.9 * a, common["params"])
    known = {
        "features": one, "first": kernels[0], "second": kernels[1], "kernels": kernels,
        "reference": smaller, "history": [common["params"], smaller],
    }  # fmt: skip
    return known, {
        "linear_cka": {"first": one, "second": two},
        "cka_table": {"first": {"a": one, "b": two}},
    }


def _top(common: Known) -> tuple[Known, Known]:
    x, y = common["x"], common["y"]
    known = {
        "ids": [0, 1], "dim": 8, "threshold": 0.1, "horizon": 4, "tokens": 2,
        "batches": [(np.asarray(x), np.asarray(y))],
    }  # fmt: skip
    batches = {"batch_size": 2, "key": common["key"]}
    return known, {
        "class_sketch": {"check": 2},
        "compare": {
            "learning_rate": 0.1, "momentum": 0.5, "steps": 4, "time_steps": False,
            "relinearize": 0,
        },
        "draw_samples": {"samples": 4, "seed": 0},
        "empirical_ntk": {"x2": x[:2]},
        "grid": {"learning_rate": (0.1, 0.2), "steps": 4},
        "label_words": {"apply_fn": lambda w, x: w[x]},
        "predict_training_time": batches | {
            "y": y, "learning_rate": 0.1, "momentum": 0.5, "steps": 4, "relinearize": 0,
            "x_test": x[:2], "y_test": y[:2],
        },
        "print_progress": {"every": 0.5},
        "race": {"target_loss": 0.3}, "race_starts": {"target_loss": 0.3},
        "sample_tokens": {
            "apply_fn": lambda w, x: w[x], "x": jnp.asarray([[0, 1, 2], [2, 1, 0]]),
            "y": jnp.asarray([[1, 2, 0], [1, 0, 2]]),
        },
        "sweep": {"relinearize": 0},
        "time_step": {"repeats": 1},
        "train": batches,
        "training_time": {"smooth": 1},
        "wall_clock": {"steps": {0.1: 3}, "repeats": 1, "efficiency": 0.4},
        "weighted": {"sample_weight": jnp.ones(6), "class_weight": jnp.asarray([1.0, 2.0])},
        "from_nnx": {"module": _module()},
    }  # fmt: skip


def _forecast(common: Known) -> tuple[Known, Known]:
    x, y = common["x"], common["y"]
    known = {
        "problem": Problem.of(network, common["params"], x, y, loss="cross_entropy"),
        "descent": Descent.of(learning_rate=0.1, steps=4), "x_watched": x[:2], "y_watched": y[:2],
    }  # fmt: skip
    return known, {
        "stale_gradient_forecast": {
            "optimizer": optax.sgd(0.1), "steps": 40, "loss": "cross_entropy", "fraction": 0.95,
            "total_samples": 8,
        },
    }  # fmt: skip


def _folder() -> Path:
    """With a table and weights."""
    folder = Path(tempfile.mkdtemp(prefix="jaxttp-calls-"))
    (folder / "a.csv").write_text("a,b\n1,0\n2,1\n3,0\n")
    models.save_params(folder / "a.safetensors", jaxttp.from_nnx(_module()).params)
    return folder


def _module() -> Any:
    from flax import nnx

    return models.MLP((3, 4, 2), rngs=nnx.Rngs(0))


def _data(common: Known) -> tuple[Known, Known]:
    pixels = np.random.default_rng(2).uniform(size=(4, 4, 4, 3)).astype(np.float32)
    labels = np.arange(4, dtype=np.int32) % 2
    images = data.Dataset(pixels, labels, "tiny", "noise", 2, ("a", "b"))
    folder, wine = _folder(), data.load_dataset("wine")
    known = {
        "name": "wine", "path": str(folder / "a.csv"), "dataset": wine, "per_class": 2,
        "preprocessing": data.Preprocessing(2),
    }  # fmt: skip
    few = {"per_class": 2, "key": common["key"]}
    return known, {
        "load_dataset": few, "select": few, "has_texts": {"path": str(folder)},
        "split": {"held_out": 0.2}, "imagenet_preprocessing": {"crop": 4},
        "vit_preprocessing": {"crop": 4}, "preprocess": {"dataset": images},
    }  # fmt: skip


def _models(common: Known) -> tuple[Known, Known]:
    from flax import nnx

    folder, module = _folder(), _module()
    model = jaxttp.from_nnx(module)
    known = {
        "module": module, "model": model, "params": model.params, "rank": 1, "num_classes": 3,
        "path": str(folder / "a.safetensors"), "features": 3, "outputs": 2, "rngs": nnx.Rngs(0),
        "adapters": models.lora(model, rank=1, key=common["key"]).params, "scale": 1.0,
        "output_fn": lambda f: f[:, :1], "trainable": models.head_only, "name": "vgg5", "count": 1,
    }  # fmt: skip
    return known, {
        "calibrate_batch_norm": {
            "module": nnx.BatchNorm(4, rngs=nnx.Rngs(0)), "x": jnp.ones((4, 4), jnp.float32),
        },
        "head_only": {"path": "head/kernel"},
        "last_blocks": {"params": {"blocks": {"0": jnp.ones(2), "1": jnp.ones(2)}}},
        "lora_scale": {"alpha": 4.0},
        "merge_lora": {"scale": 1.0}, "linear_head": {"scale": 1.0}, "fresh_head": {"scale": 1.0},
        "save_params": {"path": str(folder / "b.safetensors")},
        "load_weights": {"model": module},
    }  # fmt: skip


@functools.cache
def calls() -> dict[str, Known]:
    """Valid arguments of every public function that is not left out, by its name."""
    common = _common()
    makers = {
        "": _top, "conditioning": _conditioning, "dynamics": _dynamics,
        "gauss_newton": _gauss_newton, "losses": _losses, "ntk": _ntk,
        "representation": _representation, "forecast": _forecast, "data": _data, "models": _models,
    }  # fmt: skip
    packages = {package: make(common) for package, make in makers.items()}
    found = {}
    for name, function in functions().items():
        package, _, own = name.rpartition(".")
        if own in LEFT_OUT:
            continue
        known, special = packages[package]
        given = special.get(own, {})
        required = [
            one.name
            for one in inspect.signature(function).parameters.values()
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
        values = common | known | given
        lost = [argument for argument in required if argument not in values]
        assert not lost, f"{name} needs {lost}: say what tests/public_calls.py is to give it"
        found[name] = {argument: values[argument] for argument in required} | given
    return found
