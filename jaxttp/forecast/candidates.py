"""Starting points: networks, their weights, and which of these train."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxttp._core.types import ApplyFn, Params, count
from jaxttp.adapters.inputs import check_samples
from jaxttp.forecast.problem import Problem
from jaxttp.losses import Loss


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A starting point: a network, its weights, and which of them train.

    Attributes:
        apply_fn: ``(params, x) -> outputs (N, C)``, in evaluation mode.
        params: pytree of floating-point arrays.
        trainable: which parameters train, as in `empirical_ntk`; all of them when None.
        x: the same training samples as this network wants them (N, ...), such as images of another
            size; those of all when None.
    """

    apply_fn: ApplyFn
    params: Params
    trainable: Any = None
    x: Any = None


def check_candidates(candidates: Any) -> None:
    """Refuse what are no starting points by name.

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
    for name, one in candidates.items():
        if not isinstance(one, Candidate):
            raise TypeError(f"candidates[{name!r}] must be a Candidate; got {one!r}.")


def problem_of(name: str, one: Candidate, x: Any, y: Any, loss: str | Loss) -> Problem:
    """A candidate with the samples as it wants them.

    Args:
        name: of the candidate, for what is wrong with it.
        one: the candidate.
        x: samples of all.
        y: their labels or targets.
        loss: a name or a `Loss`.

    Raises:
        ValueError: other samples than those of all; whatever `Problem.of` refuses.
    """
    own = x if one.x is None else check_samples(f"candidates[{name!r}].x", one.x)
    if count(own) != count(x):
        raise ValueError(
            f"candidates[{name!r}].x must hold the {count(x)} samples of x; got {count(own)}."
        )
    return Problem.of(
        one.apply_fn, one.params, own, y, loss=loss, trainable=one.trainable,
        names=f"candidates[{name!r}].{{}}",
    )  # fmt: skip
