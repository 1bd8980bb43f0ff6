"""The wheel works alone: installed where the repository is not, it trains, recommends, reports and serves."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import urllib.request
import zipfile
from email.parser import Parser
from pathlib import Path

import polars as pl
import pytest

import sparring
from sparring.data.synthetic_world import SyntheticWorld
from support.settings import quick_words

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sparring"

# One process for all commands: each would import torch again.
COMMANDS = """
import json, sys
import sparring
from sparring.cli import main
print(sparring.__file__, flush=True)
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the source distribution."""
    for module in ("build", "hatchling"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: the wheel was not built")
    out = tmp_path_factory.mktemp("dist")
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    [path] = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment: Sparring from the wheel, everything else from the environment of the tests.

    A path in a .pth file is searched for modules, but its own .pth files are not read, so the editable installation of
    the tests' environment does not exist there.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    python = next(path for path in (folder / "bin" / "python", folder / "Scripts" / "python.exe") if path.exists())
    quiet = ["--quiet", "--disable-pip-version-check"]
    words = [
        sys.executable,
        "-m",
        "pip",
        *quiet,
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [site] = [path.parent for path in folder.rglob("sparring") if path.is_dir()]
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return python


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COVERAGE_PROCESS_CONFIG")}


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    """Pages, styles, tables and py.typed are inside, nothing else is, and the metadata has no upper bound on torch."""
    ours = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        facts = Parser().parsestr(archive.read(metadata).decode())
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert names == ours
    assert "sparring/py.typed" in names
    assert facts["Version"] == sparring.__version__
    assert "torch>=2.11" in facts.get_all("Requires-Dist", [])


def test_the_installed_wheel_trains_recommends_reports_and_serves(
    installed: Path, small_world: SyntheticWorld, tmp_path: Path
) -> None:
    """Without the repository: a run, its lists, a comparison with its report, and a service with its whole page."""
    world, quick = small_world.interactions, quick_words()
    pl.DataFrame({"user_id": world.queries, "item_id": world.items}).write_csv(tmp_path / "pairs.csv")
    commands = [
        ["--version"],
        ["train", "--data", "pairs.csv", "--out", "runs/first", *quick],
        ["recommend", "runs/first", "--query", "7", "-k", "5"],
        ["compare", "--data", "pairs.csv", "--recipes", "uns,ssl_pop", "--seeds", "1", "--out", "compare", *quick],
    ]
    words = [str(installed), "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    place, version, *_ = done.stdout.splitlines()
    assert Path(place).is_relative_to(installed.parents[1])
    assert version == f"sparring {sparring.__version__}"
    assert (tmp_path / "runs" / "first" / "result.json").is_file()
    assert "<style" in (tmp_path / "compare" / "report.html").read_text()

    words = [str(installed.with_name("sparring")), "serve", "runs/first", "--port", "0"]
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), text=True, stderr=subprocess.PIPE) as service:
        assert service.stderr is not None
        try:
            address = json.loads(service.stderr.readline())["url"]
            for file in (PACKAGE / "serving" / "http" / "page").iterdir():
                place = "" if file.name == "index.html" else f"page/files/{file.name}"
                with urllib.request.urlopen(address + place, timeout=30) as answer:
                    assert answer.read() == file.read_bytes()
            body = json.dumps({"user": 7, "k": 5}).encode()
            request = urllib.request.Request(f"{address}v1/recommend", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert len(json.load(answer)["results"][0]["items"]) == 5
        finally:
            service.terminate()
        assert service.wait(60) == 0
