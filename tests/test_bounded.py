"""Compiled programs are dropped before the process may map no more memory."""

import jax.numpy as jnp

from jaxttp._core import bounded as _bounded
from jaxttp._core.compile import drop_programs, jit


def test_programs_are_dropped_beyond_the_share_alone(monkeypatch, tmp_path):
    dropped = []
    monkeypatch.setattr(_bounded, "drop_programs", lambda: dropped.append(1))
    for name, text in (("ALLOWED", "10\n"), ("USED", "one\n" * 5)):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(_bounded, name, tmp_path / name)
    assert _bounded.bound_programs()  # 5 of 10
    (tmp_path / "USED").write_text("one\n" * 4)
    assert not _bounded.bound_programs()
    (tmp_path / "ALLOWED").unlink()  # another system
    assert not _bounded.bound_programs()
    assert dropped == [1]


def test_dropped_programs_are_compiled_again():
    traced = []

    @jit
    def double(x):
        traced.append(x.shape)
        return 2 * x

    for _ in range(2):
        double(jnp.ones(3))
    drop_programs()
    assert double(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert len(traced) <= 2  # JAX may keep the equations
