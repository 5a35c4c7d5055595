"""Losses as functions of the network's outputs: value, gradient, Hessian, error.

A loss acts on outputs (N, C) and targets (N, C) and is the MEAN of its per-sample values,

    L(f) = (1/N) sum_i l(f_i, y_i),

while `gradient` and `hessian` are those of the single l(f_i, y_i), not divided by N. Integer
labels (N,) become one-hot targets in `encode_targets`, once, so that everything after it knows one
form of target only. Weights of samples, of classes, and masks come with the labels, see `weighted`;
they travel in the targets, so that whatever takes labels takes them. A label of -100 masks, too.

Outputs (N, T, V) with labels (N, T) are a cross-entropy over tokens, the mean over all that count;
the loss then acts on outputs flattened to (N, T V), with targets (N, 2 T): labels and weights.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.checks import check_choice, check_finite_value, is_concrete
from jaxttp._core.compile import registered
from jaxttp._core.traced import Keyed
from jaxttp.losses.error_rates import misclassified as misclassified
from jaxttp.losses.error_rates import unexplained_variance as unexplained_variance
from jaxttp.losses.error_rates import wrong_bits as wrong_bits
from jaxttp.losses.token_loss import token_hessian_product, token_loss, wrong_tokens
from jaxttp.losses.weights import IGNORED, token_labels, token_targets, without_marked
from jaxttp.losses.weights import Weighted as Weighted
from jaxttp.losses.weights import weighted as weighted


def _compiled(method: Callable[..., Array]) -> Callable[..., Array]:
    """A method of a loss, compiled once per shape for all losses of the same equations."""
    run = registered(jax.jit(method, static_argnums=0))

    @functools.wraps(method)
    def call(self: "Loss", outputs: Any, targets: Any, *vectors: Any) -> Array:
        return run(self.keyed(outputs, targets), outputs, targets, *vectors)

    return call


@dataclasses.dataclass(frozen=True)
class Loss:
    """A per-sample loss of outputs, with everything that the dynamics ask of it.

    Hashable, so it can be a static argument of a jitted function.

    Attributes:
        name: how it prints.
        sample_loss: ``(outputs (C,), targets (C,)) -> scalar``, twice differentiable in outputs.
        error: ``(outputs (N, C), targets (N, C)) -> scalar``, what people report beside the loss:
            the share of misclassified samples, or for regression the share of the targets'
            variance that is not explained.
        weighted: whether its targets are (N, 2 C), C targets and C weights a sample.
        tokens: T where it is over the T tokens of a sample: outputs are then (N, T V), targets
            (N, 2 T), labels and weights, and the Hessian is one block a token; 0 elsewhere.
        shift_invariant: whether neither loss nor error changes where a constant is added to all
            outputs of a sample, as with a softmax: forecasts then follow C - 1 contrasts.
        contrasts_of: C where it is of those, outputs (N, C - 1), with the targets of C; else 0.
    """

    name: str
    sample_loss: Callable[[Array, Array], Array]
    error: Callable[..., Array]
    weighted: bool = False
    tokens: int = 0
    shift_invariant: bool = False
    contrasts_of: int = 0

    def __repr__(self) -> str:
        kind = f", {self.tokens} tokens" if self.tokens else ", weighted" if self.weighted else ""
        return f"Loss({self.name!r}{kind})"

    def keyed(self, outputs: Any, targets: Any) -> "Loss":
        """The same loss, equal to others whose functions have the same equations.

        A function of the user's is traced for this, so that what it reads (a global, an attribute)
        is read now, and no compiled function remembers it.

        Args:
            outputs: (N, C), of which shape and dtype matter.
            targets: (N, K), likewise.
        """
        if all(isinstance(f, Keyed) or _is_ours(f) for f in (self.sample_loss, self.error)):
            return self
        f, y = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (outputs, targets))
        one = (jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in (f, y))
        with jax.default_matmul_precision("highest"):
            sample_loss, error = Keyed(self.sample_loss, *one), Keyed(self.error, f, y)
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
    # `functools.wraps` gives a user's function the module of ours, but not its globals; a checker
    # of types wraps ours.
    own = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    packages = {own.split(".")[0], str(getattr(function, "__module__", "")).split(".")[0]}
    return packages <= {"jaxttp", "jaxtyping", "beartype"}


def _cross_entropy(outputs: Array, targets: Array) -> Array:
    # XLA may compute outputs anew, rounded otherwise, for their maximum and for what is below it:
    # of outputs above 1e9 all exponentials of differences could then be infinite, or zero.
    largest = jax.lax.stop_gradient(jnp.max(outputs))
    sizes = jnp.exp(jnp.minimum(outputs - largest, _MISSED))
    log_sum = jnp.log(jnp.maximum(jnp.sum(sizes), math.exp(-_MISSED))) + largest
    # Not log_sum - sum(y f): weighted targets do not add up to one.
    return jnp.sum(targets * (log_sum - outputs))


_MISSED = 60.0
"""By how much a rounded maximum may be missed, at most."""


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
"""What others call them, for those who ask for it."""
_SCALES = {
    "squared_error": " It is half the sum over outputs of (f - y)^2: of a network trained on the "
    "mean of (f - y)^2 over C outputs at a rate r, the learning rate here is 2 r / C.",
    "binary_cross_entropy": " It is the sum over outputs: of a network trained on the mean over C "
    "outputs at a rate r, the learning rate here is r / C.",
}
"""Where others divide by the number of outputs, and these losses do not."""
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
    remedy = f"Its name here is {near!r}.{_SCALES.get(near, '')}" if near else ""
    return _LOSSES[check_choice("loss", loss, _LOSSES, remedy=remedy)]


def encode_targets(
    loss: str | Loss, y: Any, outputs: Float[Array | jax.ShapeDtypeStruct, "n *c"]
) -> tuple[Array, Loss]:
    """Targets (N, C) in the outputs' dtype, and the loss whose error suits them.

    For outputs (N, T, V) and integer labels (N, T), -100 for what does not count, the loss is the
    mean cross-entropy of all the tokens that count, M of them (w_it = 0 for the others):

        L = (1/M) sum_it w_it l_it,    of a mini-batch of B samples:  N/(B M) sum_(i in batch) ...,

    so that the mean over batches is L, as for samples of -100 (PyTorch divides a batch's sum by
    what counts in it). It acts on outputs flattened to (N, T V).

    Args:
        loss: a name or a `Loss`.
        y: integer labels (N,) in 0..C-1, or targets (N, C); for C = 1 also (N,) floats, or (N,)
            labels 0/1 with binary cross-entropy. For weights and masks, `weighted` of these.
            Labels of -100 do not count, as ``weighted(y, mask=y != -100)`` has it: the mean is over
            the other samples; that of a mini-batch divides the sum over its others by B times the
            share of others in all of `y`, so that batches are unbiased, forecast and training alike
            (PyTorch divides by the number of others in the batch, which is not). Where the values
            of `y` are traced, give the mask.
        outputs: the network's outputs (N, C), or a `jax.ShapeDtypeStruct`: shape and dtype matter.
            For labels of tokens (N, T), which may be `weighted` by (N,) or (N, T), (N, T, V).

    Returns:
        ``(targets, loss)``; with integer labels the squared error counts misclassified samples.
        Targets of weighted labels are (N, 2 C), and the loss is the weighted one; those of tokens
        (N, 2 T).

    Raises:
        ValueError: `y` has the wrong length, shape, dtype, label range, is not finite, or holds
            nothing but -100; targets of a cross-entropy that are not probabilities.

    Example:
        >>> import jax.numpy as jnp
        >>> targets, _ = encode_targets("cross_entropy", jnp.array([0, 2]), jnp.zeros((2, 3)))
        >>> targets.tolist()
        [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    targets, loss = _encode(get_loss(loss), y, outputs)
    like = jax.ShapeDtypeStruct((targets.shape[0], math.prod(outputs.shape[1:])), outputs.dtype)
    return targets, loss.keyed(like, targets)


def _encode(loss: Loss, y: Any, outputs: Any) -> tuple[Array, Loss]:
    shape, dtype = getattr(outputs, "shape", ()), getattr(outputs, "dtype", object)
    if len(shape) not in (2, 3) or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            "outputs must be floating-point outputs (N, C), or (N, T, V) of tokens; got "
            f"{type(outputs).__name__} of shape {shape}."
        )
    y = token_labels(y, outputs.shape)
    if isinstance(y, Weighted) and y.vocabulary:
        return _encode_tokens(loss, y, outputs)
    n, c = outputs.shape
    if not isinstance(y, Weighted | jax.Array):
        y = _as_labels(y)
    y = without_marked(y)
    if isinstance(y, Weighted):
        targets, loss = encode_targets(loss, y.y, outputs)
        return _attach(loss, targets, y.weight)
    if loss.weighted or loss.contrasts_of:  # encoded before
        encoded = (n, (1 + loss.weighted) * (loss.tokens or loss.contrasts_of or c))
        if y.shape != encoded:
            raise ValueError(
                f"y has shape {y.shape}, but {loss!r} takes what encode_targets made of weighted "
                f"labels, {encoded}; give it those, or the loss by its name."
            )
        return jnp.asarray(y, outputs.dtype), loss
    is_label = jnp.issubdtype(y.dtype, jnp.integer) or y.dtype == jnp.bool_
    if c == 1 and loss.sample_loss is _cross_entropy:
        raise ValueError(_why_one_output_is_constant(loss, y, is_label))
    if not is_label and not jnp.issubdtype(y.dtype, jnp.floating):
        raise ValueError(f"y must hold integer labels or floating-point targets; got {y.dtype}.")
    if y.ndim == 0 or y.shape[0] != n:
        raise ValueError(
            f"y has shape {y.shape} but the network gives {n} rows; lengths must match."
        )
    if is_label and y.ndim == 1:
        return _encode_labels(loss, y, n, c, outputs.dtype)
    return _check_targets(loss, y, n, c, outputs.dtype), loss


def _encode_tokens(loss: Loss, y: Weighted, outputs: Any) -> tuple[Array, Loss]:
    """Labels and weights (N, 2 T) of the tokens, and the loss that reads them."""
    n, t = y.y.shape
    if loss.sample_loss is not _cross_entropy and not loss.tokens:
        raise ValueError(
            f"loss={loss.name!r} takes no labels of tokens {(n, t)}, only 'cross_entropy' does. "
            "For others flatten outputs and targets to (N, C): jaxttp.flatten_tokens(apply_fn)."
        )
    if y.vocabulary < 2:
        raise ValueError(
            f"loss={loss.name!r} with one output a token is constant: give a token one a class."
        )
    if outputs.shape[0] != n or math.prod(outputs.shape[1:]) != t * y.vocabulary:
        raise ValueError(
            f"y holds labels of {n} x {t} tokens with {y.vocabulary} outputs each; the outputs are "
            f"{tuple(outputs.shape)}."
        )
    targets = token_targets(y, outputs.dtype)
    return targets, Loss(loss.name, token_loss, wrong_tokens, weighted=True, tokens=t)


def _why_one_output_is_constant(loss: Loss, y: Any, is_label: bool) -> str:
    """The words of a refusal: a softmax over one class is 1, whatever the network gives."""
    what = "give the network one output a class, or use 'binary_cross_entropy'"
    if jnp.issubdtype(y.dtype, jnp.floating):
        what = "targets are floats: for a regression loss='squared_error'"
    elif is_label and is_concrete(y) and len(np.unique(np.asarray(y))) == 1:
        what = "y holds a single class, and a network learns to tell two or more apart"
    return f"loss={loss.name!r} with one output is constant; {what}."


def _check_targets(loss: Loss, y: Any, n: int, c: int, dtype: Any) -> Array:
    """Targets that are given as such, (N, C), or (N,) for one output, in the outputs' dtype."""
    if y.ndim == 1 and c == 1:
        y = y[:, None]
    if y.shape != (n, c):
        what = "one column an output" if y.ndim == 2 else "integer labels (N,) or targets (N, C)"
        if y.ndim == 2 and jnp.issubdtype(y.dtype, jnp.integer):
            what += ", or one label a sample (N,); labels of tokens (N, T) go with (N, T, V)"
        if y.ndim == 1 and is_concrete(y) and np.all(np.asarray(y) == np.round(np.asarray(y))):
            what += f"; these look like labels in {y.dtype}: y.astype(int)"
        raise ValueError(f"y has shape {y.shape}, the outputs {(n, c)}; give {what}.")
    targets = check_finite_value("y", jnp.asarray(y, dtype))
    if loss.sample_loss in (_cross_entropy, _binary_cross_entropy):
        targets = _check_probabilities(loss, targets)
    return targets


def _as_labels(y: Any) -> np.ndarray:
    """Labels or targets as an array of numbers; what is none is named with the cure."""
    try:
        array = np.asarray(y)
    except ValueError as problem:
        raise ValueError(
            f"y must be integer labels (N,) or targets (N, C); rows of this {type(y).__name__} "
            "differ in length."
        ) from problem
    if array.dtype.kind in "OUS":
        what = "text" if array.dtype.kind != "O" else "Python objects"
        raise ValueError(
            f"y must hold integer labels or floating-point targets; got {what}. Number the classes:"
            " np.unique(y, return_inverse=True)[1]."
        )
    return array


def _encode_labels(loss: Loss, y: Any, n: int, c: int, dtype: Any) -> tuple[Array, Loss]:
    is_binary = loss.sample_loss is _binary_cross_entropy
    classes = 2 if c == 1 and is_binary else c
    y = np.asarray(y) if is_concrete(y) else y
    y = y.astype(np.int32)  # 8 bits may not hold the number of classes that labels stay below
    if c == 1 and not is_binary:
        raise ValueError(
            f"y holds integer labels but the network has one output; for regression with "
            f"{loss.name} give floating-point targets (N, 1)."
        )
    if is_concrete(y):
        values = np.asarray(y)
        low, high = int(values.min(initial=0)), int(values.max(initial=0))
        if low < 0 or high >= classes:
            raise ValueError(
                f"y holds labels from {low} to {high}, but the network has {c} output(s): labels "
                f"must lie in 0..{classes - 1}. Renumber them, or give the network more outputs."
                + (f" What does not count has the label {IGNORED}." if low < 0 else "")
            )
        y = values
    else:
        y = eqx.error_if(y, jnp.any((y < 0) | (y >= classes)), _beyond(classes))
    if c == 1:
        known = isinstance(y, np.ndarray)
        column = y.astype(dtype).reshape(n, 1)
        return jax.device_put(column) if known else column, loss
    if loss is squared_error:
        loss = dataclasses.replace(loss, error=misclassified)
    if isinstance(y, np.ndarray):
        return jax.device_put(np.eye(c, dtype=dtype)[y]), loss
    return jax.nn.one_hot(y, c, dtype=dtype), loss


def _beyond(classes: int) -> str:
    return (
        f"labels beyond 0..{classes - 1} (those of {IGNORED} are left out where their values are "
        f"known; under jit give jaxttp.weighted(y, mask=y != {IGNORED}))"
    )


def _check_probabilities(loss: Loss, targets: Array) -> Array:
    has_rows = loss.sample_loss is _cross_entropy
    known = is_concrete(targets)
    xp, values = (np, np.asarray(targets)) if known else (jnp, targets)  # no program for a check
    outside = xp.any((values < 0) | (values > 1))
    if has_rows:
        outside = outside | xp.any(xp.abs(xp.sum(values, axis=-1) - 1) > 1e-3)
    text = "in [0, 1]" + (" with rows that sum to 1" if has_rows else "")
    if known:
        if bool(outside):
            raise ValueError(f"y: the targets of {loss.name} must be probabilities, {text}.")
        return targets
    return eqx.error_if(targets, outside, f"the targets of {loss.name} must be {text}")


def _attach(loss: Loss, targets: Array, weight: Any) -> tuple[Array, Loss]:
    """Targets and weights side by side, the weights of mean 1, and the loss that reads them."""
    w = jnp.asarray(weight, targets.dtype)
    if w.shape not in (targets.shape[:1], targets.shape):
        raise ValueError(
            f"weights have shape {w.shape}, the targets {targets.shape}: give (N,) or (N, C)."
        )
    if w.ndim == 2 and loss.sample_loss not in _BY_OUTPUT:
        raise ValueError(f"{loss!r} is no sum over outputs: give weights (N,).")
    w = jnp.broadcast_to(w if w.ndim == 2 else w[:, None], targets.shape)
    # In the cross-entropy of soft targets the weights occur only in the products w * y, so the
    # mean that has to be positive is that of w * y.
    by_class = loss.sample_loss is _cross_entropy
    mean = jnp.sum(w * targets) / targets.shape[0] if by_class else jnp.mean(w)
    if is_concrete(mean):
        if not float(np.asarray(mean)) > 0:
            raise ValueError("the weights of y must leave something that counts; all are zero.")
    else:
        mean = eqx.error_if(mean, ~(mean > 0), "the weights of y are all zero")
    return jnp.concatenate([targets, w / mean], axis=1), _weighted_loss(loss)


def _weighted_loss(loss: Loss) -> Loss:
    if loss.error not in (misclassified, wrong_bits, unexplained_variance):
        taken = inspect.signature(loss.error).parameters
        if len(taken) < 3:
            raise ValueError(
                f"the error of {loss!r} must take (outputs, targets, weights) to be weighted; it "
                f"takes ({', '.join(taken)})."
            )
    return dataclasses.replace(
        loss, sample_loss=_WeightedSample(loss), error=_WeightedError(loss), weighted=True
    )


@dataclasses.dataclass(frozen=True)
class _WeightedSample:
    """A sample's loss times its weight; equal for equal losses."""

    loss: Loss

    def __call__(self, outputs: Array, both: Array) -> Array:
        targets, weights = jnp.split(both, 2)
        by_output = _BY_OUTPUT.get(self.loss.sample_loss)
        if by_output is None:
            return weights[0] * self.loss.sample_loss(outputs, targets)
        return by_output(outputs, targets, weights)


@dataclasses.dataclass(frozen=True)
class _WeightedError:
    """The weighted error; equal for equal losses."""

    loss: Loss

    def __call__(self, outputs: Array, both: Array) -> Array:
        targets, weights = jnp.split(both, 2, axis=-1)
        return self.loss.error(outputs, targets, weights)

    @property
    def __name__(self) -> str:  # which results name
        return getattr(self.loss.error, "__name__", "error")


_BY_OUTPUT: dict[Any, Callable[[Array, Array, Array], Array]] = {
    _cross_entropy: lambda f, y, w: _cross_entropy(f, w * y),
    _squared_error: lambda f, y, w: 0.5 * jnp.sum(w * (f - y) ** 2),
    _binary_cross_entropy: lambda f, y, w: jnp.sum(w * (jax.nn.softplus(f) - y * f)),
}
"""The losses that are sums over outputs, with a weight for each."""
