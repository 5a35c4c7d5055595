"""`jaxttp.cli.known_answers`: right here, and able to tell when something is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxttp.cli import known_answers as _known_answers
from jaxttp.cli.known_answers import KNOWN_ANSWERS, deviation


@pytest.fixture(autouse=True)
def as_users_run(monkeypatch):
    """32 bits, as `jaxttp doctor` runs."""
    with jax.enable_x64(False):
        yield


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_the_backend_knows_them(name):
    answer = KNOWN_ANSWERS[name]()
    assert answer.right
    assert answer.error <= answer.tolerance
    assert (answer.compilations, answer.wrong, answer.failure) == (1, 0, None)


def off(function, factor=1 + 1e-4):
    """The same, a little too large."""
    return lambda *args, **kwargs: jax.tree.map(
        lambda part: part * factor, function(*args, **kwargs)
    )


BROKEN = {
    "cross-entropy of 100,000 rows": (jax.nn, "logsumexp", 1 + 1e-4),
    "softmax behind three layers": (jax.nn, "softmax", float("nan")),
    "Cholesky, float32": (jnp.linalg, "cholesky", 1 + 1e-4),
    "Cholesky, float64": (jnp.linalg, "cholesky", 1 + 1e-9),
    "eigenvectors, float32": (jnp.linalg, "eigh", 1 + 1e-4),
    "eigenvectors, float64": (jnp.linalg, "eigh", 1 + 1e-9),
    "matrix product, full precision": (jnp, "matmul", 1 + 1e-4),
    "kernel of a network": (_known_answers, "empirical_ntk", 1 + 1e-4),
}


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_a_wrong_backend_is_found_out(name, monkeypatch):
    module, function, factor = BROKEN[name]
    monkeypatch.setattr(module, function, off(getattr(module, function), factor))
    answer = KNOWN_ANSWERS[name]()
    assert not answer.right
    assert answer.wrong == 1
    assert answer.error > answer.tolerance
    assert "install" in answer.remedy


def test_half_precision_products_are_found_out(monkeypatch):
    """What an accelerator does that is not asked for more: here a product of rounded numbers."""
    matmul = jnp.matmul
    rounded = lambda a: a.astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    monkeypatch.setattr(jnp, "matmul", lambda a, b, **kwargs: matmul(rounded(a), rounded(b)))
    assert not _known_answers.products().right


def test_every_compilation_is_looked_at(monkeypatch):
    """The second of three fails, the third is off: neither hides the other, the first is right."""
    calls = iter((1.0, None, 2.0))
    cholesky = jnp.linalg.cholesky

    def changing(matrix):
        factor = next(calls)
        if factor is None:
            raise RuntimeError("no such library")
        return factor * cholesky(matrix)

    monkeypatch.setattr(jnp.linalg, "cholesky", changing)
    answer = _known_answers.cholesky(3)
    assert (answer.compilations, answer.wrong) == (3, 2)
    assert answer.error == np.inf
    assert answer.failure == "RuntimeError: no such library"


def test_deviation():
    known = np.array([[1.0, -4.0]])
    assert deviation([[1.0, -4.0]], known) == 0
    assert deviation([[1.0, -3.0]], known) == 0.25
    assert deviation([[float("nan"), -4.0]], known) == np.inf
    with pytest.raises(ValueError, match="shape"):
        deviation([1.0, -4.0], known)
