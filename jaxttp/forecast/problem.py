"""A network and data, checked and evaluated once for a forecast."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxttp._core.checks import check_finite, check_known
from jaxttp._core.compile import bound_programs, jit
from jaxttp._core.traced import Network, network_of
from jaxttp._core.types import (
    ApplyFn,
    Params,
    count,
    notes_of,
    select_leaves,
    split_trainable,
    take,
)
from jaxttp.adapters import as_rows, check_per_sample
from jaxttp.adapters.inputs import check_network, check_samples
from jaxttp.adapters.outputs import check_gradients
from jaxttp.dynamics._network import evaluation, promote, promote_samples, warn_of
from jaxttp.dynamics._trajectory import curves
from jaxttp.losses import Loss, encode_targets
from jaxttp.losses.centered_logits import (
    CenteredLogits,
    centered,
    centered_logits,
    check_invariance,
    depends_on_centered_logits,
    from_centered_logits,
)
from jaxttp.losses.targets import token_labels
from jaxttp.ntk._plan import Workload
from jaxttp.ntk._program import is_linear
from jaxttp.ntk.gram import workload
from jaxttp.ntk.sharded import gathered, is_by_process, of_processes


def loss_and_error(loss: Loss, outputs: Array, targets: Array) -> tuple[Array, Array]:
    """Loss and error along a path (T, N, C); their medians over many paths (P, T, N, C)."""
    if outputs.ndim == 3:
        return curves(outputs, targets, loss)
    return _medians(outputs, targets, loss)


@functools.partial(jit, static_argnums=2)
def _medians(paths: Array, targets: Array, loss: Loss) -> tuple[Array, Array]:
    losses, errors = jax.vmap(lambda path: curves(path, targets, loss))(paths)
    return jnp.median(losses, axis=0), jnp.median(errors, axis=0)


def check_model(apply_fn: ApplyFn, params: Params, x: Any) -> tuple[ApplyFn, jax.ShapeDtypeStruct]:
    """Check a network for a forecast, from shapes alone.

    Args:
        apply_fn: ``(params, x) -> outputs (N, C)``, or (N, T, V).
        params: its parameters.
        x: training samples (N, ...).

    Returns:
        The network with outputs (N, C), and the shape and dtype of its own, see `as_rows`.

    Raises:
        TypeError: see `output_shape`.
        ValueError: see `output_shape`; outputs of less than float32, whose losses have two or three
            digits and their kernels no small eigenvalues.
    """
    rows, outputs = as_rows(apply_fn, params, x)
    if outputs.dtype.itemsize < 4:
        raise ValueError(
            f"apply_fn returns {outputs.dtype}, too coarse for a forecast; let the network compute "
            "in float32 (modules of Flax: dtype=jnp.float32); if all but its last cast does, undo "
            "that with lambda params, x: apply_fn(params, x).astype('float32')."
        )
    return rows, outputs


@contextlib.contextmanager
def _about_y(name: str) -> Iterator[None]:
    """Errors about labels name the argument that holds them in place of y."""
    try:
        yield
    except ValueError as problem:
        raise ValueError(re.sub(r"\by\b", name, str(problem))) from problem


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A network before training and its data, checked; made by `Problem.of`.

    Attributes:
        apply_fn: ``(params, x) -> outputs (N, C)``.
        params: all of its parameters.
        trainable: which of them train, as in `empirical_ntk`.
        network: ``(weights, x) -> outputs``, of the trained weights alone.
        weights: the part of the parameters that is trained.
        restore: all parameters from those weights.
        x: training samples (N, ...), an array or a pytree of arrays with N rows each.
        f0: outputs before training (N, C).
        targets: encoded (N, K), see `jaxttp.losses`.
        loss: a `Loss`.
        x_test: test samples (M, ...), or None.
        f0_test: their outputs before training (M, C), or None.
        targets_test: their targets, or None.
        loss_test: the loss on them, or None.
        labels: `y`; labels of tokens know how many outputs a token has.
        notes: changes in how the network is evaluated: layers put into evaluation mode, parameters
            promoted from half precision.
        whole: the problem with all C outputs, for a problem of C - 1 centered logits.
        origin: the problem of all training samples, for a problem of some of them.
    """

    apply_fn: ApplyFn
    params: Params
    trainable: Any
    network: ApplyFn
    weights: Params
    restore: Callable[[Params], Params]
    x: Any
    f0: Float[Array, "n c"]
    targets: Float[Array, "n k"]
    loss: Loss
    x_test: Any = None
    f0_test: Float[Array, "m c"] | None = None
    targets_test: Float[Array, "m j"] | None = None
    loss_test: Loss | None = None
    labels: Any = None
    notes: tuple[str, ...] = ()
    whole: "Problem | None" = None
    origin: "Problem | None" = None

    @classmethod
    def of(
        cls,
        apply_fn: ApplyFn,
        params: Params,
        x: Any,
        y: Any,
        *,
        loss: str | Loss = "cross_entropy",
        trainable: Any = None,
        x_test: Any = None,
        y_test: Any = None,
        names: str = "{}",
    ) -> "Problem":
        """Check model and data, shapes before values, and evaluate the network once.

        Args:
            apply_fn: ``(params, x) -> outputs (N, C)``, or (N, T, V), in evaluation mode.
            params: pytree of floating-point arrays; those that train and are in half precision are
                promoted to float32, samples with them, and a warning says so.
            x: training samples (N, ...), an array or a pytree of arrays with N rows each; of
                several processes each may have some of the rows, which stay where they are.
            y: integer labels (N,) or targets (N, C); with `jaxttp.weighted`, weights and masks;
                for outputs (N, T, V) labels of tokens (N, T).
            loss: a name or a `Loss`.
            trainable: which parameters train, as in `empirical_ntk`; all of them when None.
            x_test: test samples (M, ...).
            y_test: their labels or targets; give both or neither.
            names: format of argument names in errors, "{}" stands for a name.

        Raises:
            ValueError: see `jaxttp.predict_training_time`.
            TypeError: see there.

        Example:
            >>> import jax.numpy as jnp
            >>> problem = Problem.of(lambda w, x: x @ w, jnp.zeros((3, 2)), jnp.eye(3),
            ...                      jnp.array([0, 1, 1]))
            >>> problem.f0.shape, problem.targets.shape
            ((3, 2), (3, 2))
        """
        if (x_test is None) != (y_test is None):
            raise ValueError("x_test and y_test belong together: give both or neither.")
        bound_programs()
        # x last: under a caller's jit over other arguments x may be traced, too.
        arguments = {"params": params, "y": y, "x_test": x_test, "y_test": y_test, "x": x}
        check_known(**{names.format(name): value for name, value in arguments.items()})
        x, mesh = of_processes(check_samples(names.format("x"), x))
        check_network(apply_fn, params)
        check_finite(names.format("x"), x)
        check_finite(names.format("params"), params)
        variables = {"params", "batch_stats"}  # of a Linen module
        if trainable is None and isinstance(params, Mapping) and variables <= {*params}:
            raise ValueError(
                f"{names.format('params')} holds the collections of a Linen module, and what is in "
                "'batch_stats' would be trained like weights; use from_linen(module, variables), "
                "or say trainable={'params': True, 'batch_stats': False}."
            )
        params, promoted = promote(params, trainable)
        if promoted:
            warn_of(promoted)
            x = promote_samples(x)
        weights, restore = split_trainable(params, trainable)
        original = apply_fn
        apply_fn, outputs = check_model(apply_fn, params, x)
        y = token_labels(gathered(y) if is_by_process(y) else y, outputs.shape)
        targets, exact = encode_targets(loss, y, outputs)
        test: dict[str, Any] = {}
        if x_test is not None:
            x_test = check_samples(names.format("x_test"), x_test)
            check_finite(names.format("x_test"), x_test)
            x_test = promote_samples(x_test) if promoted else x_test
            dtypes, own = ([str(leaf.dtype) for leaf in jax.tree.leaves(v)] for v in (x, x_test))
            if own != dtypes:
                raise ValueError(
                    f"x_test must hold numbers as x does; got {', '.join(own)}, and in "
                    f"x {', '.join(dtypes)}: convert one of them."
                )
            on_test = as_rows(original, params, x_test)[1]
            if on_test.shape[1:] != outputs.shape[1:]:
                raise ValueError(
                    f"x_test gives outputs {on_test.shape}, x {outputs.shape}: pad or crop them to "
                    "one length."
                )
            with _about_y(names.format("y_test")):
                test["targets_test"], test["loss_test"] = encode_targets(loss, y_test, on_test)
        apply_fn = network_of(apply_fn)
        evaluate = evaluation(apply_fn)
        outputs = evaluate(params, x)
        f0 = outputs if mesh is None else gathered(outputs)
        check_per_sample(apply_fn, params, x, evaluate=evaluate, outputs=outputs)
        check_finite("apply_fn(params, x)", f0)
        if x_test is not None:
            test |= {"x_test": x_test, "f0_test": evaluate(params, x_test)}

        part = Network(lambda weights, samples: apply_fn.apply_fn(restore(weights), samples))
        network = apply_fn if weights is params else part
        network = network if mesh is None else Network(_everywhere(network, mesh))
        return cls(
            apply_fn, params, trainable, network, weights, restore, x, f0, targets, exact,
            **test, labels=y, notes=notes_of(apply_fn) + promoted,
        )  # fmt: skip

    def check_gradients(self, result: Any, *, test: bool = False) -> None:
        """Raise `ValueError` if `result` is not finite because a gradient before training is not.

        Args:
            result: pytree of arrays that were computed from the gradients.
            test: whether test samples may be the reason, rather than training samples.
        """
        x, name = (self.x_test, "x_test") if test else ((self.origin or self).x, "x")
        mask = select_leaves(self.params, self.trainable)
        check_gradients(self.apply_fn, self.params, x, result, trainable=mask, name=name)

    @property
    def classes(self) -> int:
        """C, the number of outputs."""
        return self.f0.shape[1]

    @functools.cached_property
    def _work(self) -> Workload:
        """What a kernel of all outputs takes, from shapes alone."""
        whole = self.whole or self
        return workload(whole.apply_fn, whole.params, whole.x, whole.trainable)

    @functools.cached_property
    def is_linear(self) -> bool:
        """Whether outputs are linear in the trained weights, whose kernel never changes then."""
        return is_linear(self._work.program, self._work.trainable)

    @property
    def is_repeated(self) -> bool:
        """Whether its kernel is K ⊗ I_C: last layers alone are trained."""
        return self._work.is_repeated

    def take(self, rows: Any, unseen: Any = None) -> "Problem":
        """The problem of some of its training samples alone.

        Args:
            rows: their indices.
            unseen: indices of the training samples that become its test samples; none when None.
        """
        whole = None if self.whole is None else self.whole.take(rows, unseen)
        test: dict[str, Any] = dict.fromkeys(("x_test", "f0_test", "targets_test", "loss_test"))
        if unseen is not None:
            test = {
                "x_test": take(self.x, unseen), "f0_test": self.f0[unseen],
                "targets_test": self.targets[unseen], "loss_test": self.loss,
            }  # fmt: skip
        return dataclasses.replace(
            self, x=take(self.x, rows), f0=self.f0[rows], targets=self.targets[rows],
            whole=whole, origin=self.origin or self, **test,
        )  # fmt: skip

    def centered(self) -> "Problem":
        """The problem of the C - 1 centered logits, where the loss depends on these alone.

        Losses, errors and weights during training are those of all outputs; see
        `jaxttp.losses.centered_logits`.

        Raises:
            ValueError: a loss that is declared shift-invariant, and is not.
        """
        if not depends_on_centered_logits(self.loss, self.classes):
            return self
        check_invariance(self.loss, self.f0, self.targets)
        test: dict[str, Any] = {}
        if self.loss_test is not None and self.f0_test is not None:
            test = {
                "f0_test": centered_logits(self.f0_test),
                "loss_test": centered(self.loss_test, self.classes),
            }
        apply_fn = CenteredLogits(self.apply_fn)
        network = apply_fn if self.network is self.apply_fn else CenteredLogits(self.network)
        return dataclasses.replace(
            self, apply_fn=apply_fn, network=network,
            f0=centered_logits(self.f0), loss=centered(self.loss, self.classes), whole=self, **test,
        )  # fmt: skip

    def whole_outputs(self, outputs: Float[Array, "t n d"]) -> Float[Array, "t n c"]:
        """Outputs (T, N, C) from those of this problem.

        Centered logits do not determine the mean over a sample's outputs, which is taken from
        before training.
        """
        return outputs if self.whole is None else _around(outputs, self.whole.f0)


@jit
def _around(logits: Array, before: Array) -> Array:
    """Outputs (T, N, C) with these centered logits, and the means of those before training."""
    return from_centered_logits(logits) + jnp.mean(before, axis=-1, keepdims=True)[None]


def _everywhere(network: ApplyFn, mesh: Mesh) -> ApplyFn:
    """All outputs on every process, from samples that are spread over processes."""
    whole = NamedSharding(mesh, PartitionSpec())
    return lambda weights, x: jax.lax.with_sharding_constraint(network(weights, x), whole)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A starting point: a network, its weights, and which of them train.

    Attributes:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode.
        params: pytree of floating-point arrays.
        trainable: which parameters train, as in `empirical_ntk`; all of them when None.
        x: the same training samples in this network's form (N, ...), such as images of another
            size; those of all when None.
    """

    apply_fn: ApplyFn
    params: Params
    trainable: Any = None
    x: Any = None


def check_candidates(candidates: Any) -> None:
    """Refuse anything but a mapping from names to starting points.

    Args:
        candidates: of `jaxttp.compare` and `jaxttp.race_starts`.

    Raises:
        ValueError: none.
        TypeError: no mapping, or of something else.

    Example:
        >>> check_candidates({})
        Traceback (most recent call last):
        ...
        ValueError: candidates must hold at least one Candidate; got none.
    """
    if not isinstance(candidates, Mapping):
        raise TypeError(f"candidates must be Candidates by name; got {candidates!r}.")
    if not candidates:
        raise ValueError("candidates must hold at least one Candidate; got none.")
    for name, candidate in candidates.items():
        if not isinstance(candidate, Candidate):
            raise TypeError(f"candidates[{name!r}] must be a Candidate; got {candidate!r}.")


def problem_of(name: str, candidate: Candidate, x: Any, y: Any, loss: str | Loss) -> Problem:
    """The problem of a candidate, with its own samples where it has some.

    Args:
        name: of the candidate, for error messages.
        candidate: the starting point.
        x: samples of all.
        y: their labels or targets.
        loss: a name or a `Loss`.

    Raises:
        ValueError: other samples than those of all; whatever `Problem.of` refuses.
    """
    own = x if candidate.x is None else check_samples(f"candidates[{name!r}].x", candidate.x)
    if count(own) != count(x):
        raise ValueError(
            f"candidates[{name!r}].x must hold the {count(x)} samples of x; got {count(own)}."
        )
    return Problem.of(
        candidate.apply_fn, candidate.params, own, y, loss=loss, trainable=candidate.trainable,
        names=f"candidates[{name!r}].{{}}" if name else "{}",
    )  # fmt: skip
