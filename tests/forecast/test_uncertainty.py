"""Bands, errors of times, the linearization check, and warnings."""

import dataclasses
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxttp import predict_training_time, sketch_jacobian, training_time
from jaxttp.dynamics import RelinearizedTrajectory
from jaxttp.forecast import Descent, Linearizer, Noisy, Problem, Relinearized
from jaxttp.forecast.methods import Draws, Path
from jaxttp.forecast.methods.base import recur
from jaxttp.forecast.uncertainty import (
    LinearizationCheck,
    check_linearization,
    jackknife,
    loss_band,
    path_warning,
    read_targets,
    read_times,
    sampled,
    speed_warning,
    time_error,
    with_error,
)
from jaxttp.losses.rule import Rule, Target
from jaxttp.ntk.estimators import delete_groups
from tests.draws import normal

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((7, 3)), RNG.integers(0, 2, 7)
XOR = (X[:, 0] * X[:, 1] > 0).astype(int)
PARAMS = {"w": normal(1, (3, 4)), "v": normal(2, (4, 2))}
SDE = {"dynamics": "sde", "paths": 6, "batch_size": 4, "key": jax.random.key(0)}


def tanh(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def linear(params, x):
    return x @ params


def predict(network=tanh, params=PARAMS, y=Y, **options):
    rate = {} if "optimizer" in options else {"learning_rate": 0.5}
    return predict_training_time(
        network, params, X, y, **{"steps": 20, "relinearize": 0} | rate | options
    )


# --- bands ----------------------------------------------------------------------------------------


def drawn(loss, draws, **more):
    """A path of one output whose loss is known, with draws around it."""
    loss, draws = jnp.asarray(loss), jnp.asarray(draws)
    return Path(loss[:, None, None], loss, loss, draws=Draws(draws, draws), **more)


def test_bands_leave_room_for_the_center():
    paths = jnp.linspace(0.0, 1.0, 101)[:, None]
    band = loss_band(drawn(paths[50], paths), 0.9)
    np.testing.assert_allclose(band[:, 0], [0.05, 0.95], atol=1e-12)
    low, high = loss_band(drawn(paths[50], paths, uncertainty=jnp.array([1.0])), 0.9)[:, 0]
    assert low == 0.0  # a loss is not negative
    assert high > 0.95


def test_bands_and_errors_of_known_curves():
    line = np.linspace(1.0, 0.0, 101)
    half = Rule((0.5,))
    found = read_times(drawn(line, np.stack([line] * 3)), half, stable=True)
    assert (found.steps, found.bands) == ({0.5: 51}, {0.5: (51, 51)})
    # Paths that never get there are later than all others.
    late = np.stack([line, line, np.r_[1.0, np.linspace(0.4, 1.0, 100)]])
    below = Rule((0.3,), "absolute")
    found = read_times(drawn(line, late), below, stable=True, level=0.99)
    assert (found.steps, found.bands) == ({0.3: 71}, {0.3: (-1, 100)}) or found.bands[0.3][1] == -1
    # A rise of the whole curve but its last value by 0.1 delays the crossing.
    rise = np.r_[np.full(100, 0.1), 0.0]
    assert 4 <= time_error(line, rise, lambda curve: training_time(curve, 0.5)) <= 11


def descent(kernel, residual, rate=0.1, steps=25):
    """Squared-error losses by brute force."""
    n, c = residual.shape
    matrix, flat, out = np.asarray(kernel).reshape(n * c, n * c), residual.reshape(-1), []
    for _ in range(steps + 1):
        out.append(0.5 * flat @ flat / n)
        flat = flat - rate / n * matrix @ flat
    return np.array(out)


def test_the_error_of_a_sketch_from_its_parts():
    """Against the spread of many projections: the jackknife of four groups is right on average."""
    rng = np.random.default_rng(0)
    jacobian, residual = rng.standard_normal((24, 60)) / 2, rng.standard_normal((12, 2))
    curves, told = [], []
    for _ in range(60):
        sketch = (jacobian @ rng.standard_normal((60, 160)) / np.sqrt(160)).reshape(12, 2, 160)
        curves.append(descent(np.einsum("ncd,med->ncme", sketch, sketch), residual))
        parts = [descent(part, residual) for part in delete_groups(jnp.asarray(sketch))]
        told.append(jackknife(parts))
    spread, told = np.std(curves, axis=0), np.sqrt(np.mean(np.square(told), axis=0))
    # Late losses are not linear in the kernel, so their error comes out up to 1.3 too large (of
    # a sketch narrower than its rows 1.8); the rest is the noise of 60 projections, some 15 %.
    ratio = told[3:] / spread[3:]
    assert 0.8 < ratio[0] < 1.3
    assert np.all((ratio > 0.8) & (ratio < 1.45))


def test_a_forecast_carries_the_error_of_its_sketch():
    rng, key = np.random.default_rng(0), jax.random.key(3)
    x, y = rng.standard_normal((12, 30)), rng.standard_normal((12, 2))
    options = {"learning_rate": 0.1, "loss": "squared_error", "steps": 25, "relinearize": 0}
    call = lambda **more: predict_training_time(  # noqa: E731
        linear, jnp.zeros((30, 2)), x, y, **options, **more
    )
    found = call(key=key, sketch_dim=20)
    sketch = sketch_jacobian(linear, jnp.zeros((30, 2)), x, key=jax.random.fold_in(key, 1), dim=20)
    parts = [descent(part, -y) for part in delete_groups(sketch)]
    middle = descent(np.einsum("ncd,med->ncme", sketch, sketch), -y)
    reach = NormalDist().inv_cdf(0.95) * jackknife(parts)
    np.testing.assert_allclose(found.loss, middle, rtol=1e-9)
    np.testing.assert_allclose(found.loss_band[1], middle + reach, rtol=1e-9)
    np.testing.assert_allclose(found.loss_band[0], np.maximum(middle - reach, 0), rtol=1e-9)
    for threshold, (low, high) in found.steps_band.items():
        reads = [int(training_time(part, threshold)) for part in parts]
        reach = NormalDist().inv_cdf(0.95) * jackknife(reads)
        assert low == max(0, np.floor(found.steps[threshold] - reach))
        assert high == min(25, np.ceil(found.steps[threshold] + reach))
    for without in (call(), call(key=key, sketch_dim=1)):  # no parts to tell its error from
        assert without.loss_band is None
        assert without.steps_band is None


def test_half_widths_add_in_squares():
    band = with_error(np.array([[6.0], [14.0]]), np.array([10.0]), np.array([0.0]), 0.9)
    np.testing.assert_allclose(band[:, 0], [6.0, 14.0])
    values = np.array([1.0, 2.0, 4.0, 5.0])
    # For a mean the jackknife is the standard error of the mean.
    without = (values.sum() - values) / 3
    np.testing.assert_allclose(jackknife(without), values.std(ddof=1) / 2)


# --- the linearization check ---------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "decay"), [(7, 0.1), (40, 0.0)])
def test_what_the_network_says_is_what_dense_jacobians_say(decay, samples):
    """On all of few samples and on a part of many, trained by itself."""
    rng = np.random.default_rng(samples)
    x, y = rng.standard_normal((samples, 3)), rng.integers(0, 2, samples)
    optimizer = optax.chain(optax.add_decayed_weights(decay), optax.sgd(0.5, 0.5))
    training = Descent.of(optimizer=optimizer, steps=12)
    lines = Linearizer(Problem.of(tanh, PARAMS, x, y))
    check = check_linearization(lines, training)
    assert check.samples == sampled(samples) == min(samples, 32)
    assert check.fraction == check.samples / samples
    rows = np.sort(np.random.default_rng(0).permutation(samples)[: check.samples])
    part = lines if samples == check.samples else lines.take(rows)
    problem, path = part.problem, recur(part, training)
    loss, targets, start = problem.loss, problem.targets, problem.f0
    curve = jnp.stack([loss.value(f, targets) for f in path.train])
    t = int(training_time(curve, 0.1))
    assert check.step == t > 0
    flat, unravel = jax.flatten_util.ravel_pytree(PARAMS)
    network = jax.jit(lambda w: tanh(unravel(w), problem.x).ravel())
    j = jax.jacobian(network)
    first = j(flat)
    end = path.scale[t] * flat + first.T @ path.dual[t].ravel()

    def linearized(way):
        return start + way * (path.train[t] - start)

    # The first of 64 places on the line to these weights with a fifth of the drop left, or less.
    low = float(curve.min()) + 0.2 * float(curve[0] - curve.min())
    ways = np.arange(1, 65) / 64
    way = next(s for s in ways if float(loss.value(linearized(s), targets)) <= low)
    assert 1 / 64 < way < 1
    weights = flat + way * (end - flat)
    # The weights are those whose linearized outputs these are.
    moved = np.asarray(start.ravel() + first @ (weights - flat))
    np.testing.assert_allclose(moved, np.ravel(linearized(way)), rtol=1e-9, atol=1e-12)
    g = loss.gradient(linearized(way), targets).ravel()
    want = np.sum((j(weights).T @ g) ** 2) / np.sum((first.T @ g) ** 2)
    assert check.speed == pytest.approx(float(want), rel=1e-9)  # other sums, float64
    real = loss.value(network(weights).reshape(start.shape), targets)
    predicted = loss.value(linearized(way), targets)
    # A millionth of the first loss is added to both, so that two zeros are alike.
    assert check.loss == pytest.approx(float(real / predicted), rel=3e-6)


def test_a_part_that_diverges_is_given_up_for_the_whole():
    """Of 40 samples 32 are looked at; a large one among them is diluted by the others."""
    x = np.full((40, 1), 0.1)
    rows = np.random.default_rng(0).permutation(40)[:32]
    x[rows[0]] = 10.0
    lines = Linearizer(Problem.of(linear, jnp.zeros((1, 1)), x, x, loss="squared_error"))
    # Curvature 100/40 of the whole, 100/32 of the part: a rate between their limits.
    check = check_linearization(lines, Descent.of(learning_rate=0.72, steps=6000))
    assert (check.samples, check.fraction) == (40, 1.0)
    assert check.step > 0
    no_check = check_linearization(lines, Descent.of(learning_rate=100.0, steps=6000))
    assert (no_check.step, no_check.passes) == (-1, 0)


def test_a_network_whose_kernel_grows_says_so():
    """Every kernel vanishes where the last layer is zero, but for that layer's own part."""
    start = PARAMS | {"v": jnp.zeros((4, 2))}
    forecast = predict(params=start, y=XOR, steps=100)
    assert "times as fast" in forecast.warnings
    assert forecast.warnings in " ".join(str(forecast).split())
    assert forecast.cost.gradient_evaluations == 1 + 2  # to the place, and there
    part = predict(params=start, y=XOR, steps=100, trainable=lambda path: "v" in str(path))
    assert part.warnings is None  # the last layer alone is linear


def test_a_network_that_is_not_finite_at_the_predicted_weights():
    def broken(w, x):
        return jnp.where(jnp.sum(w**2) > 0.1, jnp.nan, 1.0) * (x @ w)

    found = predict(broken, jnp.zeros((3, 2)), learning_rate=1.0, steps=12)
    assert "the network is not finite" in (found.warnings or "")


# --- warnings -------------------------------------------------------------------------------------

STEADY = 0.5 ** (np.arange(41) / 8)


@pytest.mark.parametrize(
    ("speed", "loss", "words"),
    [
        (1.45, 1.0, None), (0.7, 1.2, None),
        (1.6, 1.0, "for step 9 of 38 samples alone the network learns 1.6 times as fast .* third"),
        (2.0, 1.0, "2 times as fast .* half"), (1.0, 1.4, "loss is 1.4 times what .* a third"),
        (1.1, 0.4, "loss is 2.5 times below what .* half"),
        (0.0, 1.0, "learns over 100 times as slowly .* two thirds"),
        (1.0, np.inf, "is not finite"),
    ],
)  # fmt: skip
def test_how_far_off_the_check_says_times_are(speed, loss, words):
    heard = LinearizationCheck(9, speed, loss, samples=38, fraction=38 / 150)
    assert heard.passes == pytest.approx(2 * 38 / 150)
    found = speed_warning(heard, STEADY)
    if words is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=words):
            raise ValueError(found)


def path_of(loss, uncertainty=0.0, **more):
    loss = jnp.asarray(loss)
    values = dict.fromkeys(RelinearizedTrajectory.__dataclass_fields__) | {
        "loss": loss, "loss_uncertainty": jnp.linspace(0.0, uncertainty, len(loss)),
        "edge_at": -1, "frozen_from": -1, "diverged_at": -1,
    } | more  # fmt: skip
    path = object.__new__(RelinearizedTrajectory)
    for name, value in values.items():
        object.__setattr__(path, name, value)
    return path


def test_a_loss_that_rises_again():
    def said(loss):
        return path_warning(path_of(loss), Rule()) or ""

    assert said([1.0, 0.1, 0.05, 0.04]) == ""
    assert said([1.0, 0.1, 0.001, 0.003]) == ""  # of no account beside the drop
    assert "rises again from step 1 on" in said([1.0, 0.1, 0.15, 0.25])
    assert "the loss rises on the way" in said([1.0, 9.0, 0.1])
    assert said([0.0, 0.0, 0.0]) == ""


def test_a_path_says_where_it_is_unsure():
    rule = Rule((0.1, 0.4))
    assert path_warning(path_of(STEADY), rule) is None
    assert path_warning(path_of(STEADY, 0.01, edge_at=3), rule) is None
    found = path_warning(path_of(STEADY, 0.2), rule)
    assert "step 24 (10 % of the loss decrease left) is known to ±" in found
    asked = rule.about([Target(0.1), Target(0.2, "error")])
    assert "(loss below 0.1) is known to ±" in path_warning(path_of(STEADY, 0.06), asked)
    assert "(loss below 0.1) may as well never come" in path_warning(path_of(STEADY, 0.2), asked)
    assert "crosses the edge" in path_warning(path_of(STEADY, 0.2, edge_at=3), rule)
    assert "oscillates there" in path_warning(path_of(STEADY, edge_at=9, frozen_from=7), Rule())


# --- no range beside a warning that does not say by how much


def test_a_linear_network_leaves_no_doubt():
    """The linearization of a linear network is exact, by Adam too."""
    for how in ({"optimizer": optax.adam(0.05)}, {"learning_rate": 0.5}):
        found = predict(linear, jnp.zeros((3, 2)), target_loss=1e-6, **how)
        assert (found.warnings, found.doubted_from) == (None, None)


def falling(frozen_from=-1):
    loss = jnp.linspace(1.0, 0.0, 101)
    return Path(
        jnp.zeros((101, 1, 1)), loss, loss, uncertainty=jnp.full(101, 0.02),
        auxiliary=path_of(loss, frozen_from=frozen_from, edge_at=frozen_from),
        frozen_from=frozen_from,
    )  # fmt: skip


def test_rebuilt_kernels_are_doubted_from_the_first_step_without_a_size():
    way = Relinearized()
    assert way.doubt(falling(), Rule()) is None
    held = falling(frozen_from=9)
    assert way.doubt(held, Rule()).since == 9
    drawn = dataclasses.replace(falling(), auxiliary=held)
    assert Noisy(centre=way).doubt(drawn, Rule()).since == 9


def test_ranges_end_where_the_doubt_begins():
    """The curve falls by 0.01 a step: 40.5 % are left at step 60, 1.5 % at step 99."""
    rule, targets = Rule((0.405, 0.015)), (Target(0.5), Target(0.2))
    whole, part = (
        read_times(falling(), rule, stable=True, doubted_from=step) for step in (None, 60)
    )
    assert part.steps == whole.steps == {0.405: 60, 0.015: 99}
    assert set(whole.errors) == {0.405, 0.015}
    assert part.errors == {0.405: whole.errors[0.405]}
    found = read_targets(falling(), targets, 1, stable=True, doubted_from=60)
    assert set(found.errors) == {Target(0.5)}
