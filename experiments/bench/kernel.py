"""Time, memory and error of exact kernels, beside the rate of a product of matrices.

    python -m experiments.bench.kernel                      # every case, the method "auto"
    python -m experiments.bench.kernel digits gpt2 --methods auto layerwise jacobian plain
    python -m experiments.bench.kernel resnet20-1000 --max-bytes 2147483648

A process for each case and method. Columns: "first", "wall", "cpu" are seconds of the first call
and medians of later ones, by the clock and by the process's CPUs; "operations" those of all
products of matrices in the program, and "ratio" the CPU seconds over what these take at the rate of
a (2048, 2048) float32 product timed in turn; "error" is the largest deviation from a float64
Jacobian on four samples, relative to the largest entry. "plain" is `vmap(jacrev)` and one einsum,
what one writes without a library.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np

from experiments.bench.harness import (
    Row,
    in_own_process,
    in_turn,
    parser,
    peak_gib,
    publish,
    store_of,
)

MODULE = "experiments.bench.kernel"
METHODS = ("auto", "layerwise", "jacobian", "vector_product", "plain")
COLUMNS = (
    "case", "method", "chosen", "parameters", "first", "wall", "cpu", "operations", "ratio",
    "peak GiB", "planned GiB", "error",
)  # fmt: skip
SIDE = 2048
"""Of the product whose rate the operations are held against."""


class Case(NamedTuple):
    """A network and its inputs."""

    apply_fn: Callable[[Any, Any], Any]
    params: Any
    x: Any


def _conv(layer: Any, x: Any, stride: int = 1) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(
        x, layer["w"], (stride, stride), "SAME", dimension_numbers=numbers
    )
    return y + layer["b"]


def _layer(rng: np.random.Generator, *shape: int) -> dict[str, Any]:
    scale = np.sqrt(2 / np.prod(shape[:-1]))
    w = scale * rng.standard_normal(shape)
    return {"w": jnp.asarray(w, jnp.float32), "b": jnp.zeros(shape[-1], jnp.float32)}


def _inputs(rng: np.random.Generator, *shape: int) -> Any:
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def resnet(n: int, size: int, channels: int, classes: int, blocks: int) -> Case:
    """Residual stages of widths 16/32/64, strides 1/2/2, `blocks` blocks each; norm-free."""
    rng = np.random.default_rng(0)
    params: dict[str, Any] = {"stem": _layer(rng, 3, 3, channels, 16)}
    plan: list[tuple[str, int]] = []
    width = 16
    for stage, out in enumerate((16, 32, 64)):
        for block in range(blocks):
            name = f"stage{stage}_{block}"
            stride = 2 if stage and not block else 1
            params[name] = {
                "one": _layer(rng, 3, 3, width, out),
                "two": _layer(rng, 3, 3, out, out),
            }
            if stride > 1:
                params[name]["short"] = _layer(rng, 1, 1, width, out)
            plan.append((name, stride))
            width = out
    params["head"] = _layer(rng, 64, classes)

    def apply_fn(params: Any, x: Any) -> Any:
        h = jax.nn.relu(_conv(params["stem"], x))
        for name, stride in plan:
            block = params[name]
            inner = _conv(block["two"], jax.nn.relu(_conv(block["one"], h, stride)))
            short = _conv(block["short"], h, stride) if "short" in block else h
            h = jax.nn.relu(short + 0.5 * inner)
        return h.mean((1, 2)) @ params["head"]["w"] + params["head"]["b"]

    return Case(apply_fn, params, _inputs(rng, n, size, size, channels))


def mlp(n: int, widths: tuple[int, ...] = (784, 512, 512, 512, 10)) -> Case:
    """ReLU network."""
    rng = np.random.default_rng(0)
    params = [_layer(rng, a, b) for a, b in itertools.pairwise(widths)]

    def apply_fn(params: Any, x: Any) -> Any:
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    return Case(apply_fn, params, _inputs(rng, n, widths[0]))


def vit(n: int, size: int = 32, patch: int = 4, width: int = 64, depth: int = 4) -> Case:
    """Vision transformer: patches, positions, pre-norm attention blocks, mean over tokens."""
    rng = np.random.default_rng(0)
    tokens, heads, classes = (size // patch) ** 2, 4, 10
    params: dict[str, Any] = {
        "embed": _layer(rng, patch * patch * 3, width),
        "position": 0.1 * _inputs(rng, tokens, width),
        "head": _layer(rng, width, classes),
    }
    for block in range(depth):
        params[f"block{block}"] = {
            "norm1": jnp.ones(width),
            "norm2": jnp.ones(width),
            "qkv": _layer(rng, width, 3 * width),
            "out": _layer(rng, width, width),
            "up": _layer(rng, width, 2 * width),
            "down": _layer(rng, 2 * width, width),
        }

    def dense(layer: Any, h: Any) -> Any:
        return h @ layer["w"] + layer["b"]

    def norm(scale: Any, h: Any) -> Any:
        h = h - h.mean(-1, keepdims=True)
        return scale * h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-6)

    def apply_fn(params: Any, x: Any) -> Any:
        grid = size // patch
        x = x.reshape(-1, grid, patch, grid, patch, 3).swapaxes(2, 3)
        h = dense(params["embed"], x.reshape(-1, tokens, patch * patch * 3)) + params["position"]
        for block in (params[f"block{index}"] for index in range(depth)):
            qkv = dense(block["qkv"], norm(block["norm1"], h))
            q, k, v = jnp.moveaxis(qkv.reshape(-1, tokens, 3, heads, width // heads), 2, 0)
            scores = jnp.einsum("nlhe,nmhe->nhlm", q, k) / np.sqrt(width // heads)
            mixed = jnp.einsum("nhlm,nmhe->nlhe", jax.nn.softmax(scores), v)
            h = h + dense(block["out"], mixed.reshape(-1, tokens, width))
            h = h + dense(block["down"], jax.nn.gelu(dense(block["up"], norm(block["norm2"], h))))
        return dense(params["head"], h.mean(1))

    return Case(apply_fn, params, _inputs(rng, n, size, size, 3))


class Tokens(NamedTuple):
    """Sizes of a decoder and of its samples."""

    samples: int = 64
    length: int = 64
    width: int = 256
    depth: int = 6
    words: int = 4
    vocabulary: int = 1024


LARGE, SMALL = Tokens(), Tokens(3, 4, 8, 1, 2, 11)


def decoder(name: str, sizes: Tokens = LARGE) -> Case:
    """One of the library's decoders, "gpt2" or "llama"; logits of a few words at the last token."""
    from flax import nnx

    from jaxttp import from_nnx, label_words
    from jaxttp.models import Architecture, Decoder
    from jaxttp.models.language.architecture import read_rotary

    width, heads = sizes.width, 4
    common: dict[str, Any] = {
        "width": width, "depth": sizes.depth, "heads": heads, "length": sizes.length, "tied": True,
    }  # fmt: skip
    if name == "llama":
        shape = Architecture(
            "llama", sizes.vocabulary, hidden=11 * width // 4, kv_heads=2, activation="silu",
            rotary=read_rotary({}, width // heads, sizes.length), rms_norm=True, gated=True,
            biases=(), **common,
        )  # fmt: skip
    else:
        shape = Architecture("gpt2", sizes.vocabulary, hidden=4 * width, **common)
    model = from_nnx(Decoder(shape, head="language_model", rngs=nnx.Rngs(0)))
    ids = np.random.default_rng(0).integers(0, sizes.vocabulary, (sizes.samples, sizes.length))
    words = label_words(model.apply_fn, list(range(sizes.words)))
    return Case(words, model.params, jnp.asarray(ids))


CASES: dict[str, Callable[[], Case]] = {
    "digits": lambda: resnet(150, 8, 1, 5, 1),
    "digits-600": lambda: resnet(600, 8, 1, 5, 1),
    "mlp": lambda: mlp(200),
    "resnet20": lambda: resnet(200, 32, 3, 10, 3),
    "resnet20-1000": lambda: resnet(1000, 32, 3, 10, 3),
    "vit": lambda: vit(100),
    "gpt2": lambda: decoder("gpt2"),
    "llama": lambda: decoder("llama"),
}
DEFAULT = tuple(name for name in CASES if name != "resnet20-1000")


def plain(case: Case) -> Callable[[], Any]:
    """What one writes without a library, compiled."""

    def one(params: Any, row: Any) -> Any:
        return jax.jacrev(lambda p: case.apply_fn(p, row[None])[0])(params)

    @jax.jit
    def kernel(params: Any, x: Any) -> Any:
        leaves = jax.tree.leaves(jax.vmap(one, (None, 0))(params, x))
        flat = [leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves]
        return sum(jnp.einsum("ncd,med->ncme", leaf, leaf) for leaf in flat)

    return lambda: kernel(case.params, case.x)


def error(case: Case, kernel: Any, few: int = 4) -> float:
    """The largest deviation from a float64 kernel of a few samples, of its largest entry."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), case.params)
        x = case.x[:few]
        x = x if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(jnp.float64)
        exact = np.asarray(plain(Case(case.apply_fn, params, x))())
    found = np.asarray(kernel[:few, :, :few])
    return float(np.max(np.abs(found - exact)) / np.max(np.abs(exact)))


def operations(jaxpr: Any) -> float:
    """Operations of products of matrices and convolutions in a traced function, loops unrolled."""
    total = 0.0
    for equation in jaxpr.eqns:
        inner = list(jex.core.jaxprs_in_params(equation.params))
        total += equation.params.get("length", 1) * sum(operations(one) for one in inner)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            size = float(np.prod([shape[axis] for axis in contracted]))
            total += 2 * size * equation.outvars[0].aval.size
        elif equation.primitive.name == "conv_general_dilated":
            kernel, numbers = equation.invars[1].aval.shape, equation.params["dimension_numbers"]
            outputs = kernel[numbers.rhs_spec[0]]  # channels into one group, and the window, remain
            total += 2 * float(np.prod(kernel)) / outputs * equation.outvars[0].aval.size
    return total


def measure(name: str, method: str, max_bytes: int | None, rounds: int, side: int = SIDE) -> Row:
    """One case in this process."""
    from jaxttp.ntk import empirical_ntk, ntk_plan

    case = CASES[name]()
    row: Row = {
        "case": name, "method": method,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(case.params)),
    }  # fmt: skip
    if method == "plain":
        call = plain(case)
        program = jax.make_jaxpr(lambda: call())()
    else:
        options = {"method": method, "max_bytes": max_bytes}
        plan = ntk_plan(*case, **options)
        row |= {"chosen": plan.method, "planned GiB": plan.bytes / 2**30}
        call = lambda: empirical_ntk(*case, **options)  # noqa: E731
        program = jax.make_jaxpr(lambda x: empirical_ntk(*case[:2], x, **options))(case.x)
    square = jnp.ones((side, side), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    found = in_turn({"kernel": call, "product": lambda: product(square)}, rounds)
    row |= found["kernel"]._asdict() | {"operations": operations(program.jaxpr)}
    rate = 2 * side**3 / max(found["product"].cpu, 1e-9)
    return row | {
        "ratio": row["cpu"] * rate / row["operations"], "peak GiB": peak_gib(),
        "error": error(case, call()),
    }  # fmt: skip


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Every case by every method, each in a process of its own."""
    for name, method in itertools.product(options.cases or DEFAULT, options.methods):
        arguments = [name, "--methods", method, "--rounds", str(options.rounds)]
        if options.max_bytes is not None:
            arguments += ["--max-bytes", str(options.max_bytes)]
        yield {"case": name, "method": method} | in_own_process(MODULE, arguments)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    command = parser(MODULE, __doc__)
    command.add_argument("cases", nargs="*", help=", ".join(CASES))
    command.add_argument("--methods", nargs="+", default=["auto"], choices=METHODS)
    command.add_argument("--max-bytes", type=int)
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = command.parse_args(arguments)
    if options.here:
        row = measure(options.cases[0], options.methods[0], options.max_bytes, options.rounds)
        print(json.dumps(row))
        return
    publish(rows(options), COLUMNS, store_of(MODULE, options))


if __name__ == "__main__":
    main()
