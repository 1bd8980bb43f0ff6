"""Runs on the hub: pushed and pulled by the hub's own client, against a stand-in of its HTTP API."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest
import torch

import sparring
from sparring.cli import main
from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.manifest import check_folder
from sparring.data.interactions import Split
from sparring.training import hub as runs
from support.hub_server import TOKEN, Hub, hub_server

pytest.importorskip("huggingface_hub", reason='not installed: pip install "sparring[hub]"')
RECIPES: dict[str, tuple[str, dict[str, object]]] = {
    "tables": ("tables", {"query_tower": "id"}),
    "history": ("tables", {"query_tower": "history"}),
    "ease": ("ease", {}),
}


@pytest.fixture(scope="module")
def trained(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of finished runs: of id tables, of histories, and an item-item matrix."""
    folder = tmp_path_factory.mktemp("runs")
    quick = {"dim": 6, "epochs": 1, "batch_size": 64, "patience": None}
    for name, (recipe, settings) in RECIPES.items():
        run = sparring.build(recipe, parts.train, settings if recipe == "ease" else {**quick, **settings})
        sparring.fit(run, parts, folder / name, k=(10,), device="cpu", source={"data": "/home/me/shop.parquet"})
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty hub, a token for it and an empty cache."""
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("SPARRING_HOME", str(tmp_path / "home"))
        yield server


def files_of(hub: Hub, name: str) -> dict[str, bytes]:
    return list(hub.repositories[name].commits.values())[-1]


def holding(folder: Path, taken: list[int]) -> set[str]:
    """The files with a tensor that has these items in a row, in any order."""
    found = set()
    for path in folder.rglob("*.safetensors"):
        for tensor in files.read_tensors(path)[0].values():
            rows = [] if tensor.dtype.is_floating_point else tensor.flatten().tolist()
            if any(sorted(rows[i : i + len(taken)]) == taken for i in range(len(rows))):
                found.add(path.name)
    return found


def test_a_run_comes_back_as_it_was(trained: Path, hub: Hub) -> None:
    """With histories, the lists of the pulled run are those of the run; without a checkpoint and results by query."""
    assert main(["push", str(trained / "tables"), "me/shop", "--with-histories"]) == 0
    assert hub.repositories["me/shop"].private
    assert not {"checkpoint.safetensors", "per_query.parquet"} & files_of(hub, "me/shop").keys()
    here, there = sparring.load(trained / "tables"), sparring.load("hf://me/shop")
    assert there.recommend([0, 1, 2]).equals(here.recommend([0, 1, 2]))
    assert there.meta["source"] == {"data": "shop.parquet"}
    assert b"/home/me" not in b"".join(files_of(hub, "me/shop").values())
    assert not check_folder(there.folder)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_no_history_leaves_the_machine_unless_asked(
    name: str, trained: Path, hub: Hub, parts: Split, caplog: pytest.LogCaptureFixture
) -> None:
    """No tensor of the pushed files has the items of a query; new queries are answered as before."""
    runs.push(trained / name, "me/shop", public=True)
    assert not hub.repositories["me/shop"].private
    here = sparring.load(trained / name)
    with caplog.at_level(logging.WARNING):
        there = sparring.load("hf://me/shop")
        assert "without histories" in caplog.text
        best = there.recommend([3], k=5)
    assert len(there.eligibility.taken(torch.arange(60)).items) == 0
    taken = sorted(parts.train.items[parts.train.queries == 3].tolist())
    assert holding(here.folder, taken)
    assert not holding(there.folder, taken)
    assert there.recommend_history([1, 2, 3]).equals(here.recommend_history([1, 2, 3]))
    if name == "tables":  # the vector of a query was learned, and is in the model
        assert best.equals(here.recommend([3], k=5, with_seen=True))
    else:
        assert "not personalised" in caplog.text


def test_the_card_has_a_head_that_the_hub_reads(trained: Path, hub: Hub) -> None:
    """The YAML has the library, tags and every test metric with its value; the text says how to load the run."""
    from huggingface_hub import ModelCard

    runs.push(trained / "tables", "me/shop")
    text = files_of(hub, "me/shop")["README.md"].decode()
    card, result = ModelCard(text), json.loads((trained / "tables" / "result.json").read_text())
    assert card.data.library_name == "sparring"
    found = {one.metric_name: one.metric_value for one in card.data.eval_results or ()}
    assert found == result["test"]["metrics"]
    assert card.data.model_name == "me/shop"
    assert 'sparring.load("hf://me/shop")' in text
    assert "histories of its queries were not published" in text


def test_the_data_set_of_a_card() -> None:
    """Data that came from the hub is named in the head of the card."""
    source = {"data": "hf://datasets/them/films/ratings.parquet"}
    card = runs.published_card("", "me/shop", {"source": source}, {"test": {"metrics": {"recall@10": 0.5}}})
    assert 'datasets: ["them/films"]' in card


def test_a_copy_is_kept_by_its_revision(trained: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revision is downloaded once, also by a push of another run; a commit in the cache needs no hub."""
    runs.push(trained / "tables", "me/shop")
    first = runs.pulled("hf://me/shop")
    downloads = len(hub.downloads)
    assert runs.pulled("hf://me/shop") == first
    assert len(hub.downloads) == downloads
    runs.push(trained / "ease", "me/shop")
    second = runs.pulled("hf://me/shop")
    assert second != first
    assert sparring.load(second).meta["recipe"] == "ease"
    assert runs.pulled(f"hf://me/shop@{first.name}") == first
    assert {path.name for path in first.parent.iterdir()} == {first.name, second.name}
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert sparring.load(f"hf://me/shop@{first.name}").folder == first
    with pytest.raises(UserError, match="cannot pull"):
        runs.pulled("hf://me/shop")


def test_a_damaged_copy_is_refused(trained: Path, hub: Hub) -> None:
    """A file that differs from the manifest, and one that it does not list, are errors, and no copy stays."""
    runs.push(trained / "tables", "me/shop")
    stored = files_of(hub, "me/shop")
    whole = dict(stored)
    stored["model.safetensors"] = stored["model.safetensors"][:-1] + b"\x01"
    with pytest.raises(UserError, match=r"damaged: model.safetensors"):
        sparring.load("hf://me/shop")
    stored |= whole
    stored["extra.bin"] = b"x"
    with pytest.raises(UserError, match=r"damaged: extra.bin"):
        sparring.load("hf://me/shop")
    del stored["extra.bin"], stored["manifest.json"]
    with pytest.raises(UserError, match="not a run"):
        sparring.load("hf://me/shop")
    assert not list((runs.cache_folder() / "hub" / "me" / "shop").glob("[0-9a-f]*"))


def test_commands_take_runs_of_the_hub(
    trained: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """recommend, export and check take hf://OWNER/NAME in place of a folder."""
    runs.push(trained / "tables", "me/shop")
    assert main(["recommend", "hf://me/shop", "--query", "3", "--k", "2"]) == 0
    assert main(["export", "hf://me/shop", "--to", "parquet", "--out", str(tmp_path / "out")]) == 0
    assert len(pl.read_parquet(tmp_path / "out" / "items.parquet")) == 40
    assert main(["check", "hf://me/shop"]) == 0
    assert "all as they were written" in capsys.readouterr().out


def test_refusals_are_one_line(
    trained: Path, hub: Hub, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad name, an unknown repository, a wrong token and an unfinished run are one-line errors."""
    refused(["push", trained / "tables", "shop"], "OWNER/NAME")
    refused(["recommend", "hf://me", "--query", "3"], "hf://OWNER/NAME")
    refused(["recommend", "hf://me/nothing", "--query", "3"], "cannot pull")
    unfinished = Path(shutil.copytree(trained / "tables", tmp_path / "unfinished"))
    runs.run_folder.reopen(unfinished)
    refused(["push", unfinished, "me/shop"], "not finished")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused(["push", trained / "tables", "me/shop"], "cannot push")
    assert not hub.repositories


def test_the_parts_of_a_fused_run_go_with_it(trained: Path, hub: Hub, parts: Split, tmp_path: Path) -> None:
    """A fused run comes back with its parts, and no part of it has a history unless asked."""
    sparring.fuse([trained / "ease", trained / "tables"], parts, tmp_path / "fused", k=(10,), device="cpu")
    taken = sorted(parts.train.items[parts.train.queries == 3].tolist())
    runs.push(tmp_path / "fused", "me/fused")
    assert holding(tmp_path / "fused", taken)
    assert not holding(sparring.load("hf://me/fused").folder, taken)
    runs.push(tmp_path / "fused", "me/fused", with_histories=True)
    there, here = sparring.load("hf://me/fused"), sparring.load(tmp_path / "fused")
    assert there.recommend([5]).equals(here.recommend([5]))


def test_a_graph_needs_its_pairs(parts: Split, hub: Hub, tmp_path: Path) -> None:
    """Vectors that are computed from the training pairs cannot be pushed without them."""
    run = sparring.build("tables", parts.train, {"model": "lightgcn", "dim": 4, "epochs": 1})
    sparring.fit(run, dataclasses.replace(parts, test=None), tmp_path / "graph", k=(10,), device="cpu")
    with pytest.raises(UserError, match="--with-histories"):
        runs.push(tmp_path / "graph", "me/graph")
    runs.push(tmp_path / "graph", "me/graph", with_histories=True)
    there, here = sparring.load("hf://me/graph"), sparring.load(tmp_path / "graph")
    assert there.recommend([5]).equals(here.recommend([5]))
