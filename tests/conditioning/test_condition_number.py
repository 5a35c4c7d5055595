import sys

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

from jaxttp import conditioning
from jaxttp.conditioning import _structured
from jaxttp.conditioning.condition_number import Effort
from tests.conditioning import brute


def with_spectrum(values, seed=0):
    q, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(values), len(values))))
    return q * np.asarray(values) @ q.T


@pytest.mark.parametrize("kappa", [1e3, 1e12])
def test_known_spectra(kappa):
    values = np.geomspace(1.0, 1.0 / kappa, 12)
    result = conditioning.condition_number(with_spectrum([*values, 0.0, 0.0]), rank=12)
    # eigenvalues err by about 1e-16 lambda_max, so kappa by 1e-16 kappa, with a factor to spare
    assert float(result.value) == pytest.approx(kappa, rel=1e-12 + 3e-15 * kappa)
    assert int(result.rank) == 12
    np.testing.assert_allclose(result.eigenvalues[:12], values, atol=1e-14)


def test_numerical_rank_gap_and_neighbours():
    result = conditioning.condition_number(with_spectrum([4.0, 2.0, 1.0, 0.0, 0.0]))
    assert int(result.rank) == 3
    assert float(result.value) == pytest.approx(4.0, rel=1e-13)
    assert float(result.rank_below) == pytest.approx(2.0, rel=1e-13)
    assert float(result.rank_above) > 1e14
    assert float(result.gap) > 1e13
    assert float(result.tolerance) == pytest.approx(5 * 2.0**-52 * 4)
    assert not result.is_lower_bound
    assert "rank 3" in str(result)


def test_rtol_and_rank_choose():
    matrix = np.diag([1.0, 0.1, 1e-6])
    assert float(conditioning.condition_number(matrix, rtol=1e-3).value) == pytest.approx(10.0)
    assert float(conditioning.condition_number(matrix, rank=1).value) == 1.0
    assert float(conditioning.condition_number(np.diag([1.0, 0.0]), rank=2).value) == np.inf


def test_zero_is_nan_and_indefinite_is_absolute():
    zero = conditioning.condition_number(np.zeros((3, 3)))
    assert np.isnan(float(zero.value))
    assert int(zero.rank) == 0
    result = conditioning.condition_number(np.diag([-8.0, 2.0, 0.0]))
    assert float(result.value) == 4.0
    assert float(conditioning.condition_number(np.full((1, 1), 3.0)).value) == 1.0


def test_jit_vmap_and_traced_rank():
    matrices = jnp.stack([with_spectrum([4.0, 2.0, 1.0]), with_spectrum([9.0, 3.0, 0.0])])
    result = jax.jit(jax.vmap(conditioning.condition_number))(matrices)
    np.testing.assert_allclose(result.value, [4.0, 3.0], rtol=1e-12)
    assert result.rank.tolist() == [3, 2]
    traced = jax.jit(lambda m, r: conditioning.condition_number(m, rank=r).value)
    assert float(traced(matrices[0], 2)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("widths", "n", "scaled"),
    [
        ((20, 30, 25, 4), None, False),
        ((20, 12, 6, 7, 6), 15, False),  # a covariance of less than full rank
        ((30, 8), 11, False),
        ((6, 2, 2), None, True),
        ((20, 30, 25, 4), None, True),  # scales are products with the weights
    ],
)
def test_structured_solver_equals_the_dense_spectrum(widths, n, scaled):
    rng = np.random.default_rng(0)
    weights = brute.draw(rng, widths)
    sigma = None if n is None else brute.covariance(rng, widths[0], n)
    scales = [rng.uniform(0.5, 2.0, w.shape[0]) for w in weights[:-1]] if scaled else None
    given = jax.tree.map(jnp.asarray, (weights, sigma, scales))
    both = lambda w, s, f: (  # noqa: E731
        conditioning.gauss_newton_linear_operator(w, s, scales=f),
        conditioning.gauss_newton_linear(w, s, scales=f),
    )
    operator, matrix = jax.jit(both)(*given)
    rank = conditioning.generic_rank(widths, None if n is None else min(n, widths[0]))
    values = np.linalg.eigvalsh(matrix)[::-1]
    found = _structured.structured_extremes(operator)
    assert found.rank == rank
    assert found.converged
    # the residual tolerance 1e-5 squared over a relative gap of 1e-2
    assert found.largest == pytest.approx(values[0], rel=1e-8)
    assert found.smallest == pytest.approx(values[rank - 1], rel=1e-8, abs=1e-13)
    if scaled:
        dense = conditioning.condition_number(operator, rank=rank)
        assert dense.kind == "dense"
        assert float(dense.largest) == pytest.approx(values[0], rel=1e-12)


# --- operators beyond 1024 rows: products alone ---------------------------------------------------

ROWS = 1100
"""One size, so that one program is compiled for each dtype."""


def diagonal(values, dtype=np.float64):
    values = np.asarray(values)
    padded = np.concatenate([values, np.zeros(ROWS - len(values))]).astype(dtype)
    return lx.DiagonalLinearOperator(jnp.asarray(padded))


@pytest.mark.parametrize(
    ("values", "expected", "dtype"),
    [
        (np.full(ROWS, 2.0), 1.0, np.float64),
        ([3.0, -1.0], 3.0, np.float32),
        (np.append(np.ones(ROWS - 1), 1e-9), 1e9, np.float64),
        ([], np.nan, np.float64),
    ],
)
def test_operators_whose_krylov_space_ends(values, expected, dtype):
    found = conditioning.condition_number(diagonal(values, dtype))
    # The length that ends the process, 10 eps sqrt(n), over the smallest eigenvalue.
    eps = float(np.finfo(dtype).eps)
    rounding = 10 * eps * ROWS**0.5 * (1 if np.isnan(expected) else expected)
    assert float(found.value) == pytest.approx(expected, rel=rounding, nan_ok=True)
    assert (found.kind, found.rank) == ("iterative", None)
    assert "rank not known" in str(found)
    assert "nan, " not in str(found)


# The last two are where null vectors mix with the smallest eigenvalue's.
@pytest.mark.parametrize(
    "distinct",
    [
        [-3.0, -0.5, 0.0, 0.02, 1e-4],
        [-3.0, -0.5, 0.0, 1e-4, 0.02, 1.0],
    ],
)
def test_few_distinct_eigenvalues_of_many_copies(distinct):
    values = np.random.default_rng(1).permutation(np.resize(distinct, ROWS))
    counted = np.abs([v for v in distinct if v != 0.0])
    found = conditioning.condition_number(diagonal(values))
    known = counted.max() / counted.min()
    # Where rounding hides that these are all it is a bound.
    assert float(found.value) <= known * (1 + 1e-7)
    assert float(found.value) >= known * (1 - (1e-2 if found.is_lower_bound else 1e-7))


BASIS = np.linalg.qr(np.random.default_rng(0).normal(size=(ROWS, 700)))[0]


def test_rounding_out_of_the_range_is_no_eigenvalue():
    """Rank 700 of many more rows, condition 15: Ritz values of the null space pass to zero."""
    matrix = lx.MatrixLinearOperator((BASIS * np.linspace(1, 15, 700)) @ BASIS.T, lx.symmetric_tag)
    found = conditioning.condition_number(matrix)
    assert found.is_lower_bound
    assert 10 < float(found.value) <= 15 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("values", "least", "expected"),
    [
        (np.geomspace(1.0, 1e-4, ROWS), 1e3, 1e4),
        # Ritz values between -1 and 1 are no eigenvalues.
        (np.append(np.linspace(1, 2, 550), -np.linspace(1, 2, 550)), 1.5, 2.0),
        # Below sqrt(eps) of the largest, products do not tell eigenvalues from rounding.
        (np.append([9.0, 4.0, 1.0], 1e-9 * np.linspace(1e-3, 1.0, ROWS - 3)), 8.0, 9e12),
    ],
)
def test_a_lower_bound_is_one(values, least, expected):
    found = conditioning.condition_number(diagonal(values))
    assert found.is_lower_bound
    assert "at least" in str(found)
    assert "rank not known" in str(found)
    assert least < float(found.value) <= expected * (1 + 1e-9)


def test_a_rank_is_used_or_contradicted():
    known = conditioning.condition_number(diagonal(np.full(ROWS, 2.0)), rank=ROWS)
    assert (float(known.value), int(known.rank)) == (pytest.approx(1.0), ROWS)
    noisy = diagonal(np.append([9.0, 4.0, 1.0], 1e-7 * np.linspace(0.1, 1.0, ROWS - 3)))
    with pytest.raises(ValueError, match=r"rank=3 contradicts .* at least \d+ eigenvalues"):
        conditioning.condition_number(noisy, rank=3)
    cut = conditioning.condition_number(noisy, rank=3, rtol=1e-6)
    assert float(cut.value) == pytest.approx(9.0)
    for rank in (0, ROWS + 1):
        with pytest.raises(ValueError, match="rank must be"):
            conditioning.condition_number(noisy, rank=rank)


def test_operators_under_jit():
    def value(operator, rank):
        found = conditioning.condition_number(operator, rank=rank)
        return found.value, found.rank

    found = jax.jit(value)(diagonal([9.0, 4.0, 1.0]), 3)
    assert (float(found[0]), int(found[1])) == (pytest.approx(9.0), 3)
    # More eigenvalues than the rank, whose copies are not known: no number is better than a wrong.
    assert np.isnan(float(jax.jit(value)(diagonal(np.linspace(1, 2, ROWS)), 3)[0]))


def test_an_operator_that_is_not_finite():
    with pytest.raises(ValueError, match="NaN or infinite"):
        conditioning.condition_number(diagonal([np.nan, 1.0]))


def test_networks_whose_factors_lose_outputs():
    """Zeros; layers narrower than the outputs, against the dense matrix (LOBPCG's 1e-9)."""
    zero = conditioning.gauss_newton_linear_operator([np.zeros((60, 1200)), np.zeros((1, 60))])
    found = conditioning.condition_number(zero)
    assert np.isnan(float(found.value))
    assert int(found.rank) == 0
    for widths in ((520, 1, 2), (150, 5, 10)):
        narrow = brute.draw(np.random.default_rng(0), widths)
        operator = conditioning.gauss_newton_linear_operator(narrow)
        found = conditioning.condition_number(operator)
        dense = conditioning.condition_number(operator.as_matrix())
        assert int(found.rank) == int(dense.rank) == conditioning.generic_rank(widths)
        np.testing.assert_allclose(found.value, dense.value, rtol=1e-8)


@pytest.mark.parametrize(
    ("matrix", "options", "match"),
    [
        (np.ones((2, 3)), {}, "square"),
        (np.ones(3), {}, "matrix_or_operator"),
        (np.array([[1.0, 2.0], [0.0, 1.0]]), {}, "symmetric"),
        (np.full((2, 2), np.inf), {}, "NaN or infinite"),
        ("nonsense", {}, "matrix_or_operator must hold real numbers"),
        (object(), {}, "matrix_or_operator must hold real numbers"),
        (np.eye(2), {"rank": 3}, "rank"),
        (np.eye(2), {"rank": 0}, "rank"),
        (np.eye(2), {"rank": 1.5}, "rank must be an integer"),
        (np.eye(2), {"rank": True}, "rank must be an integer"),
        (np.eye(2), {"rtol": 1.5}, "rtol"),
        (lx.MatrixLinearOperator(jnp.ones((2, 2))), {}, "symmetric"),
    ],
)
def test_bad_input(matrix, options, match):
    with pytest.raises(ValueError, match=match):
        conditioning.condition_number(matrix, **options)


def test_float32_networks_in_a_float32_process():
    """Right to 1 % at 1e8, and a float64 matrix keeps its own precision."""
    rng = np.random.default_rng(0)
    q = [np.linalg.qr(rng.standard_normal((6, 6)))[0] for _ in range(3)]
    v = (q[0] * np.geomspace(1, 1e-4, 6) @ q[1].T).astype(np.float32)
    w = (q[2] * np.geomspace(1, 1e-4, 6) @ q[0].T).astype(np.float32)
    s = [np.linalg.svd(a.astype(np.float64), compute_uv=False) for a in (v, w)]
    want = (s[0][0] ** 2 + s[1][0] ** 2) / (s[0][-1] ** 2 + s[1][-1] ** 2)
    with jax.enable_x64(False):
        layers = [jnp.asarray(v), jnp.asarray(w)]
        matrix = conditioning.gauss_newton_linear(layers)
        operator = conditioning.gauss_newton_linear_operator(layers)
        found = [conditioning.condition_number(m).value for m in (matrix, operator)]
        found += [conditioning.linear_bound(layers).convex]
        np.testing.assert_allclose(found, want, rtol=1e-2)
        exact = conditioning.condition_number(with_spectrum([1.0, 0.5, 1e-10]))
        assert float(exact.value) == pytest.approx(1e10, rel=1e-4)
        assert jnp.ones(2).dtype == jnp.float32


# --- large dense matrices: both ends by shift and invert ------------------------------------------


@pytest.fixture
def small_is_large(monkeypatch):
    # The package shows the function of the same name, so the module is found by its name.
    monkeypatch.setattr(
        sys.modules["jaxttp.conditioning.condition_number"], "EFFORT", Effort(large=40)
    )


@pytest.mark.parametrize("kappa", [1e1, 1e9])
def test_both_ends_of_a_large_matrix(small_is_large, kappa):
    values = np.geomspace(3.0, 3.0 / kappa, 60)
    matrix = with_spectrum(values)
    matrix = 0.5 * (matrix + matrix.T)
    found = conditioning.condition_number(matrix)
    dense = conditioning.condition_number(matrix, spectrum=True)
    assert (found.kind, dense.kind) == ("iterative", "dense")
    # Rounding of the factorisation, eps * kappa, and the tolerance of the iteration.
    rounding = 1e-9 + 1e-14 * kappa
    assert float(found.value) == pytest.approx(float(dense.value), rel=rounding)
    assert float(found.rank_below) == pytest.approx(float(dense.rank_below), rel=rounding)
    assert int(found.rank) == 60
    assert float(found.tolerance) == pytest.approx(float(dense.tolerance))
    assert found.gap == np.inf
    assert not found.is_lower_bound


@pytest.mark.parametrize(("end", "kind"), [(0.0, "dense"), (1e-17, "dense"), (-1.0, "iterative")])
def test_a_singular_large_matrix_gets_all_eigenvalues(small_is_large, end, kind):
    matrix = np.diag([*np.linspace(1.0, 2.0, 49), end])
    found = conditioning.condition_number(matrix)
    assert found.kind == kind
    assert int(found.rank) == (50 if end == -1.0 else 49)
    assert float(found.value) == pytest.approx(2.0)


def test_a_rank_or_a_tolerance_below_full_gets_all_eigenvalues(small_is_large):
    matrix = np.diag([*np.linspace(1.0, 2.0, 49), 1e-8])
    assert float(conditioning.condition_number(matrix).value) == pytest.approx(2e8)
    for options in ({"rank": 49}, {"rtol": 1e-6}):
        found = conditioning.condition_number(matrix, **options)
        assert (found.kind, float(found.value)) == ("dense", pytest.approx(2.0))
    skew = np.eye(50)
    skew[0, 49] = 1e-3
    with pytest.raises(ValueError, match="symmetric"):
        conditioning.condition_number(skew)


def test_a_given_full_rank_is_not_cut(small_is_large):
    """A float32 matrix would be cut at n * 1e-7 lambda_max."""
    matrix = np.diag(np.geomspace(1.0, 2e-6, 50)).astype(np.float32)
    cut = conditioning.condition_number(matrix)
    assert int(cut.rank) < 50
    whole = conditioning.condition_number(matrix, rank=50)
    assert whole.kind == "iterative"
    assert float(whole.value) == pytest.approx(5e5, rel=1e-6)
