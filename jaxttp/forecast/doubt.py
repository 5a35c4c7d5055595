"""How sure is a forecast? Draws of batches, rebuilt kernels and sketches, each with its band."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxttp.dynamics.recursion import recursion
from jaxttp.forecast._curves import loss_and_error
from jaxttp.forecast.bands import (
    displaced,
    jackknife,
    loss_band,
    steps_band,
    steps_uncertainty,
    steps_with_error,
    widened,
    with_error,
)
from jaxttp.forecast.descent import Descent
from jaxttp.forecast.paths.base import Linearizer, Path
from jaxttp.losses.rule import Rule, Target
from jaxttp.ntk.kernels import Kernel

LEVEL = 0.9


@dataclasses.dataclass(frozen=True, eq=False)
class Doubt:
    """Training times, and how sure they and the loss are.

    Attributes:
        steps: by threshold; the median over draws where there are some.
        loss_band: where the loss of a share of all runs lies (2, T + 1), or None.
        steps_band: the same for every training time, or None.
        steps_uncertainty: the error of a re-linearised time by its own estimate, or None.
        targets: steps by target.
        targets_band: the same as `steps_band`, for the targets that have one.
        targets_uncertainty: the same as `steps_uncertainty`, for the targets that have one.
    """

    steps: Mapping[float, int]
    loss_band: Float[Array, "2 t"] | None = None
    steps_band: Mapping[float, tuple[int, int]] | None = None
    steps_uncertainty: Mapping[float, int] | None = None
    targets: Mapping[Target, int] = dataclasses.field(default_factory=dict)
    targets_band: Mapping[Target, tuple[int, int]] = dataclasses.field(default_factory=dict)
    targets_uncertainty: Mapping[Target, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        path: Path,
        rule: Rule,
        *,
        stable: bool,
        level: float = LEVEL,
        sketched: tuple[Array, Array] | None = None,
        targets: Iterable[Target] = (),
        doubted_from: int | None = None,
    ) -> "Doubt":
        """Read a path.

        Args:
            path: of any dynamics.
            rule: how times are read.
            stable: whether they count as reached.
            level: the share that bands hold, in (0, 1).
            sketched: losses and errors (G, T + 1) without each part of a sketch, see
                `without_parts`.
            targets: read off the same curves, averaged as the rule's; those of the test samples
                have neither band nor uncertainty.
            doubted_from: see `Prediction`; later times, and those that are not reached, have
                neither band nor uncertainty then.
        """
        band = None
        if path.draws is not None:
            band = loss_band(path.draws.loss, level, path.uncertainty)
        if sketched is not None:
            whole = jnp.stack([path.loss, path.loss]) if band is None else band
            ends = with_error(whole, path.loss, jackknife(sketched[0]), level)
            band = jnp.maximum(jnp.asarray(ends, path.loss.dtype), 0.0)
        own = _read(path, rule, stable=stable, level=level, sketched=sketched)
        own = own.until(doubted_from)
        asked = {}
        for target in targets:
            seen, parts = (path, sketched) if target.on == "train" else (_test(path), None)
            found = _read(seen, target.rule(rule.smooth), stable=stable, level=level,
                          sketched=parts)  # fmt: skip
            found = found.until(doubted_from)
            asked[target] = _Times(*(None if v is None else v.get(target.value) for v in found))
        return cls(
            own.steps, band, own.band, own.uncertainty,
            targets={target: one.steps for target, one in asked.items()},
            targets_band={t: one.band for t, one in asked.items() if one.band is not None},
            targets_uncertainty={
                t: one.uncertainty for t, one in asked.items() if one.uncertainty is not None
            },
        )  # fmt: skip


class _Times(NamedTuple):
    """Times by threshold, where they lie, and their error by the path's own estimate."""

    steps: Any
    band: Any
    uncertainty: Any

    def until(self, step: int | None) -> "_Times":
        """The same, without bands and errors of times after a step, and of none; None for all."""
        if step is None:
            return self
        sure = {threshold for threshold, time in self.steps.items() if 0 <= time <= step}
        band, uncertainty = (
            found and {e: one for e, one in found.items() if e in sure}
            for found in (self.band, self.uncertainty)
        )
        return _Times(self.steps, band, uncertainty)


def _test(path: Path) -> Path:
    """The curves on the test samples in the place of those on the training samples."""
    assert path.test_loss is not None  # checked
    assert path.test_error is not None
    return Path(path.outputs, path.test_loss, path.test_error)


def _read(
    path: Path,
    rule: Rule,
    *,
    stable: bool,
    level: float,
    sketched: tuple[Array, Array] | None,
) -> _Times:
    """What a rule reads off a path, its draws and its rebuilt sketches."""
    horizon = path.loss.shape[0] - 1
    times = rule.read(path.loss, path.error, reached=stable)
    own = bands = None
    if path.uncertainty is not None and rule.metric == "loss":
        own = {
            e: steps_uncertainty(path.loss, path.uncertainty, e, rule.time) for e in rule.thresholds
        }
    elif path.uncertainty is not None:
        own = {e: displaced(path.loss, path.uncertainty, time) for e, time in times.items()}
    if path.draws is not None and stable:
        quantiles = ((1 - level) / 2, 0.5, (1 + level) / 2)
        curves = rule.curve(path.draws.loss, path.draws.error)
        found = {
            e: steps_band(curves, e, quantiles=quantiles, read=rule.time) for e in rule.thresholds
        }
        times = {e: middle for e, (_, middle, _) in found.items()}
        more: Mapping[float, Any] = dict.fromkeys(times) if own is None else own
        bands = {e: widened((low, high), more[e], horizon) for e, (low, _, high) in found.items()}
    if sketched is not None and stable:
        curves = rule.curve(*sketched)
        reads = {e: [int(rule.time(curve, e)) for curve in curves] for e in rule.thresholds}
        bands = steps_with_error(bands, times, reads, level, horizon)
    return _Times(times, bands, own)


def without_parts(
    lines: Linearizer, descent: Descent, parts: Iterable[Kernel]
) -> tuple[Array, Array]:
    """Losses and errors (G, T + 1) of full-batch training, a curve for each kernel."""
    problem = lines.problem
    tangent = lines.tangents["initial_tangent"] if descent.decays else None
    curves = [
        loss_and_error(
            problem.loss,
            recursion(
                kernel, problem.f0, problem.targets, loss=problem.loss, steps=descent.steps,
                optimizer=descent.stepper, initial_tangent=tangent,
            ).train,
            problem.targets,
        )
        for kernel in parts
    ]  # fmt: skip
    losses, errors = zip(*curves, strict=True)
    return jnp.stack(losses), jnp.stack(errors)
