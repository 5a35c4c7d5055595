"""The page needs nothing else, reads on both grounds, and says what the results say."""

import dataclasses
import html
import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxttp import conditioning
from jaxttp.cli import app
from jaxttp.plots import report_html, results_html
from tests import results


@pytest.fixture(scope="module")
def text():
    return report_html(results.TaskReport())


def alone(text):
    """Nothing is fetched: no scripts, no links, no addresses but those of XML's own names."""
    assert not re.search(r"<(script|link|iframe)\b|@import|url\((?!#)", text)
    for kind, address in re.findall(r'\b(src|(?:xlink:)?href)="([^"]*)"', text):
        assert address.startswith(("#", "data:image/svg+xml;base64,")), (kind, address)
    return re.findall(r"https?://[^\"' <]+", text)


@pytest.mark.slow
def test_the_page_has_curves_spectrum_sweep_settings_and_versions(text):
    report = results.TaskReport()
    assert text.count("<figure>") == text.count("<img ") == 3
    prediction = report.forecast.prediction
    for threshold, step in prediction.steps.items():
        assert f"<td>{100 * threshold:g} % of the loss decrease left</td><td>{step}</td>" in text
    assert f"<td>samples per class</td><td>{report.forecast.settings.samples_per_class}" in text
    for name, version in report.versions.items():
        assert f"<td>{name}</td><td>{version}</td>" in text
    assert html.escape(report.forecast.task.description) in text
    assert "real steps" in text
    best = report.sweep.sweep.settings[report.sweep.fastest]
    assert f"use {best}: " in text


@pytest.mark.slow
def test_what_diverges_is_said():
    report = results.TaskReport()
    steps = dict.fromkeys(report.forecast.prediction.steps, -1)
    prediction = dataclasses.replace(report.forecast.prediction, steps=steps, stable=False)
    forecast = dataclasses.replace(report.forecast, prediction=prediction, run=None)
    text = report_html(dataclasses.replace(report, forecast=forecast))
    assert "<b>diverges</b>at this learning rate" in text
    assert text.count("<td>diverges</td><td>–</td>") == 3


@pytest.mark.slow
def test_a_task_of_a_hostile_table_is_text():
    """Names of classes, files and columns come into its words, which the page repeats."""
    report = results.TaskReport()
    naughty = r"</title><script>alert(1)</script><img src=x onerror=alert(1)> $\frac$"
    task = dataclasses.replace(report.forecast.task, description=naughty)
    forecast = dataclasses.replace(report.forecast, task=task)
    text = report_html(dataclasses.replace(report, forecast=forecast))
    alone(text)
    assert text.count(html.escape(naughty)) >= 2


@pytest.mark.slow
def test_the_command_writes_the_page(monkeypatch, tmp_path):
    monkeypatch.setattr("jaxttp.pipeline.report_task", lambda *_, **__: results.TaskReport())
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["report", "--data", "wine"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "written: report.html"
    assert (tmp_path / "report.html").read_text() == report_html(results.TaskReport())
    done = CliRunner().invoke(app, ["report", "--json", "--output", str(tmp_path / "new")])
    assert sorted(json.loads(done.stdout)) == ["forecast", "spectrum", "sweep", "versions"]
    assert (tmp_path / "new" / "report.html").exists()


def test_any_results_on_a_page():
    bounds = conditioning.linear_bound([np.eye(3), np.diag([1.0, 2.0, 3.0])])
    text = results_html({"A <b>": bounds, "sum": results.StepTime()}, title="Mine & yours")
    assert text.count("<img ") == 2
    assert "<h2>A &lt;b&gt;</h2>" in text
    assert "<title>Mine &amp; yours</title>" in text
    assert f" convex {float(bounds.convex):.6g} " in " ".join(text.split())
    assert {one for one in alone(text) if "w3.org" not in one} == set()


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [({}, ValueError, "at least one result"), ({"a": "text"}, TypeError, "is no result")],
)
def test_what_is_no_result(given, kind, message):
    with pytest.raises(kind, match=message):
        results_html(given)
