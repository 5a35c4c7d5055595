"""Stochastic gradient descent in function space as an Ito SDE, by diffrax.

    df = -(eta/N) Theta g(f) dt + (eta/sqrt(B)) S(f) dn,      S S^T = J Sigma J^T

One Euler-Maruyama step a step of the optimiser has the mean and the covariance of a real step. With
an optimiser the state is that of every mode, s = (f - f_0, accumulators), which a step moves by its
own map (schedules, velocities):

    ds = ((M_t - 1) s + b_t Theta g(f)/N) dt + (b_t/sqrt(B)) S(f) dn .

Neither the SDE nor its noise model is needed to FOLLOW mini-batch training, which `recursion` does
exactly with given batches; it is for what all possible batches would do.
"""

import functools
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import check_choice, check_integer, check_key
from jaxttp._core.compile import jit
from jaxttp._core.results import RESULT
from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.dynamics._kernels import apply_kernel, check_problem, flatten_kernel
from jaxttp.dynamics._trajectory import output_limit
from jaxttp.dynamics.noise import EpochNoise, apply_noise, epoch_share, protocol_scale
from jaxttp.dynamics.optimizers import HeavyBall
from jaxttp.dynamics.rates import every_step
from jaxttp.losses import Loss
from jaxttp.ntk.kernels import Kernel, KernelLike

NOISES = ("full", "diagonal", "constant", "none")
SOLVERS = {"euler": diffrax.Euler, "shark": diffrax.ShARK, "sea": diffrax.SEA}


class Diffusion(eqx.Module):
    """Predicted outputs under mini-batch noise; one unit of time is one optimiser step.

    Every array but `ts` has a leading axis of paths where `paths` was given.

    Attributes:
        ts: 0, 1, ..., steps.
        train: outputs on the training samples (steps + 1, N, C), f0 first; None where only the
            curves were asked for.
        test: outputs on the test samples (steps + 1, M, C), or None.
        loss: the loss on all training samples (steps + 1,).
        error: the error on all training samples (steps + 1,).
        diverged_at: first step whose outputs could not be represented (they are held from there),
            or -1.
        noise: the noise model.
        protocol: the batch protocol whose noise it is.
    """

    ts: Float[Array, " t"]
    train: Array | None
    test: Array | None
    loss: Array
    error: Array
    diverged_at: Array
    noise: str = eqx.field(static=True)
    protocol: str = eqx.field(static=True)

    plot, _repr_html_, __repr__ = RESULT

    def bands(self, quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)) -> Float[Array, "q t"]:
        """Quantiles of the loss over the paths at every step, (Q, steps + 1)."""
        loss = self.loss if self.loss.ndim == 2 else self.loss[None]
        return jnp.quantile(loss, jnp.asarray(quantiles, loss.dtype), axis=0)


def diffusion(  # noqa: PLR0913
    kernel: KernelLike,
    f0: ArrayLike,
    y: Any,
    *,
    loss: str | Loss,
    learning_rate: Any = None,
    optimizer: optax.GradientTransformation | HeavyBall | None = None,
    batch_size: int,
    steps: int,
    key: Array | None,
    noise: str = "full",
    momentum: Any = 0.0,
    protocol: str = "epochs",
    paths: int | None = None,
    substeps: int = 1,
    solver: str = "euler",
    noise_kernel: ArrayLike | None = None,
    kernel_test: KernelLike | None = None,
    f0_test: ArrayLike | None = None,
    save: str = "outputs",
) -> Diffusion:
    """Outputs under mini-batch SGD as an SDE in function space.

    Args:
        kernel: Theta (N, C, N, C), or (N, N) for K ⊗ I_C.
        f0: outputs before training (N, C).
        y: integer labels (N,) or targets (N, C).
        loss: "cross_entropy", "squared_error", "binary_cross_entropy" or a `Loss`.
        learning_rate: eta > 0 of gradient descent. Give either this or `optimizer`.
        optimizer: a linear optax transformation without weight decay (see `linear_filter`): its
            schedule and its velocity are followed step by step.
        batch_size: B, samples a step.
        steps: number of the optimiser's steps T.
        key: a `jax.random.key`.
        noise: "full", the exact covariance at every moment; "diagonal", a fixed covariance whose
            AMPLITUDE shrinks with ||g_t|| / ||g_0||; "constant", the same without shrinking (an
            ablation: it has the wrong asymptote); "none". The fixed covariance is `noise_kernel`.
        momentum: heavy-ball m, with `learning_rate`: by the effective rate eta/(1 - m) in drift
            and noise. ``optimizer=optax.sgd(eta, m)`` follows the velocity itself.
        protocol: whose noise, see `batch_indices`: "replacement" is white noise, "independent" the
            same times sqrt((N - B)/(N - 1)), "epochs" has increments that cancel over an epoch, as
            those of a shuffle do (`EpochNoise`).
        paths: how many paths, by vmap over keys; one without a leading axis when None.
        substeps: solver steps an optimiser step. With 1 a step has the variance of a real one.
        solver: "euler" (Euler-Maruyama); for additive noise ("constant", "none") and white
            protocols also "shark" and "sea", of higher order.
        noise_kernel: J Sigma_0 J^T as an approximation has it, (N, C, N, C), or (N + M, C, N + M,
            C) with test samples; `diagonal_noise` gives the paper's. When None, "diagonal" keeps
            the part of the exact one that is diagonal in the eigenbasis of Theta (all that a kernel
            knows of the weights), "constant" keeps all of it.
        kernel_test: Theta(X*, X) (M, C, N, C), or (M, N).
        f0_test: test outputs before training (M, C).
        save: "outputs", or "curves" for losses and errors alone.

    Returns:
        A `Diffusion`.

    Raises:
        ValueError: bad shapes, labels, options; a missing key; a solver that the noise forbids;
            neither or both of learning_rate and optimizer, an optimizer that is not linear or
            decays the weights.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> kernel = jnp.eye(4).reshape(4, 1, 4, 1)
        >>> path = diffusion(kernel, jnp.zeros((4, 1)), jnp.ones((4, 1)), loss="squared_error",
        ...                  learning_rate=0.5, batch_size=2, steps=8, paths=3,
        ...                  key=jax.random.key(0))
        >>> path.train.shape, path.bands().shape
        ((3, 9, 4, 1), (3, 9))

    Source:
        TTP eq (6)-(8), with the exact factor of the noise in place of the D-dimensional one, the
        batch protocol named, and no "shrink" factor for momentum (an erratum: it exceeds 1).
    """
    check_choice("noise", noise, NOISES)
    check_choice("save", save, ("outputs", "curves"))
    check_choice("solver", solver, SOLVERS)
    check_integer("steps", steps, at_least=1)
    check_integer("substeps", substeps, at_least=1)
    if key is None:
        raise ValueError("diffusion needs key: the noise is random; pass jax.random.key(0).")
    check_key(key)
    kernel, f0, targets, loss, kernel_test, f0_test = check_problem(
        kernel, f0, y, loss, kernel_test, f0_test
    )
    n = f0.shape[0]
    scale = protocol_scale(protocol, n, batch_size)
    if solver != "euler" and (noise not in ("constant", "none") or protocol == "epochs"):
        raise ValueError(
            f"solver={solver!r} is for additive white noise: noise='constant' or 'none', and "
            "protocol='independent' or 'replacement'. Use 'euler'."
        )
    maps = tuple(
        jnp.asarray(part, f0.dtype)
        for part in every_step(learning_rate, momentum, optimizer, steps)
    )
    amplitude = jnp.asarray(scale / batch_size**0.5, f0.dtype)
    starts = (f0,) if f0_test is None else (f0, f0_test)
    kernels = (kernel,) if kernel_test is None else (kernel, kernel_test)

    if paths is not None:
        check_integer("paths", paths, at_least=1)
    root = ()
    if noise in ("diagonal", "constant"):
        root = _root(kernels, starts, targets, loss, noise, noise_kernel)
    epoch, kappa = epoch_share(n, batch_size)
    plan = _Plan(
        loss, noise, solver, save == "outputs", steps, substeps, paths,
        epoch if protocol == "epochs" else None, kappa,
    )  # fmt: skip
    states, curves, diverged_at = _simulate(
        kernels, starts, targets, maps, amplitude, root, key, plan
    )
    train, test = (None, None) if states is None else (*states, None)[:2]
    ts = jnp.arange(steps + 1, dtype=f0.dtype)
    losses, errors = curves
    return Diffusion(ts, train, test, losses, errors, diverged_at, noise=noise, protocol=protocol)


class _Plan(NamedTuple):
    """What the compiled simulation depends on, beside shapes."""

    loss: Loss
    noise: str
    solver: str
    full: bool
    steps: int
    substeps: int
    paths: int | None
    epoch: int | None
    kappa: float


class _Stirred(NamedTuple):
    """Drift and noise of the state (f - f_0, accumulators), (1 + k, ., C) for every set of samples.

    Its `maps` are those of `every_step`, its `root` is empty with the full noise.
    """

    kernels: tuple[Kernel, ...]
    starts: tuple[Array, ...]
    targets: Array
    maps: tuple[Array, Array]
    amplitude: Array
    root: tuple[Array, ...]
    plan: _Plan

    @property
    def rest(self) -> tuple[Array, ...]:
        """The state before training."""
        slots = self.maps[1].shape[1]
        return tuple(jnp.zeros((slots, *f.shape), f.dtype) for f in self.starts)

    def outputs(self, state: tuple) -> tuple[Array, ...]:
        """Outputs on every set of samples."""
        return tuple(start + part[0] for start, part in zip(self.starts, state, strict=True))

    def alive(self, f: Array) -> Array:
        """Whether outputs are below the limit; beyond it the path is held."""
        return jnp.all(jnp.abs(f) < output_limit(f))

    def held(self, f: Array) -> Array:
        """Outputs within the limit."""
        limit = output_limit(f)
        return jnp.clip(jnp.nan_to_num(f, nan=limit), -limit, limit)

    def force(self, f: Array) -> Array:
        """The gradient, zero beyond the limit."""
        return jnp.where(self.alive(f), self.plan.loss.gradient(f, self.targets), 0.0)

    def now(self, values: Array, t: Any) -> Array:
        """The entry of the step that t lies in."""
        # Room for rounding of t; stages of a solver come up to 5/6 of a step (ShARK).
        step = jnp.floor(t + 0.1 / self.plan.substeps).astype(int)
        return values[jnp.clip(step, 0, self.plan.steps - 1)]

    def drift(self, t: Any, state: tuple, args: Any) -> tuple:
        """What a full batch does: (M - 1) s + b Theta g/N."""
        f, (still, pulls) = self.outputs(state)[0], self.maps
        force, pulled = self.force(f) / f.shape[0], self.now(pulls, t)
        change = self.now(still, t) - jnp.eye(len(pulled), dtype=f.dtype)
        moves = [jnp.multiply.outer(pulled, apply_kernel(k, force)) for k in self.kernels]
        return tuple(
            jnp.where(self.alive(f), jnp.tensordot(change, part, 1) + move, 0.0)
            for part, move in zip(state, moves, strict=True)
        )

    def spread(self, t: Any, state: tuple, args: Any) -> lx.AbstractLinearOperator:
        """The noise factor S into every part of the state by b, times the amplitude."""
        f = self.outputs(state)[0]
        force, pulled = self.force(f), self.amplitude * self.now(self.maps[1], t)
        if self.plan.noise == "full":

            def move(v: Array) -> tuple[Array, ...]:
                each = (apply_noise(k, force, v) for k in self.kernels)
                return tuple(jnp.multiply.outer(pulled, one) for one in each)

            return lx.FunctionLinearOperator(move, jax.ShapeDtypeStruct(f.shape[:1], f.dtype))
        left: Any = 1.0
        if self.plan.noise == "diagonal":
            first = jnp.linalg.norm(self.plan.loss.gradient(self.starts[0], self.targets))
            left = jnp.linalg.norm(force) / jnp.where(first > 0, first, 1.0)
        left = jnp.where(self.alive(f), left, 0.0)
        moved = tuple(jnp.multiply.outer(pulled * left, one) for one in self.root)
        return lx.PyTreeLinearOperator(moved, jax.eval_shape(lambda: self.rest))

    def read(self, t: Any, state: tuple, args: Any) -> tuple:
        """Outputs (or None), loss, error, and whether they could be represented."""
        found, loss = self.outputs(state), self.plan.loss
        f = self.held(found[0])
        curves = loss.value(f, self.targets), loss.error(f, self.targets), self.alive(found[0])
        return (tuple(map(self.held, found)) if self.plan.full else None), curves


@functools.partial(jax.jit, static_argnames="plan")  # thousands of small steps: not `_jit`
def _simulate(
    kernels: tuple[Kernel, ...],
    starts: tuple[Array, ...],
    targets: Array,
    maps: tuple[Array, Array],
    amplitude: Array,
    root: tuple[Array, ...],
    key: Array,
    plan: _Plan,
) -> tuple[tuple[Array, ...] | None, tuple[Array, Array], Array]:
    """States (or None), loss and error at every step, and where paths diverge."""
    motion = _Stirred(kernels, starts, targets, maps, amplitude, root, plan)
    steps, substeps, dtype = plan.steps, plan.substeps, starts[0].dtype
    size = root[0].shape[-1] if root else starts[0].shape[0]
    horizon = float(steps) if plan.epoch is None else float(plan.epoch * -(-steps // plan.epoch))
    grid = jnp.arange(steps * substeps + 1, dtype=dtype) / substeps
    area = diffrax.BrownianIncrement if plan.solver == "euler" else diffrax.SpaceTimeLevyArea

    def solve(key: Array) -> tuple:
        terms: Any = diffrax.ODETerm(motion.drift)
        if plan.noise != "none":
            path: Any = diffrax.VirtualBrownianTree(
                jnp.zeros((), dtype), jnp.asarray(horizon, dtype), 0.25 / substeps,
                jax.ShapeDtypeStruct((size,), dtype), key, levy_area=area,
            )  # fmt: skip
            if plan.epoch is not None:
                path = EpochNoise(path, plan.epoch, plan.kappa)
            terms = diffrax.MultiTerm(terms, diffrax.ControlTerm(motion.spread, path))
        solution = diffrax.diffeqsolve(
            terms,
            SOLVERS[plan.solver]() if plan.noise != "none" else diffrax.Euler(),
            t0=grid[0],
            t1=grid[-1],
            dt0=None,
            y0=motion.rest,
            saveat=diffrax.SaveAt(ts=grid[::substeps], fn=motion.read),
            stepsize_controller=diffrax.StepTo(ts=grid),
            max_steps=steps * substeps,
        )
        assert solution.ys is not None
        return solution.ys

    if plan.paths is None:
        states, (losses, errors, fine) = solve(key)
    else:
        states, (losses, errors, fine) = jax.vmap(solve)(jax.random.split(key, plan.paths))
    diverged_at = jnp.where(jnp.all(fine, axis=-1), -1, jnp.argmin(fine, axis=-1))
    return states, (losses, errors), diverged_at


def _root(
    kernels: tuple[Kernel, ...],
    starts: tuple[Array, ...],
    targets: Array,
    loss: Loss,
    noise: str,
    noise_kernel: ArrayLike | None,
) -> tuple[Array, ...]:
    """A square root of the fixed covariance, a block (., C, Q) for every set of samples."""
    n, c = starts[0].shape
    if noise_kernel is not None:
        rows = sum(start.shape[0] for start in starts)
        matrix = jnp.asarray(noise_kernel, starts[0].dtype)
        if matrix.shape != (rows, c, rows, c):
            raise ValueError(
                f"noise_kernel must have shape {(rows, c, rows, c)} (training samples, then test "
                f"samples); got {matrix.shape}."
            )
        values, vectors = decompose(jnp.linalg.eigh, matrix.reshape(rows * c, rows * c))
        root = (vectors * jnp.sqrt(jnp.maximum(values, 0.0))[None, :]).reshape(rows, c, -1)
        return (root,) if len(starts) == 1 else (root[:n], root[n:])
    factor = _factor(kernels, starts[0], targets, loss)
    if noise == "constant":
        return factor
    spectrum = decompose(jnp.linalg.eigh, flatten_kernel(kernels[0], c))
    return _diagonal_root(kernels, factor[0], tuple(spectrum))


@functools.partial(jit, static_argnums=3)
def _factor(
    kernels: tuple[Kernel, ...], start: Array, targets: Array, loss: Loss
) -> tuple[Array, ...]:
    """S at the start, a block (., C, N) for every set of samples."""
    force = loss.gradient(start, targets)
    each = jax.vmap(lambda v: tuple(apply_noise(k, force, v) for k in kernels), out_axes=-1)
    return each(jnp.eye(start.shape[0], dtype=force.dtype))


@jit
def _diagonal_root(
    kernels: tuple[Kernel, ...], factor: Array, spectrum: tuple[Array, Array]
) -> tuple[Array, ...]:
    """The root of the part of S S^T that is diagonal in the eigenbasis of Theta.

    Theta = V diag(l) V^T: the directions V^T J / sqrt(l) of weight space are orthonormal, and noise
    with independent components along them has the root V diag(||v_k^T S||); at the test samples
    these directions read Theta* v_k / l_k.
    """
    (values, vectors), (n, c, _) = spectrum, factor.shape
    sizes = jnp.linalg.norm(vectors.T @ factor.reshape(n * c, n), axis=1)
    root = [(vectors * sizes[None, :]).reshape(n, c, -1)]
    if len(kernels) == 2:
        kept = values > 1e-6 * values[-1]
        weights = jnp.where(kept, sizes / jnp.where(kept, values, 1.0), 0.0)
        basis = jnp.moveaxis((vectors * weights[None, :]).reshape(n, c, -1), -1, 0)
        root.append(jnp.moveaxis(apply_kernel(kernels[1], basis), 0, -1))
    return tuple(root)
