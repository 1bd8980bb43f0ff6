"""The run folder: files are complete or absent, everything is read back, and lists follow the model's ranking."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F

from sparring.cli import main
from sparring.core import files
from sparring.core.errors import UserError
from sparring.core.files import write, write_tensors
from sparring.data.interactions import Interactions, Split, Vocabulary
from sparring.data.synthetic_world import SyntheticWorld
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.negatives import InBatch
from sparring.recipes.run import Run, Term, compose
from sparring.recipes.settings import build
from sparring.recipes.setup import Setup
from sparring.training.fitting import fit
from sparring.training.loop import TrainingProgress
from sparring.training.trained import Trained, load
from support.run_files import approve
from support.settings import quick

QUICK = quick(epochs=3, n=16, patience=None)


@pytest.fixture(scope="module")
def named_parts(parts: Split) -> Split:
    """The small world with sparse ids: text for queries, numbers from 1000 down for items, with titles."""
    queries = Vocabulary([f"user-{i:03}" for i in range(parts.train.n_queries)])
    items = Vocabulary(np.arange(parts.train.n_items) * 7 + 1000)

    def renamed(data: Interactions | None) -> Interactions | None:
        return None if data is None else dataclasses.replace(data, query_ids=queries, item_ids=items)

    train = renamed(parts.train)
    assert train is not None
    return Split(train, renamed(parts.valid), renamed(parts.test))


@pytest.fixture(scope="module")
def folder(named_parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    out = tmp_path_factory.mktemp("runs") / "tables"
    fit(
        build("tables", named_parts.train, QUICK),
        named_parts,
        out,
        k=(10,),
        device="cpu",
        source={"data": "a/file.parquet"},
    )
    return out


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of the finished run for a test to damage."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def brute_ranking(trained: Trained, query: int, masked: set[int]) -> list[int]:
    """Dense item ids by descending score, ties by id, without the masked ones."""
    scores = (trained.model.query_vectors(torch.tensor([query])) @ trained.model.item_vectors().T)[0].tolist()
    return sorted((j for j in range(len(scores)) if j not in masked), key=lambda j: (-scores[j], j))


def test_a_run_folder_holds_all_that_is_promised(folder: Path) -> None:
    """The folder has the resolved run, a line per epoch, result, model, id maps, curve and card; no partial file."""
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "run.json",
        "metrics.jsonl",
        "result.json",
        "model.safetensors",
        "checkpoint.safetensors",
        "seen.safetensors",
    }
    assert names >= {"query_ids.parquet", "item_ids.parquet", "item_table.parquet", "curve.png", "README.md"}
    assert not [name for name in names if name.endswith(".tmp")]
    meta = json.loads((folder / "run.json").read_text())
    assert meta["recipe"] == "tables"
    assert meta["arguments"]["n"] == 16
    assert meta["setup"]["model"]["dim"] == 8
    assert meta["source"] == {"data": "a/file.parquet"}
    assert meta["versions"]["torch"] == torch.__version__
    assert any("sampled from Uniform" in line for line in meta["batch"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert all({"loss", "ndcg@10", "recall@10", "seconds", "tau"} <= line.keys() for line in lines)
    best = max(lines, key=lambda line: line["ndcg@10"])["epoch"]
    assert json.loads((folder / "result.json").read_text())["best_epoch"] == best


def test_lists_leave_out_more_than_what_was_measured(folder: Path, named_parts: Split) -> None:
    """A query's list, in original ids, is the brute-force order without its known items, test part included; the
    recorded recall@10 is that of the order without train and valid items only."""
    trained = load(folder)
    assert named_parts.test is not None
    assert named_parts.valid is not None
    queries = np.unique(named_parts.test.queries)
    table = trained.recommend([f"user-{q:03}" for q in queries], k=10)
    recalls = []
    for query in queries.tolist():
        seen = set(named_parts.train.items[named_parts.train.queries == query].tolist())
        seen |= set(named_parts.valid.items[named_parts.valid.queries == query].tolist())
        relevant = set(named_parts.test.items[named_parts.test.queries == query].tolist())
        expected = brute_ranking(trained, query, seen | relevant)[:10]
        rows = table.filter(pl.col("query") == f"user-{query:03}")
        assert rows["item"].to_list() == [1000 + 7 * item for item in expected]
        assert rows["rank"].to_list() == list(range(1, 11))
        assert rows["score"].to_list() == sorted(rows["score"].to_list(), reverse=True)
        recalls.append(len(relevant & set(brute_ranking(trained, query, seen)[:10])) / len(relevant))
    measured = json.loads((folder / "result.json").read_text())["test"]["metrics"]["recall@10"]
    assert np.mean(recalls) == pytest.approx(measured, abs=1e-12)


def test_recommend_with_seen_items_ranks_the_whole_catalogue(
    folder: Path, named_parts: Split, small_world: SyntheticWorld
) -> None:
    """with_seen lists every item once in brute-force order; without it a list ends with the unseen items."""
    trained = load(folder)
    n = named_parts.train.n_items
    whole = trained.recommend(["user-004"], k=n, with_seen=True)
    assert whole["item"].to_list() == [1000 + 7 * item for item in brute_ranking(trained, 4, set())]
    data = small_world.interactions
    seen = data.items[data.queries == 4]
    unseen = trained.recommend(["user-004"], k=n)
    assert len(unseen) == n - len(seen)
    assert not set(unseen["item"].to_list()) & {1000 + 7 * int(item) for item in seen}


def test_recommend_names_titles(folder: Path, named_parts: Split) -> None:
    """Each item has the title of its row in the item table."""
    titles = named_parts.train.item_table
    assert titles is not None
    table = load(folder).recommend(["user-000", "user-001"], k=5)
    assert table.columns == ["query", "rank", "item", "title", "score"]
    for item, title in table.select("item", "title").iter_rows():
        assert title == titles["title"][(item - 1000) // 7]


def test_a_catalogue_without_titles_has_no_title_column(parts: Split, tmp_path: Path) -> None:
    """Without an items table there is no title column."""
    bare = Split(
        *(
            None if p is None else dataclasses.replace(p, item_table=None)
            for p in (parts.train, parts.valid, parts.test)
        )
    )  # type: ignore[arg-type]
    fit(build("tables", bare.train, {**QUICK, "epochs": 1}), bare, tmp_path / "run", k=(5,), device="cpu")
    assert load(tmp_path / "run").recommend([3], k=2).columns == ["query", "rank", "item", "score"]


@pytest.mark.parametrize("k", [0, -1, 41])
def test_a_cutoff_beyond_the_catalogue_is_refused(folder: Path, k: int) -> None:
    """k outside 1..N raises an error with k and N."""
    with pytest.raises(UserError, match=f"k is {k}.* 40 items"):
        load(folder).recommend(["user-000"], k=k)


def test_an_unknown_query_is_named(folder: Path) -> None:
    """One unknown query among known ones is an error that names it, not an empty list."""
    with pytest.raises(UserError, match="'stranger'"):
        load(folder).recommend(["user-000", "stranger"], k=3)


def test_a_new_query_is_served_by_its_items(named_parts: Split, tmp_path: Path) -> None:
    """A history tower ranks by the mean of the given items, excludes them, and ignores unknown ones."""
    run = build("tables", named_parts.train, {**QUICK, "query_tower": "history", "item_bias": False})
    fit(run, named_parts, tmp_path / "run", k=(10,), device="cpu")
    trained = load(tmp_path / "run")
    table = trained.recommend_history([1000 + 7 * 3, 1000 + 7 * 11, 999_999], k=6)
    vectors = trained.model.item.weight.detach().double()  # type: ignore[union-attr]
    mean = (vectors[3] + vectors[11]) / 2
    scores = (vectors / vectors.norm(dim=1, keepdim=True)) @ (mean / mean.norm())
    scores[[3, 11]] = -np.inf
    best = torch.topk(scores, 6)
    assert table["item"].to_list() == [1000 + 7 * int(item) for item in best.indices]
    assert table["score"].to_list() == pytest.approx(best.values.tolist(), abs=1e-5)
    with pytest.raises(UserError, match="999999"):
        trained.recommend_history([999_999], k=3)
    with pytest.raises(UserError, match="flat list"):
        trained.recommend_history([[1000, 1007]], k=3)


def test_similar_items_are_the_nearest_by_the_towers(folder: Path) -> None:
    """Neighbours are those by cosine of the item vectors, without the item, its bias or untrained items."""
    trained = load(folder)
    bare = F.normalize(trained.model.item.weight.detach().double(), dim=1)  # type: ignore[operator]
    listed = [item for item in range(40) if item not in trained.eligibility.items.tolist()]
    asked = [1000 + 7 * listed[4], 1000 + 7 * listed[20]]
    table = trained.similar_items(asked, k=6)
    assert table.columns == ["item", "rank", "similar", "title", "score"]
    for item in asked:
        dense = (item - 1000) // 7
        near = sorted((each for each in listed if each != dense), key=lambda each: -float(bare[each] @ bare[dense]))
        assert table.filter(pl.col("item") == item)["similar"].to_list() == [1000 + 7 * each for each in near[:6]]
    with pytest.raises(UserError, match="999"):
        trained.similar_items(999)


def test_features_are_read_back(named_parts: Split, tmp_path: Path) -> None:
    """A loaded tower with features has bitwise the vectors of the selected epoch, and the card says their width."""
    run = build("tables", named_parts.train, {**QUICK, "item_features": "category", "hidden": "5", "dim": 7})
    fit(run, named_parts, tmp_path / "run", k=(10,), device="cpu")
    trained = load(tmp_path / "run")
    assert trained.model.item_vectors().shape == (40, 8)  # seven dimensions and the item bias
    assert torch.equal(trained.model.item_vectors(), run.model.item_vectors())
    assert " 8 dimensions" in (tmp_path / "run" / "README.md").read_text()


def test_own_towers_are_given_to_load(named_parts: Split, folder: Path) -> None:
    """A model built by the caller gets the saved tensors; another shape raises an error with file and tensor."""
    run = build("tables", named_parts.train, QUICK)
    trained = load(folder, run.model)
    assert trained.model is run.model
    assert torch.equal(run.model.item_vectors(), load(folder).model.item_vectors())
    with pytest.raises(UserError, match=r"model\.safetensors .*\(60, 8\).*\(60, 4\)"):
        load(folder, build("tables", named_parts.train, {**QUICK, "dim": 4}).model)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """While a file is rewritten repeatedly, a reader always finds one complete version."""
    path = tmp_path / "numbers.safetensors"
    size, stop, wrong, reads = 20_000, threading.Event(), [], 0
    write_tensors(path, {"x": torch.zeros(size)}, {"version": 0})

    def keep_writing() -> None:
        version = 0
        while not stop.is_set():
            version += 1
            write_tensors(path, {"x": torch.full((size,), float(version))}, {"version": version})

    thread = threading.Thread(target=keep_writing)
    thread.start()
    try:
        for _ in range(300):
            tensors, meta = files.read_tensors(path)
            reads += 1
            if not bool((tensors["x"] == meta["version"]).all()):
                wrong.append(meta["version"])
    finally:
        stop.set()
        thread.join()
    assert reads == 300
    assert not wrong
    assert files.read_tensors(path)[1]["version"] > 1


@pytest.mark.parametrize("when", ["writing", "renaming"])
def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A failed write raises one line with path and reason, and leaves the old content without a temporary file."""
    path = tmp_path / "a.txt"
    write(path, lambda file: file.write_text("old"))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def half(file: Path) -> None:
        file.write_text("ne")
        if when == "writing":
            fail()

    if when == "renaming":
        monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError) as error:
        write(path, half)
    assert "a.txt" in str(error.value)
    assert "No space left" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "one byte short": lambda whole: whole[:-1],
    "longer": lambda whole: whole + b"\0" * 9,
    "header cut": lambda whole: whole[:40],
    "header overwritten": lambda whole: whole[:8] + b"\xff" * 64 + whole[72:],
    "length absurd": lambda whole: b"\xff" * 8 + whole[8:],
    "no safetensors": lambda whole: b"PK\x03\x04 not tensors at all",
}


@pytest.mark.parametrize("damage", sorted(DAMAGE))
@pytest.mark.parametrize("name", ["model.safetensors", "seen.safetensors"])
def test_a_damaged_tensor_file_is_named(copy: Path, name: str, damage: str) -> None:
    """Torn, overwritten and foreign files raise one line with their path."""
    (copy / name).write_bytes(DAMAGE[damage]((copy / name).read_bytes()))
    with pytest.raises(UserError) as error:
        load(copy)
    assert str(copy / name) in str(error.value)
    assert "corrupt" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["run.json", "model.safetensors", "seen.safetensors", "query_ids.parquet", "item_ids.parquet"]
)
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    """A folder without one of its files raises an error that names it."""
    (copy / name).unlink()
    with pytest.raises(UserError, match=name):
        load(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"setup": {}}', '{"recipe": "tables"}'])
def test_a_damaged_run_json_is_named(copy: Path, text: str) -> None:
    """Invalid JSON and JSON of another kind raise errors."""
    (copy / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json"):
        load(copy)


@pytest.mark.parametrize(
    ("change", "keyword"), [({"format": None, "versions": {"sparring": "0.1.0"}}, "0.1.0"), ({"format": 4}, "again")]
)
def test_a_folder_of_another_version_is_refused(copy: Path, change: dict[str, Any], keyword: str) -> None:
    """A folder of Sparring 0.1 or of another format raises one line with the version that wrote it."""
    meta = {**json.loads((copy / "run.json").read_text()), **change}
    (copy / "run.json").write_text(json.dumps({name: value for name, value in meta.items() if value is not None}))
    (copy / "manifest.json").unlink()
    with pytest.raises(UserError, match=keyword) as error:
        load(copy)
    assert len(str(error.value).splitlines()) == 1


def test_a_model_of_other_towers_is_refused(copy: Path) -> None:
    """A model that contradicts run.json (no histories, another width) raises an error that names the file."""
    meta = json.loads((copy / "run.json").read_text())
    for change in ({"query_tower": "history"}, {"dim": 9}, {"item_features": ["category"]}):
        (copy / "run.json").write_text(
            json.dumps({**meta, "setup": {**meta["setup"], "model": {**meta["setup"]["model"], **change}}})
        )
        approve(copy)
        with pytest.raises(UserError, match=r"model\.safetensors does not fit"):
            load(copy)


def test_an_interrupt_leaves_nothing_half_written(tmp_path: Path) -> None:
    """Ctrl-C during a write propagates and leaves no partial file, even if it arrives twice (polars, then Python)."""
    (tmp_path / "lists.parquet").write_text("old")

    def interrupted(file: Path) -> None:
        file.write_text("half")
        raise KeyboardInterrupt

    real, calls = Path.unlink, list[Path]()

    def twice(path: Path, missing_ok: bool = False) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(path, missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", twice)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "lists.parquet", interrupted)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"lists.parquet": "old"}


def test_a_full_disk_that_polars_meets_is_one_line(tmp_path: Path) -> None:
    """An error of polars becomes one line, and no temporary file remains."""

    def full(file: Path) -> None:
        file.write_text("half")
        raise pl.exceptions.ComputeError("parquet: File too large (os error 27)\nin a second line")

    with pytest.raises(UserError, match=r"lists\.parquet: .*File too large"):
        write(tmp_path / "lists.parquet", full)
    assert not list(tmp_path.iterdir())


def test_no_such_folder(tmp_path: Path) -> None:
    """A missing path and a folder without a run raise errors."""
    with pytest.raises(UserError, match="no such run folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no run\.json"):
        load(tmp_path)


def test_shared_tensors_are_written_once(named_parts: Split) -> None:
    """The item table shared with the history tower is saved once, and loading fills both."""
    run = build("tables", named_parts.train, {**QUICK, "query_tower": "history"})
    found = files.tensors_of(run.model)
    assert sum(tensor.shape == (40, 8) for tensor in found.values()) == 1
    other = build("tables", named_parts.train, {**QUICK, "query_tower": "history", "seed": 9})
    files.load_tensors(other.model, found, Path("memory"))
    assert torch.equal(other.model.item_vectors(), run.model.item_vectors())
    assert torch.equal(other.model.query_vectors(torch.arange(5)), run.model.query_vectors(torch.arange(5)))


def test_a_file_where_the_folder_should_be(named_parts: Split, tmp_path: Path) -> None:
    """Training into a path that is a file raises before it starts."""
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match="is a file"):
        fit(build("ssl", named_parts.train, {}), named_parts, tmp_path / "file", k=(10,), device="cpu")
    assert (tmp_path / "file").read_text() == "precious"


def test_an_interrupted_training_is_not_taken_for_a_run(
    copy: Path, named_parts: Split, refused: Callable[..., str]
) -> None:
    """A training with overwrite that dies after its first epoch is refused by every reader, until it is resumed."""

    epochs = list[dict[str, Any]]()

    def dies(record: dict[str, Any]) -> None:
        epochs.append(record)
        if len(epochs) == 2:
            raise RuntimeError("killed")

    def train(**how: Any) -> None:
        fit(build("tables", named_parts.train, QUICK), named_parts, copy, k=(10,), device="cpu", save_seconds=0, **how)

    finished = load(copy).item_vectors().clone()
    with pytest.raises(RuntimeError, match="killed"):
        train(overwrite=True, progress=TrainingProgress(epoch=dies))
    assert (copy / "model.safetensors").is_file()
    with pytest.raises(UserError, match="not finished"):
        load(copy)
    for words in (["recommend", copy, "--query", "user-001"], ["evaluate", copy], ["index", copy, "--kind", "exact"]):
        refused(words, "not finished", "--resume", "--unfinished")
    refused(["export", copy, "--to", "parquet"], "not finished")
    assert main(["recommend", str(copy), "--query", "user-001", "--unfinished", "--json"]) == 0
    assert len(load(copy, unfinished=True).recommend(["user-001"], 5)) == 5
    train(resume=True)
    assert torch.equal(load(copy).item_vectors(), finished)


@pytest.mark.parametrize("key", ["setup", "recipe", "id"])
def test_a_run_json_without_a_needed_part_is_named(copy: Path, key: str) -> None:
    """A run.json that its writer approved but left incomplete raises one line with the missing part."""
    meta = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({name: value for name, value in meta.items() if name != key}))
    approve(copy)
    with pytest.raises(UserError, match=f"has no {key}"):
        load(copy)


def test_a_model_of_items_has_no_vectors(named_parts: Split, tmp_path: Path) -> None:
    """An item-item matrix recommends by its own scores and refuses to give vectors to index or export."""
    fit(build("ease", named_parts.train, {}), named_parts, tmp_path / "run", k=(10,), device="cpu")
    trained = load(tmp_path / "run")
    with pytest.raises(UserError, match="item-item"):
        trained.item_vectors()
    scores = trained.model.query_vectors(torch.tensor([0]))[0].tolist()
    masked = set(trained.eligibility.taken(torch.tensor([0])).items.tolist())
    expected = sorted((item for item in range(40) if item not in masked), key=lambda item: -scores[item])[:5]
    assert trained.recommend(["user-000"], k=5)["item"].to_list() == [1000 + 7 * item for item in expected]


class OwnTower(IdTower):
    """A tower that is not of the package."""


def own_run(parts: Split, tower: type[IdTower]) -> Run:
    run = compose(parts.train, Setup.of(dim=8, epochs=1, batch_size=64, score="dot"), Term(1.0, InBatch()))
    return dataclasses.replace(run, model=Retriever(tower(60, 8), tower(40, 8), "dot"))


def test_own_towers_without_a_recipe_need_their_model(named_parts: Split, tmp_path: Path) -> None:
    """A run of towers that the caller wrote, without a recipe, names them; given the model, it loads."""
    run = own_run(named_parts, OwnTower)
    fit(run, named_parts, tmp_path / "run", k=(10,), device="cpu")
    with pytest.raises(UserError, match="OwnTower") as error:
        load(tmp_path / "run")
    assert "model=" in str(error.value)
    assert torch.equal(load(tmp_path / "run", run.model).item_vectors(), run.model.item_vectors())


def test_a_setup_that_does_not_describe_its_model(named_parts: Split, tmp_path: Path) -> None:
    """A custom run whose Setup has another width than its towers says how to load it."""
    run = own_run(named_parts, IdTower)
    fit(dataclasses.replace(run, setup=run.setup.replaced(dim=4)), named_parts, tmp_path / "run", k=(10,), device="cpu")
    with pytest.raises(UserError, match="does not describe the model"):
        load(tmp_path / "run")
