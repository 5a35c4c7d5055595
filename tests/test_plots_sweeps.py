"""Figures of sweeps and comparisons show the numbers of the result."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.forecast import Candidate, Target, compare, grid, sweep_kernel

SWEEP = sweep_kernel(
    jnp.eye(2).reshape(2, 1, 2, 1), jnp.zeros((2, 1)), jnp.array([[1.0], [2.0]]),
    grid(learning_rate=(0.5, 2.0, 5.0), momentum=(0.0, 0.5), loss="squared_error", steps=30),
)  # fmt: skip


def test_the_heat_map_holds_the_steps():
    heat, pareto, bar = SWEEP.plot(threshold=0.1, title="two").axes
    mesh = heat.collections[0]
    table = np.ma.asarray(mesh.get_array()).reshape(2, 3)
    steps = SWEEP.steps[:, 1].reshape(3, 2).T  # settings vary momentum fastest
    assert np.array_equal(table.mask, steps < 0)
    assert np.array_equal(table.compressed(), steps[steps >= 0])
    assert table.mask[0, 2]  # beyond 2/lambda = 4
    assert [label.get_text() for label in heat.get_yticklabels()] == ["plain", "momentum 0.5"]
    star = next(line for line in heat.get_lines() if line.get_marker() == "*")
    assert star.get_xdata()[0] == SWEEP.settings[SWEEP.best(0.1)].learning_rate
    limit = next(line for line in heat.get_lines() if line.get_label() == "largest stable rate")
    assert limit.get_xdata()[0] == pytest.approx(4.0)
    chosen = next(line for line in pareto.get_lines() if line.get_label().startswith("cheapest"))
    cost, best = SWEEP.cost(0.1), list(SWEEP.pareto(0.1))
    np.testing.assert_allclose(
        chosen.get_xydata(), np.stack([cost[best], SWEEP.final_loss[best]], 1)
    )
    assert bar.get_ylabel() == "training steps"
    assert pareto.get_xlabel() == "samples seen until the target"


def test_targets_of_a_sweep():
    target = Target(0.2)
    found = sweep_kernel(
        jnp.eye(2).reshape(2, 1, 2, 1), jnp.zeros((2, 1)), jnp.array([[1.0], [2.0]]),
        SWEEP.settings, targets=[target, Target(0.5, "error")],
    )  # fmt: skip
    heat, pareto, _ = found.plot().axes  # the first target unless told
    assert heat.get_title() == "steps to loss below 0.2"
    table = np.ma.asarray(heat.collections[0].get_array()).reshape(2, 3)
    steps = found.target_steps[:, 0].reshape(3, 2).T
    assert np.array_equal(table.compressed(), steps[steps >= 0])
    line = next(line for line in pareto.get_lines() if line.get_label() == "loss below 0.2")
    assert set(line.get_ydata()) == {0.2}
    heat, pareto, _ = found.plot(threshold=Target(0.5, "error")).axes
    assert heat.get_title() == "steps to error below 0.5"
    assert not any("below" in line.get_label() for line in pareto.get_lines())
    assert (
        found.plot(threshold=0.1).axes[0].get_title() == "steps to 10 % of the loss decrease left"
    )


@pytest.mark.parametrize(("target", "reached"), [(1e-9, False), (5.0, True)])
def test_targets_that_none_or_all_reach_are_drawn(target, reached, recwarn):
    """A loss that no setting gets to, and one that holds before training: 0 has no logarithm."""
    settings = grid(learning_rate=(0.1, 0.2), steps=10)
    found = sweep_kernel(
        jnp.eye(4).reshape(2, 2, 2, 2), jnp.zeros((2, 2)), jnp.array([0, 1]), settings,
        targets=[Target(target)],
    )  # fmt: skip
    figure = found.plot()
    figure.draw_without_rendering()
    assert not any("log-scaled" in str(one.message) for one in recwarn)
    pareto = figure.axes[1]
    assert any("no setting" in text.get_text() for text in pareto.texts) != reached


@pytest.mark.slow
def test_the_comparison_shows_curves_and_reasons():
    x, y = jnp.eye(4), jnp.array([0, 1, 0, 1])
    found = compare(
        {"a": Candidate(lambda w, x: x @ w, jnp.zeros((4, 2))),
         "b": Candidate(lambda w, x: 0.1 * x @ w, jnp.zeros((4, 2)))},
        x, y, learning_rate=0.5, steps=20, time_steps=False, target_loss=0.5, target_error=0.3,
        relinearize=0,
    )  # fmt: skip
    sweep_result = found.sweep
    left, middle, right = found.plot(title="two").axes
    curves = [line.get_ydata() for line in left.get_lines() if len(line.get_ydata()) == 21]
    np.testing.assert_allclose(np.stack(curves), sweep_result.loss)
    assert [label.get_text() for label in right.get_yticklabels()] == list(found.names)
    widths = [bar.get_width() for bar in right.patches[:2]]
    np.testing.assert_allclose(widths, [why.speed for why in found.explanations])
    for axes, curves, k in ((left, sweep_result.loss, 0), (middle, sweep_result.error, 1)):
        assert sweep_result.targets[k].words() in [text.get_text() for text in axes.texts]
        stars = [line.get_xydata()[0] for line in axes.get_lines() if line.get_marker() == "*"]
        steps = sweep_result.target_steps[:, k]
        want = [(t, curve[t]) for t, curve in zip(steps, curves, strict=True) if t >= 0]
        assert len(want) > 0
        np.testing.assert_allclose(stars, want)
