import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxttp.representation import cka_table, kernel_distance, kernel_rate, linear_cka

RNG = np.random.default_rng(3)


def psd(n, seed, rank=None):
    a = np.random.default_rng(seed).standard_normal((n, rank or n))
    return a @ a.T


def hsic(k, m):
    """CKA's other form: traces of centred Gram matrices."""
    n = len(k)
    c = np.eye(n) - 1 / n
    return np.trace(c @ k @ c @ m)


def oracle_cka(x, y):
    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))


@pytest.mark.parametrize("shapes", [((30, 4), (30, 6)), ((6, 20), (6, 15)), ((6, 20), (6, 1))])
def test_cka_equals_hsic(shapes):
    x, y = (RNG.standard_normal(shape) + 2.0 for shape in shapes)
    np.testing.assert_allclose(linear_cka(x, y), oracle_cka(x, y), rtol=1e-10)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-5, 1e5), shift=st.floats(-50, 50))
def test_cka_does_not_see_rotation_scale_shift_and_order(seed, scale, shift):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((12, 5)), rng.standard_normal((12, 3))
    q, _ = np.linalg.qr(rng.standard_normal((5, 5)))
    order = rng.permutation(12)
    moved = linear_cka((scale * x @ q + shift)[order], y[order])
    # A shift of 50 against a spread of 1e-5 leaves 1e-10 of the digits.
    np.testing.assert_allclose(moved, linear_cka(x, y), rtol=1e-8 if scale < 1e-2 else 1e-10)
    np.testing.assert_allclose(linear_cka(x @ q, x), 1.0, rtol=1e-12)
    assert 0 <= float(linear_cka(x, y)) <= 1 + 1e-12


def test_cka_is_not_invariant_to_every_linear_map():
    x = RNG.standard_normal((50, 4))
    assert float(linear_cka(x, x * np.array([10.0, 1, 1, 1]))) < 0.8


def test_tables():
    a, b, c = (RNG.standard_normal((9, h)) for h in (3, 5, 12))
    table = cka_table({"a": a, "b": b, "c": c.reshape(9, 2, 6)})
    assert table.rows == table.columns == ("a", "b", "c")
    expected = [[oracle_cka(x, y) for y in (a, b, c)] for x in (a, b, c)]
    np.testing.assert_allclose(table.values, expected, rtol=1e-10)
    other = cka_table({"a": a}, {"b": b, "c": c})
    np.testing.assert_allclose(other.values, [expected[0][1:]], rtol=1e-10)
    assert (other.rows, other.columns) == (("a",), ("b", "c"))


@pytest.mark.parametrize("shape", [(6, 6), (3, 2, 3, 2)])
def test_kernel_distance_is_one_minus_the_cosine(shape):
    k, m = psd(6, 0).reshape(shape), psd(6, 1).reshape(shape)
    cosine = np.vdot(k, m) / (np.linalg.norm(k) * np.linalg.norm(m))
    np.testing.assert_allclose(kernel_distance(k, m), 1 - cosine, rtol=1e-10)
    np.testing.assert_allclose(kernel_distance(k, 1e9 * k), 0.0, atol=1e-30)


def test_kernel_distance_keeps_its_digits_near_zero():
    """1 - cosine would be rounding here."""
    k, d = np.eye(4), np.diag([1.0, -1.0, 1.0, -1.0])
    np.testing.assert_allclose(kernel_distance(k, k + 1e-9 * d), 0.5e-18, rtol=1e-6)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), rank=st.integers(1, 5))
def test_psd_kernels_are_at_most_one_apart(seed, rank):
    distance = float(kernel_distance(psd(5, seed, rank), psd(5, seed + 1, rank)))
    assert 0 <= distance <= 1 + 1e-12


def test_rates():
    kernels = [psd(4, seed) for seed in range(4)]
    rates = kernel_rate(kernels, np.array([0.0, 1.0, 3.0, 3.5]))
    expected = [
        float(kernel_distance(kernels[i], kernels[i + 1])) / dt
        for i, dt in enumerate((1.0, 2.0, 0.5))
    ]
    np.testing.assert_allclose(rates, expected, rtol=1e-12)
    np.testing.assert_array_equal(rates, kernel_rate(np.stack(kernels), [0.0, 1.0, 3.0, 3.5]))


def test_what_is_known_at_run_time_only_is_refused_then():
    with pytest.raises(Exception, match="must not be zero"):
        jax.jit(kernel_distance)(psd(4, 0), jnp.zeros((4, 4))).block_until_ready()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kernel_distance(np.eye(2), np.eye(3)), "second must have the shape"),
        (lambda: kernel_distance(np.eye(2), np.zeros((2, 2))), "second must not be zero"),
        (lambda: kernel_distance(np.full((2, 2), np.nan), np.eye(2)), "first holds"),
        (lambda: kernel_distance(np.eye(2, dtype=int), np.eye(2, dtype=int)), "first must be"),
        (lambda: kernel_rate([np.eye(2)], [0.0]), "two at least"),
        (lambda: kernel_rate([np.eye(2)] * 2, [0.0]), "one time"),
        (lambda: kernel_rate([np.eye(2)] * 2, [1.0, 1.0]), "ts must increase"),
        (lambda: linear_cka(np.eye(3), np.eye(4)), "samples of first"),
        (lambda: linear_cka(np.ones((3, 2)), np.eye(3)), "first .*all are the same"),
        (lambda: cka_table({}), "first must name"),
        (lambda: cka_table({"a": np.eye(3)}, {"b": np.eye(4)}), "same samples"),
        (lambda: cka_table({"a": np.ones((3, 3))}), r"first\['a'\].*all are the same"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
