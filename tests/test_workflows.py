"""Workflows of a public host ask for what is there."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(path):
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_are_those_of_the_repository(path):
    source = (ROOT / "noxfile.py").read_text()
    named = set(re.findall(r"^def (\w+)\(session", source, re.MULTILINE))
    asked = set(re.findall(r"nox -s (\w+)", path.read_text()))
    asked |= set(re.findall(r'"(nightly|jax)\b', path.read_text()))
    assert asked <= named
    for step in steps(path):
        assert "@" in step.get("uses", "@")
        assert not step.get("run", "").startswith(".ci/") or (ROOT / step["run"]).stat().st_mode & 1


def test_only_the_step_that_publishes_may_ask_for_an_identity():
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "permissions" not in release["jobs"]["build"]
    assert not re.search("password|secrets", (ROOT / ".github/workflows/release.yml").read_text())
