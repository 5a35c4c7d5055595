import numpy as np
import pytest

from jaxttp import conditioning
from tests.conditioning import brute


def correlate(filters, x):
    """Valid cross-correlation by loops; x (channels, *shape)."""
    sizes = filters.shape[2:]
    shape = tuple(n - s + 1 for n, s in zip(x.shape[1:], sizes, strict=True))
    out = np.zeros((filters.shape[0], *shape))
    for channel in range(filters.shape[0]):
        for position in np.ndindex(*shape):
            window = tuple(slice(p, p + s) for p, s in zip(position, sizes, strict=True))
            out[(channel, *position)] = np.sum(filters[channel] * x[(slice(None), *window)])
    return out


@pytest.mark.parametrize(
    ("filters", "shape"), [((3, 2, 4), (9,)), ((2, 3, 2, 3), (5, 6)), ((1, 1, 1), (4,))]
)
def test_toeplitz_is_the_cross_correlation(filters, shape):
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal(filters), rng.standard_normal((filters[1], *shape))
    got = np.asarray(conditioning.toeplitz(w, shape)) @ x.reshape(-1)
    np.testing.assert_allclose(got, correlate(w, x).reshape(-1), atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("filters", "shape", "with_covariance"),
    [
        ([(2, 1, 3), (1, 2, 2)], (6,), True),
        ([(2, 2, 2, 2), (2, 2, 1, 2), (1, 2, 2, 1)], (4, 4), False),
    ],
)
def test_the_exact_matrix_equals_brute_force(filters, shape, with_covariance):
    rng = np.random.default_rng(1)
    layers = [rng.standard_normal(size) for size in filters]
    d = filters[0][1] * int(np.prod(shape))
    sigma = brute.covariance(rng, d) if with_covariance else None
    inputs = np.eye(d) if sigma is None else brute.root(sigma)
    columns = []
    for index, layer in enumerate(layers):
        for entry in np.ndindex(*layer.shape):
            unit = np.zeros_like(layer)
            unit[entry] = 1.0
            images = []
            for column in inputs.T:
                x = column.reshape(filters[0][1], *shape)
                for other, matrix in enumerate(layers):
                    x = correlate(unit if other == index else matrix, x)
                images.append(x.reshape(-1))
            columns.append(np.stack(images, axis=1).reshape(-1))
    j = np.stack(columns, axis=1)
    got = np.asarray(conditioning.gauss_newton_convolution(layers, shape, sigma))
    np.testing.assert_allclose(got, j @ j.T, atol=1e-12 * np.abs(j @ j.T).max())
    assert np.linalg.matrix_rank(got, tol=1e-10) <= sum(layer.size for layer in layers)


def test_the_fully_connected_bound_is_violated_by_a_convolution():
    """Filters (1, -.5) and (1, -.5 + 1e-3), d = 12: 7.3e6 against a 'bound' of 15."""
    filters = [np.array([[[1.0, -0.5]]]), np.array([[[1.0, -0.5 + 1e-3]]])]
    exact = conditioning.condition_number(
        conditioning.gauss_newton_convolution(filters, (12,)), rank=3
    )
    # three of the four filter entries are independent: the scale can move between the filters
    assert float(exact.value) == pytest.approx(7.3e6, rel=0.02)
    matrices = [conditioning.toeplitz(filters[0], (12,)), conditioning.toeplitz(filters[1], (11,))]
    wide, narrow = (np.linalg.svd(m, compute_uv=False) for m in matrices[::-1])
    assert (wide[0] ** 2 + narrow[0] ** 2) / (wide[-1] ** 2 + narrow[-1] ** 2) < 20


@pytest.mark.parametrize(
    ("filters", "shape", "match"),
    [
        ([], (4,), "filters"),
        ([np.ones((1, 1, 5))], (4,), "do not fit"),
        ([np.ones((1, 1, 2)), np.ones((1, 2, 2))], (4,), r"filters\[1\] reads 2"),
        ([np.ones((1, 1, 2))], (4, 4), r"\(out, in, size\)"),
        ([np.ones((1, 2))], (4,), r"filters\[0\]"),
    ],
)
def test_bad_input(filters, shape, match):
    with pytest.raises(ValueError, match=match):
        conditioning.gauss_newton_convolution(filters, shape)
