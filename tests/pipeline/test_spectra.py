"""A task's spectrum against NumPy's eigenvalues of the kernel."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp import empirical_ntk
from jaxttp.pipeline import Settings, build_task, task_spectrum

SMALL = Settings(data="wine", samples_per_class=4)


@pytest.mark.slow
def test_values_and_fractions_are_those_of_the_kernel():
    found = task_spectrum(SMALL)
    task = build_task(SMALL)
    x = jnp.asarray(task.x)
    kernel = np.asarray(empirical_ntk(*task.model, x), np.float64).reshape(36, 36)
    values, vectors = np.linalg.eigh(kernel)
    np.testing.assert_allclose(found.values, values[::-1], atol=1e-5 * values[-1])  # float32 kernel
    outputs = np.asarray(task.model.apply_fn(task.model.params, x), np.float64)
    softmax = np.exp(outputs - outputs.max(1, keepdims=True))
    residual = softmax / softmax.sum(1, keepdims=True) - np.eye(3)[task.y]
    fraction = ((vectors.T @ residual.ravel()) ** 2)[::-1]
    np.testing.assert_allclose(found.residual[:5], fraction[:5] / fraction.sum(), atol=1e-4)
    assert found.residual.sum() == pytest.approx(1)
    assert found.labels.sum() == pytest.approx(1)
    assert found.head(1.0) == 36
    cumulative = np.cumsum(found.labels)
    k = found.head(0.5, "labels")
    assert cumulative[k - 1] >= 0.5 > (cumulative[k - 2] if k > 1 else 0)
