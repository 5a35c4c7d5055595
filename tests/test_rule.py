"""Targets: what is below a value, off which curve, and what the keywords of front doors name."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.losses.rule import Curves, Rule, Target, check_targets, reach, smooth_curve, targets_of

LOSS = np.array([2.0, 1.0, 0.5, 0.6, 0.25, 0.1])
ERROR = np.array([0.75, 0.5, 0.5, 0.25, 0.0, 0.0])
CURVES = Curves(LOSS, ERROR, test_loss=LOSS + 0.1, test_error=ERROR[::-1])


def first_below(curve, value):
    below = np.flatnonzero(np.asarray(curve) < value)
    return int(below[0]) if len(below) else -1


@pytest.mark.parametrize("value", [2.5, 1.0, 0.55, 0.3, 0.1])
@pytest.mark.parametrize("smooth", [1, 3])
def test_targets_are_read_off_their_own_curve(value, smooth):
    targets = [Target(value), Target(value, on="test")]
    found = reach(CURVES, targets, smooth=smooth)
    for target, curve in zip(targets, (CURVES.loss, CURVES.test_loss), strict=True):
        assert found[target] == first_below(smooth_curve(curve, smooth), value)
    errors = [Target(min(value, 1.0), "error", on) for on in ("train", "test")]
    found = reach(CURVES, errors, smooth=smooth)
    for target, curve in zip(errors, (CURVES.error, CURVES.test_error), strict=True):
        assert found[target] == first_below(smooth_curve(curve, smooth), target.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.0,), "value must be greater than 0"),
        ((5, "error"), "value must be at most 1"),
        ((0.3, "accuracy"), "metric='accuracy' is not known"),
        ((0.3, "loss", "validation"), "on='validation' is not known"),
    ],
)
def test_bad_targets_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Target(*arguments)


def test_keywords_name_targets_in_order():
    found = targets_of([0.3, 0.1, 0.3], 0.5, 2, (0.25,))
    assert found == (
        Target(0.3), Target(0.1), Target(0.5, "error"), Target(2.0, on="test"),
        Target(0.25, "error", "test"),
    )  # fmt: skip
    assert targets_of() == targets_of(()) == ()


def test_targets_of_curves_that_are_not_there():
    with pytest.raises(ValueError, match=r"target_test_loss=0\.3 cannot be read here\. Give x"):
        targets_of(target_test_loss=0.3, known=("loss", "error"), hint="Give x_test.")
    with pytest.raises(ValueError, match=r"target_error=0\.1 .* The available curves are loss\."):
        reach(Curves(LOSS), [Target(0.1, "error")])
    assert check_targets([0.3, Target(0.3)]) == (Target(0.3),)  # a number is a training loss
    with pytest.raises(ValueError, match="value must be greater than 0"):
        check_targets([-1.0])
    for bad in (Target(0.3), 0.3):
        # Not a ValueError of ours: a value in the place of a list is a slip of the program.
        with pytest.raises(TypeError):
            check_targets(bad)
    with pytest.raises(ValueError, match="smooth"):
        reach(CURVES, [Target(0.3)], smooth=99)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("number", [np.float32, jnp.float32, float, np.asarray])
def test_numbers_of_numpy_and_jax_are_numbers(number):
    """Thresholds and targets; what is read is what the same float reads."""
    curves = Curves([1.0, 0.5, 0.2, 0.1])
    assert list(reach(curves, [number(0.25)]).values()) == [2]
    assert Rule.of(number(0.5), "relative").read(curves.loss, None).popitem()[1] == 1
    assert Rule(number(0.5)).thresholds == (0.5,)


def test_a_loss_at_the_target_is_not_below_it():
    target = Target(0.25)
    assert int(target.time([1.0, 0.2, 0.25])) == 1
    assert int(target.time([1.0, 0.25, 0.2])) == 2
