"""Curvature matrices of any network: Gauss-Newton, its generalization, the parts of the Hessian.

With L(theta) = (1/N) sum_i l(f(x_i), y_i), J (N C, p) the Jacobian of all outputs and H the block
diagonal Hessian of the losses in the outputs,

    gauss_newton          G_O = J^T J / N
    generalized           H_O = J^T H J / N
    functional_hessian    H_F = (1/N) sum_i sum_c (dl_i/df_c) d^2 f_c(x_i)/dtheta^2
    hessian               H_L = H_O + H_F

G_O and H_O have the non-zero eigenvalues of J J^T / N and H^(1/2) J J^T H^(1/2) / N, (N C, N C),
and the smaller of the two forms is built. Everything is evaluated in float64.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from jaxttp._core.arrays import double
from jaxttp._core.checks import check_array, check_choice, check_finite, check_integer, check_used
from jaxttp._core.products import with_forward_mode
from jaxttp._core.types import ApplyFn, Params, select_leaves, split_trainable, take
from jaxttp._core.xla_cpu.threads import decompose
from jaxttp.adapters import as_rows, check_per_sample
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.adapters.outputs import check_gradients
from jaxttp.losses import Loss, encode_targets, get_loss
from jaxttp.ntk.gram import kernel_of
from jaxttp.ntk.sharded import gathered, several

KINDS = ("gauss_newton", "generalized", "functional_hessian", "hessian")
HESSIANS = KINDS[2:]
FORMS = ("auto", "outputs", "parameters")
AT_ONCE = 2**24
"""Outputs that a product holds at a time by default: 128 MiB an array."""


def _promote(tree: Any) -> Any:
    """Floating-point leaves in float64; integers (tokens, counters) as they are."""

    def promote(leaf: Any) -> Array:
        leaf = jnp.asarray(leaf)
        return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(promote, tree)


class _FlatNetwork:
    """A network on its data in float64, as a function of one flat parameter vector."""

    def __init__(
        self, apply_fn: ApplyFn, params: Params, x: Any, y: Any, kind: str, loss: Any, use: Any
    ):
        check_choice("kind", kind, KINDS)
        check_network(apply_fn, params)
        x = check_samples("x", x)
        check_finite("params", params)
        check_finite("x", x)
        self.params, self.x = _promote(params), _promote(x)
        apply_fn, shape = as_rows(apply_fn, self.params, self.x)
        check_per_sample(apply_fn, self.params, self.x)
        self.trainable = select_leaves(self.params, use)
        selected, restore = split_trainable(self.params, use)
        self.flat, unravel = ravel_pytree(selected)
        self.apply_fn = apply_fn
        self.samples, self.outputs = shape.shape[0], math.prod(shape.shape[1:])
        self.loss: Loss | None = None
        self.targets = jnp.zeros((self.samples, 1), jnp.float64)
        hint = "kind='gauss_newton' has no loss; kind='generalized' includes its Hessian"
        check_used("loss", loss, kind != "gauss_newton", hint)
        check_used("y", y, kind != "gauss_newton", hint)
        if kind != "gauss_newton":
            if loss is None or y is None:
                raise ValueError(f"kind={kind!r} needs y and loss.")
            targets, self.loss = encode_targets(get_loss(loss), y, shape)
            self.targets = targets.astype(jnp.float64)
        self.kind = kind
        self.evaluate: Callable[[Array, Array], Array] = lambda flat, x: apply_fn(
            restore(unravel(flat)), x
        ).astype(jnp.float64)

    def value(self, flat: Array, x: Any, targets: Array) -> Array:
        """The contribution of some samples to the mean loss of all."""
        assert self.loss is not None
        return len(targets) / self.samples * self.loss.value(self.evaluate(flat, x), targets)

    def output_hessian(self) -> Array:
        assert self.loss is not None
        return self.loss.hessian(self.evaluate(self.flat, self.x), self.targets)

    def checked(self, result: Array) -> Array:
        """`result`, unless it is not finite because a derivative of the network is not."""
        for order in (1, 2) if self.kind in HESSIANS else (1,):
            check_gradients(
                self.apply_fn, self.params, self.x, result, trainable=self.trainable, order=order
            )
        return result


def curvature_matrix(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any = None,
    *,
    kind: str = "gauss_newton",
    loss: str | Loss | None = None,
    form: str = "auto",
    trainable: Any = None,
    batch_size: int | None = None,
    max_bytes: int | None = None,
    promote: bool = True,
    accumulate: str = "float64",
    mesh: Any = None,
) -> Float[Array, "n n"]:
    """A curvature matrix of a network, dense.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, or (N, T, V) flattened to C = T V; row i
            depends on sample i alone.
        params: pytree of floating-point arrays, promoted to float64.
        x: samples (N, ...).
        y: labels or targets, for every kind but "gauss_newton"; of tokens (N, T).
        kind: with the Jacobian J of all outputs and the Hessian H of the losses by the outputs,
            "gauss_newton": J^T J / N, without a loss;
            "generalized": the generalized Gauss-Newton matrix J^T H J / N;
            "functional_hessian": the mean Hessian of the outputs weighted by slopes of the losses;
            "hessian": the Hessian of the mean loss, the sum of the previous two.
        loss: a name or a `Loss`, for every kind but "gauss_newton".
        form: "outputs" (N C, N C), index sample * C + out; "parameters" (p, p), in the order of
            `jax.flatten_util.ravel_pytree`; "auto" takes the smaller one. Hessians only have the
            second.
        trainable: the parameters to differentiate by, as in `jaxttp.empirical_ntk`.
        batch_size: samples a chunk.
        max_bytes: memory for the chunks of the Jacobian, as in `jaxttp.empirical_ntk`.
        promote: evaluate the network in float64 (True), or differentiate it in its own precision
            and only sum in float64: half the cost, right to 1 % up to about 1e8; "outputs" only.
        accumulate: dtype of the sums without `promote`: "float64", or "float32" for another half
            of the cost. The matrix is then float32, whose own rounding hides eigenvalues near
            1e-7 lambda_max: not for condition numbers beyond 1e5 (there the error was 2e-5 on a
            ResNet20 at 3e5, but nothing bounds it). Pass the rank to `condition_number`, which
            otherwise cuts at n * 1e-7.
        mesh: a `jax.sharding.Mesh` whose devices compute the rows, which are gathered on one;
            for "gauss_newton" and "generalized" in the form "outputs" only.

    Returns:
        The symmetric matrix, float64 (float32 if the network itself casts its outputs down, or
        with accumulate="float32").

    Raises:
        ValueError: an unknown option, a missing or unused y or loss, shapes that do not fit;
            derivatives that are not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> g = curvature_matrix(lambda w, x: x @ w, jnp.ones((2, 1)), jnp.eye(2) * 2.0)
        >>> g.tolist()
        [[2.0, 0.0], [0.0, 2.0]]

    Source:
        GNC eq (1)-(2), with the loss a mean over samples.
    """
    check_choice("form", form, FORMS)
    check_choice("accumulate", accumulate, ("float64", "float32"))
    if accumulate == "float32" and promote:
        raise ValueError("accumulate='float32' needs promote=False: sums of float64 stay float64.")
    mesh, is_hessian = several(mesh), kind in HESSIANS
    check_used("mesh", mesh, not is_hessian, f"kind={kind!r} is over parameters, on one device")
    if is_hessian and form == "outputs":
        raise ValueError(f"kind={kind!r} exists in form='parameters' only.")
    with double():
        network = _FlatNetwork(apply_fn, params, x, y, kind, loss, trainable)
        if is_hessian:
            slope = jax.grad(lambda flat: network.value(flat, network.x, network.targets))
            full = jax.jit(jax.jacfwd(with_forward_mode(slope, network.flat)))(network.flat)
            if kind == "functional_hessian":
                full = full - _parameter_form(network, batch_size)
            return network.checked(0.5 * (full + full.T))
        rows = network.samples * network.outputs
        if form == "auto":
            form = "parameters" if network.flat.size < rows else "outputs"
        if form == "parameters":
            hint = "the matrix over fewer parameters than outputs is computed on one device"
            check_used("mesh", mesh, False, hint)
            return network.checked(_parameter_form(network, batch_size))
    options: dict[str, Any] = {
        "trainable": trainable, "batch_size": batch_size, "max_bytes": max_bytes, "mesh": mesh,
    }  # fmt: skip
    if promote:
        with double():
            kernel = gathered(kernel_of(network.apply_fn, network.params, network.x, **options))
    else:
        kernel = kernel_of(network.apply_fn, params, x, sums=accumulate, **options)
        kernel = gathered(kernel)
    with double():
        kernel = kernel / jnp.asarray(network.samples, kernel.dtype)
        if kind == "generalized":
            root = _roots_of_blocks(network.output_hessian()).astype(kernel.dtype)
            kernel = jnp.einsum("nab,nbmc,mcd->namd", root, kernel, root, precision="highest")
        return network.checked(kernel.reshape(rows, rows))


def _roots_of_blocks(blocks: Array) -> Array:
    values, vectors = decompose(jnp.linalg.eigh, blocks)
    scaled = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[:, None, :]
    return jnp.einsum("nab,ncb->nac", scaled, vectors, precision="highest")


def _parameter_form(network: _FlatNetwork, batch_size: int | None) -> Array:
    """J^T H J / N, accumulated over chunks of samples."""
    size = network.flat.size
    if batch_size is None:
        batch_size = max(1, 2**27 // (8 * size * network.outputs))
    check_integer("batch_size", batch_size, at_least=1)

    @jax.jit
    def contribution(flat: Array, x: Any, hessian: Array | None) -> Array:
        def jacobian(sample: Any) -> Array:
            batch = jax.tree.map(lambda leaf: leaf[None], sample)
            return jax.jacrev(lambda w: network.evaluate(w, batch)[0])(flat)

        j = jax.vmap(jacobian)(x)  # (b, C, p)
        hj = j if hessian is None else jnp.einsum("nab,nbp->nap", hessian, j)
        return jnp.einsum("nap,naq->pq", j, hj, precision="highest")

    hessian = None if network.kind == "gauss_newton" else network.output_hessian()
    total = jnp.zeros((size, size), jnp.float64)
    for start in range(0, network.samples, batch_size):
        rows = slice(start, start + batch_size)
        block = None if hessian is None else hessian[rows]
        total = total + contribution(network.flat, take(network.x, rows), block)
    return 0.5 * (total + total.T) / network.samples


def curvature_operator(
    apply_fn: ApplyFn,
    params: Params,
    x: Any,
    y: Any = None,
    *,
    kind: str = "gauss_newton",
    loss: str | Loss | None = None,
    trainable: Any = None,
    batch_size: int | None = None,
) -> lx.FunctionLinearOperator:
    """A curvature matrix of a network as a linear operator on flat parameter vectors.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, or (N, T, V).
        params: pytree of floating-point arrays, promoted to float64.
        x: samples (N, ...); every product uses all of them.
        y: labels or targets, for every kind but "gauss_newton"; of tokens (N, T).
        kind: one of the four of `curvature_matrix`.
        loss: a name or a `Loss`, for every kind but "gauss_newton".
        trainable: the parameters to differentiate by, as in `jaxttp.empirical_ntk`.
        batch_size: samples at a time; the memory is that of their outputs and activations. None
            for as many as have 2^24 outputs, at least one.

    Returns:
        A symmetric `lineax` operator on (p,) float64 vectors in the order of
        `jax.flatten_util.ravel_pytree`; the Gauss-Newton kinds are tagged PSD. A product raises a
        `ValueError` where derivatives are not finite, unless it is traced.

    Raises:
        ValueError: an unknown kind, a missing or unused y or loss, shapes that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> g = curvature_operator(lambda w, x: x @ w, jnp.ones((2, 1)), jnp.eye(2) * 2.0)
        >>> g.mv(jnp.array([1.0, 3.0])).tolist()
        [2.0, 6.0]

    Source:
        GNC eq (1)-(2); a product is one jvp and one vjp. Of a cross-entropy over tokens
        H u = p∘u - p (p·u) token by token, see `jaxttp.losses`.
    """
    with double():
        network = _FlatNetwork(apply_fn, params, x, y, kind, loss, trainable)
    psd = kind in ("gauss_newton", "generalized")
    if batch_size is None:
        batch_size = max(1, AT_ONCE // network.outputs)
    check_integer("batch_size", batch_size, at_least=1)

    def outer(vector: Array, x: Any, targets: Array) -> Array:
        run = with_forward_mode(lambda flat: network.evaluate(flat, x), network.flat)
        f, push = jax.linearize(run, network.flat)
        image = push(vector)
        if network.loss is not None:
            image = network.loss.hessian_vector_product(f, targets, image)
        return jax.linear_transpose(push, network.flat)(image / network.samples)[0]

    def full(vector: Array, x: Any, targets: Array) -> Array:
        slope = jax.grad(lambda flat: network.value(flat, x, targets))
        run = with_forward_mode(slope, network.flat)
        return jax.jvp(run, (network.flat,), (vector,))[1]

    def functional(vector: Array, x: Any, targets: Array) -> Array:
        return full(vector, x, targets) - outer(vector, x, targets)

    contribution = outer if psd else full if kind == "hessian" else functional

    @jax.jit
    def compiled(vector: Array) -> Array:
        return _by_batches(contribution, vector, network.x, network.targets, batch_size)

    def product(vector: Array) -> Array:
        with double():
            vector = check_array("v", vector)
            if vector.shape != network.flat.shape:
                raise ValueError(
                    f"v must be {network.flat.shape}, a number for each selected parameter in the "
                    f"order of jax.flatten_util.ravel_pytree; got {vector.shape}."
                )
            return network.checked(compiled(vector.astype(jnp.float64)))

    tags = (lx.symmetric_tag, lx.positive_semidefinite_tag) if psd else (lx.symmetric_tag,)
    with double():
        structure = jax.ShapeDtypeStruct(network.flat.shape, jnp.float64)
        return lx.FunctionLinearOperator(product, structure, tags, closure_convert=False)


def _by_batches(
    term: Callable[[Array, Any, Array], Array], vector: Array, x: Any, targets: Array, size: int
) -> Array:
    """The sum of ``term(vector, x, targets)`` over batches of samples, one after the other."""
    batches, remainder = divmod(len(targets), size)
    if batches == 0 or (batches == 1 and remainder == 0):
        return term(vector, x, targets)
    cut = batches * size
    data = jax.tree.map(lambda a: a[:cut].reshape(batches, size, *a.shape[1:]), (x, targets))
    step = lambda total, batch: (total + term(vector, *batch), None)  # noqa: E731
    total = jax.lax.scan(step, jnp.zeros_like(vector), data)[0]
    return total + term(vector, take(x, slice(cut, None)), targets[cut:]) if remainder else total
