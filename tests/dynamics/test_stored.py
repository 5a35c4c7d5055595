"""Dynamics on a kernel that stays on a disk are those on the kernel in memory."""

import jax
import numpy as np
import optax
import pytest

from jaxttp.dynamics import closed_form, gradient_flow, recursion
from jaxttp.dynamics.stability import max_learning_rate
from jaxttp.forecast import grid, sweep_kernel
from jaxttp.ntk import empirical_ntk, store_kernel
from tests.meshes import labels, network, samples, weights

X, TEST = samples(11), samples(5, seed=3)
F0, Y = network(weights(), X), labels(X)
KEY = jax.random.key(4)
SGD = {"loss": "cross_entropy", "optimizer": optax.sgd(0.4, momentum=0.5), "steps": 9}


@pytest.fixture(scope="module", params=["full", "trace"])
def both(request, tmp_path_factory):
    """A kernel in memory and on the disk; that of other samples with it, too."""
    path, kind = tmp_path_factory.mktemp(request.param), {"output": request.param}
    pairs = []
    for name, x1, x2 in (("own", X, None), ("test", TEST, X)):
        kept = store_kernel(network, weights(), x1, x2, path=path / name, tile=4, **kind)
        pairs.append((empirical_ntk(network, weights(), x1, x2, **kind), kept))
    return zip(*pairs, strict=True)


@pytest.fixture(scope="module")
def kernels(both):
    return list(both)


def close(found, wanted):
    # The same float64 products, summed by tiles.
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batches", [{}, {"batch_size": 4, "key": KEY}])
def test_recursion(kernels, batches):
    f0_test = network(weights(), TEST)
    wanted, found = (
        recursion(own, F0, Y, kernel_test=test, f0_test=f0_test, **SGD, **batches)
        for own, test in kernels
    )
    close(found.train, wanted.train)
    close(found.test, wanted.test)


def test_flow_and_rates(kernels):
    ts = np.linspace(0.0, 6.0, 4)
    common = {"loss": "cross_entropy"}
    (one, _), (kept, _) = kernels
    wanted, found = (
        gradient_flow(k, F0, Y, learning_rate=0.2, ts=ts, **common).train for k in (one, kept)
    )
    close(found, wanted)
    close(max_learning_rate(kept, F0, Y, **common), max_learning_rate(one, F0, Y, **common))


def test_settings_of_a_sweep_share_each_reading(kernels, monkeypatch):
    (one, _), (kept, _) = kernels
    settings = grid(learning_rate=(0.1, 0.3), momentum=(0.0, 0.9), steps=6)
    settings += grid(learning_rate=(0.1,), batch_size=(4,), steps=6)
    seen, read = [], type(kept).apply
    monkeypatch.setattr(type(kept), "apply", lambda self, v: seen.append(v.shape) or read(self, v))
    wanted, found = (sweep_kernel(k, F0, Y, settings, key=KEY) for k in (one, kept))
    close(found.loss, wanted.loss)
    close(found.rate_limit, wanted.rate_limit)
    assert len(seen) == 2 * 6  # of four settings in full batches, and of one; its limits apart


def test_a_large_one_is_followed_and_not_decomposed(tmp_path):
    x = samples(90)
    f0, y = network(weights(), x), labels(x)
    kept = store_kernel(network, weights(), x, path=tmp_path, tile=40)
    one = empirical_ntk(network, weights(), x)
    wanted, found = (
        max_learning_rate(kernel, f0, y, loss="cross_entropy") for kernel in (one, kept)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-8)  # Lanczos, of 270 outputs
    with pytest.raises(ValueError, match="lies on a disk, and what needs all of it at once"):
        closed_form(kept, f0, f0 + 1, loss="squared_error", learning_rate=0.1, ts=[0.0, 1.0])
    with pytest.raises(ValueError, match=r"kernel must have shape \(11, 3, 11, 3\)"):
        recursion(kept, F0, Y, **SGD)
    diagonal = store_kernel(
        network, weights(), samples(4), path=tmp_path / "diagonal", output="diagonal"
    )
    with pytest.raises(ValueError, match="is of diagonals"):
        recursion(diagonal, f0[:4], y[:4], **SGD)
