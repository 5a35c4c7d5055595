"""Outputs up to a constant, as a softmax depends on them: C - 1 centered logits of a sample.

A constant added to all logits of a sample changes neither probabilities, nor the cross-entropy, nor
which class is the largest. So of the outputs f (C,) only

    f' = B^T f,      B (C, C - 1),      B^T B = I,      B B^T = I - 1 1^T / C

matters. Its kernel is B^T Theta B. Gradients of the loss sum to zero over the classes, so B^T keeps
all of them, and dynamics of f' are exact. A kernel has (C - 1)^2 / C^2 of the entries, 25 % for 2
classes and 64 % for 5, and takes C - 1 backward passes.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.compile import jit
from jaxttp._core.traced import Network
from jaxttp._core.types import ApplyFn
from jaxttp.losses import Loss, cross_entropy


def basis(classes: int) -> np.ndarray:
    """B (C, C - 1): orthonormal columns that sum to zero (Helmert's).

    Args:
        classes: C, at least 2.

    Example:
        >>> basis(2).round(3).tolist()
        [[0.707], [-0.707]]
    """
    from scipy.linalg import helmert  # 0.1 s of `import jaxttp`

    return helmert(classes).T


@jit
def centered_logits(outputs: Float[Array, "... c"]) -> Float[Array, "... d"]:
    """The centered logits B^T f, C - 1 numbers in place of C."""
    return outputs @ jnp.asarray(basis(outputs.shape[-1]), outputs.dtype)


@jit
def from_centered_logits(centered: Float[Array, "... d"]) -> Float[Array, "... c"]:
    """B f', the outputs of mean zero with these centered logits.

    Example:
        >>> from_centered_logits(centered_logits(jnp.array([1.0, 2.0, 6.0]))).round(6).tolist()
        [-2.0, -1.0, 3.0]
    """
    return centered @ jnp.asarray(basis(centered.shape[-1] + 1).T, centered.dtype)


class CenteredLogits(Network):
    """A network ``(params, x) -> f' (N, C - 1)``.

    Attributes:
        network: ``(params, x) -> f (N, C)``.
    """

    def __init__(self, network: ApplyFn) -> None:
        super().__init__(lambda params, x: centered_logits(network(params, x)))
        self.network = network


def centered(loss: Loss, classes: int) -> Loss:
    """The same loss of centered logits (N, C - 1); its targets stay as they are.

    Args:
        loss: one that is `shift_invariant`, of outputs (N, C).
        classes: C.

    Example:
        >>> f, y = jnp.array([[1.0, 2.0, 6.0]]), jnp.eye(3)[:1]
        >>> value = centered(cross_entropy, 3).value(centered_logits(f), y)
        >>> abs(float(value - cross_entropy.value(f, y))) < 1e-6
        True
    """
    sample_loss, error = _OfCenteredLogits(loss.sample_loss), _OfCenteredLogits(loss.error)
    return dataclasses.replace(
        loss, sample_loss=sample_loss, error=error, shift_invariant=False, centered_from=classes
    )


@dataclasses.dataclass(frozen=True)
class _OfCenteredLogits:
    """A function of outputs as one of centered logits; equal where the functions are."""

    function: Callable[..., Array]

    def __call__(self, outputs: Array, targets: Array, *weights: Array) -> Array:
        return self.function(from_centered_logits(outputs), targets, *weights)


def check_invariance(loss: Loss, outputs: Float[Array, "n c"], targets: Array) -> None:
    """Raise for a user's loss with shift_invariant=True that is not shift-invariant.

    Args:
        loss: of outputs (N, C).
        outputs: at which it is evaluated, and with 1 added to them.
        targets: encoded.

    Raises:
        ValueError: the two values differ.
    """
    if loss.sample_loss is cross_entropy.sample_loss:
        return
    value, shifted = (float(loss.value(f, targets)) for f in (outputs, outputs + 1.0))
    if abs(shifted - value) > 1e-3 * (1.0 + abs(value)):
        raise ValueError(
            f"loss={loss!r} says shift_invariant=True, but with one added to all outputs it is "
            f"{shifted:.6g} in place of {value:.6g}; leave shift_invariant out."
        )


def depends_on_centered_logits(loss: Loss, classes: int) -> bool:
    """Whether a loss depends on centered logits alone; not worth it for many classes."""
    return loss.shift_invariant and not loss.tokens and 2 <= classes <= 64
