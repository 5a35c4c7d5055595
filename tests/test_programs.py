"""Compiled programs that outlive the process: kept for commands alone."""

import os

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxttp._core import process
from jaxttp._core.process import hush, keep_compiled

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A user's cache folder, in a process whose JAX keeps none; afterwards it is as it was."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "jaxttp"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def is_unchanged():
    return jax.config.jax_compilation_cache_dir is None


def test_the_folder_is_the_users_alone_and_jaxs_own_wins(folder, tmp_path):
    words = keep_compiled()
    (made,) = folder.iterdir()
    assert words == f"kept in {made}"
    assert jax.config.jax_compilation_cache_dir == str(made)
    assert made.stat().st_mode & 0o077 == 0
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert keep_compiled() == f"kept in {tmp_path}"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)


def test_a_command_can_be_told_not_to(folder):
    assert keep_compiled(False) == "not kept"
    assert is_unchanged()
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_or_belongs_to_others_is_left_alone(folder, monkeypatch):
    folder.write_text("a file")
    assert keep_compiled().startswith("not kept: ")
    assert is_unchanged()
    folder.unlink()
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert keep_compiled().endswith("belongs to another user")
    assert is_unchanged()


def test_a_folder_that_has_grown_too_large_is_emptied(folder, monkeypatch):
    monkeypatch.setattr(process, "LIMIT", 999)
    for size, left in ((900, 1), (200, 0)):
        keep_compiled()
        (made,) = folder.iterdir()
        (made / f"{size}-cache").write_bytes(bytes(size))
        jax.config.update("jax_compilation_cache_dir", None)
        keep_compiled()
        jax.config.update("jax_compilation_cache_dir", None)
        assert len(list(made.iterdir()) if made.exists() else []) == left


@pytest.mark.parametrize(("plugin", "level"), [(None, "3"), ("libtpu", None)])
def test_false_alarms_are_not_shown_and_an_accelerators_words_are(plugin, level, monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: name == plugin or None)
    hush()
    assert os.environ.get("TF_CPP_MIN_LOG_LEVEL") == level
