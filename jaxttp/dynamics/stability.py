"""The curvature of the linearized loss, and the largest stable steps.

At a step t a linear optimizer moves the state s = (w, accumulators) of a mode of curvature x by a
matrix, s <- (M_t + x b_t e_w^T) s (`step_maps`). It is stable there as long as the spectral
radius is below one, which for sgd(eta, m) is eta < 2 (1 + m)/x.

Mini-batches whose curvatures differ diverge at smaller steps (docs/explanations/batches.md): this
shows in the recursion over the batches themselves.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_number, is_concrete
from jaxttp._core.compile import jit
from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.dynamics._kernels import apply_kernel, check_problem, flatten_kernel
from jaxttp.dynamics.optimizers import (
    HeavyBall,
    LinearRecurrence,
    Optimizer,
    inlined,
    keep_dtypes,
    same_program,
    slots,
)
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel, KernelLike
from jaxttp.ntk.lanczos import lanczos

LANCZOS_STEPS = 64
OPERATOR_STEPS = 31
"""Of an iteration whose products evaluate the network; with the initial vector's they are 32."""
DENSE = 256
"""Outputs of a kernel whose eigenvectors are all computed, at most."""
MODES = 32
"""Stiffest modes of the curvature that are computed: more cannot be damped."""
FRACTIONS = (-7.0, 7.0)
"""Decimal logarithms of the smallest and largest fraction of a limit."""
GROWTH = 1e-6
"""A spectral radius of one is a mode at rest; beyond one by this, it grows."""


@functools.partial(jit, static_argnums=3)
def curvature_modes(
    kernel: Kernel, f: Array, targets: Array, loss: Loss
) -> tuple[Float[Array, " k"], Float[Array, "nc k"]]:
    """The largest eigenvalues of (1/N) H^(1/2) Theta H^(1/2), and H^(1/2) u, u their eigenvectors.

    The eigenvalues fall; arguments as validated by `check_problem`. There are `MODES`, or N C where
    that is less.
    """
    root, (n, c) = _hessian_root(f, targets, loss), f.shape
    if f.size > DENSE:
        values, vectors = _ritz(functools.partial(apply_kernel, kernel), root)
    else:
        matrix = flatten_kernel(kernel, c).reshape(n, c, n * c)
        half = jnp.einsum("nab,nbp->nap", root, matrix, precision="highest").reshape(n * c, n, c)
        whole = jnp.einsum("pnb,nba->pna", half, root, precision="highest").reshape(n * c, n * c)
        values, vectors = decompose(jnp.linalg.eigh, whole / n)
    values, vectors = values[::-1][:MODES], vectors[:, ::-1][:, :MODES]
    left = jnp.einsum("nab,nbk->nak", root, vectors.reshape(n, c, -1), precision="highest")
    return jnp.maximum(values, 0.0), left.reshape(n * c, -1)


def _hessian_root(f: Array, targets: Array, loss: Loss) -> Float[Array, "n c c"]:
    """H^(1/2) of every sample; of a loss over tokens block by block."""
    hessian = loss.hessian(f, targets)
    if not loss.tokens:
        return _roots(hessian)
    (n, c), t = f.shape, loss.tokens
    blocks = jnp.einsum("ntatb->ntab", hessian.reshape(n, t, c // t, t, c // t))
    roots = jax.vmap(_roots)(blocks)
    apart = jnp.eye(t, dtype=f.dtype)
    return jnp.einsum("ntab,ts->ntasb", roots, apart, precision="highest").reshape(n, c, c)


def _roots(blocks: Float[Array, "n c c"]) -> Float[Array, "n c c"]:
    values, vectors = decompose(jnp.linalg.eigh, blocks)
    scaled = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[:, None, :]
    return jnp.einsum("nab,ncb->nac", scaled, vectors, precision="highest")


@functools.partial(jit, static_argnums=3)
def operator_curvature(operator: Any, f: Array, targets: Array, loss: Loss) -> Float[Array, ""]:
    """The largest curvature by 32 products with Theta, which is not formed: from below.

    Args:
        operator: Theta, such as `jaxttp.ntk.ntk_operator` gives; ``.mv(v)`` for v (N, C).
        f: outputs (N, C).
        targets: encoded.
        loss: the loss.
    """
    values, _ = _ritz(operator.mv, _hessian_root(f, targets, loss), OPERATOR_STEPS)
    return jnp.maximum(values[-1], 0.0)


def _ritz(
    multiply: Callable[[Array], Array], root: Float[Array, "n c c"], steps: int = LANCZOS_STEPS
) -> tuple[Array, Array]:
    """Ritz values, increasing, and their vectors, by products with Theta; unknown values are 0.

    Args:
        multiply: v (N, C) -> Theta v.
        root: H^(1/2) of every sample.
        steps: products at most.
    """
    n, c, _ = root.shape

    def rooted(flat: Array) -> Array:
        return jnp.einsum("nab,nb->na", root, flat.reshape(n, c), precision="highest")

    def product(flat: Array) -> Array:
        return rooted(multiply(rooted(flat))).reshape(-1) / n

    start = jax.random.normal(jax.random.key(0), (n * c,), root.dtype)
    # The initial vector lies in the range of H^(1/2): outside it products are zero.
    ritz = lanczos(product, product(start), min(steps, n * c))
    return jnp.where(ritz.known, ritz.values, 0.0), ritz.vectors()


def max_learning_rate(
    kernel: KernelLike,
    f0: ArrayLike,
    y: Any,
    *,
    loss: str | Loss,
    momentum: Any = 0.0,
    nesterov: bool = False,
) -> Float[Array, ""]:
    """The learning rate beyond which the linearized network diverges, with H taken at f0.

    2/lambda for gradient descent, 2(1 + m)/lambda for heavy-ball momentum m and
    2(1 + m)/((1 + 2m) lambda) for Nesterov's, lambda the largest eigenvalue of
    (1/N) H^(1/2) Theta H^(1/2), that of the generalized Gauss-Newton matrix. With cross-entropy
    the curvature changes during training: this is the limit at its start.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C.
        f0: outputs before training (N, C).
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.
        momentum: m in [0, 1).
        nesterov: whether the momentum is Nesterov's.

    Returns:
        A finite positive scalar; the largest float where the curvature is zero.

    Raises:
        ValueError: bad shapes or labels, momentum outside [0, 1).

    Example:
        >>> import jax.numpy as jnp
        >>> kernel = jnp.full((1, 1, 1, 1), 4.0)
        >>> float(max_learning_rate(kernel, jnp.zeros((1, 1)), jnp.ones((1, 1)),
        ...                         loss="squared_error"))
        0.5

    Source:
        Standard; the generalization to (1/N) H^(1/2) Theta H^(1/2) is derived.
    """
    check_number("momentum", momentum, at_least=0.0, below=1.0)
    kernel, f0, targets, loss, _, _ = check_problem(kernel, f0, y, loss)
    return rate_limit(curvature_modes(kernel, f0, targets, loss)[0], momentum, nesterov)


@functools.partial(jit, static_argnames="nesterov")
def rate_limit(curvature: Array, momentum: Any, nesterov: bool = False) -> Array:
    """The limit of `max_learning_rate` by the largest of some eigenvalues."""
    largest = jnp.max(curvature)
    factor = 2.0 * (1.0 + momentum) / (1.0 + 2.0 * momentum if nesterov else 1.0)
    huge = jnp.finfo(largest.dtype).max
    limit = jnp.minimum(factor / jnp.where(largest > 0, largest, 1.0), huge)
    return jnp.where(largest > 0, limit, huge).astype(largest.dtype)


# --- the steps of a linear optimizer --------------------------------------------------------------


class StepMaps(NamedTuple):
    """The linear map of every step of an optimizer on (weight, accumulators) of a mode.

    Attributes:
        still: M (T, k, k), without a gradient; of NumPy where its values are known.
        pulled: b (T, k), the response to a unit gradient.
    """

    still: Any
    pulled: Any


def step_maps(
    optimizer: optax.GradientTransformation | HeavyBall | LinearRecurrence, steps: int
) -> StepMaps:
    """The maps of a linear optimizer, from its response to unit vectors at every step.

    Raises:
        ValueError: a state whose accumulators cannot be distinguished from its counters.
    """
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
        try:
            count = len(slots(optimizer, optimizer.init(jnp.zeros(1))))
            first = optimizer.init(jnp.zeros(2 + count))
            descent = same_program(optimizer, jnp.zeros(()))
            rows = inlined(_step_rows, descent)(descent, first, steps)
        except (ValueError, TypeError, AttributeError) as problem:
            raise ValueError(f"optimizer: its steps cannot be taken apart ({problem})") from problem
    rows = np.asarray(rows, np.float64) if is_concrete(rows) else rows
    return StepMaps(rows[:, :, 1:], rows[:, :, 0])


@functools.partial(jit, static_argnums=2)
def _step_rows(optimizer: Optimizer, first: optax.OptState, steps: int) -> Array:
    """The weight and the accumulators (T, k, 1 + k) after one step from each unit vector."""
    basis = jnp.eye(2 + len(slots(optimizer, first)))

    def step(state: Any, _: None) -> tuple[Any, Array]:
        units = iter(basis[2:])
        state = optax.tree_utils.tree_map_params(
            optimizer, lambda leaf: next(units).astype(leaf.dtype), state
        )
        updates, new = optimizer.update(basis[0], state, basis[1])
        rows = jnp.stack([basis[1] + jnp.asarray(updates), *slots(optimizer, new)])
        return keep_dtypes(new, state), rows

    return jax.lax.scan(step, first, None, length=steps)[1]


def step_rates(maps: StepMaps) -> np.ndarray:
    """The learning rates (T,) of SGD with any momentum; NaN where there is no such number.

    Under a constant gradient the weight moves by eta/(1 - m) a step in the end, with Nesterov's
    momentum as well; 1 - m is det(I - F), F the map of the accumulators alone.
    """
    inner = np.eye(maps.still.shape[1] - 1) - maps.still[:, 1:, 1:]
    size = np.linalg.det(inner)
    solvable = np.abs(size) > 1e-9
    inner[~solvable] = np.eye(inner.shape[1])
    limit = np.linalg.solve(inner, maps.pulled[:, 1:, None])[..., 0]
    rates = -size * (maps.pulled[:, 0] + np.einsum("tk,tk->t", maps.still[:, 0, 1:], limit))
    return np.where(solvable & (rates >= 0) & (period(maps) == 1), np.abs(rates), np.nan)


def period(maps: StepMaps) -> int:
    """The largest number of steps between updates of the weight; 1 where most steps are updates."""
    moves = np.flatnonzero(np.any(maps.still[:, 0, 1:] != 0, axis=1) | (maps.pulled[:, 0] != 0))
    gaps = np.diff(moves)
    # A schedule may pause, a rule such as MultiSteps pauses again and again.
    return int(gaps.max()) if len(gaps) > 1 and gaps.min() > 1 else 1


def curvature_limits(
    optimizer: optax.GradientTransformation | HeavyBall | LinearRecurrence, steps: int
) -> Float[np.ndarray, " t"]:
    """The largest curvature at which each step of a linear optimizer is stable, for full batches.

    Args:
        optimizer: linear, with known numbers.
        steps: T.

    Example:
        >>> import optax
        >>> curvature_limits(optax.sgd(0.1, 0.5), 2).round(3).tolist()
        [30.0, 30.0]
    """
    if isinstance(optimizer, HeavyBall):
        m = float(optimizer.momentum or 0.0)
        factor = 2.0 * (1.0 + m) / (1.0 + 2.0 * m if optimizer.nesterov else 1.0)
        fractions = np.broadcast_to(np.asarray(optimizer.rates, np.float64) / factor, (steps,))
    else:
        fractions = step_fractions(step_maps(optimizer, steps), 1.0)
    with np.errstate(divide="ignore"):
        return 1.0 / fractions


def step_fractions(maps: StepMaps, curvature: float) -> np.ndarray:
    """How large every step is (T,) as a fraction of the largest stable one, for full batches.

    For an optimizer that moves every P steps only (accumulated gradients), P steps are one map.
    """
    wait = period(maps)
    flat = np.concatenate([maps.still.reshape(len(maps.still), -1), maps.pulled], axis=1)
    count = len(flat) - wait + 1
    windows = np.stack([flat[p : p + count] for p in range(wait)], axis=1)
    distinct, index = np.unique(windows.reshape(count, -1), axis=0, return_inverse=True)
    k = maps.still.shape[1]
    distinct = distinct.reshape(len(distinct), wait, -1)
    still, pulled = distinct[..., : k * k].reshape(-1, wait, k, k), distinct[..., k * k :]
    low, high = (np.full(len(distinct), bound) for bound in FRACTIONS)
    for _ in range(48):
        middle = (low + high) / 2
        product = np.eye(k)
        for p in range(wait):
            step = still[:, p].copy()
            step[:, :, 0] += curvature * 10.0 ** middle[:, None] * pulled[:, p]
            product = step @ product
        grows = np.abs(np.linalg.eigvals(product)).max(axis=-1) > 1 + GROWTH
        low, high = np.where(grows, low, middle), np.where(grows, middle, high)
    fractions = np.where(high >= FRACTIONS[1], 0.0, 10.0**-high)[index.reshape(-1)]
    return np.concatenate([fractions, np.full(wait - 1, fractions[-1])])
