import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.dynamics import cluster_samples, sample_losses
from jaxttp.losses import cross_entropy
from tests.draws import normal


def test_mean_over_samples_is_the_loss(problem):
    train = jnp.stack([jnp.asarray(problem.f0), 2 * jnp.asarray(problem.f0)])
    each = sample_losses(train, problem.labels, loss="cross_entropy")
    want = [float(cross_entropy.value(f, jnp.asarray(problem.targets))) for f in train]
    np.testing.assert_allclose(each.mean(axis=1), want, atol=1e-12)


@pytest.mark.slow
def test_separated_groups_are_found_and_ordered(key):
    """Three bundles of curves, far apart: every start finds them."""
    level = np.repeat([0.1, 2.0, 1.0], [5, 3, 4])
    noise = 0.01 * np.asarray(normal(key, (20, 12)))
    for seed in range(5):
        labels = cluster_samples(level[None] + noise, 3, key=jax.random.key(seed))
        assert labels.tolist() == [2] * 5 + [0] * 3 + [1] * 4


def test_more_groups_than_samples(key):
    with pytest.raises(ValueError, match="clusters"):
        cluster_samples(np.zeros((4, 3)), 5, key=key)
