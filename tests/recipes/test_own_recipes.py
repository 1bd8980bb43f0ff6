"""A custom recipe in one file works with every command, from train to compare; the file is that of
docs/guide/extend.md."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import sparring
from sparring.cli.main import main, parser
from sparring.core import files
from sparring.core.errors import UserError
from sparring.data.synthetic_world import make_world
from sparring.recipes import finding, settings
from sparring.testing import NegativesContract
from sparring.training import loop as training
from support.run_files import approve

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "extend.md").read_text()
FILE = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class LossTilted" in block)
QUICK = ["--device", "cpu", "--set", "dim=4", "--set", "batch_size=128", "--set", "n=16"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the guide's mine.py and a table of interactions."""
    folder = tmp_path_factory.mktemp("extending")
    (folder / "mine.py").write_text(FILE)
    data = make_world(60, 60, exposure=0.5, relevant=0.4, seed=3).interactions
    pl.DataFrame({"user_id": data.queries + 1000, "item_id": data.items}).write_parquet(folder / "interactions.parquet")
    return folder


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """A run of the guide's recipe, trained by the command line in the folder of the file."""
    words = [
        "train",
        "--data",
        "interactions.parquet",
        "--recipe",
        "mine.py:loss_tilted",
        "--epochs",
        "3",
        "--quiet",
        "--out",
        "runs/mine",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main([*words, *QUICK, "--set", "alpha=0.7"]) == 0
    return place / "runs" / "mine"


def test_the_page_is_short_and_linked() -> None:
    """The guide has at most 220 lines, and the README links to it."""
    assert len(PAGE.splitlines()) <= 220
    assert "docs/guide/extend.md" in (ROOT / "README.md").read_text()


def test_the_pages_commands_parse() -> None:
    """The command line parses every command of the guide."""
    commands = re.findall(r"^sparring .*$", PAGE, re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        _, rest = parser()[0].parse_known_args(shlex.split(command)[1:])
        assert not rest


def test_the_pages_sampler_keeps_the_contract(place: Path) -> None:
    """The sampler passes the contract; only the test that needs a stated formula is skipped."""
    finding.find(f"{place / 'mine.py'}:loss_tilted")
    proof = sys.modules[str((place / "mine.py").resolve())].TestLossTilted()
    proof.draws = 20_000
    skipped = set()
    for name in (name for name in dir(NegativesContract) if name.startswith("test_")):
        try:
            getattr(proof, name)()
        except unittest.SkipTest:
            skipped.add(name)
    assert skipped == {"test_log_count_is_the_formula"}


def test_train_records_where_the_recipe_is(trained: Path, place: Path) -> None:
    """run.json holds the file's full path and the resolved arguments; the model card names only the function."""
    meta = json.loads((trained / "run.json").read_text())
    assert meta["recipe"] == f"{(place / 'mine.py').resolve()}:loss_tilted"
    assert meta["arguments"] == {"n": 16, "alpha": 0.7}
    assert "towers" not in meta
    assert "`loss_tilted`" in (trained / "README.md").read_text().splitlines()[0]
    assert all("hardest" in json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines())


def stopped(place: Path, file: Path, out: Path) -> None:
    """Train the file's recipe and interrupt it after its first step."""
    save = training.Trainer.save

    def once(self: Any) -> None:
        save(self)
        raise KeyboardInterrupt

    words = [
        "train",
        "--data",
        str(place / "interactions.parquet"),
        "--recipe",
        f"{file}:loss_tilted",
        "--epochs",
        "3",
        "--quiet",
        "--save-seconds",
        "0",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.Trainer, "save", once)
        assert main([*words, *QUICK, "--set", "alpha=0.7", "--out", str(out)]) == 130
    assert not (out / "result.json").exists()


def test_resume_is_as_if_never_stopped(
    trained: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run interrupted after one step and resumed from another folder equals an uninterrupted run bit by bit."""
    out = tmp_path / "run"
    stopped(place, place / "mine.py", out)
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    recipe = f"{place}/mine.py:loss_tilted"
    assert main(["train", "--resume", "--quiet", "--device", "cpu", "--out", "run", "--recipe", recipe]) == 0
    assert capsys.readouterr().err == ""
    one, other = (files.read_tensors(folder / "model.safetensors")[0] for folder in (trained, out))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("recorded", [True, False])
def test_resume_warns_of_a_changed_file(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: bool
) -> None:
    """A changed recipe file gives a one-line warning if its hash was recorded, and the run resumes."""
    file, out = tmp_path / "mine.py", tmp_path / "run"
    file.write_text(FILE)
    stopped(place, file, out)
    meta = json.loads((out / "run.json").read_text())
    assert meta["recipe_digest"] == hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    if not recorded:
        del meta["recipe_digest"]
        (out / "run.json").write_text(json.dumps(meta))
        approve(out, finished=False)
    file.write_text(f"{FILE}\n# changed\n")
    capsys.readouterr()
    words = ["train", "--resume", "--quiet", "--device", "cpu", "--out", str(out)]
    assert main([*words, "--recipe", f"{file}:loss_tilted"]) == 0
    warning = capsys.readouterr().err
    assert (f"{file.resolve()} has changed" in warning) == recorded
    assert warning.count("\n") == recorded


def test_evaluate_recommend_and_diagnose(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A custom run can be evaluated, queried, and diagnosed beside built-in and other custom recipes."""
    monkeypatch.chdir(trained.parents[1])
    assert main(["evaluate", "runs/mine", "--json"]) == 0
    stored = json.loads((trained / "result.json").read_text())["test"]["metrics"]["recall@20"]
    assert json.loads(capsys.readouterr().out)["metrics"]["recall@20"] == pytest.approx(stored)
    assert main(["recommend", "runs/mine", "--query", "1003"]) == 0
    words = [
        "--samplers",
        "own,uns,mine.py:loss_tilted,mine:layered",
        "--queries",
        "20",
        "--draws",
        "3",
        "--device",
        "cpu",
        "--json",
    ]
    capsys.readouterr()
    assert main(["diagnose", "runs/mine", "--recipe", "mine.py:loss_tilted", *words]) == 0
    found = json.loads(capsys.readouterr().out)["samplers"]
    assert [row["sampler"] for row in found] == ["own", "uns", "loss_tilted", "layered"]


def test_compare_in_processes_of_their_own(
    place: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    """Two recipes of one file are tuned and compared under short names; a copy or a changed file is an error."""
    pytest.importorskip("optuna")
    monkeypatch.chdir(place)
    words = [
        "compare",
        "--data",
        "interactions.parquet",
        "--seeds",
        "2",
        "--epochs",
        "1",
        "--metrics",
        "recall@5",
        *QUICK,
    ]
    words += ["--no-baselines", "--jobs", "2", "--tune", "2", "--out", "compare/mine"]
    assert main([*words, "--recipes", "mine.py:loss_tilted,mine:layered", "--baseline", "mine.py:layered"]) == 0
    folder = Path("compare/mine") / place.name
    rows = json.loads(Path("compare/mine/quality.json").read_text())["rows"]
    assert [row["recipe"] for row in rows] == ["loss_tilted", "layered"]
    assert [row["verdict"] == "baseline" for row in rows] == [False, True]
    for seed in "01":
        meta = json.loads((folder / "loss_tilted" / seed / "run.json").read_text())
        assert meta["recipe"] == f"{(place / 'mine.py').resolve()}:loss_tilted"
    trials = [json.loads(line) for line in (folder / "loss_tilted" / "tune" / "trials.jsonl").read_text().splitlines()]
    assert [sorted(trial["settings"]) for trial in trials] == [["alpha", "item_bias", "lr", "tau", "weight_decay"]] * 2
    assert trials[0]["settings"]["alpha"] == 0.5
    shutil.copy("mine.py", "twin.py")
    refused([*words, "--recipes", "twin.py:loss_tilted,mine.py:layered"], "loss_tilted")
    Path("mine.py").write_text(FILE.replace("0.99", "0.9"))
    refused([*words, "--recipes", "mine.py:loss_tilted,mine.py:layered"], "another source of loss_tilted")
    Path("mine.py").write_text(FILE)


def test_towers_of_ones_own_are_named_and_built_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    """Custom towers of a recipe are named in run.json and the card, and the caller's recipe, or the folder's if it is
    trusted, builds them again. For composed ones the error names the missing argument."""
    monkeypatch.chdir(place)
    words = [
        "train",
        "--data",
        "interactions.parquet",
        "--recipe",
        "mine.py:layered",
        "--epochs",
        "1",
        "--quiet",
        *QUICK,
    ]
    assert main([*words, "--set", "item_bias=true", "--out", "runs/layered"]) == 0
    meta = json.loads(Path("runs/layered/run.json").read_text())
    kind = f"{(place / 'mine.py').resolve()}:Layered"
    assert meta["towers"] == {"query": kind, "item": kind}
    assert "`Layered` query tower, `Layered` item tower" in Path("runs/layered/README.md").read_text()
    assert 'recipe="FILE.py:layered"' in Path("runs/layered/README.md").read_text()
    lists = sparring.load("runs/layered", recipe="mine.py:layered").recommend([1003, 1004], k=5)
    assert len(lists) == 10
    caplog.clear()
    assert sparring.load("runs/layered", trust=True).recommend([1003, 1004], k=5).equals(lists)
    assert f"importing {place.resolve()}/mine.py:layered" in caplog.text
    assert main(["evaluate", "runs/layered", "--json", "--recipe", "mine.py:layered"]) == 0
    assert main(["evaluate", "runs/layered", "--json", "--trust"]) == 0
    with pytest.raises(UserError, match="--trust") as error:
        sparring.load("runs/layered")
    assert error.value.argument == "recipe"

    parts = sparring.split(sparring.read("interactions.parquet"), "random", valid=0.1, test=0.2, seed=0)
    layered = finding.find("mine.py:layered")
    sparring.fit(layered(parts.train, sparring.Setup.of(dim=4, epochs=1), n=8), parts, "runs/composed", device="cpu")
    refused(["recommend", "runs/composed", "--query", "1003"], "runs/composed", "Layered", "load(folder, model=")
    assert "model=YOUR_RETRIEVER" in Path("runs/composed/README.md").read_text()
    model = layered(parts.train, sparring.Setup.of(dim=4, epochs=1), n=8).model
    assert len(sparring.load("runs/composed", model=model).recommend([1003], k=5)) == 5


def test_a_folder_brings_no_code_along(
    place: Path, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No recipe that run.json names is imported when the folder is used, wherever its file is."""
    monkeypatch.chdir(tmp_path)
    words = [
        "train",
        "--data",
        str(place / "interactions.parquet"),
        "--recipe",
        f"{place}/mine.py:layered",
        "--epochs",
        "1",
        "--quiet",
    ]
    assert main([*words, *QUICK, "--out", "run"]) == 0
    evil = tmp_path / "run" / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'was here')!r}, 'w')\n" + FILE)
    meta = json.loads(Path("run/run.json").read_text())
    (tmp_path / "evil.py").write_text(evil.read_text())
    inside = "/proc/self/cwd/run/evil.py:layered"
    for name in (f"{evil}:layered", "run/evil.py:layered", inside, "evil:layered", "evil.sub:layered", "evil"):
        Path("run/run.json").write_text(json.dumps({**meta, "recipe": name}))
        approve(Path("run"))
        for command in (
            ["recommend", "run", "--query", "1003"],
            ["train", "--resume", "--out", "run"],
            ["diagnose", "run", "--samplers", "own"],
        ):
            refused(command, "not part of Sparring", name)
    assert not (tmp_path / "was here").exists()


def test_weights_of_ones_own_towers_follow_the_seed(place: Path) -> None:
    """Custom towers depend on the seed alone, and the global generator is untouched."""
    train = sparring.read(place / "interactions.parquet")
    torch.manual_seed(5)
    first = torch.rand(1)
    torch.manual_seed(5)
    one, two, three = (
        settings.build(f"{place}/mine.py:layered", train, {"dim": 4, "seed": seed}).model for seed in (1, 1, 2)
    )
    assert torch.equal(torch.rand(1), first)
    assert torch.equal(one.item.table.weight, two.item.table.weight)  # type: ignore[union-attr, arg-type]
    assert not torch.equal(one.item.table.weight, three.item.table.weight)  # type: ignore[union-attr, arg-type]


def test_diagnose_a_run_made_in_python(
    place: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    """With --data, a run trained in Python can be diagnosed if its recipe can be found and the data holds its training
    pairs; otherwise one line says how to proceed."""
    monkeypatch.chdir(place)
    parts = sparring.split(sparring.read("interactions.parquet"), "random", valid=0.1, test=0.2, seed=0)
    setup = {"dim": 4, "epochs": 1, "n": 8, "batch_size": 128}
    sparring.fit(sparring.build("mine.py:loss_tilted", parts.train, setup), parts, "runs/python", device="cpu")
    words = ["--samplers", "own,uns", "--queries", "20", "--draws", "3", "--device", "cpu"]
    refused(["diagnose", "runs/python", *words], "give --data")
    words += ["--recipe", "mine.py:loss_tilted"]
    assert main(["diagnose", "runs/python", "--data", "interactions.parquet", *words]) == 0
    pl.DataFrame({"user_id": [1, 2], "item_id": [1, 2]}).write_parquet("other.parquet")
    refused(["diagnose", "runs/python", "--data", "other.parquet", *words], "other.parquet holds no training pair")
    run = finding.find("mine.py:loss_tilted")(parts.train, sparring.Setup.of(dim=4, epochs=1), n=8)
    sparring.fit(run, parts, "runs/custom", device="cpu")
    refused(["diagnose", "runs/custom", "--data", "interactions.parquet", *words[:-2]], "composed in Python")


@pytest.mark.parametrize("page", ["compare", "diagnose"])
def test_the_python_of_the_pages_runs(page: str, place: Path) -> None:
    """The Python blocks of the compare and diagnose guides run as scripts beside mine.py."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guide" / f"{page}.md").read_text(), re.DOTALL)
    script = place / f"{page}_block.py"
    script.write_text(
        block.replace("seeds=5", "seeds=2").replace('"epochs": 20', '"epochs": 1, "dim": 4, "batch_size": 128, "n": 16')
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script.name], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "loss_tilted" in done.stdout
