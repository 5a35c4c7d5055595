"""FLOPs of forecasts and training runs, and what a budget buys."""

import dataclasses
import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import pytest

from jaxttp import predict_training_time
from jaxttp._core.progress import readable_time
from jaxttp.forecast import Descent, Noisy, Problem, Recursion, Relinearized, cost
from jaxttp.forecast.cost import Price, plan_forecast
from jaxttp.forecast.seconds import SPEED, estimate_seconds
from jaxttp.ntk import ClassSketched, Exact, Sketched
from tests.draws import normal, split

N, D, H, C = 20, 5, 7, 3
FORWARD = 2 * D * H + H + 2 * H * C  # two products and a tanh
KEY = jax.random.key(0)


def network(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def parts(n=N):
    keys = split(0, 3)
    params = {"a": normal(keys[0], (D, H)), "b": normal(keys[1], (H, C))}
    return params, normal(keys[2], (n, D)), jnp.arange(n) % C


def problem(n=N):
    params, x, y = parts(n)
    return Problem.of(network, params, x, y)


def descent(steps=50, **more):
    return Descent.of(learning_rate=0.1, steps=steps, **more)


@pytest.fixture
def model(monkeypatch):
    """Changes numbers of the cost model."""

    def change(**fields):
        monkeypatch.setattr(cost, "MODEL", dataclasses.replace(cost.MODEL, **fields))

    return change


def test_operations_are_those_of_the_layers():
    full = Price.of(problem(), descent(), Exact())
    forward = pytest.approx(FORWARD, rel=0.1)  # a sample is also given its shape
    assert full.training / (50 * N * 3) == forward
    assert full.whole_pass / (N * 3) == forward
    assert full.product == 2 * (N * C) ** 2
    batches = Price.of(problem(), descent(batch_size=4, key=KEY), Exact())
    assert batches.training == full.training / 5
    assert batches.kernel == full.kernel
    assert batches.product == full.product / 5  # gradients of 4 samples
    whole = full.forecast(kernels=2, passes=3, products=4)
    assert whole == 2 * full.kernel + 3 * full.whole_pass + 4 * full.product


def test_a_narrow_sketch_stays_as_its_factors():
    wide, narrow = (Price.of(problem(), descent(), Sketched(dim, KEY)) for dim in (200, 2))
    assert wide.kernel - narrow.kernel == 200 * 2 * (N * C) ** 2
    assert 0 < narrow.kernel < wide.kernel
    assert [wide.product, narrow.product] == [2 * (N * C) ** 2, 4 * N * C * 2]


def test_small_problems_are_forecast_in_full():
    plan = plan_forecast(Relinearized(), problem(), descent(), budget=jnp.inf)
    assert (plan.kernel, plan.dynamics, plan.whole) == (Exact(), Relinearized(), True)


def test_more_budget_is_never_less_true_and_is_kept(model):
    model(widths=(4, 16), per_class=1)
    long = descent(steps=400)
    fractions = (1e-4, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 1000.0)
    plans = [
        plan_forecast(Relinearized(), problem(), long, budget=fraction) for fraction in fractions
    ]
    errors = [plan.error for plan in plans]
    assert all(b <= a * cost.MODEL.alike for a, b in itertools.pairwise(errors))
    assert len(set(errors)) > 2
    cheapest, *_, dearest = plans
    assert cheapest.operations > cheapest.budget
    assert "nothing fits the budget" in str(cheapest)
    assert (cheapest.whole, dearest.whole) == (False, True)
    for plan in plans[2:]:
        assert plan.operations <= plan.budget or plan.operations == cheapest.operations
        assert plan.training == Price.of(problem(), long, Exact()).training


def many_classes(n, classes):
    """Linear as far as these outputs go, which the network's steps do not show."""
    keys = split(1, 2)
    x, w = normal(keys[0], (n, D)), normal(keys[1], (D, classes))
    return Problem.of(lambda w, x: jnp.abs(x @ w + 64.0) - 64.0, w, x, jnp.arange(n) % classes)


def kernels(n, classes):
    """What a plan of so many samples and classes has to choose from."""
    return cost._kernels(many_classes(n, classes), KEY)


def test_kernels_to_choose_from(model):
    """Bytes of 3 kernels: 12 (N C)^2, 12 N C k, 12 N^2."""
    sketches = [Sketched] * len(cost.MODEL.widths)
    assert [type(one) for one in kernels(40, 2)] == [Exact, *sketches, ClassSketched]
    model(memory=12 * 60**2 + 1.0)
    assert [type(one) for one in kernels(60, 20)] == [ClassSketched]
    model(memory=1.0)
    assert [type(one) for one in kernels(60, 20)] == [ClassSketched]  # the least of all


def test_class_sketches_are_a_last_resort_with_batches(model):
    model(widths=(16,), per_class=1, cache=0, vectors=0.0)
    batches = descent(batch_size=8, key=KEY)
    assert isinstance(plan_forecast(Relinearized(), problem(), batches).kernel, ClassSketched)
    chosen = plan_forecast(Relinearized(), problem(), batches, budget=30).kernel
    assert not isinstance(chosen, ClassSketched)


def test_a_plan_leaves_what_is_given(model):
    model(widths=(4, 16), per_class=1)
    sketch = Sketched(8, KEY)
    plan = plan_forecast(Relinearized(), problem(), descent(), sketch, budget=1e-6)
    assert plan.kernel is sketch
    assert isinstance(plan.dynamics, Recursion)
    fixed = plan_forecast(Relinearized(3), problem(), descent(), budget=1e-6)
    assert fixed.dynamics == Relinearized(3)
    assert not isinstance(fixed.kernel, Exact)
    noisy = Noisy(paths=4, centre=Relinearized())
    batches = descent(batch_size=8, key=KEY)
    assert plan_forecast(noisy, problem(), batches, budget=1e-6).dynamics == Noisy(paths=4)
    assert plan_forecast(noisy, problem(), batches, Exact(), budget=1e6).dynamics == noisy
    # A kernel that does not fit into memory is a sketch, whatever the budget.
    model(memory=4.0 * 3 * (N * C) * 16)
    assert plan_forecast(Relinearized(), problem(), descent(), budget=1e6).kernel.sketch_dim == 16


def test_test_samples_cost_too():
    params, x, y = parts()
    beside = Problem.of(network, params, x, y, x_test=x, y_test=y)
    plan = functools.partial(plan_forecast, Relinearized(2), descent=descent(), kernel=Exact())
    alone, both = plan(problem=problem()), plan(problem=beside)
    assert both.operations == pytest.approx(2 * alone.operations)


def test_a_forecast_keeps_within_its_budget_and_says_so(model):
    params, x, y = parts()
    call = lambda **more: predict_training_time(  # noqa: E731
        network, params, x, y, learning_rate=0.3, **more
    )
    found = call(steps=400, budget=60, tolerance=1e-6)
    assert "times the training's FLOPs" in found.plan
    assert f"  plan   {found.plan[:20]}" in str(found)
    assert 1 < found.cost.kernels <= 17
    assert found.cost.operations <= 60 * found.cost.training_operations
    assert call(steps=400, budget=0.1).cost.kernels == 1
    assert call(steps=5).plan is not None  # a default that has to leave something out says so
    model(fraction=1e9)
    assert call(steps=5).plan is None


def test_the_price_comes_first(monkeypatch):
    params, x, y = parts()
    told = []
    common = dict(learning_rate=0.1, steps=2)
    monkeypatch.setattr("jaxttp.forecast.seconds.SHORT", 0.0)
    monkeypatch.setattr("jaxttp.forecast.seconds.timeit.repeat", lambda *_, **__: [1e-6])
    model = lambda progress: predict_training_time(  # noqa: E731
        network, params, x, y, **common, progress=progress
    )
    found = model(lambda *call: told.append(call))
    price, done, total = told[0]
    assert price.startswith("training about")
    assert price.endswith("training costs less")
    assert (done, total) == (0, 0)
    assert f"FLOPs (about {readable_time(found.cost.training_seconds)})" in str(found.cost)
    assert "train instead: this forecast took" in str(found)
    with pytest.warns(UserWarning, match="training about .*costs less: train, or give"):
        model(None)  # nobody watches
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr("jaxttp.forecast.seconds.SHORT", 1e3)
        model(None)


def test_seconds_are_a_gradients(monkeypatch):
    plan = plan_forecast(Relinearized(), problem(), descent(), budget=10)
    monkeypatch.setattr("jaxttp.forecast.seconds.timeit.repeat", lambda *_, **__: [2.0, 1.0])
    found = estimate_seconds(plan, problem(), 50, 0.1, forecasts=2, trainings=3)
    assert found.training == pytest.approx(3 * 50 * (1.0 + SPEED.dispatch))
    assert found.total - found.forecast == pytest.approx(0.1 * SPEED.compiling)
    built = min(plan.kernels, SPEED.built[0])
    alone = plan.operations / plan.training * 50 / SPEED.forecast[0] * built / plan.kernels
    assert found.forecast == pytest.approx(2 * alone + SPEED.kernel * built)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.0}, "^budget must be greater than 0"),
        ({"budget": "much"}, "^budget"),
        ({"budget": 0.1, "dynamics": "ode"}, "^budget=0.1 does nothing here"),
        ({"budget": 0.1, "relinearize": 2, "max_bytes": 10**6}, "^budget=0.1 does nothing here"),
        ({"budget": 0.1, "dynamics": Recursion(), "kernel": Exact()}, "^budget=0.1 does nothing"),
    ],
)
def test_budgets_that_are_none(options, message):
    params, x, y = parts()
    with pytest.raises(ValueError, match=message):
        predict_training_time(network, params, x, y, learning_rate=0.1, **options)
