"""Heavy-ball descent of the linearised network for many settings at once, on its outputs.

    u_{t+1} = m u_t + (1/B) Theta[:, batch] g_t[batch],     f_{t+1} = f_t - eta_t u_{t+1}

S settings are one state (N, C, S), and a step is ONE product of Theta with an (N C, S) matrix.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxttp._core.compile import jit
from jaxttp.dynamics._dual import output_limit
from jaxttp.dynamics._kernels import apply_kernel, columns_of
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Factored


@functools.partial(jit, static_argnames=("loss", "all_errors"))
def heavy_ball(
    matrix: Float[Array, "nc nc"] | Float[Array, "n n"] | Factored,
    start: Float[Array, "n c"],
    targets: Float[Array, "n k"],
    rates: Float[Array, "t s"],
    momenta: Float[Array, " s"],
    indices: Int[Array, "t b"] | None,
    loss: Loss,
    all_errors: bool = False,
) -> tuple[Float[Array, "t_plus_1 s"], Float[Array, "e s"], Bool[Array, " s"]]:
    """Loss curves (T + 1, S), final errors (1, S), and which settings did not diverge (S,).

    With `all_errors` these are curves too (T + 1, S). A setting that diverges is held where its
    outputs were last representable. The kernel is a matrix, K (N, N) of K ⊗ I_C or factors.
    """
    n, c = start.shape
    count = momenta.shape[0]
    gradient = jax.vmap(loss.gradient, (2, None), 2)  # settings last: products need no transpose
    value = jax.vmap(loss.value, (2, None))
    error = jax.vmap(loss.error, (2, None))
    limit = output_limit(start.dtype)

    def multiplied(f: Array, batch: Array | None) -> Array:
        kernel = matrix if batch is None else columns_of(matrix, batch)
        rows = slice(None) if batch is None else batch
        pulled = gradient(f[rows], targets[rows])  # (B, C, S)
        moved = apply_kernel(kernel, jnp.moveaxis(pulled / pulled.shape[0], 2, 0))
        return jnp.moveaxis(moved, 0, 2)

    def force(f: Array, batch: Array | None) -> Array:
        if not isinstance(matrix, jax.Array) or matrix.shape != (n * c, n * c):
            return multiplied(f, batch)
        if batch is None:
            flat = gradient(f, targets).reshape(n * c, count) / n
            moved = jnp.dot(matrix, flat, precision="highest")
        else:
            flat = gradient(f[batch], targets[batch]).reshape(-1, count) / batch.shape[0]
            some = matrix.reshape(n * c, n, c)[:, batch].reshape(n * c, -1)
            moved = jnp.dot(some, flat, precision="highest")
        return moved.reshape(n, c, count)

    def read(f: Array) -> tuple[Array, Array | None]:
        return value(f, targets), error(f, targets) if all_errors else None

    def step(carry: tuple, inputs: tuple) -> tuple[tuple, tuple]:
        f, velocity, alive = carry
        rate, batch = inputs
        velocity = momenta[None, None] * velocity + force(f, batch)
        new = f - rate[None, None] * velocity
        alive = alive & jnp.all(jnp.abs(new) < limit, axis=(0, 1))
        f = jnp.where(alive[None, None], new, f)
        return (f, velocity, alive), read(f)

    first = jnp.broadcast_to(start[..., None], (n, c, count))
    carry = (first, jnp.zeros_like(first), jnp.ones(count, bool))
    (last, _, alive), curves = jax.lax.scan(step, carry, (rates, indices))
    losses, errors = jax.tree.map(
        lambda begin, rest: jnp.concatenate([begin[None], rest]), read(first), curves
    )
    return losses, error(last, targets)[None] if errors is None else errors, alive
