"""Two processes with two devices each, joined over loopback."""

import pytest

from experiments.bench import processes


@pytest.mark.slow
def test_two_processes_agree_with_one_device(quick_processes, capfd):
    """Each process compares everything with one device of its own; a hang ends by a timeout."""
    assert processes.main(["--count", "2", "--devices", "2"]) == 0
    said = capfd.readouterr().out
    assert "2 processes, 4 devices" in said
    assert len([line for line in said.splitlines() if "e-" in line or "e+" in line]) == 20


@pytest.mark.slow
def test_a_process_that_fails_is_told(quick_processes, monkeypatch, capfd):
    """One that is alone waits for the others in vain."""
    monkeypatch.setattr(processes, "TIMEOUT", 20)
    monkeypatch.setattr(processes, "MODULE", "experiments.bench.nothing")
    assert processes.main([]) != 0
    assert "No module named" in capfd.readouterr().err
