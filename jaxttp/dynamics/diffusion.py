"""Stochastic gradient descent in function space as an Ito SDE, by diffrax.

    df = -(eta/N) Theta g(f) dt + (eta/sqrt(B)) S(f) dn,      S S^T = J Sigma J^T

A batch of B samples moves the outputs by -(eta/B) sum_{i in batch} Theta[:, i] g_i. Its covariance
around the full-batch step is (eta^2/B) J Sigma J^T, with Sigma the covariance of the gradients of
single samples, and

    S[:, i] = (Theta[:, i] g_i - mean_j Theta[:, j] g_j) / sqrt(N),

so the N-dimensional vector n moves the outputs by S n = Theta (g ∘ (n - mean n)) / sqrt(N): one
product with the kernel, and no object of the size of the weights.

One Euler-Maruyama step a step of the optimizer has the mean and the covariance of a real step. With
an optimizer the state is that of every mode, s = (f - f_0, accumulators), which a step moves by its
own map (schedules, velocities):

    s <- M_t s + b_t (Theta g(f)/N + S(f) n/sqrt(B)) .

`recursion` follows training on given batches exactly, without any noise model. The SDE describes
the distribution over all possible batches.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxttp._core.checks import (
    check_choice,
    check_finite,
    check_integer,
    check_key,
    check_used,
)
from jaxttp._core.compile import jit
from jaxttp._core.results import RESULT
from jaxttp._core.traced import Traced, network_of
from jaxttp._core.types import ApplyFn, Params, concatenate, count
from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.adapters.inputs import check_samples, check_trained, traced_outputs
from jaxttp.adapters.outputs import check_gradients, check_per_sample
from jaxttp.dynamics._kernels import apply_kernel, check_problem, check_rate, flatten_kernel
from jaxttp.dynamics._trajectory import output_limit
from jaxttp.dynamics.batches import PROTOCOLS
from jaxttp.dynamics.optimizers import HeavyBall, effective_learning_rate, linear_filter
from jaxttp.dynamics.stability import step_maps
from jaxttp.losses import Loss, encode_targets
from jaxttp.ntk.gram import kernel_of
from jaxttp.ntk.kernels import Kernel, KernelLike

NOISES = ("full", "diagonal", "constant")


class Diffusion(eqx.Module):
    """Predicted outputs under mini-batch noise; one unit of time is one optimizer step.

    Every array but `ts` has a leading axis of paths with `paths`.

    Attributes:
        ts: 0, 1, ..., steps.
        train: outputs on the training samples (steps + 1, N, C), f0 first; None with
            ``save="curves"``.
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
        steps: number of the optimizer's steps T.
        key: a `jax.random.key`.
        noise: "full", the exact covariance at every moment; "diagonal", a fixed covariance whose
            AMPLITUDE shrinks with ||g_t|| / ||g_0||; "constant", the same without shrinking (an
            ablation: it has the wrong asymptote). The fixed covariance is `noise_kernel`.
        momentum: heavy-ball m, with `learning_rate`: by the effective rate eta/(1 - m) in drift
            and noise. ``optimizer=optax.sgd(eta, m)`` follows the velocity itself.
        protocol: of the batches, see `batch_indices`: "replacement" is white noise, "independent"
            the same times sqrt((N - B)/(N - 1)), "epochs" has increments that cancel over an epoch,
            as those of a shuffle do (see `increments`).
        paths: how many paths, by vmap over keys; one without a leading axis when None.
        noise_kernel: J Sigma_0 J^T as an approximation has it, (N, C, N, C), or (N + M, C, N + M,
            C) with test samples; `diagonal_noise` gives the paper's. When None, "diagonal" keeps
            the part of the exact one that is diagonal in the eigenbasis of Theta (which needs the
            kernel alone), "constant" keeps all of it.
        kernel_test: Theta(X*, X) (M, C, N, C), or (M, N).
        f0_test: test outputs before training (M, C).
        save: "outputs", or "curves" for losses and errors alone.

    Returns:
        A `Diffusion`.

    Raises:
        ValueError: bad shapes, labels, options; a missing key; neither or both of learning_rate
            and optimizer, an optimizer that is not linear or decays the weights.

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
    check_integer("steps", steps, at_least=1)
    if paths is not None:
        check_integer("paths", paths, at_least=1)
    check_key(key, optional=False)
    check_used("noise_kernel", noise_kernel, noise != "full", "the full noise is exact")
    check_finite("noise_kernel", noise_kernel)
    kernel, f0, targets, loss, kernel_test, f0_test = check_problem(
        kernel, f0, y, loss, kernel_test, f0_test
    )
    n = f0.shape[0]
    amplitude = jnp.asarray(protocol_scale(protocol, n, batch_size) / batch_size**0.5, f0.dtype)
    maps = _maps_of_steps(learning_rate, momentum, optimizer, steps)
    maps = jax.tree.map(lambda part: jnp.asarray(part, f0.dtype), maps)
    initial = (f0,) if f0_test is None else (f0, f0_test)
    kernels = (kernel,) if kernel_test is None else (kernel, kernel_test)
    root = ()
    if noise != "full":
        root = _root(kernels, initial, targets, loss, noise, noise_kernel)
    epoch = n // batch_size if protocol == "epochs" else None
    fraction = 1.0 - float(np.sqrt(max(0.0, 1.0 - n // batch_size * batch_size / n)))
    plan = _Plan(loss, noise, save == "outputs", paths, epoch, fraction)
    outputs, losses, errors, diverged_at = _simulate(
        kernels, initial, targets, maps, amplitude, root, key, plan
    )
    train, test = (None, None) if outputs is None else (*outputs, None)[:2]
    ts = jnp.arange(steps + 1, dtype=f0.dtype)
    return Diffusion(ts, train, test, losses, errors, diverged_at, noise=noise, protocol=protocol)


def _maps_of_steps(
    learning_rate: Any,
    momentum: Any,
    optimizer: optax.GradientTransformation | HeavyBall | None,
    steps: int,
) -> tuple[Any, Any]:
    """The map of (f - f_0, accumulators) by every step: M (T, 1 + k, 1 + k) and b (T, 1 + k)."""
    if (learning_rate is None) == (optimizer is None):
        arguments = "neither" if optimizer is None else "both"
        raise ValueError(f"give exactly one of learning_rate and optimizer; got {arguments}.")
    if optimizer is None:
        optimizer = HeavyBall(effective_learning_rate(check_rate(learning_rate), momentum))
    else:
        hint = "put it into optimizer: optax.sgd(rate, 0.9)"
        check_used("momentum", momentum or None, False, hint)
    if not isinstance(optimizer, HeavyBall) and linear_filter(optimizer, steps=steps).weight_decay:
        raise ValueError(
            "optimizer decays the weights, which the diffusion does not follow; leave the decay "
            "out, or use jaxttp.dynamics.recursion with several keys."
        )
    return step_maps(optimizer, steps)


class _Plan(NamedTuple):
    """Static arguments of the compiled simulation; for the last two see `increments`."""

    loss: Loss
    noise: str
    keeps_outputs: bool
    paths: int | None
    epoch: int | None
    fraction: float


class _Updates(diffrax.AbstractTerm):
    """Drift and noise of a step together, so that they are one product with the kernel.

    Attributes:
        change: (t, state, noise) -> the change of the state by a step.
        draw: the noise of step t.
    """

    change: Callable[..., Any]
    draw: Callable[[Array], Array]

    def vf(self, t: Any, y: Any, args: Any) -> Any:
        """The arguments of `prod`."""
        return t, y

    def contr(self, t0: Any, t1: Any, **kwargs: Any) -> Any:
        """The noise from one step to the next."""
        return self.draw(t0)

    def prod(self, vf: Any, control: Any) -> Any:
        """The change of the state."""
        return self.change(*vf, control)


@functools.partial(jax.jit, static_argnames="plan")  # thousands of small steps: not `_core`'s jit
def _simulate(
    kernels: tuple[Kernel, ...],
    initial: tuple[Array, ...],
    targets: Array,
    maps: tuple[Array, Array],
    amplitude: Array,
    root: tuple[Array, ...],
    key: Array,
    plan: _Plan,
) -> tuple[tuple[Array, ...] | None, Array, Array, Array]:
    """Outputs (or None), loss and error at every step, and the steps at which paths diverge.

    Kernels and initial outputs are those of the training samples, then of the test samples; the
    state has a part (1 + k, ., C) for each. `root` is empty with the full noise.
    """
    loss, (n, _), limit = plan.loss, initial[0].shape, output_limit(initial[0])
    steps, slots = maps[1].shape
    first_size = jnp.linalg.norm(loss.gradient(initial[0], targets))

    def outputs(state: list[Array]) -> list[Array]:
        return [f0 + part[0] for f0, part in zip(initial, state, strict=True)]

    def is_alive(f: Array) -> Array:
        return jnp.all(jnp.abs(f) < limit)

    def pulls(f: Array, normal: Array) -> list[Array]:
        """Theta g/N and its noise, for every set of samples."""
        force = loss.gradient(f, targets)
        if plan.noise == "full":  # Theta g/N + S n/sqrt(B) as one product
            weights = 1.0 / n + amplitude * (normal - jnp.mean(normal)) / n**0.5
            return [apply_kernel(kernel, force * weights[:, None]) for kernel in kernels]
        size = amplitude
        if plan.noise == "diagonal":
            size *= jnp.linalg.norm(force) / jnp.where(first_size > 0, first_size, 1.0)
        return [
            apply_kernel(kernel, force / n) + size * jnp.dot(part, normal, precision="highest")
            for kernel, part in zip(kernels, root, strict=True)
        ]

    def read(state: list[Array]) -> tuple:
        fs = outputs(state)
        clipped = tuple(jnp.clip(jnp.nan_to_num(f, nan=limit), -limit, limit) for f in fs)
        kept = clipped if plan.keeps_outputs else None
        losses = loss.value(clipped[0], targets), loss.error(clipped[0], targets)
        return kept, *losses, is_alive(fs[0])

    def solve(key: Array) -> tuple:
        size = root[0].shape[-1] if root else n
        draw = increments(key, size, steps, plan.epoch, plan.fraction, initial[0].dtype)

        def change(t: Array, state: list[Array], normal: Array) -> list[Array]:
            still, pulled = (of[jnp.round(t).astype(int)] for of in maps)
            f = outputs(state)[0]
            moved = [
                jnp.tensordot(still, part, 1) + jnp.multiply.outer(pulled, pull) - part
                for part, pull in zip(state, pulls(f, normal), strict=True)
            ]
            return [jnp.where(is_alive(f), part, 0.0) for part in moved]

        ts = jnp.arange(steps + 1, dtype=initial[0].dtype)
        solution = diffrax.diffeqsolve(
            _Updates(change, draw),
            diffrax.Euler(),
            t0=ts[0],
            t1=ts[-1],
            dt0=None,
            y0=[jnp.zeros((slots, *f.shape), f.dtype) for f in initial],
            saveat=diffrax.SaveAt(ts=ts, fn=lambda t, state, args: read(state)),
            stepsize_controller=diffrax.StepTo(ts=ts),
            max_steps=steps,
        )
        assert solution.ys is not None
        return solution.ys

    if plan.paths is None:
        paths, losses, errors, alive = solve(key)
    else:
        paths, losses, errors, alive = jax.vmap(solve)(jax.random.split(key, plan.paths))
    diverged_at = jnp.where(jnp.all(alive, axis=-1), -1, jnp.argmin(alive, axis=-1))
    return paths, losses, errors, diverged_at


# --- the noise ------------------------------------------------------------------------------------


def protocol_scale(protocol: str, n: int, batch_size: int) -> float:
    """The factor of a batch protocol on the amplitude of white noise, besides 1/sqrt(B).

    1 for "replacement", sqrt((N - B)/(N - 1)) for "independent". For "epochs" it is sqrt(N/(N - 1))
    and the noise is not white: see `increments`.
    """
    check_choice("protocol", protocol, PROTOCOLS)
    check_integer("batch_size", batch_size, at_least=1, at_most=n)
    if protocol == "replacement":
        return 1.0
    return float(np.sqrt((n if protocol == "epochs" else n - batch_size) / max(n - 1, 1)))


def increments(
    key: Array, size: int, steps: int, epoch: int | None, fraction: float, dtype: Any
) -> Callable[[Array], Array]:
    """The noise (size,) of step t, as a function of t.

    Batches of one epoch have the covariance (1/B) (N - B)/(N - 1) with themselves and -1/(N - 1)
    with each other. White noise of variance N/(B (N - 1)) has both when a fraction kappa of its
    mean over the epoch is taken out of it, 2 kappa - kappa^2 = E B / N (kappa = 1 where the E
    batches of an epoch cover all samples: a Brownian bridge).

    Args:
        key: a `jax.random.key`.
        size: of the noise.
        steps: T.
        epoch: E, the steps of an epoch; None for white noise.
        fraction: kappa.
        dtype: of the noise.
    """
    end = steps if epoch is None else epoch * -(-steps // epoch)
    t0, t1 = jnp.zeros((), dtype), jnp.asarray(end, dtype)
    shape = jax.ShapeDtypeStruct((size,), dtype)
    tree: Any = diffrax.VirtualBrownianTree(t0, t1, 0.25, shape, key)

    def draw(t: Array) -> Array:
        white = tree.evaluate(t, t + 1.0)
        if epoch is None:
            return white
        start = jnp.floor((t + 0.5) / epoch) * epoch
        return white - fraction / epoch * tree.evaluate(start, start + epoch)

    return draw


@jit
def noise_factor(kernel: Kernel, force: Float[Array, "n c"]) -> Float[Array, "m c n"]:
    """S of gradients g, exact; with the cross kernel in place of Theta, at the test samples."""
    n = len(force)
    centered = jnp.eye(n, dtype=force.dtype) - 1.0 / n
    columns = apply_kernel(kernel, centered[:, :, None] * force[None]) / n**0.5
    return jnp.moveaxis(columns, 0, -1)


def _root(
    kernels: tuple[Kernel, ...],
    initial: tuple[Array, ...],
    targets: Array,
    loss: Loss,
    noise: str,
    noise_kernel: ArrayLike | None,
) -> tuple[Array, ...]:
    """A square root of the fixed covariance, a block (., C, Q) for every set of samples."""
    n, c = initial[0].shape
    if noise_kernel is not None:
        rows = sum(len(f) for f in initial)
        matrix = jnp.asarray(noise_kernel, initial[0].dtype)
        if matrix.shape != (rows, c, rows, c):
            raise ValueError(
                f"noise_kernel must have shape {(rows, c, rows, c)} (training samples, then test "
                f"samples); got {matrix.shape}."
            )
        values, vectors = decompose(jnp.linalg.eigh, matrix.reshape(rows * c, rows * c))
        root = (vectors * jnp.sqrt(jnp.maximum(values, 0.0))[None, :]).reshape(rows, c, -1)
        return (root,) if len(initial) == 1 else (root[:n], root[n:])
    force = loss.gradient(initial[0], targets)
    if noise == "constant":
        return tuple(noise_factor(kernel, force) for kernel in kernels)
    spectrum = decompose(jnp.linalg.eigh, flatten_kernel(kernels[0], c))
    return _diagonal_root(kernels, noise_factor(kernels[0], force), tuple(spectrum))


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
    """J diag(Sigma_0) J^T: the paper's noise covariance, as a matrix in function space.

    diag(Sigma_0) is the variance over samples of every weight's gradient. Scaling the weights by
    its root, w = w_0 + sigma ∘ v, makes the noise a kernel, that of the network in v.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: the weights before training.
        x: samples (N, ...), an array or a pytree of arrays with N rows each.
        y: integer labels (N,) or targets (N, C).
        loss: a name or a `Loss`.
        x_test: test samples (M, ...), whose rows follow those of `x`.
        batch_size: samples a chunk, as in `empirical_ntk`.
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
        TTP Section 3.1 and Appendix B. It keeps a few per cent of the trace of J Sigma J^T in
        our checks, so it is an approximation for comparisons and not the default.
    """
    x = check_trained(apply_fn, params, x)
    check_per_sample(apply_fn, params, x)
    targets, loss = encode_targets(loss, y, traced_outputs(apply_fn, params, x))

    sample = jax.tree.map(lambda leaf: leaf[:1], x)
    sigma = _deviation(network_of(apply_fn).precise(params, sample), params, x, targets, loss=loss)
    check_gradients(apply_fn, params, x, sigma)

    def scaled(v: Params, samples: Any) -> Array:
        return apply_fn(jax.tree.map(lambda w, s, u: w + s * u, params, sigma, v), samples)

    samples = x if x_test is None else concatenate([x, check_samples("x_test", x_test)])
    zeros = jax.tree.map(jnp.zeros_like, params)
    return kernel_of(scaled, zeros, samples, batch_size=batch_size, max_bytes=max_bytes)


@functools.partial(jit, static_argnames="loss")
def _deviation(network: Traced, params: Params, x: Any, targets: Array, *, loss: Loss) -> Params:
    """The standard deviation over samples of the gradient of every parameter."""

    def gradient(sample: Any, target: Array) -> Params:
        batch = jax.tree.map(lambda leaf: leaf[None], sample)
        return jax.grad(lambda w: loss.sample_loss(network(w, batch)[0], target))(params)

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
