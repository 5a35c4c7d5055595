"""Cross-entropy over the tokens of a sequence: logits (T, V) of one sample, as one row (T V,).

With p_t = softmax(f_t), labels y_t and weights w_t of one sample's tokens,

    l(f, y) = sum_t w_t (logsumexp(f_t) - f_t[y_t]),    (H u)_t = w_t (p_t∘u_t - p_t (p_t·u_t)),

so that the Hessian is one block a token, and a product with it needs neither labels nor blocks. The
targets of a sample are its T labels and T weights, (2 T,): never one-hot, V may be large.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

AT_ONCE = 2**20
"""Logits of which a product holds the softmax at a time."""


def token_loss(outputs: Float[Array, " tv"], targets: Float[Array, " t2"]) -> Float[Array, ""]:
    """The weighted sum of the cross-entropies of one sample's tokens.

    Args:
        outputs: logits, token after token (T V,).
        targets: T labels and T weights (2 T,).

    Example:
        >>> float(token_loss(jnp.zeros(4), jnp.array([0.0, 1.0, 1.0, 0.0]))) == float(jnp.log(2.0))
        True
    """
    labels, weights = jnp.split(targets, 2)
    logits = outputs.reshape(len(labels), -1)
    taken = jnp.take_along_axis(logits, labels.astype(jnp.int32)[:, None], axis=1)[:, 0]
    each = jax.nn.logsumexp(logits, axis=1) - taken
    return jnp.sum(weights.astype(each.dtype) * each)


def wrong_tokens(outputs: Float[Array, "n tv"], targets: Float[Array, "n t2"]) -> Float[Array, ""]:
    """Share of the tokens that count whose largest logit is not their label's, in [0, 1].

    Args:
        outputs: logits, token after token (N, T V).
        targets: T labels and T weights a sample (N, 2 T).

    Example:
        >>> float(wrong_tokens(jnp.array([[1.0, 0.0, 1.0, 0.0]]), jnp.array([[0.0, 1, 1, 1]])))
        0.5
    """
    labels, weights = (half.reshape(-1) for half in jnp.split(targets, 2, axis=1))
    found = jnp.argmax(outputs.reshape(len(labels), -1), axis=1)
    wrong = (found != labels.astype(found.dtype)).astype(outputs.dtype)
    weights = weights.astype(outputs.dtype)
    return jnp.sum(weights * wrong) / jnp.sum(weights)


def token_hessian_product(
    outputs: Float[Array, "n tv"],
    targets: Float[Array, "n t2"],
    vector: Float[Array, "n tv"],
    at_once: int = AT_ONCE,
) -> Float[Array, "n tv"]:
    """H_i u_i of every sample, some tokens at a time.

    Beside the three arrays (N, T V) that go in and come out, it holds the softmax of `at_once`
    logits, or of one token.

    Args:
        outputs: logits, token after token (N, T V).
        targets: T labels and T weights a sample (N, 2 T); only the weights matter.
        vector: u (N, T V).
        at_once: how many logits have their softmax at a time.

    Example:
        >>> targets = jnp.array([[0.0, 4.0]])
        >>> token_hessian_product(jnp.zeros((1, 2)), targets, jnp.eye(2)[:1]).tolist()
        [[1.0, -1.0]]
    """
    weights = jnp.split(targets, 2, axis=1)[1].reshape(-1).astype(outputs.dtype)
    tokens = len(weights)
    logits, u = (array.reshape(tokens, -1) for array in (outputs, vector))
    chunk = max(1, at_once // logits.shape[1])
    if tokens <= chunk:
        return jax.vmap(_one_token)(logits, u, weights).reshape(outputs.shape)

    def piece(i: Array, done: Array) -> Array:
        first = jnp.minimum(i * chunk, tokens - chunk)  # the last piece overlaps the one before it
        parts = (jax.lax.dynamic_slice_in_dim(a, first, chunk) for a in (logits, u, weights))
        return jax.lax.dynamic_update_slice_in_dim(done, jax.vmap(_one_token)(*parts), first, 0)

    pieces = -(-tokens // chunk)
    return jax.lax.fori_loop(0, pieces, piece, jnp.zeros_like(u)).reshape(outputs.shape)


def _one_token(logits: Array, u: Array, weight: Array) -> Array:
    p = jax.nn.softmax(logits)
    return weight * (p * u - p * jnp.sum(p * u))
