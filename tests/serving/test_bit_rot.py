"""Bit rot: one flipped bit in any file is named by a check, and no command uses the file."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("orjson", reason="the extra `serve` is not installed")

from sparring.cli import main
from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.manifest import is_finished, write_manifest
from sparring.data.interactions import Split
from sparring.data.prepared.preparation import prepare
from sparring.data.reading import read
from sparring.recipes.settings import build
from sparring.serving import build_index, check, open_index
from sparring.serving.http.store import Change, Store
from sparring.training import item_vectors
from sparring.training.fitting import fit
from sparring.training.folder import APART, STARTED
from sparring.training.loop import TrainingProgress
from sparring.training.trained import load
from support.run_files import contents, flip
from support.settings import effort, quick
from support.texts import text_parts

pytestmark = pytest.mark.usefixtures("private_home")

OWN = {"size": 4, "every": 1, "grow": "2", "clf_epochs": 1, "clf_batch_size": 16, "clf_warmup": 2, "clf_lr": 0.05}
EVENTUALLY = {"README.md", "curve.png", "metrics.jsonl", "result.json", "per_query.parquet", "checkpoint.safetensors"}


class Killed(BaseException):
    """Simulates a kill: nothing may catch it."""


def trained(parts: Split, out: Path, seed: int = 0, **more: Any) -> Path:
    fit(build("ssl", parts.train, quick(epochs=2, seed=seed)), parts, out, k=(10,), device="cpu", **more)
    return out


@pytest.fixture(scope="module")
def run(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with an index and the store of a service."""
    folder = trained(parts, tmp_path_factory.mktemp("rot") / "run")
    build_index(load(folder), k=10, queries=20)
    store = Store(folder / "serve" / "items.sqlite")
    vector = np.arange(8, dtype=np.float32)
    store.write([Change(f"new {n}", {"title": f"New {n}"}, vector=vector + n, model="m") for n in range(12)])
    store.write([Change("new 3", deleted=True)])
    store.write_state("swapped", "elsewhere")
    store.close()
    return folder


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of text towers with classifiers, their fusion and cached item vectors."""
    parts, folder = text_parts(), tmp_path_factory.mktemp("rot") / "texts"
    fit(build("ngame", parts.train, quick(encoder="bag", **OWN)), parts, folder, k=(10,), device="cpu")
    load(folder).item_vectors()
    return folder


def tried(work: Callable[..., Any], *given: Any) -> Any:
    """The result of a call, or its UserError."""
    try:
        return work(*given)
    except UserError as error:
        return error


def stored(path: Path) -> list[Any]:
    store = Store(path)
    try:
        rows = [(change.id, change.columns, change.like, change.text, change.model, change.deleted, str(change.vector))
                for change in store.since(0)]  # fmt: skip
        return [rows, store.get("new 5") is not None, store.counts(), store.sequence, store.read_state("swapped")]
    finally:
        store.close()


def answers(folder: Path) -> list[Any]:
    """Lists and scores of every query, from the run, its index and its store."""
    opened = load(folder)
    queries = opened.ids.query_ids.ids.to_list()
    found: list[Any] = [opened.recommend(queries, k=5).to_dict(as_series=False)]
    if (folder / "index").is_dir():
        q = opened.model.query_vectors(torch.arange(20)).detach().numpy()
        found += [part.tolist() for part in open_index(folder).search(q, 5)]
    if (folder / "serve").is_dir():
        found += stored(folder / "serve" / "items.sqlite")
    return found


@pytest.mark.parametrize("kind", ["run", "text_run"])
def test_one_flipped_bit_is_named_and_never_served(kind: str, request: pytest.FixtureRequest) -> None:
    """Every file in turn: the check names it, and an opened run refuses it by name or answers as before, bit for bit.

    In a store, SQLite leaves bytes unused: a flip there changes no row and need not be named.
    """
    folder: Path = request.getfixturevalue(kind)
    assert check(folder).problems == []
    expected, draw = answers(folder), random.Random(0)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    refusals, unnamed = set[str](), 0
    for trial in range(max(effort(1, 100), len(paths))):
        path = paths[trial % len(paths)]
        bit = draw.randrange(path.stat().st_size * 8)
        whole = flip(path, bit)
        named = {problem.path for problem in check(folder).problems}
        if path.suffix == ".sqlite" and not named:
            unnamed += 1
        else:
            assert named == {path}, bit
        outcome = tried(answers, folder)
        if isinstance(outcome, UserError):
            assert path.name in outcome.message
            assert "\n" not in outcome.message
            refusals.add(path.name)
        else:
            assert outcome == expected, (path, bit)
        path.write_bytes(whole)
        for left in folder.rglob("*.sqlite-*"):
            left.unlink()
    used = {path.name for path in paths} - EVENTUALLY
    assert (
        {"model.safetensors", "seen.safetensors", "item_ids.parquet", "run.json", "manifest.json"} <= refusals <= used
    )
    assert answers(folder) == expected


def test_every_bit_of_a_store_is_named_or_unused(run: Path, tmp_path: Path) -> None:
    """Any flipped bit of a store is named and refused, or changes nothing that is read from it."""
    path = Path(shutil.copy(run / "serve" / "items.sqlite", tmp_path))
    expected, draw, harmless = stored(path), random.Random(1), 0
    trials = effort(60, 2000)
    for _ in range(trials):
        bit = draw.randrange(path.stat().st_size * 8)
        whole = flip(path, bit)
        named = check(path).problems
        outcome = tried(stored, path)
        if isinstance(outcome, UserError):
            assert str(path) in outcome.message
            assert named, bit
        else:
            assert outcome == expected, bit
            harmless += not named
        path.write_bytes(whole)
        for left in tmp_path.glob("*.sqlite-*"):
            left.unlink()
    assert harmless < trials


def test_a_damaged_cache_of_vectors_is_computed_again(text_run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The vectors are those of the model, and a line in the log names the file, which is whole again."""
    (path,) = (text_run / "cache").glob("items-*")
    whole = flip(path, path.stat().st_size * 8 - 9)
    opened = load(text_run)
    assert torch.equal(opened.item_vectors(), opened.model.item_vectors())
    assert path.name in caplog.text
    assert path.read_bytes() == whole
    assert item_vectors.item_vectors(opened.model, text_run).equal(opened.model.item_vectors())


def test_files_that_readers_ignore_may_be_edited(run: Path, tmp_path: Path) -> None:
    """An edited model card and curve are named by the check; the run still answers as before."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    (folder / "README.md").write_text("mine")
    (folder / "curve.png").unlink()
    (folder / "notes.txt").write_text("mine")
    found = {problem.path.name: problem.kind for problem in check(folder).problems}
    assert found == {"README.md": "damaged", "curve.png": "missing", "notes.txt": "additional"}
    assert answers(folder) == answers(run)


@pytest.mark.parametrize("names", [
    ["model.safetensors"], ["seen.safetensors"], ["item_ids.parquet"], ["item_table.parquet"], ["run.json"],
    ["manifest.json"], ["manifest.json", "model.safetensors"], ["manifest.json", "run.json"], ["index"],
])  # fmt: skip
def test_files_of_another_run_of_equal_shape_are_refused(
    names: list[str], parts: Split, run: Path, tmp_path: Path
) -> None:
    """A model, a map, a table, a manifest or an index of a run with another seed is refused, and the check names it."""
    other = trained(parts, tmp_path / "other", seed=1)
    build_index(load(other), k=10, queries=20)
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
        (shutil.copytree if (other / name).is_dir() else shutil.copy)(other / name, folder / name)
    if (folder / names[-1]).is_file() and (folder / names[-1]).read_bytes() == (run / names[-1]).read_bytes():
        return  # ids and titles of equal data are equal
    with pytest.raises(UserError) as error:
        answers(folder)
    assert str(folder) in error.value.message
    assert check(folder).problems


def test_tables_that_appear_or_disappear_are_refused(run: Path, tmp_path: Path) -> None:
    """A run does not serve without its titles, nor with a table that it never had."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    (folder / "item_table.parquet").rename(folder / "query_table.parquet")
    with pytest.raises(UserError, match=r"query_table\.parquet"):
        load(folder)
    (folder / "query_table.parquet").unlink()
    with pytest.raises(UserError, match=r"item_table\.parquet is missing"):
        load(folder)


@pytest.fixture(scope="module")
def stopped(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that was killed in its third epoch: two checkpoints and the best model so far."""
    folder = tmp_path_factory.mktemp("rot") / "stopped"

    def step(epoch: int, done: int, loss: Callable[[], float]) -> bool:
        if (epoch, done) == (2, 2):
            raise Killed
        return False

    with pytest.raises(Killed):
        go_on(parts, folder, TrainingProgress(step=step, epoch=lambda record: True))
    return folder


def go_on(parts: Split, folder: Path, progress: TrainingProgress | None = None) -> Path:
    run = build("ssl", parts.train, quick(epochs=3))
    fit(run, parts, folder, resume=True, k=(10,), device="cpu", progress=progress)
    return folder


def test_a_damaged_checkpoint_is_never_resumed_from(stopped: Path, parts: Split, tmp_path: Path) -> None:
    """With one flipped bit in any file, training refuses it by name or ends with the tensors of an undamaged one."""
    assert not is_finished(stopped)
    assert check(stopped).kind == "unfinished run"
    assert check(stopped).problems == []
    expected = contents(go_on(parts, Path(shutil.copytree(stopped, tmp_path / "whole"))))
    draw, outcomes = random.Random(2), dict[str, set[str]]()
    names = sorted(path.name for path in stopped.iterdir() if path.suffix in (".safetensors", ".json"))
    for trial in range(effort(len(names), 100)):
        name = names[trial % len(names)]
        folder = Path(shutil.copytree(stopped, tmp_path / f"copy {trial}"))
        flip(folder / name, draw.randrange((folder / name).stat().st_size * 8))
        assert [problem.path.name for problem in check(folder).problems] == [name]
        outcome = tried(go_on, parts, folder)
        if isinstance(outcome, UserError):
            assert name in outcome.message
        else:
            found = contents(folder)
            for key, value in expected.items():
                same = torch.equal(value, found[key]) if isinstance(value, torch.Tensor) else value == found[key]
                assert same, (name, key)
        outcomes.setdefault(name, set()).add("refused" if isinstance(outcome, UserError) else "resumed")
        shutil.rmtree(folder)
    assert outcomes["checkpoint.safetensors"] == {"resumed"}  # from the previous one
    for name in ("model.safetensors", "run.json", "manifest.json"):
        assert outcomes[name] == {"refused"}, name


@pytest.mark.parametrize("name", ["model.safetensors", "checkpoint.safetensors", "seen.safetensors"])
def test_an_unfinished_training_does_not_take_files_of_another(
    name: str, stopped: Path, parts: Split, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model, checkpoint or list of seen items of another run of equal shape is named, though its own hash fits."""
    folder = Path(shutil.copytree(stopped, tmp_path / "run"))
    (folder / "checkpoint.previous.safetensors").unlink()
    tensors, state = files.read_tensors(folder / name)
    files.write_tensors(folder / name, tensors, {**state, "run": "another"})
    assert [problem.path.name for problem in check(folder).problems][:1] == [name]
    if name != "checkpoint.safetensors":
        with pytest.raises(UserError, match=name):
            load(folder, unfinished=True)
    if name != "seen.safetensors":
        with pytest.raises(UserError, match="another run"):
            go_on(parts, folder)


def test_prepared_data_with_a_flipped_bit_is_refused(parts: Split, tmp_path: Path) -> None:
    """Every file of prepared data in turn: the check names it, and so does the reader."""
    (tmp_path / "rows.csv").write_text("user,item,time\n" + "".join(f"{n % 7},{n % 11},{n}\n" for n in range(77)))
    prepare(tmp_path / "rows.csv", tmp_path / "data")
    assert check(tmp_path / "data").problems == []
    draw = random.Random(3)
    paths = sorted(path for path in (tmp_path / "data").iterdir())
    for trial in range(max(effort(1, 200), len(paths))):
        path = paths[trial % len(paths)]
        whole = flip(path, draw.randrange(path.stat().st_size * 8))
        assert [problem.path for problem in check(tmp_path / "data").problems] == [path]
        with pytest.raises(UserError, match=path.name):
            read(tmp_path / "data")
        path.write_bytes(whole)
    read(tmp_path / "data")


def test_the_command_names_each_file_and_says_so_by_its_exit_code(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    """0 and one line if all is well; 1 and a line per file otherwise; 2 for a folder that Sparring did not write."""
    assert main(["check", str(run)]) == 0
    assert str(run) in capfd.readouterr().out
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    flip(folder / "model.safetensors", 9999)
    (folder / "result.json").unlink()
    assert main(["check", str(folder)]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines[:2]] == [
        f"damaged: {folder / 'model.safetensors'}",
        f"missing: {folder / 'result.json'}",
    ]
    assert main(["check", str(folder), "--json"]) == 1
    assert '"kind": "missing"' in capfd.readouterr().out
    assert main(["check", str(folder / "index")]) == main(["check", str(folder / "serve" / "items.sqlite")]) == 0
    (tmp_path / "other").mkdir()
    refused(["check", tmp_path / "other"], "other")
    refused(["check", tmp_path / "nowhere"], "does not exist")
    refused(["recommend", folder, "--query", "1"], "model.safetensors", "corrupt")


def test_every_kind_of_folder_is_recognised(run: Path, tmp_path: Path) -> None:
    """A folder of stores and a folder with nothing but a manifest are checked too; any other folder is refused."""
    stores = Path(shutil.copytree(run / "serve", tmp_path / "serve"))
    assert (check(stores).kind, check(stores).problems) == ("store", [])
    flip(stores / "items.sqlite", 8 * 30)
    assert [problem.path.name for problem in check(stores).problems] == ["items.sqlite"]
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "page.html").write_text("<p>")
    write_manifest(tmp_path / "report")
    assert (check(tmp_path / "report").kind, check(tmp_path / "report").problems) == ("folder", [])
    for folder, word in ((tmp_path, "neither"), (tmp_path / "none", "does not exist")):
        with pytest.raises(UserError, match=word):
            check(folder)


def test_damage_in_an_unfinished_run_is_named(run: Path, tmp_path: Path) -> None:
    """A file of tensors that no manifest lists yet is compared with its own hash."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    write_manifest(folder, finished=False, names=(), keep=STARTED, apart=APART)
    assert check(folder).kind == "unfinished run"
    assert "model.safetensors" not in [problem.path.name for problem in check(folder).problems]
    path = folder / "model.safetensors"
    flip(path, path.stat().st_size * 8 - 9)
    assert "model.safetensors" in [problem.path.name for problem in check(folder).problems]
