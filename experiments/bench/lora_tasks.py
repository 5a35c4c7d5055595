"""Fine-tuning small language models of bytes by LoRA: texts, networks, tasks, and their real runs.

Two decoders are pre-trained here on English (docstrings and manual pages of Python's own library,
licences of what is installed) and fine-tuned by LoRA on Python source without docstrings, or on C
headers, with the next-token loss of every byte. A task is split by nothing but its name: constants
are chosen on TUNING alone. Texts differ a little between versions of what is installed; rows name
the checksum of theirs.
"""

import ast
import dataclasses
import functools
import hashlib
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxttp import Model, from_nnx
from jaxttp.dynamics import batch_indices
from jaxttp.models import Architecture, Decoder, lora
from jaxttp.models.language.architecture import read_rotary

BYTES = 128
"""Bytes of texts are below this."""
WINDOW = 48
"""Bytes of a sequence that are predicted."""
BATCH = 16
"""Sequences of a step."""
WATCHED = 96
"""Sequences that the curves are of; of no batch, unless a task is about its own samples."""
EVERY = 10
"""Steps between two points of a real curve."""
SPLIT = 0.9
"""The fraction of a text that training sees."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One fine-tuning.

    Attributes:
        base: "llama" or "gpt2".
        text: what it is fine-tuned on, "python" or "headers".
        rank: r.
        ratio: α/r.
        modules: "all" kernels of the blocks, or "qv".
        optimizer: "adamw" or "sgd" (momentum 0.9), both with warm-up and cosine.
        rate: the highest learning rate.
        steps: T.
        samples: sequences that training draws from, in epochs.
        own: whether the curve is that of the first `WATCHED` training sequences.
        seed: of adapters, samples and batches.
    """

    base: str
    text: str
    rank: int
    ratio: float
    modules: str
    optimizer: str
    rate: float
    steps: int = 600
    samples: int = 4096
    own: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        """All of it in one word."""
        parts = [
            self.base, self.text, f"r{self.rank}", f"s{self.ratio:g}", self.modules,
            self.optimizer, f"{self.rate:g}", str(self.steps),
        ]  # fmt: skip
        parts += [f"n{self.samples}"] * (self.samples != 4096) + ["own"] * self.own
        return "-".join([*parts, *([f"seed{self.seed}"] * (self.seed != 0))])

    def made_optimizer(self) -> optax.GradientTransformation:
        """Warm-up over a twentieth of the steps, then a cosine to a tenth of the rate."""
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, self.rate, self.steps // 20, self.steps, 0.1 * self.rate
        )
        if self.optimizer == "sgd":
            return optax.sgd(schedule, momentum=0.9)
        return optax.adamw(schedule, b2=0.999, weight_decay=0.01)


class Job(NamedTuple):
    """A task made: the adapted model, sequences (N, T), what follows them, and those watched."""

    model: Model
    x: np.ndarray
    y: np.ndarray
    x_watched: np.ndarray
    y_watched: np.ndarray
    key: Any


def docs_and_code(paths: Iterable[Path]) -> tuple[list[str], list[str]]:
    """Docstrings of Python files, and each file's code without them."""
    docs, code = [], []
    for path in paths:
        tree = ast.parse(path.read_text(errors="ignore"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docs.append(ast.get_docstring(node) or "")
                if docs[-1]:
                    node.body = node.body[1:] or [ast.Pass()]
        code.append(ast.unparse(tree))
    return docs, code


def as_bytes(text: str) -> np.ndarray:
    """A text's bytes below 128 as integers (L,).

    Example:
        >>> as_bytes("ab").tolist()
        [97, 98]
    """
    return np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int32)


@functools.lru_cache
def texts() -> dict[str, np.ndarray]:
    """English, Python without docstrings, C headers, as bytes below 128."""
    library, packages = (Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib"))
    docs, code = docs_and_code(sorted(library.glob("*.py")))
    topics = ast.parse((library / "pydoc_data" / "topics.py").read_text())
    docs += [node.value for node in ast.walk(topics)
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]  # fmt: skip
    docs += [path.read_text(errors="ignore") for path in sorted(packages.rglob("LICENSE*"))
             if path.is_file()]  # fmt: skip
    headers = [path.read_text(errors="ignore")
               for path in sorted((packages / "numpy").rglob("*.h"))]  # fmt: skip
    whole = {"english": docs, "python": code, "headers": headers}
    return {name: as_bytes("\n".join(parts)) for name, parts in whole.items()}


def checksum() -> str:
    """Of the texts."""
    digest = hashlib.sha256()
    for name in sorted(texts()):
        digest.update(texts()[name].tobytes())
    return digest.hexdigest()[:8]


def shape_of(base: str) -> Architecture:
    """The two decoders: a Llama of three blocks, a GPT-2 of two, 0.2 million weights each."""
    common: dict[str, Any] = {"vocabulary": BYTES, "heads": 4, "length": WINDOW, "outputs": 2}
    if base == "llama":
        return Architecture(
            "llama", width=64, depth=3, hidden=192, kv_heads=4, activation="silu",
            rotary=read_rotary({}, 16, WINDOW), rms_norm=True, gated=True, biases=(), **common,
        )  # fmt: skip
    return Architecture("gpt2", width=96, depth=2, hidden=384, **common)


def next_token_loss(apply_fn: Callable, params: Any, x: Any, y: Any) -> Any:
    """The mean cross-entropy of the bytes that follow."""
    return optax.softmax_cross_entropy_with_integer_labels(apply_fn(params, x), y).mean()


def pairs(corpus: np.ndarray, count: int, draw: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Sequences and what follows them, two arrays (count, WINDOW)."""
    starts = draw.integers(0, len(corpus) - WINDOW - 1, count)
    drawn = corpus[starts[:, None] + np.arange(WINDOW + 1)]
    return drawn[:, :-1], drawn[:, 1:]


def pretrain(base: str, steps: int, folder: Path) -> Decoder:
    """The decoder that continues English; read from the folder where it is there already."""
    network = Decoder(shape_of(base), head="language_model", rngs=nnx.Rngs(0))
    graph, params = nnx.split(network)
    leaves, treedef = jax.tree.flatten(params)
    path = folder / f"{base}-{steps}-{checksum()}.npz"
    if path.exists():
        with np.load(path) as file:
            kept = [jnp.asarray(file[f"arr_{i}"]) for i in range(len(leaves))]
        return nnx.merge(graph, jax.tree.unflatten(treedef, kept))
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0, 3e-3, min(50, steps // 2), steps))

    def apply(params: Any, ids: Any) -> Any:
        return nnx.merge(graph, params)(ids)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda p: next_token_loss(apply, p, x, y))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    draw, state, corpus = np.random.default_rng(0), optimizer.init(params), texts()["english"]
    for t in range(steps):
        params, state, value = step(params, state, *pairs(corpus, 24, draw))
        if t % 500 == 0 or t == steps - 1:
            print(f"{base}: step {t}, {float(value) / np.log(2):.2f} bits a byte", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(path, *[np.asarray(leaf) for leaf in jax.tree.leaves(params)])
    return nnx.merge(graph, params)


def make(task: Task, steps: int, folder: Path) -> Job:
    """The adapted model and its sequences.

    Args:
        task: which.
        steps: of the pre-training.
        folder: where pre-trained networks are kept.
    """
    draw = np.random.default_rng(task.seed + 1)
    corpus = texts()[task.text]
    cut = int(SPLIT * len(corpus))
    x, y = pairs(corpus[:cut], task.samples, draw)
    watched = (x[:WATCHED], y[:WATCHED]) if task.own else pairs(corpus[cut:], WATCHED, draw)
    key, batches = jax.random.split(jax.random.key(task.seed))
    if task.modules == "qv":
        fused = shape_of(task.base).fused
        chosen: Any = ["qkv_proj"] if fused else ["q_proj", "v_proj"]
    else:
        chosen = lambda path: "blocks" in path and path.endswith("kernel")  # noqa: E731
    network = from_nnx(pretrain(task.base, steps, folder))
    model = lora(network, rank=task.rank, alpha=task.ratio * task.rank, key=key, targets=chosen)
    return Job(model, x, y, *watched, batches)


def real_run(task: Task, job: Job) -> dict[str, Any]:
    """The real training: the loss of what is watched, every `EVERY` steps."""
    apply_fn, params = job.model
    optimizer = task.made_optimizer()

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        gradient = jax.grad(functools.partial(next_token_loss, apply_fn))(params, x, y)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    watch = jax.jit(functools.partial(next_token_loss, apply_fn))
    indices = np.asarray(batch_indices(job.key, task.samples, BATCH, task.steps))
    state, loss = optimizer.init(params), []
    for t in range(task.steps):
        if t % EVERY == 0:
            loss.append(round(float(watch(params, job.x_watched, job.y_watched)), 5))
        rows = indices[t]
        params, state = step(params, state, job.x[rows], job.y[rows])
    loss.append(round(float(watch(params, job.x_watched, job.y_watched)), 5))
    return {"name": task.name, "loss": loss, "texts": checksum()}


TUNING = (
    Task("gpt2", "headers", 8, 2, "all", "adamw", 3e-3),
    Task("gpt2", "headers", 4, 1, "qv", "adamw", 1e-2),
    Task("gpt2", "headers", 16, 0.5, "all", "sgd", 0.3),
    Task("llama", "headers", 2, 8, "all", "adamw", 1e-3),
    Task("llama", "headers", 8, 1, "qv", "adamw", 1e-3),
    Task("llama", "headers", 4, 2, "all", "sgd", 0.1),
)
"""Every constant is chosen on these."""
RANKED = tuple(
    Task("llama", "python", rank, ratio, modules, "adamw", rate)
    for rank, ratio, modules, rate in (
        (2, 1, "qv", 1e-3), (2, 8, "qv", 3e-3), (4, 2, "qv", 1e-2), (8, 1, "qv", 3e-3),
        (16, 4, "qv", 1e-3), (2, 2, "all", 1e-3), (2, 1, "all", 1e-2), (4, 8, "all", 1e-3),
        (8, 0.5, "all", 1e-3), (8, 2, "all", 3e-3), (16, 1, "all", 1e-3), (16, 2, "all", 1e-2),
    )
)  # fmt: skip
"""Settings of one fine-tuning, to be ranked."""
OTHERS = (
    Task("gpt2", "python", 8, 2, "all", "adamw", 1e-3),
    Task("gpt2", "python", 4, 4, "qv", "adamw", 3e-3),
    Task("gpt2", "python", 2, 0.5, "all", "adamw", 1e-2),
    Task("llama", "python", 8, 2, "all", "sgd", 0.3),
    Task("gpt2", "python", 4, 1, "all", "sgd", 1.0),
    Task("llama", "python", 8, 2, "all", "adamw", 1e-3, samples=512, own=True),
    Task("llama", "python", 8, 2, "all", "adamw", 1e-3, steps=3000),
    Task("gpt2", "python", 4, 1, "qv", "adamw", 3e-3, steps=3000),
)
REPORTED = (*RANKED, *OTHERS)
"""None of these tuned anything."""
