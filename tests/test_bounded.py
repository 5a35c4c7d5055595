"""Compiled programs are dropped before the process may map no more memory."""

import jax

from jaxttp import _bounded


def test_programs_are_dropped_beyond_the_share_alone(monkeypatch, tmp_path):
    dropped = []
    monkeypatch.setattr(jax, "clear_caches", lambda: dropped.append(1))
    for name, text in (("ALLOWED", "10\n"), ("USED", "one\n" * 5)):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(_bounded, name, tmp_path / name)
    assert _bounded.bound_programs()  # 5 of 10
    (tmp_path / "USED").write_text("one\n" * 4)
    assert not _bounded.bound_programs()
    (tmp_path / "ALLOWED").unlink()  # another system
    assert not _bounded.bound_programs()
    assert dropped == [1]
