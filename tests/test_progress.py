"""How long a job still takes: by the pace of late, in lines that logs can hold."""

import io
import itertools
import time

import pytest

from jaxttp import print_progress
from jaxttp._core.progress import RECENT, readable_time, seconds_left


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_is_by_the_pace_of_late(clock):
    """A hundred calls that took no time do not count for long."""
    out = io.StringIO()
    tell = print_progress("kernel", every=0, to=out)
    for done in range(101):
        tell(done, 200)
    for done in range(101, 101 + RECENT):
        clock[0] += 3.0
        tell(done, 200)
    lines = out.getvalue().splitlines()
    left = 200 - 100 - RECENT
    assert lines[-1] == f"kernel: {100 + RECENT} of 200, {readable_time(3.0 * left)} left"
    assert lines[0] == "kernel: 0 of 200"
    assert seconds_left([(0.0, 5)], 9) is None


def test_lines_come_seldom_and_the_end_always(clock):
    out = io.StringIO()
    tell = print_progress(to=out)
    for done in range(1, 61):
        clock[0] += 1.0
        tell(done, 60)
    told = [int(line.split()[0]) for line in out.getvalue().splitlines()]
    assert told == [1, 11, 21, 31, 41, 51, 60]


def test_stages_have_paces_of_their_own(clock):
    """As those of `predict_training_time`; and a kernel that begins anew is another one."""
    out = io.StringIO()
    tell = print_progress("not this", every=100, to=out)
    calls = [
        ("kernel", 0, 4),
        ("kernel", 2, 4),
        ("dynamics", 0, 1),
        ("kernel", 3, 4),
        ("kernel", 1, 4),
    ]
    for call, _ in zip(calls, itertools.count(), strict=False):
        clock[0] += 1.0
        tell(*call)
    lines = out.getvalue().splitlines()
    assert lines == ["kernel: 0 of 4", "dynamics: 0 of 1", "kernel: 3 of 4", "kernel: 1 of 4"]


def test_bad_input():
    with pytest.raises(ValueError, match="every must be at least 0"):
        print_progress(every=-1)
