"""Losses as functions of the network's outputs: value, gradient, Hessian, error.

A loss acts on outputs (N, C) and targets (N, C) and is the MEAN of its per-sample values,

    L(f) = (1/N) sum_i l(f_i, y_i),

while `gradient` and `hessian` are those of the single l(f_i, y_i), not divided by N. Integer
labels (N,) become one-hot targets in `encode_targets`, so that all other code handles one form of
targets. Weights of samples, of classes, and masks are part of the labels, see `weighted`, and then
of the targets. A label of -100 masks, too.

Outputs (N, T, V) with labels (N, T) are a cross-entropy over tokens, the mean over all that count;
the loss then acts on outputs flattened to (N, T V), with targets (N, 2 T): labels and weights.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxttp._core.checks import check_array, check_choice
from jaxttp._core.compile import registered
from jaxttp._core.traced import Keyed


def _compiled(method: Callable[..., Array]) -> Callable[..., Array]:
    """A method of a loss, compiled once per shape for all losses of the same equations."""
    run = registered(jax.jit(method, static_argnums=0))

    @functools.wraps(method)
    def call(self: "Loss", outputs: Any, targets: Any, *vectors: Any) -> Array:
        return run(self.keyed(outputs, targets), outputs, targets, *vectors)

    return call


@dataclasses.dataclass(frozen=True)
class Loss:
    """A per-sample loss of outputs, with its derivatives and its error.

    Hashable, so it can be a static argument of a jitted function.

    Attributes:
        name: how it prints.
        sample_loss: ``(outputs (C,), targets (C,)) -> scalar``, twice differentiable in outputs.
        error: ``(outputs (N, C), targets (N, C)) -> scalar``, reported besides the loss: the
            fraction of misclassified samples, or for regression the fraction of the targets'
            variance that is not explained.
        weighted: whether its targets are (N, 2 C), C targets and C weights a sample.
        tokens: T where it is over the T tokens of a sample: outputs are then (N, T V), targets
            (N, 2 T), labels and weights, and the Hessian is one block a token; 0 elsewhere.
        shift_invariant: whether neither loss nor error changes where a constant is added to all
            outputs of a sample, as with a softmax: forecasts then follow C - 1 centered logits.
        centered_from: C where it is of those, outputs (N, C - 1), with the targets of C; else 0.
    """

    name: str
    sample_loss: Callable[[Array, Array], Array]
    error: Callable[..., Array]
    weighted: bool = False
    tokens: int = 0
    shift_invariant: bool = False
    centered_from: int = 0

    def __repr__(self) -> str:
        kind = f", {self.tokens} tokens" if self.tokens else ", weighted" if self.weighted else ""
        return f"Loss({self.name!r}{kind})"

    def keyed(self, outputs: Any, targets: Any) -> "Loss":
        """The same loss, equal to others whose functions have the same equations.

        A user's function is traced for this, so that globals and attributes are read now and not
        kept by compiled functions.

        Args:
            outputs: (N, C), of which shape and dtype matter.
            targets: (N, K), likewise.
        """
        if all(isinstance(f, Keyed) or _is_ours(f) for f in (self.sample_loss, self.error)):
            return self
        f, y = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (outputs, targets))
        sample = (jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in (f, y))
        with jax.default_matmul_precision("highest"):
            sample_loss, error = Keyed(self.sample_loss, *sample), Keyed(self.error, f, y)
        return dataclasses.replace(self, sample_loss=sample_loss, error=error)

    @_compiled
    def value(self, outputs: Float[Array, "n c"], targets: Float[Array, "n k"]) -> Float[Array, ""]:
        """L(f), the mean over samples."""
        return jnp.mean(jax.vmap(self.sample_loss)(outputs, targets))

    @_compiled
    def gradient(
        self, outputs: Float[Array, "n c"], targets: Float[Array, "n k"]
    ) -> Float[Array, "n c"]:
        """g_i = dl(f_i, y_i)/df_i, not divided by N."""
        return jax.vmap(jax.grad(self.sample_loss))(outputs, targets)

    @_compiled
    def hessian(
        self, outputs: Float[Array, "n c"], targets: Float[Array, "n k"]
    ) -> Float[Array, "n c c"]:
        """H_i = d^2 l(f_i, y_i)/df_i^2, one (C, C) block a sample, not divided by N."""
        return jax.vmap(jax.hessian(self.sample_loss))(outputs, targets)

    @_compiled
    def hessian_vector_product(
        self,
        outputs: Float[Array, "n c"],
        targets: Float[Array, "n k"],
        vector: Float[Array, "n c"],
    ) -> Float[Array, "n c"]:
        """H_i v_i for every sample, without forming H."""
        if self.tokens:
            return token_hessian_product(outputs, targets, vector)
        return jax.jvp(lambda f: self.gradient(f, targets), (outputs,), (vector,))[1]


def _is_ours(function: Any) -> bool:
    """Whether a function is of this package and reads nothing but its arguments."""
    # `functools.wraps` gives a user's function the module of ours, but not its globals. A type
    # checker wraps ours.
    own = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    packages = {own.split(".")[0], str(getattr(function, "__module__", "")).split(".")[0]}
    return packages <= {"jaxttp", "jaxtyping", "beartype"}


# --- errors, reported besides a loss --------------------------------------------------------------


def misclassified(
    outputs: Float[Array, "n c"],
    targets: Float[Array, "n c"],
    weights: Float[Array, "n c"] | None = None,
) -> Float[Array, ""]:
    """Fraction of samples whose largest output is not the largest target, in [0, 1]."""
    outputs, targets = _checked(outputs, targets)
    wrong = jnp.argmax(outputs, axis=-1) != jnp.argmax(targets, axis=-1)
    weights = None if weights is None else jnp.sum(weights * targets, axis=-1)
    return jnp.average(wrong.astype(outputs.dtype), weights=weights)


def wrong_bits(
    outputs: Float[Array, "n c"],
    targets: Float[Array, "n c"],
    weights: Float[Array, "n c"] | None = None,
) -> Float[Array, ""]:
    """Fraction of (sample, output) pairs on the wrong side of zero, in [0, 1]."""
    outputs, targets = _checked(outputs, targets)
    wrong = (outputs > 0) != (targets > 0.5)
    return jnp.average(wrong.astype(outputs.dtype), weights=weights)


def unexplained_variance(
    outputs: Float[Array, "n c"],
    targets: Float[Array, "n c"],
    weights: Float[Array, "n c"] | None = None,
) -> Float[Array, ""]:
    """||f - y||^2 / ||y - mean(y)||^2, that is 1 - R^2; relative to ||y||^2 where y is constant."""
    outputs, targets = _checked(outputs, targets)
    w = jnp.ones_like(targets) if weights is None else weights
    first = jnp.take_along_axis(targets, jnp.argmax(w > 0, axis=0)[None], axis=0)
    total = jnp.sum(w, axis=0, keepdims=True)
    mean = jnp.sum(w * targets, axis=0, keepdims=True) / jnp.where(total > 0, total, 1.0)
    spread = jnp.sum(w * (targets - mean) ** 2)
    # The rounded mean of equal numbers is not always that number.
    spread = jnp.where(jnp.any((w > 0) & (targets != first)), spread, 0.0)
    size = jnp.sum(w * targets**2)
    scale = jnp.where(spread > 0, spread, jnp.where(size > 0, size, 1.0))
    return jnp.sum(w * (outputs - targets) ** 2) / scale


def _checked(outputs: Array, targets: Array) -> tuple[Array, Array]:
    """Both as arrays of real numbers of one shape (N, C)."""
    outputs = check_array("outputs", outputs, ndim=2, floating=True)
    targets = check_array("targets", targets, ndim=2)
    if outputs.shape != targets.shape or 0 in outputs.shape:
        raise ValueError(
            f"targets must have the shape of outputs, (N, C) and not empty; got {targets.shape} "
            f"and {outputs.shape}."
        )
    return outputs, targets


# --- the three losses -----------------------------------------------------------------------------


def _cross_entropy(outputs: Array, targets: Array) -> Array:
    # XLA may recompute outputs with other rounding for their maximum and for their differences to
    # it. For outputs above 1e9 all exponentials of differences could then be infinite, or zero.
    largest = jax.lax.stop_gradient(jnp.max(outputs))
    rounding = 60.0  # of the maximum, at most
    sizes = jnp.exp(jnp.minimum(outputs - largest, rounding))
    log_sum = jnp.log(jnp.maximum(jnp.sum(sizes), math.exp(-rounding))) + largest
    # Not log_sum - sum(y f): weighted targets do not add up to one.
    return jnp.sum(targets * (log_sum - outputs))


def _squared_error(outputs: Array, targets: Array) -> Array:
    return 0.5 * jnp.sum((outputs - targets) ** 2)


def _binary_cross_entropy(outputs: Array, targets: Array) -> Array:
    return jnp.sum(jax.nn.softplus(outputs) - targets * outputs)


cross_entropy = Loss("cross_entropy", _cross_entropy, misclassified, shift_invariant=True)
"""Softmax cross-entropy, l = logsumexp(f) - f_y."""

squared_error = Loss("squared_error", _squared_error, unexplained_variance)
"""l = 0.5 ||f - y||^2. With integer labels the targets are one-hot, the error misclassified.

The mean squared error over N samples and C outputs is 2/C times this loss.
"""

binary_cross_entropy = Loss("binary_cross_entropy", _binary_cross_entropy, wrong_bits)
"""A sigmoid for every output, summed over outputs: binary (C = 1) or multi-label (C > 1).

The mean over C outputs is 1/C times this loss.
"""

_OTHER_NAMES = {
    **dict.fromkeys(("mse", "l2", "mean_squared_error"), "squared_error"),
    **dict.fromkeys(("ce", "xent", "softmax_cross_entropy"), "cross_entropy"),
    **dict.fromkeys(("bce", "sigmoid_cross_entropy"), "binary_cross_entropy"),
}
"""Names in other libraries, for the hint of the error message."""
_LOSSES = {loss.name: loss for loss in (cross_entropy, squared_error, binary_cross_entropy)}


def get_loss(loss: str | Loss) -> Loss:
    """The loss of that name; a `Loss` is returned as it is.

    Raises:
        ValueError: for an unknown name.
        TypeError: for anything that is neither a name nor a `Loss`.

    Example:
        >>> get_loss("squared_error")
        Loss('squared_error')
    """
    if isinstance(loss, Loss):
        return loss
    if not isinstance(loss, str):
        raise TypeError(
            f"loss must be a name ({', '.join(_LOSSES)}) or a jaxttp.losses.Loss; got {loss!r}."
        )
    near = _OTHER_NAMES.get(loss.lower().replace("-", "_"))
    hint = f"Its name here is {near!r}; mind its scale, see jaxttp.losses.{near}." if near else ""
    return _LOSSES[check_choice("loss", loss, _LOSSES, hint=hint)]


# --- the cross-entropy of tokens ------------------------------------------------------------------
#
# Logits (T, V) of one sample are one row (T V,). With p_t = softmax(f_t), labels y_t, weights w_t,
#
#     l(f, y) = sum_t w_t (logsumexp(f_t) - f_t[y_t]),    (H u)_t = w_t (p_t∘u_t - p_t (p_t·u_t)),
#
# so that the Hessian is one block a token, and a product with it needs no labels and no blocks. The
# targets of a sample are its T labels and T weights, (2 T,): never one-hot, V may be large.


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
    losses = jax.nn.logsumexp(logits, axis=1) - taken
    return jnp.sum(weights.astype(losses.dtype) * losses)


def wrong_tokens(outputs: Float[Array, "n tv"], targets: Float[Array, "n t2"]) -> Float[Array, ""]:
    """Fraction of the tokens that count whose largest logit is not their label's, in [0, 1].

    Args:
        outputs: logits, token after token (N, T V).
        targets: T labels and T weights a sample (N, 2 T).

    Example:
        >>> float(wrong_tokens(jnp.array([[1.0, 0.0, 1.0, 0.0]]), jnp.array([[0.0, 1, 1, 1]])))
        0.5
    """
    labels, weights = (half.reshape(-1) for half in jnp.split(targets, 2, axis=1))
    largest = jnp.argmax(outputs.reshape(len(labels), -1), axis=1)
    wrong = largest != labels.astype(largest.dtype)
    return jnp.average(wrong.astype(outputs.dtype), weights=weights.astype(outputs.dtype))


def token_hessian_product(
    outputs: Float[Array, "n tv"],
    targets: Float[Array, "n t2"],
    vector: Float[Array, "n tv"],
    at_once: int = 2**20,
) -> Float[Array, "n tv"]:
    """H_i u_i of every sample, some tokens at a time to bound the memory of softmaxes.

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
    rows = outputs.reshape(tokens, -1), vector.reshape(tokens, -1), weights
    chunk = max(1, at_once // rows[0].shape[1])

    def product(row: tuple[Array, Array, Array]) -> Array:
        logits, u, weight = row
        p = jax.nn.softmax(logits)
        return weight * (p * u - p * jnp.sum(p * u))

    return jax.lax.map(product, rows, batch_size=min(chunk, tokens)).reshape(outputs.shape)
