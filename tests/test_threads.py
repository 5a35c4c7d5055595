"""The policy for any machine, by its pure parts; what it does to this process, in processes."""

import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg  # loads the BLAS that compiled programs use  # noqa: F401
from threadpoolctl import threadpool_info, threadpool_limits

from jaxttp._core.xla_cpu import threads as _threads
from jaxttp._core.xla_cpu.threads import (
    VARIABLES,
    cores_of,
    count_for,
    decompose,
    limited,
    of_compiled_programs,
    settle,
    threads_for,
    user_decides,
)

ROOT = Path(_threads.__file__).parents[1]


def counts() -> dict[str, int]:
    return {one["filepath"]: one["num_threads"] for one in threadpool_info()}


@pytest.mark.parametrize(
    ("cores", "wanted"), [(1, (1, 1, 1)), (2, (1, 1, 1)), (8, (1, 4, 4)), (64, (1, 8, 24))]
)
def test_small_matrices_get_one_thread_and_large_ones_at_most_half_of_the_cores(cores, wanted):
    assert tuple(threads_for(rows, cores) for rows in (1999, 2000, 6000)) == wanted
    assert all(threads_for(rows, cores) == 1 for rows in (0, 1, 500, 1024))


def test_more_rows_and_more_cores_never_mean_fewer_threads():
    table = np.array([[threads_for(n, c) for n in range(0, 9000, 100)] for c in range(1, 129)])
    assert (np.diff(table, axis=0) >= 0).all()
    assert (np.diff(table, axis=1) >= 0).all()
    assert (table >= 1).all()


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_is_the_users_word(name):
    assert user_decides({name: "8"})
    assert not user_decides({name: ""})
    assert not user_decides({"PATH": "/bin"})


@pytest.mark.parametrize(
    ("affinity", "quota", "cores"),
    [
        (64, "max", 64),
        (64, "max 100000\n", 64),
        (64, "200000 100000\n", 2),
        (64, "50000 100000", 1),  # half a core
        (2, "1600000 100000", 2),
        (8, "", 8),
        (8, "nonsense", 8),
        (8, "100000 0", 8),
    ],
)
def test_a_container_counts_its_quota(affinity, quota, cores):
    assert cores_of(affinity, quota) == cores


def test_a_limit_that_is_not_ours_holds_for_all_libraries():
    assert count_for(8, {"numpy": 16, "scipy": 1}, {"scipy": 16}) == 8
    assert count_for(32, {"numpy": 16, "scipy": 1}, {"scipy": 16}) == 16
    assert count_for(8, {"numpy": 1, "scipy": 1}, {"scipy": 16}) == 1  # threadpool_limits(1)
    assert count_for(8, {"numpy": 16, "scipy": 4}, {"scipy": 16}) == 4  # set after ours
    assert count_for(8, {"numpy": 16, "scipy": 2}, {}) == 2  # and before
    assert count_for(1, {"numpy": 16}, {}) == 1
    assert count_for(8, {}, {}) == 8


def test_only_scipys_own_library_belongs_to_compiled_programs():
    site = "/usr/lib/python3/site-packages"
    wheels = [f"{site}/numpy.libs/o.so", f"{site}/scipy.libs/o.so", f"{site}/faiss.libs/o.so"]
    assert of_compiled_programs(wheels) == [wheels[1]]
    macos = [f"{site}/numpy/.dylibs/o.dylib", f"{site}/scipy/.dylibs/o.dylib"]
    assert of_compiled_programs(macos) == [macos[1]]
    conda = ["/opt/conda/lib/libopenblas.so", f"{site}/faiss.libs/o.so", f"{site}/torch/lib/m.so"]
    assert of_compiled_programs(conda) == [conda[0]]
    assert of_compiled_programs([]) == []


@pytest.fixture
def sixteen(monkeypatch):
    """As if there were 16 cores, and nothing said in the environment."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_threads, "_cores", lambda: 16)


def test_a_scope_is_restored_also_after_an_error(sixteen):
    found = counts()

    def work():
        with limited(100):
            assert set(counts().values()) == {1}
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        work()
    assert counts() == found


def test_scopes_of_several_threads_take_turns_and_leave_what_the_first_found(sixteen):
    settle()
    found = counts()
    entered = threading.Event()

    def other():
        with limited(6000):
            entered.set()

    thread = threading.Thread(target=other)
    with limited(100):
        thread.start()
        assert not entered.wait(0.1)
        assert set(counts().values()) == {1}
    thread.join(10)
    assert entered.is_set()
    assert counts() == found


def test_nothing_is_touched_where_a_variable_is_set(sixteen, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = counts()
    with limited(100):
        assert counts() == found


def test_a_limit_of_the_users_is_not_exceeded(sixteen, monkeypatch):
    settle()
    with threadpool_limits(1):
        inside = counts()
        with limited(6000):
            assert set(counts().values()) == {1}
        assert counts() == inside


def test_a_known_large_matrix_is_decomposed_in_a_scope_and_others_are_not(sixteen, monkeypatch):
    seen = []
    monkeypatch.setattr(_threads, "LARGE", 8)
    monkeypatch.setattr(_threads, "ROWS", 2)
    monkeypatch.setattr(_threads, "_apply", lambda: seen.append(list(_threads._scopes)))

    def values(matrix):
        return decompose(jnp.linalg.eigvalsh, matrix)

    matrix = jnp.diag(jnp.arange(8.0))
    # Eigenvalues of a diagonal matrix; a GPU's solver rounds them.
    np.testing.assert_allclose(values(matrix), jnp.arange(8.0), rtol=1e-14, atol=1e-14)
    assert seen == [[4]]
    values(matrix[:7, :7])
    jax.jit(values)(matrix)
    jax.vmap(values)(matrix[None])
    decompose(jnp.linalg.eigvalsh, matrix[None])
    assert seen == [[4]]


def test_options_and_further_arguments_are_passed_on():
    a, b = jnp.array([[2.0, 1.0], [1.0, 3.0]]), jnp.array([1.0, 2.0])
    np.testing.assert_array_equal(decompose(jnp.linalg.solve, a, b), jnp.linalg.solve(a, b))
    found = decompose(jnp.linalg.svd, a[:1], full_matrices=False)
    assert [part.shape for part in found] == [(1, 1), (1,), (1, 2)]


def test_every_decomposition_of_the_library_asks_here():
    """What a program computes with LAPACK behind this module's back runs on all threads."""
    names = "eig|eigh|eigvals|eigvalsh|svd|svdvals|cholesky|qr|inv|pinv|solve|lstsq|det|slogdet"
    direct = re.compile(rf"jnp\.linalg\.({names})\(|jnp\.linalg\.norm\(.*ord=2")
    for path in Path(_threads.__file__).parent.rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if ">>>" not in line and "decompose(" not in line:
                assert not direct.search(line), f"{path}:{number} {line.strip()}"


class Fake:
    """A library whose number of threads is written down."""

    user_api, internal_api = "blas", "openblas"

    def __init__(self, name: str, threads: int):
        self.filepath, self.threads = f"/site-packages/{name}.libs/o.so", threads

    def get_num_threads(self):
        return self.threads

    def set_num_threads(self, threads):
        self.threads = threads


@pytest.fixture
def machine(sixteen, monkeypatch):
    """A fresh process on 16 cores: the libraries of NumPy and SciPy."""
    found = [Fake("numpy", 16), Fake("scipy", 16)]
    monkeypatch.setattr(_threads, "_affinity", lambda: 16)
    monkeypatch.setattr(_threads, "_handles", lambda: found)
    for name, value in (("_compiled", []), ("_before", {}), ("_found", {}), ("_scopes", [])):
        monkeypatch.setattr(_threads, name, value)
    return found


def test_tracing_settles_scipys_library_once(machine):
    numpy, scipy = machine
    jax.eval_shape(lambda x: decompose(jnp.linalg.eigvalsh, x), jnp.eye(2))
    assert (numpy.threads, scipy.threads) == (16, 1)
    scipy.threads = 16  # the user's word, later
    settle()
    assert scipy.threads == 16


def test_a_limit_in_force_is_left_alone_and_settled_when_it_ends(machine):
    scipy = machine[1]
    scipy.threads = 4
    settle()
    assert scipy.threads == 4
    scipy.threads = 16
    settle()
    assert scipy.threads == 1


def test_nothing_is_settled_where_a_variable_is_set(machine, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "16")
    settle()
    assert [one.threads for one in machine] == [16, 16]


def test_the_large_scope_raises_what_was_settled_and_a_trace_inside_it_settles_for_later(machine):
    numpy, scipy = machine
    with limited(6000):
        assert (numpy.threads, scipy.threads) == (8, 8)
        settle()
        assert (numpy.threads, scipy.threads) == (8, 8)
    assert (numpy.threads, scipy.threads) == (16, 1)
    with limited(6000):
        assert (numpy.threads, scipy.threads) == (8, 8)
        with limited(10):
            assert (numpy.threads, scipy.threads) == (1, 1)
        assert (numpy.threads, scipy.threads) == (8, 8)
    assert (numpy.threads, scipy.threads) == (16, 1)


@pytest.mark.slow  # a process of its own, which imports JAX: what happened before counts here
@pytest.mark.skipif(
    len([name for name in counts() if ".libs" in name]) < 2 or _threads._affinity() < 2,
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
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    cores = min(_threads._affinity(), _threads.MOST)
    assert [int(word) for word in found.stdout.split()] == [cores, cores, 1]
