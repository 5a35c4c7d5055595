"""The cost model on paper: what it counts is what programs do, and it is the plan's."""

import jax
import numpy as np
import pytest

from experiments.bench import pods
from experiments.bench.kernel import Case
from jaxttp.ntk import ntk_plan
from tests.meshes import network, samples, weights

CASE = Case(
    *jax.tree.map(
        lambda a: a if callable(a) else a.astype("float32"), (network, weights(16), samples(24))
    )
)


def test_what_is_said_to_travel_is_what_a_program_gathers():
    counted, read = pods.gathers(CASE, "trace")
    assert counted == pytest.approx(read, rel=1e-3)


def test_a_share_is_the_plan_s():
    one, many = (pods.cost(CASE, 4000, "full", devices, 1e10) for devices in (1, 8))
    alone = ntk_plan(CASE.apply_fn, CASE.params, np.zeros((4000, 4), np.float32))
    assert one.kernel == alone.kernel_bytes == 8 * many.kernel == 4 * 12_000**2
    assert one.operations == alone.flops[alone.method]
    assert one.gathered == one.product == 0
    # Each block once; one device counts five eighths of the square.
    assert 0.66 / 8 < many.operations / one.operations < 1 / 8
    assert many.product == 4 * 12_000 * 7 / 8
    least = pods.fewest(CASE, 4000, "full", 2e8)
    assert pods.cost(CASE, 4000, "full", least, pods.ROOM * 2e8).peak <= pods.ROOM * 2e8
    with pytest.raises(ValueError, match="max_bytes"):
        pods.cost(CASE, 4000, "full", least - 1, pods.ROOM * 2e8)


def test_seconds_are_bytes_and_operations_over_their_peaks():
    machine = pods.Machine("half", 2, flops=1e12, bandwidth=1e11, memory=1e9, link=1e10)
    one = pods.Cost(operations=4e11, kernel=7e10, peak=1.0, gathered=7e9, product=0.0)
    np.testing.assert_allclose(one.seconds(machine), (1.0, 1.0, 1.0))
