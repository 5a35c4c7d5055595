"""A tiny valid call of every public function, for `test_bad_inputs` and `test_transforms`.

`PUBLIC` are the modules whose functions users call; `functions` finds them, `calls` has arguments
for each, by name. What is not called is in `LEFT_OUT`, with the reason.
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
    "pretrained_names": "takes nothing",
    "from_equinox": "takes a module; tests/test_adapters.py",
    "from_keras": "takes a module; tests/test_from_keras.py",
    "from_linen": "takes a module; tests/test_adapters.py",
    "from_torch": "takes a module; tests/test_from_torch.py",
    "load_tokenizer": "takes a folder; tests/data/test_text.py",
    "load_texts": "takes a folder; tests/data/test_text.py",
    "load_corpus": "takes a folder; tests/data/test_corpus.py",
    "load_transformer": "takes a folder; tests/models/test_language.py",
    "load_adapter": "takes a folder; tests/models/test_peft.py",
    "save_adapter": "takes a folder; tests/models/test_peft.py",
    "adapter_targets": "takes a network of a folder; tests/models/test_peft.py",
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
    """Outputs (N, 2)."""
    return jnp.tanh(x @ params["w"]) @ params["v"]


@functools.cache
def problem() -> dict[str, Any]:
    """A network with two layers, four samples of three features, two classes."""
    rng = np.random.default_rng(0)
    w, v = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((3, 4), (4, 2)))
    x = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)
    return {
        "apply_fn": network, "params": {"w": w, "v": v}, "x": x,
        "y": jnp.asarray([0, 1, 0, 1, 1, 0]),
    }  # fmt: skip


@functools.cache
def moved() -> dict[str, Any]:
    """Kernel, outputs and labels of it, as the dynamics take them."""
    apply_fn, params, x, y = problem().values()
    return {
        "kernel": jaxttp.empirical_ntk(apply_fn, params, x), "f0": apply_fn(params, x), "y": y,
        "loss": "cross_entropy",
    }  # fmt: skip


def _reversible() -> dict[str, Any]:
    draw = np.random.default_rng(1)
    return {
        "weights": jnp.asarray(0.3 * draw.normal(size=(1, 2, 2, 6)), jnp.float32),
        "bottlenecks": jnp.asarray(draw.normal(size=(1, 2, 6, 2)), jnp.float32),
        "x": jnp.asarray(draw.normal(size=(3, 4)), jnp.float32),
    }


def _conditioning(rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    def draw(*size: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=size), jnp.float32)

    weights, x = [draw(4, 3), draw(2, 4)], draw(3, 5)
    covariance = x @ x.T / 5
    linear = {"weights": weights, "covariance": covariance}
    leaky = {"W": draw(2, 4), "V": draw(4, 3), "X": x, "alpha": 0.1}
    network = {key: problem()[key] for key in ("apply_fn", "params", "x")}
    widths = {"d": 3, "k": 2, "m": 8}
    found = conditioning.condition_number(covariance, spectrum=True)
    masks = conditioning.magnitude_masks(problem()["params"], 0.5)
    return {
        "whitening": {"covariance": covariance},
        "functional_hessian_bound": {
            "output_weights": draw(2, 4), "input_weights": draw(4, 3), "teacher": draw(2, 3),
            "covariance": covariance,
        },
        "functional_hessian_spectrum": {"residual_covariance": draw(2, 3), "width": 4},
        "linear_bound": linear | {"skip": 0.5},
        "psd_residual_bound": {
            "weights": [covariance, covariance], "covariance": covariance, "skip": 1.0,
        },
        "psd_sum_bounds": {"first": covariance, "second": covariance + jnp.eye(3)},
        "condition_number": {"matrix_or_operator": covariance, "rank": 3, "rtol": 1e-6},
        "contraction_rate": {"condition": 5.0},
        "steps_to_accuracy": {"condition": 5.0, "accuracy": 0.01},
        "gauss_newton_convolution": {"filters": [draw(2, 1, 2, 2)], "shape": (3, 3)},
        "toeplitz": {"filters": draw(2, 1, 2, 2), "shape": (3, 3)},
        "asymptotic_bound": widths | {"var_w": 0.1, "var_v": 0.1, "covariance_condition": 2.0},
        "gaussian_init_bound": {"d": 3, "k": 2, "m": 900, "var_w": 0.1, "var_v": 0.1, "t": 0.5},
        "gaussian_init_probability": {"t": 2.0},
        "leaky_relu_bound": leaky, "leaky_relu_gram": leaky,
        "leaky_relu_rank": {"d": 3, "k": 2, "m": 4, "n": 5},
        "batch_norm_scales": linear | {"epsilon": 1e-5},
        "gauss_newton_linear": linear | {"skip": 0.5, "scales": [jnp.ones(4)]},
        "gauss_newton_linear_operator": linear | {"skip": 0.5},
        "linear_point": linear | {"skip": 0.5},
        "layer_spectra": {"weights": weights},
        "generic_rank": {"widths": [3, 4, 2], "data_rank": 3},
        "curvature_matrix": network, "curvature_operator": network,
        "rank_sensitivity": {"result": found, "share": 1.0},
        "apply_masks": {"params": problem()["params"], "masks": masks},
        "keep_pruned": {"optimizer": optax.sgd(0.1), "masks": masks},
        "magnitude_masks": {"params": problem()["params"], "rate": 0.5},
        "gaussian_weights": {"widths": [3, 4, 2], "key": jax.random.key(0), "gain": 2.0},
        "sweep": {
            "parameter": "width", "values": [4, 6], "inputs": 3, "outputs": 2, "depth": 2,
            "skip": 0.0, "alpha": 0.01, "seeds": 1, "key": jax.random.key(0),
        },
    }  # fmt: skip


def _dynamics(rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    ts, step = jnp.asarray([0.0, 1.0, 2.0]), {"learning_rate": 0.1}
    sgd = {"optimizer": optax.sgd(0.1, 0.5), "steps": 3}
    batches = {"batch_size": 2, "key": jax.random.key(0)}
    real = problem() | {"loss": "cross_entropy"}
    factors = {
        "f": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32),
        "w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "labels": jnp.asarray([0, 1, 1, 0]),
        "learning_rate": 0.1,
    }  # fmt: skip
    return {
        "batch_indices": {"key": jax.random.key(0), "n": 6, "batch_size": 2, "steps": 3},
        "closed_form": moved() | {"loss": "squared_error", "ts": ts} | step,
        "diffusion": moved() | batches | {"steps": 3, "momentum": 0.5, "paths": 2} | step,
        "linear_filter": {"optimizer": optax.sgd(0.1, 0.5), "steps": 8},
        "gradient_flow": moved() | {"ts": ts} | step,
        "diagonal_noise": real,
        "effective_learning_rate": {"learning_rate": 0.1, "momentum": 0.5},
        "recursion": moved() | sgd | batches,
        "relinearized_recursion": real | sgd | {
            "kernel_fn": lambda params: jaxttp.empirical_ntk(
                problem()["apply_fn"], params, problem()["x"]
            ),
            "rebuilds": 1,
        },
        "balanced_features": {"w": factors["w"], "samples": 4, "key": jax.random.key(0)},
        "power_law_labels": {"samples": 6, "classes": 2, "exponent": 1.0},
        "two_factor_descent": factors | {"steps": 3},
        "two_factor_flow": factors | {"ts": ts},
        "two_factor_observables": factors,
        "weight_space": real | sgd | batches,
    }  # fmt: skip


def _gauss_newton(rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    net = _reversible()
    outputs = {"outputs": net["x"], "weights": net["weights"], "bottlenecks": net["bottlenecks"]}
    tangent, labels = jnp.ones((3, 4), jnp.float32), jnp.asarray([0, 1, 2])
    moving = {"outputs": net["x"], "y": labels, "loss": "cross_entropy"}
    solver = {"rtol": 0.01, "atol": 1e-5}
    return {
        "revmlp_forward": net, "revmlp_inverse": outputs,
        "selection_readout": {"outputs": 2, "width": 4},
        "orthonormal_readout": {"key": jax.random.key(0), "outputs": 2, "width": 4},
        "output_change": moving | {"damping": 1e-3},
        "gauss_newton_direction": net | solver | {"epsilon": tangent},
        "gauss_newton": {"learning_rate": 0.1, "damping": 1e-3, **solver},
        "flow_error": net | {"targets": net["x"] + 0.1, "learning_rate": 0.1, "steps": 2},
        "forecast_steps": moving | {"learning_rate": 0.1, "steps": 3},
        "revmlp_kernel": {"x1" if name == "x" else name: value for name, value in net.items()},
    }  # fmt: skip


def _losses_and_kernels(rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    def features() -> jax.Array:
        return jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)

    outputs, y = moved()["f0"], problem()["y"]
    measured = {"outputs": outputs, "targets": jax.nn.one_hot(y, 2)}
    values = jnp.asarray([8.0, 4.0, 2.0, 1.0, 0.5, 0.2])
    system = ntk.eigendecomposition(moved()["kernel"])
    history = [problem()["params"], jax.tree.map(lambda a: 0.9 * a, problem()["params"])]
    kernels = jnp.stack([jnp.eye(4), 2.0 * jnp.eye(4) + 1, 3.0 * jnp.eye(4) + 1])
    return {
        "losses.misclassified": measured, "losses.unexplained_variance": measured,
        "losses.wrong_bits": measured,
        "losses.get_loss": {"loss": "cross_entropy"},
        "losses.encode_targets": {"loss": "cross_entropy", "y": y, "outputs": outputs},
        "ntk.as_matrix": {"kernel": moved()["kernel"]},
        "ntk.class_separation": {"components": features(), "labels": y, "classes": 2},
        "ntk.eigendecomposition": {"kernel": moved()["kernel"]},
        "ntk.extreme_eigenvalues": {
            "kernel": moved()["kernel"], "key": jax.random.key(0), "depth": 4,
        },
        "ntk.fit_power_law": {"values": values},
        "ntk.gradient_components": {"system": system, "count": 2},
        "ntk.label_alignment": {"system": system, "residual": outputs},
        "ntk.spectral_density": {
            "kernel": moved()["kernel"], "key": jax.random.key(0), "depth": 4, "probes": 2,
        },
        "representation.alpha_req": {"features": features()},
        "representation.participation_ratio": {"features": features()},
        "representation.rankme": {"features": features()},
        "representation.representation_geometry": {"features": features()},
        "representation.singular_values": {"features": features()},
        "representation.cka_table": {"first": {"a": features(), "b": features()}},
        "representation.kernel_distance": {"first": kernels[0], "second": kernels[1]},
        "representation.kernel_rate": {"kernels": kernels, "ts": jnp.asarray([0.0, 1.0, 2.0])},
        "representation.linear_cka": {"first": features(), "second": features()},
        "representation.weight_cosine": {"params": history[1], "reference": history[0]},
        "representation.weight_path": {"history": history},
    }  # fmt: skip


def _forecasts() -> dict[str, dict[str, Any]]:
    apply_fn, params, x, y = problem().values()
    base, key = {"apply_fn": apply_fn, "params": params, "x": x}, jax.random.key(0)
    real, setting = problem(), Hyperparameters(0.1, steps=4)
    curve = jnp.asarray([1.0, 0.6, 0.4, 0.3, 0.28])
    sgd, many = {"optimizer": optax.sgd(0.1)}, (setting, Hyperparameters(0.2, steps=4))
    kernel = {"kernel": moved()["kernel"]}
    return {
        "class_sketch": base | {"key": key, "check": 2},
        "compare": {
            "candidates": {"all": Candidate(apply_fn, params)}, "x": x, "y": y,
            "learning_rate": 0.1, "momentum": 0.5, "steps": 4, "time_steps": False,
            "relinearize": 0,
        },
        "draw_samples": {"batches": [(np.asarray(x), np.asarray(y))], "samples": 4, "seed": 0},
        "early_stopping": {"curve": curve},
        "empirical_ntk": {"apply_fn": apply_fn, "params": params, "x1": x, "x2": x[:2]},
        "flatten_tokens": {"apply_fn": apply_fn},
        "grid": {"learning_rate": (0.1, 0.2), "steps": 4},
        "label_words": {"apply_fn": lambda w, x: w[x], "ids": [0, 1]},
        "ntk_operator": base, "ntk_plan": {"apply_fn": apply_fn, "params": params, "x1": x},
        "predict_training_time": real | {
            "learning_rate": 0.1, "momentum": 0.5, "batch_size": 2, "key": key, "steps": 4,
            "relinearize": 0, "x_test": x[:2], "y_test": y[:2],
        },
        "print_progress": {"every": 0.5},
        "race": real | {"settings": many, "target_loss": 0.3},
        "race_starts": {
            "candidates": {"all": Candidate(apply_fn, params)}, "x": x, "y": y, "settings": many,
            "target_loss": 0.3,
        },
        "sample_tokens": {
            "apply_fn": lambda w, x: w[x], "x": jnp.asarray([[0, 1, 2], [2, 1, 0]]),
            "y": jnp.asarray([[1, 2, 0], [1, 0, 2]]), "tokens": 2, "key": key,
        },
        "sketch_jacobian": base | {"key": key, "dim": 8},
        "sweep": real | {"settings": many, "relinearize": 0},
        "time_step": real | sgd | {"loss": "cross_entropy", "repeats": 1},
        "train": real | sgd | {
            "loss": "cross_entropy", "steps": 3, "batch_size": 2, "key": key,
        },
        "training_time": {"curve": curve, "threshold": 0.1, "smooth": 1},
        "wall_clock": real | sgd | {
            "steps": {0.1: 3}, "horizon": 4, "repeats": 1, "efficiency": 0.4,
        },
        "weighted": {"y": y, "sample_weight": jnp.ones(6), "class_weight": jnp.asarray([1.0, 2.0])},
        "losses.smooth_curve": {"curve": curve, "width": 3},
        "forecast.forecast_training": {
            "problem": Problem.of(apply_fn, params, x, y, loss="cross_entropy"),
            "descent": Descent.of(learning_rate=0.1, steps=4),
        },
        "forecast.held_forecast": problem() | sgd | {
            "x_watched": x[:2], "y_watched": y[:2], "steps": 40, "batch_size": 2, "key": key,
            "loss": "cross_entropy", "share": 0.95, "total_samples": 8,
        },
        "forecast.sweep_kernel": kernel | {"f0": moved()["f0"], "y": y, "settings": many},
    }  # fmt: skip


def _data_and_models() -> dict[str, dict[str, Any]]:
    from flax import nnx

    wine = data.load_dataset("wine")
    draw = np.random.default_rng(2)
    pixels = draw.uniform(size=(4, 4, 4, 3)).astype(np.float32)
    images = data.Dataset(pixels, np.arange(4, dtype=np.int32) % 2, "tiny", "noise", 2, ("a", "b"))
    module = models.MLP((3, 4, 2), rngs=nnx.Rngs(0))
    normed = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    model = jaxttp.from_nnx(module)
    adapted = models.lora(model, rank=1, key=jax.random.key(0))
    folder = Path(tempfile.mkdtemp(prefix="jaxttp-calls-"))
    (folder / "a.csv").write_text("a,b\n1,0\n2,1\n3,0\n")
    models.save_params(folder / "a.safetensors", model.params)
    return {
        "from_nnx": {"module": module},
        "data.load_dataset": {"name": "wine", "per_class": 2, "key": jax.random.key(0)},
        "data.load_table": {"path": str(folder / "a.csv")},
        "data.load_whole": {"name": "wine"},
        "data.is_table": {"name": "wine"},
        "data.has_texts": {"path": str(folder)},
        "data.select": {"dataset": wine, "per_class": 2, "key": jax.random.key(0)},
        "data.split": {"dataset": wine, "held_out": 0.2, "key": jax.random.key(0)},
        "data.imagenet_preprocessing": {"crop": 4}, "data.vit_preprocessing": {"crop": 4},
        "data.preprocess": {"dataset": images, "preprocessing": data.Preprocessing(2)},
        "models.calibrate_batch_norm": {"module": normed, "x": jnp.asarray(pixels[:, 0, :, 0])},
        "models.make_model": {"name": "vgg5", "num_classes": 2, "rngs": nnx.Rngs(0)},
        "models.map_outputs": {"model": model, "output_fn": lambda f: f[:, :1]},
        "models.freeze": {"model": model, "trainable": models.head_only},
        "models.head_only": {"path": "head/kernel"},
        "models.last_blocks": {
            "params": {"blocks": {"0": jnp.ones(2), "1": jnp.ones(2)}}, "count": 1,
        },
        "models.lora": {"model": model, "rank": 1, "key": jax.random.key(0)},
        "models.lora_scale": {"rank": 2, "alpha": 4.0},
        "models.merge_lora": {"params": model.params, "adapters": adapted.params, "scale": 1.0},
        "models.linear_head": {"features": 3, "outputs": 2, "rngs": nnx.Rngs(0), "scale": 1.0},
        "models.fresh_head": {
            "module": module, "num_classes": 3, "key": jax.random.key(0), "scale": 1.0,
        },
        "models.save_params": {"path": str(folder / "b.safetensors"), "params": model.params},
        "models.load_params": {"path": str(folder / "a.safetensors")},
        "models.with_params": {"module": module, "params": model.params},
        "models.load_weights": {"model": module, "path": str(folder / "a.safetensors")},
    }  # fmt: skip


@functools.cache
def calls() -> dict[str, dict[str, Any]]:
    """Valid arguments of every public function that is not left out, by its name."""
    rng = np.random.default_rng(0)
    packages = {
        "conditioning": _conditioning(rng), "dynamics": _dynamics(rng),
        "gauss_newton": _gauss_newton(rng),
    }  # fmt: skip
    nested = {
        f"{package}.{name}": given
        for package, found in packages.items()
        for name, given in found.items()
    }
    return nested | _losses_and_kernels(rng) | _forecasts() | _data_and_models()
