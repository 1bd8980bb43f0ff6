"""Item-item matrices and fused runs over HTTP: users, histories, similar items, changes, shares and metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from sparring.data.interactions import Split
from sparring.serving.http.served_run import load_served
from sparring.serving.index.run_index import build_index, build_lists
from sparring.training.fusing import fuse
from sparring.training.sources import Sources
from sparring.training.trained import Trained, load
from support.fused_runs import make_runs

NAMES = ("ease", "tables", "popularity")


@pytest.fixture(scope="module")
def folder(parts: Split, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind, and `fused`: ease, towers with an index, popularity; by scores, each with a weight."""
    folder = tmp_path_factory.mktemp("runs")
    runs = make_runs(folder, parts)
    build_index(load(runs["tables"]), k=10, queries=20)
    fuse([runs[name] for name in NAMES], parts, folder / "fused", by="scores", depth=12, device="cpu")
    return folder


def items_of(response: Any) -> list[list[Any]]:
    assert response.status_code == 200, response.text
    return [[item["id"] for item in result["items"]] for result in response.json()["results"]]


def plain(ids: Any) -> list[Any]:
    return np.asarray(ids).tolist()


@pytest.mark.parametrize("name", ["ease", "item_knn", "fused"])
def test_lists_are_those_of_recommend(name: str, folder: Path, serving: Callable[..., TestClient]) -> None:
    """Users and histories get what the folder recommends; deny, allow and conditions are exact."""
    client, loaded = serving(folder / name, store=folder / f"{name}.sqlite"), load(folder / name)
    users = [plain(loaded.ids.query_ids.ids)[row] for row in (0, 3, 11)]
    found = items_of(client.post("/v1/recommend", json={"users": users, "k": 6}))
    assert found == [loaded.recommend([user], 6)["item"].to_list() for user in users]
    history = plain(loaded.ids.item_ids.ids)[2:5]
    found = items_of(client.post("/v1/recommend", json={"history": history, "k": 6}))
    assert found == [loaded.recommend_history(history, 6)["item"].to_list()]
    best = loaded.recommend([users[0]], loaded.model.n_items)["item"].to_list()
    body = {"user": users[0], "k": 3, "deny": best[:2]}
    if name != "fused":  # of a fused run, the scores of a list depend on the list
        assert items_of(client.post("/v1/recommend", json=body)) == [best[2:5]]
        body = {"user": users[0], "k": 9, "allow": best[4:8]}
        assert items_of(client.post("/v1/recommend", json=body)) == [best[4:8]]
    else:
        assert not {*items_of(client.post("/v1/recommend", json=body))[0]} & {*best[:2]}
        body = {"user": users[0], "k": 9, "allow": best[4:8]}
        assert {*items_of(client.post("/v1/recommend", json=body))[0]} == {*best[4:8]}


def test_similar_items_are_rows_of_the_matrix(folder: Path, serving: Callable[..., TestClient]) -> None:
    """The neighbours of an item, the largest weight first, without the item itself and untrained items."""
    client, loaded = serving(folder / "ease", store=folder / "similar.sqlite"), load(folder / "ease")
    item = int(np.setdiff1d(np.arange(loaded.model.n_items), loaded.eligibility.items)[4])
    row = loaded.model.query.weight.detach().numpy()[item]  # type: ignore[union-attr]
    left = {item, *loaded.eligibility.items.tolist()}
    order = [i for i in sorted(range(len(row)), key=lambda i: (-row[i], i)) if i not in left][:5]
    ids = plain(loaded.ids.item_ids.ids)
    assert items_of(client.post("/v1/similar", json={"item": ids[item], "k": 5})) == [[ids[i] for i in order]]


def test_an_index_cuts_the_served_matrix(folder: Path, tmp_path: Path, parts: Split) -> None:
    """A served run with an index of neighbours ranks by these; its kind and recall are reported."""
    run = make_runs(tmp_path, parts)["ease"]
    whole = load_served(run, "ease")
    measured = build_lists(load(run), 5, k=10, queries=20)
    served = load_served(run, "ease")
    assert (whole.index.kind, served.index.kind) == ("exact", "lists")
    assert served.index.meta["measured"]["recall"] == measured["recall"]
    assert served.trained.model.query.weight.shape == (parts.train.n_items, 5)  # type: ignore[union-attr]
    assert not np.allclose(served.user_vectors(np.array([3])), whole.user_vectors(np.array([3])))


def expected_shares(loaded: Trained, query: int, k: int) -> list[float]:
    """The share of a fused list that each source has among its own k best."""
    taken = loaded.eligibility.taken(torch.tensor([query]))
    model = loaded.model
    assert isinstance(model, Sources)
    q = model.query_vectors(torch.tensor([query]))
    final = set(model.best(q, k, taken)[1][0].tolist())
    own = []
    for source in model.sources:
        vectors = None if source.model.scores_items else source.model.item_vectors()
        ranking = source.eligibility.ranking(vectors, source.model.n_items)
        own.append(set(ranking.best(source.model.query_vectors(torch.tensor([query])), k, taken)[1][0].tolist()))
    return [len(final & listed) / len(final) for listed in own]


def test_answers_and_metrics_name_the_sources(folder: Path, serving: Callable[..., TestClient]) -> None:
    """Each answer has the share and the time of each source with a weight; /metrics sums them, /v1/info has weights."""
    client, loaded = serving(folder / "fused", store=folder / "sources.sqlite"), load(folder / "fused")
    user = plain(loaded.ids.query_ids.ids)[3]
    answer = client.post("/v1/recommend", json={"user": user, "k": 6}).json()
    assert [source["name"] for source in answer["sources"]] == list(NAMES)
    weights = client.get("/v1/info").json()["run"]["sources"]
    assert weights == {part["name"]: part["weight"] for part in loaded.meta["parts"]}
    for source, share in zip(answer["sources"], expected_shares(loaded, 3, 6), strict=True):
        if weights[source["name"]]:
            assert source["share"] == pytest.approx(share, abs=1e-3)
            assert source["ms"] > 0
    text = client.get("/metrics").text
    for name in NAMES:
        assert f'sparring_source_seconds_total{{run="fused",source="{name}"}}' in text
        assert f'sparring_source_items_total{{run="fused",source="{name}"}}' in text
    assert (
        "sources"
        not in serving(folder / "ease", store=folder / "s2.sqlite").post("/v1/recommend", json={"user": user}).json()
    )


@pytest.mark.parametrize("name", ["ease", "fused"])
def test_items_leave_and_come_back_but_none_is_new(name: str, folder: Path, serving: Callable[..., TestClient]) -> None:
    """A deleted item is listed no more until it is put again; an item that no training had is refused."""
    client, loaded = serving(folder / name, store=folder / f"{name}-changes.sqlite"), load(folder / name)
    user = plain(loaded.ids.query_ids.ids)[0]
    body = {"user": user, "k": 4}
    before = items_of(client.post("/v1/recommend", json=body))[0]
    total = client.get("/v1/info").json()["run"]["items"]
    assert client.request("DELETE", "/v1/items", json={"ids": before[:1]}).status_code == 200
    assert before[0] not in items_of(client.post("/v1/recommend", json=body))[0]
    assert client.get("/v1/info").json()["run"]["items"] == total - 1
    assert client.post("/v1/similar", json={"item": before[0]}).status_code == 404
    assert client.put("/v1/items", json={"items": [{"id": before[0], "title": "back"}]}).status_code == 200
    assert items_of(client.post("/v1/recommend", json=body))[0] == before
    assert client.get("/v1/info").json()["run"]["items"] == total
    for placed in ({"like": before[:1]}, {"vector": [1.0] * loaded.model.dim}, {}):
        refusal = client.put("/v1/items", json={"items": [{"id": 987654, **placed}]})
        assert refusal.status_code == 422
        assert "trained on" in refusal.json()["detail"]
