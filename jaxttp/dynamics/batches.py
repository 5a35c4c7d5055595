"""The samples of every step: three batch protocols, the same for forecast and training."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxttp._core.checks import check_choice, check_integer, check_key
from jaxttp._core.compile import jit

PROTOCOLS = ("epochs", "independent", "replacement")


def check_batches(
    batch_size: int | None, key: Array | None, protocol: str | None, n: int | None = None
) -> str:
    """The protocol of the batches, checked with what belongs to it before anything is computed.

    Args:
        batch_size: B; None for full batches, which have no protocol.
        key: a `jax.random.key`; ignored where it is not needed.
        protocol: see `batch_indices`; None for "epochs".
        n: number of samples, where it is known.

    Returns:
        The protocol.

    Raises:
        ValueError: a protocol without a batch size, or what `batch_indices` refuses.

    Example:
        >>> check_batches(None, None, None)
        'epochs'
    """
    check_key(key)
    if protocol is not None:
        check_choice("protocol", protocol, PROTOCOLS)
    if batch_size is None:
        if protocol is not None:
            raise ValueError(
                f"protocol={protocol!r} is about mini-batches; give batch_size (and key) with it, "
                "or leave it out."
            )
        return PROTOCOLS[0]
    hint = "" if n is None else f"The data has {n} samples."
    check_integer("batch_size", batch_size, at_least=1, at_most=n, hint=hint)
    if key is None:
        raise ValueError(
            "batch_size needs key: batches are drawn at random; pass jax.random.key(0)."
        )
    return PROTOCOLS[0] if protocol is None else protocol


def batch_indices(
    key: Array | None, n: int, batch_size: int, steps: int, *, protocol: str = "epochs"
) -> Int[Array, "steps b"]:
    """The indices of the samples of every step.

    Args:
        key: a `jax.random.key`.
        n: number of samples.
        batch_size: B, samples a step, at most `n`.
        steps: number of steps.
        protocol: "epochs" (reshuffled every epoch, a last incomplete batch is dropped),
            "independent" (every batch drawn afresh, without replacement inside it) or
            "replacement" (every sample drawn afresh). The noise falls in the reverse of that order,
            so name the protocol when you compare.

    Returns:
        Indices (steps, B).

    Raises:
        ValueError: no key, a batch larger than the data, an unknown protocol.

    Example:
        >>> import jax
        >>> batch_indices(jax.random.key(0), 10, 5, 4).shape
        (4, 5)

    Source:
        TTP Section 3.1 (batches drawn with replacement); the paper does not fix the protocol.
    """
    check_integer("n", n, at_least=1)
    check_integer("steps", steps, at_least=1)
    check_integer("batch_size", batch_size, at_least=1)
    check_batches(batch_size, key, protocol, n)
    return _draw(key, n, batch_size, steps, protocol)


@functools.partial(jit, static_argnums=(1, 2, 3, 4))
def _draw(key: Any, n: int, batch_size: int, steps: int, protocol: str) -> Array:
    if protocol == "replacement":
        return jax.random.randint(key, (steps, batch_size), 0, n)
    if protocol == "independent":
        draw = jax.vmap(lambda k: jax.random.permutation(k, n)[:batch_size])
        return draw(jax.random.split(key, steps))
    per_epoch = n // batch_size
    epochs = -(-steps // per_epoch)
    shuffled = jax.vmap(lambda k: jax.random.permutation(k, n))(jax.random.split(key, epochs))
    used = shuffled[:, : per_epoch * batch_size].reshape(epochs * per_epoch, batch_size)
    return jnp.asarray(used[:steps])
