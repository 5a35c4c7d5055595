"""Where segments of a re-linearised path end."""

import numpy as np

from jaxttp.dynamics._placement import PATH_PLACEMENT, AtSteps, ByError, PathView


def test_the_last_kernel_reaches_the_horizon_whatever_its_error():
    """Also where the rest of the path is longer, by a rounding, than the least that is asked for.

    Such a segment was refused and proposed again, for ever.
    """
    budget, steps, hidden = 16, 24, 0
    begun = ((budget - 1) / budget) ** PATH_PLACEMENT
    for seed in range(200):
        path = np.cumsum(np.random.default_rng(seed).exponential(size=steps + 1))
        start = seed % (steps - 2)
        rest = path[-1] - path[start]
        hidden += rest > rest * (1.0 - begun) / (1 - begun)
        placement = ByError(0.02, budget)
        view = PathView(start=start, steps=steps, kernels=budget, path=path)
        found = placement.propose(view, placement.begin())
        assert (found.end, found.limit) == (steps, float("inf"))
    assert hidden > 0  # the rounding does occur


def test_at_the_edge_there_are_twice_as_many_once():
    placement = ByError(0.02, 8)
    more = placement.at_edge()
    assert (more.planned, more.tolerance) == (16, 0.02)
    assert more.at_edge() == more
    fixed = AtSteps((3, 9))
    assert fixed.at_edge() is fixed
