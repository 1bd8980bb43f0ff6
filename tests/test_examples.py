"""Every example runs as a script, in an empty folder, on a CPU, without network."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
NEEDS = {"serve": ("faiss", "fastapi", "httptools"), "text": ("tokenizers",)}  # packages of the extras
FORKS = {"own_recipe_compare"}  # its trainings import the script, so it needs a process of its own
PRINTS = {
    "quickstart": ("in-batch and uniform: recall@20", "title"),
    "own_sampler": ("positive: one per query", "recall"),
    "own_recipe_compare": ("robust", "uns"),
    "text": ("harbour",),
    "serve": ('"results"', '"score"'),
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_script_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs to its end and prints the promised output."""
    for package in NEEDS.get(path.stem, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path / "cache"))
    if path.stem in FORKS:
        done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        runpy.run_path(str(path), run_name="__main__")
        printed = capsys.readouterr().out
    for words in PRINTS[path.stem]:
        assert words in printed


def test_the_notebook_was_executed() -> None:
    """Its cells were run in order, none of them failed, and together they show output."""
    cells = json.loads((ROOT / "examples" / "tour.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs
    assert all(output["output_type"] != "error" for output in outputs)
