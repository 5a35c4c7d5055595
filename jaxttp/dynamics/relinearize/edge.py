"""The edge of stability: a projection that keeps modes of a kernel within the stability limit.

A full step is stable along an eigenvector of (1/N) H^(1/2) Theta H^(1/2) with eigenvalue s as long
as s is below the optimizer's limit, 2/eta for gradient descent and 2 (1 + m)/eta for momentum. A
network whose kernel grows beyond it does not diverge as its linearization would: along these modes
it oscillates about a mean path, which a damped motion follows. So the forecast damps these modes:
it scales the force on each until it is stable.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxttp._core.compile import jit
from jaxttp.dynamics._kernels import apply_kernel, image_of
from jaxttp.dynamics.stability import curvature_modes
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel

LINEAR = 1e-3
"""A network whose kernels differ by less than this fraction counts as linear."""


class Damping(NamedTuple):
    """The map g - left (right^T g) on gradients (N C,), which scales the force on some modes.

    Attributes:
        left: (N C, k).
        right: (N C, k).
    """

    left: Float[Array, "nc k"]
    right: Float[Array, "nc k"]

    def fold(self, kernel: Kernel, shape: tuple[int, ...]) -> Float[Array, "m k"]:
        """B^T left of a kernel A B^T; the damping subtracts B^T left right^T g from B^T g."""
        columns = self.left.T.reshape(-1, *shape)
        return jax.vmap(lambda column: image_of(kernel, column), out_axes=1)(columns)


def damping(
    kernel: Kernel, f: Array, targets: Array, loss: Loss, limit: float, damped: float
) -> tuple[Damping | None, float]:
    """The damping that keeps steps with this kernel stable at outputs f, and the sharpness.

    Args:
        kernel: Theta.
        f: outputs (N, C).
        targets: encoded.
        loss: the loss.
        limit: the largest stable curvature.
        damped: a mode beyond it moves as one whose curvature is this fraction of it.

    Returns:
        The damping, None where no mode is beyond the limit; the largest curvature as a multiple of
        the limit.
    """
    values, left = curvature_modes(kernel, f, targets, loss)
    sharpness = float(np.asarray(values)[0]) / limit
    if not sharpness > 1.0:
        return None, sharpness
    return _damping(kernel, values, left, limit, damped, f.shape[1]), sharpness


@functools.partial(jit, static_argnums=5)
def _damping(
    kernel: Kernel, values: Array, left: Array, limit: Array, damped: Array, classes: int
) -> Damping:
    """The coordinate of a mode u is z = u^T H^(1/2) df, the force on it u^T H^(1/2) Theta g.

    With left = H^(1/2) U and right = Theta H^(1/2) U D / (N s) this force is multiplied by 1 - D.
    """
    n = len(left) // classes
    is_beyond = values > limit
    safe = jnp.where(is_beyond, values, 1.0)
    removed = jnp.where(is_beyond, 1.0 - damped * limit / safe, 0.0)
    image = apply_kernel(kernel, left.T.reshape(-1, n, classes)).reshape(-1, n * classes).T / n
    return Damping(left, image * (removed / safe)[None])


@jit
def is_nonlinear(near: Kernel, far: Kernel) -> Array:
    """Whether two kernels of a network differ.

    A linear network really diverges beyond the edge, since its kernel does not change: it is not
    damped.
    """
    probe = jax.random.normal(jax.random.key(0), near.shape[:2], near.dtype)
    first, second = (apply_kernel(kernel, probe) for kernel in (near, far))
    return jnp.linalg.norm(second - first) > LINEAR * jnp.linalg.norm(first)
