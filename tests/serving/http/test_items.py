"""Items put and deleted while serving: effective at once, kept over a restart, atomic per request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from fastapi.testclient import TestClient

from sparring.data.interactions import Split
from sparring.recipes.settings import build
from sparring.serving.http.store import Change, Store
from sparring.serving.index import Index
from sparring.training.fitting import fit
from support.made_run import DIM, MadeRun, make_run
from support.run_files import approve
from support.texts import text_parts


def ids(client: TestClient, body: dict[str, Any], path: str = "/v1/similar") -> list[Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return [item["id"] for item in answer.json()["results"][0]["items"]]


def put(client: TestClient, *items: dict[str, Any]) -> dict[str, Any]:
    answer = client.put("/v1/items", json={"items": list(items)})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_new_item_by_its_vector_is_ranked_among_the_others(truth: MadeRun, client: TestClient) -> None:
    """Its score is the inner product, filters see its title and columns, and other items are unchanged."""
    vector = (truth.users[3] * 0.8).tolist()
    put(client, {"id": "fresh", "title": "Fresh", "price": 0.5, "vector": vector})
    answer = client.post("/v1/recommend", json={"user": "user-03", "k": 5, "fields": ["price", "category"]}).json()[
        "results"
    ][0]["items"]
    expected = sorted(
        [("fresh", float(truth.users[3] @ vector)), *truth.best(truth.users[3], 5, truth.seen[3].tolist())],
        key=lambda pair: -pair[1],
    )[:5]
    assert [item["id"] for item in answer] == [item for item, _ in expected]
    np.testing.assert_allclose([item["score"] for item in answer], [score for _, score in expected], rtol=1e-4)
    fresh = next(item for item in answer if item["id"] == "fresh")
    assert (fresh["title"], fresh["price"], fresh["category"]) == ("Fresh", 0.5, None)
    cheap = client.post(
        "/v1/recommend", json={"user": "user-03", "k": 60, "where": [{"column": "price", "op": "=", "value": 0.5}]}
    ).json()
    assert [item["id"] for item in cheap["results"][0]["items"]] == ["fresh"]


def test_a_new_item_like_others_gets_their_mean(truth: MadeRun, client: TestClient) -> None:
    """It has the mean direction at the mean length, and may be like an item of the same request."""
    rows = [5, 9]
    put(client, {"id": 1, "like": [truth.item_ids[row] for row in rows]}, {"id": "copy", "like": [1]})
    mean = truth.items[rows].mean(0)
    expected = mean / np.linalg.norm(mean) * np.linalg.norm(truth.items[rows], axis=1).mean()
    found = client.post("/v1/similar", json={"item": truth.item_ids[0], "k": 100}).json()["results"][0]["items"]
    scores = {item["id"]: item["score"] for item in found}
    assert scores[1] == pytest.approx(float(truth.items[0] @ expected), rel=1e-4)
    assert scores["copy"] == pytest.approx(scores[1], rel=1e-4)


def test_what_is_not_said_stays(truth: MadeRun, client: TestClient) -> None:
    """A put of one column keeps the vector and the other columns, for trained and added items."""
    item = truth.item_ids[7]
    before = ids(client, {"item": item, "k": 60})
    put(client, {"id": item, "price": 99.5})
    assert ids(client, {"item": item, "k": 60}) == before
    about = client.get(f"/v1/items/{item}").json()
    assert (about["columns"]["price"], about["title"], about["columns"]["year"], about["source"]) == (
        99.5,
        "thing 7",
        2007,
        "changed",
    )
    put(client, {"id": "new", "title": "New", "like": [item], "year": 1})
    put(client, {"id": "new", "price": 3.25})
    about = client.get("/v1/items/new").json()
    assert (about["title"], about["columns"]["price"], about["columns"]["year"], about["source"]) == (
        "New",
        3.25,
        1,
        "added",
    )
    assert "new" in ids(client, {"item": item, "k": 60})


def test_lists_in_a_column_stay_lists(truth: MadeRun, client: TestClient) -> None:
    """An item has its list before and after a change of another column, by itself and in a list."""
    assert truth.table is not None
    tags = dict(zip(truth.item_ids, truth.table["tags"].to_list(), strict=True))
    for changes in range(2):
        for item in truth.item_ids[:2]:
            assert client.get(f"/v1/items/{item}").json()["columns"]["tags"] == tags[item]
        answer = client.post("/v1/similar", json={"item": truth.item_ids[9], "k": 59, "fields": ["tags"]}).json()
        found = {item["id"]: item["tags"] for item in answer["results"][0]["items"]}
        assert found == {item: given for item, given in tags.items() if item != truth.item_ids[9]}
        put(client, *({"id": item, "price": 5.0 + changes} for item in truth.item_ids[:2]))
    new = [{"column": "tags", "op": "contains", "value": "new"}]
    assert set(ids(client, {"item": truth.item_ids[9], "k": 60, "where": new})) == set(truth.item_ids[1::2]) - {
        truth.item_ids[9]
    }


def test_a_deleted_item_is_gone_until_it_is_put_again(truth: MadeRun, client: TestClient) -> None:
    """A deleted item is not listed or described; a put restores its trained vector and columns."""
    item, other = truth.item_ids[7], truth.item_ids[8]
    put(client, {"id": "new", "like": [item], "title": "New"}, {"id": item, "price": 1000.0})
    answer = client.request("DELETE", "/v1/items", json={"ids": [item, "new"]})
    assert (answer.status_code, answer.json()["count"]) == (200, 2)
    assert not {item, "new"} & set(ids(client, {"item": other, "k": 60}))
    for gone in (item, "new"):
        assert client.get("/v1/item", params={"id": gone}).status_code == 404
        assert client.post("/v1/similar", json={"item": gone}).status_code == 404
    put(client, {"id": item})
    assert ids(client, {"item": item, "k": 3}) == [each for each, _ in truth.best(truth.items[7], 3, {7})]
    assert client.get(f"/v1/items/{item}").json()["columns"]["price"] == truth.table["price"][7]  # type: ignore[index]


def test_changes_are_there_after_a_restart(truth: MadeRun, serving: Callable[..., TestClient]) -> None:
    """A new service over the same store gives the same responses."""
    first = serving(truth.folder)
    put(
        first, {"id": "new", "title": "New", "like": [truth.item_ids[0]]}, {"id": truth.item_ids[1], "title": "Renamed"}
    )
    put(first, {"id": "like-new", "like": ["new"]}, {"id": "given", "vector": [1.0] * DIM})
    first.request("DELETE", "/v1/items", json={"ids": [truth.item_ids[2]]})
    question = {"users": [truth.user(row) for row in range(20)], "k": 60}
    before = first.post("/v1/recommend", json=question).json()["results"]
    first.stop()  # type: ignore[attr-defined]
    second = serving(truth.folder)
    assert second.post("/v1/recommend", json=question).json()["results"] == before
    info = second.get("/v1/info").json()
    assert (info["changed"], info["deleted"], info["run"]["items"]) == (4, 1, 62)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"id": "new"}, "vector"),
    ({"id": "new", "vector": [1.0, 2.0]}, "2 numbers"),
    ({"id": "new", "vector": [0.0] * 8}, "zero"),
    ({"id": "new", "vector": [1e300] * 8}, "finite"),
    ({"id": "new", "vector": "abc"}, "vector"),
    ({"id": "new", "vector": []}, "vector"),
    ({"id": "new", "like": []}, "like"),
    ({"id": "new", "like": ["nothing"]}, "'nothing'"),
    ({"id": "new", "like": ["new"]}, "'new'"),
    ({"id": "new", "text": "words"}, "texts"),
    ({"id": "new", "like": [1000], "colour": "red"}, "'colour'"),
    ({"id": "new", "like": [1000], "price": "cheap"}, "price"),
    ({"id": "new", "like": [1000], "price": True}, "price"),
    ({"id": "new", "like": [1000], "year": 10**30}, "year"),
    ({"id": "new", "like": [1000], "since": "soon"}, "since"),
    ({"id": "new", "like": [1000], "tags": ["red"]}, "tags"),
    ({"id": None, "like": [1000]}, "id"),
    ({"like": [1000]}, "id"),
    ({"id": {"a": 1}, "like": [1000]}, "id"),
]


@pytest.mark.parametrize(("item", "word"), BAD, ids=[str(item)[:50] for item, _ in BAD])
def test_a_bad_item_is_refused_with_all_of_its_request(
    truth: MadeRun, client: TestClient, item: dict[str, Any], word: str
) -> None:
    """The request gets 422 with a reason, and none of its items is stored."""
    answer = client.put("/v1/items", json={"items": [{"id": "good", "like": [1000]}, item]})
    assert (answer.status_code, word in answer.json()["detail"]) == (422, True), answer.text
    assert client.get("/v1/items/good").status_code == 404
    info = client.get("/v1/info").json()
    assert (info["changed"], info["run"]["items"]) == (0, 60)


def test_deleting_what_never_was_is_refused(truth: MadeRun, client: TestClient) -> None:
    """Deleting an unknown item gets 404, and nothing else of the request is deleted."""
    assert client.request("DELETE", "/v1/items", json={"ids": [truth.item_ids[0], "nothing"]}).status_code == 404
    assert client.get(f"/v1/items/{truth.item_ids[0]}").status_code == 200
    assert client.request("DELETE", "/v1/items", json={"ids": []}).status_code == 422


def test_a_full_disk_refuses_and_changes_nothing(
    truth: MadeRun, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that cannot be stored is neither acknowledged nor listed."""
    store = client.service.registry.store  # type: ignore[attr-defined]
    store._db.execute("PRAGMA max_page_count=1")
    answer = client.put(
        "/v1/items",
        json={"items": [{"id": f"{'x' * 900}{at}", "like": [1000], "title": "y" * 9000} for at in range(50)]},
    )
    assert (answer.status_code, "full" in answer.json()["detail"]) == (507, True)
    assert client.get("/v1/info").json()["run"]["items"] == 60
    assert ids(client, {"item": 1000, "k": 1}) == [each for each, _ in truth.best(truth.items[0], 1, {0})]


def test_new_items_of_a_second_run_wait_where_it_cannot_place_them(
    tmp_path: Path, serving: Callable[..., TestClient]
) -> None:
    """A vector belongs to one model, so the other run reports the item as waiting; `like` works in both."""
    one, two = make_run(tmp_path / "one", 1), make_run(tmp_path / "two", 2, dim=5)
    client = serving(one.folder, two.folder)
    answer = put(client, {"id": "v", "vector": [1.0] * DIM}, {"id": "l", "like": [1000]})
    assert answer["waiting"] == {"two": ["v"]}
    for run, expected in (("one", {"v", "l"}), ("two", {"l"})):
        assert {"v", "l"} & set(ids(client, {"user": "user-01", "k": 100, "run": run}, "/v1/recommend")) == expected
    client.request("DELETE", "/v1/items", json={"ids": ["v"]})
    assert client.get("/v1/info").json()["runs"][1]["waiting"] == 0


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Split]:
    """A run whose towers read texts."""
    folder, parts = tmp_path_factory.mktemp("text") / "run", text_parts()
    fit(
        build(
            "ssl_pop",
            parts.train,
            {"encoder": "bag", "dim": 8, "epochs": 1, "query_tower": "text", "item_tower": "text"},
        ),
        parts,
        folder,
        k=(10,),
        device="cpu",
    )
    return folder, parts


def test_texts_are_queries_and_new_items(
    text_run: tuple[Path, Split], serving: Callable[..., TestClient], tmp_path: Path
) -> None:
    """A text query gets the ranking of the model; a new item with the title and text of a known one gets its score,
    with the text alone another; an empty text is an error."""
    folder, parts = text_run
    client = serving(folder, store=tmp_path / "items.sqlite")
    trained = client.service.registry.served().trained  # type: ignore[attr-defined]
    assert parts.train.item_table is not None
    words = str(parts.train.item_table["text"][3])
    scores = (trained.encode_texts([words], "query") @ trained.model.item_vectors().T)[0]
    found = client.post("/v1/recommend", json={"text": words, "k": 5}).json()["results"][0]["items"]
    np.testing.assert_allclose(
        [item["score"] for item in found], scores.sort(descending=True).values[:5].numpy(), rtol=1e-4, atol=1e-5
    )
    twin = parts.train.item_ids.decode([3]).tolist()[0]
    put(
        client,
        {"id": "twin", "title": str(parts.train.item_table["title"][3]), "text": words},
        {"id": "bare", "text": words},
    )
    again = client.post("/v1/recommend", json={"texts": [words, "other"], "k": 100}).json()["results"]
    by_id = {item["id"]: item["score"] for item in again[0]["items"]}
    assert by_id["twin"] == pytest.approx(by_id[twin], abs=1e-5)
    assert by_id["bare"] == pytest.approx(1.0, abs=1e-5)
    assert by_id["twin"] < 0.999
    for blank in ({"text": ""}, {"texts": [words, "   "]}):
        refused = client.post("/v1/recommend", json=blank)
        assert (refused.status_code, "text" in refused.text) == (422, True)
    assert [each["query"] for each in again] == [words, "other"]


def test_features_place_a_new_item_through_the_tower(
    parts: Split, serving: Callable[..., TestClient], tmp_path: Path
) -> None:
    """New items of one category share a vector that differs by category; an unseen category counts as missing."""
    folder = tmp_path / "run"
    fit(
        build("ssl_pop", parts.train, {"dim": 8, "epochs": 1, "item_features": "category"}),
        parts,
        folder,
        k=(10,),
        device="cpu",
    )
    client = serving(folder)
    assert parts.train.item_table is not None
    first, second = parts.train.item_table["category"].unique().sort().to_list()[:2]
    put(
        client,
        {"id": "a", "category": first},
        {"id": "b", "category": first},
        {"id": "c", "category": second},
        {"id": "d", "category": "never"},
    )
    found = client.post("/v1/recommend", json={"user": int(parts.train.query_ids.ids[0]), "k": 100}).json()["results"][
        0
    ]["items"]
    scores = {item["id"]: item["score"] for item in found}
    assert scores["a"] == pytest.approx(scores["b"], abs=1e-6)
    assert abs(scores["a"] - scores["c"]) > 1e-4
    assert np.isfinite(scores["d"])


def test_a_history_tower_reads_the_history(parts: Split, serving: Callable[..., TestClient], tmp_path: Path) -> None:
    """A user's own history as a query gives the user's list; histories are in time order."""
    folder = tmp_path / "run"
    fit(
        build("ssl_pop", parts.train, {"dim": 8, "epochs": 1, "query_tower": "history"}),
        parts,
        folder,
        k=(10,),
        device="cpu",
    )
    client = serving(folder)
    user = parts.train.query_ids.ids[4]
    about = client.get(f"/v1/users/{user}").json()
    assert about["ordered"]
    history = [taken["id"] for taken in about["history"]]
    by_user = client.post("/v1/recommend", json={"user": user, "k": 5, "exclude_seen": False}).json()["results"][0][
        "items"
    ]
    by_history = client.post("/v1/recommend", json={"history": history, "k": 5, "exclude_seen": False}).json()[
        "results"
    ][0]["items"]
    assert [item["id"] for item in by_user] == [item["id"] for item in by_history]
    assert client.get("/v1/info").json()["run"]["history_by"] == "tower"
    assert client.put("/v1/items", json={"items": [{"id": "new", "like": history[:1]}]}).status_code == 200
    longer = client.post("/v1/recommend", json={"history": [*history, "new", "no such"], "k": 5, "exclude_seen": False})
    assert longer.json()["results"][0]["unknown"] == ["new", "no such"]
    assert longer.json()["results"][0]["items"] == by_history
    by_mean = client.post("/v1/recommend", json={"history": ["new"], "k": 5}).json()["results"][0]
    assert set(by_mean) == {"query", "items"}
    assert "new" not in [item["id"] for item in by_mean["items"]]


def test_no_item_is_like_itself(truth: MadeRun, client: TestClient) -> None:
    """An item that is like itself is rejected, since the next run could not place it."""
    put(client, {"id": 900, "like": [truth.item_ids[0]]})
    for like in ([900], [truth.item_ids[1], "900"]):
        answer = client.put("/v1/items", json={"items": [{"id": 900, "like": like}]})
        assert (answer.status_code, answer.json()["detail"]) == (422, "item 900 cannot be like itself")


def test_an_item_may_be_like_one_that_was_changed_since(truth: MadeRun, serving: Callable[..., TestClient]) -> None:
    """Changes are ordered by each item's last one, so an item may precede those it is like; it is still placed."""
    client = serving(truth.folder)
    put(client, {"id": 1, "like": [truth.item_ids[5]]})
    put(client, {"id": 2, "like": [1]})
    put(client, {"id": 1, "title": "later"})
    client.stop()  # type: ignore[attr-defined]
    again = serving(truth.folder)
    assert again.get("/v1/info").json()["run"]["waiting"] == 0
    assert {1, 2} <= set(ids(again, {"item": truth.item_ids[5], "k": 60}))


def test_single_precision_is_shown_as_it_was_written(tmp_path: Path, serving: Callable[..., TestClient]) -> None:
    """A price of 5.95 in a float32 column is shown as 5.95, and a filter finds it by that value."""
    truth = make_run(tmp_path / "run")
    assert truth.table is not None
    table = truth.table.with_columns(price=pl.Series([5.95] * len(truth.table), dtype=pl.Float32))
    table.write_parquet(truth.folder / "item_table.parquet")
    approve(truth.folder)
    client, where = serving(truth.folder), [{"column": "price", "op": "=", "value": 5.95}]
    put(
        client, {"id": truth.item_ids[0], "title": "changed"}, {"id": "new", "price": 5.95, "like": [truth.item_ids[1]]}
    )
    found = client.post(
        "/v1/recommend", json={"user": "user-01", "k": 61, "exclude_seen": False, "fields": ["price"], "where": where}
    )
    assert [item["price"] for item in found.json()["results"][0]["items"]] == [5.95] * 61
    assert [client.get(f"/v1/items/{item}").json()["columns"]["price"] for item in (*truth.item_ids[:2], "new")] == [
        5.95
    ] * 3


def test_items_like_others_are_placed_together(
    truth: MadeRun, tmp_path: Path, serving: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start joins all items to the index at once, in any order: each of a chain of 3,000 is like the one after it."""
    store, last = Store(tmp_path / "items.sqlite"), 2_999
    chain = [Change(f"new-{at}", like=[f"new-{at + 1}" if at < last else truth.item_ids[3]]) for at in range(last + 1)]
    circle = [Change("egg", like=["hen"]), Change("hen", like=["egg"])]
    store.write([*chain, *circle, Change("both", like=["new-7", truth.item_ids[4]])])
    store.close()
    added, add = list[int](), Index.add
    monkeypatch.setattr(Index, "add", lambda self, ids, vectors: (added.append(len(ids)), add(self, ids, vectors))[1])
    served = serving(truth.folder, store=tmp_path / "items.sqlite").service.registry.served()  # type: ignore[attr-defined]
    assert added == [3_001]
    assert served.waiting.keys() == {"egg", "hen"}
    at = served.catalogue.find([f"new-{row}" for row in (0, 1_500, last)])
    np.testing.assert_allclose(served.vectors(at), np.stack([truth.items[3]] * 3), rtol=1e-4)
    mean = (truth.items[3] + truth.items[4]) / 2
    expected = mean / np.linalg.norm(mean) * np.linalg.norm(truth.items[[3, 4]], axis=1).mean()
    np.testing.assert_allclose(served.vectors(served.catalogue.find(["both"]))[0], expected, rtol=1e-4)


@pytest.mark.parametrize(("score", "bias"), [("cosine", False), ("dot", True)])
def test_scaled_columns_place_a_new_item(
    parts: Split, serving: Callable[..., TestClient], tmp_path: Path, score: str, bias: bool
) -> None:
    """A new item with the price of a known one gets the vector of that price, the mean id and the mean bias."""
    table = parts.train.item_table
    assert table is not None
    prices = np.linspace(1.0, 9.0, len(table))
    table = table.with_columns(price=pl.Series(prices, dtype=pl.Float64))
    parts = replace(parts, train=replace(parts.train, item_table=table))
    settings = {"dim": 8, "epochs": 1, "item_features": "price", "score": score, "item_bias": bias}
    fit(build("ssl_pop", parts.train, settings), parts, tmp_path / "run", k=(10,), device="cpu")
    client = serving(tmp_path / "run")
    put(client, {"id": "cheap", "price": 1.0}, {"id": "dear", "price": 9.0}, {"id": "unpriced", "title": "x"})
    served = client.service.registry.served()  # type: ignore[attr-defined]
    model, tower = served.trained.model, served.trained.model.item
    z = (prices - prices.mean()) / prices.std()
    for name, value in (("cheap", z[0]), ("dear", z[-1]), ("unpriced", 0.0)):
        known = torch.cat([tower.inputs[0].weight.mean(0), torch.tensor([value], dtype=torch.float32)])
        with torch.no_grad():
            vector = tower.layers(known[None])[0]
            vector = vector / vector.norm() if score == "cosine" else vector
            if bias:
                vector = torch.cat([vector, model.item_bias.weight.mean(0)])
        placed = served.index.vectors_of([served.catalogue.find_one(name)])[0]
        np.testing.assert_allclose(placed, vector.numpy(), rtol=0.1, atol=0.02)


def test_a_run_without_texts_places_none(truth: MadeRun, client: TestClient) -> None:
    """A text alone places no item where the tower does not read texts."""
    answer = client.put("/v1/items", json={"items": [{"id": "new", "text": "words"}]})
    assert answer.status_code == 422
    assert "text" in answer.json()["detail"]


def test_a_value_can_be_taken_back(truth: MadeRun, client: TestClient) -> None:
    """A column set to null has no value: the item fails every condition on it."""
    item = truth.item_ids[7]
    put(client, {"id": item, "price": None})
    assert client.get(f"/v1/items/{item}").json()["columns"]["price"] is None
    where = [{"column": "price", "op": ">=", "value": -1}]
    listed = ids(client, {"user": "user-01", "k": 60, "exclude_seen": False, "where": where}, "/v1/recommend")
    assert sorted([*listed, item]) == truth.item_ids
