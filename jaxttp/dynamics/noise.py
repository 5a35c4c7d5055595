"""The noise of mini-batches in function space: exact factors, and the papers' approximations.

A batch of B samples moves the outputs by -(eta/B) sum_{i in batch} Theta[:, i] g_i. Its covariance
around the full-batch step is (eta^2/B) J Sigma J^T, with Sigma the covariance of the gradients of
single samples, and

    S[:, i] = (Theta[:, i] g_i - mean_j Theta[:, j] g_j) / sqrt(N),      S S^T = J Sigma J^T,

so the N-dimensional vector n moves the outputs by S n = Theta (g ∘ (n - mean n)) / sqrt(N): one
product with the kernel, and no object of the size of the weights.
"""

import functools
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import (
    check_array,
    check_choice,
    check_finite,
    check_floating,
    check_integer,
)
from jaxttp._core.compile import jit
from jaxttp._core.traced import Traced, network_of
from jaxttp._core.types import ApplyFn, Params, concatenate, count
from jaxttp.adapters.inputs import check_network, check_samples, traced_outputs
from jaxttp.adapters.outputs import check_gradients, check_per_sample
from jaxttp.dynamics._kernels import apply_kernel, check_problem
from jaxttp.dynamics.batches import PROTOCOLS
from jaxttp.losses import Loss, encode_targets
from jaxttp.ntk.gram import kernel_of
from jaxttp.ntk.kernels import Kernel, KernelLike


def noise_factor(
    kernel: KernelLike, f: ArrayLike, y: Any, *, loss: str | Loss
) -> Float[Array, "n c n"]:
    """The factor S (N, C, N) of the mini-batch noise at outputs f: S S^T = J Sigma J^T exactly.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C.
        f: outputs (N, C).
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.

    Returns:
        S, one column (N, C) for every sample.

    Raises:
        ValueError: bad shapes or labels.

    Example:
        >>> import jax.numpy as jnp
        >>> s = noise_factor(jnp.eye(2), jnp.zeros((2, 1)), jnp.array([[1.0], [-1.0]]),
        ...                  loss="squared_error")
        >>> s.shape, bool(jnp.allclose(s.sum(axis=2), 0.0))
        ((2, 1, 2), True)

    Source:
        TTP eq (7)-(8) take a D-dimensional square root of Sigma; this N-dimensional factor is exact
        (derived).
    """
    f = check_array("f", f, ndim=2, floating=True)
    check_finite("f", f)
    kernel, f, targets, loss, _, _ = check_problem(kernel, f, y, loss)
    return _noise_factor(kernel, f, targets, loss)


@functools.partial(jit, static_argnums=3)
def _noise_factor(kernel: Kernel, f: Array, targets: Array, loss: Loss) -> Array:
    force = loss.gradient(f, targets)
    columns = jax.vmap(lambda n: apply_noise(kernel, force, n))(jnp.eye(f.shape[0], dtype=f.dtype))
    return jnp.moveaxis(columns, 0, -1)


def apply_noise(kernel: Kernel, force: Array, normal: Array) -> Array:
    """S n for g (N, C) and n (N,); with the cross kernel in place of Theta, at the test samples."""
    centred = normal - jnp.mean(normal)
    return apply_kernel(kernel, force * centred[:, None]) / normal.shape[0] ** 0.5


def diagonal_noise(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any,
    *,
    loss: str | Loss,
    x_test: Any = None,
    batch_size: int | None = None,
    max_bytes: int | None = None,
) -> Float[Array, "n c m d"]:
    """J diag(Sigma_0) J^T: the noise that the paper keeps, as a matrix in function space.

    diag(Sigma_0) is the variance over samples of every weight's gradient. Scaling the weights by
    its root, w = w_0 + sigma ∘ v, makes the noise a kernel, that of the network in v.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: the weights before training.
        x: samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.
        x_test: test samples (M, ...), whose rows follow those of `x`.
        batch_size: samples a tile, as in `empirical_ntk`.
        max_bytes: bound on working memory, as in `empirical_ntk`.

    Returns:
        (N, C, N, C), or (N + M, C, N + M, C) with `x_test`: the `noise_kernel` of `diffusion`.

    Raises:
        ValueError: bad samples or labels.

    Example:
        >>> import jax.numpy as jnp
        >>> noise = diagonal_noise(lambda w, x: x @ w, jnp.zeros((2, 1)), jnp.eye(2),
        ...                        jnp.ones((2, 1)), loss="squared_error")
        >>> noise.reshape(2, 2).tolist()
        [[0.25, 0.0], [0.0, 0.25]]

    Source:
        TTP Section 3.1 and Appendix B. It keeps a few hundredths of the trace of J Sigma J^T in
        our checks, so it is an approximation to compare with and no default.
    """
    check_network(apply_fn, params)
    x = check_samples("x", x)
    check_floating("params", params)
    check_finite("params", params)
    check_finite("x", x)
    check_per_sample(apply_fn, params, x)
    targets, loss = encode_targets(loss, y, traced_outputs(apply_fn, params, x))

    one = jax.tree.map(lambda leaf: leaf[:1], x)
    sigma = _deviation(network_of(apply_fn).precise(params, one), params, x, targets, loss=loss)
    check_gradients(apply_fn, params, x, sigma)

    def scaled(v: Params, samples: Any) -> Array:
        return apply_fn(jax.tree.map(lambda w, s, u: w + s * u, params, sigma, v), samples)

    every = x if x_test is None else concatenate([x, check_samples("x_test", x_test)])
    start = jax.tree.map(jnp.zeros_like, params)
    return kernel_of(scaled, start, every, batch_size=batch_size, max_bytes=max_bytes)


@functools.partial(jit, static_argnames="loss")
def _deviation(network: Traced, params: Params, x: Any, targets: Array, *, loss: Loss) -> Params:
    """The standard deviation over samples of the gradient of every parameter."""

    def gradient(sample: Any, target: Array) -> Params:
        one = jax.tree.map(lambda leaf: leaf[None], sample)
        return jax.grad(lambda w: loss.sample_loss(network(w, one)[0], target))(params)

    def add(sums: tuple, pair: tuple) -> tuple:
        g = gradient(*pair)
        first = jax.tree.map(jnp.add, sums[0], g)
        return (first, jax.tree.map(lambda a, b: a + b * b, sums[1], g)), None

    zero = jax.tree.map(jnp.zeros_like, params)
    (first, second), _ = jax.lax.scan(add, (zero, zero), (x, targets))
    n = count(x)
    return jax.tree.map(
        lambda a, b: jnp.sqrt(jnp.maximum(b / n - (a / n) ** 2, 0.0)), first, second
    )


def protocol_scale(protocol: str, n: int, batch_size: int) -> float:
    """By what the amplitude of white noise is multiplied for a batch protocol.

    1 for "replacement", sqrt((N - B)/(N - 1)) for "independent". For "epochs" it is sqrt(N/(N - 1))
    and the noise is not white: see `EpochNoise`.

    Args:
        protocol: a protocol of `batch_indices`.
        n: number of samples N.
        batch_size: B.

    Returns:
        The factor, on top of sqrt(1/B).

    Raises:
        ValueError: an unknown protocol, a batch larger than the data.

    Example:
        >>> protocol_scale("independent", 10, 10)
        0.0
    """
    check_choice("protocol", protocol, PROTOCOLS)
    check_integer("batch_size", batch_size, at_least=1, at_most=n)
    if protocol == "replacement":
        return 1.0
    if protocol == "independent":
        return float(np.sqrt((n - batch_size) / max(n - 1, 1)))
    return float(np.sqrt(n / max(n - 1, 1)))


class EpochNoise(diffrax.AbstractPath):
    """Brownian motion whose increments over one epoch nearly cancel, as those of a shuffle do.

    Batches of one epoch have the covariance (1/B) (N - B)/(N - 1) with themselves and -1/(N - 1)
    with each other. White noise of variance N/(B (N - 1)) has both when a share kappa of its mean
    over the epoch is taken out of it, 2 kappa - kappa^2 = E B / N (kappa = 1 where the E batches
    of an epoch cover all samples: a Brownian bridge).

    Attributes:
        t0: start of the path.
        t1: end of the path, a whole number of epochs.
        white: the Brownian motion underneath.
        epoch: E, the steps of an epoch.
        kappa: the share that is taken out.
    """

    t0: Any
    t1: Any
    white: diffrax.AbstractBrownianPath
    epoch: int = eqx.field(static=True)
    kappa: float = eqx.field(static=True)

    def __init__(self, white: diffrax.AbstractBrownianPath, epoch: int, kappa: float) -> None:
        self.t0, self.t1 = white.t0, white.t1
        self.white, self.epoch, self.kappa = white, epoch, kappa

    def evaluate(self, t0: Any, t1: Any = None, left: bool = True, use_levy: bool = False) -> Any:
        """The increment from t0 to t1, both inside one epoch."""
        del left, use_levy
        if t1 is None:
            raise ValueError("only increments of this path exist.")
        start = jnp.floor((0.5 * (t0 + t1)) / self.epoch) * self.epoch
        whole = self.white.evaluate(start, start + self.epoch)
        return self.white.evaluate(t0, t1) - self.kappa * (t1 - t0) / self.epoch * whole


def epoch_share(n: int, batch_size: int) -> tuple[int, float]:
    """The steps E of an epoch, and kappa of `EpochNoise`."""
    epoch = n // batch_size
    return epoch, 1.0 - float(np.sqrt(max(0.0, 1.0 - epoch * batch_size / n)))
