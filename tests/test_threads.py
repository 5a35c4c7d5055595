"""LAPACK's threads in this process; what importing and compiling does, in a process of its own."""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg  # loads the BLAS that compiled programs use  # noqa: F401
from threadpoolctl import threadpool_info

import jaxttp
from jaxttp._core.xla_cpu import threads
from jaxttp._core.xla_cpu.threads import VARIABLES, decompose, limited, user_decides

PACKAGE = Path(jaxttp.__file__).parent


def counts() -> dict[str, int]:
    return {one["filepath"]: one["num_threads"] for one in threadpool_info()}


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_is_the_users_word(name, monkeypatch):
    for other in VARIABLES:
        monkeypatch.setenv(other, "")
    assert not user_decides()
    monkeypatch.setenv(name, "8")
    assert user_decides()
    found = counts()
    with limited(100):
        assert counts() == found


@pytest.mark.parametrize(("cores", "wanted"), [(1, 1), (2, 1), (8, 4), (64, 24)])
def test_a_large_matrix_gets_half_of_the_cores_and_what_was_found_is_restored(
    cores, wanted, monkeypatch
):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: range(cores), raising=False)
    asked, found = [], counts()
    real = threads.threadpool_limits
    monkeypatch.setattr(threads, "threadpool_limits", lambda count: asked.append(count) or real(1))
    for rows in (1999, 6000):
        with contextlib.suppress(RuntimeError), limited(rows):
            assert set(counts().values()) == {1}
            raise RuntimeError
    assert asked == [1, wanted]
    assert counts() == found


def test_known_large_matrices_alone_are_decomposed_in_a_scope(monkeypatch):
    asked = []
    real = threads.limited
    monkeypatch.setattr(threads, "LARGE", 8)
    monkeypatch.setattr(threads, "limited", lambda rows: asked.append(rows) or real(rows))
    matrix = jnp.diag(jnp.arange(8.0))
    # Eigenvalues of a diagonal matrix; a GPU's solver rounds them.
    found = decompose(jnp.linalg.eigvalsh, matrix)
    np.testing.assert_allclose(found, jnp.arange(8.0), rtol=1e-14, atol=1e-14)
    for other in (matrix[:7, :7], matrix[None]):
        decompose(jnp.linalg.eigvalsh, other)
    parts = decompose(jnp.linalg.svd, matrix[:1], full_matrices=False)
    assert [part.shape for part in parts] == [(1, 1), (1,), (1, 8)]
    assert asked == [8]


def test_every_decomposition_of_the_library_asks_here():
    """What a program computes with LAPACK behind this module's back runs on all threads."""
    names = "eig|eigh|eigvals|eigvalsh|svd|svdvals|cholesky|qr|inv|pinv|solve|lstsq|det|slogdet"
    direct = re.compile(rf"jnp\.linalg\.({names})\(|jnp\.linalg\.norm\(.*ord=2")
    for path in PACKAGE.rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if ">>>" not in line and "decompose(" not in line:
                assert not direct.search(line), f"{path}:{number} {line.strip()}"


@pytest.mark.slow  # a process of its own, which imports JAX: what happened before counts here
@pytest.mark.skipif(
    len([name for name in counts() if ".libs" in name]) < 2 or os.cpu_count() < 2,
    reason="needs the wheels of NumPy and SciPy and two cores",
)
def test_a_users_compiled_step_limits_scipys_library_and_no_other():
    """Importing changes nothing; compiling one of our functions does."""
    code = """
        import jax, jax.numpy as jnp, jaxttp
        from threadpoolctl import threadpool_info
        def threads(package):
            found = [one["num_threads"] for one in threadpool_info()
                     if package + ".libs" in one["filepath"]]
            print(*found)
        threads("numpy")
        jax.jit(lambda x: jaxttp.ntk.eigendecomposition(x).values)(jnp.eye(4)).block_until_ready()
        threads("numpy")
        threads("scipy")
    """
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**environment, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    before, after, ours = (int(word) for word in found.stdout.split())
    assert before == after > 1
    assert ours == 1
