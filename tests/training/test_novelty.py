"""Novelty: lists of every command are those of scores that a test corrects by hand; training does not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

from sparring.core.errors import UserError
from sparring.core.files import read_tensors
from sparring.core.types import Positives
from sparring.data.interactions import Split
from sparring.evaluation.ranking import evaluate, evaluate_lists
from sparring.experiments.novelty import NoveltyCurve, novelty_curve
from sparring.experiments.report import novelty as report
from sparring.models.retriever import Retriever
from sparring.models.towers import IdTower
from sparring.recipes.settings import build
from sparring.serving.export import write_neighbours, write_onnx, write_vectors
from sparring.serving.export.onnx import run_onnx
from sparring.serving.http.runs import RunRegistry
from sparring.serving.http.served_run import load_served
from sparring.serving.http.store import Store
from sparring.serving.index.run_index import build_index, build_lists, open_index
from sparring.training.fitting import fit
from sparring.training.fusing import fuse
from sparring.training.novelty import novel
from sparring.training.trained import Trained, load
from support.fused_runs import agrees, fused, make_runs, table, weights_of
from support.made_run import DIM, USERS, MadeRun, make_run
from support.settings import quick
from support.texts import text_parts

N = 0.4


@pytest.fixture(scope="module")
def folder(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of every kind over the small world."""
    folder = tmp_path_factory.mktemp("novelty")
    make_runs(folder, parts)
    return folder


def popularity(items: np.ndarray, n_items: int, untrained: np.ndarray | None = None) -> np.ndarray:
    """(N,): log(1 + count), standardised over the items that can be listed."""
    logs = np.log([1 + int((items == item).sum()) for item in range(n_items)])
    listed = [item for item in range(n_items) if untrained is None or item not in untrained]
    return (logs - logs[listed].mean()) / logs[listed].std()


def spreads(scores: np.ndarray) -> np.ndarray:
    """(U,): the deviation of the 200 best scores of each query."""
    return np.array([np.sort(row)[::-1][:200].std() for row in scores])


def corrected(trained: Trained, novelty: float = N) -> np.ndarray:
    """(U, N): the scores of a run that was loaded with novelty 0, corrected by hand."""
    assert not trained.novelty
    scores, seen = table(trained.model), trained.seen
    own = spreads(scores)
    if not trained.model.scores_items:
        own[:] = own[seen.start.diff().numpy() > 0].mean()
    z = popularity(seen.items.numpy(), trained.model.n_items, trained.eligibility.items.numpy())
    return scores - novelty * own[:, None] * z


def best(scores: np.ndarray, without: set[int], k: int) -> list[int]:
    return [item for item in np.argsort(-scores, kind="stable").tolist() if item not in without][:k]


def taken(trained: Trained, query: int) -> set[int]:
    return set(trained.eligibility.taken(torch.tensor([query])).items.tolist()) | set(
        trained.eligibility.items.tolist()
    )


# Vectors


@pytest.fixture(scope="module", params=[("dot", False), ("dot", True), ("cosine", False), ("cosine", True)], ids=str)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    score, bias = request.param
    return make_run(tmp_path_factory.mktemp("made") / "run", items=260, score=score, bias=bias)


def made_scores(made: MadeRun) -> np.ndarray:
    scores = made.users @ made.items.T
    return scores - N * spreads(scores).mean() * popularity(made.seen.ravel(), len(made.items))


def test_every_way_to_rank_vectors(made: MadeRun, tmp_path: Path) -> None:
    """Recommendations, an index, the service and both exports have the scores that a test corrects by hand."""
    expected, run = made_scores(made), load(made.folder, novelty=N)
    lists = [best(row, set(seen), 9) for row, seen in zip(expected, made.seen.tolist(), strict=True)]
    plain = made.users @ made.items.T
    assert lists != [best(row, set(seen), 9) for row, seen in zip(plain, made.seen.tolist(), strict=True)]
    table = run.recommend([made.user(row) for row in range(USERS)], 9)
    assert [made.item_ids.index(item) for item in table["item"]] == np.ravel(lists).tolist()
    np.testing.assert_allclose(
        table["score"].to_numpy().reshape(USERS, 9),
        np.take_along_axis(expected, np.array(lists), 1),
        rtol=1e-4,
        atol=1e-5,
    )
    build_index(run, k=10, queries=20)
    index, users = open_index(made.folder, novelty=N), torch.arange(USERS)
    found = index.search(run.model.query_vectors(users).numpy(), 9, made.seen.tolist())[1]
    assert found.tolist() == lists
    store = Store(tmp_path / "items.sqlite")
    served = RunRegistry([made.folder], store, novelty=N).served()
    found = served.index.search(served.user_vectors(np.arange(USERS)), 9, made.seen.tolist())[1]
    assert found.tolist() == lists
    assert any("novelty" in note for note in served.notes)
    store.close()
    items, queries = (pl.read_parquet(path)["vector"].to_numpy() for path in write_vectors(run, tmp_path))
    np.testing.assert_allclose(queries @ items.T, expected, rtol=1e-4, atol=1e-5)


def test_onnx_towers(made: MadeRun, tmp_path: Path) -> None:
    """The towers as ONNX have the corrected scores too."""
    pytest.importorskip("onnxruntime")
    write_onnx(load(made.folder, novelty=N), tmp_path)
    items, queries = (
        run_onnx(tmp_path / f"{side}.onnx", np.arange(n)) for side, n in (("item", len(made.items)), ("query", USERS))
    )
    np.testing.assert_allclose(queries @ items.T, made_scores(made), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_similar_items_do_not_change(bias: bool, tmp_path: Path) -> None:
    """Items as queries ignore popularity, with or without novelty."""
    made = make_run(tmp_path / "run", bias=bias)
    vectors = made.items[:, :DIM]
    expected = -np.sort(-(vectors[:5] @ vectors.T), axis=1)[:, :9]
    for novelty in (0, N):
        served = load_served(made.folder, "made", novelty=novelty)
        scores = served.index.search(served.item_queries(np.arange(5)), 9)[0]
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


def test_an_index_of_another_novelty_is_refused(tmp_path: Path) -> None:
    """By open_index, the service and `recommend --all --index`, with both values in the line."""
    made = make_run(tmp_path / "run")
    build_index(load(made.folder, novelty=0.25), k=10, queries=20)
    for ask in (lambda: open_index(made.folder, novelty=0.5), lambda: load_served(made.folder, "a", novelty=0.5)):
        with pytest.raises(UserError, match=r"0\.25.*0\.5"):
            ask()
    with pytest.raises(UserError, match="novelty"):
        load_served(made.folder, "a")


def retriever(scale: float, score: Literal["cosine", "dot"] = "dot") -> Retriever:
    """Towers from a seed; the scale multiplies all scores."""
    generator = torch.Generator().manual_seed(3)
    model = Retriever(IdTower(30, 8), IdTower(250, 8), score)
    for tower in (model.query, model.item):
        tower.weight.data = torch.randn(tower.weight.shape, generator=generator)  # type: ignore[union-attr]
    model.query.weight.data *= scale  # type: ignore[union-attr, operator]
    return model


def seen_pairs() -> Positives:
    items = np.random.default_rng(0).zipf(1.5, 600) % 250
    return Positives(torch.arange(31) * 20, torch.from_numpy(items).int())


def test_novelty_has_no_unit() -> None:
    """Scores that are a thousand times as large give the same lists."""
    ids = torch.arange(30)
    lists = []
    for scale in (1.0, 1024.0):
        model = novel(retriever(scale), 0.6, seen_pairs())
        lists.append((model.query_vectors(ids) @ model.item_vectors().T).topk(20, 1).indices)
    assert torch.equal(*lists)


def test_novelty_0_changes_no_bit(folder: Path) -> None:
    """It is the model itself; by default a run has it."""
    for run in sorted(folder.iterdir()):
        trained = load(run, novelty=0)
        assert trained.with_novelty(0).model is trained.model
        assert load(run).novelty == 0


def test_equally_popular_items_keep_their_scores() -> None:
    """Where every item has as many interactions, there is nothing to correct."""
    model = retriever(1.0)
    seen = Positives(torch.arange(31) * 25, torch.arange(750).int() % 250)
    found = novel(model, 1.0, seen)
    ids = torch.arange(30)
    scores = found.query_vectors(ids) @ found.item_vectors().T
    torch.testing.assert_close(scores, model.query_vectors(ids) @ model.item_vectors().T)


def test_text_towers_cache_vectors_without_biases(tmp_path: Path, private_home: None) -> None:
    """Runs of any novelty share the cached vectors of texts, with a learned bias or without."""
    parts = text_parts()
    for bias in (False, True):
        settings = quick(encoder="bag", n=16, item_bias=bias)
        fit(build("tables", parts.train, settings), parts, tmp_path / str(bias), k=(10,), device="cpu")
        for novelty in (0.3, 0, 0.7):
            run = load(tmp_path / str(bias), novelty=novelty)
            torch.testing.assert_close(run.item_vectors(), run.model.item_vectors())
        assert len(list((tmp_path / str(bias) / "cache").iterdir())) == 1


# Item-item matrices, popularity, fused runs


@pytest.mark.parametrize("name", ["ease", "item_knn", "popularity", "ials", "tables"])
def test_every_kind_of_model(folder: Path, name: str) -> None:
    """`recommend` and the service list the best of the scores that a test corrects by hand."""
    plain, run = load(folder / name, novelty=0), load(folder / name, novelty=N)
    expected, served = corrected(plain), load_served(folder / name, name, novelty=N)
    users, n = np.arange(len(expected)), len(expected[0])
    hidden = [np.array(sorted(taken(plain, user))) for user in users]
    scores, items = served.index.search(served.user_vectors(users), 6, hidden)
    listed = run.recommend(run.ids.query_ids.ids.to_list(), 6)
    for user, name in enumerate(run.ids.query_ids.ids):
        left = {item: expected[user, item] for item in range(n) if item not in hidden[user]}
        found = items[user] >= 0
        agrees(items[user][found].tolist(), scores[user][found].tolist(), left)
        own = listed.filter(pl.col("query") == name)
        agrees(run.ids.item_ids.encode(own["item"].to_list()).tolist(), own["score"].to_list(), left)


def test_histories_of_new_queries(folder: Path) -> None:
    """An item-item matrix corrects a history by the spread of its own scores."""
    plain, run = load(folder / "ease", novelty=0), load(folder / "ease", novelty=N)
    untrained = plain.eligibility.items.tolist()
    history = [item for item in range(plain.model.n_items) if item not in untrained][4:7]
    weight = plain.model.query.weight.detach().numpy().astype(np.float64)  # type: ignore[union-attr]
    scores = weight[history].sum(0)
    z = popularity(plain.seen.items.numpy(), plain.model.n_items, plain.eligibility.items.numpy())
    expected = scores - N * spreads(scores[None])[0] * z
    listed = run.recommend_history(run.ids.item_ids.decode(history).tolist(), 6)
    left = {item: expected[item] for item in range(len(expected)) if item not in {*history, *untrained}}
    agrees(run.ids.item_ids.encode(listed["item"].to_list()).tolist(), listed["score"].to_list(), left)


def test_the_neighbours_in_an_index_are_corrected_when_searched(folder: Path, parts: Split, tmp_path: Path) -> None:
    """One index of an item-item matrix serves any novelty; neighbours cannot be exported with one."""
    run = tmp_path / "ease"
    fit(build("ease", parts.train, {"lam": 20.0}), parts, run, k=(10,), device="cpu")
    build_lists(load(run), parts.train.n_items, k=10, queries=20)
    expected, served = corrected(load(run)), load_served(run, "ease", novelty=N)
    assert served.index.kind == "lists"
    np.testing.assert_allclose(served.user_vectors(np.arange(len(expected))), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="neighbours"):
        write_neighbours(load(run, novelty=N), tmp_path / "out")


def test_fused_runs(folder: Path, parts: Split, tmp_path: Path) -> None:
    """Each source is corrected in its own unit, then the lists are fused as ever."""
    names = ["ease", "tables", "popularity"]
    fuse([folder / name for name in names], parts, tmp_path / "fused", by="scores", depth=12, device="cpu")
    run = load(tmp_path / "fused", novelty=N)
    scores = {name: corrected(load(folder / name, novelty=0)) for name in names}
    for query in (0, 3, 11):
        without = taken(run, query)
        expected = fused({name: own[query] for name, own in scores.items()}, weights_of(run), "scores", 12, without)
        found = run.recommend([run.ids.query_ids.ids[query]], 6)
        agrees(run.ids.item_ids.encode(found["item"].to_list()).tolist(), found["score"].to_list(), expected)


# Training and evaluation


def test_as_a_setting_of_a_run(parts: Split, tmp_path: Path) -> None:
    """Training has the same bits; the test part is ranked with novelty, and so is the finished run."""
    plain, run = tmp_path / "plain", tmp_path / "novel"
    for folder, settings in ((plain, {}), (run, {"novelty": N})):
        fit(build("tables", parts.train, quick(n=16, epochs=2, **settings)), parts, folder, k=(10,), device="cpu")
    before, after = (read_tensors(folder / "model.safetensors")[0] for folder in (plain, run))
    assert all(torch.equal(before[name], after[name]) for name in {*before, *after})
    trained = load(run)
    assert trained.novelty == N
    assert load(run, novelty=0).with_novelty(N).recommend([3]).equals(trained.recommend([3]))
    expected = corrected(load(plain))
    assert parts.test is not None
    seen = parts.seen_for("test")
    lists = [
        best(
            expected[query],
            {*seen.items[seen.start[query] : seen.start[query + 1]].tolist()} | {*trained.eligibility.items.tolist()},
            10,
        )
        for query in np.unique(parts.test.queries)
    ]
    by_hand = evaluate_lists(np.array(lists), parts.test, parts.train.n_items, (10,), counts=parts.train.counts())
    assert f"novelty {N}" in (run / "README.md").read_text()
    found = json.loads((run / "result.json").read_text())["test"]
    for name in ("recall@10", "ndcg@10", "coverage@10"):
        assert found["metrics"][name] == pytest.approx(by_hand.metrics[name])
    assert found["strata"]["tail"]["recall@10"] == pytest.approx(by_hand.strata["tail"]["recall@10"])


def test_the_curve_is_an_evaluation_per_value(folder: Path, parts: Split, tmp_path: Path) -> None:
    """Every figure is that of `evaluate` at its value; the largest novelty keeps its share of NDCG, the next less."""
    assert parts.test is not None
    trained, seen, counts = load(folder / "tables", novelty=0), parts.seen_for("test"), parts.train.counts()
    values = (0.2, 0.5, 0.8, 1.0)
    curve = novelty_curve(trained, parts.test, seen, values, k=5, counts=counts)
    listed, rows = trained.eligibility.listed(parts.train.n_items), curve.table().rows
    assert [row["novelty"] for row in rows] == [0.0, *values]
    for row in rows:
        model = load(folder / "tables", novelty=float(row["novelty"] or 0)).model
        found = evaluate(model, parts.test, seen, (5,), counts=counts, among=listed)
        assert row["ndcg"] == found.metrics["ndcg@5"]
        assert row["coverage"] == found.metrics["coverage@5"]
        assert (row["tail"], row["head_share"]) == (found.strata["tail"]["recall@5"], found.strata["head"]["share@5"])
        assert row["kept"] == pytest.approx(found.metrics["ndcg@5"] / float(rows[0]["ndcg"] or 0))
    assert float(rows[-1]["head_share"] or 0) < float(rows[0]["head_share"] or 0)
    kept = [float(row["kept"] or 0) for row in rows]
    threshold = (min(kept) + 1) / 2
    place = next(at for at, share in enumerate(kept) if share < threshold) - 1
    assert curve.largest(threshold) == rows[place]["novelty"]
    steep = NoveltyCurve(5, {value: curve.points[place] for value, place in ((0.0, 0.0), (0.5, 1.0))})
    assert steep.kept(0.5) < 0.95
    assert "more than 5%" in report.in_short(steep)
    page = report.write(curve, tmp_path / "report", {"run": "tables"})
    assert "Novelty" in page.read_text()
    assert {path.name for path in page.parent.iterdir()} >= {"novelty.svg", "novelty.png", "novelty.csv", "novelty.md"}


# Refusals


class _Own(Retriever):
    """A score of one's own."""


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_values_outside_0_to_1_are_refused(folder: Path, parts: Split, value: float) -> None:
    with pytest.raises(UserError, match="novelty"):
        load(folder / "ease", novelty=value)
    with pytest.raises(UserError, match="novelty"):
        build("tables", parts.train, quick(novelty=value))


def test_what_cannot_be_corrected_is_refused(folder: Path, parts: Split) -> None:
    """A corrected run, a model of another class (before its training), classifiers."""
    with pytest.raises(UserError, match="novelty=0"):
        load(folder / "ease", novelty=0.2).with_novelty(0.3)
    with pytest.raises(UserError, match="_Own"):
        novel(_Own(nn.Embedding(4, 2), nn.Embedding(5, 2)), 0.2, seen_pairs())
    with pytest.raises(UserError, match="clf_epochs"):
        build("ngame", parts.train, quick(novelty=0.2, clf_epochs=1))
    with pytest.raises(UserError, match="no fused ranking"):
        load(folder / "tables", novelty=0.2).recommend([3], ranking="fused")
