"""Bad values for an argument, by rule from a valid one, for `experiments.bench.audit`.

What a value is decides what is done to it: a network, parameters, an array, labels, a key, a
number, a count, a choice. `wanted` says what has to come of it: "refusal" where no answer could be
right, "no silence" where an answer has to be finite, or say that it is not.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

REFUSAL, SPOKEN = "refusal", "no silence"
TRACED = "traced"
"""Given as a tracer by the caller, `experiments.bench.audit.attempt`."""


@dataclasses.dataclass(frozen=True)
class Bad:
    """A bad value.

    Attributes:
        words: what is bad about it.
        value: to be given.
        wanted: `REFUSAL` or `SPOKEN`.
    """

    words: str
    value: Any
    wanted: str


def bad_values(name: str, value: Any) -> Iterator[Bad]:
    """What may be wrong with an argument.

    Args:
        name: of the argument.
        value: a valid one.
    """
    if name == "apply_fn":
        yield from _networks(value)
    elif name in ("params", "reference"):
        yield from _parameters(value)
    elif _is_key(value):
        yield from _keys(value)
    elif isinstance(value, jax.Array | np.ndarray):
        yield from _arrays(value)
    elif type(value) in (list, tuple) and value and hasattr(value[0], "ndim"):
        yield from _lists(value)
    elif isinstance(value, bool):
        yield Bad("text", "yes please", REFUSAL)
    elif isinstance(value, int):
        yield from _counts(value)
    elif isinstance(value, float):
        yield from _numbers(value)
    elif isinstance(value, str):
        others = () if name in ("path", "folder") else (3, None)
        wanted = SPOKEN if name in ("path", "folder", "name") else REFUSAL
        yield from (Bad(repr(bad), bad, wanted) for bad in ("nonsense", ""))
        yield from (Bad(repr(bad), bad, REFUSAL) for bad in others)
    else:
        yield from (Bad(repr(bad), bad, REFUSAL) for bad in ("nonsense", 3, None))


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _keys(value: Any) -> Iterator[Bad]:
    made = {
        "0": 0, "text": "seed", "two numbers": np.zeros(2),
        "keys": jax.random.split(jax.random.key(0)),
    }  # fmt: skip
    yield from (Bad(words, bad, REFUSAL) for words, bad in made.items())
    yield from (Bad("None", None, SPOKEN), Bad(TRACED, value, SPOKEN))


def _numbers(value: float) -> Iterator[Bad]:
    refused = {
        "NaN": np.nan, "infinite": np.inf, "text": "0.5", "complex": 1j, "two numbers": np.ones(2),
    }  # fmt: skip
    yield from (Bad(words, bad, REFUSAL) for words, bad in refused.items())
    spoken = {
        "None": None, "negative": -value, "zero": 0.0, "1e20": 1e20, "1e-20": 1e-20, TRACED: value,
        "an integer": 1, "float16": np.float16(value),
    }  # fmt: skip
    yield from (Bad(words, bad, SPOKEN) for words, bad in spoken.items())


def _counts(value: int) -> Iterator[Bad]:
    refused = {"negative": -1, "a half": 1.5, "text": "3", "an array": np.ones(2), "NaN": np.nan}
    yield from (Bad(words, bad, REFUSAL) for words, bad in refused.items())
    spoken = {"None": None, "zero": 0, "one": 1, "True": True, TRACED: value}
    yield from (Bad(words, bad, SPOKEN) for words, bad in spoken.items())


def _arrays(value: Any) -> Iterator[Bad]:
    value = np.asarray(value)
    refused: dict[str, Any] = {
        "text": np.full(value.shape, "a"), "a word": "nonsense", "an object": object(),
        "complex": value.astype(complex),
    }  # fmt: skip
    yield from (Bad(words, bad, REFUSAL) for words, bad in refused.items())
    longer = np.concatenate([value, value[:1]])
    spoken: dict[str, Any] = {
        "None": None, "an axis more": value[None], "an axis less": value[0], "a row more": longer,
        "empty": value[:0], "one row": value[:1], "rows alike": np.repeat(value[:1], len(value), 0),
        TRACED: value, "a number": 1.0, "float16": value.astype(np.float16),
    }  # fmt: skip
    if np.issubdtype(value.dtype, np.floating):
        nan, inf = value.copy(), value.copy()
        nan.flat[-1], inf.flat[0] = np.nan, np.inf
        spoken |= {
            "a NaN": nan, "an infinity": inf, "1e20": value * np.float32(1e20), "zeros": 0 * value,
            "1e-20": value * np.float32(1e-20), "integers": (value * 3).astype(int),
        }  # fmt: skip
    else:
        spoken |= {
            "negative": value - 2, "too large": value + 100, "fractions": value + 0.5,
            "floats": value.astype(np.float32), "a NaN": np.full(value.shape, np.nan),
            "booleans": value.astype(bool),
        }  # fmt: skip
    for words, bad in spoken.items():
        if not isinstance(bad, np.ndarray) or words == TRACED:
            yield Bad(words, bad, SPOKEN)
        else:
            yield Bad(words, jnp.asarray(bad), SPOKEN)


def _lists(value: list | tuple) -> Iterator[Bad]:
    yield from (Bad(repr(bad), bad, REFUSAL) for bad in ("nonsense", 3, type(value)()))
    kind = type(value)
    for bad in _arrays(value[-1]):
        if bad.words != TRACED:
            yield dataclasses.replace(
                bad, words=f"the last: {bad.words}", value=kind([*value[:-1], bad.value])
            )
    yield Bad("one less", kind(value[1:]), SPOKEN)


def _parameters(value: Any) -> Iterator[Bad]:
    def each(change: Callable[[Any], Any]) -> Any:
        return jax.tree.map(change, value)

    def first(number: float) -> Any:
        leaves, tree = jax.tree.flatten(value)
        return tree.unflatten([leaves[0].at[(0,) * leaves[0].ndim].set(number), *leaves[1:]])

    refused = {
        "text": "nonsense", "text leaves": each(lambda _: "a"), "no leaf": {},
        "complex": each(lambda a: a.astype(complex)),
    }  # fmt: skip
    yield from (Bad(words, bad, REFUSAL) for words, bad in refused.items())
    spoken = {
        "None": None, "a number": 3.0, "integers": each(lambda a: (3 * a).astype(int)),
        "a NaN": first(np.nan), "an infinity": first(np.inf), "1e20": each(lambda a: 1e20 * a),
        "1e-20": each(lambda a: 1e-20 * a), "zeros": each(lambda a: 0 * a), TRACED: value,
        "bfloat16": each(lambda a: a.astype(jnp.bfloat16)),
        "float16": each(lambda a: a.astype(jnp.float16)),
    }  # fmt: skip
    yield from (Bad(words, bad, SPOKEN) for words, bad in spoken.items())


def _networks(apply_fn: Callable) -> Iterator[Bad]:
    draw = np.random.default_rng(0)

    def mixes(params: Any, x: Any) -> Any:
        outputs = apply_fn(params, x)
        return outputs - outputs.mean(0, keepdims=True)

    def drops(params: Any, x: Any) -> Any:
        outputs = apply_fn(params, x)
        kept = jax.random.bernoulli(jax.random.key(7), 0.5, outputs.shape)
        return jnp.where(kept, 2 * outputs, 0)

    def draws(params: Any, x: Any) -> Any:
        outputs = apply_fn(params, x)
        return outputs * draw.uniform(0.5, 1.5, outputs.shape).astype(np.float32)

    def remembers(params: Any, x: Any, kept: list = []) -> Any:  # noqa: B006
        kept.append(x)
        return apply_fn(params, x)

    refused = {
        "no function": 3, "mixes samples": mixes, "dropout of one key": drops,
        "dropout of NumPy": draws, "a pair of outputs": lambda p, x: (apply_fn(p, x),) * 2,
        "None": lambda p, x: None, "integers": lambda p, x: jnp.argmax(apply_fn(p, x), -1)[:, None],
        "complex outputs": lambda p, x: apply_fn(p, x) + 1j,
        "one output for all": lambda p, x: apply_fn(p, x).sum(),
        "a row less": lambda p, x: apply_fn(p, x)[1:], "no axis of outputs": _first(apply_fn),
        "arguments swapped": lambda x, p: apply_fn(p, x),
    }  # fmt: skip
    yield from (Bad(words, bad, REFUSAL) for words, bad in refused.items())
    spoken = {
        "a side effect": remembers, "NaN outputs": lambda p, x: apply_fn(p, x) * jnp.nan,
        "no parameters used": lambda p, x: jnp.ones_like(apply_fn(p, x)),
        "no output": lambda p, x: apply_fn(p, x)[:, :0],
    }  # fmt: skip
    yield from (Bad(words, bad, SPOKEN) for words, bad in spoken.items())


def _first(apply_fn: Callable) -> Callable:
    return lambda p, x: apply_fn(p, x)[:, 0]
