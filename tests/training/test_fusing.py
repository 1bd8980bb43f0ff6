"""Fused runs: lists and weights against brute force, folders that are whole and checked, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import sparring
from sparring.cli import main
from sparring.core import files, manifest
from sparring.core.errors import UserError
from sparring.data.interactions import Split
from sparring.data.splits import split
from sparring.evaluation.ranking import evaluate
from sparring.models.retriever import Retriever
from sparring.serving.checking import check
from sparring.training.fusing import fuse, fusion_gain
from sparring.training.sources import Sources
from sparring.training.trained import load
from support.fused_runs import agrees, fused, make_runs, table, weights_of


@pytest.fixture(scope="module")
def runs(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_runs(tmp_path_factory.mktemp("runs"), parts)


@pytest.fixture(scope="module")
def everything(runs: dict[str, Path], parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fused run of all kinds of models."""
    out = tmp_path_factory.mktemp("fused") / "all"
    sparring.fuse(list(runs.values()), parts, out, depth=15, k=(10, 20), device="cpu")
    return out


def scores_of(model: Sources) -> dict[str, np.ndarray]:
    return {source.name: table(source.model) for source in model.sources}


def known(parts: Split, query: int, *names: str) -> set[int]:
    return {int(i) for name in names for part in [getattr(parts, name)] for i in part.items[part.queries == query]}


@pytest.mark.parametrize("by", ["scores", "ranks"])
def test_lists_are_those_of_a_plain_sum(by: str, runs: dict[str, Path], parts: Split) -> None:
    """Every kind of model: the best items of each, by standardised scores or reciprocal ranks, without seen ones."""
    model = fuse(list(runs.values()), parts, by=by, depth=15, device="cpu").model  # type: ignore[arg-type]
    model.weights = torch.tensor([0.4, 0.25, 0.05, 0.1, 0.2])
    weights = dict(zip(runs, model.weights.tolist(), strict=True))
    tables, untrained = scores_of(model), set(np.flatnonzero(parts.train.counts() == 0).tolist())
    seen = parts.seen_for("test")
    queries = torch.unique(torch.from_numpy(parts.train.queries).long())[:12]
    lists = model.lists(queries, 10, seen)
    for query, listed in zip(queries.tolist(), lists.tolist(), strict=True):
        taken = known(parts, query, "train", "valid") | untrained
        expected = fused({name: own[query] for name, own in tables.items()}, weights, by, 15, taken)
        agrees(listed, [expected[item] for item in listed], expected)


def test_weights_are_the_best_on_validation_and_measured_on_test(everything: Path, parts: Split) -> None:
    """The choice is no worse than any source; result.json has the metrics of these lists on the test part."""
    result, model = json.loads((everything / "result.json").read_text()), load(everything).model
    assert isinstance(model, Sources)
    valid = result["valid"]
    chosen = valid[f"fused by {model.by}"]
    assert chosen == max(valid.values())
    assert parts.valid is not None
    assert parts.test is not None
    again = evaluate(model, parts.valid, parts.seen_for("valid"), (20,), ("ndcg",)).metrics["ndcg@20"]
    assert again == pytest.approx(chosen, abs=1e-6)
    for source in model.sources:
        alone = evaluate(source.model, parts.valid, parts.seen_for("valid"), (20,), ("ndcg",)).metrics["ndcg@20"]
        assert valid[source.name] == pytest.approx(alone, abs=0.01)  # alone it also ranks untrained items
        tested = evaluate(source.model, parts.test, parts.seen_for("test"), (20,), ("ndcg",)).metrics["ndcg@20"]
        assert result["parts"][source.name]["metrics"]["ndcg@20"] == pytest.approx(tested, abs=1e-9)
    tested = evaluate(model, parts.test, parts.seen_for("test"), (20,), ("ndcg",)).metrics["ndcg@20"]
    assert result["test"]["metrics"]["ndcg@20"] == pytest.approx(tested, abs=1e-9)
    per_query = pl.read_parquet(everything / "per_query.parquet")
    assert per_query["ndcg@20"].mean() == pytest.approx(tested, abs=1e-6)


def test_the_gain_is_that_of_queries_that_chose_no_weights(runs: dict[str, Path], parts: Split) -> None:
    """Weights of `fuse` on one half of the validation queries rank the other half, both ways."""
    valid = parts.valid
    assert valid is not None
    places = [runs["ease"], runs["ials"], runs["tables"]]
    order = np.random.default_rng(0).permutation(np.unique(valid.queries))
    values: dict[int, float] = {}
    for half, other in ((order[::2], order[1::2]), (order[1::2], order[::2])):
        fitted, judged = (valid.subset(np.isin(valid.queries, each)) for each in (half, other))
        model = fuse(places, Split(parts.train, fitted, None, parts.seen_for("test")), by="scores", device="cpu").model
        found = evaluate(model, judged, parts.seen_for("valid"), (20,), ("ndcg",))
        values |= dict(zip(found.query_ids.tolist(), found.per_query["ndcg@20"].tolist(), strict=True))
    listed = torch.from_numpy(np.flatnonzero(parts.train.counts()))
    alone = {
        place.name: evaluate(load(place).model, valid, parts.seen_for("valid"), (20,), ("ndcg",), among=listed)
        for place in places
    }
    best = max(alone, key=lambda name: alone[name].metrics["ndcg@20"])
    gains = np.array([values[query] for query in alone[best].query_ids.tolist()]) - alone[best].per_query["ndcg@20"]
    judged_gain = fusion_gain(places, parts, device="cpu")
    assert judged_gain.best == best
    assert judged_gain.gain == pytest.approx(gains.mean(), abs=1e-6)
    assert judged_gain.error == pytest.approx(gains.std(ddof=1) / len(gains) ** 0.5, abs=1e-6)


def test_two_choices_are_equal(everything: Path, runs: dict[str, Path], parts: Split) -> None:
    """The search for weights is deterministic."""
    again = fuse(list(runs.values()), parts, depth=15, device="cpu").model
    first = load(everything).model
    assert isinstance(first, Sources)
    assert again.by == first.by
    assert torch.equal(again.weights, first.weights)


def test_a_folder_recommends_for_queries_and_histories(everything: Path, parts: Split) -> None:
    """Lists of known queries leave out all that they took; a history goes through every source."""
    loaded = load(everything)
    model = loaded.model
    assert isinstance(model, Sources)
    weights, items = weights_of(loaded), loaded.ids.item_ids
    untrained = set(np.flatnonzero(parts.train.counts() == 0).tolist())
    tables = scores_of(model)
    for query in (0, 7, 33):
        found = loaded.recommend([loaded.ids.query_ids.decode([query])[0]], 8)
        taken = known(parts, query, "train", "valid", "test") | untrained
        expected = fused({name: own[query] for name, own in tables.items()}, weights, model.by, 15, taken)
        agrees(items.encode(found["item"].to_list()).tolist(), found["score"].to_list(), expected)
    history = [int(item) for item in np.unique(parts.train.items)[:3]]
    found = loaded.recommend_history(items.decode(history).tolist(), 8)
    scores = {}
    for source in model.sources:
        if source.name == "tables":  # no tower reads histories: the mean of the items, at length 1
            vectors = source.model.item_vectors().double().numpy()
            mean = vectors[history].mean(0)
            scores[source.name] = vectors @ (mean / np.linalg.norm(mean))
        else:
            q = source.model.encode_histories(torch.tensor([history]))[0].detach().double().numpy()
            scores[source.name] = q if source.model.scores_items else source.model.item_vectors().double().numpy() @ q
    expected = fused(scores, weights, model.by, 15, set(history) | untrained)
    agrees(items.encode(found["item"].to_list()).tolist(), found["score"].to_list(), expected)


def test_popularity_answers_for_queries_that_no_other_source_knows(
    runs: dict[str, Path], parts: Split, tmp_path: Path
) -> None:
    """A query without training pairs gets the most popular items, whatever weight popularity has."""
    stranger = int(parts.train.queries[0])
    rest = parts.train.subset(parts.train.queries != stranger)
    less = replace(parts, train=rest)
    folders = make_runs(tmp_path, less)
    model = fuse([folders[name] for name in ("ease", "tables", "popularity")], less, device="cpu").model
    model.weights = torch.tensor([0.5, 0.5, 0.0])
    counts = rest.counts()
    seen = less.seen_for("test")
    listed = model.lists(torch.tensor([stranger]), 5, seen)[0].tolist()
    free = [item for item in range(less.train.n_items) if item not in known(less, stranger, "valid")]
    assert [counts[item] for item in listed] == sorted((counts[item] for item in free), reverse=True)[:5]
    other = int(rest.queries[0])
    assert model.weights_of(model.parted(model.query_vectors(torch.tensor([other]))))[0].tolist() == [0.5, 0.5, 0.0]


def test_a_folder_is_whole_and_checked(everything: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    """It needs none of the runs; damage to a part is found and refused; a part cannot be elsewhere."""
    copy = tmp_path / "copy"
    shutil.copytree(everything, copy)
    assert check(copy).problems == []
    assert not list(copy.rglob("checkpoint*"))
    meta = json.loads((copy / "run.json").read_text())
    assert {part["name"]: part["run"] for part in meta["parts"]} == {
        name: str(path.resolve()) for name, path in runs.items()
    }
    model = copy / "parts" / "ease" / "model.safetensors"
    whole = model.read_bytes()
    model.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert [problem.path for problem in check(copy).problems] == [model]
    with pytest.raises(UserError, match="corrupt"):
        load(copy)
    model.write_bytes(whole)
    (copy / "parts" / "ease").rename(tmp_path / "elsewhere")
    (copy / "parts" / "ease").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="out of"):
        load(copy)


@pytest.mark.parametrize("names", [["../ease", "tables"], ["ease", ""], ["ease"], "ease", [1, 2]])
def test_names_of_parts_stay_inside(names: object, everything: Path, tmp_path: Path) -> None:
    """A file that names a part outside the folder, or too few parts, is refused."""
    copy = tmp_path / "copy"
    shutil.copytree(everything, copy)
    state = {"run": json.loads((copy / "run.json").read_text())["id"], "by": "ranks", "depth": 9, "parts": names}
    files.write_tensors(copy / "model.safetensors", {"weights": torch.tensor([0.5, 0.5])}, state)
    manifest.write_manifest(copy, apart=("index", "serve", "cache"))
    with pytest.raises(UserError, match=r"corrupt|missing"):
        load(copy)


def test_parts_with_code_need_trust(everything: Path, tmp_path: Path) -> None:
    """A part that names a recipe of somebody else is refused without trust, like any folder."""
    copy = tmp_path / "copy"
    shutil.copytree(everything, copy)
    path = copy / "parts" / "tables" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"recipe": "evil.py:run", "towers": {"query": "evil:T"}}))
    for folder in (copy / "parts" / "tables", copy):
        manifest.write_manifest(folder, apart=("index", "serve", "cache"))
    with pytest.raises(UserError) as refusal:
        load(copy)
    assert refusal.value.argument == "recipe"


def test_runs_that_do_not_fit_are_refused(
    runs: dict[str, Path], everything: Path, parts: Split, small_world: object, tmp_path: Path
) -> None:
    """Too few, twice the same, fused already, another split, other ids: one line, and nothing is written."""
    other = split(small_world.interactions, "random", valid=0.1, test=0.2, seed=2)  # type: ignore[attr-defined]
    kept = parts.train.subset(parts.train.items != parts.train.items[0])
    cases: list[tuple[list[Path], Split, str]] = [
        ([runs["ease"]], parts, "two"),
        ([runs["ease"], runs["ease"]], parts, "twice"),
        ([runs["ease"], everything], parts, "itself fused"),
        ([runs["ease"], tmp_path / "none"], parts, "no such run"),
        ([runs["ease"], runs["tables"]], other, "another split"),
        ([runs["ease"], runs["tables"]], Split(kept, None, parts.test), "validation part"),
    ]
    for given, data, word in cases:
        with pytest.raises(UserError, match=word):
            fuse(given, data, tmp_path / "out", device="cpu")
        assert not (tmp_path / "out").exists()
    for bad, word in (({"by": "votes"}, "votes"), ({"depth": 0}, "depth"), ({"select": "ndcg"}, "select")):
        with pytest.raises(UserError, match=word):
            fuse([runs["ease"], runs["tables"]], parts, device="cpu", **bad)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="inside"):
        fuse([runs["ease"], runs["tables"]], parts, runs["ease"] / "fused", device="cpu")


def test_other_ids_are_named(runs: dict[str, Path], parts: Split, tmp_path: Path) -> None:
    """Runs over other items are refused with the first item that one of them lacks."""
    world = sparring.data.make_world(60, 35, seed=3)
    fewer = split(world.interactions, "random", valid=0.1, test=0.2, seed=1)
    folders = make_runs(tmp_path, fewer)
    with pytest.raises(UserError, match=r"cannot be fused with .* no (query|item)"):
        fuse([runs["ease"], folders["popularity"]], parts, device="cpu")


# The command line


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the command line over a synthetic world, and the two fused."""
    folder = tmp_path_factory.mktemp("cli")
    for name in ("ease", "popularity"):
        words = ["train", "--data", "world:120x60", "--recipe", name, "--out", folder / name, "--device", "cpu"]
        assert main([str(word) for word in [*words, "--quiet"]]) == 0
    words = ["fuse", folder / "ease", folder / "popularity", "--out", folder / "fused", "--device", "cpu", "--quiet"]
    assert main([str(word) for word in words]) == 0
    return folder


def test_the_command_prints_and_evaluate_repeats(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`evaluate` of the folder has the fused figures of result.json, and those of each run."""
    capsys.readouterr()
    assert main(["evaluate", str(trained / "fused"), "--json", "--device", "cpu"]) == 0
    record = json.loads(capsys.readouterr().out)
    result = json.loads((trained / "fused" / "result.json").read_text())
    assert record["metrics"]["ndcg@20"] == pytest.approx(result["test"]["metrics"]["ndcg@20"], abs=1e-9)
    for name in ("ease", "popularity"):
        own = json.loads((trained / name / "result.json").read_text())["test"]["metrics"]["ndcg@20"]
        assert record["parts"][name]["metrics"]["ndcg@20"] == pytest.approx(own, abs=1e-9)
    assert main(["evaluate", str(trained / "fused"), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "parts/ease" in shown
    assert main(["check", str(trained / "fused")]) == 0
    out = trained / "lists.parquet"
    assert main(["recommend", str(trained / "fused"), "--all", "--out", str(out), "-k", "4"]) == 0
    loaded = load(trained / "fused")
    query = loaded.ids.query_ids.ids[5]
    own = pl.read_parquet(out).filter(pl.col("query") == query)["item"].to_list()
    assert own == loaded.recommend([query], 4)["item"].to_list()


def test_exported_files_give_the_fused_lists(everything: Path, parts: Split, tmp_path: Path) -> None:
    """Vectors, neighbours, weights and the way to fuse, read from Parquet and JSON alone."""
    out = tmp_path / "files"
    words = ["export", everything, "--to", "parquet", "--neighbours", parts.train.n_items, "--out", out]
    assert main([str(word) for word in words]) == 0
    how, trained = json.loads((out / "fusion.json").read_text()), load(everything)
    users, items = trained.ids.query_ids.ids.to_list(), trained.ids.item_ids.ids.to_list()
    tables = {}
    for name in how["weights"]:
        scores = np.full((len(users), len(items)), -np.inf)
        if (out / name / "neighbours.parquet").exists():
            weight = np.zeros((len(items), len(items)))
            for item, neighbour, score in pl.read_parquet(out / name / "neighbours.parquet").iter_rows():
                weight[items.index(item), items.index(neighbour)] = score
            taken = np.zeros((len(users), len(items)))
            taken[parts.train.queries, parts.train.items] = 1
            scores = taken @ weight
        else:
            sides = {side: pl.read_parquet(out / name / f"{side}.parquet") for side in ("queries", "items")}
            q, v = (side["vector"].to_numpy().astype(np.float64) for side in sides.values())
            rows, columns = (
                [of.index(id) for id in side["id"]] for of, side in zip((users, items), sides.values(), strict=True)
            )
            scores[np.ix_(rows, columns)] = q @ v.T
        tables[name] = scores
    untrained = set(np.flatnonzero(parts.train.counts() == 0).tolist())
    for query in np.unique(parts.train.queries)[:6].tolist():
        without = known(parts, query, "train", "valid", "test") | untrained
        own = {name: scores[query] for name, scores in tables.items()}
        expected = fused(own, how["weights"], how["by"], how["depth"], without)
        found = trained.recommend([users[query]], 8)
        agrees([items.index(item) for item in found["item"]], found["score"].to_list(), expected)


def test_commands_that_need_vectors_or_a_recipe_say_so(
    trained: Path, refused: Callable[..., str], tmp_path: Path
) -> None:
    """One line each for a fused run, for runs of another seed, and for a folder in use."""
    fused = trained / "fused"
    refused(["index", fused], "fused", "parts")
    refused(["export", fused, "--to", "onnx", "--out", tmp_path / "v"], "fused")
    refused(["recommend", fused, "--all", "--index", "--out", tmp_path / "l.csv"], "fused")
    refused(["evaluate", fused, "--ranking", "encoder"], "fused")
    refused(["diagnose", fused, "--device", "cpu"], "fused")
    refused(["fuse", trained / "ease", trained / "popularity", "--out", fused], "not empty")
    refused(["fuse", trained / "ease", trained / "none", "--out", tmp_path / "x"], "none")
    words = ["train", "--data", "world:120x60", "--recipe", "popularity", "--seed", "7", "--out", tmp_path / "seven"]
    assert main([str(word) for word in [*words, "--device", "cpu", "--quiet"]]) == 0
    refused(["fuse", trained / "ease", tmp_path / "seven", "--out", tmp_path / "x"], "seed=7")
    refused(["fuse", trained / "ease", trained / "popularity", "--by", "votes", "--out", tmp_path / "x"], "votes")
    assert not (tmp_path / "x").exists()


def test_a_fused_model_is_a_retriever(everything: Path) -> None:
    """The inner product of its vectors is the sum of the sources' scores."""
    model = load(everything).model
    assert isinstance(model, Retriever)
    queries, items = torch.tensor([0, 3]), torch.tensor([1, 2, 5])
    with torch.no_grad():
        found = model.query_vectors(queries) @ model.encode_items(items).T
    assert isinstance(model, Sources)
    total = sum(own for own in scores_of(model).values())
    np.testing.assert_allclose(found, total[[0, 3]][:, [1, 2, 5]], rtol=1e-4, atol=1e-4)  # type: ignore[index]
