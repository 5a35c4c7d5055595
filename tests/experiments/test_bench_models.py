"""Small runs of the measurements of adapters and of full-size networks."""

import pytest

from experiments.bench import adapters, full_size


@pytest.mark.slow
def test_adapters(capsys):
    rows = adapters.main(["--preset", "smoke"])
    cases = [row.case for row in rows]
    assert cases == ["LoRA, rank 2, α/r = 1", "head", "last block and head", "all weights"]
    sizes = [row.parameters for row in rows]
    assert sizes[1] < sizes[0] < sizes[2] < sizes[3] == 77_093
    assert all(0 <= time <= 10 for row in rows for time in row.forecast.values())
    # A forecast at a small rate is right to the step or nearly.
    assert all(row.error <= 0.2 for row in rows)
    assert capsys.readouterr().out.count("\n") == 2 + len(rows)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_processes")
def test_a_full_size_network_in_a_process_of_its_own(capfd):
    full_size.main(["vgg5", "--samples", "5", "--image-size", "32", "--train", "head"])
    row = capfd.readouterr().out.splitlines()[-1]
    assert row.startswith("| vgg5 | head |")
    assert "exact" in row


@pytest.mark.slow
def test_a_network_that_fails_is_said_and_does_not_stop_the_table(capfd):
    full_size.main(["vgg7"])
    out = capfd.readouterr()
    assert out.out.splitlines()[-1].startswith("| vgg7 | failed with 1")
    assert "model='vgg7'" in out.err
