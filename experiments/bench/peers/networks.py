"""The rows' networks in plain JAX, as functions of parameters that come from a file.

They import with any JAX since 0.4.25, so that neural-tangents sees the same function as we do.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.kernel import Case, mlp, resnet, vit
from experiments.bench.peers.protocol import Problem

PREFIX = "params/"


def transformer(
    n: int, tokens: int = 32, width: int = 128, depth: int = 4, words: int = 4, heads: int = 4
) -> Case:
    """Decoder over 256 tokens, tied embeddings; the logits of the first words at the last token."""
    rng = np.random.default_rng(0)

    def layer(*shape: int) -> dict[str, Any]:
        scale = 1 / np.sqrt(shape[0])
        w = jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)
        return {"w": w, "b": jnp.zeros(shape[-1])}

    params: dict[str, Any] = {
        "embed": jnp.asarray(rng.standard_normal((256, width)) / np.sqrt(width), jnp.float32),
        "position": jnp.asarray(0.1 * rng.standard_normal((tokens, width)), jnp.float32),
    }
    for block in range(depth):
        params[f"block{block}"] = {
            "norm1": jnp.ones(width),
            "norm2": jnp.ones(width),
            "qkv": layer(width, 3 * width),
            "out": layer(width, width),
            "up": layer(width, 4 * width),
            "down": layer(4 * width, width),
        }

    def dense(layer: Any, h: Any) -> Any:
        return h @ layer["w"] + layer["b"]

    def norm(scale: Any, h: Any) -> Any:
        h = h - h.mean(-1, keepdims=True)
        return scale * h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-6)

    def apply_fn(params: Any, ids: Any) -> Any:
        h = params["embed"][ids] + params["position"]
        mask = jnp.tril(jnp.ones((tokens, tokens), bool))
        for block in (params[f"block{index}"] for index in range(depth)):
            qkv = dense(block["qkv"], norm(block["norm1"], h))
            q, k, v = jnp.moveaxis(qkv.reshape(-1, tokens, 3, heads, width // heads), 2, 0)
            scores = jnp.einsum("nlhe,nmhe->nhlm", q, k) / np.sqrt(width // heads)
            shares = jax.nn.softmax(jnp.where(mask, scores, -1e9))
            mixed = jnp.einsum("nhlm,nmhe->nlhe", shares, v)
            h = h + dense(block["out"], mixed.reshape(-1, tokens, width))
            h = h + dense(block["down"], jax.nn.gelu(dense(block["up"], norm(block["norm2"], h))))
        return h[:, -1] @ params["embed"][:words].T

    ids = np.random.default_rng(1).integers(0, 256, (n, tokens))
    return Case(apply_fn, params, jnp.asarray(ids, jnp.int32))


NETWORKS: dict[str, Callable[[int], Case]] = {
    "digits": lambda n: resnet(n, 8, 1, 5, 1),
    "mlp": mlp,
    "mlp-small": lambda n: mlp(n, (64, 64, 64, 10)),
    "resnet20": lambda n: resnet(n, 32, 3, 10, 3),
    "vit": vit,
    "transformer": transformer,
    "tiny": lambda n: mlp(n, (5, 7, 3)),
}


def _names(params: Any) -> list[str]:
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    parts = [[getattr(key, "key", getattr(key, "idx", None)) for key in path] for path, _ in paths]
    return [PREFIX + "/".join(str(part) for part in path) for path in parts]


def make_problem(network: str, samples: int) -> Problem:
    """Weights and inputs of a network as arrays by name, as they travel to every worker.

    Args:
        network: a key of `NETWORKS`.
        samples: N.

    Returns:
        "x", "network" (its name), and "params/..." for every array of weights.
    """
    case = NETWORKS[network](samples)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(case.params)]
    found = {"x": np.asarray(case.x), "network": np.asarray(network)}
    return found | dict(zip(_names(case.params), leaves, strict=True))


def load(problem: Problem) -> Case:
    """The network of a problem, with the weights and inputs that are in it."""
    template = NETWORKS[str(problem["network"])](1)
    leaves = [jnp.asarray(problem[name]) for name in _names(template.params)]
    params = jax.tree.unflatten(jax.tree.structure(template.params), leaves)
    return Case(template.apply_fn, params, jnp.asarray(problem["x"]))
