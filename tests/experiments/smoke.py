"""What every figure script must do with its smallest preset."""

from pathlib import Path

from experiments.harness import load_script, run_script


def check_smoke(name: str, folder: Path) -> None:
    """It runs, draws every picture, and draws it again without computing."""
    outcome = run_script(name, "smoke", results=folder)
    claim = load_script(name).claim
    assert {path.stem for path in outcome.pictures} == set(claim)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in outcome.pictures)
    assert set(outcome.measured) == set(claim)
    assert all(outcome.measured.values())
    lines = (outcome.folder / "records.jsonl").read_text()
    again = run_script(name, "smoke", results=folder, only_plot=True)
    assert again.measured == outcome.measured
    assert (outcome.folder / "records.jsonl").read_text() == lines
